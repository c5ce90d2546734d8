#!/usr/bin/env bash
# Makes .venv and installs what it lacks of the pinned requirements; run by quickstart.sh and test.sh.
#   ./setup.sh [--cpu] [further files of requirements]
# A .venv that is there is taken, whoever made it. uv makes a new one where there is uv, else Python's venv and pip.
# --cpu: PyTorch's CPU build, on Linux some 4 GB smaller than the one with CUDA; --cuda: the package index's own build.
# Without either it is the CPU build where there is no NVIDIA driver and its index answers within 3 s.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
wanted=
case ${1:-} in --cpu | --cuda) wanted=$1 && shift ;; esac
build=
if [ "$wanted" = --cpu ] && [ "$(uname)" = Linux ]; then build=+cpu; fi # elsewhere there is no CUDA to leave out
cpu_index=https://download.pytorch.org/whl/cpu
files=(requirements.txt "$@")
python=${PYTHON:-python3}

has() { command -v "$1" >/dev/null; }
has_pip() { .venv/bin/python -c 'import pip' 2>/dev/null; }
refuse() { echo "error: $1" >&2 && exit 2; }
check_version() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || refuse "$1 is not Python 3.11 or later; $2"; }

lacking() { # the requirements that .venv does not have; 2.13.0+cpu is a build of 2.13.0
    .venv/bin/python - "$build" "$@" <<'PYTHON'
import importlib.metadata
import re
import sys

build, *files = sys.argv[1:]
for line in "\n".join(open(file).read() for file in files).splitlines():
    need = line.partition("#")[0].strip()
    if not need or "sys_platform" in need and sys.platform != "linux":
        continue
    name, pin = re.match(r"([\w-]+)(?:==([\w.]+))?", need).groups()
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = ""
    right = not pin or version.partition("+")[0] == pin
    if not version or not right or name == "torch" and not version.endswith(build):
        print(name)
PYTHON
}

for file in "${files[@]}"; do
    [ -f "$file" ] || refuse "$file: no such file of requirements; after --cpu or --cuda come requirements-dev.txt"
done
if [ ! -x .venv/bin/python ]; then
    echo "making .venv"
    if has uv; then
        uv venv --quiet --allow-existing ${PYTHON:+--python "$PYTHON"} .venv
    else
        check_version "$python" "set PYTHON=python3.12, say"
        "$python" -m venv .venv || refuse "python -m venv failed; on Debian and Ubuntu: apt install python3-venv"
    fi
fi
check_version .venv/bin/python "remove .venv"
missing=$(lacking "${files[@]}")
if [ -z "$missing" ]; then exit; fi

if [[ $PWD == *" "* ]]; then
    echo "warning: $PWD has a space: torch.compile cannot link on a CPU there (docs/operations.md, Set-up)" >&2
fi
if grep -q '^torch$' <<<"$missing" && [ "$(uname)$wanted" = Linux ] && ! has nvidia-smi && [ ! -e /proc/driver/nvidia ]; then
    echo "There is no NVIDIA driver here: the CPU build of PyTorch, if $cpu_index answers (--cuda: not that)"
    if .venv/bin/python -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1] + "/torch/", timeout=3)' "$cpu_index" 2>/dev/null; then
        build=+cpu
    else
        echo "It does not: the package index's own build, on most machines with CUDA, in all 5 GB"
    fi
fi
echo "installing ${files[*]} (once; a minute or more)"
words=()
for file in "${files[@]}"; do words+=(-r "$file"); done
if [ -n "$build" ]; then # named in full: a CUDA build that is there would do for 2.13.0
    words+=("torch==$(sed -n 's/^torch==\([^ ]*\).*/\1/p' requirements.txt)$build")
fi
if has uv && ! has_pip; then
    if [ -n "$build" ]; then words+=(--torch-backend cpu); fi
    uv pip install --quiet --python .venv/bin/python "${words[@]}"
else
    has_pip || .venv/bin/python -m ensurepip >/dev/null # a .venv that uv made has none
    if [ -n "$build" ]; then words+=(--extra-index-url "$cpu_index"); fi
    # Python compiles what it imports: all of it takes half a minute
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile "${words[@]}"
fi
