#!/usr/bin/env bash
# Builds the distributions of all packages, checks them, tags the commit, and says what to upload.
# It uploads nothing.
#
# usage: scripts/release.sh [--no-tag] [--reuse] [--help]
#
#   --no-tag   builds and checks only; also with uncommitted changes
#   --reuse    imports the wheels beside the packages of the active environment, or .venv, on its
#              Python alone: no download of torch and jax. Without it, each Python that is there
#              (3.11, 3.13) gets a bare environment with what the wheels require, which is
#              gigabytes where pip prefers a CUDA build of torch: PIP_CONSTRAINT=constraints.txt takes
#              the pinned one
#
# A release: set __version__ in packages/spmd-core/src/spmd_core/version.py and `version` in the
# other packages' pyproject.toml, commit, run this. A version with .dev is built and not tagged.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

unset PYTHONPATH # the sources would hide the wheels
environment=${VIRTUAL_ENV:-.venv}
tag=1 reuse=0
for option in "$@"; do
  case "$option" in
    --no-tag) tag=0 ;;
    --reuse) reuse=1 ;;
    --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" && exit 0 ;;
    *) echo "error: no option ${option}; see scripts/release.sh --help" >&2 && exit 2 ;;
  esac
done
step() { echo "release: $*"; }
fail() { echo "error: $*" >&2 && exit 1; }

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' packages/spmd-core/src/spmd_core/version.py)
for package in spmd-data torch-xla-compat; do
  grep -qx "version = \"$version\"" "packages/$package/pyproject.toml" ||
    fail "all packages have one version; $package has another than $version. Set it there."
done
if [ "$tag" = 1 ]; then
  [ -z "$(git status --porcelain)" ] ||
    fail "a tag names a commit; there are uncommitted changes. Commit them, or pass --no-tag."
  ! git rev-parse -q --verify "refs/tags/v$version" >/dev/null ||
    fail "the tag v$version is there already. Set another version."
fi

# --- Build ----------------------------------------------------------------------------------------
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
out=dist/$version
rm -rf "$out" && mkdir -p "$out"
python=${PYTHON:-python3.11}
command -v "$python" >/dev/null || python=python3
step "tools: build and twine, in an environment of their own"
"$python" -m venv "$work/tools"
"$work/tools/bin/python" -m pip install -q --disable-pip-version-check build twine
for package in spmd-core spmd-data torch-xla-compat; do
  step "building $package $version"
  # Of a copy, as setuptools leaves folders beside the sources.
  mkdir -p "$work/source" && cp -r "packages/$package" "$work/source/"
  find "$work/source/$package" \( -name '*.egg-info' -o -name __pycache__ -o -name build \) \
    -prune -exec rm -rf {} +
  "$work/tools/bin/python" -m build -o "$out" "$work/source/$package" >"$work/log" 2>&1 ||
    { tail -20 "$work/log" >&2 && fail "$package could not be built."; }
done

# --- Check ----------------------------------------------------------------------------------------
step "checking metadata"
"$work/tools/bin/python" -m twine check --strict "$out"/*
for file in "$out"/*.whl; do
  "$python" - "$file" <<'EOF'
import sys, zipfile
names = zipfile.ZipFile(sys.argv[1]).namelist()
tests = [name for name in names if "/tests/" in name or name.startswith("tests/")]
sys.exit(f"error: {sys.argv[1]} has tests, such as {tests[0]}" if tests else 0)
EOF
done
# Imports what a user imports, and runs a program on two devices.
cat >"$work/program.py" <<'EOF'
import sys, torch, spmd_core as spmd, spmd_data, torch_xla
spmd.simulate(2), spmd.use_spmd()
mesh = spmd.Mesh(range(2), (2,), ("data",))
x = spmd.mark_sharding(torch.ones(4, 4).to("xla"), mesh, ("data",))
assert (x @ x).sum().item() == 64 and sys.argv[1] == spmd.__version__
assert spmd.__file__.startswith(sys.prefix), spmd.__file__
EOF
check_in() { # python of a new environment with the wheels
  (cd "$work" && "$1" program.py "$version")
  for name in spmd-plan spmd-checkpoint spmd-launch; do
    (cd "$work" && "$(dirname "$1")/$name" --help >/dev/null) || fail "$name --help fails."
  done
  step "imported by $("$1" --version)"
}
if [ "$reuse" = 1 ]; then
  "$environment/bin/python" -m venv "$work/reused"
  "$work/reused/bin/python" -m pip install -q --disable-pip-version-check --no-deps "$out"/*.whl
  site=$("$work/reused/bin/python" -c 'import site; print(site.getsitepackages()[0])')
  # After the environment's own packages. A .pth file there is not read, so no editable install is.
  "$environment/bin/python" -c 'import site; print(site.getsitepackages()[0])' >"$site/z.pth"
  check_in "$work/reused/bin/python"
else
  for release in 3.11 3.13; do
    if ! "python$release" --version >/dev/null 2>&1; then
      step "no Python $release here: not imported by it"
      continue
    fi
    "python$release" -m venv "$work/bare$release"
    "$work/bare$release/bin/python" -m pip install -q --disable-pip-version-check "$out"/*.whl
    check_in "$work/bare$release/bin/python"
  done
fi

for package in spmd-core spmd-data torch-xla-compat; do
  grep -q '^\[project.urls\]' "packages/$package/pyproject.toml" ||
    step "packages/$package/pyproject.toml has no [project.urls]: add them where there is an address"
done

# --- Tag ------------------------------------------------------------------------------------------
case "$tag$version" in
  0*) step "not tagged, as --no-tag says" ;;
  *.dev*) step "not tagged: $version is a version of development" ;;
  *)
    git tag -a "v$version" -m "Release $version"
    step "tagged v$version; 'git push origin v$version' publishes the tag"
    ;;
esac
step "nothing was uploaded; 'twine upload $out/*' would upload:"
for file in "$out"/*; do
  echo "  $(wc -c <"$file") bytes  $(sha256sum "$file" | cut -c1-64 | head -c 16)...  $file"
done
