"""The settings of a model, of a run and of scripts that load a trained model, and their checks.

Needs no torch. Each setting's comment is its line in `python train.py --help`; one on a line of
its own begins a section.
"""

import math
import re
from dataclasses import dataclass, fields, replace
from typing import Literal

from configurator import outside, too_small
from system.errors import refuse, this_rank

Precision = Literal["auto", "auto8", "fp32", "tf32", "bf16", "fp16", "fp8"]


@dataclass
class GPTConfig:
    # Model: size
    vocab_size: int = 50257  # number of token ids; 50257 is GPT-2's
    vocab_multiple: int = 128  # embedding rows are padded to a multiple (50304: faster GEMMs)
    block_size: int = 1024  # tokens in a sequence (T)
    n_layer: int = 12  # blocks
    n_head: int = 12  # query heads
    n_kv_head: int | None = None  # key/value heads (grouped-query attention); None: n_head
    head_dim: int | None = None  # width of a head (D), as in Qwen3; None: n_embd / n_head
    n_embd: int = 768  # width of the residual stream (C)
    n_hidden: int | None = None  # width inside the MLP; None: 4 * n_embd
    # Model: variants
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"  # normalisation before each sublayer
    norm_eps: float = 1e-5  # added to the variance
    positions: Literal["learned", "rope"] = "learned"  # GPT-2's table, or rotary as in Llama
    rope_theta: float = 10000.0  # base of the rotary frequencies
    rope_factor: float | None = None  # Llama 3.1's scaling of low frequencies (8.0 there)
    rope_original: int = 8192  # context that the model was trained with before scaling
    mlp: Literal["gelu", "relu2", "swiglu"] = "gelu"  # GPT-2's, squared ReLU, Llama's
    bias: bool = True  # biases in linear layers and LayerNorm
    qk_norm: bool = False  # RMSNorm on queries and keys before RoPE
    attention_gate: bool = False  # scales a head's output by 2 sigmoid(W x), x: 16 channels
    value_embeddings: int = 0  # every n-th block, the last too, adds a row per token id to v; 0: no
    embedding_mix: int = 0  # every n-th block, the last too, reads a x + b x0, x0: embedded; 0: no
    embed_norm: bool = False  # RMSNorm without weights on the embedded tokens
    zero_init: bool = False  # the head, and projections into the residual stream, start at zero
    tie_embeddings: bool = True  # the head shares the token embedding's weight
    dropout: float = 0.0  # in attention and after each sublayer
    attention: Literal["auto", "cudnn", "flash", "efficient", "math"] = "auto"  # SDPA's

    @property
    def head_size(self):
        return self.head_dim or self.n_embd // self.n_head

    @property
    def kv_heads(self):
        return self.n_kv_head or self.n_head

    @property
    def mlp_hidden(self):
        return self.n_hidden or 4 * self.n_embd

    @property
    def attention_width(self):
        return self.n_head * self.head_size

    @property
    def qkv_width(self):
        return (self.n_head + 2 * self.kv_heads) * self.head_size

    @property
    def mlp_width(self):
        """Output width of the MLP's first matmul; SwiGLU's gate and up projections are one."""
        return 2 * self.mlp_hidden if self.mlp == "swiglu" else self.mlp_hidden

    @property
    def value_layers(self):
        """Numbers of the blocks with a table of value embeddings, the last block first."""
        return self.every(self.value_embeddings)

    @property
    def gate_channels(self):
        """Channels of a token from which a head's gate is computed; 0 without gates."""
        return min(16, self.n_embd) if self.attention_gate else 0

    @property
    def mixed_layers(self):
        """Numbers of the blocks that read the embedded tokens again, the last block first."""
        return self.every(self.embedding_mix, first=1)  # the first block reads them anyway

    def narrow(self):
        """This model with 8 channels a head and at most 32 blocks, for quick trials of its code."""
        width = 8 * self.n_head
        changes = dict(n_layer=min(32, self.n_layer), n_embd=width, head_dim=8, n_hidden=2 * width)
        return replace(self, **changes)

    def every(self, n, first=0):
        """Numbers of every n-th block from the last one down to `first`; of none where n is 0."""
        return range(self.n_layer - 1, first - 1, -n) if n else range(0)

    @property
    def padded_vocab(self):
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple

    def problems(self):
        """Why a model of this shape cannot be built, one line each; empty if it can."""
        found = []
        for rule, bound, names in RANGES:
            own = [name for name in names.split() if hasattr(self, name)]
            found += outside(self, rule, dict.fromkeys(own, bound))
        if found:
            return found
        if self.head_dim is None and self.n_embd % self.n_head:
            return [f"n_embd={self.n_embd} must be divisible by n_head={self.n_head}"]
        if self.n_head % self.kv_heads:
            return [f"n_head={self.n_head} must be divisible by n_kv_head={self.n_kv_head}"]
        if self.positions == "rope" and self.head_size % 2:
            return [f"head_dim={self.head_size} must be even with positions=rope"]
        return []

    def differences(self, now, free=()):
        """["n_embd: checkpoint 768, now 1024", ...] of fields that decide results, `free` apart."""
        # the property that says what None of a field means
        meaning = {"n_kv_head": "kv_heads", "n_hidden": "mlp_hidden", "head_dim": "head_size"}
        found = []
        for field in fields(GPTConfig):
            name = meaning.get(field.name, field.name)
            before, after = getattr(self, name), getattr(now, name)
            if before != after and field.name not in {"attention", "dropout", "zero_init", *free}:
                found.append(f"{field.name}: checkpoint {before}, now {after}")
        return found


