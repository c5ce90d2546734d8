"""Hugging Face's GPT-2 and Llama: their names and settings as ours, and folders of safetensors read and written.

Pickled weights are never read. RoPE pairs dimension i with i + D/2 in both, so q and k need no permutation.
"""

import itertools
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from configurator import UserError
from model import build, on_meta
from run import checkpoint
from run.files import write_json
from run.hf_config import context_of, family_of, fetch, hf_config, read_config, read_object, write_tokenizer

MAX_SHARD_BYTES = 5_000_000_000  # largest file, which a save holds in memory; transformers 4's default

# Our module -> theirs, for import and export. Where there are several of theirs, ours stacks their rows.
OUTER = {
    "gpt2": {"wte": ["transformer.wte"], "wpe": ["transformer.wpe"], "norm": ["transformer.ln_f"], "head": ["lm_head"]},
    "llama": {"wte": ["model.embed_tokens"], "norm": ["model.norm"], "head": ["lm_head"]},
}
BLOCK = {  # our names follow "blocks.{i}."
    "gpt2": {
        "norm_1": ["ln_1"],
        "attn.qkv": ["attn.c_attn"],
        "attn.proj": ["attn.c_proj"],
        "norm_2": ["ln_2"],
        "mlp.up": ["mlp.c_fc"],
        "mlp.proj": ["mlp.c_proj"],
    },
    "llama": {
        "norm_1": ["input_layernorm"],
        "attn.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "attn.proj": ["self_attn.o_proj"],
        "norm_2": ["post_attention_layernorm"],
        "mlp.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "mlp.proj": ["mlp.down_proj"],
    },
}
PREFIX = {"gpt2": "transformer.", "llama": "model."}  # absent if the model was saved without its head
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # masks and tables in old files


def hf_parts(model):
    """{Hugging Face name: (our name, first row, last row, transposed)}: the place of each of their tensors in ours.

    In theirs, GPT-2's matrices are transposed (Conv1D), Llama's q, k, v and gate, up are separate, the vocabulary is
    not padded, and a tied head is absent. Their GPT-2 always has biases; where our model has none, they are zero.
    Raises UserError for parameters of an edited model.py that theirs do not have.
    """
    family, own, parts = family_of(model.cfg), dict(model.named_parameters()), {}
    for ours, theirs in _modules(family, model.cfg.n_layer):
        if f"{ours}.weight" not in own:  # the head, tied to wte
            continue
        weight, bias = own[f"{ours}.weight"], f"{ours}.bias" in own
        bias |= family == "gpt2" and ours not in ("wte", "wpe", "head")
        ends = [0, *itertools.accumulate(_rows(model.cfg, ours, len(theirs)) or [weight.size(0)])]
        transposed = family == "gpt2" and weight.dim() == 2 and ours.startswith("blocks.")
        for name, first, last in zip(theirs, ends, ends[1:]):
            parts[f"{name}.weight"] = f"{ours}.weight", first, last, transposed
            if bias:
                parts[f"{name}.bias"] = f"{ours}.bias", first, last, False
    if more := sorted(own.keys() - {ours for ours, *_ in parts.values()}):
        names = ", ".join(more[:3]) + f" and {len(more) - 3} more" * (len(more) > 3)
        raise UserError(
            f"model.py has parameters that a Hugging Face {family} does not have: {names}; it cannot be exported"
        )
    return parts


def _modules(family, n_layer):
    """Yields (our module, their modules)."""
    yield from OUTER[family].items()
    stem = {"gpt2": "transformer.h.", "llama": "model.layers."}[family]
    for i in range(n_layer):
        for ours, theirs in BLOCK[family].items():
            yield f"blocks.{i}.{ours}", [f"{stem}{i}.{name}" for name in theirs]


def _rows(cfg, ours, parts):
    """Numbers of rows in ours of each of their tensors; None if there is one with all rows."""
    if ours in ("wte", "head"):
        return [cfg.vocab_size]
    if ours.endswith("gate_up"):
        return [cfg.hidden] * 2
    return [n * cfg.head_dim for n in (cfg.n_head, cfg.kv_heads, cfg.kv_heads)] if parts == 3 else None


def open_tensors(folder, family):
    """{full Hugging Face name: slice of safetensors} from one file or the files of an index, without buffers."""
    index = folder / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.exists():
        places = read_object(index).get("weight_map", {})
        if not isinstance(places, dict):
            raise UserError(f"{index}: weight_map is not a JSON object")
        files = sorted(set(places.values()))
    tensors = {}
    for file in files:
        if not (folder / file).is_file():
            raise UserError(
                f"{folder / file}: missing; only safetensors are read, never pickled weights (pytorch_model.bin): "
                "load and save those with transformers' save_pretrained first"
            )
        try:
            handle = safe_open(folder / file, "pt")
        except SafetensorError as error:
            raise UserError(f"{folder / file}: damaged or not safetensors ({error})") from None
        for name in handle.keys():
            if not name.endswith(BUFFERS):
                full = name if name.startswith((PREFIX[family], "lm_head.")) else PREFIX[family] + name
                tensors[full] = handle.get_slice(name)
    return tensors


