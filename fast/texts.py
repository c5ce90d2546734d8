"""Which texts the fused forms compute: a digest of the syntax of each definition in kernels.py.

    python -m fast.texts        prints those of kernels.py as it stands, and which were edited

Comments, docstrings and line breaks are free. A definition with another digest was edited, and runs
as it stands, like what calls it. Where its fused form computes the new text as well, write the new
digest here: tests/test_fast.py compares each form with the text.
"""

import ast
import hashlib
from pathlib import Path

KERNELS = Path(__file__).parent.parent / "kernels.py"
COMPUTED = {  # what a definition calls stands before it
    "Linear": "5f692a2c332b",
    "qkv": "a6308efb6ae2",
    "gelu": "9b9a0504d982",
    "relu2": "12b6bdaf7a05",
    "swiglu": "8d50424442d3",
    "mlp": "fe5b52606eeb",
    "LayerNorm": "0c6e8c86d3a0",
    "RMSNorm": "36ae659c5947",
    "rotated": "cadb4f72ecf3",
    "rope": "e50f64afb61f",
    "attention": "9c024dbac96c",
    "plain_cross_entropy": "d785f572a8ee",
    "cross_entropy": "54390ad63f3a",
}


def edited(path=KERNELS):
    """{name: words} of a file's definitions that differ from COMPUTED, or call one that does."""
    found = definitions(path)
    words = {}
    for name, computed in COMPUTED.items():
        text = found[name]
        changed = [words[other] for other in words if repr(other) in text]
        if digest(text) != computed:
            words[name] = f"kernels.{name} was edited"
        elif changed:
            words[name] = changed[0]
    return words


def definitions(path):
    """{name: its syntax} of the functions and classes of a file, "" of one that it lacks.

    Any other statement that mentions one is part of it, such as `mlp = torch.compile(mlp)`.
    """
    found = dict.fromkeys(COMPUTED, "")
    for node in ast.parse(Path(path).read_text()).body:
        text = syntax(node)
        own = getattr(node, "name", None)
        for name in COMPUTED:
            if name == own or own is None and repr(name) in text:
                found[name] += text
    return found


def syntax(part):
    """A part of a syntax tree as text, but for statements that are a string alone.

    ast.dump and ast.unparse give other texts in other versions of Python.
    """
    if isinstance(part, list):
        return "".join(map(syntax, part))
    if not isinstance(part, ast.AST):
        return repr(part)
    if isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant):
        return ""
    fields = [f"{name}={syntax(value)}" for name, value in ast.iter_fields(part) if value != []]
    return f"{type(part).__name__}({' '.join(fields)})"


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def main():
    found = definitions(KERNELS)
    words = edited()
    for name in COMPUTED:
        print(f"{name:20} {digest(found[name])}  {words.get(name, '')}")


if __name__ == "__main__":
    main()
