"""Figures of what ran: counters, programs, FLOPs, utilisation, memory, collectives, step times.

metrics.report()               counters, host fallbacks and programs as a table
metrics.count_flops()          a step's FLOPs, by torch's formulas and by XLA's cost analysis
metrics.mfu(...)               utilisation by three formulas, against metrics.device_peak(...)
metrics.memory_use()           a step's peak memory, from the compiler and from the device
metrics.memory_stats()         the statistics of a device's allocator
metrics.traffic()              a step's collectives by kind and mesh axes
metrics.StepTimes()            step times: median and spread, without the steps that compiled
with metrics.time_first_step() as first:   recording, tracing, compiling, ...
"""

from spmd_core.chips import Chip as Chip
from spmd_core.chips import chip_of as chip_of
from spmd_core.counters import HostFallback as HostFallback
from spmd_core.counters import ProgramRecord as ProgramRecord
from spmd_core.counters import count as count
from spmd_core.counters import count_fallback as count_fallback
from spmd_core.counters import counter as counter
from spmd_core.counters import counters as counters
from spmd_core.counters import host_fallbacks as host_fallbacks
from spmd_core.counters import programs as programs
from spmd_core.counters import record_program as record_program
from spmd_core.counters import report as report
from spmd_core.counters import reset as reset
from spmd_core.metrics.first_step import FirstStep as FirstStep
from spmd_core.metrics.first_step import time_first_step as time_first_step
from spmd_core.metrics.flops import FlopCount as FlopCount
from spmd_core.metrics.flops import count_flops as count_flops
from spmd_core.metrics.step_programs import MemoryUse as MemoryUse
from spmd_core.metrics.step_programs import Traffic as Traffic
from spmd_core.metrics.step_programs import memory_use as memory_use
from spmd_core.metrics.step_programs import step_program as step_program
from spmd_core.metrics.step_programs import traffic as traffic
from spmd_core.metrics.step_times import StepTimes as StepTimes
from spmd_core.metrics.utilisation import ModelSize as ModelSize
from spmd_core.metrics.utilisation import Peak as Peak
from spmd_core.metrics.utilisation import device_kind as device_kind
from spmd_core.metrics.utilisation import device_peak as device_peak
from spmd_core.metrics.utilisation import flops_per_token as flops_per_token
from spmd_core.metrics.utilisation import known_peak as known_peak
from spmd_core.metrics.utilisation import measured_peak as measured_peak
from spmd_core.metrics.utilisation import mfu as mfu
from spmd_core.runtime.processes import memory_stats as memory_stats
