"""Document masks: a token attends to earlier tokens of its own document only, though a row holds many.

    python train.py config/llama_124m.py --document_mask

A document begins at its separator, as fineweb.py writes them, or where the row does. Llama 3 was trained so
(https://arxiv.org/abs/2407.21783, section 3.2). Positions run on through the row: to RoPE that is all one, as it sees
differences only; a learned table (GPT-2's) is read further on than for a document alone. A hook looks at the rows
once a forward, for all attentions. On CUDA in 16 bits attention is torch.nn.attention.varlen, whose work falls with the
documents' length; it wants that on the host, so that each forward first waits for the device. Elsewhere it is SDPA with
a T x T mask, for comparison and for short rows. The MFU that is logged still counts attention over whole rows.
"""

import contextlib
import functools
import inspect

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

import context
import model as models
import tokenizer as tokenizers
from configurator import UserError

GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else None  # torch 2.12


def problems(cfg):
    """What cannot be masked so, a line each."""
    if not cfg.document_mask or cfg.problems():
        return []
    found, D = [], cfg.head_dim
    if cfg.dropout:
        found.append(f"document_mask has no dropout={cfg.dropout} in attention; try --dropout=0")
    if cfg.attention != "auto":
        found.append(f"document_mask has an attention of its own, not {cfg.attention}; leave --attention=auto")
    if cfg.remat == "attention":
        found.append("document_mask cannot have remat=attention, which keeps that of whole rows; try --remat=block")
    if D % 8 or D > 256:
        found.append(f"document_mask needs n_embd / n_head = {D} to be a multiple of 8, at most 256")
    return found


def describe(device, precision):
    """What a token sees and how that is computed, for the start block."""
    if device.type == "cuda" and precision not in ("fp32", "tf32"):
        return "a token sees its own (flash attention for variable lengths)"
    return f"a token sees its own (T x T masks, slow for long rows: {precision} on {device.type})"


def separator(cfg, eot):
    """The id that precedes each document: the manifest's `eot`, else the tokenizer's; None if no mask is wanted."""
    if not cfg.document_mask or eot is not None:
        return eot if cfg.document_mask else None
    if cfg.tokenizer is None:
        raise UserError(
            f"document_mask needs to know the separator, and {cfg.data_dir}/manifest.json is not there; set --tokenizer"
        )
    return tokenizers.load(cfg.tokenizer).eot


def apply(model, eot):
    """Puts the mask in place, documents beginning at token `eot`; None: each row is one."""
    documents = Documents(eot)
    for module in model.modules():
        if isinstance(module, models.Attention):
            module.__class__, module.documents = masked(type(module)), documents

    def look(model, args):
        if documents.on:
            documents.find(context.whole_sequences(model, args[0]))

    model.register_forward_pre_hook(look)


@contextlib.contextmanager
def off(model):
    """Within it, a row is one document: for HellaSwag, whose rows are, and for samples, which run no forward hook."""
    documents = getattr(model.blocks[0].attn, "documents", None)
    if documents is None:
        yield
        return
    documents.on = False
    try:
        yield
    finally:
        documents.on = True


class Documents:
    """Where the documents of a batch lie; kept until the next forward, since a backward may compute attention again.

    ids: (B, T), equal within a document. bounds: int32, document i of the rows laid end to end is the tokens from
    bounds[i] to bounds[i + 1]. longest: an empty tensor whose length is the longest document's, because compiled code
    takes a size for a variable and a number for a constant. `on` is False while rows are taken for single documents.
    """

    def __init__(self, eot):
        self.eot, self.on = -1 if eot is None else eot, True
        self.ids = self.bounds = self.longest = None

    @torch.no_grad()
    def find(self, idx):
        begins = idx == self.eot  # (B, T)
        self.ids = begins.cumsum(1)
        begins[:, 0] = True
        ends = begins.new_ones(1)
        self.bounds = torch.cat([begins.flatten(), ends]).nonzero().flatten().int()  # waits for the device
        self.longest = torch.empty(max(2, int(self.bounds.diff().max())), 0)
        for sizes in (self.bounds, self.longest):
            torch._dynamo.maybe_mark_dynamic(sizes, 0)  # or the second batch would be compiled for anew


@functools.cache
def masked(attention_class):
    """The class of an attention within documents; one class for all, so that blocks share a compiled graph."""

    class Masked(attention_class):
        def attend(self, q, k, v):
            if not self.documents.on:
                return super().attend(q, k, v)
            if takes_varlen(v):
                return varlen_attention(q, k, v, self.documents.bounds, self.documents.longest.size(0))
            return masked_attention(q, k, v, self.documents.ids)

    return Masked


def takes_varlen(v):
    return v.is_cuda and v.dtype in (torch.bfloat16, torch.float16)


def masked_attention(q, k, v, ids):
    """Causal attention within documents. q: (B, H, T, D); k, v: (B, H_kv, T, D); ids: (B, T) -> (B, H, T, D)."""
    mask = (ids[:, :, None] == ids[:, None, :]).tril().unsqueeze(1)  # (B, 1, T, T)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.size(1) != k.size(1))


def varlen_attention(q, k, v, bounds, longest):
    """As masked_attention, for CUDA tensors of 16 bits; see Documents for bounds, and the longest document's length."""
    B, H, T, D = q.shape
    options = {}
    if k.size(1) != H and GROUPED:
        options = GROUPED
    elif k.size(1) != H:
        k, v = (x.repeat_interleave(H // x.size(1), dim=1) for x in (k, v))
    # q_norm and k_norm may give float32 under autocast
    q, k, v = (x.transpose(1, 2).flatten(0, 1).to(v.dtype).contiguous() for x in (q, k, v))  # (B * T, H, D)
    y = varlen_attn(q, k, v, bounds, bounds, longest, longest, window_size=(-1, 0), **options)  # no later token
    return y.view(B, T, H, D).transpose(1, 2)
