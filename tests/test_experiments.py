"""Small patches of the sources, as users write them, hold in every mode, or are refused there.

Each patch of tests/experiments/ is applied to a copy of the sources, which then runs as a user runs
it: six steps of train.py on byte shards, in float32 on the CPU. What comes out is compared with a
plain loop over whole batches (experiments/plain.py), with the patched run in one process, and with
a run without the patch, from which it must differ. A patch whose anchor somebody edited is skipped,
unless EVERY_PATCH is set.

Losses agree by a relative 4e-6 where sums have the same order, else by 1e-5. Gradients are compared
by the optimizer's first moments in the last checkpoint, which are linear in them: by a relative
1e-4 in the Frobenius norm of each tensor. Weights would say less: Adam divides gradients that are
rounding by themselves.
"""

import dataclasses
import functools
import math
import os
import shutil

import numpy as np
import pytest
import ranks
import saved
from conftest import ROOT, flags, losses, read_log, stdlib_bytes, train_here, write_shard

import model as models
from experiments import edits, inside, patch, shelf
from system.errors import UserError

SETTINGS = dict(
    n_embd=32, max_steps=6, batch_tokens=256, batch_size=4, precision="fp32", prove=True
)
SETTINGS |= dict(eval_interval=3, eval_tokens=256, save_interval=3, keep_last=9)
SETTINGS |= dict(clip=10)  # above every norm: clipped gradients would hide a wrong scale
CHANGES = {  # of the settings in each mode that is a run of train.py
    "eager": {},
    patch.MASKED: dict(prove=False),
    patch.ACCUMULATED: dict(batch_size=2, prove=False),
    patch.RESUMED: dict(resume="auto", prove=False),
    patch.BLOCK: dict(remat="block"),
    patch.SELECTIVE: dict(remat="selective"),
    patch.ATTENTION: dict(remat="attention"),
    patch.COMPILED: dict(compile=True, prove=False),
    patch.DDP: dict(batch_size=2),
    patch.FSDP: dict(batch_size=2, parallel="fsdp"),
    patch.CONTEXT: dict(parallel="fsdp", context_parallel=2),
    patch.RESUMED_DDP: dict(batch_size=2, resume="auto", prove=False),
    patch.RESUMED_FSDP: dict(batch_size=2, parallel="fsdp", resume="auto", prove=False),
}
ON_MASKS = (patch.MASKED, patch.ACCUMULATED, patch.DDP, patch.RESUMED_DDP)
GOES_ON = {patch.RESUMED: "eager", patch.RESUMED_DDP: patch.DDP, patch.RESUMED_FSDP: patch.FSDP}
SAME_ORDER = (patch.BLOCK, patch.SELECTIVE, patch.ATTENTION)
# what an export imports to compare logits, a second that its patches share
CONVERTS = ("transformers.models.auto.modeling_auto", "transformers.models.gpt2.modeling_gpt2")
LOSS, SAME_LOSS, MOMENT, EFFECT = 1e-5, 4e-6, 1e-4, 1e-3


def cases(quick):
    """Each patch once: in the modes that ./test.sh runs, or, marked slow, in those and all others.

    What both would run again, the copy of the sources and the eager run, --all runs once.
    """
    found = []
    for module in (edits, shelf):
        for own in module.PATCHES:
            if quick and own.sample is None:
                continue
            modes = own.sample if quick else dict.fromkeys((*(own.sample or ()), *own.modes))
            slow = own.sample is None or set(own.modes) > set(own.sample)
            marks = [pytest.mark.slow] * (slow and not quick)
            found.append(pytest.param(module, own, tuple(modes), id=own.name, marks=marks))
    return found


def pytest_generate_tests(metafunc):
    if "own" in metafunc.fixturenames:
        quick = "not slow" in metafunc.config.option.markexpr
        metafunc.parametrize("module, own, modes", cases(quick))


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    """A copy of the sources, with what Python has compiled of them."""
    return copy_of(ROOT, tmp_path_factory.mktemp("sources") / "unpatched")


def copy_of(sources, folder):
    folder.mkdir()
    for path in sources.iterdir():
        of_python = path.is_dir() and any(path.glob("*.py*"))
        if of_python and path.name not in ("tests", "results", ".venv"):
            shutil.copytree(path, folder / path.name)
        elif path.suffix == ".py":
            shutil.copy2(path, folder)
    return folder


def patched(own, sources, folder):
    """The copy of the sources with a patch; skips the test where it no longer applies."""
    try:
        patch.apply(own, copy_of(sources, folder / "sources"))
    except patch.MissingAnchor as why:  # the sources may be edited
        if "EVERY_PATCH" in os.environ:
            raise
        pytest.skip(str(why))
    return folder / "sources"


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """{whether with masks: folder} of byte shards, where every twentieth token begins a document.

    Of eight rows two have no target that counts, so that of two ranks, or of four micro-steps, one
    has none in its batch; of the others some have few.
    """
    folders = {masked: tmp_path_factory.mktemp("shards") for masked in (False, True)}
    tokens = np.array(stdlib_bytes(15_000))
    tokens[np.random.default_rng(0).random(len(tokens)) < 0.05] = 256
    for name, part in dict(val_000000=tokens[:3_001], train_000001=tokens[3_001:]).items():
        row = (np.arange(len(part)) - 1) // 32 % 8
        has_loss = np.random.default_rng(1).random(len(part)) > row / 6
        for folder in folders.values():
            path = write_shard(folder / f"py_{name}.bin", part)
        np.packbits(has_loss, bitorder="little").tofile(path.with_suffix(".mask"))
    return folders


