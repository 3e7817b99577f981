#!/usr/bin/env bash
# Installs the development set with another torch and jax than the pinned ones, into the Python of
# the active environment. tox's environments `oldest` and `newest` use it.
#
# usage: scripts/other_releases.sh TORCH TORCHVISION JAX    (versions, as pip takes them)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

pins=$(mktemp)
trap 'rm -f "$pins"' EXIT
grep -vE '^(torch|torchvision|jax|jaxlib|libtpu)==' constraints.txt >"$pins"
# An older jaxlib can't print the programs of a newer libtpu: jax's extra names the one that fits.
jax=jax
[ "$(uname -sm)" != "Linux x86_64" ] || jax='jax[tpu]'
packages=()
for file in packages/*/pyproject.toml; do
  packages+=(-e "$(dirname "$file")")
done
# One command for everything, so that pip finds versions that go together.
python -m pip install --quiet --requirement "$pins" \
  "torch==$1" "torchvision==$2" "$jax==$3" "jaxlib==$3" "${packages[@]}"
