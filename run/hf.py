"""Hugging Face's GPT-2, Llama, Qwen3 and NanoChat: their names as ours, and folders of safetensors read and written.

Pickled weights are never read. RoPE pairs dimension i with i + D/2 in all, so q and k need no permutation; NanoChat
turns the other way, which is the same with the second half of each head's q and k negated.
"""

import itertools
import os
import shutil
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from configurator import UserError
from model import build, on_meta
from run import checkpoint
from run.files import write_json
from run.hf_config import (
    context_of,
    family_of,
    fetch,
    hf_config,
    read_config,
    read_object,
    tied,
    write_tokenizer,
)

MAX_SHARD_BYTES = 5_000_000_000  # largest file, which a save holds in memory; transformers 4's default

# Our module -> theirs, for import and export. Where there are several of theirs, ours stacks their rows; but mlp.up is
# both of Llama's: relu(gate) * up is the square of ReLU where gate = up. Where there is none, ours is one.
LLAMA_OUTER = {"wte": ["model.embed_tokens"], "norm": ["model.norm"], "head": ["lm_head"]}
LLAMA_BLOCK = {
    "norm_1": ["input_layernorm"],
    "attn.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attn.proj": ["self_attn.o_proj"],
    "norm_2": ["post_attention_layernorm"],
    "mlp.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.up": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.proj": ["mlp.down_proj"],
}
OUTER = {
    "gpt2": {
        "wte": ["transformer.wte"],
        "wpe": ["transformer.wpe"],
        "norm": ["transformer.ln_f"],
        "head": ["lm_head"],
    },
    "llama": LLAMA_OUTER,
    "qwen3": LLAMA_OUTER,
    "nanochat": LLAMA_OUTER | {"norm": []},
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
    "llama": LLAMA_BLOCK,
    "qwen3": LLAMA_BLOCK | {"attn.q_norm": ["self_attn.q_norm"], "attn.k_norm": ["self_attn.k_norm"]},
    "nanochat": LLAMA_BLOCK
    | dict.fromkeys(["norm_1", "norm_2", "attn.q_norm", "attn.k_norm"], [])
    | {"mlp.up": ["mlp.fc1"], "mlp.proj": ["mlp.fc2"]},
}
FOLDED = {  # with embed_norm: our module -> the norm before it (wte: after it) that theirs lacks, put into its weight
    "llama": {"wte": "embed_norm"},
    "qwen3": {"wte": "embed_norm"},
    "nanochat": {"attn.qkv": "norm_1", "mlp.up": "norm_2", "head": "norm"},
}
STEM = {"gpt2": "transformer.h."}  # of a block's names; model.layers. for the others
PREFIX = {"gpt2": "transformer."}  # absent if the model was saved without its head; model. for the others
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # masks and tables in old files


class Part(NamedTuple):
    """The place of one of their tensors in ours."""

    ours: str
    first: int  # row
    last: int
    view: type  # its own inverse: of our rows it makes theirs, of their slice ours
    norm: str | None  # our norm that an export folds into it


class Same:
    """A tensor or a slice of safetensors as it is, read by rows."""

    def __init__(self, part):
        self.part = part

    def get_shape(self):
        return self.part.get_shape()

    def __getitem__(self, rows):
        return self.part[rows]


class Transposed(Same):
    def get_shape(self):
        return self.part.get_shape()[::-1]

    def __getitem__(self, rows):
        return self.part[...].t() if rows is ... else self.part[:, rows].t()


