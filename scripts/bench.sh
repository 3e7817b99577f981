#!/usr/bin/env bash
# Measures the published plots again, on emulated devices or on those at hand, and writes a report
# under results/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "${1:-}" = "--help" ] || [ "${1:-}" = "-h" ]; then
  cat <<'HELP'
usage: scripts/bench.sh [options of python -m benchmarks.published]

Makes .venv with the pinned versions on the first run, then measures GPT-2's speed and memory,
ResNet-50's largest batch, Llama's plans, and overheads. Writes report.html, report.md, plots,
results.json and TensorBoard logs. After Ctrl-C, the same command goes on.

  --quick             everything in small, on emulated CPU devices, about 10 minutes on 2 quiet
                      cores (the default)
  --full              larger models, more repeats: hours
  --only NAMES        some of gpt2,hbm,resnet,llama,overheads
  --topology v4-16    memory and batches by compilation for TPUs that are not there; needs libtpu:
                      pip install 'spmd-core[tpu]'
  --device cuda       on the GPUs of this machine, with the Python that is active: it has the CUDA
                      builds of torch and jax
  --out DIR           where to write, and to go on (default: results/<date>-<hardware>)
  PYTHON=python3.11   the interpreter that makes .venv
HELP
  exit 0
fi

# .venv has the CPU builds of torch and jax.
if [[ " $* " != *" cuda "* && " $* " != *"=cuda "* ]]; then
  # shellcheck source=scripts/setup.sh
  . scripts/setup.sh
  setup_environment
fi
exec python -m benchmarks.published "$@"
