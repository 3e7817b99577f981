"""Loops and branches that run on the device: no value is read on the host."""

from spmd_core.control_flow.branches import cond as cond
from spmd_core.control_flow.loops import fori_loop as fori_loop
from spmd_core.control_flow.loops import while_loop as while_loop
from spmd_core.control_flow.scans import scan as scan
