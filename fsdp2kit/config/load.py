"""From a TOML file and ``section.key=value`` overrides to a validated, frozen config, and back to a TOML."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import tomli
import tomli_w
from pydantic import BaseModel, ValidationError

from fsdp2kit.config.schema import InputPathMark, Section
from fsdp2kit.errors import UserError

ConfigT = TypeVar("ConfigT", bound=Section)

# A hub id: "name" or "owner/name", no file suffix of the kinds that data has.
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
        overrides: ``section.key=value`` strings; the value is TOML, a bare word is a string. Input paths in them are
            relative to the working directory.

    Raises:
        UserError: naming the file (or the override), the key, and the nearest known key.
    """
    merged = _resolve_input_paths(schema, copy.deepcopy(dict(values)), source.resolve().parent)
    for override in overrides:
        _apply_override(schema, merged, override)
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


def _apply_override(schema: type[BaseModel], values: dict[str, Any], override: str) -> None:
    path, value = parse_override(override)
    for part in reversed(path[1:]):
        value = {part: value}
    # Made absolute now: the resolved config is kept in another directory, and is loadable from there.
    value = _resolve_input_paths(schema, {path[0]: value}, Path.cwd())
    target = values
    for part in path[:-1]:
        target, value = target.setdefault(part, {}), value[part]
        if not isinstance(target, dict):
            raise UserError(f"override {override!r}", f"{part} is a value, not a section", "name an existing section")
    target[path[-1]] = value[path[-1]]


def _resolve_input_paths(schema: type[BaseModel], values: Mapping[str, Any], base: Path) -> dict[str, Any]:
    resolved = dict(values)
    for name, field in schema.model_fields.items():
        value = resolved.get(name)
        section = _section_of(field.annotation)
        mark = _input_path_mark(field)
        items = _items_of(field.annotation)
        if isinstance(value, Mapping) and section is not None:
            resolved[name] = _resolve_input_paths(section, value, base)
        elif isinstance(value, list) and items is not None:
            resolved[name] = [_resolve_item(items, item, base) for item in value]
        elif isinstance(value, Mapping) and items is not None:
            resolved[name] = {key: _resolve_item(items, item, base) for key, item in value.items()}
        elif mark and value and isinstance(value, str) and value not in _keywords(field.annotation):
            resolved[name] = _resolve_input_path(value, base, hub=mark.hub)
    return resolved


def _resolve_item(schema: type[BaseModel], value: Any, base: Path) -> Any:
    return _resolve_input_paths(schema, value, base) if isinstance(value, Mapping) else value


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, be it optional."""
    members = [member for member in (annotation, *get_args(annotation)) if isinstance(member, type)]
    is_plain = get_origin(annotation) not in (list, dict)
    return next((member for member in members if is_plain and issubclass(member, BaseModel)), None)


def _items_of(annotation: Any) -> type[BaseModel] | None:
    """The section that every item of a list or of a table of names is."""
    if get_origin(annotation) not in (list, dict):
        return None
    return _section_of(get_args(annotation)[-1])


def _input_path_mark(field: Any) -> InputPathMark | None:
    # `InputPath | None` keeps the mark inside the union's members.
    members = [field, *get_args(field.annotation)]
    metadata = [item for m in members for item in getattr(m, "metadata", getattr(m, "__metadata__", ()))]
    return next((item for item in metadata if isinstance(item, InputPathMark)), None)


def _keywords(annotation: Any) -> set[str]:
    """What a union's literals spell: ``weights = "random"`` is no path."""
    return {word for member in get_args(annotation) if get_origin(member) is Literal for word in get_args(member)}


def _resolve_input_path(value: str, base: Path, *, hub: bool) -> str:
    if "://" in value:
        return value
    candidate = base / Path(value).expanduser()
    may_be_hub_id = hub and _HUB_ID.match(value) and not _FILE_SUFFIX.search(value) and not value.startswith(".")
    if candidate.exists() or not may_be_hub_id:
        # Joined textually: a glob or a missing file must stay readable in the error message.
        return str(candidate.resolve() if candidate.exists() else candidate)
    return value


