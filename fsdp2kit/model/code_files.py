"""The code that a model directory's JSON files name for ``trust_remote_code``. It is found and copied, never run."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from fsdp2kit.files.local import read_json

CODED = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
"""The files that may name code, by ``auto_map`` or ``custom_pipelines``."""
_GENERATE = PurePosixPath("custom_generate/generate.py")
_NAME = re.compile(r"[\w-]+")


def code_files(directory: Path, names: Collection[str] = CODED) -> tuple[list[PurePosixPath], list[PurePosixPath]]:
    """The modules that files of a directory name, with all that they import relatively, as paths relative to it.

    Modules of another repository (``repo--module.Class``) are none of them.

    Args:
        names: of the JSON files.

    Returns:
        Those that are there, and those that are named and are not there.
    """
    missing: list[PurePosixPath] = []
    found: dict[PurePosixPath, None] = {}
    waiting = [module for name in names for module in _named_in(directory / name)]
    if "config.json" in names and (directory / _GENERATE).is_file():
        waiting.append(_GENERATE)
    while waiting:
        path = waiting.pop()
        if path in found or path in missing:
            continue
        if not (directory / path).is_file():
            missing.append(path)
            continue
        found[path] = None
        packages = [parent / "__init__.py" for parent in path.parents[:-1]]
        waiting += [file for file in packages if (directory / file).is_file()]
        waiting += _imported_by(directory, path)
    return sorted(found), sorted(missing)


def _named_in(path: Path) -> Iterator[PurePosixPath]:
    """The modules that a JSON file names."""
    try:
        fields = read_json(path)
    except (OSError, ValueError):
        return  # who reads the file for itself reports that
    if not isinstance(fields, dict):
        return
    pipelines = fields.get("custom_pipelines")
    values = [fields.get("auto_map")]
    for pipeline in pipelines.values() if isinstance(pipelines, dict) else ():
        values.append(pipeline.get("impl") if isinstance(pipeline, dict) else None)
    for reference in _strings(values):
        parts = reference.split(".")[:-1]
        if parts and "--" not in reference and all(_NAME.fullmatch(part) for part in parts):
            yield PurePosixPath(*parts).with_suffix(".py")


def _strings(value: Any) -> Iterator[str]:
    """All strings in lists and in values of maps."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _strings(list(value.values()))
    elif isinstance(value, list):
        for one in value:
            yield from _strings(one)


def _imported_by(directory: Path, path: PurePosixPath) -> Iterator[PurePosixPath]:
    """The files that a module imports relatively and that are in the directory; of a name, its module or package."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in its strings, say
            tree = ast.parse((directory / path).read_bytes())
    except (SyntaxError, ValueError):
        return  # Python cannot run it either
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.level == 0:
            continue
        if node.level > len(path.parents):  # beyond the directory
            continue
        base = path.parents[node.level - 1]
        if node.module:
            base = base.joinpath(*node.module.split("."))
            files = _files_of(base)
            yield from [file for file in files if (directory / file).is_file()] or files[:1]
        for alias in node.names:  # a module of a package, or a name in one
            yield from (file for file in _files_of(base / alias.name) if (directory / file).is_file())


def _files_of(module: PurePosixPath) -> list[PurePosixPath]:
    return [module.with_suffix(".py"), module / "__init__.py"]
