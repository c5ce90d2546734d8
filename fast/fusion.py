"""A torch.compile pass that moves work into the kernels beside it, where it costs no pass over
memory.

Into a norm: the residual addition before it. Into a norm's backward: the additions of two
gradients, that of the residual path and that of the gates, which read the norm's first channels;
and the column sums of dx, the bias gradient of the layer before. Into a GEMM: an addition to its
result. Into fp8's cast: a norm that nothing else reads, and the product of each head with its gate.
"""

import operator

import torch
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from fast import fp8

aten, prims, pretrain = torch.ops.aten, torch.ops.prims, torch.ops.pretrain
VIEWS = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    prims.convert_element_type.default,
)
COLUMN_SUMS = 2  # row of norm_backward's second result


class FoldIntoKernels(CustomGraphPass):
    def __call__(self, graph):
        calls = lambda target: graph.find_nodes(op="call_function", target=target)
        for norm in calls(pretrain.norm_forward.default):
            fold_residual_addition(norm)
        for norm in calls(pretrain.norm_backward.default):
            fold_residual_gradient(norm)
            fold_slice_gradient(norm)
        for total in calls(aten.sum.dim_IntList):
            take_column_sums(total)
        for add in calls(aten.add.Tensor):
            fold_into_product(add)
        for cast in calls(torch.ops.higher_order.auto_functionalized_v2):
            fold_into_cast(cast)

    def uuid(self):
        return get_hash_for_files((__file__, fp8.__file__))


def register():
    """Has torch.compile run the pass over every graph, unless another pass has that place."""
    config = torch._inductor.config
    if config.post_grad_custom_pre_pass is None:
        config.post_grad_custom_pre_pass = FoldIntoKernels()


def fold_residual_addition(norm):
    """s = x + update, norm_forward(s, None, …) -> norm_forward(x, update, …),
    whose result 0 is s
    """
    total, earlier, *rest = norm.args
    # The kernel's sum is contiguous; nothing may read it before the kernel has run.
    ready = total.meta["val"].is_contiguous() and not any(user < norm for user in total.users)
    for x, update in operands(total, aten.add.Tensor) if earlier is None and ready else ():
        if alike(x, total) and x.meta["val"].shape == update.meta["val"].shape:
            norm.args, norm.meta["val"] = (
                (x, update, *rest),
                (total.meta["val"], *norm.meta["val"][1:]),
            )
            return replace(total, result_of(norm, 0), "residual_addition_in_norm")


def fold_residual_gradient(norm):
    """norm_backward(None, …)[0] + g -> norm_backward(g, …)[0]"""
    dx = result_of(norm, 0)
    if norm.args[0] is None and alone(dx):
        (add,) = dx.users
        for gradient, other in operands(add, aten.add.Tensor):
            if other is dx and gradient < norm and alike(gradient, dx):
                norm.args = (gradient, *norm.args[1:])
                return replace(add, dx, "residual_gradient_in_norm")


def fold_slice_gradient(norm):
    """norm_backward(…, dh + (first, then zeros), …) -> norm_backward(…, dh, …, first)"""
    add = norm.args[1]
    for dh, padded in operands(add, aten.add.Tensor):
        zeros, first, *where = (
            padded.args if padded.target is aten.slice_scatter.default else (padded, None)
        )
        last = dh.meta["val"].dim() - 1
        from_zeros = zeros.target is aten.full.default and zeros.args[1] == 0
        if (
            where[:2] == [last, 0]
            and len(where) == 3
            and from_zeros
            and alike(dh, add)
            and alone(add)
        ):
            give(norm, first=first)
            return replace(add, dh, "slice_gradient_in_norm")


def fold_into_product(add):
    """x + product(…) -> product(…, added=x)"""
    for x, update in operands(add, aten.add.Tensor):
        *views, product = behind_views(update)
        if (
            product.target not in (pretrain.product.default, pretrain.product8.default)
            or product.kwargs
        ):
            continue
        shape, contiguous = product.meta["val"].shape, x.meta["val"].is_contiguous()
        same = (
            alike(x, add)
            and alike(update, add)
            and product.meta["val"].dtype == x.meta["val"].dtype
        )
        if same and contiguous and alone(product, *views) and x < product:
            give(product, added=reshaped(x, shape, product))
            return replace(add, update, "addition_in_product")


