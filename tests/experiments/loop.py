"""Patches of the loop: batches, rates, gradients, evaluations, and data of one's own."""

import torch

from experiments import patch as modes
from experiments.patch import OF_LOOP, Patch

CLIP_CALL = "        norm = training.normalize_and_clip(totals)\n"
LOADER = "    loader = make_loader(cfg, world)\n"
EVALUATIONS = "    warnings = add_evaluations(evaluations, cfg, world, val_loaders)\n"
STATE_CLASS = "@dataclasses.dataclass\nclass State:\n"

FORWARD = "            loss, count, extras = self.model(x, y, positions)\n"
Z_LOSS = """            import kernels

            squares = self.model.logits(x).logsumexp(-1).square()
            loss = loss + 0.01 * kernels.mean_loss(squares, y, "mean")[0]
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


def with_z_loss(model, x, y):
    loss, _, extras = model(x, y)
    squares = model.logits(x).logsumexp(-1).square()
    more = squares[y >= 0].mean()
    return loss + 0.01 * more if model.training else loss, extras


def probed(log):
    steps = [line["step"] for line in log if line["kind"] == "probe"]
    right = steps in ([0, 2, 4, 6], [4, 6]) and all(
        "largest" in x for x in log if x["kind"] == "probe"
    )
    return None if right else f"probe at {steps}"


PATCHES = [
    Patch(
        "a loss from a second call",
        "of another method than forward, in the micro-step",
        {"train.py": [(FORWARD, FORWARD + Z_LOSS)]},
        (*OF_LOOP, modes.FSDP, modes.COMPILED),
        sample=(modes.PLAIN, modes.DDP, modes.FSDP),
        loss=with_z_loss,
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
