"""What identifies a run's inputs beside its TOML (rows, code), so that a later start can name what has changed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp2kit.config.schema import DataConfig
from fsdp2kit.data.sources import locate
from fsdp2kit.files.remote import is_url

_NAMED = 3  # files in a message
_RECORDED = 1000  # files in a manifest


@dataclass(frozen=True)
class Content:
    """What identifies a set of rows, or a function's source files."""

    digest: str
    """It changes with any part of the content."""
    rows: int | None = None
    """The number of rows; None for code."""
    files: Mapping[str, str] = field(default_factory=dict)
    """For each file its size or digest; empty without files on this machine."""
    otherwise: str = "with other tokens"
    """What to say if the digest has changed but neither files nor rows have."""


def content_of(section: DataConfig, key: str, *, rows: int, digest: str) -> Content:
    """The content of a set of rows that was read.

    Args:
        section: its `path`, `split` and `limit` are read.
        key: the set's TOML key.
        digest: of the rows as they are trained or evaluated on.
    """
    if section.path is None or is_url(section.path) or not (files := locate(section, key).files):
        return Content(digest, rows)
    folder = os.path.commonpath([Path(file).parent for file in files])
    try:
        sizes = {str(Path(file).relative_to(folder)): Path(file).stat().st_size for file in files}
    except OSError:  # a file was deleted after it was read
        return Content(digest, rows)
    if len(sizes) > _RECORDED:
        return Content(digest, rows, {f"one of {len(sizes)} files": f"{sum(sizes.values())} bytes"})
    return Content(digest, rows, {name: f"{size} bytes" for name, size in sizes.items()})


def stream_content(section: DataConfig) -> Content:
    """The content of a stream, which is identified by where its rows are."""
    name = f" {section.name}" if section.name else ""
    where = f"{section.path} {section.split} {section.limit}{name}"
    return Content(where, files={str(section.path): section.split})


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between the contents of two starts: a text for each TOML key that both have.

    Args:
        before, now: the fields of a `Content`, by TOML key.
    """
    found = []
    for key in (key for key in now if key in before and before[key] != now[key]):
        one = before[key]
        other = now[key]
        parts = _of_files(one["files"], other["files"])
        if one["rows"] != other["rows"]:
            parts.append(f"{one['rows']} → {other['rows']} rows")
        elif other["rows"] is not None:
            parts.append(f"{other['rows']} rows as before, {other['otherwise']}")
        found.append(f"{key} ({', '.join(parts) or other['otherwise']})")
    return found


def _of_files(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    states = {
        name: "is new" if name not in before else "is gone" if name not in now else "changed"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
    }
    named = [f"{name} {state}" for name, state in list(states.items())[:_NAMED]]
    return named + ([f"and {len(states) - _NAMED} more files"] if len(states) > _NAMED else [])
