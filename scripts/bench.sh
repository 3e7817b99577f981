#!/usr/bin/env bash
# Trains the small GPT-2 preset on 8 emulated devices and on 1, and writes a table, a plot and
# TensorBoard logs under results/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "${1:-}" = "--help" ] || [ "${1:-}" = "-h" ]; then
  cat <<'HELP'
usage: scripts/bench.sh [options of python -m benchmarks.gpt2_spmd]

Makes .venv with the pinned versions on the first run, then trains the small preset on the default
text: sharded over 8 emulated CPU devices, and on 1 device. Takes a few minutes. Fetches nothing but
Python packages.

  --steps N      optimizer steps per run          --preset NAME   a preset of examples.gpt2.train
  --mesh SPEC    the sharded run's mesh           --out DIR       where to write (default: results)
  PYTHON=python3.11    the interpreter that makes .venv
HELP
  exit 0
fi

# shellcheck source=scripts/setup.sh
. scripts/setup.sh
setup_environment
exec python -m benchmarks.gpt2_spmd "$@"
