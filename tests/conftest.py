"""Shared by tests: small shards of real text; runs of train.py in this process or over ranks."""

import contextlib
import functools
import itertools
import json
import os
import signal
import sysconfig
import tempfile
from pathlib import Path
from unittest import mock

import faults
import interpreter
import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is first imported
# some virtual machines announce an AMX that ends the process (docs/operations.md)
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# set for all tests: it is read once, and deterministic ones need it
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# without it Inductor starts a pool of processes that import torch
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# else C++ with SIMD, whose headers and probes of the CPU are a third of the compiler's time
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

interpreter.hasten()

import torch._dynamo.config  # noqa: E402, since PyTorch may import Triton for it, and so below
import torch._functorch.config  # noqa: E402
import torch._inductor.config  # noqa: E402
import torch.compiler.config  # noqa: E402
from saved import load as load_checkpoint  # noqa: E402, F401, tests take them from here
from saved import load_model, save_model  # noqa: E402, F401

import kernels  # noqa: E402
import train  # noqa: E402
from configurator import configure, run  # noqa: E402
from fast import forms  # noqa: E402
from run import signals  # noqa: E402
from settings import Config  # noqa: E402
from system import files  # noqa: E402
from system.errors import UserError  # noqa: E402

forms.load()  # as forms.enable does on a GPU; tests put types of device into forms.enabled

ROOT = Path(__file__).parent.parent
if (ROOT.parent / "shared/tiktoken").is_dir():
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(ROOT.parent / "shared/tiktoken"))
# where tiktoken keeps GPT-2's vocabulary: a file named after the SHA-1 of its address
CACHE = os.environ.get("TIKTOKEN_CACHE_DIR") or Path(tempfile.gettempdir(), "data-gym-cache")
GPT2 = Path(CACHE, "6d1cbeee0f20b3d9449abfede4726ed8212e3aee")  # vocab.bpe


@pytest.hookimpl(tryfirst=True)  # before -m chooses by marks
def pytest_collection_modifyitems(items):
    """Skips `gpu` tests without a GPU, marks those of kernels `device`; `long` ones come first."""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("gpt2") and not GPT2.is_file():
            why = "tiktoken's cache has no GPT-2; go online and load it once"
            item.add_marker(pytest.mark.skip(reason=why))
        if "products" in item.fixturenames:
            item.add_marker("device")
        item.user_properties += [
            ("fault", row) for mark in item.iter_markers("fault") for row in mark.args
        ]
    # --dist worksteal gives each process a part in this order, and steals from the end of another's
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


# what compile_model, fusion.register, make_deterministic and serve set for the process; `kept`
# names the rest
SETTINGS = [
    (torch._dynamo.config, "recompile_limit"),
    (torch._dynamo.config, "optimize_ddp"),
    (torch._functorch.config, "autograd_cache_allow_custom_autograd_functions"),
    (torch._inductor.config, "unsafe_marked_cacheable_functions"),
    (torch._inductor.config, "post_grad_custom_pre_pass"),
    (torch.compiler.config, "cache_key_tag"),
    (torch.utils.deterministic, "fill_uninitialized_memory"),
    (forms, "enabled"),
]


@contextlib.contextmanager
def kept():
    """Puts back what is set for the whole process within: no test depends on those before it."""
    environment, enabled = dict(os.environ), set(forms.enabled)
    handlers = {number: signal.getsignal(number) for number in signals.SIGNALS}
    values = [getattr(owner, name) for owner, name in SETTINGS]
    products, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns, dtype = torch.is_deterministic_algorithms_warn_only_enabled(), torch.get_default_dtype()
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for (owner, name), value in zip(SETTINGS, values):
            if getattr(owner, name) is not value:
                setattr(owner, name, value)
        forms.enabled.clear()
        forms.enabled.update(enabled)
        # "high", which autocast sets for all but fp32, is TF32
        torch.set_float32_matmul_precision(products)
        torch.use_deterministic_algorithms(deterministic, warn_only=warns)
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        restore(environment)


def restore(environment):
    """Sets only what is not as in `environment`: another thread may be reading the others."""
    now = dict(os.environ)
    for name in now | environment:
        if now.get(name) != environment.get(name) and name != "PYTEST_CURRENT_TEST":
            os.environ.pop(name, None)
            os.environ.update({name: environment[name]} if name in environment else {})


@pytest.fixture(autouse=True)
def settings_kept():
    """A test on a GPU was red after others had left TF32 on."""
    with kept():
        yield


def write_shard(path, tokens, dtype=np.uint16):
    """An llm.c shard: 256 int32 of header, then the tokens."""
    magic, version = {np.uint16: (20240520, 1), np.uint32: (20240801, 7)}[dtype]
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens)
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype).tobytes())
    return path


def write_manifest(paths):
    """The manifest.json of shards of bytes, written by write_shard into one folder."""
    shards = [dict(name=path.name, sha256=files.digest(path)[1]) for path in paths]
    manifest = dict(tokenizer="bytes", vocab_size=257, eot=256, dtype="uint16", shards=shards)
    (paths[0].parent / "manifest.json").write_text(json.dumps(manifest))


