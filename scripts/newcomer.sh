#!/usr/bin/env bash
# The path of a newcomer, timed: a clone in an empty home, the README's commands, the tutorial.
set -euo pipefail

usage() {
  cat <<'HELP'
usage: scripts/newcomer.sh [--without-bench]

Clones the last commit of this repository into a new folder with an empty home, where no variable of
this shell is set but those of pip's and TLS's certificates, and times what the README tells a
newcomer to do: scripts/bench.sh, scripts/test.sh --fast, and the cells of
docs/tutorials/ten_minutes.md, pasted into Python one by one. Downloads what these install. What they
print is in a file for each, and the folder is removed if all succeed.

  --without-bench   not scripts/bench.sh, which takes ten minutes of two quiet cores
  PYTHON=python3.11   the interpreter that makes .venv
HELP
}

with_bench=yes
case "${1:-}" in
  --help | -h) usage && exit 0 ;;
  --without-bench) with_bench=no ;;
  "") ;;
  *) usage >&2 && exit 2 ;;
esac

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
echo "newcomer: in $work"
mkdir "$work/home"
kept=(HOME="$work/home" PATH="$PATH" LANG=C.UTF-8)
for name in PYTHON PIP_CERT PIP_FIND_LINKS PIP_DEFAULT_TIMEOUT SSL_CERT_FILE OPENBLAS_CORETYPE \
  OPENBLAS_L2_SIZE; do
  [ -z "${!name:-}" ] || kept+=("$name=${!name}")
done

timed() { # name, command...
  local name=$1 start=$SECONDS
  shift
  if ! (cd "$work/clone" && env -i "${kept[@]}" "$@") >"$work/$name.txt" 2>&1; then
    tail -20 "$work/$name.txt" >&2
    echo "newcomer: $name failed after $((SECONDS - start)) s; all of it is in $work/$name.txt" >&2
    exit 1
  fi
  echo "newcomer: $name: $((SECONDS - start)) s"
}

mkdir "$work/clone"
timed clone git clone -q "$here" .
timed install bash -c '. scripts/setup.sh && setup_environment'
[ "$with_bench" = no ] || timed bench scripts/bench.sh
timed tests scripts/test.sh --fast
# As in a session: each cell is compiled and run by itself, in one namespace.
cat >"$work/cells.py" <<'PY'
import re, sys, time
from pathlib import Path

names = {"__name__": "__main__"}
for cell in re.findall(r"```\{code-cell\} python\n(.*?)```", Path(sys.argv[1]).read_text(), re.S):
    start = time.perf_counter()
    exec(compile(cell, "cell", "exec"), names)
    print(f"cell of {len(cell.splitlines())} lines: {time.perf_counter() - start:.1f} s", flush=True)
PY
timed tutorial .venv/bin/python "$work/cells.py" docs/tutorials/ten_minutes.md
cat "$work/tutorial.txt"
rm -rf "$work"
