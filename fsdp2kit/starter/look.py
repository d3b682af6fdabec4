"""Looks at a model and at data, without network and weights, for what a first TOML should say."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fsdp2kit.config.schema import ModelConfig
from fsdp2kit.config.section import may_be_hub_id
from fsdp2kit.errors import UserError
from fsdp2kit.files.remote import is_url
from fsdp2kit.model.hf_config import load_hf_config
from fsdp2kit.model.inspect import value_of
from fsdp2kit.model.tokenizer import build_tokenizer
from fsdp2kit.starter.draft import Facts
from fsdp2kit.starter.rows import DataFacts, guess_format, measure, needs_template, read_first


def look(
    schema: Any, kind: str, out: Path, *, model: str | None, data: str | None, teacher: str | None = None
) -> Facts:
    """What is known of the model and the data.

    Args:
        schema: the recipe's ``Config``.
        kind: a key of `KINDS`.
        out: the TOML, which relative paths are written relative to.
        model, data, teacher: as the user named them; None: not given.

    Raises:
        UserError: there is no such model or data, or the recipe cannot read the rows.
    """
    section = ModelConfig(path=_found(model, "--model")) if model else ModelConfig()
    tokenizer = None
    context = None
    is_here = False
    if section.path is not None and (Path(section.path).is_dir() or _is_cached(section)):
        tokenizer = build_tokenizer(section, local_files_only=True)
        text_config = load_hf_config(section, local_files_only=True).get_text_config()
        context = value_of(text_config, "max_position_embeddings")
        is_here = True
    rows = None
    template = None
    if data:
        rows, template = _rows(schema, _found(data, "--data"), section, tokenizer)
    return Facts(
        kind,
        model=_written(model, out),
        data=_written(data, out),
        teacher=_written(_found(teacher, "--teacher") if teacher else None, out),
        run_dir=f"runs/{out.stem}",
        rows=rows,
        chat_template=template,
        context=context,
        is_here=is_here,
    )


def _rows(schema: Any, path: str, model: ModelConfig, tokenizer: Any) -> tuple[DataFacts | None, str | None]:
    """What the rows are, and the ready template that they need; None for rows that are not on this machine."""
    default = schema.model_fields["data"].default
    data = type(default)(path=path)
    read = read_first(data)
    if read is None:
        return None, None
    first, count = read
    guess = guess_format([row.parse() for row in first], default.format, where=f"--data {path}")
    data = type(default).model_validate({"path": path, "format": guess.format, "columns": guess.columns})
    template = None
    if needs_template(guess, model, tokenizer):
        template = "chatml"
        tokenizer = build_tokenizer(model.model_copy(update={"chat_template": template}), local_files_only=True)
    return measure(first, count, guess, data, tokenizer), template


def _found(path: str, flag: str) -> str:
    """The path, expanded and absolute if it exists; a hub id or a URL as it stands."""
    local = Path(path).expanduser()
    if local.exists():
        return str(local.absolute())
    if is_url(path) or "*" in path or may_be_hub_id(path):
        return path
    raise UserError(flag, f"{path}: no such file or folder", "check the path, or give a hub id")


def _is_cached(section: ModelConfig) -> bool:
    """Whether a hub id's config and tokenizer are in the hub's cache."""
    try:
        load_hf_config(section, local_files_only=True)
        build_tokenizer(section, local_files_only=True)
    except UserError:
        return False
    return True


def _written(path: str | None, out: Path) -> str | None:
    """A path as the TOML says it: relative to the TOML if it lies below its folder, else absolute."""
    if path is None or not (local := Path(path).expanduser()).exists():
        return path
    relative = os.path.relpath(local.absolute(), out.absolute().parent)
    return str(local.absolute()) if relative.startswith("..") else f"./{relative}" if "/" not in relative else relative
