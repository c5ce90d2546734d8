"""How the pictures of plot.py and of `bench.py snapshot` look, and how they are written."""

import warnings

import matplotlib
from cycler import cycler

from system.errors import UserError, warn

STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titlesize": "medium",
    "axes.formatter.useoffset": False,
    "text.parse_math": False,
}


def style(paper, ink, grid, colors):
    """matplotlib's settings of a theme."""
    paper_of = dict.fromkeys(["figure.facecolor", "axes.facecolor"], paper)
    inks = ["text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"]
    lines = {"grid.color": grid, "axes.prop_cycle": cycler(color=colors)}
    return STYLE | paper_of | dict.fromkeys(inks, ink) | lines


# Colours: blue, orange, green, pink, ochre and sky.
# They follow Okabe and Ito's, which the colour-blind can tell apart.
LIGHT = style(
    paper="#ffffff",
    ink="#1f2328",
    grid="#e5e7eb",
    colors=["#0072b2", "#d55e00", "#009e73", "#b8528c", "#b07d00", "#3a9bd6"],
)
DARK = style(
    paper="#0d1117",
    ink="#e6edf3",
    grid="#262c36",
    colors=["#4aa8ff", "#ff8a4c", "#2ecc9b", "#f08ac0", "#f2c14e", "#9be0ff"],
)

matplotlib.rcParams.update(LIGHT)


def theme(dark=False):
    """A context in which figures are drawn in light or dark colours."""
    return matplotlib.rc_context(DARK if dark else LIGHT)


def colors():
    """The colours of lines, in their order."""
    return matplotlib.rcParams["axes.prop_cycle"].by_key()["color"]


def write(figure, out):
    """Writes a figure to the file `out`."""
    try:
        with warnings.catch_warnings(record=True) as missing:  # one for each glyph
            warnings.filterwarnings("always", "Glyph .* missing")
            figure.savefig(out, dpi=160)
    except (OSError, ValueError) as error:  # ValueError: an unknown kind of picture
        raise UserError(f"{out}: cannot write the picture ({error})") from None
    if missing:
        warn("the font lacks characters of the names, which are drawn as boxes")
    print(f"drawn: {out}")
