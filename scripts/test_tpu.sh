#!/usr/bin/env bash
# Runs pytest on the TPU of this machine, in the active environment; says SKIPPED and succeeds
# where there is no TPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# A TPU virtual machine shows its chips as /dev/accel* (v4 and before) or /dev/vfio/<number> (v5
# and after).
if ! compgen -G '/dev/accel[0-9]*' >/dev/null && ! compgen -G '/dev/vfio/[0-9]*' >/dev/null; then
  echo "SKIPPED: no TPU on this machine (neither /dev/accel* nor /dev/vfio/* exists)."
  exit 0
fi
jax_version=$(sed -n 's/^jax==//p' constraints.txt)
python -m pip install --quiet --constraint constraints.txt "jax[tpu]==${jax_version}"
PJRT_DEVICE=TPU exec python -m pytest "$@"
