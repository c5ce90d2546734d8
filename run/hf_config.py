"""Hugging Face's GPT-2, Llama, Qwen3 and NanoChat: config.json as our settings, and the tokenizer's files, in and out.

Importing this file loads no torch: train.py reads the shape of --init_from=hf:NAME with it before it checks settings.
"""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from configurator import UserError
from run.files import patiently, read_json, write_json
from settings import GPTConfig

LLAMA_MLPS = {
    "silu": "swiglu",
    "swish": "swiglu",
    "relu": "relu2",
}  # relu(gate) * up is ReLU squared if gate = up
MLPS = {  # their activation -> our mlp, the default first
    "gpt2": {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu2": "relu2"},
    "llama": LLAMA_MLPS,
    "qwen3": LLAMA_MLPS,
    "nanochat": {"relu2": "relu2"},
}
ALL = dict(value_embeddings=[0], attention_gate=[False])  # what no class of theirs has
LLAMA = ALL | dict(norm=["rmsnorm"], positions=["rope"], mlp=LLAMA_MLPS.values())
PLAIN = dict(qk_norm=[False], embed_norm=[False], softcap=[None])
SHAPES = {  # values of settings that one of their models can have; an import takes the first, unless a key says else
    "gpt2": ALL | PLAIN | dict(norm=["layernorm"], positions=["learned"], mlp=MLPS["gpt2"].values()),
    "llama": PLAIN | LLAMA | dict(embed_norm=[False, True]),
    "qwen3": PLAIN | LLAMA | dict(embed_norm=[False, True], qk_norm=[True], bias=[False]),
    "nanochat": LLAMA | dict(mlp=["relu2"], embed_norm=[True], qk_norm=[True], bias=[False]),
}
CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "nanochat": "NanoChatForCausalLM",
}
LLAMA_KEYS = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "block_size",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_kv_head",
    "hidden_size": "n_embd",
    "intermediate_size": "n_hidden",
    "hidden_act": "mlp",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}
KEYS = {  # their key in config.json -> our setting, for import and export
    "gpt2": {
        "vocab_size": "vocab_size",
        "n_positions": "block_size",
        "n_layer": "n_layer",
        "n_head": "n_head",
        "n_embd": "n_embd",
        "n_inner": "n_hidden",
        "activation_function": "mlp",
        "layer_norm_epsilon": "norm_eps",
        "tie_word_embeddings": "tie_embeddings",
    },
    "llama": LLAMA_KEYS | {"attention_bias": "bias"},
    "qwen3": LLAMA_KEYS,
    "nanochat": LLAMA_KEYS | {"final_logit_softcapping": "softcap"},
}
ROPE_KEYS = {
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_freq",
    "high_freq_factor": "rope_high_freq",
    "original_max_position_embeddings": "rope_original",
}
LLAMA_ABSENT = dict(num_key_value_heads=None, hidden_act="silu", rms_norm_eps=1e-6, tie_word_embeddings=False)
ABSENT = {  # values of keys that may be absent
    "gpt2": dict(
        n_inner=None, activation_function="gelu_new", layer_norm_epsilon=1e-5, tie_word_embeddings=True
    ),
    "llama": LLAMA_ABSENT | dict(attention_bias=False),
    "qwen3": LLAMA_ABSENT | dict(num_key_value_heads=32, head_dim=128),
    "nanochat": LLAMA_ABSENT | dict(hidden_act="relu2", final_logit_softcapping=15.0),
}
SUPPORTED = {  # values that model.py computes, the default first
    "gpt2": {
        "activation_function": tuple(MLPS["gpt2"]),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "quantization_config": (None,),
    },
    "llama": {"hidden_act": tuple(LLAMA_MLPS), "quantization_config": (None,)},
    "qwen3": {
        "hidden_act": tuple(LLAMA_MLPS),
        "attention_bias": (False,),
        "use_sliding_window": (False,),
        "quantization_config": (None,),
    },
    "nanochat": {
        "hidden_act": tuple(MLPS["nanochat"]),
        "attention_bias": (False,),
        "tie_word_embeddings": (False,),
        "quantization_config": (None,),
    },
}
TOKENIZER, GENERATION = "tokenizer_config.json", "generation_config.json"
COPIED = (TOKENIZER, GENERATION, "special_tokens_map.json", "tokenizer.model", "chat_template.jinja")


@dataclass
class ImportedConfig(GPTConfig):
    tokenizer: str | None = None  # for sample.py: gpt2, or the tokenizer.json beside the weights


def family_of(cfg):
    """The key of SHAPES for a GPTConfig. Raises UserError with the settings that the nearest of these models lack."""
    lacking = {family: _lacking(family, cfg) for family in SHAPES}
    fewest = min(lacking.values(), key=len)
    if fewest:
        near = [f"a {family} has no {', '.join(w)}" for family, w in lacking.items() if len(w) == len(fewest)]
        raise UserError(
            f"no Hugging Face model computes this, so that it cannot be exported: {'; '.join(near)}"
        )
    return next(family for family, wrong in lacking.items() if not wrong)


