"""A torch.compile pass that moves work into the kernels beside it, where it costs no pass over memory.

Into a norm: the residual addition before it; in the backward the addition of the gradients that reach its
input by the residual path and its result by a slice, and the column sums of the result, the bias gradient of
the layer before. Into a GEMM: another addition to its result. Into fp8's cast: the gates of heads.
"""

import operator

import torch
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

aten, pretrain = torch.ops.aten, torch.ops.pretrain
VIEWS = aten.view.default, aten.reshape.default, aten._unsafe_view.default
VIEWS += (torch.ops.prims.convert_element_type.default,)
COLUMN_SUMS = 2  # row of norm_backward's second result


class FoldIntoKernels(CustomGraphPass):
    def __call__(self, graph):
        calls = lambda target: graph.find_nodes(op="call_function", target=target)
        for norm in calls(pretrain.norm_forward.default):
            fold_residual_addition(norm)
        order = {node: i for i, node in enumerate(graph.nodes)}
        for norm in calls(pretrain.norm_backward.default):
            fold_residual_gradient(norm, order)
            fold_slice_gradient(norm)
        for total in calls(aten.sum.dim_IntList):
            take_column_sums(graph, total)
        for add in calls(aten.add.Tensor):
            fold_into_product(add)
        for cast in calls(torch.ops.higher_order.auto_functionalized_v2):
            fold_gates(cast)

    def uuid(self):
        return get_hash_for_files((__file__,))


def register():
    """Has torch.compile run the pass over every graph, unless another pass has that place."""
    config = torch._inductor.config
    if config.post_grad_custom_pre_pass is None:
        config.post_grad_custom_pre_pass = FoldIntoKernels()


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


def fold_slice_gradient(norm):
    """norm_backward(…, dh + (first, then zeros), …) -> norm_backward(…, dh, …, first)"""
    add = norm.args[1]
    for dh, padded in operands(add):
        zeros, first, *where = padded.args if padded.target is aten.slice_scatter.default else (padded, None)
        last = dh.meta["val"].dim() - 1
        if where[:2] == [last, 0] and len(where) == 3 and is_zeros(zeros) and alike(dh, add) and alone(add):
            norm.args = (norm.args[0], dh, *norm.args[2:])
            give(norm, first=first)
            norm.graph.erase_node(add)
            counters["inductor"]["slice_gradient_in_norm"] += 1
            return


def fold_into_product(add):
    """x + product(…) -> product(…, added=x)"""
    for x, update in operands(add):
        *views, product = behind_views(update)
        if product.target not in (pretrain.product.default, pretrain.product8.default) or product.kwargs:
            continue
        shape, contiguous = product.meta["val"].shape, x.meta["val"].is_contiguous()
        same = alike(x, add) and alike(update, add) and product.meta["val"].dtype == x.meta["val"].dtype
        if same and contiguous and alone(product, *views) and x < product:
            with add.graph.inserting_before(product):
                give(product, added=reshaped(x, shape))
            add.replace_all_uses_with(update)
            add.graph.erase_node(add)
            counters["inductor"]["addition_in_product"] += 1
            return


def fold_gates(cast):
    """cast8 of y: (…, H, D) times gates: (…, H, 1) -> cast8 of y with what="gate", which reads the gates"""
    options = cast.kwargs
    if cast.args[0] is not pretrain.cast8.default or options["what"] != "copy" or len(options["parts"]) > 1:
        return
    x, gated = options["parts"][0], behind_views(options["parts"][0])[-1]
    for y, gates in operands(gated) if gated.target is aten.mul.Tensor else ():
        (M, N), (*shape, D) = x.meta["val"].shape, gated.meta["val"].shape
        if alike(y, gated) and list(gates.meta["val"].shape) == [*shape, 1] and shape[-1] * D == N:
            with cast.graph.inserting_before(cast):
                y, gates = reshaped(y, (M, N)), reshaped(gates, (M, shape[-1]))
            give(cast, parts=[y], before=gates, what="gate")
            counters["inductor"]["gates_in_cast"] += 1
            return


def take_column_sums(graph, total):
    """The float32 sum of norm_backward(…)[0] over all tokens -> row 2 of norm_backward(…)[1]"""
    source = behind_views(total.args[0])[-1]
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


def operands(node):
    """(a, b) and (b, a) of an addition's or a multiplication's arguments; nothing if one is a number."""
    two = node.target in (aten.add.Tensor, aten.mul.Tensor) and not node.kwargs
    tensors = two and all(isinstance(arg, torch.fx.Node) for arg in node.args)
    return (node.args, node.args[::-1]) if tensors else ()


def behind_views(node):
    """The node, what it is a view of, and so on."""
    nodes = [node]
    while nodes[-1].target in VIEWS:
        nodes.append(nodes[-1].args[0])
    return nodes


def alone(*nodes):
    return all(len(node.users) == 1 for node in nodes)


def is_zeros(node):
    return node.target is aten.full.default and node.args[1] == 0


def give(node, **arguments):
    """Sets arguments of a call, also in what inductor constrains their layouts by."""
    node.kwargs = node.kwargs | arguments
    args, kwargs = node.meta["eager_input_vals"]
    values = torch.fx.map_arg(arguments, lambda argument: argument.meta["val"])
    node.meta["eager_input_vals"] = args, kwargs | values


def reshaped(x, shape):
    view = x.graph.call_function(aten.reshape.default, (x, list(shape)))
    view.meta["val"] = x.meta["val"].reshape(shape)
    return view


def result_of(node, index):
    found = (user for user in node.users if user.target is operator.getitem and user.args[1] == index)
    return next(found, None)


def alike(a, b):
    a, b = a.meta["val"], b.meta["val"]
    return isinstance(a, torch.Tensor) and a.shape == b.shape and a.dtype == b.dtype
