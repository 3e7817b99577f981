#!/usr/bin/env bash
# Builds the site from docs/ and the other documents of the repository, with warnings as errors.
set -euo pipefail

usage() {
  cat <<'HELP'
usage: scripts/docs.sh [--fresh]

Makes .venv on the first run, then writes the site to build/site. Open build/site/index.html from
the disk; it needs no server. Warnings are errors: each link, anchor and page of a table of contents
must exist. Notebooks run where their text has changed.

  --fresh   without what an earlier build has left: every page is read and every notebook runs
HELP
}

fresh=no
case "${1:-}" in
  --help | -h) usage && exit 0 ;;
  --fresh) fresh=yes ;;
  "") ;;
  *) usage >&2 && exit 2 ;;
esac

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh
setup_environment

[ "$fresh" = no ] || rm -rf build/site build/doctrees build/notebooks
python -m sphinx -c docs -b html -d build/doctrees -W --keep-going -q . build/site
echo "written: build/site/index.html"
