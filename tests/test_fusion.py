"""fast/fusion.py: the pass changes where sums are computed, and not what they are."""

from collections import Counter

import pytest
import torch
from compare import DEVICE, costly, error, gradients, slow
from torch._dynamo.utils import counters

pytest.importorskip("triton", reason="Triton is installed with PyTorch's CUDA builds only")
import fast
import kernels
import model as models
from fast import forms, fusion
from run import build
from settings import GPTConfig


class Recorded(fusion.FoldIntoKernels):
    """The pass, which also counts the operators of each graph that it leaves."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph):
        super().__call__(graph)
        graph.lint()
        self.graphs.append(Counter(str(node.target) for node in graph.nodes))


def trained(shape, fp8, compiled, dropout=0.0, edit=None):
    sizes = dict(vocab_size=200, n_layer=2, n_head=4, n_embd=64, block_size=32)
    cfg = GPTConfig(**sizes | shape, dropout=dropout, attention="cudnn")
    model = models.build(cfg, torch.device(DEVICE), 0)
    for layer in [
        module for module in model.modules() if fp8 and isinstance(module, torch.nn.Linear)
    ]:
        fast.fp8.train_in_fp8(layer)
    for block in model.blocks:
        # PyTorch's plain attention with dropout has an addition of its own
        block.attn.dropout = 0.0
        block.attn.gate = edit(16, 1e-5).to(DEVICE) if edit else block.attn.gate
        if cfg.attention_gate:
            torch.nn.init.normal_(block.attn.gate.weight)
        if compiled is True:
            block.compile()
    if compiled == "whole":
        build.compile_model(model)
    torch.manual_seed(1)
    idx, targets = torch.randint(0, 200, (2, 2, 32), device=DEVICE)  # enough for the MLP's kernels
    autocast = torch.autocast(DEVICE, torch.bfloat16)
    loss, grads = gradients(model, idx, targets, autocast=autocast)
    with torch.no_grad(), autocast:
        assert abs(model.eval()(idx, targets)[0] - loss) < 2e-2 * loss
    return loss, grads


class NormOfHeads(kernels.RMSNorm):
    def forward(self, y, x):
        return super().forward(y)


class GatesOfASlice(torch.nn.Identity):
    def forward(self, y, x):
        wide = torch.cat([y, y.detach().flip(-1)], -1)  # (B, T, H, 2 D)
        return wide[..., : y.size(-1)] * torch.sigmoid(x[..., : y.size(2), None])


GPT2 = dict(residual_addition_in_norm=2, residual_gradient_in_norm=2, addition_in_product=2)
SLICED = GPT2 | dict(slice_gradient_in_norm=1)
GATED = dict(
    norm="rmsnorm", positions="rope", mlp="relu2", bias=False, qk_norm=True, attention_gate=True
)
FOLDED = GPT2 | dict(column_sums_from_norm=1)  # the bias gradient of attention's proj
IN_FP8 = SLICED | dict(gates_in_cast=1, norm_in_cast=1)  # not of the norm that the gates read too
CASES = {  # shape, dropout, fp8, what the pass folds in the graphs that all blocks share
    "gpt2": ({}, 0.0, False, FOLDED),
    # dropout is between the layers and what reads their results
    "dropout": ({}, 0.1, False, GPT2 | dict(addition_in_product=1)),
    "gates": (GATED, 0.0, False, SLICED),
    "gates_fp8": (GATED, 0.0, True, IN_FP8),
    "gpt2_fp8": ({}, 0.0, True, FOLDED | dict(norm_in_cast=2)),
    # edits of what is cast that the kernel which casts cannot compute
    "norm_of_heads_fp8": ({}, 0.0, True, FOLDED | dict(norm_in_cast=2), NormOfHeads),
    "slice_fp8": (
        {}, 0.0, True, SLICED | dict(column_sums_from_norm=1, norm_in_cast=1), GatesOfASlice
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", [slow(case) if case == "gpt2" else costly(case) for case in CASES])
def test_a_blocks_sums_are_computed_in_its_kernels(case, products, monkeypatch):
    """In the graphs that all blocks share no addition is left, but for one behind dropout."""
    shape, dropout, fp8, folded, *edit = CASES[case]
    norms = 3 if NormOfHeads in edit else 2
    monkeypatch.setattr(forms, "enabled", {DEVICE})
    torch._dynamo.reset()
    counters.clear()
    # Not monkeypatch: what it undoes on this module is hidden from every later compilation in the
    # process. A graph from the cache would not run the pass.
    fold = Recorded()
    monkeypatch.setattr(fusion, "FoldIntoKernels", lambda: fold)
    with torch._inductor.config.patch(post_grad_custom_pre_pass=None, force_disable_caches=True):
        fusion.register()
        loss, grads = trained(shape, fp8, True, dropout, *edit)
    forward, backward, inference = fold.graphs
    for graph, left in ((forward, dropout > 0), (inference, 0)):
        assert graph["pretrain.norm_forward.default"] == norms and graph["aten.add.Tensor"] == left
    assert backward["pretrain.norm_backward.default"] == norms and not backward["aten.add.Tensor"]
    # attention's gradient comes as its output lies in memory
    assert not backward["aten.copy.default"]
    assert {k: n for k, n in counters["inductor"].items() if "_in_" in k or "_from_" in k} == folded
    if dropout:  # random numbers differ
        return
    expected, refs = trained(shape, fp8, False, dropout, *edit)
    assert abs(loss - expected) < 1e-3 * expected
    if fp8:  # small gradients differ by the rounding of large ones
        grads, refs = (
            {"all": torch.cat([g.flatten() for g in side.values()])} for side in (grads, refs)
        )
    # bf16: the pass adds in float32 what is otherwise rounded once more
    for name, grad in grads.items():
        assert error(grad, refs[name]) < (0.2 if fp8 else 2e-2), name


@pytest.mark.parametrize("fp8", [costly(False), costly(True)])
def test_a_restart_finds_whole_graphs_in_the_cache(fp8, products, monkeypatch, tmp_path):
    """Those with autograd functions and a choice of attention too, which compute the same bits."""
    monkeypatch.setattr(forms, "enabled", {DEVICE})
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    runs, found = [], []
    with torch._inductor.config.patch(post_grad_custom_pre_pass=None):
        fusion.register()
        for _ in range(2):
            torch._dynamo.reset()
            counters.clear()
            runs.append(trained(GATED, fp8, "whole"))
            found.append(
                {key: n for key, n in counters["aot_autograd"].items() if "autograd_cache" in key}
            )
    saved = found[0]["autograd_cache_saved"]  # embedding, block and head, trained and evaluated
    assert saved >= 6 and found[1] == {"autograd_cache_hit": saved}
    (loss, grads), (again, others) = runs
    assert loss == again and all(torch.equal(grad, others[name]) for name, grad in grads.items())
