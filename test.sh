#!/usr/bin/env bash
# Runs the linter and the tests; sets up .venv first. Needs no hub.
#   ./test.sh          every file and the main faults in it, 3 minutes on 2 CPU cores
#   ./test.sh --all    with the tests marked slow, 6 minutes
#   ./test.sh --faults what belongs to the faults of docs/reliability.md, with repetitions; writes that table; 7 minutes
#   ./test.sh --gpu    what runs on a CUDA device, with this machine's python if its torch has CUDA, else with .venv
# Further arguments go to pytest: ./test.sh -k checkpoint
set -euo pipefail
cd "$(dirname "$0")"
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 # a thread a process: tests run side by side
unset PYTHONDONTWRITEBYTECODE # some hundred processes would compile the sources again
marks=(-m "not slow") processes=3 python=python # 3: some tests wait
case ${1:-} in
--all) marks=(-m "not repeated") && shift ;;
--faults) marks=(-m fault --reliability=docs/reliability.md) && shift ;;
--gpu) marks=(-m "(gpu or device) and not repeated") processes=12 && shift ;;
esac

cuda() { "$1" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; }
if [ $processes = 12 ] && cuda "${PYTHON:-python3}"; then
    python=${PYTHON:-python3}
else
    ./setup.sh requirements-dev.txt
    . .venv/bin/activate
    ruff check .
    ruff format --check .
fi
if [ $processes = 12 ] && ! cuda "$python"; then
    echo "error: --gpu needs a CUDA device and a torch built for it" >&2
    exit 2
fi
side_by_side=(-n $processes --dist worksteal)
"$python" -c 'import xdist' 2>/dev/null || side_by_side=()
code=0
"$python" -m pytest "${side_by_side[@]}" "${marks[@]}" "$@" || code=$?
echo "test.sh took $((SECONDS / 60)) min $((SECONDS % 60)) s"
exit $code
