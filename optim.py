"""Parameter groups, optimizers, gradient clipping; rate and batch by how far a run is."""

import itertools
import math
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from scale.shards import all_gather_single, local, rows_of
from system.errors import UserError

# (a, b, c) of five steps x -> a x + b x x^T x + c (x x^T)^2 x, which bring singular values to
# between 0.85 and 1.15
POLAR_EXPRESS = [  # https://arxiv.org/abs/2505.16932
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def param_groups(model, cfg):
    """Which optimizer, peak rate and decay each parameter has (docs/experiment.md).

    A group: params; optimizer, a name that `build` knows; lr, the peak rate; weight_decay; kind,
    its name in the start-up summary. Decay: with AdamW of matrices, and of embedding or head where
    lr_embedding or lr_head is None; with Muon of the matrices that it updates; of vectors never.
    """
    muon = cfg.optimizer == "muon"
    beside = "adamw" if muon else cfg.optimizer  # for what is no matrix of a block
    decay = cfg.weight_decay
    if decay is None:
        # near the best of short and long runs: docs/modern.md
        steps, _ = length_of_run(cfg)
        decay = 2 / ((cfg.lr or 1) * steps)

    def group(rate, decay, optimizer=beside):
        return dict(params=[], optimizer=optimizer, lr=rate, weight_decay=decay)

    def table(rate):
        return group(cfg.lr, 0.0 if muon else decay) if rate is None else group(rate, 0.0)

    groups = {
        "embedding": table(cfg.lr_embedding),
        "head": table(cfg.lr_head),
        "matrix": group(cfg.lr, decay, cfg.optimizer),
        "vector": group(cfg.lr, 0.0),
    }
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        groups[kind_of(model, name, p)]["params"].append(p)
    return [group | {"kind": kind} for kind, group in groups.items() if group["params"]]


def kind_of(model, name, p):
    """The group of `param_groups` for a parameter, by its layer, its name and its shape."""
    layer = model.get_submodule(name.rpartition(".")[0])
    if p.dim() == 2 and isinstance(layer, torch.nn.Embedding):
        return "embedding"
    if p.dim() == 2 and name.startswith("head"):  # of a second head too
        return "head"
    is_convolution = isinstance(layer, torch.nn.modules.conv._ConvNd)
    if is_convolution or p.dim() not in (2, 3) or 1 in p.shape[-2:]:
        return "vector"  # so are biases, norms, gates and single rows
    return "matrix"  # or, of three dimensions, a stack of matrices


def build(name, groups, model, cfg):
    """The optimizer `name` of groups of parameters: one of your own is a line here.

    AdamW (https://arxiv.org/abs/1711.05101) is PyTorch's, fused.
    """
    # beside Muon modded-nanogpt's, as are the rates of embeddings and head
    eps = 1e-10 if cfg.optimizer == "muon" else 1e-8
    options = dict(lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=eps)
    if name == "adamw8bit":
        from scale.adamw8bit import AdamW8bit

        return AdamW8bit(groups, **options, seed=cfg.seed, compiled=cfg.compile)
    if name == "muon":
        counts = {p: matrices_of(full_name, p, cfg) for full_name, p in model.named_parameters()}
        return Muon(groups, counts, cfg.lr, cfg.momentum_warmup, cfg.compile)
    if name != "adamw":
        what = f"param_groups names the optimizer {name!r}"
        raise UserError(f"optim.py: {what}, which `build` does not know")
    return torch.optim.AdamW(groups, **options, fused=True)


def make_optimizer(model, cfg):
    """The optimizer of all groups of `param_groups`, Several where they name several.

    Each group gets `factor`, its peak rate over cfg.lr. Raises UserError where a parameter is in no
    group or in two.
    """
    by_name = grouped(param_groups(model, cfg), lambda group: group["optimizer"])
    each = [build(name, groups, model, cfg) for name, groups in by_name.items()]
    optimizer = each[0] if len(each) == 1 else Several(each)
    times = Counter(p for group in optimizer.param_groups for p in group["params"])
    for name, p in model.named_parameters():
        if p.requires_grad and times[p] != 1:
            hint = "a parameter that is to stay as it is needs requires_grad=False"
            raise UserError(f"optim.py: {name} is in {times[p]} groups, expected one; {hint}")
    for group in optimizer.param_groups:
        group["factor"] = group["lr"] / (cfg.lr or 1)
        settings = {name: value for name, value in group.items() if name != "params"}
        group["made"] = deepcopy(settings)  # a checkpoint holds what steps change of it
    return optimizer


class Several:
    """Optimizers with parameters of their own, as one for the loop."""

    def __init__(self, optimizers):
        self.optimizers = optimizers

    @property
    def param_groups(self):
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def parts_of(optimizer):
    """The optimizers that make up one."""
    return optimizer.optimizers if isinstance(optimizer, Several) else [optimizer]


def fill_gradients(model, unused):
    """Gives zeros to parameters without a gradient, such as those of an expert without tokens.

    As FSDP2 does, so that a step is the same in every mode. unused: names of those that no loss
    depends on, which stay without.
    """
    for name, p, trained in model.trained:
        if trained and p.grad is None and name not in unused:
            p.grad = torch.zeros_like(p)


def clip_gradients(model, limit, factor):
    """Multiplies the gradients by factor, then limits their norm over all ranks.

    factor: a scalar tensor; limit: None: no further scaling. Returns the norm before `limit`.
    torch's clip_grad_norm_ takes DTensors one by one: 20 ms of a step of 614 ms (Llama 3 8B, four
    H200s).
    """
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    own = [local(grad) for grad in grads]
    square = norms(own).square().sum()
    if isinstance(grads[0], DTensor):
        dist.all_reduce(square, group=grads[0].device_mesh.get_group("shard"))
    factor = factor.to(square)
    norm = square.sqrt() * factor
    if limit is not None:
        scale = (limit / (norm + 1e-6)).clamp(max=1)
        factor = factor * scale.nan_to_num(0)  # else each parameter would be NaN, as one is
    if not (factor.is_cpu and factor == 1):  # there, a multiplication by 1 is 1/4 of an update
        torch._foreach_mul_(own, factor)
    return norm


def norms(tensors):
    """float32 norms: one of each tensor, on the CPU one of each row of each tensor.

    On the CPU torch._foreach_norm uses one thread, and its sum of 400M squares is 7% too small.
    """
    if not tensors[0].is_cpu:
        return torch.stack(torch._foreach_norm(tensors, dtype=torch.float32))
    rows = [torch.linalg.vector_norm(t, dim=-1, dtype=torch.float32) for t in tensors]
    return torch.cat([norm.flatten() for norm in rows])


def share_done(state, cfg):
    """How much of a run is done, 0 to 1, by the clock, tokens or steps of a train.State."""
    share = state.step / cfg.max_steps
    if cfg.max_tokens is not None:
        share = state.tokens / cfg.max_tokens
    if cfg.max_seconds is not None:
        share = state.seconds / cfg.max_seconds
    return min(1.0, share)


def batch_tokens(share, cfg):
    """Tokens in a step, all ranks together, after that share of the run: cfg.batch_schedule's."""
    for tokens, until in cfg.stages:
        if share < until:
            return tokens
    return cfg.batch_tokens


def length_of_run(cfg, step=0, tokens=0):
    """(steps, tokens) at the end of a run that has done `step` and `tokens` of them so far.

    Not for max_seconds.
    """
    for batch, until in cfg.stages:
        if cfg.max_tokens is None:
            left = until * cfg.max_steps - step
        else:
            left = (until * cfg.max_tokens - tokens) / batch
        steps = max(0, math.ceil(round(left, 9)))  # 0.07 * 100 is over 7
        step += steps
        tokens += steps * batch
    return step, tokens


def learning_rate(step, share, cfg):
    """Learning rate of `step`, from 0: linear warm-up, then cfg.schedule to lr * min_lr_ratio.

    share: of the run that is done, as share_done has it. A smaller batch of cfg.batch_schedule has
    less, by the root of its size (https://arxiv.org/abs/2205.10287).
    cosine: half a cosine (https://arxiv.org/abs/1608.03983). wsd: constant, then linear over the
    last cooldown_fraction of the run (https://arxiv.org/abs/2404.06395). constant: no decay.
    """
    peak = cfg.lr * math.sqrt(batch_tokens(share, cfg) / cfg.batch_tokens)
    low = peak * cfg.min_lr_ratio
    if step < cfg.warmup_steps:
        return peak * (step + 1) / cfg.warmup_steps
    if cfg.schedule == "constant":
        return peak
    if cfg.schedule == "cosine":
        warm = share * cfg.warmup_steps / max(1, step)  # the warm-up's share of the run
        progress = (share - warm) / max(1e-9, 1 - warm)
        return low + (peak - low) * 0.5 * (1 + math.cos(math.pi * progress))
    left = (1 - share) / max(1e-9, cfg.cooldown_fraction)
    return low + (peak - low) * min(1.0, left)


def set_learning_rate(optimizer, lr):
    """Each group's rate is its `factor`, the ratio of its peak to cfg.lr, times lr."""
    for group in optimizer.param_groups:
        group["lr"] = group.get("factor", 1.0) * lr


def matrices_of(name, weight, cfg):
    """[rows] of the matrices in a weight, from above: q, k and v, gate and up are each their own.

    Of a stack, (n, rows, columns), each of its n entries is one.
    """
    rows = math.prod(weight.shape[:-1])
    counts = [rows]
    if weight.dim() == 3:
        counts = [weight.size(1)] * weight.size(0)
    elif name.endswith("qkv.weight"):
        counts = [heads * cfg.head_size for heads in (cfg.n_head, cfg.kv_heads, cfg.kv_heads)]
    elif name.endswith("gate_up.weight"):
        counts = [rows // 2] * 2
    return counts if sum(counts) == rows else [rows]  # else it is an edit's


@dataclass(eq=False)
class Matrix:
    """Rows of a weight; where it is sharded, a rank holds some of them, perhaps none, else all."""

    weight: torch.nn.Parameter
    shape: tuple[int, int]  # rows, columns
    held: list[int]  # rows that each rank holds
    here: int  # rows that this rank holds


def divided(weight, counts):
    """[Matrix] of a weight whose matrices have so many rows, one below the other."""
    each = math.prod(weight.shape[1:-1])  # the rows of a stack's entry; else 1
    rank, size, _ = ranks_of(weight)
    found = []
    end = 0
    for rows in counts:
        begin, end = end, end + rows
        held = []
        for r in range(size):
            first, last = rows_of(weight, r)
            common = range(max(begin, first * each), min(end, last * each))
            held.append(len(common))
        shape = rows, weight.size(-1)
        found.append(Matrix(weight, shape, held, held[rank]))
    return found


class Muon(torch.optim.Optimizer):
    """Muon (https://kellerjordan.github.io/posts/muon) for matrices, and stacks of them.

    A matrix moves by lr * sqrt(max(1, rows / columns)) along the orthogonal factor of its Nesterov
    momentum. Only elements that the update shrinks as well decay
    (https://arxiv.org/abs/2510.12402). One rank orthogonalises a matrix for all. counts:
    {parameter: its `matrices_of`}. warmup: steps in which the momentum rises from 0.85 to 0.95.
    """

    def __init__(self, groups, counts, lr, warmup=0, compiled=False):
        super().__init__(groups, dict(lr=lr, weight_decay=0.0))
        self.warmup = warmup
        self.matrices = {}  # {parameter: [Matrix]}
        for p in itertools.chain(*(group["params"] for group in self.param_groups)):
            step = torch.zeros(1, device=p.device)
            self.state[p] = dict(step=step, momentum=torch.zeros_like(p))
            self.matrices[p] = divided(p, counts[p])
        _, ranks, _ = ranks_of(p)
        self.batches = []  # of matrices of one shape up to transposition
        matrices = itertools.chain(*self.matrices.values())
        for shape, same in grouped(matrices, lambda m: tuple(sorted(m.shape))).items():
            each = max(1, 2**27 // math.prod(shape))  # up to 2**27 numbers for each rank
            self.batches += in_lists(same, ranks * each)
        functions = [update_momentum, descend]
        if compiled and p.is_cuda:
            functions = [torch.compile(function, dynamic=False) for function in functions]
        self.update_momentum, self.descend = functions

    @torch.no_grad()
    def step(self):
        """Momenta and updates, then orthogonal factors in place of updates, then the weights.

        Each for all weights before the next, since a batch has matrices of many.
        """
        lists = []  # of weights of one shape, with their rates
        for group in self.param_groups:
            rates = torch.tensor([group["lr"], group["lr"] * group["weight_decay"]]).unbind()
            lists += [(some, rates) for some in lists_of_one_shape(group["params"])]
        weights = [p for some, _ in lists for p in some]
        if not weights:
            return
        steps = [self.state[p]["step"] for p in weights]
        torch._foreach_add_(steps, 1)
        warm = (steps[0] / max(1, self.warmup)).clamp(max=1)
        momentum = 0.85 + 0.1 * warm
        dtype = torch.bfloat16 if weights[0].is_cuda else None
        updates = {p: torch.empty_like(local(p), dtype=dtype) for p in weights}
        for some, _ in lists:
            moments = [local(self.state[p]["momentum"]) for p in some]
            grads = [local(p.grad) for p in some]
            self.update_momentum(moments, grads, [updates[p] for p in some], momentum)
        rows = {}  # {Matrix: the rows of its update on this rank}
        for p, update in updates.items():
            matrices = self.matrices[p]
            own = update.flatten(0, -2).split([m.here for m in matrices])
            rows.update(zip(matrices, own))
        for batch in self.batches:  # with collective operations, in one order on all ranks
            orthogonalize_updates([matrix for matrix in batch if matrix in rows], rows)
        for some, rates in lists:
            self.descend([local(p) for p in some], [updates[p] for p in some], *rates)


def grouped(items, key_of):
    """{key: the items that have it}."""
    found = {}
    for item in items:
        found.setdefault(key_of(item), []).append(item)
    return found


def in_lists(items, most):
    """The items in lists of at most `most`."""
    return [items[i : i + most] for i in range(0, len(items), most)]


def lists_of_one_shape(weights):
    """The weights that have gradients, in lists of one shape on this rank."""
    lists = []
    with_gradients = [p for p in weights if p.grad is not None]
    for same in grouped(with_gradients, lambda p: local(p).shape).values():
        lists += in_lists(same, 4)  # a compiled graph of 96 weights took 51 s, graphs of four 11
    return lists


def ranks_of(weight):
    """(rank, size, process group) of this process among those that share the work on a weight."""
    if not dist.is_initialized():
        return 0, 1, None
    group = weight.device_mesh.get_group("shard") if isinstance(weight, DTensor) else None
    return dist.get_rank(group), dist.get_world_size(group), group


def orthogonalize_updates(matrices, rows):
    """Replaces the updates of matrices, of one shape up to transposition, by scaled factors.

    All ranks call it with the same matrices and divide them: the owner of some gets their updates,
    orthogonalises them in one stack, and gives the factors to the others. rows: {Matrix: the rows
    of its update on this rank}.
    """
    if not matrices:
        return
    weight = matrices[0].weight
    rank, size, group = ranks_of(weight)
    each = math.ceil(len(matrices) / size)
    short, long = sorted(matrices[0].shape)
    here = [rows[matrix] for matrix in matrices]
    stack = here[0].new_zeros(each, short, long)  # some stay zeros where a rank owns fewer
    mine = slice(rank * each, (rank + 1) * each)
    owned = as_matrices(stack, matrices[mine])

    if isinstance(weight, DTensor):  # this rank holds some rows of each matrix
        by_owner = [here[r * each : (r + 1) * each] for r in range(size)]
        parts = [x.split(matrix.held) for x, matrix in zip(owned, matrices[mine])]
        by_holder = [[part[r] for part in parts] for r in range(size)]
        exchange(by_owner, by_holder, group)
        orthogonalize_stack(stack, owned)
        exchange(by_holder, by_owner, group)
        return

    copy(owned, here[mine])
    orthogonalize_stack(stack, owned)
    whole = stack
    if size > 1:
        whole = stack.new_empty(size * each, short, long)
        all_gather_single(whole, stack)
    copy(here, as_matrices(whole, matrices))


def as_matrices(stack, matrices):
    """Views of a stack's entries, (short, long), in the shapes of the matrices."""
    return [x if x.shape == matrix.shape else x.mT for x, matrix in zip(stack, matrices)]


def copy(targets, sources):
    if targets:
        torch._foreach_copy_(targets, sources)


def orthogonalize_stack(stack, entries):
    """Replaces a stack by its orthogonal factors, those of tall matrices scaled.

    entries: views of them in the shapes of their matrices.
    """
    stack.copy_(orthogonalize(stack))
    for x in entries:
        rows, columns = x.shape
        if rows > columns:
            x *= (rows / columns) ** 0.5


def exchange(sources, targets, group):
    """An all-to-all of lists of tensors: sources[r] go to rank r, targets[r] come from it."""
    leaving = list(itertools.chain(*sources))
    arriving = list(itertools.chain(*targets))
    like = [*leaving, *arriving][0]
    # an empty tensor before them, since a rank may have nothing to send
    sent = torch.cat([like.new_empty(0), *(t.flatten() for t in leaving)])
    counts = numbers_in(targets)
    received = like.new_empty(sum(counts))
    dist.all_to_all_single(received, sent, counts, numbers_in(sources), group=group)
    parts = received.split([t.numel() for t in arriving])
    copy(arriving, [part.view(t.shape) for t, part in zip(arriving, parts)])


def numbers_in(lists):
    """How many numbers the tensors of each list have in all."""
    return [sum(t.numel() for t in tensors) for tensors in lists]


def orthogonalize(x):
    """The orthogonal factors of x, (n, short, long), by polar decomposition, roughly."""
    x = x / (x.norm(dim=(1, 2), keepdim=True) * 1.02 + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        poly.diagonal(dim1=1, dim2=2).add_(a)
        x = poly @ x
    return x


def update_momentum(moments, grads, updates, momentum):
    """m = momentum m + (1 - momentum) g, u the same of the new m."""
    for m, g, u in zip(moments, grads, updates):
        m.copy_(torch.lerp(g, m, momentum))
        u.copy_(torch.lerp(g, m, momentum))


def descend(weights, updates, rate, decay):
    """w -= rate * u + decay * w, the latter where u has w's sign.

    rate, decay: tensors, so that the function is compiled once.
    """
    for w, u in zip(weights, updates):
        w -= rate * u + decay * torch.where(u * w > 0, w, 0)
