"""Hugging Face's GPT-2 and Llama: config.json as our settings, and the small files beside it. Imports no torch."""

import json
import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from configurator import UserError
from run.files import read_json, write_json
from settings import GPTConfig

SHAPES = {  # the settings that describe one of their models
    "gpt2": dict(norm="layernorm", positions="learned", mlp="gelu", qk_norm=False, softcap=None),
    "llama": dict(norm="rmsnorm", positions="rope", mlp="swiglu", qk_norm=False, softcap=None),
}
KEYS = {  # their key in config.json -> our setting, for import and export
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
ABSENT = {  # values of keys that may be absent
    "gpt2": {"n_inner": None, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    "llama": {"num_key_value_heads": None, "rms_norm_eps": 1e-6, "attention_bias": False, "tie_word_embeddings": False},
}
SUPPORTED = {  # values that model.py computes, the default first
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
class ImportedConfig(GPTConfig):
    tokenizer: str | None = None  # for sample.py: gpt2, or the tokenizer.json beside the weights


def family_of(cfg):
    """gpt2 or llama for a GPTConfig. Raises UserError with the settings that Hugging Face's model does not have."""
    family = "llama" if cfg.norm == "rmsnorm" else "gpt2"
    wrong = [f"{k}={getattr(cfg, k)}" for k, v in SHAPES[family].items() if getattr(cfg, k) != v]
    if family == "gpt2" and cfg.kv_heads != cfg.n_head:
        wrong.append(f"n_kv_head={cfg.n_kv_head}")
    if wrong:
        raise UserError(
            f"{', '.join(wrong)}: a Hugging Face {family} (norm={cfg.norm}) does not have that; it cannot be exported"
        )
    return family


def read_config(folder):
    """The ImportedConfig of a Hugging Face folder. Raises UserError for settings that model.py does not compute."""
    path = Path(folder) / "config.json"
    hf = _read_object(path)
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
        cfg.n_kv_head = None if cfg.n_kv_head == cfg.n_head else cfg.n_kv_head  # as the recipes write it
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
    """Settings that correspond to no single key: norm, positions, MLP, and RoPE as transformers 4 or 5 writes it."""
    C, H = hf["hidden_size"], hf["num_attention_heads"]
    if (hf.get("head_dim") or C // H) * H != C:
        raise UserError(f"{path}: head_dim={hf.get('head_dim')} is not hidden_size / num_attention_heads = {C}/{H}")
    if hf.get("mlp_bias", False) != hf["attention_bias"]:
        raise UserError(
            f"{path}: attention_bias={hf['attention_bias']} needs the same mlp_bias; our bias is one setting"
        )
    rope = {"rope_theta": hf.get("rope_theta") or 10000.0}
    rope |= {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    kind, partial = rope.get("rope_type", rope.get("type", "default")), rope.get("partial_rotary_factor", 1.0)
    if kind not in ("default", "llama3") or partial != 1.0:
        raise UserError(f"{path}: rope_type={kind}, partial_rotary_factor={partial}: only default or llama3, and 1.0")
    scaling = {ours: rope[theirs] for theirs, ours in ROPE_KEYS.items()} if kind == "llama3" else {}
    return dict(norm="rmsnorm", positions="rope", mlp="swiglu", rope_theta=rope["rope_theta"], **scaling)


def _tokenizer_of(folder, hf):
    """gpt2, or the path of tokenizer.json; None if there is no such file."""
    if hf["vocab_size"] == 50257:
        return "gpt2"
    path = Path(folder) / "tokenizer.json"
    return str(path) if path.is_file() else None


def _read_object(path):
    """The object in a JSON file. Raises UserError."""
    try:
        value = read_json(path)
    except UserError as error:
        raise UserError(f"{error}; expected a Hugging Face model's folder") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object")
    return value


def fetch(name):
    """The local folder of `name`: the folder itself, or a snapshot of a repository on the hub, perhaps cached."""
    if Path(name).exists() or str(name).startswith((".", "/", "~")) or str(name).count("/") > 1:
        return Path(name)
    import huggingface_hub

    kinds = ["*.json", "*.safetensors", "tokenizer*", "merges.txt"]
    try:
        # subfolders hold other formats of the same weights
        return Path(huggingface_hub.snapshot_download(str(name), allow_patterns=kinds, ignore_patterns=["*/*"]))
    except Exception as error:  # of the hub, its HTTP client or the disk
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{name}: no such folder, and it cannot be downloaded ({type(error).__name__}: {reason})"
        ) from None


def hf_config(cfg, dtype):
    """The content of config.json as transformers 4 writes it, which version 5 and other readers accept too."""
    separator = 50256 if cfg.vocab_size == 50257 else None  # GPT-2's; other tokenizers' ids are not known here
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
