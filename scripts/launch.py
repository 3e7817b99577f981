"""The command `spmd-launch` of this clone (spmd-core/src/spmd_launch.py), in any Python."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "packages" / "spmd-core" / "src"))

import spmd_launch

if __name__ == "__main__":
    sys.exit(spmd_launch.main(prog="scripts/launch.sh"))
