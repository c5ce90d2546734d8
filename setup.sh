#!/usr/bin/env bash
# Makes .venv and installs the pinned requirements into it, once; sourced by quickstart.sh and test.sh.
#   setup.sh [requirements file]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
requirements=${1:-requirements.txt}
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: needs Python 3.11 or later; set PYTHON=python3.12, say" >&2; exit 2; }
if [ ! -x .venv/bin/python ]; then
    echo "making .venv"
    "$python" -m venv .venv || { echo "error: python -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }
fi
stamp=.venv/.installed_$(cat requirements*.txt | cksum | cut -d' ' -f1)_$(basename "$requirements")
if [ ! -f "$stamp" ]; then
    echo "installing $requirements (once; a minute or more)"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -r "$requirements"
    touch "$stamp"
fi
