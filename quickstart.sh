#!/usr/bin/env bash
# From nothing to a trained model: sets up .venv, shards the source of Python's standard library (real text that lies on
# every machine), trains a small model on whatever this machine has, evaluates, samples, and draws the curves.
# Needs no hub. Arguments go to train.py: ./quickstart.sh --max_steps=100. The first run is in out/quickstart, a later one,
# perhaps of an edited model, in out/quickstart_2, ..., so that there is something to compare it with.
set -euo pipefail
cd "$(dirname "$0")"
load=($(cat /proc/loadavg 2>/dev/null || sysctl -n vm.loadavg | tr -d '{}')) cores=$(getconf _NPROCESSORS_ONLN)
if awk "BEGIN { exit !(${load[0]:-0} > $cores / 2) }"; then
    echo "note: in the last minute ${load[0]} of $cores CPU cores were busy: this may take longer than README says"
fi
./setup.sh
. .venv/bin/activate
out=out/quickstart runs=() number=1 before=
while [ -e "$out/log.jsonl" ]; do
    runs=(out/quickstart)
    number=$((number + 1))
    out=out/quickstart_$number
done
for word in "$@"; do # --resume=auto: of the first one
    case $word in --resume | --resume=*) out=out/quickstart runs=() ;; esac
done
for word in "$@"; do
    case $word in --out_dir=*) out=${word#*=} ;; *) if [ "$before" = --out_dir ]; then out=$word; fi ;; esac
    before=$word
done
stdlib=$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')

# [!_]: without _sysconfigdata_*.py, a table of the compiler's options. What comes first is held out: some 46 modules of up
# to 20 kB, in Python 3.11 as in 3.13, since few long ones have a mean loss that says little. stringprep.py is a table.
short=$(find "$stdlib" "$stdlib"/{asyncio,email,json,unittest} -maxdepth 1 -name '[!_]*.py' ! -name stringprep.py -size -40 |
    LC_ALL=C sort | paste -sd, -)
python fineweb.py --dataset="$short,$stdlib/[!_]*.py,$stdlib/asyncio/*.py,$stdlib/email/*.py,$stdlib/json/*.py,$stdlib/unittest/*.py" \
    --tokenizer=bytes --out_dir=data/quickstart --val_tokens=300_000
python train.py config/quickstart.py --out_dir="$out" "$@"
python sample.py --checkpoint="$out" --prompt="class " --n_samples=1 --max_new_tokens=200
python plot.py ${runs[@]+"${runs[@]}"} "$out" --out="$out/curves.png"
echo "curves: $out/curves.png    next: README.md, \"Edit this, run that\""
