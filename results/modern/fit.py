"""Fits loss(N, D) = E + A / N**alpha + B / D**beta to the ends of the runs of docs/modern.md, and draws it.

    python results/modern/fit.py assets/modern_fit.png

Equation 10 of https://arxiv.org/abs/2203.15556. N is a model's FLOPs a token over 6, so that attention counts
like parameters, D the tokens, and 6 N D the compute. The modern recipe gives the five numbers; GPT-2's gets
the factor m by which it needs more tokens for the same loss, loss(N, D / m).
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import plot

HERE = Path(__file__).resolve().parent
MODERN = ["8x512", *(f"modern_124m_{tokens}" for tokens in ("37M", "120M", "300M"))]
MODERN += [
    f"sizes/{name}" for name in ("6x384_37M", "6x384_120M", "8x512_37M", "8x512_120M", "modern_350m_37M")
]
GPT2 = ["gpt2_tuned_50M", "gpt2_tuned_300M", "sizes/gpt2_tuned_6x384_50M", "sizes/gpt2_tuned_8x512_50M"]
EXPONENTS = np.arange(0.10, 1.001, 0.01)


def ends(names):
    """N, D and the last validation loss of each run."""
    runs = plot.load([HERE / f"{name}.jsonl" for name in names])
    found = [
        (
            run.start["flops_per_token"] / 6,
            plot.series(run.log, "train", "tokens")[1][-1],
            plot.series(run.log, "val", "loss")[1][-1],
        )
        for run in runs
    ]
    return np.array(found).T


def fit(N, D, loss):
    """(E, A, alpha, B, beta) of least squares; for each pair of exponents it is linear in E, A and B."""
    best = (np.inf, None)
    for alpha in EXPONENTS:
        for beta in EXPONENTS:
            columns = np.stack([np.ones_like(N), (N / N[0]) ** -alpha, (D / D[0]) ** -beta], 1)
            E, A, B = np.linalg.lstsq(columns, loss, rcond=None)[0]
            error = np.square(columns @ (E, A, B) - loss).sum()
            if min(E, A, B) > 0 and error < best[0]:
                best = error, (E, A * N[0] ** alpha, alpha, B * D[0] ** beta, beta)
    return best[1]


def main(picture):
    E, A, alpha, B, beta = fit(*ends(MODERN))

    def law(N, D, m=1.0):
        return E + A / N**alpha + B * (m / D) ** beta

    def best_size(compute, m=1.0):
        """N with the lowest loss for 6 N D = compute."""
        share = 1 / (alpha + beta)
        return (alpha * A / (beta * B * m**beta)) ** share * (compute / 6) ** (beta * share)

    print(f"loss = {E:.3f} + {A:.4g} / N^{alpha:.2f} + {B:.4g} / D^{beta:.2f}")
    factors = np.geomspace(0.1, 100, 3001)
    figure = plot.Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, runs, color in (("modern", MODERN, plot.COLORS[0]), ("GPT-2, tuned", GPT2, plot.COLORS[1])):
        N, D, loss = ends(runs)
        errors = sum(np.square(law(n, d, factors) - x) for n, d, x in zip(N, D, loss))
        m = 1.0 if runs is MODERN else factors[errors.argmin()]
        off = np.abs(law(N, D, m) - loss).max()
        print(f"{name}: {len(N)} runs, {m:.2f} times the tokens, at most {off:.3f} nats off")
        axes.scatter(6 * N * D, loss, (4 + 4 * np.log10(N / 1e7)) ** 2, color=color, zorder=3)
        compute = np.geomspace(4 * (N * D).min(), 9 * (N * D).max(), 100)
        sizes = best_size(compute, m)
        axes.plot(
            compute,
            law(sizes, compute / 6 / sizes, m),
            color=color,
            label=f"{name}: {m:.2f} times the tokens",
        )
    axes.set(
        xscale="log",
        xlabel="FLOPs of the model",
        title="validation loss, larger models larger; lines: the best size",
    )
    axes.legend()
    figure.savefig(picture, dpi=110, facecolor="white")
    for compute in 10.0 ** np.arange(17, 22):
        N = best_size(compute)
        D = compute / 6 / N
        print(f"{compute:8.0e} FLOPs: {N / 1e6:6.0f}M, {D / 1e6:6.0f}M tokens, loss {law(N, D):.3f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "fit.png")
