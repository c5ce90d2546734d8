"""Hugging Face's GPT-2, Llama and their like: config.json and safetensors, read and written.

A table for each class says what is what, for both ways. Pickled weights are never read. RoPE pairs
i with i + D/2 there too, so that q and k need no permutation. train.py reads the shape of
--init_from=hf:NAME before it imports torch: functions that need torch import it.
"""

import itertools
import shutil
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub

from configurator import typed
from corpus import VOCABULARIES, as_user_error, read_json
from settings import GPTConfig
from system.errors import UserError, listed, refuse
from system.files import by_umask, write_json


class GPT2:
    """A class of transformers in our terms."""

    name = "gpt2"
    architecture = "GPT2LMHeadModel"
    embedding = "transformer.wte.weight"
    # settings that no key has, and what an absent key means
    values = dict(norm="layernorm", positions="learned", mlp="gelu", bias=True, tie_embeddings=True)
    folded = {}  # other values of these settings, which exports may have
    keys = {  # {key of config.json: our setting}
        "vocab_size": "vocab_size",
        "n_layer": "n_layer",
        "n_head": "n_head",
        "n_embd": "n_embd",
        "n_positions": "block_size",
        "n_inner": "n_hidden",
        "layer_norm_epsilon": "norm_eps",
        "tie_word_embeddings": "tie_embeddings",
    }
    dropouts = ["embd_pdrop", "attn_pdrop", "resid_pdrop"]  # keys of exports
    allowed = {  # {key: values that model.py computes, the first where it is absent}
        "scale_attn_weights": [True],
        "scale_attn_by_inverse_layer_idx": [False],
        "activation_function": ["gelu_new", "gelu_pytorch_tanh"],
    }
    modules = {  # {ours: theirs}, {} is the number of a block
        "wte": ["transformer.wte"],
        "wpe": ["transformer.wpe"],
        "blocks.{}.norm_1": ["transformer.h.{}.ln_1"],
        "blocks.{}.attn.qkv": ["transformer.h.{}.attn.c_attn"],
        "blocks.{}.attn.proj": ["transformer.h.{}.attn.c_proj"],
        "blocks.{}.norm_2": ["transformer.h.{}.ln_2"],
        "blocks.{}.mlp.up": ["transformer.h.{}.mlp.c_fc"],
        "blocks.{}.mlp.proj": ["transformer.h.{}.mlp.c_proj"],
        "norm": ["transformer.ln_f"],
        "head": ["lm_head"],
    }


class Llama:
    name = "llama"
    architecture = "LlamaForCausalLM"
    embedding = "model.embed_tokens.weight"
    values = dict(
        norm="rmsnorm",
        positions="rope",
        mlp="swiglu",
        bias=False,
        tie_embeddings=False,
        rope_theta=10000.0,
    )
    # the norm in the embedding, relu2 as relu(gate) * up with gate = up
    folded = dict(embed_norm=True, mlp="relu2")
    keys = {
        "vocab_size": "vocab_size",
        "max_position_embeddings": "block_size",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "num_key_value_heads": "n_kv_head",
        "hidden_size": "n_embd",
        "intermediate_size": "n_hidden",
        "rms_norm_eps": "norm_eps",
        "attention_bias": "bias",
        "mlp_bias": "bias",
        "tie_word_embeddings": "tie_embeddings",
        "rope_theta": "rope_theta",
        "head_dim": "head_dim",
    }
    dropouts = []
    allowed = {
        "rope_type": ["default", "llama3"],
        "partial_rotary_factor": [1.0],
        "low_freq_factor": [1.0],  # of llama3, as the next: constants of model.Rope
        "high_freq_factor": [4.0],
        "hidden_act": ["silu"],  # relu in exports alone: others' gates are not equal to up
    }
    modules = {  # several in the order of their rows
        "wte": ["model.embed_tokens"],
        "blocks.{}.norm_1": ["model.layers.{}.input_layernorm"],
        "blocks.{}.attn.qkv": [
            "model.layers.{}.self_attn.q_proj",
            "model.layers.{}.self_attn.k_proj",
            "model.layers.{}.self_attn.v_proj",
        ],
        "blocks.{}.attn.proj": ["model.layers.{}.self_attn.o_proj"],
        "blocks.{}.norm_2": ["model.layers.{}.post_attention_layernorm"],
        "blocks.{}.mlp.gate_up": [
            "model.layers.{}.mlp.gate_proj",
            "model.layers.{}.mlp.up_proj",
        ],
        "blocks.{}.mlp.proj": ["model.layers.{}.mlp.down_proj"],
        "norm": ["model.norm"],
        "head": ["lm_head"],
    }


