"""Directories beside their final place that are written and then moved there, under names that nobody else has.

A name has a random part and its directory is made exclusively. A directory that holds our record is ours, so what a
killed process left is recognised and deleted; nothing else ever is.
"""

from __future__ import annotations

import re
import secrets
import shutil
from pathlib import Path

from fsdp2kit.files.local import replace_file

RECORD = ".fsdp2kit-export.json"
PARTIAL, OLD = "partial", "old"


def make_beside(place: Path, kind: str) -> Path:
    """A new empty directory beside ``place``; its name ends in ``kind``."""
    place.parent.mkdir(parents=True, exist_ok=True)
    while True:
        path = place.with_name(f".{place.name}.fsdp2kit-{secrets.token_hex(4)}.{kind}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            continue


def mark(directory: Path) -> None:
    """Say that a directory is ours to delete, before anything else is written to it."""
    replace_file(directory / RECORD, '{"files": []}\n')


def clear_beside(place: Path, kind: str) -> None:
    """Delete the directories of this kind that earlier processes made for ``place`` and left there."""
    pattern = re.compile(rf"\.{re.escape(place.name)}\.fsdp2kit-[0-9a-f]{{8}}\.{kind}")
    for path in sorted(place.parent.iterdir()) if place.parent.is_dir() else ():
        if not pattern.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
            continue
        if (path / RECORD).is_file() or not any(path.iterdir()):  # one killed before it was marked is empty
            shutil.rmtree(path, ignore_errors=True)
