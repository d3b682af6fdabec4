"""From a TOML file and ``section.key=value`` overrides to a validated, frozen config, and back to a TOML."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tomli
import tomli_w
from pydantic import BaseModel, ValidationError

from fsdp2kit.config.schema import Section, is_input_path
from fsdp2kit.errors import UserError

ConfigT = TypeVar("ConfigT", bound=Section)

# A hub id: "name" or "owner/name", no file suffix of the kinds that data and templates have.
_HUB_ID = re.compile(r"^[\w.-]+(/[\w.-]+)?$")
_FILE_SUFFIX = re.compile(r"\.(jsonl?|parquet|csv|txt|arrow|jinja2?|gz|zst)$")


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file.

    Raises:
        UserError: the file is missing, not readable, or not TOML.
    """
    try:
        return tomli.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(str(path), "no such file", "check the path of the TOML") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(str(path), f"cannot be read ({error})", "check the file and its permissions") from None
    except tomli.TOMLDecodeError as error:
        raise UserError(str(path), f"not valid TOML: {error}", "mend that line") from None


def load_config(
    schema: type[ConfigT], values: Mapping[str, Any], *, source: Path, overrides: Sequence[str] = ()
) -> ConfigT:
    """Validate a TOML's values, with overrides on top, against a recipe's config class.

    Args:
        schema: the recipe's ``Config``.
        values: what `read_toml` returned.
        source: the TOML's path: it is named in errors, and input paths in ``values`` are relative to it.
        overrides: ``section.key=value`` strings; the value is TOML, a bare word is a string.

    Raises:
        UserError: naming the file (or the override), the key, and the nearest known key.
    """
    merged = _resolve_input_paths(schema, values, source.resolve().parent)
    for override in overrides:
        _apply_override(merged, override)
    try:
        return schema.model_validate(merged)
    except ValidationError as error:
        raise _explain(error, schema, source, overrides) from None


def dump_toml(config: Section) -> str:
    """The config as TOML text that `load_config` accepts; fields that are unset (None) are left out."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def parse_override(override: str) -> tuple[list[str], Any]:
    """Split ``section.key=value`` into its dotted path and its TOML value.

    Raises:
        UserError: the text is not of that form.
    """
    key, equals, text = override.partition("=")
    path = key.strip().split(".")
    if not equals or not all(re.fullmatch(r"[\w-]+", part) for part in path):
        raise UserError(f"override {override!r}", "not of the form section.key=value", "write e.g. train.steps=100")
    try:
        return path, tomli.loads(f"value = {text}")["value"]
    except tomli.TOMLDecodeError:
        return path, text.strip()


def _apply_override(values: dict[str, Any], override: str) -> None:
    path, value = parse_override(override)
    target = values
    for part in path[:-1]:
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            raise UserError(f"override {override!r}", f"{part} is a value, not a section", "name an existing section")
    target[path[-1]] = value


def _resolve_input_paths(schema: type[BaseModel], values: Mapping[str, Any], base: Path) -> dict[str, Any]:
    resolved = dict(values)
    for name, field in schema.model_fields.items():
        value = resolved.get(name)
        nested = field.annotation
        if isinstance(value, Mapping) and isinstance(nested, type) and issubclass(nested, BaseModel):
            resolved[name] = _resolve_input_paths(nested, value, base)
        elif isinstance(value, str) and _marks_input_path(field):
            resolved[name] = _resolve_input_path(value, base)
    return resolved


def _marks_input_path(field: Any) -> bool:
    # `InputPath | None` keeps the mark inside the union's members.
    members = getattr(field.annotation, "__args__", ())
    return is_input_path(field.metadata) or any(is_input_path(getattr(m, "__metadata__", ())) for m in members)


def _resolve_input_path(value: str, base: Path) -> str:
    if "://" in value or Path(value).is_absolute():
        return value
    candidate = base / value
    if candidate.exists() or not _HUB_ID.match(value) or _FILE_SUFFIX.search(value) or value.startswith("."):
        # Joined textually: a glob or a missing file must stay readable in the error message.
        return str(candidate.resolve() if candidate.exists() else candidate)
    return value


def _explain(error: ValidationError, schema: type[BaseModel], source: Path, overrides: Sequence[str]) -> UserError:
    problems = error.errors()
    first = problems[0]
    location = [str(part) for part in first["loc"] if not _is_union_tag(part)]
    key = ".".join(location)
    where = f"{source}: {key}"
    if any(".".join(parse_override(text)[0]) == key for text in overrides):
        where = f"override {key}"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if first["type"] == "extra_forbidden":
        return _explain_unknown(schema, location, where, more)
    if first["type"] == "missing":
        return UserError(where, f"is required{more}", "add it to the TOML")
    doc = _field_doc(schema, location)
    what = f"{first['input']!r} is not accepted: {first['msg'][0].lower()}{first['msg'][1:]}{more}"
    return UserError(where, what, doc or "see toml/schema.json for what is accepted")


def _explain_unknown(schema: type[BaseModel], location: list[str], where: str, more: str) -> UserError:
    known = dict(_known_keys(schema))
    section = ".".join(location[:-1])
    siblings = [name for name, parent in known.items() if parent == section]
    name = location[-1]
    candidates = [sibling.rpartition(".")[2] for sibling in siblings]
    nearest = difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
    elsewhere = [full for full in known if full.rpartition(".")[2] == name]
    kind = "key" if section else "section or key"
    if nearest:
        todo = f"did you mean {'.'.join([*location[:-1], nearest[0]])}?"
    elif elsewhere:
        todo = f"did you mean {elsewhere[0]}?"
    else:
        todo = f"known here: {', '.join(candidates)}"
    return UserError(where, f"unknown {kind} {name!r}{more}", todo)


def _known_keys(schema: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every dotted key of a config class, with the dotted section that it is in."""
    for name, field in schema.model_fields.items():
        full = f"{prefix}.{name}" if prefix else name
        yield full, prefix
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _known_keys(field.annotation, full)


def _field_doc(schema: type[BaseModel], location: list[str]) -> str | None:
    for index, name in enumerate(location):
        field = schema.model_fields.get(name)
        if field is None:
            return None
        if index == len(location) - 1 or not (
            isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        ):
            return f"{name}: {field.description}" if field.description else None
        schema = field.annotation
    return None


def _is_union_tag(part: str | int) -> bool:
    """Pydantic puts the failing union member (``constrained-int``, ``literal['auto']``) into the location."""
    return isinstance(part, str) and (bool(re.search(r"[\[\]-]", part)) or part in {"int", "bool", "str", "float"})
