"""Which texts the fused forms compute: a digest of each definition in kernels.py, as tokens.

    python -m fast.texts        prints those of kernels.py as it stands, and which were edited

Comments, docstrings and line breaks are free. A definition with another digest was edited, and runs
as it stands, like what calls it. Where its fused form computes the new text as well, write the new
digest here: tests/test_fast.py compares each form with the text.
"""

import ast
import hashlib
import tokenize
from pathlib import Path

KERNELS = Path(__file__).parent.parent / "kernels.py"
COMPUTED = {  # what a definition calls stands before it
    "Linear": "92d73d923918",
    "qkv": "59c6ed052d8c",
    "gelu": "1ba5c190d886",
    "relu2": "ec06fb4e2231",
    "swiglu": "fc0b36a78ada",
    "mlp": "b24dd55e2ee1",
    "LayerNorm": "804917141241",
    "RMSNorm": "f2f9c81b2643",
    "rotated": "87ef47141be5",
    "rope": "cae5510b9831",
    "attention": "e3c3229e46d5",
    "plain_cross_entropy": "0a0961cadf38",
    "cross_entropy": "11987bc930aa",
}


def edited(path=KERNELS):
    """{name: words} of a file's definitions that differ from COMPUTED, or call one that does."""
    found = definitions(path)
    words = {}
    for name, computed in COMPUTED.items():
        tokens = found.get(name, [])
        changed = [words[other] for other in tokens if other in words]
        if digest(tokens) != computed:
            words[name] = f"kernels.{name} was edited"
        elif changed:
            words[name] = changed[0]
    return words


def definitions(path):
    """{name: its tokens} of the functions and classes of a file.

    Any other statement that mentions one is part of it, such as `mlp = torch.compile(mlp)`.
    """
    text = Path(path).read_text()
    lines = text.splitlines(keepends=True)
    found = {}
    for node in ast.parse(text).body:
        decorators = getattr(node, "decorator_list", [])
        first = min(part.lineno for part in (node, *decorators))
        tokens = tokens_of(lines[first - 1 : node.end_lineno])
        names = {node.name} if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else set(tokens)
        for name in names:
            found.setdefault(name, []).extend(tokens)
    return found


def tokens_of(lines):
    """The tokens of whole statements, but for comments and strings that stand alone."""
    found = []
    statement = []
    for token in tokenize.generate_tokens(iter([*lines, ""]).__next__):
        if token.type in (tokenize.INDENT, tokenize.DEDENT):
            found.append(tokenize.tok_name[token.type])
        elif token.type == tokenize.NEWLINE:
            if len(statement) > 1 or not statement[0].endswith(('"', "'")):
                found += [*statement, "NEWLINE"]
            statement = []
        elif token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER):
            statement.append(token.string)
    return found


def digest(tokens):
    return hashlib.sha256(" ".join(tokens).encode()).hexdigest()[:12]


def main():
    found = definitions(KERNELS)
    words = edited()
    for name in COMPUTED:
        print(f"{name:20} {digest(found.get(name, []))}  {words.get(name, '')}")


if __name__ == "__main__":
    main()