def read_rows(loader, steps):
    """(steps*B, T+1) rows out of a loader's batches."""
    out = []
    for _ in range(steps):
        x, y = loader.next()
        assert x.shape == y.shape == (loader.B, loader.T) and x.dtype == y.dtype == torch.int64
        assert torch.equal(x[:, 1:], y[:, :-1])
        out.append(torch.cat([x, y[:, -1:]], 1).numpy())
    return np.concatenate(out)


def pytest_addoption(parser):
    parser.addoption(
        "--reliability", metavar="FILE", help="write what became of the faults' tests there"
    )


def pytest_configure(config):
    if path := config.getoption("--reliability"):
        config.pluginmanager.register(faults.Table(path))


def one_line(error):
    """The text of an error, or of a pytest.raises, which is to be one line."""
    text = str(getattr(error, "value", error))
    assert "\n" not in text and 0 < len(text) < 2_000
    return text


def stdlib_bytes(count):
    """The first `count` byte tokens of Python's own source, a separator (256) before each file."""
    tokens = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tokens += [256, *path.read_bytes()]
        if len(tokens) >= count:
            return tokens[:count]
    raise AssertionError("the standard library is smaller than this test expects")


def peak_bytes(work):
    """The most bytes that work() held on the CPU at a time, besides what there was before."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        kept = work()  # freed after the profile
    del kept
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return max(itertools.accumulate(changes))


@pytest.fixture
def products(monkeypatch):
    """Without a GPU the products of cublas.py are PyTorch's, in float32."""
    if not torch.cuda.is_available():
        stand_in_for_cublas(monkeypatch.setattr)


def stand_in_for_cublas(put=setattr):
    from fast import cublas

    def matmul(a, b, out, bias=None, gelu=None, dgelu=None, added=None, scales=None, **_):
        product = a.float() @ b.float()
        if scales is not None:
            product *= scales[0] * scales[1]
        if bias is not None:
            product += bias
        if gelu is not None:
            product = kernels.gelu(gelu.copy_(product).float())
        if dgelu is not None:
            ones = torch.ones_like(product)
            product *= torch.ops.aten.gelu_backward(ones, dgelu.float(), approximate="tanh")
        return out.copy_(product if added is None else product + added)

    put(cublas, "matmul", matmul)


@pytest.fixture(params=["graphs", pytest.param("inductor", marks=pytest.mark.slow)])
def compiler(request, monkeypatch):
    """Runs a test twice: with TorchDynamo's graphs alone, and with all that torch.compile does.

    The second builds C++ code, 4 s a kernel on a CPU. The first finds graph breaks, recompilations,
    and what the partition into forward and backward changes.
    """
    torch._dynamo.reset()
    if request.param == "graphs":
        compile_to_graphs(monkeypatch.setattr)
    yield request.param
    torch._dynamo.reset()


def compile_to_graphs(put=setattr):
    """Lets torch.compile and Module.compile make inductor's graphs; ATen's operators run them."""
    put(torch, "compile", functools.partial(torch.compile, backend="aot_eager_decomp_partition"))


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """Two training shards and a validation shard of a few thousand byte tokens."""
    folder = tmp_path_factory.mktemp("shards")
    tokens = stdlib_bytes(15_000)
    write_shard(folder / "py_val_000000.bin", tokens[:3_001])
    write_shard(folder / "py_train_000001.bin", tokens[3_001:9_000])
    write_shard(folder / "py_train_000002.bin", tokens[9_000:])
    return folder


def flags(data_dir, out_dir, **settings):
    """Words of the test recipe on byte shards."""
    base = dict(data_dir=data_dir, out_dir=out_dir, vocab_size=257, device="cpu", tokenizer="bytes")
    base |= dict(prove=False, eval_interval=0) | settings
    return ["config/test.py", *(f"--{name}={value}" for name, value in base.items())]


def train_here(data_dir, out_dir, **settings):
    """Runs train.main in this process; returns the lines of its log.jsonl."""
    with contextlib.chdir(ROOT), mock.patch("run.source.check"):  # edits while tests run
        train.main(configure(Config, flags(data_dir, out_dir, **settings)))
    return read_log(out_dir)


def train_in_rank(words, compiler="inductor"):
    """For ranks.call: train.py's main; (exit code, message) of a user's error, else (0, "")."""
    if compiler == "graphs":
        compile_to_graphs()
    try:
        train.main(configure(Config, words))
    except UserError as error:
        return error.exit_code, str(error)
    return 0, ""


def train_each(words):
    """For ranks.attempt: train.py as a script, with other words in each rank."""
    run(train.main, configure(Config, words[int(os.environ["RANK"])]))


def tell(number=signal.SIGTERM):
    """Sends this process a signal."""
    os.kill(os.getpid(), number)


def read_log(out_dir):
    return [json.loads(line) for line in (Path(out_dir) / "log.jsonl").read_text().splitlines()]


def losses(log, kind="train"):
    """{step: loss}; of a step logged twice, the later."""
    return {line["step"]: line["loss"] for line in log if line["kind"] == kind}