class Qwen3(Llama):
    name = "qwen3"
    architecture = "Qwen3ForCausalLM"
    values = Llama.values | dict(qk_norm=True)
    keys = {key: name for key, name in Llama.keys.items() if name != "bias"}
    allowed = Llama.allowed | {"attention_bias": [False], "use_sliding_window": [False]}
    modules = Llama.modules | {
        "blocks.{}.attn.q_norm": ["model.layers.{}.self_attn.q_norm"],
        "blocks.{}.attn.k_norm": ["model.layers.{}.self_attn.k_norm"],
    }


class Mistral(Llama):  # read, not written: it is a Llama
    name = "mistral"
    keys = Qwen3.keys
    allowed = Llama.allowed | {"sliding_window": [None]}


FAMILIES = {family.name: family for family in (GPT2, Llama, Qwen3, Mistral)}
# {key of llama3's scaling of RoPE: our setting}
SCALING = {"factor": "rope_factor", "original_max_position_embeddings": "rope_original"}
HEAD = "lm_head.weight"
TABLES = ("wte", "wpe", "head")  # without biases
# ends of names of masks and tables, which old files hold
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
FILES = ["*.json", "*.jinja", "*.safetensors", "tokenizer*", *VOCABULARIES]  # of weights on the hub
INDEX = "model.safetensors.index.json"  # {tensor: its file} of weights in several files
# settings that do not change what is computed, or are written by other means
WITHOUT_EFFECT = (
    "vocab_multiple attention dropout zero_init rope_theta rope_factor rope_original".split()
)


# -- settings


@dataclass
class ImportedConfig(GPTConfig):
    tokenizer: str | None = None  # the weights' folder, if it has one


def adopt(given, files=FILES):
    """The `given` settings and, from Hugging Face weights in init_from, their shape and tokenizer.

    files: names of those that are fetched if the weights lie on the hub.
    """
    name = given.get("init_from") or ""
    if not name.startswith("hf:"):
        return given
    shape = read_config(fetch(name[3:], files))
    # at most the default, since weights may have a longer context
    shape.block_size = min(shape.block_size, GPTConfig.block_size)
    return vars(shape) | given


def fetch(name, files=FILES):
    """The local folder of `name`: itself, or the snapshot of a hub repository, perhaps cached."""
    if Path(name).exists():
        return Path(name)
    # nothing of a repository's folders, which hold other formats of the weights
    options = dict(allow_patterns=files, ignore_patterns=["*/*"])
    # errors of the hub, of its HTTP client and of the disk
    with as_user_error(f"{name}: no such folder, and it cannot be downloaded"):
        return Path(huggingface_hub.snapshot_download(str(name), **options))


def read_config(folder):
    """The ImportedConfig of a Hugging Face folder.

    Raises UserError for what model.py does not compute. Further tensors, such as biases of
    attention alone or of quantized weights, `open_hf` refuses.
    """
    path = Path(folder) / "config.json"
    hf = {"model_type": None} | read_json(path)
    refuse_others(path, hf, dict(model_type=[*FAMILIES]))
    family = FAMILIES[hf["model_type"]]
    hf |= (hf.get("rope_scaling") or {}) | (hf.get("rope_parameters") or {})
    hf.setdefault("rope_type", hf.get("type", "default"))
    refuse_others(path, hf, family.allowed)
    settings = dict.fromkeys(family.keys.values()) | family.values
    settings |= {name: hf[key] for key, name in family.keys.items() if key in hf}
    if hf["rope_type"] == "llama3":
        settings |= {name: hf[key] for key, name in SCALING.items()}
    cfg = ImportedConfig(**typed(ImportedConfig, settings))
    refuse(cfg.problems())
    if any(path.with_name(name).is_file() for name in ("tokenizer.json", *VOCABULARIES)):
        cfg.tokenizer = str(path.parent)
    return cfg


