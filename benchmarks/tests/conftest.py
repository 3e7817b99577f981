"""Sets up 8 emulated devices (or SPMD_TEST_DEVICES) in SPMD mode for the benchmarks' tests."""

import os

import spmd_core as spmd

spmd.simulate(int(os.environ.get("SPMD_TEST_DEVICES", "8")))
spmd.use_spmd()
