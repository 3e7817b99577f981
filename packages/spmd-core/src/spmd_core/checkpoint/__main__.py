"""Lists, verifies and converts a folder of checkpoints, on a machine without devices.

python -m spmd_core.checkpoint ls runs/gpt2
python -m spmd_core.checkpoint show runs/gpt2 --step 200
python -m spmd_core.checkpoint verify runs/gpt2
python -m spmd_core.checkpoint convert runs/gpt2 model.safetensors
python -m spmd_core.checkpoint convert model.safetensors runs/gpt2 --step 0
"""

import sys

from spmd_core.checkpoint.command import main

if __name__ == "__main__":
    sys.exit(main())
