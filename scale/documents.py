"""Document masks: a token attends to earlier tokens of its own document only, though a row holds many.

A document begins at its separator, as fineweb.py writes it, or at the start of the row, as for Llama 3
(https://arxiv.org/abs/2407.21783, section 3.2). Positions count through the whole row. On CUDA in 16 bits
attention is torch.nn.attention.varlen, which waits for the longest length; elsewhere SDPA with a T x T mask.
"""

import inspect

import torch
from torch.nn.attention.varlen import varlen_attn

from configurator import UserError
from corpus import tokenizer as tokenizers
from scale import context

GROUPED = "enable_gqa" in inspect.signature(varlen_attn).parameters  # from torch 2.12 on


def separator(cfg, eot):
    """The id before each document: the manifest's `eot`, else the tokenizer's."""
    if eot is not None or not cfg.document_mask:
        return eot
    if cfg.tokenizer is None:
        why = f"needs to know the separator, and {cfg.data_dir}/manifest.json is not there"
        raise UserError(f"document_mask {why}; set --tokenizer")
    return tokenizers.load(cfg.tokenizer).eot


def apply(model, eot):
    """Wraps the core of every attention. eot: the token that begins a document; None: each row is one."""
    documents = model.documents = Documents(eot)
    for module in context.attentions(model, "document_mask"):
        module.core = DocumentMask(module.core, documents)
    look = lambda _, args: documents.find(context.whole_sequences(model, args[0])) if documents.on else None
    model.register_forward_pre_hook(look)


class Documents:
    """A batch's documents, kept until the next forward; on: False while each row counts as one document.

    ids: (B, T), equal within a document. bounds: int32, where documents begin in all rows together. longest:
    a tensor with as many rows, since a number would be a constant to torch.compile.
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
            torch._dynamo.maybe_mark_dynamic(sizes, 0)  # otherwise the second batch recompiles


class DocumentMask:
    """attn.core with attention within documents; while each row is one document, the wrapped core."""

    def __init__(self, core, documents):
        self.core, self.documents = core, documents

    def __call__(self, q, k, v, backend, dropout=0.0):
        if not self.documents.on:
            return self.core(q, k, v, backend, dropout)
        if takes_varlen(v) and not dropout:  # an edit's, which varlen does not have
            return varlen_attention(q, k, v, self.documents.bounds, self.documents.longest.size(0))
        return masked_attention(q, k, v, self.documents.ids, dropout)


def takes_varlen(v):
    return v.is_cuda and v.dtype in (torch.bfloat16, torch.float16)


def masked_attention(q, k, v, ids, p=0.0):
    """Causal attention within documents. q: (B, H, T, D); k, v: (B, H_kv, T, D); ids: (B, T); p: dropout."""
    mask = (ids[:, :, None] == ids[:, None, :]).tril().unsqueeze(1)  # (B, 1, T, T)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, p, enable_gqa=q.shape != k.shape)


def varlen_attention(q, k, v, bounds, longest):
    """masked_attention for CUDA tensors in 16 bits; longest: length of the longest document."""
    B, H, T, D = q.shape
    options = {"enable_gqa": True} if k.size(1) != H and GROUPED else {}
    if k.size(1) != H and not GROUPED:
        k, v = (x.repeat_interleave(H // x.size(1), dim=1) for x in (k, v))
    # q_norm and k_norm may give float32 under autocast
    q, k, v = (x.transpose(1, 2).flatten(0, 1).to(v.dtype).contiguous() for x in (q, k, v))  # (B * T, H, D)
    y = varlen_attn(q, k, v, bounds, bounds, longest, longest, window_size=(-1, 0), **options)  # causal
    return y.view(B, T, H, D).transpose(1, 2)
