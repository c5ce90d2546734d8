"""The loss at the end of runs as a function of size and tokens, and what it says about the best size for a compute.

    loss(N, D) = E + A / N**alpha + B / D**beta          Hoffmann et al. 2022, https://arxiv.org/abs/2203.15556, eq. 10

N is a model's FLOPs a token over 6, so that attention counts like parameters, D the tokens, and 6 N D the compute. The
recipe with the most runs gives the five numbers; every other one gets the factor m by which it needs more tokens for
the same loss, loss(N, D / m). `python plot.py LOGS --fit` prints and draws it. Imports no torch.
"""

import re
from dataclasses import dataclass

import numpy as np

from configurator import UserError
from run.history import series

LEAST = 6  # runs of different size or tokens that the five numbers are fitted to
EXPONENTS = np.arange(0.10, 1.001, 0.01)


@dataclass(frozen=True)
class End:
    """A run at its last step; recipe: its optimizer."""

    name: str
    recipe: str
    N: float
    D: float
    loss: float

    @property
    def compute(self):
        return 6 * self.N * self.D


@dataclass(frozen=True)
class Law:
    E: float
    A: float
    alpha: float
    B: float
    beta: float

    def loss(self, N, D, m=1.0):
        return self.E + self.A / N**self.alpha + self.B * (m / D) ** self.beta

    def best(self, compute, m=1.0):
        """(N, D) with the lowest loss for 6 N D = compute."""
        B, share = self.B * m**self.beta, 1 / (self.alpha + self.beta)
        N = (self.alpha * self.A / (self.beta * B)) ** share * (compute / 6) ** (self.beta * share)
        return N, compute / 6 / N


def end_of(run):
    """(End, None) of a history.Run, or (None, why it has none)."""
    steps, losses = series(run.log, "val", "loss")
    trained, rates = series(run.log, "train", "lr")
    tokens, flops = series(run.log, "train", "tokens")[1], run.start.get("flops_per_token")
    if not len(steps) or not len(tokens) or flops is None:
        return None, "its log lacks validation losses, tokens or FLOPs a token"
    if steps[-1] < 0.99 * trained[-1] or rates[-1] > 0.11 * rates.max():
        return None, f"it ends at step {trained[-1]:.0f} before its rate has fallen, or without a validation"
    words = dict(run.start.get("rows", ())).get("settings", "")
    named = re.search(r"\boptimizer=(\w+)", words)
    recipe = run.config.get("optimizer") or (named[1] if named else "adamw")
    return End(run.name, recipe, flops / 6, tokens[-1], losses[-1]), None


def lowest(ends):
    """{recipe: [End]} by compute; of runs of one recipe, size and number of tokens the one with the lowest loss."""
    kept = {}
    for end in sorted(ends, key=lambda end: -end.loss):
        kept[end.recipe, round(end.N), round(end.D, -6)] = end
    recipes = {}
    for end in sorted(kept.values(), key=lambda end: end.compute):
        recipes.setdefault(end.recipe, []).append(end)
    return dict(sorted(recipes.items(), key=lambda item: -len(item[1])))


def law_of(ends):
    """The Law of least squares over these Ends; UserError if they are too few or too much alike.

    For each pair of exponents E, A and B follow from linear least squares; the best pair counts.
    """
    N, D, loss = (np.array([getattr(end, key) for end in ends]) for key in ("N", "D", "loss"))
    if len(ends) < LEAST or min(len(set(N)), len(set(D))) < 3:
        got = f"{len(ends)} runs, of {len(set(N))} and {len(set(D))}"
        raise UserError(
            f"a fit needs {LEAST} runs of one recipe, of 3 sizes and 3 numbers of tokens; got {got}"
        )
    best = (np.inf, None)
    for alpha in EXPONENTS:
        for beta in EXPONENTS:
            columns = np.stack([np.ones_like(N), (N / N[0]) ** -alpha, (D / D[0]) ** -beta], 1)
            (E, A, B), *_ = np.linalg.lstsq(columns, loss, rcond=None)
            error = np.square(columns @ (E, A, B) - loss).sum()
            if min(E, A, B) > 0 and error < best[0]:
                best = error, Law(E, A * N[0] ** alpha, alpha, B * D[0] ** beta, beta)
    if best[1] is None:
        raise UserError(
            "no curve with positive E, A and B fits these runs; give runs of more sizes and tokens"
        )
    return best[1]