def _lacking(family, cfg):
    wrong = [
        f"{k}={getattr(cfg, k)}" for k, values in SHAPES[family].items() if getattr(cfg, k) not in values
    ]
    return wrong + [f"n_kv_head={cfg.n_kv_head}"] * (family == "gpt2" and cfg.kv_heads != cfg.n_head)


def names_hf(init_from):
    return bool(init_from) and init_from.startswith("hf:")


def adopt(given):
    """The settings `given` by the user, completed by the shape, RoPE and tokenizer of init_from's Hugging Face weights.

    block_size is the user's choice; if it is not given, it is the default or the weights' context, whichever is less.
    Raises UserError that lists every given setting which the weights contradict.
    """
    name = given.get("init_from")
    if not names_hf(name):
        return given
    from run.checkpoint import shape_differences  # imports torch

    shape = read_config(fetch(name[3:]))
    context, shape.block_size = shape.block_size, min(shape.block_size, GPTConfig.block_size)
    shape.max_positions = context if shape.positions == "rope" else None
    wanted = replace(shape, **{k: v for k, v in given.items() if k in vars(shape)})
    wrong = shape_differences(vars(shape), wanted, ["vocab_multiple", "block_size"])
    if shape.positions == "learned" and wanted.block_size > context:
        wrong.append(f"block_size: checkpoint {context} at most, now {wanted.block_size}")
    if wrong:
        raise UserError(
            f"init_from={name} has another shape than the settings given: {'; '.join(wrong)}; "
            "leave these settings out to take those of the weights"
        )
    return vars(shape) | given


def adopted(cfg):
    """The settings that `adopt` takes from config.json, in words, for the start block."""
    family = family_of(cfg)
    names = [
        *KEYS[family].values(),
        *SHAPES[family],
        "rope_theta",
        "rope_factor",
        "max_positions",
        "tokenizer",
    ]
    values = {name: getattr(cfg, name) for name in names if name != "block_size"}
    if cfg.positions == "learned":
        del values["rope_theta"]
    return " ".join(f"{k}={v}" for k, v in values.items() if v is not None)


def read_config(folder):
    """The ImportedConfig of a Hugging Face folder. Raises UserError for settings that model.py does not compute."""
    path = Path(folder) / "config.json"
    hf = read_object(path)
    family = hf.get("model_type")
    if not isinstance(family, str) or family not in SUPPORTED:
        raise UserError(f"{path}: model_type={family} is not supported, only {', '.join(SUPPORTED)} are")
    for key, values in SUPPORTED[family].items():
        if hf.get(key, values[0]) not in values:
            raise UserError(f"{path}: {key}={hf[key]} is not supported, expected {values[0]}")
    hf = ABSENT[family] | hf
    try:
        settings = {name: next(iter(values)) for name, values in SHAPES[family].items()}
        settings |= {ours: hf[theirs] for theirs, ours in KEYS[family].items()}
        settings["mlp"] = MLPS[family][settings["mlp"]]
        if family != "gpt2":
            settings |= _rope_settings(hf, path)
        cfg = ImportedConfig(**settings, tokenizer=_tokenizer_of(folder, hf))
        cfg.n_kv_head = None if cfg.n_kv_head == cfg.n_head else cfg.n_kv_head  # as the recipes write it
        cfg.n_hidden = None if cfg.n_hidden == 4 * cfg.n_embd else cfg.n_hidden
        counts = ("vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd", "n_hidden", "block_size")
        wrong = [
            f"{k}={v} is not a whole number"
            for k in counts
            if not isinstance(v := getattr(cfg, k), int | None)
        ]
        wrong = wrong or cfg.problems()
        if not wrong and family_of(cfg) != family:
            wrong = [f"a {family} with softcap={cfg.softcap} is not supported"]
    except KeyError as error:
        raise UserError(f"{path}: {error.args[0]} is missing") from None
    except (TypeError, ZeroDivisionError) as error:
        raise UserError(f"{path}: a value is of the wrong type or zero ({error})") from None
    if wrong:
        raise UserError(f"{path}: {'; '.join(wrong)}")
    return cfg


