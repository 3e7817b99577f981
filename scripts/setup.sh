# Sourced by the other scripts: makes .venv with the pinned versions if it is missing or out of
# date, and activates it. Expects the working directory to be the root of the repository.

setup_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.11 python3 python; do
    if [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "Python 3.11 or later is needed and none was found; install it, or name one with" \
    "PYTHON=/path/to/python3.11." >&2
  return 1
}

setup_environment() {
  local packages=() stamp=.venv/installed.sha256 fingerprint file
  for file in packages/*/pyproject.toml; do
    packages+=(-e "$(dirname "$file")")
  done
  if [ ! -x .venv/bin/python ]; then
    local python
    python=$(setup_python) || return 1
    echo "setup: making .venv with $("$python" --version)"
    "$python" -m venv .venv || return 1
  fi
  # The stamp identifies what was installed, so that the second run starts at once.
  fingerprint=$(cat constraints.txt packages/*/pyproject.toml scripts/setup.sh | .venv/bin/python \
    -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
  if [ "$(cat "$stamp" 2>/dev/null)" != "$fingerprint" ]; then
    echo "setup: installing $(grep -c '==' constraints.txt) pinned packages into .venv" \
      "(a few minutes on a fresh machine)"
    # One command for everything: a later one could replace the CPU build of torch.
    .venv/bin/python -m pip install -qq --disable-pip-version-check --no-input \
      --requirement constraints.txt --constraint constraints.txt "${packages[@]}" || return 1
    echo "$fingerprint" >"$stamp"
    echo "setup: done"
  fi
  # shellcheck disable=SC1091
  . .venv/bin/activate
}