class Runs:
    """The runs of a copy of the sources; mode "plain" is the plain loop."""

    def __init__(self, sources, shards, folder, module, own, adds=()):
        """adds: settings that the patch has added."""
        self.adds = dict(adds)
        self.sources, self.shards, self.folder = sources, shards, folder
        self.module, self.own = module, own
        self.ends = {}  # {mode: (exit code, words)}

    def words(self, mode):
        settings = SETTINGS | self.own.settings | self.adds | CHANGES[mode]
        data = settings.pop("data_dir", self.shards[mode in ON_MASKS])
        return flags(data, self.folder / mode, **settings)

    def do(self, modes):
        """Runs train.py in these modes and in those that they are compared with."""
        modes = dict.fromkeys(("eager", *modes))
        modes |= dict.fromkeys(before for mode, before in GOES_ON.items() if mode in modes)
        if {patch.ACCUMULATED, patch.DDP} & modes.keys():
            modes[patch.MASKED] = None
        alone = [m for m in CHANGES if m in modes and m not in patch.RANKS]
        words = {mode: self.words(mode) for mode in alone}
        plain = {}
        if patch.PLAIN in modes:
            plain["plain"] = self.words("eager"), self.shards[False]
            if patch.MASKED in modes:
                plain["plain masked"] = self.words(patch.MASKED), self.shards[True]
        where = self.module.__name__, self.own.name
        imports = CONVERTS if patch.EXPORTED in modes else ()
        out = self.folder / "eager"
        self.ask(0, "alone", *where, words, plain, out, tuple(modes), imports=imports)
        many = {mode: self.words(mode) for mode in patch.RANKS if mode in modes}
        if many:
            self.ask(2, "over_ranks", many, [ranks.free_port() for _ in many])

    def ask(self, number, function, *arguments, **limits):
        function = getattr(inside, function)
        done, values = ranks.attempt(number, function, self.sources, *arguments, **limits)
        if not all(values):  # a process was killed, or hung
            asked = arguments[0] if number else arguments[2]
            values = [dict.fromkeys(asked, (done.returncode, done.stderr[-3000:]))]
        for mode in values[0]:
            ends = [value[mode] for value in values]
            self.ends[mode] = max(ends, key=lambda end: (end[0] == 2, end[0]))

    def log(self, mode):
        return read_log(self.folder / mode)

    def figures(self, mode):
        """As plain.train's."""
        log = self.log(mode)
        train = [line for line in log if line["kind"] == "train"]
        return dict(
            losses={line["step"]: line["loss"] for line in train},
            val={line["step"]: line["loss"] for line in log if line["kind"] == "val"},
            extras={line["step"]: line.get("extras", {}) for line in train},
            moments=self.moments(mode),
        )

    def moments(self, mode):
        found = saved.first_moments(self.folder / mode / "step_00000006")
        return {name: tensor.float().numpy() for name, tensor in found.items()}


def flat(figures):
    """{(kind, step or name): number or array}"""
    extras = {
        (step, name): value
        for step, values in figures["extras"].items()
        for name, value in values.items()
    }
    kinds = figures | {"extras": extras}
    return {(kind, key): value for kind in kinds for key, value in kinds[kind].items()}


def differences(found, expected, limit, moment=MOMENT):
    """What differs in words: losses, validation losses, extras, and first moments."""
    a, b = flat(found), flat(expected)
    limits = dict(losses=limit, val=limit, extras=max(limit, LOSS), moments=moment)
    off = {key: distance(a[key], b[key]) for key in a.keys() & b.keys()}
    words = [f"{key} is in one of both only" for key in a.keys() ^ b.keys()]
    return words + [
        f"{key}: off by a relative {by:.1e}" for key, by in off.items() if not by <= limits[key[0]]
    ]


