"""Attacks runs, their folders and their data at random, and counts what held: tries out of tries.

    python tests/attack.py                        # some hundred of each kind, 15 minutes
    python tests/attack.py --seed=7 --kills=100 --folders=0 --data=0 --copies=0

- kills: a run is ended again and again, by kill -9 at a random moment or before or after the n-th
  change of its folder (a rename, a removal, a flush: between two renames, while it prunes, in a
  save in the background), or by SIGTERM in an evaluation, until it is done. Every folder step_* is
  whole each time, no run resumes before what was said to be saved, and all losses are those of a
  run that was never ended.
- folders: one thing in the folder of a stopped run is changed (bytes, names, copies).
- data: the data changes between a stop and a resume.
- copies: one of two ranks has another setting, or other data.

After the last three the run ends as if nothing were, bit for bit, or with one line and a code; a
traceback, a hang, other losses and a checkpoint that is gone are failures, which are printed with
their number.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import ranks
from conftest import flags, losses, read_log, stdlib_bytes, train_each, write_manifest, write_shard
from saved import problem

import train
from configurator import configure, run
from run import evaluate
from run.checkpoint import folders
from settings import Config as RunConfig
from system import files

# functions of os, which Path and shutil call too
CHANGES = "rename replace unlink rmdir mkdir fsync".split()
STEPS, STOPPED = 9, 6  # of a run; of those whose folder or data is changed
HEADER = 1024  # bytes of a shard
OTHERS = """
lr=0.5 lr=1e-4 seed=2 seed=7 shuffle_seed=2 shuffle_seed=None batch_size=1 batch_size=2 max_steps=5
max_steps=20 save_interval=0 save_interval=1 save_interval=5 eval_interval=0 eval_interval=1
eval_interval=4 dropout=0.0 dropout=0.2 beta2=0.9 clip=None resume=none dry_run=True overfit=True
parallel=fsdp n_layer=1 remat=block async_save=True keep_last=1 hellaswag_interval=2
weight_decay=0.3
""".split()


@dataclass
class Config:
    kills: int = 300  # ends of runs, several a run
    folders: int = 300  # changes of a stopped run's folder
    data: int = 100  # changes of its data
    copies: int = 60  # of two ranks that differ
    seed: int = 1  # of all that is random


class Failure(Exception):
    """What did not hold."""


@contextlib.contextmanager
def named(what):
    """Puts `what` before the words of a Failure within."""
    try:
        yield
    except Failure as failure:
        raise Failure(f"{what}: {failure}") from None


def main(cfg):
    """Runs the attacks and prints a table; the exit code: 0 if all held."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        kinds = dict(kills=kill, folders=change_folder, data=change_data, copies=differ)
        for name, attack in kinds.items():
            tries = wrong = number = 0
            told = Counter()
            while tries < getattr(cfg, name):
                number += 1
                try:
                    with bench.folder() as place:
                        rng = random.Random(f"{cfg.seed} {name} {number}")
                        tries += attack(bench, place, rng, told)
                except Failure as failure:
                    tries += 1
                    wrong += 1
                    print(f"{name} {number}: {failure}", flush=True)
            words = ", ".join(f"{n} {what}" for what, n in told.most_common())
            print(f"{name:<8} {tries - wrong} of {tries} held ({words})", flush=True)
            failed += wrong
    return int(failed > 0)


class Bench:
    """Data, and runs that were never ended, to compare with."""

    def __init__(self, top):
        self.top, self.count, self.whole, self.stopped = top, 0, {}, {}
        self.data = top / "data"
        self.data.mkdir()
        tokens = stdlib_bytes(15_000)
        parts = {"val_000000": tokens[:3000], "train_000001": tokens[3000:9000]}
        for name, part in (parts | {"train_000002": tokens[9000:]}).items():
            write_shard(self.data / f"a_{name}.bin", part)
        write_manifest(sorted(self.data.iterdir()))

    @contextlib.contextmanager
    def folder(self):
        """A new folder for one attack."""
        self.count += 1
        place = self.top / str(self.count)
        place.mkdir()
        yield place
        shutil.rmtree(place)

    def words(self, out_dir, data=None, **settings):
        own = dict(max_steps=STEPS, save_interval=2, keep_last=3, eval_interval=3, eval_tokens=1024)
        own |= dict(dropout=0.1, shuffle_seed=1, schedule="constant", resume="auto")
        return flags(data or self.data, out_dir, **own | settings)

    def run(self, number, words, ends=None, at_rank=0):
        """The end of a run on so many ranks; ends: as `end`, of one of them."""
        return attempt(number, train_until, words, ends, at_rank)

    def make(self, number, out_dir, **settings):
        done = self.run(number, self.words(out_dir, **settings))
        assert done.returncode == 0, done.stderr
        return out_dir

    def expected(self, number):
        """The losses {kind: {step: loss}} of a run on so many ranks that was never ended."""
        if number not in self.whole:
            self.whole[number] = found(self.make(number, self.top / f"whole_{number}"))
        return self.whole[number]

    def stop(self, number, out_dir):
        """Makes `out_dir` the folder of a run on so many ranks that was stopped at STOPPED."""
        if number not in self.stopped:
            out = self.top / f"stopped_{number}"
            self.stopped[number] = self.make(number, out, max_steps=STOPPED)
        shutil.copytree(self.stopped[number], out_dir)


