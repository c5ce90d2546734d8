"""fast/texts.py: which changes of kernels.py are edits, and what they are said to change."""

import pytest
from conftest import ROOT

from fast import forms, texts

TEXT = (ROOT / "kernels.py").read_text()


@pytest.fixture
def edited(tmp_path):
    """edited(old, new): what texts.py says of kernels.py with a change."""

    def found(old, new):
        assert TEXT.count(old) == 1
        (tmp_path / "kernels.py").write_text(TEXT.replace(old, new))
        return texts.edited(tmp_path / "kernels.py")

    return found


def test_the_forms_compute_the_texts_of_kernels():
    """Where this is red, change the fused form as well, and then the digest in fast/texts.py.

    tests/test_fast.py compares the two.
    """
    assert texts.edited() == {} == forms.edits


END = "\n# -- the loss\n"
FREE = {
    "a comment and a line break": (
        'return F.gelu(x, approximate="tanh")  # GPT-2\'s own form',
        '# ours\n    return F.gelu(\n        x, approximate="tanh")',
    ),
    "no docstring": ('    """down(activation(up(x))); x: (..., C) -> (..., C)."""\n', ""),
    "another function": ("# -- the loss\n", "def another(x):\n    return swiglu(x)\n"),
}
EDITS = {  # (text, another, what is then edited, by the first of which)
    "a decorator": ("@operation(forms.mlp)", "@torch.compile\n@operation(forms.mlp)", "mlp"),
    "what others call": (
        "-torch.inf)",
        "-1e9)",
        "plain_cross_entropy cross_entropy",
    ),
    "a second definition": (END, f"\ndef gelu(x):\n    return x\n\n{END}", "gelu"),
    "an assignment": (END, f"\nmlp = torch.compile(mlp)\n{END}", "mlp"),
    "an attribute": (
        "class Linear(nn.Linear):",
        "class Linear(nn.Linear):\n    bias_scale = 2.0\n",
        "Linear",
    ),
    "another base": ("class LayerNorm(nn.LayerNorm):", "class LayerNorm(nn.RMSNorm):", "LayerNorm"),
    "another name": ("def relu2(x):", "def squared(x):", "relu2"),
}


@pytest.mark.parametrize("old, new", FREE.values(), ids=FREE)
def test_comments_docstrings_and_line_breaks_are_free(edited, old, new):
    assert edited(old, new) == {}


@pytest.mark.parametrize("old, new, names", EDITS.values(), ids=EDITS)
def test_another_text_is_an_edit_of_all_that_calls_it(edited, old, new, names):
    found = edited(old, new)
    assert [*found] == names.split()
    assert all(names.split()[0] in words for words in found.values())
