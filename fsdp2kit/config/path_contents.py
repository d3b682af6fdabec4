"""What lies at a path, for keys that want something else there: each error names the right key."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

from fsdp2kit.errors import UserError, nearest
from fsdp2kit.files.local import read_json_object
from fsdp2kit.files.remote import is_url

Contents = Literal["model", "adapter", "checkpoint", "run", "weights", "gguf", "rows"]

_NAMES: dict[Contents, str] = {
    "model": "a Hugging Face model directory",
    "adapter": "an adapter without its model",
    "checkpoint": "a distributed checkpoint",
    "run": "a run directory",
    "weights": "a file of weights",
    "gguf": "GGUF",
    "rows": "a data file",
}
_SUFFIXES: dict[str, Contents] = {
    **dict.fromkeys((".safetensors", ".bin", ".pt", ".pth", ".ckpt"), "weights"),
    ".gguf": "gguf",
    **dict.fromkeys((".jsonl", ".ndjson", ".parquet", ".csv", ".tsv", ".arrow"), "rows"),
}
INSTEAD_OF_ROWS = "set data.path to it"
"""What to do about a data file under another key."""
INSTEAD_OF_MODEL: dict[Contents, str] = {
    "weights": "give the directory that holds config.json and the safetensors",
    "gguf": "GGUF is not read: give the directory of the original, with config.json and safetensors",
    "adapter": "give it as model.adapter, and its model as model.path",
    "rows": INSTEAD_OF_ROWS,
}
"""What to do about what is no model, under a key of a model."""


def check_contents(key: str, path: str | None, instead: Mapping[Contents, str]) -> None:
    """Refuse a path whose contents are of another kind than its key wants; URLs and what does not exist pass.

    Args:
        key: the TOML key that the path was given for.
        path: None: the key is not given.
        instead: what to do about each kind that is wrong there; ``{path}`` in it stands for the path.
    """
    if not path or is_url(path):
        return
    found = contents_of(Path(path))
    if found is not None and found in instead:
        raise UserError(key, f"{path} is {_NAMES[found]}", instead[found].format(path=path))


def check_exists(key: str, path: str, *, words: Collection[str]) -> None:
    """Refuse a path of a checkpoint where nothing is; ``words`` are what the key accepts instead of a path."""
    if path in words or is_url(path) or os.path.exists(path):  # noqa: PTH110 (as below)
        return
    meant = nearest(Path(path).name.lower(), words)
    offered = " or ".join(f'"{word}"' for word in ([meant] if meant else words))
    todo = f"write {offered}" if meant else f"give the path of a checkpoint, or {offered}"
    raise UserError(key, f"{path}: no such directory", todo)


def contents_of(path: Path) -> Contents | None:
    """What lies at a path; None for anything else, for nothing, and for what cannot be read."""
    if os.path.isfile(path):  # noqa: PTH113 (pathlib's raises where a folder may not be read)
        return _SUFFIXES.get(path.suffix.lower())
    try:
        names = {entry.name for entry in path.iterdir()}
    except OSError:
        return None
    if ".metadata" in names:
        return "checkpoint"
    if {"config.toml", "metrics.jsonl"} <= names:
        return "run"
    if "config.json" in names and _is_hf_config(path / "config.json"):
        return "model"
    if "adapter_config.json" in names:
        return "adapter"
    found = {_SUFFIXES.get(Path(name).suffix.lower()) for name in names}
    return "gguf" if "gguf" in found and "rows" not in found else None


def _is_hf_config(path: Path) -> bool:
    try:
        return "model_type" in read_json_object(path)
    except (OSError, ValueError):
        return False
