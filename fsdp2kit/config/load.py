"""From a TOML file and ``section.key=value`` overrides to a validated, frozen config, and back to a TOML."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import tomli
import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from fsdp2kit.config.section import OverrideText, Section
from fsdp2kit.errors import UserError

ConfigT = TypeVar("ConfigT", bound=Section)

# Removed keys: the value that changed nothing (a run's own config.toml has it), and what to do instead of another.
REMOVED = {
    "baseline.compare": ("none", "leave it out; tools/bench.py fsdp1 TOML trains with FSDP1 beside it"),
    "baseline.warmup": (3, "leave it out; tools/bench.py fsdp1 TOML has --warmup"),
    "compile.cache_dir": (
        None,
        "set the environment variable TORCHINDUCTOR_CACHE_DIR, where torch keeps compiled code",
    ),
    "float8.all_gather": (False, "leave it out; weights are gathered in fsdp.param_dtype"),
}
REMOVED_OPTIMIZERS = {"adamw_4bit": "use 'adamw_8bit' or 'adamw_bf16'"}


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
    merged = copy.deepcopy(dict(values))
    for override in overrides:
        _apply_override(merged, override)
    _drop_removed(schema, merged, source, overrides)
    try:
        return schema.model_validate(merged, context={"base": source.resolve().parent})
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
    target[path[-1]] = _from_command_line(value)


def _from_command_line(value: Any) -> Any:
    """The value with its strings marked, so that paths among them are relative to the working directory."""
    if isinstance(value, dict):
        return {key: _from_command_line(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_from_command_line(item) for item in value]
    return OverrideText(value) if isinstance(value, str) else value


def _drop_removed(schema: type[BaseModel], values: dict[str, Any], source: Path, overrides: Sequence[str]) -> None:
    """Leave out removed keys that changed nothing, in place, and refuse the others."""
    known = dict(_known_keys(schema))
    for key, (harmless, instead) in REMOVED.items():
        section, name = key.split(".")
        given = values.get(section)
        if key in known or not isinstance(given, dict) or name not in given:
            continue
        if given.pop(name) != harmless:
            raise UserError(_where([section, name], source, overrides), "was removed", instead)
        if not given and section not in known:
            del values[section]
    optimizer = values.get("optimizer")
    name = optimizer.get("name") if isinstance(optimizer, dict) else None
    if isinstance(name, str) and name in REMOVED_OPTIMIZERS:
        where = _where(["optimizer", "name"], source, overrides)
        raise UserError(where, f"{name!r} was removed", REMOVED_OPTIMIZERS[name])


def _where(location: Sequence[str], source: Path, overrides: Sequence[str]) -> str:
    """The key with its file, or with "override" if an override sets it."""
    paths = [parse_override(text)[0] for text in overrides]
    overridden = any(all(a == b for a, b in zip(path, location, strict=False)) for path in paths)
    key = ".".join(location)
    return f"override {key}" if overridden else f"{source}: {key}"


def _explain(error: ValidationError, schema: type[BaseModel], source: Path, overrides: Sequence[str]) -> UserError:
    # Report a misspelt key first: it may be why another key is missing.
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    first = problems[0]
    steps = _walk(schema, first["loc"])
    locations = [[step.name for step in _walk(schema, problem["loc"])] for problem in problems]
    location = locations[0]
    where = _where(location, source, overrides)
    others = len({tuple(other) for other in locations}) - 1
    more = f" (and {others} more)" if others else ""
    if first["type"] == "extra_forbidden":
        return _explain_unknown(schema, steps, where, more)
    if first["type"] == "missing" and not isinstance(first["loc"][-1], int):
        return UserError(where, f"is required{more}", "add it to the TOML")
    if first["type"] == "model_type":
        return UserError(
            where, f"{first['input']!r} is not a section{more}", f"write [{'.'.join(location)}], and its keys under it"
        )
    # A union has an error for each of its members.
    texts = [problem["msg"] for problem, other in zip(problems, locations, strict=True) if other == location]
    reasons = " or ".join(dict.fromkeys(text[0].lower() + text[1:] for text in texts))
    what = f"{first['input']!r} is not accepted: {reasons}{more}"
    key = next(step for step in reversed(steps) if not step.is_item)
    doc = f"{key.name}: {key.field.description}" if key.field and key.field.description else ""
    return UserError(where, what, doc or "see toml/schema.json for what is accepted")


@dataclass(frozen=True)
class _Step:
    """One part of an error's location, resolved in the schema."""

    name: str
    is_item: bool
    """Whether it is an index of a list, or a user-chosen name in a table."""
    field: FieldInfo | None
    """The schema field, if it is a key."""


def _walk(schema: type[BaseModel], parts: Sequence[str | int]) -> list[_Step]:
    """The parts of a pydantic location that are in the TOML, without the names of union members."""
    steps: list[_Step] = []
    section: type[BaseModel] | None = schema
    items: type[BaseModel] | None = None  # the section at the next index or user-chosen name
    for part in parts:
        if items is not None or isinstance(part, int):
            steps.append(_Step(str(part), True, None))
            section, items = items or section, None
        elif section is not None:
            field = section.model_fields.get(part)
            steps.append(_Step(part, False, field))
            section, items = (_section_of(field.annotation), _items_of(field.annotation)) if field else (None, None)
    return steps


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The section type of a field, optional or not."""
    members = [member for member in (annotation, *get_args(annotation)) if isinstance(member, type)]
    is_plain = get_origin(annotation) not in (list, dict)
    return next((member for member in members if is_plain and issubclass(member, BaseModel)), None)


def _items_of(annotation: Any) -> type[BaseModel] | None:
    """The section type of the items of a list or a table of names."""
    return _section_of(get_args(annotation)[-1]) if get_origin(annotation) in (list, dict) else None


def _explain_unknown(schema: type[BaseModel], steps: list[_Step], where: str, more: str) -> UserError:
    known = dict(_known_keys(schema))
    location = [step.name for step in steps]
    section = ".".join(step.name for step in steps[:-1] if not step.is_item)
    siblings = [name for name, parent in known.items() if parent == section]
    name = location[-1]
    candidates = [sibling.rpartition(".")[2] for sibling in siblings]
    nearest = difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
    elsewhere = [full for full in known if full.rpartition(".")[2] == name]
    kind = "key" if section else "section or key"
    if elsewhere:  # the same name in another section, before similar names
        todo = f"did you mean {elsewhere[0]}?"
    elif nearest:
        todo = f"did you mean {'.'.join([*location[:-1], nearest[0]])}?"
    else:
        todo = f"known here: {', '.join(candidates)}"
    return UserError(where, f"unknown {kind} {name!r}{more}", todo)


def _known_keys(schema: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every dotted key of a config class, with its dotted section."""
    for name, field in schema.model_fields.items():
        full = f"{prefix}.{name}" if prefix else name
        yield full, prefix
        if section := _section_of(field.annotation) or _items_of(field.annotation):
            yield from _known_keys(section, full)
