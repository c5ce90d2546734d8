"""fast/fusion.py: the pass changes where sums are computed, and not what they are."""

from collections import Counter

import pytest
import torch
from compare import DEVICE, error, gradients
from torch._dynamo.utils import counters

pytest.importorskip("triton", reason="Triton is installed with PyTorch's CUDA builds only")
import kernels
import model as models
from fast import fusion
from settings import GPTConfig


class Recorded(fusion.FoldIntoNorms):
    """The pass, which also counts the operators of each graph that it leaves."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph):
        super().__call__(graph)
        graph.lint()
        self.graphs.append(Counter(str(node.target) for node in graph.nodes))


def trained(compiled, dropout=0.0):
    sizes = dict(vocab_size=200, n_layer=2, n_head=4, n_embd=64, block_size=32)
    cfg = GPTConfig(**sizes, dropout=dropout, attention="cudnn")
    model = models.build(cfg, torch.device(DEVICE), 0)
    for block in model.blocks:
        block.attn.dropout = 0.0  # PyTorch's plain attention with dropout has an addition of its own
        if compiled:
            block.compile()
    torch.manual_seed(1)
    idx, targets = torch.randint(0, 200, (2, 2, 32), device=DEVICE)  # enough for the MLP's kernels
    autocast = torch.autocast(DEVICE, torch.bfloat16)
    loss, grads = gradients(model, idx, targets, autocast=autocast)
    with torch.no_grad(), autocast:
        assert abs(model.eval()(idx, targets) - loss) < 2e-2 * loss
    return loss, grads


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_blocks_sums_are_computed_in_its_norms(dropout, products, monkeypatch):
    """In the graphs that all blocks share: one addition is left, before the norm of the next block."""
    monkeypatch.setattr(kernels, "served", {DEVICE})
    torch._dynamo.reset()
    counters.clear()
    # Not monkeypatch: what it undoes on this module is hidden from every later compilation in the process.
    # A graph from the cache would not run the pass.
    fold = Recorded()
    monkeypatch.setattr(fusion, "FoldIntoNorms", lambda: fold)
    with torch._inductor.config.patch(post_grad_custom_pre_pass=None, force_disable_caches=True):
        fusion.register()
        loss, grads = trained(True, dropout)
    forward, backward, inference = fold.graphs
    for graph in (forward, inference):
        assert graph["pretrain.norm_forward.default"] == 2 and graph["aten.add.Tensor"] == 1
    assert backward["pretrain.norm_backward.default"] == 2 and not backward["aten.add.Tensor"]
    assert not backward["aten.copy.default"]  # attention's gradient comes as its output lies in memory
    found = {name: n for name, n in counters["inductor"].items() if "norm" in name}
    sums = dict(residual_addition_in_norm=2, residual_gradient_in_norm=2)
    # the bias gradient of attention's proj; dropout is between it and the norm
    assert found == (sums if dropout else sums | dict(column_sums_from_norm=1))
    if dropout:  # random numbers differ
        return
    expected, refs = trained(False)
    assert abs(loss - expected) < 1e-3 * expected
    for name, grad in grads.items():  # bf16: the pass adds in float32 what is otherwise rounded once more
        assert error(grad, refs[name]) < 2e-2, name
