"""Plans a script for a topology that is not there.

    python -m spmd_core.plan --topology v4-16 -- python -m examples.gpt2.train --mesh fsdp=8
    python -m spmd_core.plan --topology cpu-64 -- python train.py

The script runs here as it is, up to its steps that compile nothing new; its programs are compiled
for the topology's devices and not run. For functions there is `spmd_core.plan`.
"""

import sys

from spmd_core.planner.command import run
from spmd_core.planner.plan import plan

if __name__ == "__main__":
    sys.exit(run())

# An import of this module would put the module where `spmd_core` has the function.
sys.modules[__name__] = plan  # type: ignore[assignment]
