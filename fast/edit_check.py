"""Whether a definition in kernels.py still has the text that its fused forms compute.

That text is in kernels_copy.py. Both files are parsed by the Python that runs, and compared as
syntax trees without docstrings: comments and line breaks are free, another name of a variable is
another text.
"""

import ast
from pathlib import Path

COPY = Path(__file__).with_name("kernels_copy.py")
SCOPES = (ast.FunctionDef, ast.ClassDef)
# of a layer: what makes it and its first values, which fused forms do not compute
FREE_METHODS = ("__init__", "reset_parameters", "extra_repr")


def edited_definitions(path):
    """{name: words} of the definitions that differ in a file from the copy, or call such a one."""
    expected, found = parsed(COPY), parsed(path)
    words = {}
    for name in expected:
        if trees(found.get(name, [])) != trees(expected[name]):
            words[name] = f"{Path(path).stem}.{name} was edited"
    changed = set(words)
    for name in expected.keys() - changed:
        for cause in sorted(called_by(expected[name], expected) & changed):
            words[name] = words[cause]
    return words


def parsed(path):
    """{name: nodes that bind it} of the functions, classes and other names of a file."""
    found = {}
    for node in ast.parse(Path(path).read_text()).body:
        for name in bound_by(node):
            found.setdefault(name, []).append(node)
    return found


def bound_by(node):
    """The names that a statement of a file binds, in whatever part of it."""
    if isinstance(node, SCOPES):
        return [node.name]
    names = []
    for part in ast.walk(node):
        if isinstance(part, SCOPES):
            names.append(part.name)
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            names.append(part.id)
    return names


def trees(nodes):
    """What is compared of the statements that bind a name."""
    return [ast.dump(without_what_is_free(node)) for node in nodes]


def without_what_is_free(node):
    """The node without docstrings, free methods and `operation`, a decorator not in the copy."""
    if isinstance(node, ast.ClassDef):
        node.body = [part for part in node.body if getattr(part, "name", None) not in FREE_METHODS]
    for part in ast.walk(node):
        if isinstance(part, SCOPES):
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
