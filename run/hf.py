"""Hugging Face's GPT-2, Llama and their like: config.json and safetensors, read and written.

config.json is read as our settings. Pickled weights are never read. RoPE pairs i with i + D/2 there
too, so that q and k need no permutation. train.py reads the shape of --init_from=hf:NAME before it
imports torch: functions that need torch import it.
"""

import itertools
import json
import shutil
from dataclasses import dataclass, fields, replace
from pathlib import Path

import huggingface_hub
from safetensors import safe_open

from configurator import typed
from corpus import VOCABULARIES, as_user_error
from settings import GPTConfig
from system.errors import UserError, refuse, warn
from system.files import by_umask, patiently, plain_name, read_json, text, write_json


class GPT2:
    """A class of transformers in our terms; lists and tables of values begin with the default."""

    name = "gpt2"
    architecture = "GPT2LMHeadModel"
    layers = "transformer.h."
    settings = {  # {setting: values that the class computes}; all others are to be off
        "norm": ["layernorm"],
        "positions": ["learned"],
        "mlp": ["gelu", "relu2"],
    }
    keys = {  # {key of config.json: our setting}
        "vocab_size": "vocab_size",
        "n_layer": "n_layer",
        "n_head": "n_head",
        "n_embd": "n_embd",
        "n_positions": "block_size",
        "n_inner": "n_hidden",
        "activation_function": "mlp",
        "layer_norm_epsilon": "norm_eps",
        "tie_word_embeddings": "tie_embeddings",
    }
    # what absent keys mean
    absent = {"activation_function": "gelu_new", "tie_word_embeddings": True}
    # {activation: our mlp}
    mlps = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu2": "relu2"}
    allowed = {  # {key: values that model.py computes}
        "scale_attn_weights": [True],
        "scale_attn_by_inverse_layer_idx": [False],
        "add_cross_attention": [False],
        "quantization_config": [None],
        "activation_function": [*mlps],
    }
    outer = {  # {our module: theirs}
        "wte": "transformer.wte",
        "wpe": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    }
    block = {  # the same in a block; where theirs are several, ours stacks their rows
        "norm_1": "ln_1",
        "attn.qkv": "attn.c_attn",
        "attn.proj": "attn.c_proj",
        "norm_2": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.proj": "mlp.c_proj",
    }


