"""Digests of the source files that a function of the user's comes from, and of those that these import."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

_LIBRARIES = {"site-packages", "dist-packages"}


def code_digests(function: str) -> dict[str, str]:
    """Digest of each source file, by its path below the folder that the function is imported from.

    Imports are read from the source, also those within functions; nothing is imported. Files elsewhere, such as
    installed libraries, are left out. If the function itself is installed, only its own package counts.

    Args:
        function: ``path.py:name`` or ``module:name``.
    """
    where = function.rpartition(":")[0]
    if where.endswith(".py"):
        root = Path(where).parent
        package = None
        todo = [Path(where)]
    else:
        name = where.split(".")
        root = _folder_of(name[0])
        if root is None:  # built into the interpreter
            return {}
        is_library = bool(_LIBRARIES & {*root.parts}) or root == Path(sysconfig.get_path("stdlib"))
        package = name[0] if is_library else None
        todo = _files_of(root, name)
    found: dict[str, str] = {}
    while todo:
        file = todo.pop()
        relative = file.relative_to(root)
        if str(relative) in found:
            continue
        source = file.read_bytes()
        found[str(relative)] = hashlib.blake2b(source, digest_size=8).hexdigest()
        for name in _imported(source, relative.parent.parts):
            if package in (None, name[0]):
                todo += _files_of(root, name)
    return dict(sorted(found.items()))


def _folder_of(module: str) -> Path | None:
    """The folder that a top-level module or package is imported from, as the function's process does."""
    spec: ModuleSpec | None = PathFinder.find_spec(module, [str(Path.cwd()), *sys.path])
    if spec is None:
        try:
            spec = importlib.util.find_spec(module)
        except ValueError:  # loaded without a specification
            return None
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).parent
    return Path(spec.origin).parent if spec is not None and spec.has_location and spec.origin else None


def _files_of(root: Path, name: Sequence[str]) -> list[Path]:
    """The files below ``root`` that importing ``a.b.c`` runs."""
    folders = [root.joinpath(*name[:count]) for count in range(1, len(name) + 1)]
    candidates = [file for folder in folders for file in (folder / "__init__.py", folder.with_suffix(".py"))]
    return [file for file in candidates if file.is_file()]


def _imported(source: bytes, package: Sequence[str]) -> Iterator[list[str]]:
    """The modules that a file of ``package`` may import. ``b`` of ``from a import b`` may be a module, too."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a file that another one imports under a condition
        return
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        todo += node.orelse if for_types else ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = list(package[: max(0, len(package) - node.level + 1)]) if node.level else []
            module = above + (node.module.split(".") if node.module else [])
            yield from (module + alias.name.split(".") for alias in node.names)
