"""Inspection of programs: their text, what moves between devices, why one was compiled.

    debugging.stablehlo(loss)          the recorded program, with shardings
    debugging.passes(loss)             its operations after each pass before it is lowered
    debugging.hlo(loss)                the program that each device runs
    debugging.collectives()            bytes between devices, by mesh axes, torch operation and line
    debugging.explain_recompile()      what changed since the most similar earlier program
    with debugging.source_lines():     operations keep the user's line and module
    debugging.visualize_sharding(s)    a table of which device holds which block
    with debugging.verify():           each program runs twice, partitioned and on one device
    debugging.profiler                 traces for TensorBoard and Perfetto
    debugging.allow_execution(False)   an error where a program would run: finds reads of values
    debugging.is_planning()            whether a plan is in progress, in which nothing has a value
    debugging.versions()               the versions of torch, jax and libtpu, for a report

Only `verify` runs a program.
"""

from spmd_core.debugging import profiler as profiler
from spmd_core.debugging import recompile_warnings as recompile_warnings
from spmd_core.debugging.communication import Cause as Cause
from spmd_core.debugging.communication import Collective as Collective
from spmd_core.debugging.communication import Collectives as Collectives
from spmd_core.debugging.execution import allow_execution as allow_execution
from spmd_core.debugging.graph_difference import Change as Change
from spmd_core.debugging.programs import collectives as collectives
from spmd_core.debugging.programs import graph_hash as graph_hash
from spmd_core.debugging.programs import hlo as hlo
from spmd_core.debugging.programs import operations as operations
from spmd_core.debugging.programs import passes as passes
from spmd_core.debugging.programs import source_lines as source_lines
from spmd_core.debugging.programs import stablehlo as stablehlo
from spmd_core.debugging.recompiles import Recompile as Recompile
from spmd_core.debugging.recompiles import explain_recompile as explain_recompile
from spmd_core.debugging.visualize import visualize_sharding as visualize_sharding
from spmd_core.debugging.visualize import visualize_tensor_sharding as visualize_tensor_sharding
from spmd_core.program.execution import verify as verify
from spmd_core.releases import Versions as Versions
from spmd_core.releases import versions as versions
from spmd_core.runtime.abstract import is_planning as is_planning
