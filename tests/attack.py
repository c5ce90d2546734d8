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
from conftest import flags, losses, read_log, stdlib_bytes, write_manifest, write_shard
from saved import folders, problem

import train
from configurator import configure, run
from run import evaluate
from settings import Config as RunConfig
from system import files

# functions of os, which Path and shutil call too
CHANGES = "rename replace unlink rmdir mkdir fsync".split()
STEPS, STOPPED = 9, 6  # of a run; of those whose folder or data is changed


@dataclass
class Config:
    kills: int = 300  # ends of runs, several a run
    folders: int = 300  # changes of a stopped run's folder
    data: int = 100  # changes of its data
    copies: int = 60  # of two ranks that differ
    seed: int = 1  # of all that is random


class Failure(Exception):
    """What did not hold."""


def main(cfg):
    """Runs the attacks and prints a table; the exit code: 0 if all held."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        kinds = dict(kills=kill, folders=change_folder, data=change_data, copies=differ)
        failed = 0
        for name, attack in kinds.items():
            tries, held, number, told = 0, 0, 0, Counter()
            while tries < getattr(cfg, name):
                number += 1
                with bench.folder() as place:
                    count, why = attacked(
                        attack, bench, place, random.Random(f"{cfg.seed} {name} {number}"), told
                    )
                tries += count
                held += count if why is None else count - 1
                if why:
                    print(f"{name} {number}: {why}", flush=True)
            words = ", ".join(f"{n} {what}" for what, n in told.most_common())
            print(f"{name:<8} {held} of {tries} held ({words})", flush=True)
            failed += tries - held
    return int(failed > 0)


def attacked(attack, bench, place, rng, told):
    """(how many tries it was, why it did not hold or None)"""
    try:
        return attack(bench, place, rng, told), None
    except Failure as failure:
        return 1, str(failure)


class Bench:
    """Data, and runs that were never ended, to compare with."""

    def __init__(self, top):
        self.top, self.count, self.whole, self.stopped = top, 0, {}, {}
        self.data = top / "data"
        self.data.mkdir()
        tokens = stdlib_bytes(15_000)
        for name, part in (("val_000000", slice(0, 3000)), ("train_000001", slice(3000, 9000))):
            write_shard(self.data / f"a_{name}.bin", tokens[part])
        write_shard(self.data / "a_train_000002.bin", tokens[9000:])
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
        with contextlib.suppress(RuntimeError):
            return ranks.attempt(number, train_until, words, ends, at_rank, timeout=60, grace=30)[0]
        raise Failure("it hangs")

    def expected(self, number):
        """The losses {kind: {step: loss}} of a run on so many ranks that was never ended."""
        if number not in self.whole:
            out = self.top / f"whole_{number}"
            done = self.run(number, self.words(out))
            assert done.returncode == 0, done.stderr
            self.whole[number] = found(out)
        return self.whole[number]

    def stop(self, number, out_dir):
        """Makes `out_dir` the folder of a run on so many ranks that was stopped at STOPPED."""
        if number not in self.stopped:
            out = self.stopped[number] = self.top / f"stopped_{number}"
            done = self.run(number, self.words(out, max_steps=STOPPED))
            assert done.returncode == 0, done.stderr
        shutil.copytree(self.stopped[number], out_dir, symlinks=True)


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
    before the at-th batch of evaluations.
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
    number, out, kills = rng.choice((0, 0, 2)), place / "run", 0
    settings = dict(keep_last=rng.choice((1, 1, 2)), async_save=rng.random() < 0.4)
    settings |= dict(save_interval=rng.choice((1, 2, 3)))
    words, said = bench.words(out, **settings), 0
    for _ in range(rng.randrange(2, 7)):
        how = rng.choice(("time", "change", "change", "change", "stop"))
        if how == "time":
            at = rng.uniform(0.05, 1.2)
        else:
            at = rng.randrange(1, 120 if how == "change" else 4)
        done = bench.run(
            number, words, (how, at, rng.random() < 0.5), rng.randrange(max(1, number))
        )
        check_resumed(done, said)
        said = max([said, *map(int, re.findall(r"^saved .*step_0*(\d+)$", done.stdout, re.M))])
        for folder in folders(out):
            if wrong := problem(folder):
                raise Failure(f"{folder.name} after {how} {at}: {wrong}")
        if not any(done.codes):
            break
        kills += 1
        told[f"by {how}"] += 1
        if "Traceback" in done.stderr:
            raise Failure(f"after {how} {at}: {done.stderr[-1500:]}")
    done = bench.run(number, words)
    check_resumed(done, said)
    if done.returncode:
        raise Failure(f"it does not go on: {done.stderr[-1500:]}")
    if found(out) != bench.expected(number):
        raise Failure(f"other losses: {found(out)}, expected {bench.expected(number)}")
    if left := [
        p.name
        for p in out.iterdir()
        if p.name.startswith(".writing") and settings["save_interval"] == 1
    ]:
        told["leftovers"] += len(left)
    return max(1, kills)


def check_resumed(done, said):
    """Raises Failure if a run resumed before the step that was said to be saved, or not at all."""
    at = re.findall(r"^resumed .*step_0*(\d+)$", done.stdout, re.M)
    if "run          steps" in done.stdout and said and (not at or int(at[0]) < said):
        raise Failure(f"it resumed from {at}, although {said} was saved: {done.stderr[-500:]}")


def verdict(bench, number, done, out, told, may_differ=False):
    """Raises Failure unless a run ended in one line with a code, or as though nothing had been."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    if "Traceback" in done.stderr or any(code < 0 for code in done.codes):
        raise Failure(f"codes {done.codes}: {done.stderr[-1500:]}")
    if any(done.codes):
        codes = {*done.codes} - {1}  # of a rank that lost the one that tells
        if codes not in ({2}, {3}, {4}, {5}) or len(lines) != 1:
            raise Failure(f"codes {done.codes}: {done.stderr[-1500:]}")
        told[f"refused with {codes}"] += 1
        return
    now, expected = found(out), bench.expected(number)
    wrong = [
        (k, s, v, expected[k][s]) for k in now for s, v in now[k].items() if expected[k].get(s) != v
    ]
    if STEPS not in now["train"] or (wrong and not may_differ):
        raise Failure(f"it was accepted and has other losses: {wrong[:3]} {done.stderr[-500:]}")
    told["went on, with a warning" if "warning:" in done.stderr else "went on"] += 1


