"""Patches of the loop: batches, rates, gradients, evaluations, and data of one's own."""

import numpy as np
import torch

from experiments import patch as modes
from experiments.patch import OF_LOOP, Patch

MICRO_STEPS = '        for micro in progress(range(self.accumulation), "micro-step", bar=False):\n'
LAST = "            last = micro == self.accumulation - 1\n"
NEXT = "            x, y = next_batch()\n"
CLIP = "        return optim.clip_gradients(self.state.model, self.cfg.clip, factor)\n"
CLIP_CALL = "        norm = training.normalize_and_clip(totals)\n"
SCHEDULE = "    low = peak * cfg.min_lr_ratio\n"
LOADER = "    loader = make_loader(cfg, world)\n"
EVALUATIONS = "    warnings = add_evaluations(evaluations, cfg, world, val_loaders)\n"
STATE_CLASS = "@dataclasses.dataclass\nclass State:\n"
SCALE = "        torch._foreach_mul_(own, factor)\n    return norm\n"

FORWARD = "            loss, count, extras = self.model(x, y, positions)\n"
Z_LOSS = """            import kernels

            squares = self.model.logits(x).logsumexp(-1).square()
            loss = loss + 0.01 * kernels.mean_loss(squares, y, "mean")[0]
"""
TEACHER = """            import kernels

            with torch.no_grad():
                teacher = self.state.model.logits(x)
            far = (self.model.logits(x) - 0.5 * teacher).square().mean(-1)
            loss = loss + 0.1 * kernels.mean_loss(far, y, "mean")[0]
"""
TASK = '''class Reversal:
    """Rows made on the fly: 16 random ids, then backwards; row i is the same on any rank."""

    def __init__(self, cfg, world):
        self.B, self.rank, self.world, self.rows = cfg.batch_size, world.rank, world.size, 0

    def next(self):
        first = self.rows + self.rank * self.B
        rows = [self.row(i) for i in range(first, first + self.B)]
        self.rows += self.world * self.B
        batch = torch.stack(rows)
        x, y = batch[:, :-1], batch[:, 1:].clone()
        y[:, :16] = -100  # only the answer counts
        return x, y

    def row(self, i):
        ids = torch.randint(0, 250, (16,), generator=torch.Generator().manual_seed(i))
        return torch.cat([ids, torch.tensor([256]), ids.flip(0)])

    def state_dict(self):
        return {"rows": self.rows}

    def load_state_dict(self, state):
        self.rows = state["rows"]

    def close(self):
        pass


'''
PROBE = """    def probe(model):
        idx = torch.arange(32, device=world.device).unsqueeze(0)
        return {"largest": model.logits(idx).max().item()}

    evaluations.add("probe", 2, probe)
"""
TEXT = PROBE.replace(".item()}", '.item(), "words": "a text"}')
TENSOR = PROBE.replace(".item()", "")
AGAIN = '    evaluations.add("probe", 3, probe)\n'


def reversal(first, rows):
    """The rows of TASK, written once more."""
    made = []
    for i in range(first, first + rows):
        ids = torch.randint(0, 250, (16,), generator=torch.Generator().manual_seed(i)).tolist()
        made.append([*ids, 256, *ids[::-1]])
    x = torch.tensor(made)[:, :-1]
    y = torch.tensor(made)[:, 1:]
    y[:, :16] = -100
    return x, y


def noisy(parameters, step):
    """Noise that depends on the step alone."""
    generator = torch.Generator().manual_seed(step)
    for p in parameters:
        p.grad += 1e-3 * torch.randn(p.grad.shape, generator=generator)
    torch.nn.utils.clip_grad_norm_(parameters, 10.0)


def values_clipped(parameters, _):
    torch.nn.utils.clip_grad_norm_(parameters, 10.0)
    for p in parameters:
        p.grad.clamp_(max=2e-3)


def with_z_loss(model, x, y):
    loss, _, extras = model(x, y)
    squares = model.logits(x).logsumexp(-1).square()
    more = squares[y >= 0].mean()
    return loss + 0.01 * more if model.training else loss, extras


def with_teacher(model, x, y):
    loss, _, extras = model(x, y)
    logits = model.logits(x)
    more = (logits - 0.5 * logits.detach()).square().mean(-1)[y >= 0].mean()
    return loss + 0.1 * more if model.training else loss, extras


def tokens_of(*each):
    """Says whether the log's tokens are the sums of these tokens of steps."""

    def wrong(log):
        found = [line["tokens"] for line in log if line["kind"] == "train"]
        expected = np.cumsum(each).tolist()
        return None if found == expected[-len(found) :] else f"tokens {found}, expected {expected}"

    return wrong


def rates(lr):
    def wrong(log):
        found = {line["step"]: line["lr"] for line in log if line["kind"] == "train"}
        bad = {step: value for step, value in found.items() if abs(value / lr(step - 1) - 1) > 1e-9}
        return f"rates {bad}" if bad else None

    return wrong


def probed(log):
    steps = [line["step"] for line in log if line["kind"] == "probe"]
    right = steps in ([0, 2, 4, 6], [4, 6]) and all(
        "largest" in x for x in log if x["kind"] == "probe"
    )
    return None if right else f"probe at {steps}"


root = lambda step: 2e-3 / (step + 1) ** 0.5

