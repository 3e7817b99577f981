#!/usr/bin/env bash
# Runs several processes of one program on this machine, over the loopback address.
set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"
# The environment that is active, or that of this clone.
if [ -z "${VIRTUAL_ENV:-}" ] && [ -f "$here/../.venv/bin/activate" ]; then
  # shellcheck source=/dev/null
  . "$here/../.venv/bin/activate"
fi
exec python "$here/launch.py" "$@"