def harm(path, rng, place):
    """Changes one file or folder; says how. place: a folder for what is removed."""
    kinds = ["remove", "rename", "folder"]
    if path.is_file():
        kinds += ["flip", "flip", "cut", "longer", "empty", "junk", "zeros"]
    else:
        kinds.append("copy")
    how = rng.choice(kinds)
    data = path.read_bytes() if path.is_file() else b""
    if how == "flip" and data:
        at = rng.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
    elif how in ("cut", "longer", "empty", "junk", "zeros"):
        new = dict(cut=data[: rng.randrange(len(data) + 1)], longer=data + b"\0", empty=b"")
        new |= dict(junk=rng.randbytes(len(data)), zeros=bytes(len(data)))
        path.write_bytes(new[how])
    elif how == "copy":
        steps = rng.randrange(1, 2 * STEPS)
        with contextlib.suppress(FileExistsError):
            shutil.copytree(path, path.with_name(f"step_{steps:08d}"))
        how = f"copy to step {steps}"
    elif how == "rename":
        path.rename(
            path.with_name(
                rng.choice([f"step_{rng.randrange(99):08d}", f"{path.name}.bak", "x" * 200])
            )
        )
    elif how != "flip":
        path.rename(place / f"kept_{path.name}")
        if how == "folder":
            path.mkdir()
    return f"{how} of {path.name} in {path.parent.name}"


def change_folder(bench, place, rng, told):
    """One change in the folder of a stopped run, which is then resumed."""
    number, out = rng.choice((0, 0, 0, 2)), place / "run"
    bench.expected(number)
    bench.stop(number, out)
    path = rng.choice(sorted(out.rglob("*")) + folders(out) * 3)
    what = harm(path, rng, place)
    whole = {f.name: files.digest(f / "manifest.json") for f in folders(out) if not problem(f)}
    keep = rng.choice((1, 9))
    done = bench.run(number, bench.words(out, keep_last=keep))
    if path.name == "log.jsonl" and not any(done.codes):  # lines of which are lost
        shutil.copy(bench.top / f"whole_{number}" / "log.jsonl", out)
    try:
        verdict(bench, number, done, out, told)
        for name, digest in whole.items() if keep == 9 or any(done.codes) else ():
            manifests = [f / "manifest.json" for f in out.glob(f"{name}*")]
            if digest not in [
                files.digest(manifest) for manifest in manifests if manifest.is_file()
            ]:
                raise Failure(f"{name} was whole and is gone")
    except Failure as failure:
        raise Failure(f"{what}: {failure}") from None
    return 1