class Transposed:
    """The transpose of a slice of safetensors, read by rows as the slice is."""

    def __init__(self, part):
        self.part = part

    def get_shape(self):
        return self.part.get_shape()[::-1]

    def __getitem__(self, rows):
        return self.part[...].t() if rows is ... else self.part[:, rows].t()


def open_hf(name):
    """({our name: Stored}, ImportedConfig) of a folder or hub name; rows are read when they are indexed.

    Embedding and head have no padding rows. Raises UserError for another kind of model, and for tensors that are
    missing, unexpected or of another shape.
    """
    folder = fetch(name)
    cfg = read_config(folder)
    theirs = open_tensors(folder, family_of(cfg))
    head = theirs.pop("lm_head.weight", None) if cfg.tie_embeddings else None
    model = on_meta(cfg)
    own, parts = dict(model.named_parameters()), hf_parts(model)
    wrong = [f"{k} missing" for k in parts.keys() - theirs.keys()]
    wrong += [f"{k} not expected" for k in theirs.keys() - parts.keys()]
    found = {}
    for key in parts.keys() & theirs.keys():
        ours, first, last, transposed = parts[key]
        stored = checkpoint.Stored(key, [(0, theirs[key])])
        shape = (last - first, *own[ours].shape[1:])[:: -1 if transposed else 1]
        if stored.shape != shape or not stored.dtype.is_floating_point:
            wrong.append(f"{key} is {tuple(stored.shape)} {stored.dtype}, expected {shape} of floats")
        found.setdefault(ours, []).append((first, Transposed(theirs[key]) if transposed else theirs[key]))
    if not wrong:
        tensors = {ours: checkpoint.Stored(ours, slices) for ours, slices in found.items()}
        if head is not None and not torch.equal(head[...].float(), tensors["wte.weight"][...].float()):
            wrong.append("lm_head.weight differs from the embedding, though tie_word_embeddings=true")
    if wrong:
        raise UserError(
            f"{folder}: its tensors do not fit its config.json: {'; '.join(sorted(wrong)[:3])} ({len(wrong)} in all)"
        )
    return tensors, cfg


@torch.no_grad()
def load_hf(name, device="cpu"):
    """(GPT in float32 on `device`, its ImportedConfig) from a folder or hub name; raises UserError as open_hf."""
    tensors, cfg = open_hf(name)
    model = build(cfg, torch.device(device))
    model.wte.weight.zero_()  # for the padding rows, which files do not have
    model.head.weight.zero_()
    checkpoint.load_model_tensors(model, tensors, cfg.vocab_size)
    return model.eval(), cfg


def save_hf(model, path, dtype=torch.float32, max_shard_bytes=MAX_SHARD_BYTES, tensors=None, tokenizer=None):
    """Writes a folder that transformers' AutoModelForCausalLM loads, complete or not at all; returns its path.

    tensors: {our name: tensor or Stored} for a model on meta, read one file at a time; None: the model's parameters.
    tokenizer: its corpus.tokenizer.Tokenizer; None: a folder without one.
    Raises UserError for a model that is neither a GPT-2 nor a Llama, a `path` in use, or a full disk.
    """
    path, parts = Path(path), hf_parts(model)
    own = checkpoint.model_tensors(model)
    tensors = own if tensors is None else tensors
    if wrong := sorted(tensors.keys() ^ own.keys()):
        raise UserError(
            f"the checkpoint's weights are not those of today's model.py: {', '.join(wrong[:3])}; no export"
        )
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{path} exists and is not an empty folder; nothing was written, try another name")
    aside = path.absolute().with_name(f".writing_{path.name}")
    shutil.rmtree(aside, ignore_errors=True)  # left by a killed save
    try:
        aside.mkdir(parents=True)
        ids = write_tokenizer(aside, tokenizer, context_of(model.cfg)) if tokenizer else {}
        write_json(aside / "config.json", hf_config(model.cfg, dtype, **ids))
        _write_shards(aside, parts, tensors, dtype, max_shard_bytes)
        os.rename(aside, path)
    except (OSError, SafetensorError, UserError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise UserError(f"{path}: cannot be written ({error}); nothing of it is kept") from None
    return path


def _write_shards(folder, parts, tensors, dtype, max_bytes):
    """Writes model.safetensors, or several files and their index if the tensors take more than max_bytes."""
    sizes = {}
    for name, (ours, first, last, _) in parts.items():
        width = tensors[ours].shape[1:].numel() if ours in tensors else 1
        sizes[name] = (last - first) * width * dtype.itemsize
    shards, size = [[]], 0
    for name, nbytes in sizes.items():
        if shards[-1] and size + nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    files = ["model.safetensors"] if len(shards) == 1 else files
    for file, names in zip(files, shards):
        save_file({n: _theirs(tensors, *parts[n], dtype) for n in names}, folder / file, {"format": "pt"})
    if len(shards) > 1:
        weight_map = {name: file for file, names in zip(files, shards) for name in names}
        index = dict(metadata={"total_size": sum(sizes.values())}, weight_map=weight_map)
        write_json(folder / "model.safetensors.index.json", index)


def _theirs(tensors, ours, first, last, transposed, dtype):
    """One of their tensors on the CPU: rows of ours, or zeros for a bias that our model lacks."""
    rows = tensors[ours][first:last].detach() if ours in tensors else torch.zeros(last - first)
    return (rows.t() if transposed else rows).to("cpu", dtype).contiguous()
