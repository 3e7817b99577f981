"""Looking inside: programs as text, what moves between devices, why a program was compiled.

    debugging.stablehlo(loss)          what is recorded, with shardings
    debugging.hlo(loss)                what each device runs
    debugging.collectives()            what moves between devices: bytes, mesh axes, torch operation, line
    debugging.explain_recompile()      what changed since the nearest program before
    with debugging.source_lines():     operations remember the user's line and module

Nothing here runs a program.
"""

from spmd_core.debugging.communication import Cause as Cause
from spmd_core.debugging.communication import Collective as Collective
from spmd_core.debugging.communication import Collectives as Collectives
from spmd_core.debugging.graph_difference import Change as Change
from spmd_core.debugging.programs import collectives as collectives
from spmd_core.debugging.programs import graph_hash as graph_hash
from spmd_core.debugging.programs import hlo as hlo
from spmd_core.debugging.programs import operations as operations
from spmd_core.debugging.programs import source_lines as source_lines
from spmd_core.debugging.programs import stablehlo as stablehlo
from spmd_core.debugging.recompiles import Recompile as Recompile
from spmd_core.debugging.recompiles import explain_recompile as explain_recompile