def change_data(bench, place, rng, told):
    """The data is another one, or damaged, when a stopped run is resumed."""
    number, out, data = rng.choice((0, 0, 0, 2)), place / "run", place / "data"
    bench.expected(number)
    bench.stop(number, out)
    shutil.copytree(bench.data, data)
    if listed := rng.random() < 0.6:
        how = rng.choice(("harm", "harm", "swap", "other tokens", "half made", "other manifest"))
    else:
        (data / "manifest.json").unlink()
        how = rng.choice(("harm", "swap", "other tokens", "other tokens"))
    shards = sorted(data.glob("*.bin"))
    what, path = f"{how}, {'' if listed else 'not '}listed", rng.choice(shards)
    if how == "harm":
        what += ": " + harm(rng.choice(sorted(data.iterdir())), rng, place)
    elif how == "swap":
        train_shards = [shard for shard in shards if "train" in shard.name]
        first, second = (shard.read_bytes() for shard in train_shards)
        train_shards[0].write_bytes(second)
        train_shards[1].write_bytes(first)
    elif how == "other tokens":
        bytes_ = path.read_bytes()
        at = 1024 + 2 * rng.randrange((len(bytes_) - 1024) // 2)
        token = int.from_bytes(bytes_[at : at + 2], "little") ^ 1
        path.write_bytes(bytes_[:at] + token.to_bytes(2, "little") + bytes_[at + 2 :])
    elif how == "half made":
        path = data / "manifest.json"
        unfinished = {"next": {"document": 1, "tokens": 0}}
        path.write_text(json.dumps(json.loads(path.read_text()) | unfinished))
    else:
        text = (data / "manifest.json").read_text()
        digits = re.findall("[0-9a-f]{64}", text)
        (data / "manifest.json").write_text(
            text.replace(rng.choice(digits), f"{rng.getrandbits(256):064x}")
        )
    same = content(data) == content(bench.data)
    done = bench.run(number, bench.words(out, data))
    try:
        if not any(done.codes) and not same:
            raise Failure("other data was accepted")
        verdict(bench, number, done, out, told)
    except Failure as failure:
        raise Failure(f"{what}: {failure}") from None
    return 1


def content(data):
    """The bytes of the shards that a run would read, in their order."""
    return [path.read_bytes() if path.is_file() else None for path in sorted(data.glob("a_*.bin"))]


OTHERS = dict(
    lr=[0.5, 1e-4], seed=[2, 7], shuffle_seed=[2, None], batch_size=[1, 2], max_steps=[5, 20]
)
OTHERS |= dict(
    save_interval=[0, 1, 5], eval_interval=[0, 1, 4], dropout=[0.0, 0.2], beta2=[0.9], clip=[None]
)
OTHERS |= dict(
    resume=["none"], dry_run=[True], overfit=[True], parallel=["fsdp"], n_layer=[1], remat=["block"]
)
OTHERS |= dict(
    async_save=[True],
    keep_last=[1],
    hellaswag_interval=[2],
    max_skipped_steps=[3],
    weight_decay=[0.3],
)


def train_each(words):
    """For ranks.attempt: train.py with other words in each rank."""
    run(train.main, configure(RunConfig, words[int(os.environ["RANK"])]))


def differ(bench, place, rng, told):
    """One of two ranks has another setting, or another copy of the data."""
    out, other = place / "run", rng.randrange(2)
    words = [bench.words(out), bench.words(out)]
    if rng.random() < 0.7:
        name = rng.choice(sorted(OTHERS))
        setting = {name: rng.choice(OTHERS[name])}
        words[other] = bench.words(out, **setting)
        what = f"rank {other} has {setting}"
    else:
        data = shutil.copytree(bench.data, place / "data")
        path = rng.choice(sorted(data.glob("*.bin")))
        tokens = path.read_bytes()
        at = 1024 + 2 * rng.randrange((len(tokens) - 1024) // 2)
        path.write_bytes(tokens[:at] + bytes([tokens[at] ^ 1]) + tokens[at + 1 :])
        words[other] = bench.words(out, data)
        what = f"rank {other} has another {path.name}"
    try:
        done = ranks.attempt(2, train_each, words, timeout=60, grace=30)[0]
    except RuntimeError:
        raise Failure(f"{what}: it hangs") from None
    if not any(done.codes):
        raise Failure(f"{what}: they train on")
    try:
        verdict(bench, 2, done, out, told)
    except Failure as failure:
        raise Failure(f"{what}: {failure}") from None
    if "rank 1 has" not in done.stderr and "rank 0 has" not in done.stderr:
        raise Failure(f"{what}: {done.stderr[-500:]}")
    return 1


if __name__ == "__main__":
    import attack  # the ranks import its functions by that name

    run(attack.main, attack.Config)
