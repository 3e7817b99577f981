#!/usr/bin/env bash
# Everything a change must pass: style, types, tests on emulated devices, in one of three tiers.
set -uo pipefail

usage() {
  cat <<'HELP'
usage: scripts/test.sh [--fast | --all] [arguments for pytest]

Makes .venv with the pinned versions on the first run, then runs ruff (rules, format), codespell,
mypy, scripts/docs.sh beside these (not with --fast or arguments) and pytest, and fails if any of
them fails.

  --fast    while you work, at most 4 minutes: every folder, without the tests marked `slow`, with
            at most 40 examples of each property; 8 devices
  (none)    what CI runs, 15 to 20 minutes: everything but the tests marked `exhaustive`, with at
            most 60 examples of each property; first what depends on the number of devices (marked
            `one_device`) on 1 device, then all on 8
  --all     before a release, hours: every test on 1, 2 and 8 devices, compiled as users compile,
            and the whole of torch's operator database

  SPMD_TEST_DEVICES=1|2|8   only on so many emulated devices
  SPMD_TEST_JOBS=3          worker processes; one process where arguments are given, so that
                            -s and --pdb work
  SPMD_TEST_PJRT_PLUGIN=x.so   also tests of a plugin that jax loads (docs/guides/plugins.md)
  PYTHON=python3.11         the interpreter that makes .venv

examples:
  scripts/test.sh --fast
  scripts/test.sh packages/spmd-core/tests/system/test_tiny.py -x
  SPMD_TEST_DEVICES=1 scripts/test.sh --fast -k views
HELP
}

export SPMD_TEST_TIER=default
case "${1:-}" in
  --help | -h) usage && exit 0 ;;
  --fast) SPMD_TEST_TIER=fast && shift ;;
  --all) SPMD_TEST_TIER=all && shift ;;
esac

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
# shellcheck source=scripts/setup.sh
. scripts/setup.sh
setup_environment || exit 1
# Containers often set it. Each worker, and each process that a test starts, would compile all
# sources again.
unset PYTHONDONTWRITEBYTECODE

failed=()
step() {
  local name=$1 start=$SECONDS
  shift
  echo "== $name"
  "$@" || failed+=("$name")
  [ "${is_last:-no}" = yes ] || echo "== $name: $((SECONDS - start)) s"
}

# While you work, a change rarely needs it: links and samples of the documents are tests, too. It is
# built beside the checks below, as each is one process, and says what it has to say after them.
site=
end_site() {
  [ -z "$site" ] || kill -- "-$site" 2>/dev/null
  rm -f "$site_said"
}
site_built() {
  wait "$site"
  local code=$?
  site=
  cat "$site_said"
  return "$code"
}
if [ "$#" -eq 0 ] && [ "$SPMD_TEST_TIER" != fast ]; then
  site_said=$(mktemp) || exit 1
  trap end_site EXIT
  set -m # a process group of its own, which ends with this script
  scripts/docs.sh >"$site_said" 2>&1 </dev/null &
  site=$!
  set +m
fi

step "ruff check" ruff check --quiet .
step "ruff format" ruff format --check --quiet .
step "codespell" codespell
step "mypy" mypy --no-error-summary packages/*/src benchmarks examples
[ -z "$site" ] || step "site, begun before ruff" site_built

# Three for two cores: some tests wait for processes that they start.
workers=()
[ "$#" -gt 0 ] || workers=(-n "${SPMD_TEST_JOBS:-3}" --dist worksteal)
# What takes long is said in CI's log, so that it is seen to grow.
[ -z "${CI:-}" ] || workers+=(--durations=25)

on_devices() {
  local count=$1
  shift
  SPMD_TEST_DEVICES=$count python -m pytest ${workers[@]+"${workers[@]}"} "$@"
  local code=$?
  # 5: the arguments select no test; a mistake where they are the only pass.
  [ "$code" -eq 5 ] && [ "$is_last" = no ] && return 0
  return "$code"
}

# Last comes the run that counts, so that the last lines are its summary.
is_last=no
if [ -z "${SPMD_TEST_DEVICES:-}" ]; then
  if [ "$SPMD_TEST_TIER" = default ]; then
    step "pytest, 1 device" on_devices 1 -q -m one_device "$@"
  elif [ "$SPMD_TEST_TIER" = all ]; then
    step "operator database, 1 device" python -m benchmarks.opinfo
    step "operator database, 8 devices" python -m benchmarks.opinfo --devices 8
    step "pytest, 1 device" on_devices 1 "$@"
    step "pytest, 2 devices" on_devices 2 "$@"
  fi
fi
is_last=yes
[ "${#failed[@]}" -eq 0 ] || echo "failed so far: ${failed[*]}"
step "pytest, ${SPMD_TEST_DEVICES:-8} devices, tier $SPMD_TEST_TIER" \
  on_devices "${SPMD_TEST_DEVICES:-8}" "$@"

[ "${#failed[@]}" -eq 0 ] && exit 0
# On stderr, so that pytest's own closing line stays the last one of the report.
printf 'FAILED: %s\n' "${failed[@]}" >&2
exit 1
