"""Hugging Face weights in and out: GPT-2 and Llama as safetensors. Nothing pickled is read.

    python convert.py --from_hf=gpt2 --out=out/gpt2                 # a hub name or a folder -> a checkpoint
    python convert.py --checkpoint=out/gpt2_124m --to_hf=out/hf     # -> a folder for AutoModelForCausalLM
    python convert.py --checkpoint=out/llama3_8b --out=out/merged   # what ranks wrote, merged: a file for all weights

A merge has one group in memory at a time: of AdamW's states 8 bytes a parameter. An export has one file of 5 GB.
Half-split RoPE is what Hugging Face's Llama and ours both have, so that q and k are not permuted.
"""

import itertools
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import checkpoint
from configurator import UserError, run
from model import GPTConfig, build, on_meta

MAX_SHARD_BYTES = 5_000_000_000  # a file; transformers' own limit for long, and the most that a save holds twice

# Our module -> theirs; several of theirs lie one below the other in ours. Used in both directions.
OUTER = {
    "gpt2": {"wte": ["transformer.wte"], "wpe": ["transformer.wpe"], "norm": ["transformer.ln_f"], "head": ["lm_head"]},
    "llama": {"wte": ["model.embed_tokens"], "norm": ["model.norm"], "head": ["lm_head"]},
}
BLOCK = {  # below "blocks.{i}." in ours
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
PREFIX = {"gpt2": "transformer.", "llama": "model."}  # missing from a dump of the model without its head
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # masks and tables that old dumps carry

SHAPES = {  # the settings that make a model of ours one of theirs
    "gpt2": dict(norm="layernorm", positions="learned", mlp="gelu", qk_norm=False, softcap=None),
    "llama": dict(norm="rmsnorm", positions="rope", mlp="swiglu", qk_norm=False, softcap=None),
}
KEYS = {  # their key in config.json -> our setting, in both directions
    "gpt2": {
        "vocab_size": "vocab_size",
        "n_positions": "block_size",
        "n_layer": "n_layer",
        "n_head": "n_head",
        "n_embd": "n_embd",
        "n_inner": "n_hidden",
        "layer_norm_epsilon": "norm_eps",
        "tie_word_embeddings": "tie_embeddings",
    },
    "llama": {
        "vocab_size": "vocab_size",
        "max_position_embeddings": "block_size",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "num_key_value_heads": "n_kv_head",
        "hidden_size": "n_embd",
        "intermediate_size": "n_hidden",
        "rms_norm_eps": "norm_eps",
        "attention_bias": "bias",
        "tie_word_embeddings": "tie_embeddings",
    },
}
ROPE_KEYS = {
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_freq",
    "high_freq_factor": "rope_high_freq",
    "original_max_position_embeddings": "rope_original",
}
ABSENT = {  # what they mean by a key that is not there
    "gpt2": {"n_inner": None, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    "llama": {"num_key_value_heads": None, "rms_norm_eps": 1e-6, "attention_bias": False, "tie_word_embeddings": False},
}
SUPPORTED = {  # values of theirs that we compute, their default first
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "quantization_config": (None,),
    },
    "llama": {"hidden_act": ("silu", "swish"), "quantization_config": (None,)},
}


@dataclass
class Config:
    from_hf: str | None = None  # Hugging Face weights to read: a folder or a hub name
    out: str | None = None  # where the checkpoint goes, with from_hf or checkpoint
    checkpoint: str | None = None  # a run's or a checkpoint's folder to export or to merge
    to_hf: str | None = None  # where the Hugging Face folder goes, with checkpoint
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the exported weights


@dataclass
class ImportedConfig(GPTConfig):
    tokenizer: str | None = None  # what sample.py needs: gpt2, or the tokenizer.json beside the weights


def family_of(cfg):
    """The family of `cfg`, gpt2 or llama, or UserError naming the settings that neither has."""
    family = "llama" if cfg.norm == "rmsnorm" else "gpt2"
    wrong = [f"{k}={getattr(cfg, k)}" for k, v in SHAPES[family].items() if getattr(cfg, k) != v]
    if family == "gpt2" and cfg.kv_heads != cfg.n_head:
        wrong.append(f"n_kv_head={cfg.n_kv_head}")
    if wrong:
        raise UserError(f"{', '.join(wrong)}: a Hugging Face {family} (norm={cfg.norm}) has no such thing, no export")
    return family


def hf_parts(model):
    """{Hugging Face name: (our name, our rows first and last, transposed)}: where each of their tensors lies in ours.

    Conv1D is transposed, q k v and gate up apart, the vocabulary's padding out of sight, a tied head absent. GPT-2 has
    biases, of our names too where our model was built without.
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
    return parts


def _modules(family, n_layer):
    """(our module, their modules) one after another."""
    yield from OUTER[family].items()
    stem = {"gpt2": "transformer.h.", "llama": "model.layers."}[family]
    for i in range(n_layer):
        for ours, theirs in BLOCK[family].items():
            yield f"blocks.{i}.{ours}", [f"{stem}{i}.{name}" for name in theirs]


def _rows(cfg, ours, parts):
    """Rows of ours that each of their tensors takes; None: one takes all."""
    if ours in ("wte", "head"):
        return [cfg.vocab_size]
    if ours.endswith("gate_up"):
        return [cfg.hidden] * 2
    return [n * cfg.head_dim for n in (cfg.n_head, cfg.kv_heads, cfg.kv_heads)] if parts == 3 else None


def read_config(folder):
    """The ImportedConfig that a Hugging Face folder's config.json describes; UserError where we have no such model."""
    path = Path(folder) / "config.json"
    hf = _read_json(path)
    family = hf.get("model_type")
    if not isinstance(family, str) or family not in SUPPORTED:
        raise UserError(f"{path}: model_type={family} is not supported, only gpt2 and llama are")
    for key, values in SUPPORTED[family].items():
        if hf.get(key, values[0]) not in values:
            raise UserError(f"{path}: {key}={hf[key]} is not supported, expected {values[0]}")
    hf = ABSENT[family] | hf
    try:
        settings = {ours: hf[theirs] for theirs, ours in KEYS[family].items()}
        if family == "llama":
            settings |= _llama_settings(hf, path)
        cfg = ImportedConfig(**settings, tokenizer=_tokenizer_of(folder, hf))
        cfg.n_kv_head = None if cfg.n_kv_head == cfg.n_head else cfg.n_kv_head  # as the recipes spell it
        cfg.n_hidden = None if cfg.n_hidden == 4 * cfg.n_embd else cfg.n_hidden
        counts = ("vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd", "n_hidden", "block_size")
        wrong = [f"{k}={v} is not a whole number" for k in counts if not isinstance(v := getattr(cfg, k), int | None)]
        wrong = wrong or cfg.problems()
    except KeyError as error:
        raise UserError(f"{path}: {error.args[0]} is missing") from None
    except (TypeError, ZeroDivisionError) as error:
        raise UserError(f"{path}: a value is of the wrong type or zero ({error})") from None
    if wrong:
        raise UserError(f"{path}: {'; '.join(wrong)}")
    return cfg


def _llama_settings(hf, path):
    """What is not one key to one setting: the kind of block, and RoPE as transformers 5 or 4 spells it."""
    C, H = hf["hidden_size"], hf["num_attention_heads"]
    if (hf.get("head_dim") or C // H) * H != C:
        raise UserError(f"{path}: head_dim={hf.get('head_dim')} is not hidden_size / num_attention_heads = {C}/{H}")
    if hf.get("mlp_bias", False) != hf["attention_bias"]:
        raise UserError(f"{path}: attention_bias={hf['attention_bias']} needs the same mlp_bias; ours are one setting")
    rope = {"rope_theta": hf.get("rope_theta") or 10000.0}
    rope |= {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    kind, partial = rope.get("rope_type", rope.get("type", "default")), rope.get("partial_rotary_factor", 1.0)
    if kind not in ("default", "llama3") or partial != 1.0:
        raise UserError(f"{path}: rope_type={kind}, partial_rotary_factor={partial}: only default or llama3, and 1.0")
    scaling = {ours: rope[theirs] for theirs, ours in ROPE_KEYS.items()} if kind == "llama3" else {}
    return dict(norm="rmsnorm", positions="rope", mlp="swiglu", rope_theta=rope["rope_theta"], **scaling)


def _tokenizer_of(folder, hf):
    if hf["vocab_size"] == 50257:
        return "gpt2"
    path = Path(folder) / "tokenizer.json"
    return str(path) if path.is_file() else None


def _read_json(path):
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); expected a Hugging Face model's folder") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object")
    return value


def fetch(name):
    """The local folder of `name`: itself if it is one, else a snapshot from the hub (or its cache)."""
    if Path(name).exists() or str(name).startswith((".", "/", "~")) or str(name).count("/") > 1:
        return Path(name)
    import huggingface_hub

    kinds = ["*.json", "*.safetensors", "tokenizer*", "merges.txt"]
    try:
        # not what lies in subfolders: other formats of the same weights
        return Path(huggingface_hub.snapshot_download(str(name), allow_patterns=kinds, ignore_patterns=["*/*"]))
    except Exception as error:  # the hub's own, its HTTP client's, the disk's: all mean that there is no folder
        reason = str(error).partition("\n")[0]
        raise UserError(f"{name}: no such folder, and the hub gave none ({type(error).__name__}: {reason})") from None


def open_tensors(folder, family):
    """{full Hugging Face name: slice of safetensors} over one file or the shards of an index; buffers left out."""
    index = folder / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.exists():
        places = _read_json(index).get("weight_map", {})
        if not isinstance(places, dict):
            raise UserError(f"{index}: weight_map is no JSON object")
        files = sorted(set(places.values()))
    tensors = {}
    for file in files:
        if not (folder / file).is_file():
            raise UserError(
                f"{folder / file}: not there; only safetensors are read, pickled weights (pytorch_model.bin) never: "
                "load and save them with transformers' save_pretrained first"
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
    """A slice of safetensors, turned around."""

    def __init__(self, part):
        self.part = part

    def get_shape(self):
        return self.part.get_shape()[::-1]

    def __getitem__(self, rows):
        return self.part[...].t() if rows is ... else self.part[:, rows].t()


def open_hf(name):
    """({our name: Stored}, ImportedConfig) of a folder or hub name; no row is read before it is asked for.

    Embedding and head have no padding rows. Raises UserError for another kind of model, missing, surplus or misshapen
    tensors.
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
        raise UserError(f"{folder}: does not fit its config.json: {'; '.join(sorted(wrong)[:3])} ({len(wrong)} in all)")
    return tensors, cfg


@torch.no_grad()
def load_hf(name, device="cpu"):
    """(GPT in float32 on `device`, its ImportedConfig) from a folder or hub name; raises UserError as open_hf."""
    tensors, cfg = open_hf(name)
    model = build(cfg, torch.device(device))
    model.wte.weight.zero_()  # the padding rows, which no file has
    model.head.weight.zero_()
    checkpoint.load_model_tensors(model, tensors, cfg.vocab_size)
    return model.eval(), cfg


def save_hf(model, path, dtype=torch.float32, max_shard_bytes=MAX_SHARD_BYTES, tensors=None):
    """Writes `model` as a folder that transformers' AutoModelForCausalLM loads: whole, or not at all.

    tensors: {our name: tensor or Stored}, the weights of a model on meta, read a file's worth at a time; None: its own.
    Raises UserError for a model that is neither a GPT-2 nor a Llama, a `path` in use, or a full disk.
    """
    path, parts = Path(path), hf_parts(model)
    tensors = checkpoint.model_tensors(model) if tensors is None else tensors
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{path} exists and is not an empty folder; nothing was written, try another name")
    aside = path.absolute().with_name(f".writing_{path.name}")
    shutil.rmtree(aside, ignore_errors=True)  # of a save that was killed
    try:
        aside.mkdir(parents=True)
        _write_json(aside / "config.json", hf_config(model.cfg, dtype))
        _write_shards(aside, parts, tensors, dtype, max_shard_bytes)
        os.rename(aside, path)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise UserError(f"{path}: cannot write ({error}); nothing is left of it") from None
    return path


def _write_shards(folder, parts, tensors, dtype, max_bytes):
    """model.safetensors, or several and their index where the tensors take more than max_bytes."""
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
        _write_json(folder / "model.safetensors.index.json", index)


def _theirs(tensors, ours, first, last, transposed, dtype):
    """One of their tensors: rows of ours, of a bias that we have not zeros."""
    rows = tensors[ours][first:last].detach() if ours in tensors else torch.zeros(last - first)
    return (rows.t() if transposed else rows).to("cpu", dtype).contiguous()


def hf_config(cfg, dtype):
    """config.json's content, in transformers 4's spelling, which 5 and the other readers take as well."""
    separator = 50256 if cfg.vocab_size == 50257 else None  # GPT-2's; of another tokenizer nothing is known
    family = family_of(cfg)
    config = {theirs: getattr(cfg, ours) for theirs, ours in KEYS[family].items()}
    config |= dict(bos_token_id=separator, eos_token_id=separator, torch_dtype=str(dtype).removeprefix("torch."))
    if family == "gpt2":
        config |= dict(model_type="gpt2", architectures=["GPT2LMHeadModel"], activation_function="gelu_new")
        return config | dict.fromkeys(["embd_pdrop", "attn_pdrop", "resid_pdrop"], cfg.dropout)
    scaling = {"rope_type": "llama3", **{theirs: getattr(cfg, ours) for theirs, ours in ROPE_KEYS.items()}}
    config |= dict(model_type="llama", architectures=["LlamaForCausalLM"], hidden_act="silu", head_dim=cfg.head_dim)
    config |= dict(num_key_value_heads=cfg.kv_heads, intermediate_size=cfg.hidden, mlp_bias=cfg.bias)
    config |= dict(rope_theta=cfg.rope_theta, rope_scaling=None if cfg.rope_factor is None else scaling)
    return config | dict(attention_dropout=cfg.dropout)


def _write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


def refuse_used(out):
    if Path(out).exists() and (not Path(out).is_dir() or any(Path(out).iterdir())):
        what = "not empty" if Path(out).is_dir() else "no folder"
        raise UserError(f"out={out} is {what}; nothing was written, try another name")


def main(cfg):
    if cfg.from_hf and cfg.out and not (cfg.checkpoint or cfg.to_hf):
        refuse_used(cfg.out)
        model, shape = load_hf(cfg.from_hf)
        print(f"wrote {checkpoint.save_model(cfg.out, model, shape)}; go on with --checkpoint or --init_from={cfg.out}")
    elif cfg.checkpoint and cfg.to_hf and not (cfg.from_hf or cfg.out):
        tensors, shape, _ = checkpoint.open_model(cfg.checkpoint)
        path = save_hf(on_meta(shape), cfg.to_hf, getattr(torch, cfg.dtype), tensors=tensors)
        print(f"wrote {path} in {cfg.dtype}")
    elif cfg.checkpoint and cfg.out and not (cfg.from_hf or cfg.to_hf):
        refuse_used(cfg.out)
        tensors, state = checkpoint.open_folder(checkpoint.find(cfg.checkpoint))
        print(f"wrote {checkpoint.save(cfg.out, state['step'], tensors, state)}; go on with --resume={cfg.out}")
    else:
        raise UserError(
            "give --from_hf=NAME or --checkpoint=FOLDER, and --out=FOLDER; or --checkpoint and --to_hf=FOLDER"
        )


if __name__ == "__main__":
    run(main, Config)
