"""No loop of a kernel takes two names of one value for the same: Triton would carry only one of them.

Its frontend visits the body of a loop once to see which names it gives another value. After `a = b`, a body
that says `a = b` again and only then changes `b` seems to leave `a` as it was.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import anymla

KERNELS = sorted((Path(anymla.__file__).parent / "backends" / "triton_mla").glob("*.py"))


def mistakable(source: str) -> list[str]:
    """Copies in loops that change what is copied, of names that may have one value before."""
    found = []
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    for function in functions:
        for loop in (node for node in ast.walk(function) if isinstance(node, ast.For | ast.While)):
            changed = {name.id for name in ast.walk(loop) if is_stored(name)}
            before = [pair for line, pair in copies(function) if line < loop.lineno]
            for line, (name, other) in copies(loop):
                if {name, other} <= changed and other in alike(name, before):
                    found.append(f"{line}: {name} = {other}")
    return found


def copies(tree: ast.AST) -> Iterator[tuple[int, tuple[str, str]]]:
    """Lines and names that are given what another name is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for value in (*node.targets[1:], node.value):
                yield from ((node.lineno, pair) for pair in pairs(node.targets[0], value))


def pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, str]]:
    if isinstance(value, ast.IfExp):
        yield from pairs(target, value.body)
        yield from pairs(target, value.orelse)
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, other in zip(target.elts, value.elts, strict=True):
            yield from pairs(one, other)
    elif isinstance(target, ast.Name) and isinstance(value, ast.Name):
        yield target.id, value.id


def alike(name: str, known: list[tuple[str, str]]) -> set[str]:
    """All names that copies tie to this one."""
    found, more = set(), {name}
    while more:
        found |= more
        more = {other for pair in known if found & set(pair) for other in pair} - found
    return found


def is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_no_loop_takes_two_names_of_one_value_for_the_same(path):
    assert mistakable(path.read_text()) == []


@pytest.mark.parametrize(
    "before",
    [
        "middle = low",
        "low = middle",
        "low = middle = 0 + x",
        "low, middle = x, x",
        "low = x if C else middle",
    ],
)
def test_it_would_be_found(before):
    loop = "while x:\n  if y:\n   low = middle\n  middle = low + 1"
    assert mistakable(f"def f(x):\n {before}\n {loop}") == ["5: low = middle"]


def test_copies_of_values_apart_are_none_of_it():
    loop = "while x:\n  low = middle\n  middle = low + 1"
    assert mistakable(f"def f(x):\n middle = low + 0\n {loop}") == []
    assert mistakable("def f(x):\n high = low\n while x:\n  high = low\n  x = high + 1") == []