PATCHES = [
    Patch(
        "batch warm-up",
        "half of the micro-steps in the first three steps",
        {
            "train.py": [
                (
                    MICRO_STEPS,
                    "        number = self.accumulation // 2 if self.state.step < 3 else "
                    "self.accumulation\n" + MICRO_STEPS.replace("self.accumulation", "number"),
                ),
                (LAST, LAST.replace("self.accumulation", "number")),
            ]
        },
        (*OF_LOOP, modes.CONTEXT),
        sample=(modes.PLAIN, modes.RESUMED),
        rows=lambda step: 4 if step < 3 else 8,
        also=tokens_of(128, 128, 128, 256, 256, 256),
    ),
    Patch(
        "gradient noise",
        "of a generator seeded by the step, the same on every rank",
        {
            "train.py": [
                (
                    CLIP_CALL,
                    "        generator = torch.Generator().manual_seed(state.step)\n"
                    "        targets = parallel.sum_over_ranks(totals[1].clone())\n"
                    "        for p in state.model.parameters():\n"
                    "            noise = torch.randn(p.shape, generator=generator).to(p.device)\n"
                    "            p.grad += 1e-3 * noise * targets / cfg.batch_tokens\n" + CLIP_CALL,
                )
            ]
        },
        OF_LOOP,  # ranks of FSDP2 hold rows of the gradients, and would need rows of the noise
        clip=noisy,
    ),
    Patch(
        "clipped values",
        "each gradient's elements are clipped, instead of the norm",
        {
            "optim.py": [
                (
                    SCALE,
                    SCALE.replace(
                        "    return", "    torch._foreach_clamp_max_(own, 2e-3)\n    return"
                    ),
                )
            ]
        },
        (*OF_LOOP, modes.CONTEXT),
        clip=values_clipped,
    ),
    Patch(
        "PyTorch's clip",
        "torch.nn.utils.clip_grad_norm_ after the factor of the true number of targets",
        {
            "train.py": [
                (
                    CLIP,
                    "        parameters = [p for p in self.state.model.parameters() if p.grad is "
                    "not None]\n"
                    "        for p in parameters:\n"
                    "            p.grad.mul_(factor)\n"
                    "        return torch.nn.utils.clip_grad_norm_(parameters, 0.5)\n",
                )
            ]
        },
        (*OF_LOOP, modes.CONTEXT),
        clip=lambda parameters, _: torch.nn.utils.clip_grad_norm_(parameters, 0.5),
    ),
    Patch(
        "a rate of one's own",
        "an inverse root of the step",
        {"optim.py": [(SCHEDULE, "    return 2e-3 / (step + 1) ** 0.5\n" + SCHEDULE)]},
        OF_LOOP,
        sample=(modes.PLAIN,),
        lr=root,
        also=rates(root),
    ),
    Patch(
        "a loss from a second call",
        "of another method than forward, in the micro-step",
        {"train.py": [(FORWARD, FORWARD + Z_LOSS)]},
        (*OF_LOOP, modes.FSDP, modes.COMPILED),
        sample=(modes.PLAIN, modes.DDP, modes.FSDP),
        loss=with_z_loss,
    ),
    Patch(
        "a teacher",
        "the logits of the model inside DDP, without gradients",
        {"train.py": [(FORWARD, FORWARD + TEACHER)]},
        (*OF_LOOP, modes.FSDP),
        loss=with_teacher,
    ),
    Patch(
        "a call around DDP",
        "the loss comes from the model inside alone",
        {"train.py": [(FORWARD, FORWARD.replace("self.model", "self.state.model"))]},
        (modes.DDP, modes.FSDP),
        sample=(modes.DDP, modes.FSDP),
        refused={modes.DDP: "2 ranks, 2 micro-steps: the gradient"},
        unchanged=True,
    ),
    Patch(
        "an evaluation of one's own",
        "a figure of the logits every two steps",
        {"train.py": [(EVALUATIONS, EVALUATIONS + PROBE)]},
        (*OF_LOOP, modes.CONTEXT),
        sample=(modes.RESUMED,),
        also=probed,
        unchanged=True,
    ),
    Patch(
        "an evaluation with a text",
        "beside its figure, on the console and in log.jsonl",
        {"train.py": [(EVALUATIONS, EVALUATIONS + TEXT)]},
        (),
        also=probed,
        unchanged=True,
    ),
    Patch(
        "an evaluation with a tensor",
        "the figure is a tensor of one element",
        {"train.py": [(EVALUATIONS, EVALUATIONS + TENSOR)]},
        (),
        also=probed,
        unchanged=True,
    ),
    Patch(
        "two evaluations with one name",
        "of which one would hide the other",
        {"train.py": [(EVALUATIONS, EVALUATIONS + PROBE + AGAIN)]},
        (modes.DDP,),
        sample=(),
        refused={
            "eager": "the name 'probe' of an evaluation is in use already",
            modes.DDP: "in use already",
        },
    ),
    Patch(
        "a task made on the fly",
        "a loader of one's own with four methods, and no tokenizer",
        {
            "train.py": [
                (STATE_CLASS, TASK + STATE_CLASS),
                (LOADER, "    loader = Reversal(cfg, world)\n"),
            ]
        },
        (modes.PLAIN, modes.RESUMED, modes.FSDP),
        sample=(modes.PLAIN, modes.RESUMED),
        settings=dict(eval_interval=0, tokenizer=None, data_dir="nowhere"),
        data=reversal,
    ),
]
