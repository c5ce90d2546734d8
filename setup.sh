#!/usr/bin/env bash
# Makes .venv and installs the pinned requirements into it, once; run by quickstart.sh and test.sh.
#   setup.sh [further files of requirements]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
files="requirements.txt $*"
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: needs Python 3.11 or later; set PYTHON=python3.12, say" >&2; exit 2; }
if [ ! -x .venv/bin/python ]; then
    echo "making .venv"
    "$python" -m venv .venv || { echo "error: python -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }
fi
stamp=.venv/.installed_$(cat $files | cksum | cut -d' ' -f1)
if [ ! -f "$stamp" ]; then
    echo "installing $files (once; a minute or more)"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check $(printf -- '-r %s ' $files)
    touch "$stamp"
fi
