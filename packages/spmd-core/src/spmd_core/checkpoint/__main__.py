"""Lists and verifies a folder of checkpoints, on a machine without devices.

python -m spmd_core.checkpoint ls runs/gpt2
python -m spmd_core.checkpoint show runs/gpt2 --step 200
python -m spmd_core.checkpoint verify runs/gpt2
"""

import sys

from spmd_core.checkpoint.command import main

if __name__ == "__main__":
    sys.exit(main())
