"""A torch.compile pass that moves work into a kernel beside it, which saves a pass over memory.

Into a norm: the residual addition before it. Into a norm's backward: the additions of two
gradients, that of the residual path and that of the gates, which read the norm's first channels;
and the column sums of dx, which are the gradient of the bias of the layer before. Into a GEMM: an
addition to its result. Into fp8's cast: a norm that nothing else reads, and the product of each
head with its gate.
"""

import functools
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
        calls = functools.partial(graph.find_nodes, op="call_function")
        for norm in calls(target=pretrain.norm_forward.default):
            fold_residual_addition(norm)
        for norm in calls(target=pretrain.norm_backward.default):
            fold_residual_gradient(norm)
            fold_slice_gradient(norm)
        for total in calls(target=aten.sum.dim_IntList):
            take_column_sums(total)
        for add in calls(target=aten.add.Tensor):
            fold_into_product(add)
        for cast in calls(target=torch.ops.higher_order.auto_functionalized_v2):
            part = cast_as_it_is(cast)
            if part is not None:
                fold_gates_into_cast(cast, part)
                fold_norm_into_cast(cast, part)

    def uuid(self):
        return get_hash_for_files((__file__, fp8.__file__))


def register():
    """Has torch.compile run the pass over every graph, unless another pass has that place."""
    config = torch._inductor.config
    if config.post_grad_custom_pre_pass is None:
        config.post_grad_custom_pre_pass = FoldIntoKernels()


def fold_residual_addition(norm):
    """s = x + update; norm_forward(s, None, …) -> norm_forward(x, update, …), which returns s"""
    total, earlier, *rest = norm.args
    if earlier is not None:
        return
    # The kernel's sum is contiguous; nothing may read it before the kernel has run.
    if not total.meta["val"].is_contiguous() or any(user < norm for user in total.users):
        return
    for x, update in in_both_orders(total, aten.add.Tensor):
        if alike(x, total) and x.meta["val"].shape == update.meta["val"].shape:
            norm.args = (x, update, *rest)
            norm.meta["val"] = (total.meta["val"], *norm.meta["val"][1:])
            return replace(total, result_of(norm, 0), "residual_addition_in_norm")


def fold_residual_gradient(norm):
    """norm_backward(None, …)[0] + g -> norm_backward(g, …)[0]"""
    dx = result_of(norm, 0)
    if norm.args[0] is not None or not read_once(dx):
        return
    (add,) = dx.users
    for gradient, other in in_both_orders(add, aten.add.Tensor):
        if other is dx and gradient < norm and alike(gradient, dx):
            norm.args = (gradient, *norm.args[1:])
            return replace(add, dx, "residual_gradient_in_norm")


def fold_slice_gradient(norm):
    """norm_backward(…, dh + (first, then zeros), …) -> norm_backward(…, dh, …, first)"""
    add = norm.args[1]
    for dh, padded in in_both_orders(add, aten.add.Tensor):
        if padded.target is not aten.slice_scatter.default:
            continue
        if len(padded.args) != 5:  # with a step, or without an end
            continue
        zeros, first, dim, begin, _ = padded.args
        in_zeros = zeros.target is aten.full.default and zeros.args[1] == 0
        in_first_columns = dim == dh.meta["val"].dim() - 1 and begin == 0
        if in_zeros and in_first_columns and alike(dh, add) and read_once(add):
            set_arguments(norm, first=first)
            return replace(add, dh, "slice_gradient_in_norm")


def fold_into_product(add):
    """x + product(…) -> product(…, added=x)"""
    for x, update in in_both_orders(add, aten.add.Tensor):
        *views, product = behind_views(update)
        if product.target not in (pretrain.product.default, pretrain.product8.default):
            continue
        if product.kwargs:  # `added`, by this pass: nothing else gives keyword arguments
            continue
        if not alike(x, add) or not alike(update, add) or not x.meta["val"].is_contiguous():
            continue
        same_dtype = product.meta["val"].dtype == x.meta["val"].dtype
        if same_dtype and x < product and read_once(product, *views):
            set_arguments(product, added=reshaped(x, product.meta["val"].shape, product))
            return replace(add, update, "addition_in_product")


