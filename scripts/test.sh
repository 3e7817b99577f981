#!/usr/bin/env bash
# Everything a change must pass: style, types, tests on emulated devices.
set -uo pipefail

if [ "${1:-}" = "--help" ] || [ "${1:-}" = "-h" ]; then
  cat <<'HELP'
usage: scripts/test.sh [arguments for pytest]

Makes .venv with the pinned versions on the first run, then runs ruff (rules, format), mypy and pytest, and fails if any of them fails.

  SPMD_TEST_DEVICES=1|2|8   number of emulated devices; the whole suite runs on them. Not set: first the tests
                            marked one_device on 1 device, then the whole suite on 8.
  SPMD_TEST_JOBS=2          worker processes for the whole suite; one process where arguments are given, so that -s and --pdb work
  PYTHON=python3.11         the interpreter that makes .venv

examples:
  scripts/test.sh
  scripts/test.sh packages/spmd-core/tests/test_tiny.py -x
  SPMD_TEST_DEVICES=1 scripts/test.sh -m 'not slow'
HELP
  exit 0
fi

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
# shellcheck source=scripts/setup.sh
. scripts/setup.sh
setup_environment || exit 1

failed=()
step() {
  local name=$1
  shift
  echo "== $name"
  "$@" || failed+=("$name")
}

step "ruff check" ruff check --quiet .
step "ruff format" ruff format --check --quiet .
step "mypy" mypy --no-error-summary packages/*/src benchmarks

workers=()
[ "$#" -gt 0 ] || workers=(-n "${SPMD_TEST_JOBS:-2}" --dist worksteal)

one_device_pass() {
  SPMD_TEST_DEVICES=1 python -m pytest -q -m one_device ${workers[@]+"${workers[@]}"} "$@"
  local code=$?
  [ "$code" -eq 5 ] && return 0 # 5: the arguments select no test with this mark
  return "$code"
}
# Last comes the run that counts, so that the last lines are its summary.
[ -n "${SPMD_TEST_DEVICES:-}" ] || step "pytest, 1 device" one_device_pass "$@"
export SPMD_TEST_DEVICES=${SPMD_TEST_DEVICES:-8}
if [ "${#failed[@]}" -gt 0 ]; then
  echo "failed so far: ${failed[*]}"
fi
step "pytest, $SPMD_TEST_DEVICES devices" python -m pytest ${workers[@]+"${workers[@]}"} "$@"

[ "${#failed[@]}" -eq 0 ] && exit 0
# On stderr, so that pytest's own closing line stays the last one of the report.
printf 'FAILED: %s\n' "${failed[@]}" >&2
exit 1
