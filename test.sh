#!/usr/bin/env bash
# Sets up .venv and runs the linter and the tests; two tests at a time; arguments go to pytest: ./test.sh -k checkpoint
set -euo pipefail
cd "$(dirname "$0")"
./setup.sh requirements-dev.txt
. .venv/bin/activate
ruff check .
ruff format --check .
OMP_NUM_THREADS=1 python -m pytest -n 2 "$@"