@dataclass
class Config(GPTConfig):
    # Run
    out_dir: str = "out/run"  # the run's folder: log.jsonl, config.json, the code, checkpoints
    resume: str = "none"  # none; auto: the newest checkpoint in out_dir; or one's folder
    overwrite: bool = False  # start afresh in a used out_dir; its log and checkpoints are removed
    init_from: str | None = None  # first weights: a checkpoint's folder; hf:NAME sets the shape too
    dry_run: bool = False  # two steps, a validation, the shards' SHA-256; writes nothing
    overfit: bool = False  # train on the first batch only: the loss must go to zero
    seed: int = 1337  # of the initial weights and dropout
    # Data
    data_dir: str = "data/fineweb-edu"  # shards or nanoGPT's *.bin; mixed: data/a:0.7,data/b:0.3
    tokenizer: str | None = None  # for samples and HellaSwag; None: the one in the data's manifest
    shuffle_seed: int | None = None  # shuffles the rows anew in each epoch; None: as in the shards
    document_mask: bool = False  # a token attends within its document only, see scale/documents.py
    allow_data_change: bool = False  # resume even though the shards are not those of the checkpoint
    # Batch and schedule
    batch_size: int | Literal["auto"] = 64  # rows of block_size in a micro-batch; auto: what fits
    batch_tokens: int = 524_288  # tokens in an optimizer step, all ranks and micro-steps together
    batch_schedule: str | None = None  # smaller at first, up to a share: 65536:0.2,131072:0.5
    max_steps: int = 19_073  # optimizer steps; 19,073 of 524,288 tokens are 10B
    max_tokens: int | None = None  # instead of max_steps: ends the run after so many tokens
    max_seconds: float | None = None  # instead: seconds of steps, without compiling and evaluation
    lr: float = 6e-4  # peak learning rate
    min_lr_ratio: float = 0.1  # the schedule ends at lr * this
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"  # wsd: constant, then linear
    warmup_steps: int = 715  # steps of linear warm-up
    cooldown_fraction: float = 0.2  # wsd: the last part of the run, in which the rate decays
    # Optimizer
    optimizer: Literal["adamw", "adamw8bit", "muon"] = "adamw"  # see optim.py
    lr_embedding: float | None = None  # peak rate of embeddings; None: lr
    lr_head: float | None = None  # peak rate of a head that is not tied; None: lr
    weight_decay: float | None = 0.1  # on matrices that use lr; muon: blocks'; None: 2/(lr steps)
    momentum_warmup: int = 0  # muon: steps in which its momentum rises from 0.85 to 0.95
    beta1: float = 0.9  # AdamW
    beta2: float = 0.95  # AdamW
    clip: float | None = 1.0  # largest gradient norm, over all ranks; None: off
    max_skipped_steps: int = 0  # steps in a row that may be skipped for inf or NaN
    # Evaluation at an interval of steps, before the first and at the end; 0: never
    eval_interval: int = 250  # validation loss
    eval_tokens: int = 10_485_760  # validation tokens, the same each time, divided among the ranks
    hellaswag_interval: int = 0  # HellaSwag, all 10,042 examples
    hellaswag_file: str | None = None  # a local copy; None: downloaded once and kept
    sample_interval: int = 0  # print samples, not before the first step; log.jsonl has them too
    sample_prompt: str = "Hello, I'm a language model,"  # text that they continue
    # Checkpoints, console and logs
    save_interval: int = 1000  # steps between checkpoints, with one at the end; 0: never
    keep_last: int = 2  # checkpoints kept, besides the one with the best validation loss
    async_save: bool = False  # trains on while a checkpoint is written from a copy in host memory
    log_interval: int = 1  # steps between lines printed; log.jsonl has every step
    wandb: bool = False  # log to Weights & Biases too; WANDB_PROJECT and WANDB_NAME count
    # Device and precision
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: CUDA, else MPS, else the CPU
    precision: Precision = "auto"  # auto: bf16 if it can; auto8: fp8, else as auto
    compile: bool = True  # torch.compile; needs a C++ compiler on the CPU
    cuda_graph: bool = False  # ddp: a micro-step is one launch, for small ones and slow hosts
    ops: Literal["auto", "torch", "fused"] = "auto"  # fast/'s fused kernels, or plain PyTorch
    deterministic: bool = False  # the same bits in each run on one GPU, 10% slower; always on CPUs
    # Several GPUs
    parallel: Literal["ddp", "fsdp", "zero2", "hsdp"] = "ddp"  # all but ddp shard (FSDP2)
    shard_size: int | None = None  # hsdp: ranks that share a copy of the model; None: a node's
    context_parallel: int = 1  # ranks that share a sequence, see scale/context_parallel.py
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"  # type in which ranks sum up gradients
    timeout_s: int = 600  # how long ranks wait for one that hangs
    prove: bool = True  # that model.py holds in this run's modes, see run/prove.py; in seconds
    # Less memory
    remat: Literal["none", "selective", "attention", "block"] = "none"  # activation checkpointing
    remat_every: float = 1  # every k-th block; 1.5: two of three
    remat_tile: int | None = None  # tokens that pass the MLP at a time; None: all
    remat_offload: bool = False  # attention, block: the kept activations wait in host memory
    weights: Literal["fp32", "bf16"] = "fp32"  # of parameters and gradients; bf16: needs adamw8bit
    offload_states: bool = False  # fsdp, zero2: weights, gradients, moments in host memory

    # nanoGPT's names, and what is meant here
    others_names = {
        "config": "the file's path alone, without --config=",
        "dataset": "data_dir",
        "learning_rate": "lr",
        "decay_lr": "schedule=constant",
        "min_lr": "min_lr_ratio, a share of lr",
        "max_iters": "max_steps",
        "gradient_accumulation_steps": "batch_tokens, which is in tokens",
        "grad_clip": "clip",
        "dtype": "precision",
        "eval_iters": "eval_tokens, which is in tokens",
        "eval_only": "the script validate.py",
        "always_save_checkpoint": "save_interval, whatever the loss",
        "backend": "device, from which it follows",
    }

    def micro_steps(self, ranks, tokens=None):
        """Micro-steps in an optimizer step of so many tokens; None: of batch_tokens."""
        return max(1, (tokens or self.batch_tokens) // (self.rank_tokens * ranks))

    @property
    def stages(self):
        """[(tokens in a step, share of the run up to which)]: batch_schedule, then batch_tokens."""
        text = self.batch_schedule or ""
        pairs = [stage.split(":") for stage in text.split(",") if stage]
        return [(int(tokens), float(until)) for tokens, until in pairs] + [(self.batch_tokens, 1.0)]

    @property
    def rank_tokens(self):
        """Tokens in a micro-step of one rank; ranks may share a row."""
        return self.batch_size * self.block_size // self.context_parallel


@dataclass
class TrainedConfig:
    # Trained model
    checkpoint: str | None = None  # folder of a run or of a checkpoint
    pretrained: str | None = None  # instead: Hugging Face weights, a folder or a hub name
    tokenizer: str | None = None  # None: the one that the weights were trained with
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: CUDA, else MPS, else the CPU
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"  # auto: bf16 if it can
    parallel: Literal["ddp", "fsdp"] = "ddp"  # each rank holds: ddp: all; fsdp: a part


# (rule, bound, settings that must keep it); None passes
RANGES = [
    (
        "at least",
        1,
        "vocab_size vocab_multiple block_size n_layer n_head n_kv_head head_dim n_embd n_hidden "
        "batch_size batch_tokens max_steps max_tokens keep_last log_interval timeout_s "
        "shard_size context_parallel remat_every remat_tile",
    ),
    (
        "at least",
        0,
        "value_embeddings embedding_mix dropout seed shuffle_seed lr lr_embedding lr_head "
        "min_lr_ratio cooldown_fraction weight_decay beta1 beta2 warmup_steps momentum_warmup "
        "max_skipped_steps "
        "eval_interval hellaswag_interval sample_interval save_interval",
    ),
    ("over", 0, "norm_eps rope_theta rope_factor rope_original max_seconds clip"),
    ("below", 1, "dropout beta1 beta2"),
]


def check(cfg, ranks=None):
    """Raises one UserError that lists every setting out of range or in conflict.

    ranks: None: torchrun's.
    """
    ranks = ranks or this_rank().size
    found = conflicts(cfg, ranks)
    if cfg.batch_size == "auto":  # run.build.choose, which chooses, knows the device
        cfg = replace(cfg, batch_size=1)
    found += too_small(cfg, {"eval_tokens": cfg.block_size})
    if not re.fullmatch(r"([1-9]\d*:[\d.]+,?)*", cfg.batch_schedule or ""):
        form = "expected TOKENS:SHARE,..., such as 65536:0.2,131072:0.5"
        found.append(f"batch_schedule={cfg.batch_schedule}: {form}")
    if cfg.init_from in ("scratch", "resume"):  # nanoGPT's
        found.append(f"init_from={cfg.init_from}: None is from scratch; --resume=auto goes on")
    refuse(found + cfg.problems())
    refuse(shape_conflicts(cfg, ranks))


# at a resume: what must be the checkpoint's, beside the shape of the model; what may change, and is
# told
FIXED_AT_RESUME = "optimizer weights"
TOLD_AT_RESUME = (
    "max_steps max_tokens max_seconds batch_tokens batch_schedule "
    "lr min_lr_ratio warmup_steps cooldown_fraction schedule "
    "seed dropout document_mask weight_decay beta1 beta2 clip lr_embedding lr_head "
    "momentum_warmup max_skipped_steps precision reduce_dtype overfit eval_tokens"
)

# a setting's values, another one's, why they do not go together and what to try
CONFLICTS = [
    ("precision=fp16", "parallel!=ddp", "which has no loss scaler; try --precision=bf16"),
    ("precision=fp16", "optimizer!=adamw", "which has no loss scaler; try --precision=bf16"),
    ("shard_size!=None", "parallel!=hsdp", "which has no groups of ranks; try --parallel=hsdp"),
    (
        "weights=bf16",
        "optimizer!=adamw8bit",
        "which loses small updates; try --optimizer=adamw8bit",
    ),
    ("weights=bf16", "precision=fp32 tf32 fp16", "which needs more bits; try --precision=bf16"),
    ("offload_states=True", "parallel=ddp", "which does not shard the model; try --parallel=fsdp"),
    ("offload_states=True", "optimizer!=adamw", "which needs the GPU; try --optimizer=adamw"),
    (
        "deterministic=True",
        "attention=cudnn",
        "which adds in no fixed order; try --attention=flash",
    ),
    ("overwrite=True", "resume!=none", "which goes on with what it removes; try one of them"),
    ("max_seconds!=None", "max_tokens!=None", "which ends the run too; try one of them"),
    ("max_seconds!=None", "weight_decay=None", "which counts the steps; try --weight_decay=0.1"),
    ("cuda_graph=True", "parallel!=ddp", "whose collectives it cannot hold; try --parallel=ddp"),
    ("cuda_graph=True", "remat!=none", "which reads the random state; try --remat=none"),
    ("cuda_graph=True", "context_parallel!=1", "whose collectives it cannot hold; try one of them"),
    ("cuda_graph=True", "document_mask=True", "which waits for the GPU; try one of them"),
    ("remat_every!=1 1.0", "remat=none", "which computes nothing again; try --remat=selective"),
    ("remat_tile!=None", "remat=none", "which tiles nothing; try --remat=selective"),
    (
        "remat_offload=True",
        "remat=none selective",
        "which keeps too much to move; try --remat=block",
    ),
    ("dropout!=0 0.0", "remat=attention", "which would draw other numbers; try --remat=block"),
    ("dropout!=0 0.0", "document_mask=True", "whose attention has none; try --dropout=0"),
    ("attention!=auto", "document_mask=True", "which brings its own; try --attention=auto"),
    ("remat=attention", "document_mask=True", "whose parts of a row it mixes; try --remat=block"),
]


def conflicts(cfg, ranks):
    """Settings that cannot be combined, one line each."""
    found = []
    for first, second, why in CONFLICTS:
        pair = [given(cfg, first), given(cfg, second)]
        if all(pair):
            found.append(f"{' does not go with '.join(pair)}, {why}")
    for name in ("shard_size", "context_parallel"):
        value = getattr(cfg, name)
        if value and ranks % value:
            found.append(f"{name}={value} must divide the number of ranks, {ranks}")
    if cfg.weights == "bf16" and cfg.parallel == "ddp" and ranks > 1 and cfg.reduce_dtype == "fp32":
        found.append(
            "weights=bf16 has bf16 gradients, which DDP sums in bf16; try --reduce_dtype=bf16"
        )
    return found


def given(cfg, condition):
    """ "name=value" as cfg has it, if that is one of the values in "name=values"; else None.

    "name!=values": if it is none of them.
    """
    name, sign, values = re.split("(!?=)", condition)
    value = str(getattr(cfg, name))
    return f"{name}={value}" if (value in values.split()) == (sign == "=") else None


def shape_conflicts(cfg, ranks):
    """Conflicts with the shape of the model or the batch, one line each.

    They are checked when all else is right.
    """
    N = cfg.context_parallel
    found = []
    for name in ("block_size", "n_head"):
        value = getattr(cfg, name)
        if value % N:
            found.append(
                f"{name}={value} must be divisible by context_parallel={N}; try {value // N * N}"
            )
    if cfg.kv_heads % N and N % cfg.kv_heads:
        found.append(
            f"one of n_kv_head={cfg.kv_heads} and context_parallel={N} must divide the other"
        )
    return found + not_divisible(cfg, ranks)


def not_divisible(cfg, ranks):
    """Stages of the batch that are no whole number of micro-steps, one line each."""
    found = []
    whole = cfg.rank_tokens * ranks
    for tokens, _ in cfg.stages:
        name = "batch_tokens" if tokens == cfg.batch_tokens else "batch_schedule"
        nearest = max(1, round(tokens / whole)) * whole
        if tokens % whole:
            rule = f"is not divisible by batch_size*block_size*ranks = {whole}"
            found.append(f"{name}={tokens} {rule}; try {nearest}")
    return found
