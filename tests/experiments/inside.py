"""What a process of tests/ranks.py does for a patch: imports patched sources, and runs them.

Importing torch takes seconds and a run of six steps a quarter of one, so that the server of
ranks.py has imported torch, and one forked process does all of a patch's runs that need no ranks.
"""

import contextlib
import functools
import importlib
import io
import os
import shutil
import sys
import traceback
from pathlib import Path
from unittest import mock

import torch

ROOT = Path(__file__).parent.parent.parent


def use(folder):
    """Has this process import the sources from `folder`, as though it had been started there."""
    inside = [
        ROOT,
        *(path for path in ROOT.iterdir() if path.is_dir() and path.name not in ("tests", ".venv")),
    ]
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if file and Path(file).parent in inside:
            del sys.modules[name]
    sys.modules.pop("saved", None)  # it knows the modules of before
    sys.path[:] = [str(folder), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
    os.chdir(folder)
    importlib.invalidate_caches()


def sources():
    """(train, configurator, settings) of the folder that `use` named."""
    names = "train", "configurator", "settings"
    modules = [importlib.import_module(name) for name in names]
    assert all(Path(module.__file__).parent == Path.cwd() for module in modules)
    return modules


def run(words):
    """`python train.py WORDS` -> (exit code, what its one line says); code 1: a traceback."""
    train, configurator, settings = sources()
    from scale import parallel

    def main():
        train.main(configurator.configure(settings.Config, [*map(str, words)], settings.check))

    try:
        return guarded(main)
    finally:
        parallel.stop()


def alone(folder, patch_module, name, runs, plain, out, more):
    """{mode: (exit code, words), or (0, what it finds)} of all that one process does for a patch.

    runs: {mode: words of train.py}; plain: {"plain" or "plain masked": (words, data)}; out: the
    folder of the eager run; more: whether "sampled" and "exported" take its model.
    """
    use(folder)
    found = {}
    for mode, words in runs.items():
        if mode == "resumed" and not found["eager"][0]:
            step = "step_00000003"
            shutil.copytree(out / step, out.with_name(mode) / step)
        with compiled_to_graphs() if mode == "compiled" else contextlib.nullcontext():
            found[mode] = run(words)
    patch = find(patch_module, name)
    for mode, (words, data) in plain.items():
        found[mode] = guarded(plain_loop, patch, words, data)
    for mode, function in dict(sampled=samples, exported=export).items():
        if mode in more and not found["eager"][0]:
            found[mode] = guarded(function, out)
    return found


def over_ranks(folder, runs, ports):
    """{mode: (exit code, words)} of runs over ranks, in turn, each with a port of its own."""
    use(folder)
    from scale import memory

    memory.UNIT_MIB = 0  # so that FSDP2 has a unit for each block
    found = {}
    for (mode, words), port in zip(runs.items(), ports):
        os.environ["MASTER_PORT"] = str(port)
        before = mode.removeprefix("resumed ")
        # rank 0 copies; the others wait to join
        if before != mode and os.environ["RANK"] == "0" and not found[before][0]:
            out, step = Path(folder).parent, "step_00000003"
            shutil.copytree(out / before / step, out / mode / step)
        found[mode] = run(words)
    return found


def begun(folder, words):
    """(exit code, words, what was printed) of a run of the sources in a folder."""
    use(folder)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code, error = run(words)
    return code, error, said.getvalue()


def find(module, name):
    patches = importlib.import_module(module).PATCHES
    return next(patch for patch in patches if patch.name == name)


def guarded(function, *arguments):
    """(0, the function's value), or (a code, words) as of `run`."""
    configurator = sys.modules["configurator"]
    try:
        return 0, function(*arguments)
    except configurator.UserError as error:
        return error.exit_code, str(error)
    except BaseException:
        return 1, traceback.format_exc()


def compiled_to_graphs():
    """As conftest.compile_to_graphs, for one run."""
    torch._dynamo.reset()
    graphs = functools.partial(torch.compile, backend="aot_eager_decomp_partition")
    return mock.patch.object(torch, "compile", graphs)


def plain_loop(patch, words, data):
    _, configurator, settings = sources()
    plain = importlib.import_module("experiments.plain")
    cfg = configurator.configure(settings.Config, list(map(str, words)), settings.check)
    return plain.train(patch, cfg, data)


def samples(out):
    """(ids with a KV cache, ids without, what was said)"""
    from run import sampling

    model, said = importlib.import_module("saved").load_model(out), io.StringIO()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(6 if p.dim() == 2 else 1)  # as though trained for long: what a part does shows
    torch.manual_seed(0)
    prompt = torch.cat([torch.full((3, 1), 256), torch.randint(0, 256, (3, 6))], 1)
    prompt[2, 4] = 256  # another document
    with contextlib.redirect_stderr(said):
        ids = []
        for cache in (sampling.make_cache(model, 256), None):
            ids.append([*sampling.steps(model, prompt, 20, 0.7, None, 1, cache)])
    return *ids, said.getvalue()


def export(out):
    """Exports with --check, which compares transformers' logits with the model's."""
    import convert

    with contextlib.redirect_stdout(io.StringIO()):
        convert.main(
            convert.Config(checkpoint=str(out), to_hf=str(out.with_name("hf")), check=True)
        )