def _explain(error: ValidationError, schema: type[BaseModel], source: Path, overrides: Sequence[str]) -> UserError:
    # A misspelt key is reported first: it may be why another one is missing.
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    first = problems[0]
    locations = [_location(schema, problem["loc"]) for problem in problems]
    location = locations[0]
    key = ".".join(location)
    paths = [parse_override(text)[0] for text in overrides]
    overridden = any(all(a == b for a, b in zip(path, location, strict=False)) for path in paths)
    where = f"override {key}" if overridden else f"{source}: {key}"
    others = len({tuple(other) for other in locations}) - 1
    more = f" (and {others} more)" if others else ""
    if first["type"] == "extra_forbidden":
        return _explain_unknown(schema, location, where, more)
    if first["type"] == "missing" and not isinstance(first["loc"][-1], int):
        return UserError(where, f"is required{more}", "add it to the TOML")
    if first["type"] == "model_type":
        return UserError(where, f"{first['input']!r} is not a section{more}", f"write [{key}], and its keys under it")
    # A union reports each of its members.
    texts = [problem["msg"] for problem, other in zip(problems, locations, strict=True) if other == location]
    reasons = " or ".join(dict.fromkeys(text[0].lower() + text[1:] for text in texts))
    doc = _field_doc(schema, location)
    what = f"{first['input']!r} is not accepted: {reasons}{more}"
    return UserError(where, what, doc or "see toml/schema.json for what is accepted")


def _location(schema: type[BaseModel], parts: Sequence[str | int]) -> list[str]:
    """The key of an error, and the place in it if it is a list, without pydantic's names of union members."""
    location: list[str] = []
    section: type[BaseModel] | None = schema
    items: type[BaseModel] | None = None  # the next part is an index or a name of our user's
    for part in parts:
        if items is not None or isinstance(part, int):
            location.append(str(part))
            section, items = items or section, None
        elif section is not None:
            location.append(part)
            field = section.model_fields.get(part)
            section, items = (_section_of(field.annotation), _items_of(field.annotation)) if field else (None, None)
    return location


def _explain_unknown(schema: type[BaseModel], location: list[str], where: str, more: str) -> UserError:
    known = dict(_known_keys(schema))
    section = _without_items(schema, location[:-1])
    siblings = [name for name, parent in known.items() if parent == section]
    name = location[-1]
    candidates = [sibling.rpartition(".")[2] for sibling in siblings]
    nearest = difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
    elsewhere = [full for full in known if full.rpartition(".")[2] == name]
    kind = "key" if section else "section or key"
    if elsewhere:  # the very name: nearer than any that resembles it
        todo = f"did you mean {elsewhere[0]}?"
    elif nearest:
        todo = f"did you mean {'.'.join([*location[:-1], nearest[0]])}?"
    else:
        todo = f"known here: {', '.join(candidates)}"
    return UserError(where, f"unknown {kind} {name!r}{more}", todo)


def _without_items(schema: type[BaseModel], location: list[str]) -> str:
    """The dotted section, without the indices of lists and the names of tables in it: ``data.sources``."""
    kept: list[str] = []
    section: type[BaseModel] | None = schema
    items: type[BaseModel] | None = None
    for name in location:
        if items is not None:
            section, items = items, None
            continue
        kept.append(name)
        field = section.model_fields.get(name) if section else None
        section, items = (_section_of(field.annotation), _items_of(field.annotation)) if field else (None, None)
    return ".".join(kept)


def _known_keys(schema: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every dotted key of a config class, with the dotted section that it is in."""
    for name, field in schema.model_fields.items():
        full = f"{prefix}.{name}" if prefix else name
        yield full, prefix
        if section := _section_of(field.annotation) or _items_of(field.annotation):
            yield from _known_keys(section, full)


def _field_doc(schema: type[BaseModel], location: list[str]) -> str | None:
    section: type[BaseModel] | None = schema
    items: type[BaseModel] | None = None
    for name in location:
        if items is not None:
            section, items = items, None
            continue
        field = section.model_fields.get(name) if section else None
        if field is None:
            return None
        section, items = _section_of(field.annotation), _items_of(field.annotation)
        if section is None and items is None:
            return f"{name}: {field.description}" if field.description else None
    return None
