"""Paths given under the wrong key: each error names the right one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.errors import UserError, nearest
from fsdp2kit.files.local import read_json_object

Kind = Literal["model", "adapter", "checkpoint", "run", "weights", "gguf", "rows"]

_NAMES: dict[Kind, str] = {
    "model": "a Hugging Face model directory",
    "adapter": "an adapter without its model",
    "checkpoint": "a distributed checkpoint",
    "run": "a run directory",
    "weights": "a file of weights",
    "gguf": "GGUF",
    "rows": "a data file",
}
_SUFFIXES: dict[str, Kind] = {
    **dict.fromkeys((".safetensors", ".bin", ".pt", ".pth", ".ckpt"), "weights"),
    ".gguf": "gguf",
    **dict.fromkeys((".jsonl", ".ndjson", ".parquet", ".csv", ".tsv", ".arrow"), "rows"),
}
_ROWS, _ROWS_HERE = "set data.path to it", "give rows here (JSONL, parquet, …)"
_NO_MODEL: dict[Kind, str] = {
    "weights": "give the directory that holds config.json and the safetensors",
    "gguf": "GGUF is not read: give the directory of the original, with config.json and safetensors",
    "adapter": "give it as model.adapter, and its model as model.path",
    "rows": _ROWS,
}

# What to do about what lies at a path, by the key that the path was given for; "models": keys of `Section.models`.
_INSTEAD: dict[str, dict[Kind, str]] = {
    "model.path": {
        **_NO_MODEL,
        "checkpoint": "set model.weights = '{path}' and model.path = '{path}/hf', or convert it: fsdp2kit convert",
        "run": "give its export, model.path = '{path}/hf', or model.weights = one of '{path}/checkpoints/'",
    },
    "model.weights": {
        **_NO_MODEL,
        "model": "set model.path to it, and leave model.weights out",
        "run": "give one of its checkpoints, in '{path}/checkpoints/'",
        "weights": "convert it first: fsdp2kit convert '{path}' OUT --config HF_DIR",
        "gguf": "GGUF is not read: set model.path to the directory of the original",
    },
    "model.tokenizer": {"checkpoint": "give '{path}/hf'", "run": "give '{path}/hf'", "rows": _ROWS},
    "model.adapter": {
        "checkpoint": "give the export of a run with [lora], or make one: fsdp2kit convert",
        "run": "give its export, '{path}/hf'",
        "weights": "give the directory that holds adapter_config.json",
        "gguf": "give the directory that holds adapter_config.json",
        "rows": _ROWS,
    },
    "run.resume": {
        "model": "set model.path to it: a run resumes from a checkpoint of its own",
        "run": "give one of its checkpoints, in '{path}/checkpoints/', or run.dir = '{path}'",
        "weights": "a run resumes from a checkpoint of its own; set model.path or model.weights",
    },
    "models": {
        **_NO_MODEL,
        "checkpoint": "give '{path}/hf', or convert it: fsdp2kit convert",
        "run": "give its export, '{path}/hf'",
        "adapter": "merge it into its model first: fsdp2kit convert --merge",
    },
    "data": {
        "model": f"set model.path to it, and {_ROWS_HERE}",
        "adapter": _ROWS_HERE,
        "checkpoint": f"set model.weights to it, and {_ROWS_HERE}",
        "run": _ROWS_HERE,
        "weights": f"set model.path to its directory, and {_ROWS_HERE}",
        "gguf": _ROWS_HERE,
    },
}
# Words that keys of checkpoints accept instead of a path.
_WORDS = {"model.weights": ("pretrained", "random"), "run.resume": ("auto", "never")}


def check_paths(config: TrainingConfig) -> None:
    """Refuse a path whose contents are of another kind than its key wants, and a checkpoint that does not exist."""
    for key, text, wanted in _paths_of(config):
        instead = _INSTEAD[wanted]
        if text and "://" not in text and (kind := kind_of(Path(text))) in instead:
            raise UserError(key, f"{text} is {_NAMES[kind]}", instead[kind].format(path=text))
    if os.path.isfile(config.run.dir):  # noqa: PTH113 (as below)
        raise UserError("run.dir", f"{config.run.dir} is a file", "name a directory, which need not be there yet")
    if "://" in config.run.dir:
        todo = "name a directory, and set checkpoint.dir and checkpoint.export_dir to the URL"
        raise UserError("run.dir", f"{config.run.dir} is a URL, and a run directory lies on a disk", todo)
    for key, text in (("model.weights", config.model.weights), ("run.resume", config.run.resume)):
        if text in _WORDS[key] or "://" in text or os.path.exists(text):  # noqa: PTH110 (as below)
            continue
        meant = nearest(Path(text).name.lower(), _WORDS[key])
        words = " or ".join(f'"{word}"' for word in ([meant] if meant else _WORDS[key]))
        todo = f"write {words}" if meant else f"give the path of a checkpoint, or {words}"
        raise UserError(key, f"{text}: no such directory", todo)


def kind_of(path: Path) -> Kind | None:
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
    kinds = {_SUFFIXES.get(Path(name).suffix.lower()) for name in names}
    return "gguf" if "gguf" in kinds and "rows" not in kinds else None


def _paths_of(config: TrainingConfig) -> Iterator[tuple[str, str | None, str]]:
    """Each path's key, the path, and its entry in `_INSTEAD`."""
    model, data, evaluation = config.model, config.data, config.eval
    for key in ("model.path", "model.weights", "model.tokenizer", "model.adapter"):
        yield key, getattr(model, key.removeprefix("model.")), key
    yield from ((key, path, "models") for key, path in config.models().items())
    yield "run.resume", config.run.resume, "run.resume"
    yield from (("data.path", data.path, "data"), ("eval.path", evaluation.path, "data"))
    yield from ((f"data.sources.{at}.path", part.path, "data") for at, part in enumerate(data.sources))
    yield from ((f"eval.sets.{name}.path", part.path, "data") for name, part in evaluation.sets.items())


def _is_hf_config(path: Path) -> bool:
    try:
        return "model_type" in read_json_object(path)
    except (OSError, ValueError):
        return False
