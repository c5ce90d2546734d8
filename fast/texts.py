"""Whether a definition in kernels.py still has the text that its fused forms compute.

That text is in definitions.py, a copy. Both files are parsed by the Python that runs, and compared
as syntax trees without docstrings: comments and line breaks are free, another name of a variable is
another text.
"""

import ast
from pathlib import Path

DEFINITIONS = Path(__file__).with_name("definitions.py")
# of a layer: what makes it and its first values, which fused forms do not compute
FREE_METHODS = ("__init__", "reset_parameters", "extra_repr")


def edits(path):
    """{name: words} of the definitions that differ in a file from the copy,
    or call one that does.
    """
    expected, found = parsed(DEFINITIONS), parsed(path)
    changed = {name for name in expected if trees(found.get(name)) != trees(expected[name])}
    words = {name: f"{Path(path).stem}.{name} was edited" for name in expected if name in changed}
    for name in expected:
        called = called_by(expected[name], expected)
        cause = next((other for other in called if other in changed), None)
        if cause and name not in changed:
            words[name] = words[cause]
    return words


def parsed(path):
    """{name: nodes that bind it} of a file's functions,
    classes and other names at the top level.
    """
    found = {}
    for node in ast.parse(Path(path).read_text()).body:
        for name in bound_by(node):
            found.setdefault(name, []).append(node)
    return found


def bound_by(node):
    """The names that a statement of a file binds, in whatever part of it."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    names = [
        n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    ]
    within = (ast.FunctionDef, ast.ClassDef)
    return [*names, *(n.name for n in ast.walk(node) if isinstance(n, within))]


def trees(nodes):
    """What is compared of the statements that bind a name; None where there are none."""
    return nodes and [ast.dump(without_words(node)) for node in nodes]


def without_words(node):
    """The node without docstrings, free methods and the decorator `operation`,
    which is not in the copy.
    """
    if isinstance(node, ast.ClassDef):
        node.body = [part for part in node.body if getattr(part, "name", None) not in FREE_METHODS]
    for part in ast.walk(node):
        if isinstance(part, (ast.FunctionDef, ast.ClassDef)):
            if ast.get_docstring(part, clean=False) is not None:
                part.body = part.body[1:]
            part.decorator_list = [d for d in part.decorator_list if ast.unparse(d) != "operation"]
    return node


def called_by(nodes, definitions):
    """The definitions that a definition calls, and those that they call."""
    found, unseen = set(), list(nodes)
    while unseen:
        for node in ast.walk(unseen.pop()):
            if isinstance(node, ast.Name) and node.id in definitions and node.id not in found:
                found.add(node.id)
                unseen += definitions[node.id]
    return found