def refuse_others(path, hf, allowed):
    for key, values in allowed.items():
        if hf.get(key, values[0]) not in values:
            expected = " or ".join(map(str, values))
            raise UserError(f"{path}: {key}={hf[key]} is not supported, expected {expected}")


def family_of(cfg):
    """The class that computes a GPTConfig; raises UserError with what it lacks."""
    family = GPT2 if cfg.positions == "learned" else Llama
    if cfg.qk_norm and family is Llama:
        family = Qwen3
    values = vars(GPTConfig()) | family.values
    free = {*family.keys.values(), *WITHOUT_EFFECT}
    wrong = []
    for name in sorted(values.keys() - free):
        own = getattr(cfg, name)
        if own not in (values[name], family.folded.get(name)):
            wrong.append(f"{name}={own}")
    if cfg.embed_norm and cfg.tie_embeddings:
        wrong.append("embed_norm=True with a tied head")
    if wrong:
        raise UserError(f"it cannot be exported: a {family.name} has no {', '.join(wrong)}")
    return family


def config_json(cfg, dtype):
    """The content of config.json as transformers 4 writes it; `write_tokenizer` writes the ends."""
    family = family_of(cfg)
    own = dict(n_kv_head=cfg.kv_heads, n_hidden=cfg.mlp_hidden, head_dim=cfg.head_size)
    values = vars(cfg) | own
    config = {key: values[name] for key, name in family.keys.items()}
    config |= dict.fromkeys(family.dropouts, cfg.dropout)
    if cfg.positions == "rope":
        config["hidden_act"] = "relu" if cfg.mlp == "relu2" else "silu"
        if cfg.rope_factor:
            scaling = dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0)
            config["rope_scaling"] = scaling | {key: values[name] for key, name in SCALING.items()}
    config |= dict(model_type=family.name, architectures=[family.architecture], torch_dtype=dtype)
    return config | dict(bos_token_id=None, eos_token_id=None)


# -- tensors


def names_of(cfg):
    """{our name: their names} of all tensors of a Hugging Face model."""
    found = {}
    for ours, theirs in family_of(cfg).modules.items():
        if ours == "head" and cfg.tie_embeddings:
            continue
        if cfg.mlp == "relu2":  # its one matrix is both gate and up of a Llama
            ours = ours.replace("gate_up", "up")
        kinds = ["weight"]
        if cfg.bias and ours not in TABLES and (cfg.norm == "layernorm" or "norm" not in ours):
            kinds.append("bias")
        for i in range(cfg.n_layer if "{}" in ours else 1):
            for kind in kinds:
                own = [f"{module}.{kind}".format(i) for module in theirs]
                found[f"{ours}.{kind}".format(i)] = own
    return found


def in_layout(theirs, tensor):
    """A tensor of ours as they have it, or one of theirs as we do: GPT-2 transposes matrices."""
    if theirs.startswith("transformer.h.") and tensor.dim() == 2:
        return tensor.t()
    return tensor


def open_tensors(folder, family):
    """{full Hugging Face name: tensor}, without buffers; they are read where they are used.

    They are of one file, model.safetensors, or else of the files that an index names.
    """
    from safetensors import safe_open

    prefix = family.embedding.partition(".")[0] + "."  # absent if saved without the head
    names = ["model.safetensors"]
    if not (folder / names[0]).exists() and (folder / INDEX).exists():
        index = read_json(folder / INDEX)
        with as_user_error(f"{folder / INDEX} is damaged"):
            # in this folder, whatever path a stranger's file gives
            names = {Path(name).name for name in index["weight_map"].values()}
    tensors = {}
    for file_name in names:
        path = folder / file_name
        with as_user_error(f"{path}: not there, or damaged (pytorch_model.bin is not read)"):
            file = safe_open(path, "pt")  # mapped
        for name in file.keys():
            if not name.endswith(BUFFERS):
                full = name if name.startswith((prefix, HEAD)) else prefix + name
                tensors[full] = file.get_tensor(name)
    return tensors


