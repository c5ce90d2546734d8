"""fast/edit_check.py: which changes of kernels.py are edits, and what they are said to change."""

import inspect
import operator

import pytest
import torch.nn.functional as F
from conftest import ROOT

import kernels
from fast import chunks, edit_check, forms, kernels_copy

TEXT = (ROOT / "kernels.py").read_text()


@pytest.fixture
def edits(tmp_path):
    """edits(old, new): what edit_check.py says of kernels.py with a change."""

    def found(old, new):
        assert TEXT.count(old) == 1
        (tmp_path / "kernels.py").write_text(TEXT.replace(old, new))
        return edit_check.edited_definitions(tmp_path / "kernels.py")

    return found


def test_the_copy_is_that_of_kernels():
    assert edit_check.edited_definitions(ROOT / "kernels.py") == {} == forms.edits
    assert forms.loss_in_chunks
    operations = {name.partition(".")[0] for name in forms.FORMS}
    copied = set(edit_check.parsed(edit_check.COPY))
    assert operations | {"gelu", "relu2", "swiglu", "plain_cross_entropy", "cap"} == copied
    assert all(hasattr(kernels, name) and hasattr(kernels_copy, name) for name in copied)


@pytest.mark.parametrize("name", forms.FORMS)
def test_a_form_takes_what_its_definition_takes(name):
    """Otherwise the definition runs everywhere, without a kernel."""
    definition = inspect.unwrap(operator.attrgetter(name)(kernels))
    assert forms.same_parameters(forms.FORMS[name], definition)


BIND = "forms.find_edits(globals())"
OF_CAP = "cap plain_cross_entropy plain_loss cross_entropy"
FREE = {
    "a comment and a line break": (
        'return F.gelu(x, approximate="tanh")  # GPT-2\'s own form',
        "# ours\n    return F.gelu(\n        x, approximate='tanh')",
    ),
    "no docstring": ('    """down(activation(up(x))); x: (..., C) -> (..., C)."""\n', ""),
    "another function": ("# -- the loss\n", "def another(x):\n    return swiglu(x)\n"),
    "no fused form": ("@operation\ndef mlp", "def mlp"),
}
EDITS = {  # (text, another, what is then edited, by the first of which)
    "an expression": ("F.relu(x).square()", "F.relu(x) ** 2", "relu2"),
    "a decorator": ("@operation\ndef mlp", "@torch.compile\n@operation\ndef mlp", "mlp"),
    "a line": ("    first, second = x", "    x = 2 * x\n    first, second = x", "rotated rope"),
    "what others call": ("softcap * torch.tanh(", "softcap * torch.sin(", OF_CAP),
    "a second definition": (BIND, f"def gelu(x):\n    return x\n\n\n{BIND}", "gelu"),
    "an assignment": (BIND, f"mlp = torch.compile(mlp)\n{BIND}", "mlp"),
    "another base": ("class LayerNorm(nn.LayerNorm):", "class LayerNorm(nn.RMSNorm):", "LayerNorm"),
}


@pytest.mark.parametrize("old, new", FREE.values(), ids=FREE)
def test_comments_docstrings_and_line_breaks_are_free(edits, old, new):
    assert edits(old, new) == {}


@pytest.mark.parametrize("old, new, names", EDITS.values(), ids=EDITS)
def test_another_text_is_an_edit_of_all_that_calls_it(edits, old, new, names):
    first = names.split()[0]
    assert edits(old, new) == dict.fromkeys(names.split(), f"kernels.{first} was edited")


def test_a_loss_of_all_tokens_is_not_computed_in_chunks():
    """An edit that divides by the number of tokens differs in parts; one of each token does not."""
    plain = inspect.unwrap(kernels.plain_loss)
    assert chunks.sums_over_chunks(plain)
    assert chunks.sums_over_chunks(lambda *arguments: 2 * plain(*arguments))
    assert chunks.sums_over_chunks(lambda x, *more: plain(F.dropout(x, 0.5), *more))
    assert not chunks.sums_over_chunks(lambda x, *more: plain(x, *more) / len(x))
    assert not chunks.sums_over_chunks(lambda x, *more: plain(x - x.mean(0), *more))
    assert not chunks.sums_over_chunks(lambda x, *more: x.view(3, 5, 7))