def fold_into_cast(cast):
    """cast8 of a norm, or of y: (…, H, D) times gates:
    (…, H, 1) -> cast8 of x or y, which computes that
    """
    options = cast.kwargs
    if (
        cast.args[0] is not pretrain.cast8.default
        or options["what"] != fp8.COPY
        or len(options["parts"]) > 1
    ):
        return
    *views, source = behind_views(options["parts"][0])
    M, N = options["parts"][0].meta["val"].shape
    norm, index = source.args if source.target is operator.getitem else (source, 0)
    if norm.target is pretrain.norm_forward.default and index == 1 and alone(source, *views):
        x, update, weight, shift = norm.args[:4]
        x = x if update is None else result_of(norm, 0)
        if x.meta["val"].is_contiguous() and x.meta["val"].size(-1) == N:  # not a norm of each head
            beside = [result_of(norm, 2), weight] + [shift] * (shift is not None)
            what = fp8.NORM if shift is None else fp8.SHIFTED_NORM
            give(cast, parts=[reshaped(x, (M, N), cast)], beside=beside, what=what)
            for unread in (*views, source):  # the norm's own result is empty now
                cast.graph.erase_node(unread)
            give(norm, keep=False)
            counters["inductor"]["norm_in_cast"] += 1
    for y, gates in operands(source, aten.mul.Tensor):
        (*shape, D), plain = (
            source.meta["val"].shape,
            all(t.meta["val"].is_contiguous() for t in (y, gates)),
        )
        if (
            plain
            and alike(y, source)
            and list(gates.meta["val"].shape) == [*shape, 1]
            and shape[-1] * D == N
        ):
            beside = [reshaped(gates, (M, shape[-1]), cast)]
            give(cast, parts=[reshaped(y, (M, N), cast)], beside=beside, what=fp8.GATE)
            counters["inductor"]["gates_in_cast"] += 1


def take_column_sums(total):
    """The float32 sum of norm_backward(…)[0] over all tokens -> row 2 of norm_backward(…)[1]"""
    source, wanted = behind_views(total.args[0])[-1], total.meta["val"]
    norm, index = source.args if source.target is operator.getitem else (source, None)
    if (
        index != 0
        or norm.target is not pretrain.norm_backward.default
        or list(total.args[1]) != [0]
    ):
        return
    if wanted.dtype == torch.float32 and wanted.shape == source.meta["val"].shape[-1:]:
        with total.graph.inserting_before(total):
            column = total.graph.call_function(
                aten.select.int, (result_of(norm, 1), 0, COLUMN_SUMS)
            )
            column.meta["val"] = wanted
        replace(total, column, "column_sums_from_norm")


def operands(node, target):
    """(a, b) and (b, a) where the node is target's call, addition's or multiplication's,
    of two tensors.
    """
    tensors = node.target is target and all(isinstance(arg, torch.fx.Node) for arg in node.args)
    return (node.args, node.args[::-1]) if tensors and not node.kwargs else ()


def behind_views(node):
    """The node, what it is a view of, and so on."""
    nodes = [node]
    while nodes[-1].target in VIEWS:
        nodes.append(nodes[-1].args[0])
    return nodes


def alone(*nodes):
    return all(len(node.users) == 1 for node in nodes)


def replace(node, other, what):
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)
    counters["inductor"][what] += 1


def give(node, **arguments):
    """Sets arguments of a call, also in the record from which inductor takes their layouts."""
    node.kwargs = node.kwargs | arguments
    args, kwargs = node.meta["eager_input_vals"]
    values = torch.fx.map_arg(arguments, lambda argument: argument.meta["val"])
    node.meta["eager_input_vals"] = args, kwargs | values


def reshaped(x, shape, reader):
    with reader.graph.inserting_before(reader):
        view = x.graph.call_function(aten.reshape.default, (x, list(shape)))
    view.meta["val"] = x.meta["val"].reshape(shape)
    return view


def result_of(node, index):
    """The node of one of a call's results, which is made where there is none."""
    for user in node.users:
        if user.target is operator.getitem and user.args[1] == index:
            return user
    with node.graph.inserting_after(node):
        result = node.graph.call_function(operator.getitem, (node, index))
    result.meta["val"] = node.meta["val"][index]
    return result


def alike(a, b):
    a, b = a.meta["val"], b.meta["val"]
    return isinstance(a, torch.Tensor) and a.shape == b.shape and a.dtype == b.dtype
