"""Eight emulated devices, or SPMD_TEST_DEVICES of them, in SPMD mode, for the tests of the benchmarks."""

import os

import spmd_core as spmd

spmd.simulate(int(os.environ.get("SPMD_TEST_DEVICES", "8")))
spmd.use_spmd()
