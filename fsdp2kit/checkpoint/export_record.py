"""The directory of a Hugging Face export: what is copied into it, and which of its files an export may replace."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fsdp2kit.checkpoint.adapter import RECORD
from fsdp2kit.errors import UserError
from fsdp2kit.files import replace_file

ASSET_SUFFIXES = {".json", ".jinja", ".txt", ".model", ".tiktoken", ".py"}


def copy_assets(source: Path, target: Path) -> None:
    """Copy everything but weights, their index and hidden files from one directory into another."""
    for path in [*source.iterdir(), *source.glob("additional_chat_templates/*")]:
        is_asset = path.suffix in ASSET_SUFFIXES and not path.name.endswith(".index.json")
        if path.is_file() and is_asset and not path.name.startswith("."):
            copy = target / path.relative_to(source)
            copy.parent.mkdir(exist_ok=True, parents=True)
            shutil.copyfile(path, copy)


def check_replaceable(out: Path, *, read: Iterable[Path | None] = ()) -> None:
    """Check that ``out`` is absent, empty, or holds nothing but an earlier export of ours, and none of ``read``.

    Raises:
        UserError: it holds something else; the error names it. Or what is exported is made from it.
    """
    if not out.exists():
        return
    todo = "choose another directory, or move that away"
    if any(path is not None and path.resolve() == out.resolve() for path in read):
        raise UserError(str(out), "is read here, and the export would replace it", "choose another directory")
    if not out.is_dir():
        raise UserError(str(out), "is not a directory", todo)
    present = {path.relative_to(out).as_posix() for path in out.rglob("*") if not path.is_dir()}
    if others := sorted(present - {RECORD} - recorded_files(out)):
        raise UserError(str(out), f"holds {others[0]}, which no export of fsdp2kit wrote there", todo)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace a file by a JSON object."""
    replace_file(path, json.dumps(value, indent=2) + "\n")


def write_record(directory: Path, files: Iterable[str], facts: dict[str, Any]) -> None:
    """Note in an export's directory which files are ours, and what they were made from."""
    write_json(directory / RECORD, {**facts, "files": sorted(files)})


def read_record(out: Path) -> dict[str, Any]:
    """The record of an export; empty where there is none that can be read."""
    try:
        record = json.loads((out / RECORD).read_text(encoding="utf-8"))
        return record if isinstance(record["files"], list) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def recorded_files(out: Path) -> set[str]:
    """The files that exports of ours wrote to ``out``, or were about to."""
    return set(read_record(out).get("files", []))