class Mirrored(Same):
    """The second half of each head's rows is negated."""

    def __init__(self, part, head_dim):
        super().__init__(part)
        self.head_dim = head_dim

    def __getitem__(self, rows):
        x = self.part[rows]
        row = torch.arange(x.size(0), device=x.device) + (0 if rows is ... else rows.start)
        return torch.where((row % self.head_dim < self.head_dim // 2)[:, None], x, -x)


def hf_parts(model):
    """{Hugging Face name: Part}.

    In theirs, GPT-2's matrices are transposed (Conv1D), Llama's q, k, v and gate, up are separate, the vocabulary is
    not padded, and a tied head is absent, unless a norm is folded into it or into the embedding. Their GPT-2 always has
    biases; where our model has none, they are zero.
    Raises UserError for parameters of an edited model.py that theirs do not have.
    """
    cfg, family, own, parts = model.cfg, family_of(model.cfg), dict(model.named_parameters()), {}
    modules = list(_modules(family, cfg))
    for ours, theirs, norm in modules:
        place = "wte" if ours == "head" and cfg.tie_embeddings and not tied(cfg) else ours
        if f"{place}.weight" not in own:  # the head, tied to wte; the MLP of another kind
            continue
        weight, bias = own[f"{place}.weight"], f"{place}.bias" in own
        bias |= family == "gpt2" and ours not in ("wte", "wpe", "head")
        transposed = family == "gpt2" and weight.dim() == 2 and ours.startswith("blocks.")
        for name, (first, last) in zip(theirs, _spans(cfg, ours, len(theirs), weight.size(0))):
            view = Transposed if transposed else Same
            if family == "nanochat" and name.endswith(("q_proj", "k_proj")):
                view = partial(Mirrored, head_dim=cfg.head_dim)
            parts[f"{name}.weight"] = Part(f"{place}.weight", first, last, view, norm)
            if bias:
                parts[f"{name}.bias"] = Part(f"{place}.bias", first, last, Same, None)
    gains = {f"{ours}.weight" for ours, theirs, _ in modules if not theirs}
    if more := sorted(own.keys() - gains - {part.ours for part in parts.values()}):
        names = ", ".join(more[:3]) + f" and {len(more) - 3} more" * (len(more) > 3)
        raise UserError(
            f"model.py has parameters that a Hugging Face {family} does not have: {names}; it cannot be exported"
        )
    return parts


def _modules(family, cfg):
    """Yields (our module, their modules, our norm that is folded into it, or None)."""
    folded, stem = FOLDED[family] if cfg.embed_norm else {}, STEM.get(family, "model.layers.")
    yield from ((ours, theirs, folded.get(ours)) for ours, theirs in OUTER[family].items())
    for i in range(cfg.n_layer):
        for ours, theirs in BLOCK[family].items():
            norm = f"blocks.{i}.{folded[ours]}" if ours in folded else None
            yield f"blocks.{i}.{ours}", [f"{stem}{i}.{name}" for name in theirs], norm


def _spans(cfg, ours, count, rows):
    """(first, last) row in ours of each of their `count` tensors."""
    if count < 2 or ours.endswith("mlp.up"):
        return [(0, cfg.vocab_size if ours in ("wte", "head") else rows)] * count
    heads = [n * cfg.head_dim for n in (cfg.n_head, cfg.kv_heads, cfg.kv_heads)]
    return itertools.pairwise([0, *itertools.accumulate(heads if count == 3 else [cfg.hidden] * 2)])


def open_tensors(folder, family):
    """{full Hugging Face name: slice of safetensors} from one file or the files of an index, without buffers."""
    index = folder / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.exists():
        places = read_object(index).get("weight_map", {})
        if not isinstance(places, dict):
            raise UserError(f"{index}: weight_map is not a JSON object")
        files = sorted(set(places.values()))
    tensors, prefix = {}, PREFIX.get(family, "model.")
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
                full = name if name.startswith((prefix, "lm_head.")) else prefix + name
                tensors[full] = handle.get_slice(name)
    return tensors


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
    for key, (ours, first, last, view, _) in parts.items():
        if key not in theirs:
            continue
        stored = checkpoint.Stored(key, [(0, theirs[key])])
        shape = (last - first, *own[ours].shape[1:])[:: -1 if view is Transposed else 1]
        if stored.shape != shape or not stored.dtype.is_floating_point:
            wrong.append(f"{key} is {tuple(stored.shape)} {stored.dtype}, expected {shape} of floats")
        twin = found.setdefault(ours, {}).setdefault(first, view(theirs[key]))
        if twin.part is not theirs[key] and not torch.equal(twin[...].float(), theirs[key][...].float()):
            wrong.append(
                f"{key} is not equal to gate_proj's, without which hidden_act=relu is not ReLU squared"
            )
    if not wrong:
        tensors = {name: torch.ones(p.shape) for name, p in own.items() if name not in found}
        tensors |= {ours: checkpoint.Stored(ours, slices.items()) for ours, slices in found.items()}
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
    Raises UserError for a model that is none of theirs, a `path` in use, or a full disk.
    """
    path, parts = Path(path), hf_parts(model)
    own = checkpoint.model_tensors(model)
    tensors = own if tensors is None else tensors
    if wrong := sorted(tensors.keys() ^ own.keys()):
        raise UserError(
            f"the checkpoint's weights are not those of today's model.py: {', '.join(wrong[:3])}; no export"
        )
    for name in tensors if family_of(model.cfg) == "nanochat" else ():
        if name.endswith(("q_norm.weight", "k_norm.weight")) and not (tensors[name][...] == 1).all():
            raise UserError(
                f"qk_norm=True with softcap={model.cfg.softcap}: a Hugging Face nanochat's QK norm has no gains, but "
                f"those in {name} are not all one; it cannot be exported"
            )
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{path} exists and is not an empty folder; nothing was written, try another name")
    aside = path.absolute().with_name(f".writing_{path.name}")
    shutil.rmtree(aside, ignore_errors=True)  # left by a killed save
    try:
        aside.mkdir(parents=True)
        ids = write_tokenizer(aside, tokenizer, context_of(model.cfg)) if tokenizer else {}
        write_json(aside / "config.json", hf_config(model.cfg, dtype, **ids))
        _write_shards(aside, parts, tensors, dtype, max_shard_bytes, model.cfg.norm_eps)
        os.rename(aside, path)
    except (OSError, SafetensorError, UserError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise UserError(f"{path}: cannot be written ({error}); nothing of it is kept") from None
    return path


def _write_shards(folder, parts, tensors, dtype, max_bytes, eps):
    """Writes model.safetensors, or several files and their index if the tensors take more than max_bytes."""
    sizes = {}
    for name, (ours, first, last, *_) in parts.items():
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
        save_file({n: _theirs(tensors, parts[n], dtype, eps) for n in names}, folder / file, {"format": "pt"})
    if len(shards) > 1:
        weight_map = {name: file for file, names in zip(files, shards) for name in names}
        index = dict(metadata={"total_size": sum(sizes.values())}, weight_map=weight_map)
        write_json(folder / "model.safetensors.index.json", index)


def _theirs(tensors, part, dtype, eps):
    """One of their tensors on the CPU: rows of ours, with its norm folded in; zeros for a bias that our model lacks."""
    ours, first, last, view, norm = part
    rows = tensors[ours][first:last].detach().cpu() if ours in tensors else torch.zeros(last - first)
    if norm == "embed_norm":
        rows = F.rms_norm(rows.float(), rows.shape[1:], eps=eps)
    elif (gain := tensors.get(f"{norm}.weight")) is not None:
        rows = rows.float() * gain[...].detach().cpu().float()
    return view(rows)[...].to(
        dtype, copy=True, memory_format=torch.contiguous_format
    )  # gate and up share no memory
