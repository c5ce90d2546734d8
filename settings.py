"""The settings of a model (GPTConfig) and of a run (Config), and their checks. Imports no torch: --help is instant.

Each setting's comment is its line in `python train.py --help`; a comment on a separate line begins a section there.
"""

import math
import os
from dataclasses import dataclass
from typing import Literal

from configurator import UserError, refuse, too_small

NANOGPT_WEIGHTS = {"scratch": "--init_from=None", "resume": "--resume=auto"}  # its values of init_from
NANOGPT_WEIGHTS |= {
    name: f"--init_from=hf:{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
}
KEEPERS = ("cudnn", "flash")  # SDPA backends whose output remat=attention can keep on a GPU


@dataclass
class GPTConfig:
    # Model: size
    vocab_size: int = 50257  # number of token ids; 50257 is GPT-2's
    vocab_multiple: int = (
        128  # embedding rows are padded up to a multiple of this (50257 -> 50304: faster matmuls)
    )
    block_size: int = 1024  # tokens in a sequence (T)
    n_layer: int = 12  # blocks
    n_head: int = 12  # query heads
    n_kv_head: int | None = None  # key/value heads (grouped-query attention); None: n_head
    n_embd: int = 768  # width of the residual stream (C)
    n_hidden: int | None = None  # width inside the MLP; None: 4 * n_embd
    # Model: variants
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"  # normalisation before each sublayer
    norm_eps: float = 1e-5  # added to the variance
    positions: Literal["learned", "rope"] = "learned"  # learned: GPT-2's table; rope: rotary, as in Llama
    rope_theta: float = 10000.0  # base of the rotary frequencies
    rope_factor: float | None = None  # Llama 3.1's scaling of the low frequencies (8.0 there); None: off
    rope_low_freq: float = 1.0  # wavelengths over rope_original / this are divided by rope_factor
    rope_high_freq: float = 4.0  # wavelengths under rope_original / this are left alone
    rope_original: int = 8192  # context that the model was trained with before scaling
    max_positions: int | None = (
        None  # context of the weights in init_from, if longer; for exports. None: block_size
    )
    mlp: Literal["gelu", "relu2", "swiglu"] = "gelu"  # GPT-2's, squared ReLU, Llama's
    bias: bool = True  # biases in linear layers and LayerNorm
    qk_norm: bool = False  # RMSNorm on queries and keys before RoPE
    attention_gate: bool = False  # scales each head's output by 2 sigmoid(W x), x a token's first 16 channels
    value_embeddings: int = (
        0  # every n-th block, the last one included, adds a learned row per token id to v; 0: none
    )
    embed_norm: bool = False  # RMSNorm without weights on the embedded tokens
    zero_init: bool = False  # the head, and projections into the residual stream, start at zero
    tie_embeddings: bool = True  # the head shares the token embedding's weight
    softcap: float | None = None  # bounds the logits to +-softcap; None: off
    label_smoothing: float = (
        0.0  # share of the target's probability spread over the vocabulary, in training only
    )
    z_loss: float = 0.0  # weight of logsumexp(logits)**2 in the loss, in training only; PaLM's is 1e-4
    dropout: float = 0.0  # in attention and after each sublayer
    attention: Literal["auto", "cudnn", "flash", "efficient", "math"] = (
        "auto"  # SDPA backend; auto: by device
    )

    most = dict.fromkeys(
        ["vocab_size", "vocab_multiple", "block_size", "n_head", "n_embd", "n_hidden"], 1 << 27
    )
    most["n_layer"] = 10_000

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    @property
    def kv_heads(self):
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def hidden(self):
        return 4 * self.n_embd if self.n_hidden is None else self.n_hidden

    @property
    def qkv_width(self):
        return (self.n_head + 2 * self.kv_heads) * self.head_dim

    @property
    def mlp_width(self):
        """Output width of the MLP's first matmul, in which SwiGLU's gate and up projections are one."""
        return 2 * self.hidden if self.mlp == "swiglu" else self.hidden

    @property
    def value_layers(self):
        """Numbers of the blocks with a table of value embeddings, the last block first."""
        return range(self.n_layer - 1, -1, -self.value_embeddings) if self.value_embeddings else range(0)

    @property
    def value_tables(self):
        """Widths of the tables of value embeddings."""
        return [self.kv_heads * self.head_dim] * len(self.value_layers)

    @property
    def gate_channels(self):
        """Channels of a token from which a head's gate is computed; 0 without gates."""
        return min(16, self.n_embd) if self.attention_gate else 0

    @property
    def tables(self):
        """Widths of all matrices with a row for each token id, the head's included; a shared one counts once."""
        return [self.n_embd] * (1 if self.tie_embeddings else 2) + self.value_tables

    @property
    def block_matmuls(self):
        """(output width, input width) of a block's four matmuls: q, k and v; attention's output; the MLP's two."""
        C = self.n_embd
        return [(self.qkv_width, C), (C, C), (self.mlp_width, C), (C, self.hidden)]

    @property
    def padded_vocab(self):
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple

    def problems(self):
        """Why a model of this shape cannot be built, one line each; empty if it can."""
        sizes = [
            "vocab_size",
            "vocab_multiple",
            "block_size",
            "n_layer",
            "n_head",
            "n_embd",
            "n_kv_head",
            "n_hidden",
        ]
        found = too_small(self, dict.fromkeys(sizes, 1))
        if not found and self.n_embd % self.n_head:
            found.append(f"n_embd={self.n_embd} must be divisible by n_head={self.n_head}")
        if not found and self.n_head % self.kv_heads:
            found.append(f"n_head={self.n_head} must be divisible by n_kv_head={self.n_kv_head}")
        if not found and self.positions == "rope" and self.head_dim % 2:
            found.append(f"n_embd / n_head = {self.head_dim} must be even with positions=rope")
        found += [
            f"{k}={v} must be at most {m}" for k, m in self.most.items() if (v := getattr(self, k) or 0) > m
        ]
        for name in ("norm_eps", "rope_theta", "rope_factor", "rope_low_freq", "rope_high_freq"):
            if (value := getattr(self, name)) is not None and not value > 0:
                found.append(f"{name}={value} must be over 0")
        if not found and self.rope_factor is not None and not self.rope_low_freq < self.rope_high_freq:
            found.append(
                f"rope_low_freq={self.rope_low_freq} must be under rope_high_freq={self.rope_high_freq}"
            )
        for name in ("dropout", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                found.append(f"{name}={getattr(self, name)} must be in [0, 1)")
        if self.softcap is not None and not self.softcap > 0:
            found.append(f"softcap={self.softcap} must be over 0, or None for off")
        return found + too_small(self, {"z_loss": 0, "value_embeddings": 0})


@dataclass
class Config(GPTConfig):
    # Run
    out_dir: str = "out/run"  # the run's folder: log.jsonl, config.json, model.py as it was, checkpoints
    resume: str = (
        "none"  # none; auto: the newest complete checkpoint in out_dir, if there is one; or a folder
    )
    overwrite: bool = False  # start afresh in a used out_dir; its log and checkpoints are removed
    init_from: str | None = (
        None  # initial weights: a checkpoint's folder, or hf:NAME, which sets the shape too
    )
    dry_run: bool = False  # two steps and a validation of everything; nothing is written
    overfit: bool = False  # train on the first batch only: the loss must go to zero
    seed: int = 1337  # of the initial weights and dropout
    # Data
    data_dir: str = (
        "data/fineweb-edu"  # shards, or nanoGPT's train.bin and val.bin; mixed: data/a:0.7,data/b:0.3
    )
    tokenizer: str | None = None  # for samples and HellaSwag; None: the one in the data's manifest
    shuffle_seed: int | None = (
        None  # shuffles the rows, differently in each epoch; None: in the order of the shards
    )
    align_documents: bool = False  # every row starts where a document does, if one begins in it
    document_mask: bool = False  # a token attends within its document only, see scale/documents.py
    verify_data: bool = False  # check every shard against the manifest's SHA-256 first
    allow_data_change: bool = False  # resume even though the shards are not those of the checkpoint
    # Batch and schedule
    batch_size: int = 64  # rows of block_size tokens in a micro-batch (B); as many as fit the device
    batch_tokens: int = 524_288  # tokens in an optimizer step, all ranks and micro-steps together
    max_steps: int = 19_073  # optimizer steps; 19,073 of 524,288 tokens are 10B
    lr: float = 6e-4  # peak learning rate
    min_lr_ratio: float = 0.1  # the schedule ends at lr * this
    schedule: Literal["cosine", "wsd", "constant"] = (
        "cosine"  # after warm-up; wsd: constant, then linear down
    )
    warmup_steps: int = 715  # steps of linear warm-up
    warmup_tokens: int | None = None  # warm-up in tokens; replaces warmup_steps
    cooldown_fraction: float = 0.2  # wsd: the last part of the run, in which the rate decays
    # Optimizer
    optimizer: Literal["adamw", "adamw8bit", "muon"] = (
        "adamw"  # adamw8bit: moments in 8 bits; muon: see optim.py
    )
    lr_embedding: float | None = None  # peak rate of embeddings; None: lr
    lr_head: float | None = None  # peak rate of a head that is not tied; None: lr
    lr_vector: float | None = None  # peak rate of biases, norms and attention gates; None: lr
    weight_decay: float = 0.1  # on 2-D weights, not on vectors; muon: on the blocks' matrices alone
    momentum: float = 0.95  # muon
    momentum_warmup: int = 0  # muon: steps in which its momentum rises from 0.85
    beta1: float = 0.9  # AdamW
    beta2: float = 0.95  # AdamW
    adam_eps: float = 1e-8  # AdamW
    clip: float | None = 1.0  # largest gradient norm, over all ranks; None: off
    max_skipped_steps: int = (
        0  # steps in a row whose loss or gradients may be inf or NaN: they change nothing
    )
    # Evaluation, each before the first step, at an interval of steps and at the end; 0: never
    eval_interval: int = 250  # validation loss
    eval_tokens: int = 10_485_760  # validation tokens, the same each time, divided among the ranks
    hellaswag_interval: int = 0  # HellaSwag, all 10,042 examples
    hellaswag_file: str | None = None  # a local copy; None: downloaded once and kept
    sample_interval: int = 0  # print samples
    sample_prompt: str = "Hello, I'm a language model,"  # text that they continue
    n_samples: int = 4  # number of samples
    sample_tokens: int = 64  # tokens in each
    temperature: float = 0.8  # of the samples
    top_k: int | None = 50  # of the samples
    # Checkpoints, console and logs
    save_interval: int = 1000  # steps between checkpoints, with one at the end; 0: never
    keep_last: int = 2  # checkpoints kept, besides the one with the best validation loss
    async_save: bool = (
        False  # training continues while a checkpoint is written, from a copy in the CPU's memory
    )
    log_interval: int = 1  # steps between lines printed; log.jsonl has every step
    wandb: bool = False  # log to Weights & Biases as well, in the project "pretrain"
    run_name: str | None = None  # name of the run there
    # Device and precision
    device: str = "auto"  # auto, cpu, cuda, mps
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8"] = (
        "auto"  # auto: bf16 on GPUs that have it
    )
    compile: bool = True  # torch.compile; needs a C++ compiler on the CPU
    cuda_graph: bool = False  # ddp: launches a micro-step as one CUDA graph, for small micro-batches
    ops: Literal["auto", "torch", "fused"] = (
        "auto"  # fused: fast forms (fast/); torch: the definitions of kernels.py
    )
    deterministic: bool = (
        False  # the same bits in each run on one GPU, for 10% more time; on a CPU it is always so
    )
    # Several GPUs
    parallel: Literal["ddp", "fsdp", "zero2", "hsdp"] = (
        "ddp"  # ddp: a copy on each rank; others: sharded with FSDP2
    )
    shard_size: int | None = None  # hsdp: ranks that share a copy of the model; None: those of a node
    context_parallel: int = 1  # ranks that share a sequence, see scale/context.py
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"  # type in which gradients are summed over the ranks
    backend: str = "auto"  # of the process group; auto: nccl on CUDA, else gloo
    timeout_s: int = 600  # how long ranks wait for one that hangs
    # Less memory
    remat: Literal["none", "selective", "attention", "block"] = (
        "none"  # activation checkpointing, see scale/remat.py
    )
    remat_every: int = 1  # in every k-th block only
    remat_tile: int | None = None  # tokens that pass the MLP at a time; None: all
    remat_offload: bool = False  # attention, block: the kept activations wait in the host's memory
    logits_mib: int = (
        1024  # logits that the loss holds at a time, MiB; more tokens than fit are computed in chunks
    )
    weights: Literal["fp32", "bf16"] = (
        "fp32"  # parameters and gradients; bf16: no float32 copy, needs adamw8bit
    )
    offload_states: bool = False  # fsdp, zero2, hsdp: parameters, gradients and moments in the CPU's memory

    gone = {  # settings that were removed; a checkpoint that names them still loads
        "bucket_mib": "no measurement favoured another size; it is BUCKET_MIB in scale/parallel.py",
        "unit_mib": "no measurement favoured another size; it is UNIT_MIB in scale/memory.py",
        "data_format": "the loader recognises a file's format by its header and name",
        "wandb_project": "the project is always pretrain; --run_name names the run",
        "bf16_residual": "the residual stream is always bf16 with precision=bf16 and fp8",
    }
    nanogpt = {  # its names of settings
        "dataset": "data_dir, the folder of train.bin and val.bin",
        "max_iters": "max_steps",
        "gradient_accumulation_steps": "batch_tokens, gradient_accumulation_steps * batch_size * block_size",
        "learning_rate": "lr",
        "min_lr": "min_lr_ratio, min_lr / learning_rate",
        "warmup_iters": "warmup_steps",
        "lr_decay_iters": "max_steps, with which the schedule ends",
        "decay_lr": "schedule, constant for False",
        "grad_clip": "clip, None for 0.0",
        "eval_iters": "eval_tokens, eval_iters * batch_size * block_size",
        "eval_only": "dry_run, an evaluation and two steps that leave no trace",
        "always_save_checkpoint": "save_interval (the best checkpoint is always kept)",
        "wandb_log": "wandb",
        "wandb_run_name": "run_name",
        "dtype": "precision, bf16 for bfloat16",
    }

    def micro_tokens(self, ranks):
        """Tokens in a micro-step, all ranks together."""
        return self.batch_size * self.block_size * (ranks // self.context_parallel)

    def micro_steps(self, ranks):
        """Micro-steps in an optimizer step."""
        return max(1, self.batch_tokens // self.micro_tokens(ranks))

    @property
    def rank_tokens(self):
        """Tokens in a micro-step of one rank."""
        return self.batch_size * self.block_size // self.context_parallel


def check(cfg, ranks=None):
    """Raises one UserError that lists every setting out of range or in conflict, for `ranks` processes.

    ranks: None for those that torchrun started.
    """
    ranks = int(os.environ.get("WORLD_SIZE", 1)) if ranks is None else ranks
    found = cfg.problems() + out_of_range(cfg, ranks) + conflicts(cfg, ranks)
    endless = {k: v for k, v in vars(cfg).items() if isinstance(v, float) and not math.isfinite(v)}
    refuse(found + [f"{k}={v} must be finite" for k, v in endless.items() if f"{k}=" not in str(found)])
    refuse(shape_conflicts(cfg, ranks))


def legal(cfg, ranks):
    """Whether `check` accepts the settings, and a GPU could run them."""
    try:
        check(cfg, ranks)
    except UserError:
        return False
    return cfg.remat != "attention" or cfg.attention in ("auto", *KEEPERS)


def out_of_range(cfg, ranks):
    """Settings of a run that are out of range by themselves, one line each."""
    one = [
        "batch_size",
        "batch_tokens",
        "max_steps",
        "keep_last",
        "log_interval",
        "remat_every",
        "timeout_s",
        "top_k",
    ]
    one += ["n_samples", "sample_tokens", "remat_tile"]
    zero = ["lr_embedding", "lr_head", "lr_vector", "momentum", "momentum_warmup"]
    zero += [
        "lr",
        "min_lr_ratio",
        "cooldown_fraction",
        "weight_decay",
        "beta1",
        "beta2",
        "warmup_steps",
        "temperature",
    ]
    zero += [
        "eval_interval",
        "hellaswag_interval",
        "sample_interval",
        "save_interval",
        "seed",
        "shuffle_seed",
    ]
    zero += ["max_skipped_steps", "warmup_tokens"]
    found = too_small(cfg, dict.fromkeys(one, 1) | dict.fromkeys(zero, 0) | {"eval_tokens": cfg.block_size})
    found += [
        f"{k}={v} must be below 1" for k in ("beta1", "beta2", "momentum") if (v := getattr(cfg, k)) >= 1
    ]
    rates = ("lr_embedding", "lr_head", "lr_vector")
    found += [f"{k}={v} needs lr over 0" for k in rates if (v := getattr(cfg, k)) and not cfg.lr]
    if cfg.clip is not None and not cfg.clip > 0:
        found.append(f"clip={cfg.clip} must be over 0, or None for off")
    if not cfg.adam_eps > 0:
        found.append(f"adam_eps={cfg.adam_eps} must be over 0: a gradient of zero would be divided by it")
    if cfg.seed >= 2**63:
        found.append(f"seed={cfg.seed} must be below 2**63")
    if cfg.init_from in NANOGPT_WEIGHTS and not os.path.exists(cfg.init_from):
        found.append(f"init_from={cfg.init_from} is nanoGPT's; it is {NANOGPT_WEIGHTS[cfg.init_from]} here")
    if cfg.context_parallel < 1 or ranks % cfg.context_parallel:
        found.append(f"context_parallel={cfg.context_parallel} must divide the number of ranks, {ranks}")
    return found


def conflicts(cfg, ranks):
    """Settings that cannot be combined, one line each."""
    found, shards = [], cfg.shard_size
    if cfg.overwrite and cfg.resume != "none":
        found.append(f"overwrite=True starts afresh, resume={cfg.resume} goes on; leave one of them out")
    if cfg.parallel != "ddp" and cfg.precision == "fp16":
        found.append(f"parallel={cfg.parallel} has no loss scaler for precision=fp16; try --precision=bf16")
    if cfg.parallel == "hsdp" and shards is not None and (shards < 1 or ranks % shards):
        found.append(f"shard_size={shards} must divide the number of ranks, {ranks}")
    if cfg.parallel != "hsdp" and shards is not None:
        found.append(
            f"shard_size={shards} is for parallel=hsdp, parallel is {cfg.parallel}; try --shard_size=None"
        )
    if cfg.optimizer != "adamw" and cfg.precision == "fp16":
        found.append(f"optimizer={cfg.optimizer} has no loss scaler for precision=fp16; try --precision=bf16")
    if cfg.weights == "bf16" and cfg.optimizer != "adamw8bit":
        found.append(
            f"weights=bf16 would lose small updates with optimizer={cfg.optimizer}; try --optimizer=adamw8bit"
        )
    if cfg.weights == "bf16" and cfg.precision in ("fp32", "tf32", "fp16"):
        found.append(f"weights=bf16 cannot give precision={cfg.precision}; try --precision=bf16")
    if cfg.weights == "bf16" and cfg.parallel == "ddp" and ranks > 1 and cfg.reduce_dtype == "fp32":
        found.append("weights=bf16 has bf16 gradients, which DDP sums in bf16; try --reduce_dtype=bf16")
    if cfg.offload_states and cfg.parallel == "ddp":
        found.append("offload_states=True needs a sharded model, parallel is ddp; try --parallel=fsdp")
    if cfg.offload_states and cfg.optimizer != "adamw":
        found.append(
            f"offload_states=True updates on the CPU, where {cfg.optimizer} is slow; try --optimizer=adamw"
        )
    if cfg.deterministic and cfg.attention == "cudnn":
        found.append(
            "deterministic=True: attention=cudnn adds gradients in no fixed order; try --attention=flash"
        )
    if cfg.cuda_graph and cfg.remat != "none":
        found.append(
            f"cuda_graph=True cannot capture remat={cfg.remat}, which reads the random state; try --remat=none"
        )
    if cfg.cuda_graph and cfg.parallel != "ddp" and (ranks > 1 or cfg.offload_states):
        found.append(
            f"cuda_graph=True cannot capture FSDP2's collectives, parallel={cfg.parallel}; try --parallel=ddp"
        )
    if cfg.cuda_graph and cfg.context_parallel > 1:
        found.append("cuda_graph=True cannot capture context_parallel's collectives; leave one of them out")
    if cfg.cuda_graph and cfg.document_mask:
        found.append(
            "cuda_graph=True cannot capture document_mask=True, which waits for the GPU; leave one of them out"
        )
    if cfg.remat == "none" and cfg.remat_tile:
        found.append("remat_tile needs remat=selective, attention or block, remat is none")
    if cfg.remat in ("none", "selective") and cfg.remat_offload:
        found.append(f"remat_offload needs remat=attention or block, remat is {cfg.remat}")
    if cfg.remat == "attention" and cfg.dropout:
        found.append(f"remat=attention does not support dropout={cfg.dropout}; try --remat=block")
    if cfg.document_mask and cfg.dropout:
        found.append(f"document_mask=True supports no dropout={cfg.dropout} in attention; try --dropout=0")
    if cfg.document_mask and cfg.attention != "auto":
        found.append(
            f"document_mask=True brings its own attention, not {cfg.attention}; leave --attention=auto"
        )
    if cfg.document_mask and cfg.remat == "attention":
        found.append(
            "document_mask=True cannot have remat=attention, which keeps whole rows; try --remat=block"
        )
    return found


def shape_conflicts(cfg, ranks):
    """Conflicts with the shape of the model or the batch, one line each; checked when all else is right."""
    found, N, D, micro = [], cfg.context_parallel, cfg.head_dim, cfg.micro_tokens(ranks)
    if cfg.remat == "attention" and D % 8:
        found.append(f"remat=attention needs n_embd / n_head = {D} to be a multiple of 8; try --remat=block")
    if cfg.document_mask and (D % 8 or D > 256):
        found.append(f"document_mask=True needs n_embd / n_head = {D} to be a multiple of 8, at most 256")
    if cfg.block_size % N:
        below = cfg.block_size // N * N
        found.append(
            f"block_size={cfg.block_size} must be divisible by context_parallel={N}; nearest: {below}"
        )
    if cfg.n_head % N:
        found.append(f"n_head={cfg.n_head} must be divisible by context_parallel={N}")
    if cfg.kv_heads % N and N % cfg.kv_heads:
        found.append(
            f"one of n_kv_head={cfg.kv_heads} and context_parallel={N} must be divisible by the other"
        )
    if cfg.batch_tokens % micro:
        below = cfg.batch_tokens // micro * micro
        rows = f"{cfg.batch_size}*{cfg.block_size}*{ranks // N}"
        found.append(
            f"batch_tokens={cfg.batch_tokens} is not divisible by batch_size*block_size*ranks = {rows} = {micro}; "
            f"nearest: {f'{below} or ' * (below > 0)}{below + micro}"
        )
    return found