def _rope_settings(hf, path):
    """The settings of RoPE as transformers 4 or 5 writes it. Raises UserError for widths and biases unlike ours."""
    C, H = hf["hidden_size"], hf["num_attention_heads"]
    if (hf.get("head_dim") or C // H) * H != C:
        raise UserError(
            f"{path}: head_dim={hf.get('head_dim')} is not hidden_size / num_attention_heads = {C}/{H}"
        )
    if hf.get("mlp_bias", False) != (bias := hf.get("attention_bias", False)):
        raise UserError(f"{path}: attention_bias={bias} needs the same mlp_bias; our bias is one setting")
    rope = {"rope_theta": hf.get("rope_theta") or 10000.0}
    rope |= {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    kind, partial = rope.get("rope_type", rope.get("type", "default")), rope.get("partial_rotary_factor", 1.0)
    if kind not in ("default", "llama3") or partial != 1.0:
        raise UserError(
            f"{path}: rope_type={kind}, partial_rotary_factor={partial}: only default or llama3, and 1.0"
        )
    scaling = {ours: rope[theirs] for theirs, ours in ROPE_KEYS.items()} if kind == "llama3" else {}
    return dict(rope_theta=rope["rope_theta"], **scaling)


def _tokenizer_of(folder, hf):
    """The path of tokenizer.json, or gpt2 if that is what it holds; None if there is no such file."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        return "gpt2" if hf["vocab_size"] == 50257 else None
    is_gpt2 = hf["vocab_size"] == 50257 and same_tokenizer(path, "gpt2")
    return "gpt2" if is_gpt2 else str(path)


def same_tokenizer(*two):
    """Whether the ids of two tokenizers stand for as many bytes each; no two that are in use agree in that.

    two: names, or arrays as in token_bytes.npy.
    """
    import numpy as np

    from corpus import tokenizer as tokenizers

    sizes = (one if isinstance(one, np.ndarray) else tokenizers.load(str(one)).token_bytes() for one in two)
    return np.array_equal(*sizes)


def read_object(path):
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

    kinds = ["*.json", "*.jinja", "*.safetensors", "tokenizer*", "merges.txt"]
    try:
        # subfolders hold other formats of the same weights
        chosen = dict(allow_patterns=kinds, ignore_patterns=["*/*"])
        return Path(patiently(huggingface_hub.snapshot_download, str(name), **chosen))
    except Exception as error:  # of the hub, its HTTP client or the disk
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{name}: no such folder, and it cannot be downloaded ({type(error).__name__}: {reason})"
        ) from None


def write_tokenizer(folder, tokenizer, context):
    """Writes the files of a tokenizer and of generation, and returns {"bos_token_id", "eos_token_id"}.

    tokenizer_config.json, a chat template and generation_config.json are copied from the folder of the tokenizer.json
    where they lie beside it. Where we trained, a separator preceded each document: generation stops at it as well.
    """
    text = tokenizer.to_json()
    (folder / "tokenizer.json").write_text(text, "utf-8")
    for name in COPIED:
        if tokenizer.folder and (tokenizer.folder / name).is_file():
            shutil.copyfile(tokenizer.folder / name, folder / name)
    content = json.loads(text)
    names = {token["id"]: token["content"] for token in content["added_tokens"]}
    ids = {name: i for i, name in names.items()}
    bos, eos = tokenizer.eot, min(tokenizer.ends - {tokenizer.eot}, default=tokenizer.eot)
    if (folder / TOKENIZER).exists():
        config = read_object(folder / TOKENIZER)
        said = [config.get("bos_token"), config.get("eos_token")]
        said = [token.get("content") if isinstance(token, dict) else token for token in said]
        bos, eos = ids.get(said[0], bos), ids.get(said[1], eos)
    else:
        config = dict(tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=False)
        config |= dict(bos_token=names[bos], eos_token=names[eos], model_max_length=context)
        config["unk_token"] = content["model"].get("unk_token") or names[eos]
        write_json(folder / TOKENIZER, config)
    generation = dict(bos_token_id=bos, eos_token_id=eos)
    if (folder / GENERATION).exists():
        generation |= {k: v for k, v in read_object(folder / GENERATION).items() if v is not None}
    eos = generation["eos_token_id"]
    ends = sorted(tokenizer.ends.union(eos if isinstance(eos, list) else [eos]))
    generation["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    write_json(folder / GENERATION, generation)
    return {key: generation[key] for key in ("bos_token_id", "eos_token_id")}


def tied(cfg):
    """Whether an export's head is its embedding: not where a norm is folded into either of the two."""
    return cfg.tie_embeddings and not cfg.embed_norm


def context_of(cfg):
    """The longest context that a model was trained for: its own, or that of the weights which it started from."""
    return max(cfg.block_size, cfg.max_positions or 0)


def hf_config(cfg, dtype, **ids):
    """The content of config.json as transformers 4 writes it, which version 5 and other readers accept too.

    ids: those of `write_tokenizer`.
    """
    family = family_of(cfg)
    activations = {ours: theirs for theirs, ours in reversed(MLPS[family].items())}
    values = {**vars(cfg), "mlp": activations[cfg.mlp], "tie_embeddings": tied(cfg)}
    config = {theirs: values[ours] for theirs, ours in KEYS[family].items()}
    config |= dict(bos_token_id=None, eos_token_id=None, torch_dtype=str(dtype).removeprefix("torch.")) | ids
    config |= dict(model_type=family, architectures=[CLASSES[family]])
    if family == "gpt2":
        return config | dict.fromkeys(["embd_pdrop", "attn_pdrop", "resid_pdrop"], cfg.dropout)
    scaling = {"rope_type": "llama3", **{theirs: getattr(cfg, ours) for theirs, ours in ROPE_KEYS.items()}}
    config |= dict(num_key_value_heads=cfg.kv_heads, intermediate_size=cfg.hidden, head_dim=cfg.head_dim)
    config |= dict(max_position_embeddings=context_of(cfg), attention_dropout=cfg.dropout)
    config |= {"mlp_bias": cfg.bias} if family == "llama" else {"attention_bias": False, "pad_token_id": None}
    return config | dict(rope_theta=cfg.rope_theta, rope_scaling=None if cfg.rope_factor is None else scaling)