def attempt(number, function, *arguments):
    """The end of function(*arguments) in so many ranks."""
    with contextlib.suppress(RuntimeError):
        return ranks.attempt(number, function, *arguments, timeout=60, grace=30)[0]
    raise Failure("it hangs")


def found(out_dir):
    """{kind: {step: loss}} of a run's log, whose every line must be whole."""
    try:
        log = read_log(out_dir)
    except ValueError as error:
        raise Failure(f"log.jsonl: {error}") from None
    return {kind: losses(log, kind) for kind in ("train", "val")}


def train_until(words, ends, at_rank):
    """For ranks.attempt: train.py as a script, ended in one rank as `ends` says."""
    if ends and int(os.environ.get("RANK", 0)) == at_rank:
        end(*ends)
    run(train.main, configure(RunConfig, words))


def end(how, at, after=False):
    """Ends this process by SIGKILL at a time or a change of a folder, or by SIGTERM in evaluations.

    how: "time", after `at` s; "change", before or after the at-th change of a folder; "stop",
    before or after the at-th batch of evaluations.
    """
    if how == "time":
        threading.Timer(at, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return
    count, lock = [0], threading.Lock()

    def counted(function, number):
        def call(*arguments, **options):
            with lock:
                count[0] += 1
                last = count[0] == at
            if last and not after:
                os.kill(os.getpid(), number)
            value = function(*arguments, **options)
            if last and after:
                os.kill(os.getpid(), number)
            return value

        return call

    if how == "stop":
        evaluate.score_rows = counted(evaluate.score_rows, signal.SIGTERM)
    else:
        for name in CHANGES:
            setattr(os, name, counted(getattr(os, name), signal.SIGKILL))


def kill(bench, place, rng, told):
    """A run that is ended until it is done; returns how often that was."""
    number, out, kills, said = rng.choice((0, 0, 2)), place / "run", 0, 0
    settings = dict(keep_last=rng.choice((1, 1, 2)), async_save=rng.random() < 0.4)
    words = bench.words(out, save_interval=rng.choice((1, 2, 3)), **settings)
    for _ in range(rng.randrange(2, 7)):
        how = rng.choice(("time", "change", "change", "change", "stop"))
        if how == "time":
            at = rng.uniform(0.05, 1.2)
        else:
            at = rng.randrange(1, 120 if how == "change" else 4)
        ends = (how, at, rng.random() < 0.5)
        done = bench.run(number, words, ends, rng.randrange(max(1, number)))
        with named(f"after {ends}"):
            check_resumed(done, said)
            said = max([said, *steps_of("saved", done)])
            for folder in folders(out):
                if wrong := problem(folder):
                    raise Failure(f"{folder.name}: {wrong}")
            if "Traceback" in done.stderr:
                raise Failure(done.stderr[-1500:])
        if not any(done.codes):
            break
        kills += 1
        told[f"by {how}"] += 1
    done = bench.run(number, words)
    check_resumed(done, said)
    if done.returncode:
        raise Failure(f"it does not go on: {done.stderr[-1500:]}")
    if found(out) != bench.expected(number):
        raise Failure(f"other losses: {found(out)}, expected {bench.expected(number)}")
    return max(1, kills)


def steps_of(what, done):
    """The steps that a run says it has saved, or resumed from."""
    return [int(step) for step in re.findall(rf"^{what} .*step_0*(\d+)$", done.stdout, re.M)]


def check_resumed(done, said):
    """Raises Failure if a run resumed before the step that was said to be saved, or not at all."""
    at = steps_of("resumed", done)
    if "run          steps" in done.stdout and said and (not at or at[0] < said):
        raise Failure(f"it resumed from {at}, although {said} was saved: {done.stderr[-500:]}")


def verdict(bench, number, done, out, told):
    """Raises Failure unless a run ended in one line with a code, or as though nothing had been."""
    if any(done.codes) or "Traceback" in done.stderr:
        codes = {*done.codes} - {1}  # of a rank that lost the one that tells
        lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
        one_line = len(lines) == 1 and "Traceback" not in done.stderr
        if codes not in ({2}, {3}, {4}, {5}) or not one_line:
            raise Failure(f"codes {done.codes}: {done.stderr[-1500:]}")
        told[f"refused with {codes}"] += 1
        return
    now, expected = found(out), bench.expected(number)
    same = all(now[kind].items() <= expected[kind].items() for kind in now)
    if STEPS not in now["train"] or not same:
        raise Failure(f"it was accepted and has other losses: {now} {done.stderr[-500:]}")
    told["went on, with a warning" if "warning:" in done.stderr else "went on"] += 1


def flip(path, at, bit=0):
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def other_token(path, rng):
    """Changes one token of a shard."""
    flip(path, HEADER + 2 * rng.randrange((path.stat().st_size - HEADER) // 2))


def harm(path, rng, place):
    """Changes one file or folder; says how. place: a folder for what is removed."""
    data = path.read_bytes() if path.is_file() else b""
    changed = dict(cut=data[: rng.randrange(len(data) + 1)], longer=data + b"\0", empty=b"")
    changed |= dict(junk=rng.randbytes(len(data)), zeros=bytes(len(data)))
    kinds = [*changed, *["flip"] * 2 * bool(data)] if path.is_file() else ["copy"]
    how = rng.choice(["remove", "rename", *kinds])
    if how == "flip":
        flip(path, rng.randrange(len(data)), rng.randrange(8))
    elif how in changed:
        path.write_bytes(changed[how])
    elif how == "copy":
        steps = rng.randrange(1, 2 * STEPS)
        with contextlib.suppress(FileExistsError):
            shutil.copytree(path, path.with_name(f"step_{steps:08d}"))
        how = f"copy to step {steps}"
    elif how == "rename":
        names = [f"step_{rng.randrange(99):08d}", f"{path.name}.bak", "x" * 200]
        with contextlib.suppress(OSError):
            path.rename(path.with_name(rng.choice(names)))
    else:
        path.rename(place / f"kept_{path.name}")
    return f"{how} of {path.name} in {path.parent.name}"


def change_folder(bench, place, rng, told):
    """One change in the folder of a stopped run, which is then resumed."""
    number, out, keep = rng.choice((0, 0, 0, 2)), place / "run", rng.choice((1, 9))
    bench.expected(number)
    bench.stop(number, out)
    path = rng.choice(sorted(out.rglob("*")) + folders(out) * 3)
    what = harm(path, rng, place)
    whole = {f.name: files.digest(f / "manifest.json") for f in folders(out) if not problem(f)}
    done = bench.run(number, bench.words(out, keep_last=keep))
    if path.name == "log.jsonl" and not any(done.codes):  # lines of which are lost
        shutil.copy(bench.top / f"whole_{number}" / "log.jsonl", out)
    with named(what):
        verdict(bench, number, done, out, told)
        for name, digest in whole.items() if keep == 9 or any(done.codes) else ():
            manifests = [path for path in out.glob(f"{name}*/manifest.json") if path.is_file()]
            if digest not in map(files.digest, manifests):
                raise Failure(f"{name} was whole and is gone")
    return 1


def change_data(bench, place, rng, told):
    """The data is another one, or damaged, when a stopped run is resumed."""
    number, out, data = rng.choice((0, 0, 0, 2)), place / "run", place / "data"
    bench.expected(number)
    bench.stop(number, out)
    shutil.copytree(bench.data, data)
    manifest = data / "manifest.json"
    kinds = ["harm", "swap", "other tokens"]
    if listed := rng.random() < 0.6:
        kinds += ["harm", "half made", "other manifest"]
    else:
        manifest.unlink()
    how = rng.choice(kinds)
    shards = sorted(data.glob("*.bin"))
    if how == "harm":
        how = harm(rng.choice(sorted(data.iterdir())), rng, place)
    elif how == "swap":
        first, second = (shard.read_bytes() for shard in shards[:2])
        shards[0].write_bytes(second)
        shards[1].write_bytes(first)
    elif how == "other tokens":
        other_token(rng.choice(shards), rng)
    elif how == "half made":
        unfinished = {"next": {"document": 1, "tokens": 0}}
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | unfinished))
    else:
        text = manifest.read_text()
        digest = rng.choice(re.findall("[0-9a-f]{64}", text))
        manifest.write_text(text.replace(digest, f"{rng.getrandbits(256):064x}"))
    same = content(data) == content(bench.data)
    done = bench.run(number, bench.words(out, data))
    with named(f"{how}, {'' if listed else 'not '}listed"):
        if not any(done.codes) and not same:
            raise Failure("other data was accepted")
        verdict(bench, number, done, out, told)
    return 1


def content(data):
    """The bytes of the shards that a run would read, in their order."""
    return [path.read_bytes() if path.is_file() else None for path in sorted(data.glob("a_*.bin"))]


def differ(bench, place, rng, told):
    """One of two ranks has another setting, or another copy of the data."""
    out, other = place / "run", rng.randrange(2)
    words = [bench.words(out), bench.words(out)]
    if rng.random() < 0.7:
        what = rng.choice(OTHERS)
        words[other].append(f"--{what}")
    else:
        data = shutil.copytree(bench.data, place / "data")
        path = rng.choice(sorted(data.glob("*.bin")))
        other_token(path, rng)
        words[other] = bench.words(out, data)
        what = f"another {path.name}"
    with named(f"rank {other} has {what}"):
        done = attempt(2, train_each, words)
        if not any(done.codes):
            raise Failure("they train on")
        verdict(bench, 2, done, out, told)
        if not re.search("rank [01] has", done.stderr):
            raise Failure(done.stderr[-500:])
    return 1


if __name__ == "__main__":
    import attack  # the ranks import its functions by that name

    run(attack.main, attack.Config)
