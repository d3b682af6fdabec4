"""What a file of the project imports, read from its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Import(NamedTuple):
    """One imported name: ``import module``, or ``from module import name``."""

    module: str
    name: str | None
    line: int
    is_first: bool
    """It is a statement of the file itself: in no function and no block."""
    is_late: bool
    """It is in a function: imported when that is called."""

    @property
    def path(self) -> str:
        return self.module if self.name is None else f"{self.module}.{self.name}"


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(path: Path) -> Iterator[Import]:
    """Every import of a file but relative ones, wherever it is."""
    tree = tree_of(path)
    todo: list[tuple[ast.AST, bool]] = [(tree, False)]
    while todo:
        node, is_late = todo.pop()
        is_late = is_late or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        todo += [(child, is_late) for child in ast.iter_child_nodes(node)]
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, None, node.lineno, node in tree.body, is_late)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            for alias in node.names:
                yield Import(node.module, alias.name, node.lineno, node in tree.body, is_late)