def distance(a, b):
    """Relative, in the Frobenius norm; of shapes that differ infinite."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape:
        return math.inf
    norm = np.linalg.norm(b)
    return np.linalg.norm(a - b) / norm if norm else float(np.any(a))


def problems(runs, modes):
    """{mode: what is wrong in it, in words} of runs that are done."""
    found = {"eager": problem(runs, "eager")}
    if not found["eager"]:  # with which the others are compared
        found |= {mode: problem(runs, mode) for mode in modes}
    return {mode: wrong for mode, wrong in found.items() if wrong}


def problem(runs, mode):
    own = runs.own
    refused = own.refused | ({patch.EXPORTED: own.export} if own.export else {})
    code, words = runs.ends.get(mode, (0, ""))
    if mode in refused:
        right = code == 2 and refused[mode] in words and "\n" not in words
        return None if right else f"expected the refusal {refused[mode]!r}, got {code}: {words}"
    if code:
        return f"ended with {code}: {words}"
    if mode == patch.EXPORTED:
        return None
    if mode == patch.SAMPLED:
        return wrong_samples(own, *words)
    limits = own.limits or [LOSS]
    if mode == patch.PLAIN:
        wrong = differences(runs.figures("eager"), words, *limits)
        if "plain masked" in runs.ends and not runs.ends[patch.MASKED][0]:
            _, words = runs.ends["plain masked"]
            wrong += differences(runs.figures(patch.MASKED), words, *limits)
        return wrong
    if own.also and (wrong := own.also(runs.log(mode))):
        return wrong
    if mode in ("eager", patch.MASKED):
        return None
    if mode in GOES_ON:
        return resumed_otherwise(runs, mode, GOES_ON[mode])
    expected = runs.figures(patch.MASKED if mode in ON_MASKS else "eager")
    limits = [SAME_LOSS] if mode in SAME_ORDER else limits
    return differences(runs.figures(mode), expected, *limits)


def wrong_samples(own, cached, plain, said):
    if cached != plain:
        return f"with a KV cache {cached}, without {plain}"
    warned = "sampling goes without a KV cache" in said
    return None if warned != own.cached else f"with a KV cache: {not warned}; said {said!r}"


def resumed_otherwise(runs, mode, whole):
    """Steps after the checkpoint, and what is saved, must have the bits of a run without a stop."""
    found, expected = runs.figures(mode), runs.figures(whole)
    for figures in (found, expected):  # of the checkpoint's own step one alone is evaluated
        for kind in ("losses", "val", "extras"):
            figures[kind] = {step: x for step, x in figures[kind].items() if step > 3}
    wrong = differences(found, expected, 0, 0)
    (a, state), (b, other) = (saved.load(runs.folder / m / "step_00000006") for m in (mode, whole))
    for group in a.keys() | b.keys():
        if a[group].keys() != b[group].keys():
            wrong.append(f"other tensors in {group}")
        wrong += [f"{name} differs" for name, t in a[group].items() if not t.equal(b[group][name])]
    if state["leaves"] != other["leaves"]:
        wrong.append("other values beside the tensors")
    return wrong


@pytest.fixture(scope="session")
def unpatched(sources, shards, tmp_path_factory):
    """unpatched(settings) -> Runs of the sources as they are."""

    @functools.cache
    def runs_of(settings):
        own = dataclasses.replace(edits.UNPATCHED, settings=dict(settings))
        runs = Runs(sources, shards, tmp_path_factory.mktemp("unpatched"), edits, own)
        runs.do(())
        return runs

    return lambda settings: runs_of(tuple(settings.items()))


def test_a_patch_holds_or_is_refused(module, own, modes, sources, shards, unpatched, tmp_path):
    folder = patched(own, sources, tmp_path)
    adds = own.adds
    if patch.UNPATCHED in adds.values():
        without = unpatched(own.settings).folder / "eager"
        adds = {name: without if x == patch.UNPATCHED else x for name, x in adds.items()}
    runs = Runs(folder, shards, tmp_path, module, own, adds)
    runs.do(modes)
    wrong = problems(runs, modes)
    if "eager" not in own.refused and not runs.ends["eager"][0] and own.data is None:
        if effect := wrong_effect(own, runs, unpatched(own.settings)):
            wrong["effect"] = effect
    assert not wrong, "\n".join(f"{own.name} in {mode}: {words}" for mode, words in wrong.items())


def wrong_effect(own, runs, without):
    """A patch must change something, unless it is known to change no loss and no gradient."""
    a, b = flat(runs.figures("eager")), flat(without.figures("eager"))
    common = {key for key in a.keys() & b.keys() if key[0] != "extras"}
    changed = [key for key in common if not distance(a[key], b[key]) <= EFFECT]
    if own.unchanged and changed:
        return f"it changes {changed}"
    return None if own.unchanged or changed else "it changes nothing"


def test_init_from_names_new_parameters(shards, tmp_path, monkeypatch, capsys):
    """Which stay as drawn; those that the model lacks are refused."""
    settings = SETTINGS | dict(max_steps=3, prove=False)
    base = train_here(shards[False], tmp_path / "base", **settings)
    init = models.Block.__init__

    def with_more(self, cfg, rope, layer):
        init(self, cfg, rope, layer)
        self.more = models.Linear(cfg.n_embd, 8)

    with monkeypatch.context() as edit:
        edit.setattr(models.Block, "__init__", with_more)
        more = train_here(shards[False], tmp_path / "more", **settings, init_from=tmp_path / "base")
    assert losses(more, "val")[0] == losses(base, "val")[3]
    assert "blocks.0.more.bias" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"more.weight: \(8, 32\), expected absent"):
        train_here(shards[False], tmp_path / "back", **settings, init_from=tmp_path / "more")
