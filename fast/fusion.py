"""A torch.compile pass that moves work into the kernels of fast/norm.py, where it costs no pass over memory.

That is the residual addition before a norm; in the backward the addition of the gradient that reaches the
norm's input by the residual path, and the column sums of the result, the bias gradient of the layer before.
"""

import operator

import torch
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

aten, pretrain = torch.ops.aten, torch.ops.pretrain
VIEWS = aten.view.default, aten.reshape.default, aten._unsafe_view.default
VIEWS += (torch.ops.prims.convert_element_type.default,)
COLUMN_SUMS = 2  # row of norm_backward's second result


class FoldIntoNorms(CustomGraphPass):
    def __call__(self, graph):
        for norm in graph.find_nodes(op="call_function", target=pretrain.norm_forward.default):
            fold_residual_addition(norm)
        order = {node: i for i, node in enumerate(graph.nodes)}
        for norm in graph.find_nodes(op="call_function", target=pretrain.norm_backward.default):
            fold_residual_gradient(norm, order)
        for total in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
            take_column_sums(graph, total)

    def uuid(self):
        return get_hash_for_files((__file__,))


def register():
    """Has torch.compile run the pass over every graph, unless another pass has that place."""
    config = torch._inductor.config
    if config.post_grad_custom_pre_pass is None:
        config.post_grad_custom_pre_pass = FoldIntoNorms()


def fold_residual_addition(norm):
    """s = x + update, norm_forward(s, None, …) -> norm_forward(x, update, …), whose result 0 is s"""
    total, update, *rest = norm.args
    if total.target is not aten.add.Tensor or total.kwargs or update is not None:
        return
    nodes = [arg for arg in total.args if isinstance(arg, torch.fx.Node)]
    x, update = sorted(nodes, key=lambda node: not alike(node, total)) if len(nodes) == 2 else (None, None)
    fits = x and alike(x, total) and x.meta["val"].shape == update.meta["val"].shape
    # The kernel's sum is contiguous; nothing may read it before the kernel has run.
    if not fits or not total.meta["val"].is_contiguous() or any(user < norm for user in total.users):
        return
    norm.args = (x, update, *rest)
    with norm.graph.inserting_after(norm):
        summed = norm.graph.call_function(operator.getitem, (norm, 0))
    summed.meta = total.meta.copy()
    norm.meta["val"] = (summed.meta["val"], *norm.meta["val"][1:])
    total.replace_all_uses_with(summed)
    norm.graph.erase_node(total)
    counters["inductor"]["residual_addition_in_norm"] += 1


def fold_residual_gradient(norm, order):
    """norm_backward(None, …)[0] + g -> norm_backward(g, …)[0]"""
    dx = result_of(norm, 0)
    if norm.args[0] is not None or dx is None or len(dx.users) != 1:
        return
    (add,) = dx.users
    if add.target is not aten.add.Tensor or add.kwargs:
        return
    (gradient,) = [arg for arg in add.args if arg is not dx] or [None]
    if not isinstance(gradient, torch.fx.Node) or order[gradient] > order[norm] or not alike(gradient, dx):
        return
    norm.args = (gradient, *norm.args[1:])
    add.replace_all_uses_with(dx)
    add.graph.erase_node(add)
    counters["inductor"]["residual_gradient_in_norm"] += 1


def take_column_sums(graph, total):
    """The float32 sum of norm_backward(…)[0] over all tokens -> row 2 of norm_backward(…)[1]"""
    source = total.args[0]
    while source.target in VIEWS:
        source = source.args[0]
    norm, index = source.args if source.target is operator.getitem else (source, None)
    if index != 0 or norm.target is not pretrain.norm_backward.default or list(total.args[1]) != [0]:
        return
    wanted = total.meta["val"]
    if wanted.dtype != torch.float32 or wanted.shape != source.meta["val"].shape[-1:]:
        return
    with graph.inserting_before(total):
        sums = result_of(norm, 1) or graph.call_function(operator.getitem, (norm, 1))
        sums.meta.setdefault("val", norm.meta["val"][1])
        column = graph.call_function(aten.select.int, (sums, 0, COLUMN_SUMS))
        column.meta["val"] = wanted
    total.replace_all_uses_with(column)
    graph.erase_node(total)
    counters["inductor"]["column_sums_from_norm"] += 1


def result_of(node, index):
    found = (user for user in node.users if user.target is operator.getitem and user.args[1] == index)
    return next(found, None)


def alike(a, b):
    a, b = a.meta["val"], b.meta["val"]
    return isinstance(a, torch.Tensor) and a.shape == b.shape and a.dtype == b.dtype
