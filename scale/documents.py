"""Document masks: a row holds many documents; a token attends to earlier tokens of its own.

A document begins at its separator, as fineweb.py writes it, or at the start of the row, as for
Llama 3 (https://arxiv.org/abs/2407.21783, section 3.2). Positions count through the whole row. On
CUDA in 16 bits kernels.attention is torch.nn.attention.varlen, which waits for the longest length.
Elsewhere, and for another core or text of it, the core is called for each document alone.
"""

import inspect
import itertools

import torch
from torch.nn.attention.varlen import varlen_attn

import kernels
from fast import forms
from scale import context_parallel
from system.errors import UserError

GROUPED = "enable_gqa" in inspect.signature(varlen_attn).parameters  # from torch 2.12 on


def apply(model, eot):
    """Wraps the core of every attention.

    eot: the token that begins a document; None: each row is one.
    """
    documents = model.documents = Documents(eot)
    for module in context_parallel.attentions(model, "document_mask", any_core=True):
        module.core = DocumentMask(module.core, documents)

    def find(_, inputs):
        if documents.on:
            documents.find_bounds(context_parallel.whole_sequences(model, inputs[0]))

    model.register_forward_pre_hook(find)


class Documents:
    """A batch's documents, kept until the next forward.

    on: False while each row counts as one document. spans: [(first, last), ...] in all rows
    together. bounds: int32, all that begin or end there. longest: a tensor with as many rows as the
    longest document, since a number would be a constant to torch.compile.
    """

    def __init__(self, eot):
        self.eot = -1 if eot is None else eot
        self.on = True
        self.spans = self.bounds = self.longest = None
        self.row = 0  # tokens of a row

    @torch.no_grad()
    def find_bounds(self, idx):
        """idx: whole rows, (B, T)."""
        self.row = idx.size(1)
        begins = idx == self.eot  # (B, T)
        begins[:, 0] = True
        ends = begins.new_ones(1)
        # `nonzero` waits for the device
        self.bounds = torch.cat([begins.flatten(), ends]).nonzero().flatten().int()
        self.spans = list(itertools.pairwise(self.bounds.tolist()))
        longest = max(last - first for first, last in self.spans)
        self.longest = torch.empty(max(2, longest), 0)
        for sizes in (self.bounds, self.longest):
            torch._dynamo.maybe_mark_dynamic(sizes, 0)  # otherwise the second batch recompiles


class DocumentMask:
    """attn.core with attention within documents, or as it was while each row is one document."""

    def __init__(self, core, documents):
        self.core, self.documents = core, documents

    def __call__(self, q, k, v, backend, dropout=0.0, *more, **named):
        if not self.documents.on:
            return self.core(q, k, v, backend, dropout, *more, **named)
        if q.size(2) != self.documents.row:
            what = "model.py merges tokens, also those of two documents"
            raise UserError(f"document_mask=True: {what}; leave it out")
        usual = self.core is kernels.attention and "attention" not in forms.edits
        if usual and takes_varlen(v) and not dropout:  # an edit's, which varlen does not have
            return varlen_attention(q, k, v, self.documents.bounds, self.documents.longest.size(0))
        return by_documents(self.core, self.documents, q, k, v, backend, dropout, *more, **named)


def takes_varlen(v):
    return v.is_cuda and v.dtype in (torch.bfloat16, torch.float16)


@torch.compiler.disable
def by_documents(core, documents, q, k, v, *options, **named):
    """core, any function of q: (B, H, T, D); k, v: (B, H_kv, T, D), on each document in turn."""
    B, _, T, _ = q.shape
    parts = []
    for first, last in documents.spans:
        row, begin = divmod(first, T)
        end = begin + last - first
        own = [x[row : row + 1, :, begin:end] for x in (q, k, v)]
        parts.append(core(*own, *options, **named))
    y = torch.cat(parts, 2).unflatten(2, (B, T))  # (1, H, B, T, D)
    return y[0].transpose(0, 1)


def varlen_attention(q, k, v, bounds, longest):
    """kernels.attention by documents, for 16-bit CUDA tensors.

    bounds: as of Documents; longest: the length of the longest document.
    """
    B, H, T, D = q.shape
    options = {}
    if k.size(1) != H:
        if GROUPED:
            options["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(H // x.size(1), dim=1) for x in (k, v))
    # (B * T, H, D) each, in v's dtype: q_norm and k_norm may give float32 under autocast
    q, k, v = (x.transpose(1, 2).flatten(0, 1).to(v.dtype).contiguous() for x in (q, k, v))
    # (-1, 0): all earlier tokens and no later one
    y = varlen_attn(q, k, v, bounds, bounds, longest, longest, window_size=(-1, 0), **options)
    return y.view(B, T, H, D).transpose(1, 2)