class Llama:
    name = "llama"
    architecture = "LlamaForCausalLM"
    layers = "model.layers."
    settings = GPT2.settings | {
        "embed_norm": [False, True],  # an export folds it into the embedding
        "norm": ["rmsnorm"],
        "positions": ["rope"],
        "mlp": ["swiglu", "relu2"],
    }
    keys = {
        "vocab_size": "vocab_size",
        "max_position_embeddings": "block_size",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "num_key_value_heads": "n_kv_head",
        "hidden_size": "n_embd",
        "intermediate_size": "n_hidden",
        "hidden_act": "mlp",
        "rms_norm_eps": "norm_eps",
        "mlp_bias": "bias",
        "tie_word_embeddings": "tie_embeddings",
        "rope_theta": "rope_theta",
        "head_dim": "head_dim",
    }
    absent = {
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
    }
    mlps = {"silu": "swiglu", "swish": "swiglu", "relu": "relu2"}  # relu(gate) * up, with gate = up
    allowed = {
        "rope_type": ["default", "llama3"],
        "partial_rotary_factor": [1.0],
        "quantization_config": [None],
        "low_freq_factor": [1.0],  # of llama3, as the next: constants of model.Rope
        "high_freq_factor": [4.0],
        "hidden_act": ["silu", "swish"],  # relu in exports alone: others' gates are not equal to up
    }
    outer = {"wte": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    block = {
        "norm_1": "input_layernorm",
        "norm_2": "post_attention_layernorm",
        "attn.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        "attn.proj": "self_attn.o_proj",
        "mlp.gate_up": "mlp.gate_proj mlp.up_proj",
        "mlp.up": "mlp.gate_proj mlp.up_proj",
        "mlp.proj": "mlp.down_proj",
    }


class Qwen3(Llama):
    name = "qwen3"
    architecture = "Qwen3ForCausalLM"
    settings = Llama.settings | {"qk_norm": [True], "bias": [False]}
    keys = {key: name for key, name in Llama.keys.items() if name != "bias"}
    absent = Llama.absent | {"num_key_value_heads": 32, "head_dim": 128}
    allowed = Llama.allowed | {"attention_bias": [False], "use_sliding_window": [False]}
    block = Llama.block | {"attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm"}


class Mistral(Llama):  # read, not written: it is a Llama
    name = "mistral"
    keys = Qwen3.keys
    settings = Llama.settings | {"bias": [False]}
    absent = Llama.absent | {"num_key_value_heads": 8, "sliding_window": 4096}
    allowed = Llama.allowed | {"sliding_window": [None]}


EXPORTS = (GPT2, Llama, Qwen3)
FAMILIES = {family.name: family for family in (*EXPORTS, Mistral)}
FORM = {"model_type": text, **dict.fromkeys(["rope_scaling?", "rope_parameters?"], ({}, None))}
# ends of names of masks and tables, which old files hold
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
FILES = ["*.json", "*.jinja", "*.safetensors", "tokenizer*", *VOCABULARIES]  # of weights on the hub
INDEX = "model.safetensors.index.json"  # {tensor: its file} of weights in several files
# {dtype of weights in safetensors: torch's name}
DTYPES = dict(F64="float64", F32="float32", F16="float16", BF16="bfloat16")


@dataclass
class Part:
    """The rows of a tensor of ours that a Hugging Face tensor is."""

    ours: str
    first: int
    last: int
    shape: list  # theirs
    transposed: bool = False  # as GPT-2's matrices
    normed: bool = False  # with embed_norm folded in


@dataclass
class ImportedConfig(GPTConfig):
    tokenizer: str | None = None  # tokenizer.json beside the weights, or the folder of other files


SHAPE = {field.name for field in fields(GPTConfig)}
# settings that do not change what is computed, or are written or refused by other means
WITHOUT_EFFECT = set(
    "vocab_multiple attention dropout zero_init bias n_kv_head head_dim".split()
    + "rope_theta rope_factor rope_original".split()
)


def family_of(cfg):
    """The first family whose class computes a GPTConfig.

    Raises UserError with what each of them lacks.
    """
    lacking = []
    for family in EXPORTS:
        wrong = [name for name, known in family.settings.items() if getattr(cfg, name) not in known]
        if family is GPT2 and cfg.kv_heads < cfg.n_head:
            wrong.append("n_kv_head")
        if family is GPT2 and cfg.attention_width != cfg.n_embd:
            wrong.append("head_dim")
        others = SHAPE - {*family.settings, *family.keys.values(), *WITHOUT_EFFECT}
        wrong += [name for name in sorted(others) if getattr(cfg, name, None)]
        if not wrong:
            return family
        words = [f"{name}={getattr(cfg, name)}" for name in wrong]
        lacking.append(f"a {family.name} has no {', '.join(words)}")
    raise UserError(
        f"no Hugging Face model computes this, so it cannot be exported: {'; '.join(lacking)}"
    )


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
    wanted = replace(shape, **{k: v for k, v in given.items() if k in vars(shape)})
    if wrong := shape.differences(wanted, ["vocab_multiple", "block_size"]):
        raise UserError(
            f"init_from={name} has another shape: {'; '.join(wrong)}; leave these settings out"
        )
    return vars(shape) | given


def read_config(folder):
    """The ImportedConfig of a Hugging Face folder.

    Raises UserError for what model.py does not compute.
    """
    path = Path(folder) / "config.json"
    hf = read_json(path, form=FORM)
    try:
        _refuse_others(hf, dict(model_type=[*FAMILIES]))
        family = FAMILIES[hf["model_type"]]
        rope = (hf.get("rope_scaling") or {}) | (hf.get("rope_parameters") or {})
        for kind, values in rope.items():
            if isinstance(values, dict):
                raise UserError(f"rope_parameters by kinds of layers ({kind}) are not supported")
        hf = family.absent | hf | rope
        hf.setdefault("rope_type", hf.get("type", "default"))
        _refuse_others(hf, family.allowed)
        settings = {name: values[0] for name, values in family.settings.items()}
        settings |= {name: hf.get(key) for key, name in family.keys.items()}
        settings["mlp"] = family.mlps[settings["mlp"]]
        if hf["rope_type"] == "llama3":
            settings["rope_factor"] = hf.get("factor", "absent")  # None would mean no scaling
            settings["rope_original"] = hf.get("original_max_position_embeddings")
        cfg = ImportedConfig(**typed(ImportedConfig, settings, settings.keys()))
        refuse(cfg.problems())
        _refuse_others(hf, dict(attention_bias=[cfg.bias]))
    except (UserError, OverflowError) as error:
        raise UserError(f"{path}: {error}") from None
    if cfg.tie_embeddings and any(path.parent.glob("model*.safetensors*")):
        cfg.tie_embeddings = tie(open_tensors(path.parent, family), family)
    tokenizer = path.with_name("tokenizer.json")
    if tokenizer.is_file():
        cfg.tokenizer = str(tokenizer)
    elif any(path.with_name(name).is_file() for name in VOCABULARIES):
        cfg.tokenizer = str(path.parent)
    return cfg


def _refuse_others(hf, allowed):
    for key, values in allowed.items():
        if hf.get(key, values[0]) not in values:
            raise UserError(
                f"{key}={hf[key]} is not supported, expected {' or '.join(map(str, values))}"
            )


def fetch(name, files=FILES):
    """The local folder of `name`: itself, or the snapshot of a hub repository, perhaps cached."""
    if Path(name).exists():
        return Path(name)
    # nothing of a repository's folders, which hold other formats of the weights
    options = dict(allow_patterns=files, ignore_patterns=["*/*"])
    # errors of the hub, of its HTTP client and of the disk
    with as_user_error(f"{name}: no such folder, and it cannot be downloaded"):
        return Path(patiently(huggingface_hub.snapshot_download, str(name), **options))


def config_json(cfg, dtype, ids):
    """The content of config.json as transformers 4 writes it, with the ids of `write_tokenizer`."""
    family = family_of(cfg)
    context = cfg.block_size
    if cfg.positions == "rope" and cfg.rope_factor:
        context = max(context, int(cfg.rope_original * cfg.rope_factor))
    activation = next(theirs for theirs, ours in family.mlps.items() if ours == cfg.mlp)
    values = vars(cfg) | dict(
        mlp=activation, n_kv_head=cfg.kv_heads, n_hidden=cfg.mlp_hidden, block_size=context
    )
    config = {key: values[name] for key, name in family.keys.items()}
    if cfg.embed_norm:  # which is folded into the embedding alone
        config["tie_word_embeddings"] = False
    config |= dict(model_type=family.name, architectures=[family.architecture], torch_dtype=dtype)
    config |= dict(bos_token_id=None, eos_token_id=None) | ids
    if family is GPT2:
        return config | dict.fromkeys(["embd_pdrop", "attn_pdrop", "resid_pdrop"], cfg.dropout)
    config |= dict(head_dim=cfg.head_size, attention_bias=cfg.bias, attention_dropout=cfg.dropout)
    config["rope_scaling"] = None
    if cfg.rope_factor:
        config["rope_scaling"] = dict(
            rope_type="llama3",
            factor=cfg.rope_factor,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=cfg.rope_original,
        )
    return config


def write_tokenizer(folder, tokenizer, block_size):
    """Writes the files of a tokenizer and of generation.

    Returns {"bos_token_id": ..., "eos_token_id": ...}.
    """
    from corpus import chat
    from corpus import tokenizer as tokenizers

    content = tokenizer.to_json()
    (folder / "tokenizer.json").write_text(content, "utf-8")
    for path in tokenizers.beside(tokenizer.folder) if tokenizer.folder else ():
        shutil.copyfile(path, folder / path.name)
    eot = tokenizer.eot
    config = folder / "tokenizer_config.json"
    if not config.exists():
        content = json.loads(content)
        names = {token["id"]: token["content"] for token in content["added_tokens"]}
        eos = names[min(tokenizer.ends - {eot}, default=eot)]
        values = dict(tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=False)
        values |= dict(bos_token=names[eot], eos_token=eos, model_max_length=block_size)
        if not content["model"].get("unk_token"):  # a named one is special: it has no bytes
            values["unk_token"] = eos
        write_json(config, values)
    generation = folder / "generation_config.json"
    ids = dict(bos_token_id=eot)
    if generation.exists():
        ids |= {key: value for key, value in read_json(generation).items() if value is not None}
    # stop_ids reads generation_config.json too
    ends = sorted(tokenizer.ends | chat.stop_ids(folder, tokenizer))
    ids["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    write_json(generation, ids)
    return {key: ids[key] for key in ("bos_token_id", "eos_token_id")}


class LazySlice:
    """A slice of safetensors, read by rows in another dtype, or by the rows of its transpose."""

    def __init__(self, tensor, dtype, transposed):
        self.tensor, self.dtype, self.transposed = tensor, dtype, transposed

    def get_shape(self):
        shape = self.tensor.get_shape()
        return shape[::-1] if self.transposed else shape

    def __getitem__(self, rows):
        if rows is ...:
            rows = slice(None)
        if self.transposed:
            return self.tensor[:, rows].t().to(self.dtype)
        return self.tensor[rows].to(self.dtype)


def hf_parts(model, may_have_more=False):
    """{Hugging Face name: Part}, without vocabulary padding and without a tied head.

    Raises UserError for an edit of parameters. may_have_more: an edit that only adds some to those
    of a Hugging Face model is allowed.
    """
    cfg = model.cfg
    family = family_of(cfg)
    own = dict(model.named_parameters())
    parts = {}
    for module, theirs in modules_of(cfg, family):
        weight = own.get(f"{module}.weight")
        if weight is None:
            raise UserError(
                f"model.py has no {module}.weight, which a Hugging Face {family.name} has"
            )
        in_block = module.startswith("blocks.")
        transposed = family is GPT2 and in_block and weight.dim() == 2
        always_has_bias = family is GPT2 and (in_block or module == "norm")
        for name, (first, last) in zip(theirs, rows_of_each(module, theirs, len(weight), cfg)):
            shape = [last - first, *weight.shape[1:]]
            if transposed:
                shape.reverse()
            normed = cfg.embed_norm and name == family.outer["wte"]
            parts[f"{name}.weight"] = Part(
                f"{module}.weight", first, last, shape, transposed, normed
            )
            if always_has_bias or f"{module}.bias" in own:
                parts[f"{name}.bias"] = Part(f"{module}.bias", first, last, [last - first])
    if edited := without_place(model, parts, may_have_more):
        names = f"{', '.join(sorted(edited)[:3])} ({len(edited)} in all)"
        raise UserError(
            f"model.py has parameters that a Hugging Face {family.name} does not have: {names}"
        )
    return parts


def modules_of(cfg, family):
    """[(our module, [theirs])] of all modules with weights that a Hugging Face model has."""
    modules = []
    for ours, theirs in family.outer.items():
        if ours == "head" and cfg.tie_embeddings:
            if not cfg.embed_norm:  # it is the embedding
                continue
            ours = "wte"  # without the norm, which is folded into the embedding alone
        modules.append((ours, [theirs]))
    other_mlp = "mlp.up" if cfg.mlp == "swiglu" else "mlp.gate_up"
    for i in range(cfg.n_layer):
        for ours, theirs in family.block.items():
            if ours != other_mlp:
                names = [f"{family.layers}{i}.{name}" for name in theirs.split()]
                modules.append((f"blocks.{i}.{ours}", names))
    return modules


def rows_of_each(module, theirs, rows, cfg):
    """[(first, last)] of our module's `rows` that each of `theirs` has, in their order."""
    leaf = module.rpartition(".")[2]
    if leaf in ("wte", "head"):
        return [(0, cfg.vocab_size)]
    if len(theirs) == 1:
        return [(0, rows)]
    if leaf == "up":  # relu2's one matrix is both gate and up of a Llama
        return [(0, rows), (0, rows)]
    if leaf == "qkv":
        sizes = [heads * cfg.head_size for heads in (cfg.n_head, cfg.kv_heads, cfg.kv_heads)]
    else:  # gate and up
        sizes = [cfg.mlp_hidden, cfg.mlp_hidden]
    ends = [*itertools.accumulate(sizes)]
    return [*zip([0, *ends], ends)]


def without_place(model, parts, may_have_more):
    """Names of our parameters and buffers for which Hugging Face's model has no room or too little.

    parts: of `hf_parts`. may_have_more: names those with too little room alone.
    """
    from run.pack import persistent_buffers

    rows = {part.ours: part.last for part in parts.values()}  # the last part has the last rows
    found = []
    for name, p in model.named_parameters():
        if name not in rows:
            if not may_have_more:
                found.append(name)
        elif rows[name] not in (len(p), model.cfg.vocab_size):  # a table may be padded
            found.append(name)
    if not may_have_more:
        found += persistent_buffers(model)
    return found


def open_tensors(folder, family):
    """{full Hugging Face name: slice of safetensors}, without buffers.

    They are of one file, model.safetensors, or else of the files that an index names.
    """
    tensors = {}
    prefix = family.layers.partition(".")[0] + "."  # absent if the model was saved without its head
    paths = [folder / "model.safetensors"]
    if (folder / INDEX).exists() and not paths[0].exists():
        index = read_json(folder / INDEX, form={"weight_map": {str: plain_name}})
        paths = sorted(folder / name for name in set(index["weight_map"].values()))
    for path in paths:
        if not path.is_file():
            raise UserError(
                f"{path}: missing; pickles (pytorch_model.bin) are not read: convert them first"
            )
        with as_user_error(f"{path}: damaged or not safetensors"):
            handle = safe_open(path, "pt")
        for name in handle.keys():
            full = name if name.startswith((prefix, "lm_head.")) else prefix + name
            if full in tensors:
                raise UserError(f"{path}: it is the second to hold {full}; keep one of them")
            if not name.endswith(BUFFERS):
                tensors[full] = handle.get_slice(name)
    return tensors


def tie(theirs, family):
    """Whether a tied model's head is its embedding; it is then dropped from the slices `theirs`.

    A file may hold another head, and transformers then uses both.
    """
    wte = f"{family.outer['wte']}.weight"
    head = f"{family.outer['head']}.weight"
    if head not in theirs:
        return True
    theirs.setdefault(wte, theirs[head])  # which may be the only copy
    if theirs[wte].get_shape() != theirs[head].get_shape():
        return True  # and so `misfits` finds the head
    if (theirs[wte][:] != theirs[head][:]).any():
        return False
    del theirs[head]
    return True


def open_hf(name):
    """The SavedModel of a folder or hub name; its tensors have our names and no padding rows."""
    from model import on_meta
    from run.checkpoint import SavedModel

    folder = fetch(name)
    cfg = read_config(folder)
    family = family_of(cfg)
    if all((folder / name).exists() for name in ("model.safetensors", INDEX)):
        warn(f"{folder} has model.safetensors and {INDEX}; the first is read, as transformers does")
    theirs = open_tensors(folder, family)
    if cfg.tie_embeddings:
        tie(theirs, family)
    parts = hf_parts(on_meta(cfg), may_have_more=True)
    wrong = misfits(parts, theirs)
    if wrong:
        words = f"{'; '.join(wrong[:3])} ({len(wrong)} in all)"
        raise UserError(f"{folder}: its tensors do not fit its config.json: {words}")
    return SavedModel(stack_qkv_and_gate_up(parts, theirs), cfg, cfg.tokenizer)


def misfits(parts, theirs):
    """In words, how the slices {Hugging Face name: slice} are not those that the parts ask for."""
    wrong = []
    for key in sorted(parts.keys() | theirs.keys()):
        if key not in theirs:
            wrong.append(f"{key} missing")
        elif key not in parts:
            wrong.append(f"{key} not expected")
        else:
            shape = theirs[key].get_shape()
            dtype = theirs[key].get_dtype()
            if shape != parts[key].shape:
                wrong.append(f"{key} is {shape}, expected {parts[key].shape}")
            if dtype not in DTYPES:
                wrong.append(f"{key} is {dtype}, expected {' or '.join(DTYPES)}")
    return wrong


def stack_qkv_and_gate_up(parts, theirs):
    """{our name: MergedTensor}, each of the slices {Hugging Face name: slice} that it stacks."""
    import torch

    from run.checkpoint import MergedTensor

    dtypes = {}  # the widest of the slices: q and v may be float32 beside a narrower k
    for key, part in parts.items():
        dtype = getattr(torch, DTYPES[theirs[key].get_dtype()])
        dtypes[part.ours] = torch.promote_types(dtype, dtypes.get(part.ours, dtype))
    slices = {}  # {our name: [(first row, LazySlice)]}
    for key, part in parts.items():
        rows = LazySlice(theirs[key], dtypes[part.ours], part.transposed)
        slices.setdefault(part.ours, []).append((part.first, rows))
    return {ours: MergedTensor(ours, found) for ours, found in slices.items()}


def save_hf(
    model,
    path,
    dtype="float32",
    max_shard_size="5GB",
    tensors=None,
    tokenizer=None,
    check=lambda _: None,
):
    """Writes a folder that AutoModelForCausalLM loads, whole or not at all.

    tensors=None: the model's. check: called with the folder before it has its name; may raise.
    """
    path = Path(path)
    parts = hf_parts(model)
    if tensors is None:
        tensors = dict(model.named_parameters())
    aside = path.absolute().with_name(f".writing_{path.name}")
    shutil.rmtree(aside, ignore_errors=True)  # left by a killed save
    try:
        with as_user_error(f"{path}: cannot be written", advice="; nothing of it is kept"):
            aside.mkdir(parents=True)
            ids = write_tokenizer(aside, tokenizer, model.cfg.block_size) if tokenizer else {}
            write_json(aside / "config.json", config_json(model.cfg, dtype, ids))
            _write_shards(aside, parts, tensors, dtype, max_shard_size, model.cfg.norm_eps)
        check(aside)
        with as_user_error(f"{path}: cannot be written", advice="; nothing of it is kept"):
            aside.rename(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # after a failure
    return path


def _write_shards(folder, parts, tensors, dtype, max_size, eps):
    """Writes model.safetensors.

    If the tensors take more than max_size, writes several files and their index.
    """
    import torch
    from safetensors.torch import save_file

    # biases that our model lacks are zeros
    tensors = {part.ours: torch.zeros(part.last) for part in parts.values()} | tensors
    dtype = getattr(torch, dtype)

    def theirs(part):  # a copy, as relu2's one matrix is both gate and up
        rows = tensors[part.ours][part.first : part.last].detach().cpu()
        if part.normed:
            rows = torch.nn.functional.rms_norm(rows.float(), rows.shape[1:], eps=eps)
        if part.transposed:
            rows = rows.t()
        return rows.to(dtype, copy=True).contiguous()

    sizes = {}
    for name, part in parts.items():
        sizes[name] = torch.empty(part.shape, dtype=dtype, device="meta")
    plan = huggingface_hub.split_torch_state_dict_into_shards(sizes, max_shard_size=max_size)
    for file, names in plan.filename_to_tensors.items():
        with by_umask(folder / file):
            save_file(
                {name: theirs(parts[name]) for name in names}, folder / file, {"format": "pt"}
            )
    if plan.is_sharded:
        write_json(folder / INDEX, dict(metadata=plan.metadata, weight_map=plan.tensor_to_filename))
