"""A config's paths, found by the types of their fields, so that sections of any recipe are covered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BeforeValidator

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.config.section import InputPath, LocalPath, OutputPath, Section, TemplatePath
from fsdp2kit.config.sections.checkpoint import EXPORT
from fsdp2kit.files.remote import is_url, path_on_disk


def _marks(*types: Any) -> tuple[BeforeValidator, ...]:
    return tuple(mark for one in types for mark in get_args(one) if isinstance(mark, BeforeValidator))


_INPUTS = _marks(InputPath, LocalPath, TemplatePath)
_OUTPUTS = _marks(OutputPath)


def input_paths(config: Section) -> dict[str, str]:
    """What the run reads, by TOML key: paths and hub ids; no URLs, and no words like "auto" that keys also take."""
    found = ((key, text) for key, text, marks in _texts(config) if _has(marks, _INPUTS) and text not in marks)
    return {key: text for key, text in found if not is_url(text)}


def shared_directories(config: TrainingConfig) -> dict[str, Path]:
    """Directories on disks that the ranks of all hosts write to, by the TOML key that names them.

    Checkpoints are written there, and the export beside its place. URLs are left out.
    """
    section = config.checkpoint
    run_dir = Path(config.run.dir)
    found = {}
    if (checkpoints := _on_disk(section.dir, run_dir)) is not None:
        found["checkpoint.dir" if section.dir else "run.dir"] = checkpoints
    export = _on_disk(section.export_dir, run_dir / EXPORT)
    if section.export_hf != "never" and export is not None and export.parent not in found.values():
        found["checkpoint.export_dir"] = export.parent
    return found


def flat_settings(config: Section) -> dict[str, str]:
    """Every value that is set, as JSON by TOML key. Paths on a disk that are written to are replaced by a word."""
    written = {key for key, text, marks in _texts(config) if _has(marks, _OUTPUTS) and not is_url(text)}
    flat = _flat(config.model_dump(mode="json", exclude_none=True), "")
    return {key: "a local path" if key in written else text for key, text in flat}


def _on_disk(text: str | None, default: Path) -> Path | None:
    path = default if text is None else path_on_disk(text)
    return None if path is None else path.absolute()


def _texts(section: Section, prefix: str = "") -> Iterator[tuple[str, str, list[Any]]]:
    """Each text in a section and in those inside it: its TOML key, the text, and what its type is annotated with."""
    for name, field in type(section).model_fields.items():
        marks = [*field.metadata, *_annotations(field.annotation)]
        yield from _texts_of(getattr(section, name), f"{prefix}{name}", marks)


def _texts_of(value: object, key: str, marks: list[Any]) -> Iterator[tuple[str, str, list[Any]]]:
    if isinstance(value, str):
        yield key, value, marks
    elif isinstance(value, Section):
        yield from _texts(value, f"{key}.")
    elif isinstance(value, (list, dict)):
        for name, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts_of(one, f"{key}.{name}", marks)


def _annotations(annotation: Any) -> Iterator[Any]:
    """What a type is annotated with, at any depth, and the texts of a `Literal` in it."""
    if isinstance(annotation, str):
        yield annotation
    if get_origin(annotation) is Annotated:
        yield from annotation.__metadata__
    for one in get_args(annotation):
        yield from _annotations(one)


def _has(marks: list[Any], wanted: tuple[BeforeValidator, ...]) -> bool:
    return any(isinstance(mark, BeforeValidator) and mark in wanted for mark in marks)


def _flat(value: object, key: str) -> Iterator[tuple[str, str]]:
    if value and isinstance(value, (list, dict)):
        for name, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(one, f"{key}.{name}" if key else str(name))
    else:
        yield key, json.dumps(value)