def tokens_factor(law, ends):
    """m of least squares: the recipe needs m times the tokens that `law` needs."""
    factors = np.geomspace(0.1, 100, 3001)
    errors = sum(np.square(law.loss(end.N, end.D, factors) - end.loss) for end in ends)
    return factors[errors.argmin()]


def ends_of(runs):
    """([End], lines that say which of these history.Runs are left out, and why)."""
    found = [(run, *end_of(run)) for run in runs]
    return [end for _, end, _ in found if end], [
        f"left out: {run.name}: {why}" for run, _, why in found if why
    ]


def fit(ends):
    """(Law, {recipe: (m, [End])}, lines that say it); the first recipe is the law's, with m = 1."""
    recipes = lowest(ends)
    first = next(iter(recipes), None)
    law = law_of(recipes.get(first, []))
    factors = {
        name: (1.0 if name == first else tokens_factor(law, own), own) for name, own in recipes.items()
    }
    lines = [f"loss = {law.E:.3f} + {law.A:.4g} / N^{law.alpha:.2f} + {law.B:.4g} / D^{law.beta:.2f}"]
    if {law.alpha, law.beta} & {EXPONENTS[0], EXPONENTS[-1]}:
        lines.append(
            "warning: an exponent is the lowest or highest one tried, so these runs do not determine the law"
        )
    for recipe, (m, ends) in factors.items():
        off = max(abs(law.loss(end.N, end.D, m) - end.loss) for end in ends)
        lines.append(f"{recipe}: {len(ends)} runs, {m:.2f} times the tokens, at most {off:.3f} nats off")
    lines.append(f"{'compute':>10} {'N':>8} {'tokens':>8} {'D/N':>6} {'loss':>6}   best size, {first}")
    largest = recipes[first][-1].compute
    for compute in 10.0 ** np.arange(16, 22):
        N, D = law.best(compute)
        note = "   extrapolated" if compute > 3 * largest else ""
        lines.append(
            f"{compute:10.0e} {N / 1e6:7.0f}M {D / 1e6:7.0f}M {D / N:6.1f} {law.loss(N, D):6.3f}{note}"
        )
    return law, factors, lines


def draw(figure, law, factors, colors):
    """Every run's end and, for each recipe, the loss of the best size against the compute."""
    axes = figure.subplots()
    axes.set_title("validation loss at the end of a run, nats a token; lines: at the best size by the fit")
    for (recipe, (m, ends)), color in zip(factors.items(), colors):
        compute, loss = [end.compute for end in ends], [end.loss for end in ends]
        sizes = [4 + 4 * np.log10(end.N / 1e7) for end in ends]
        axes.scatter(compute, loss, [s * s for s in sizes], color=color, edgecolor="white", zorder=3)
        for end in ends:
            note = f"{end.N / 1e6:.0f}M, {end.D / 1e6:.0f}M tokens"
            axes.annotate(
                note, (end.compute, end.loss), (6, 4), textcoords="offset points", fontsize=7, color=color
            )
        line = np.geomspace(min(compute) / 1.5, max(compute) * 1.5, 100)
        best = [law.loss(*law.best(c, m), m) for c in line]
        axes.plot(line, best, color=color, linewidth=1.3, label=f"{recipe}: {m:.2f} times the tokens")
    axes.set_xscale("log")
    axes.set_xlabel("FLOPs of the model")
    axes.legend(loc="upper right")