def cast_as_it_is(call):
    """The node of the tensor, (M, N), of which the call is the cast8; None for other calls."""
    if call.args[0] is not pretrain.cast8.default:
        return None
    parts = call.kwargs["parts"]
    if call.kwargs["what"] == "copy" and len(parts) == 1:
        return parts[0]


def fold_norm_into_cast(cast, part):
    """cast8 of norm_forward(x, …)[1] -> cast8 of x, which computes the norm from its stats"""
    *views, normed = behind_views(part)
    norm = call_with_result(normed, 1, pretrain.norm_forward.default)
    if norm is None or not read_once(normed, *views):
        return
    x, update, weight, shift = norm.args[:4]
    if update is not None:
        x = result_of(norm, 0)
    M, N = part.meta["val"].shape
    if not x.meta["val"].is_contiguous() or x.meta["val"].size(-1) != N:  # a norm of each head
        return
    beside = [result_of(norm, 2), weight]
    what = "norm"
    if shift is not None:
        beside.append(shift)
        what = "shifted_norm"
    set_arguments(cast, parts=[reshaped(x, (M, N), cast)], beside=beside, what=what)
    for unread in (*views, normed):  # the norm's own result is empty now
        cast.graph.erase_node(unread)
    set_arguments(norm, keep=False)
    counters["inductor"]["norm_in_cast"] += 1


def fold_gates_into_cast(cast, part):
    """cast8 of y: (…, H, D) times gates: (…, H, 1) -> cast8 of y, which multiplies"""
    M, N = part.meta["val"].shape
    product = behind_views(part)[-1]
    for y, gates in in_both_orders(product, aten.mul.Tensor):
        *heads, D = product.meta["val"].shape
        of_heads = list(gates.meta["val"].shape) == [*heads, 1] and heads[-1] * D == N
        contiguous = y.meta["val"].is_contiguous() and gates.meta["val"].is_contiguous()
        if of_heads and contiguous and alike(y, product):
            beside = [reshaped(gates, (M, heads[-1]), cast)]
            set_arguments(cast, parts=[reshaped(y, (M, N), cast)], beside=beside, what="gate")
            counters["inductor"]["gates_in_cast"] += 1
            return


def take_column_sums(total):
    """The float32 sum of norm_backward(…)[0] over all tokens -> row 2 of norm_backward(…)[1]"""
    dx = behind_views(total.args[0])[-1]
    norm = call_with_result(dx, 0, pretrain.norm_backward.default)
    if norm is None or list(total.args[1]) != [0]:
        return
    wanted = total.meta["val"]
    if wanted.dtype != torch.float32 or wanted.shape != dx.meta["val"].shape[-1:]:
        return
    sums = result_of(norm, 1)
    with total.graph.inserting_before(total):
        column = total.graph.call_function(aten.select.int, (sums, 0, COLUMN_SUMS))
    column.meta["val"] = wanted
    replace(total, column, "column_sums_from_norm")


def in_both_orders(node, target):
    """[(a, b), (b, a)] of target(a, b), a sum or product of two tensors; [] of another node."""
    if node.target is not target or node.kwargs:
        return []
    if not all(isinstance(arg, torch.fx.Node) for arg in node.args):
        return []
    return [node.args, node.args[::-1]]


def behind_views(node):
    """The node, what it is a view of, and so on."""
    nodes = [node]
    while nodes[-1].target in VIEWS:
        nodes.append(nodes[-1].args[0])
    return nodes


def call_with_result(node, index, target):
    """The call of `target` whose result of this index the node is; None if it is another node."""
    if node.target is operator.getitem and node.args[1] == index:
        call = node.args[0]
        if call.target is target:
            return call


def read_once(*nodes):
    """Whether each of these nodes has a single reader."""
    return all(len(node.users) == 1 for node in nodes)


def replace(node, other, what):
    """Lets `other` be read where `node` was; what: the name under which that is counted."""
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)
    counters["inductor"][what] += 1


def set_arguments(node, **arguments):
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
    """Whether both nodes are tensors of one shape and dtype."""
    a, b = a.meta["val"], b.meta["val"]
    return isinstance(a, torch.Tensor) and a.shape == b.shape and a.dtype == b.dtype
