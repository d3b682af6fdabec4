"""What a Hugging Face directory holds beside weights: config, tokenizer, chat templates, the repository's code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from fsdp2kit.checkpoint.files import write_json

SUFFIXES = {".json", ".jinja", ".txt", ".model", ".tiktoken", ".py"}
CHAT_TEMPLATES = "additional_chat_templates"


def copy_assets(source: Path, target: Path) -> None:
    """Copy everything but weights, their index and hidden files from one directory into another."""
    for path in [*source.iterdir(), *source.glob(f"{CHAT_TEMPLATES}/*")]:
        is_asset = path.suffix in SUFFIXES and not path.name.endswith(".index.json")
        if path.is_file() and is_asset and not path.name.startswith("."):
            copy = target / path.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)


def describe_weights(path: Path, *, dtype: str, architecture: str | None) -> None:
    """Make a ``config.json`` say in which dtype the weights are, and of which class the model is if it does not."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)  # what transformers 4 called it
    config["dtype"] = dtype
    if architecture is not None:  # a config that never was a model's lacks it
        config.setdefault("architectures", [architecture])
    for part in config.values():  # a model of several parts has configs within its config
        if isinstance(part, dict) and "model_type" in part:
            part.pop("torch_dtype", None)
            part["dtype"] = dtype
    write_json(path, config)