def open_hf(name):
    """The SavedModel of a folder or hub name; its tensors have our names and no padding rows."""
    from run.checkpoint import MergedTensor, SavedModel

    folder = fetch(name)
    cfg = read_config(folder)
    family = family_of(cfg)
    theirs = open_tensors(folder, family)
    if cfg.tie_embeddings and HEAD in theirs:
        head = theirs.pop(HEAD)
        if not head.equal(theirs.setdefault(family.embedding, head)):  # it may be the only copy
            raise UserError(f"{folder}: its head is not the embedding that config.json ties it to")
    names = names_of(cfg)
    if wrong := sorted(theirs.keys() ^ {*itertools.chain(*names.values())}):
        raise UserError(f"{folder}: its config.json and tensors differ in {listed(wrong)}")
    tensors = {}
    for ours, own in names.items():
        tensors[ours] = MergedTensor([in_layout(name, theirs[name]) for name in own])
    return SavedModel(tensors, cfg, cfg.tokenizer)


# -- exports


def save_hf(cfg, tensors, path, dtype="float32", tokenizer=None):
    """Writes a folder that AutoModelForCausalLM loads; config.json, without which none does, last.

    tensors: {name: tensor or one that is read by rows} of a model of GPTConfig `cfg`. The export is
    in memory. Raises UserError where model.py has other parameters than the class.
    """
    path = Path(path)
    theirs = exported(cfg, tensors, dtype)
    with as_user_error(f"{path}: cannot be written"):
        path.mkdir(parents=True, exist_ok=True)
        if tokenizer:
            write_tokenizer(path, tokenizer)
        huggingface_hub.save_torch_state_dict(theirs, path)
        for file in path.glob("*.safetensors"):
            by_umask(file)
        write_json(path / "config.json", config_json(cfg, dtype))
    return path


def exported(cfg, tensors, dtype):
    """{their name: tensor}"""
    import torch

    names = names_of(cfg)
    if edited := sorted((tensors.keys() ^ names.keys()) - {"head.weight"}):  # it may be tied
        name = family_of(cfg).name
        raise UserError(f"model.py has other parameters than a {name}: {listed(edited)}")
    kv = cfg.kv_heads * cfg.head_size
    rows = {"qkv": [cfg.attention_width, kv, kv], "gate_up": [cfg.mlp_hidden, cfg.mlp_hidden]}
    found = {}
    for ours, theirs in names.items():
        module = ours.split(".")[-2]
        tensor = tensors[ours][...].cpu()
        if module in ("wte", "head"):
            tensor = tensor[: cfg.vocab_size]  # without padding
        parts = [tensor] * len(theirs)
        if module in rows and len(theirs) > 1:
            parts = tensor.split(rows[module])
        for name, part in zip(theirs, parts):
            if cfg.embed_norm and name == Llama.embedding:
                part = torch.nn.functional.rms_norm(part.float(), part.shape[1:], eps=cfg.norm_eps)
            # a copy: gate and up may be the same rows
            found[name] = in_layout(name, part).to(getattr(torch, dtype), copy=True)
    return found


def write_tokenizer(folder, tokenizer):
    """Writes a tokenizer's and generation's files; those that lie beside its own are copied."""
    from corpus import chat
    from corpus import tokenizer as tokenizers

    (folder / "tokenizer.json").write_text(tokenizer.to_json(), "utf-8")
    for path in tokenizers.beside(tokenizer.folder):
        shutil.copyfile(path, folder / path.name)
    eot = tokenizer.eot
    config = folder / "tokenizer_config.json"
    if not config.exists():
        names = {i: token for token, i in tokenizer.special.items()}
        values = dict(tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=False)
        values["bos_token"] = names[eot]
        values["eos_token"] = names[min(tokenizer.ends - {eot}, default=eot)]
        write_json(config, values)
    file = "generation_config.json"
    generation = {"bos_token_id": eot} | tokenizers.read_beside(folder, file)
    # stop_ids reads this file too
    generation["eos_token_id"] = sorted(tokenizer.ends | chat.stop_ids(folder, tokenizer))
    write_json(folder / file, generation)
