"""From a TOML file and ``section.key=value`` overrides to a validated, frozen config, and back to a TOML."""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import tomli
import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from fsdp2kit.config.foreign import RECIPE_OF, SECTION_OF, advise_on_key, advise_on_path, advise_on_value, snake_case
from fsdp2kit.config.section import OverrideText, Section
from fsdp2kit.errors import UserError, nearest

ConfigT = TypeVar("ConfigT", bound=Section)
# Each dotted key with its fields: several where variants of a section have it, none for names that the user chooses.
_Known = dict[str, list[FieldInfo]]
_ANY = "*"


class _Stray(NamedTuple):
    """A key that its section's variant does not have."""

    section: str
    name: str
    chosen_by: str
    """The key that chooses the variant."""
    variant: str
    owners: list[str]
    """The variants that have it."""


# Similarities, from 0 to 1: from `_MISSPELT` on, a key is misspelt rather than another tool's; below `_SIMILAR`
# nothing is suggested.
_MISSPELT = 0.78
_SIMILAR = 0.5
_TRUTHS = {**dict.fromkeys(("true", "yes", "on", "1"), "true"), **dict.fromkeys(("false", "no", "off", "0"), "false")}

# Retired keys: the values that mean what is done now, and what to do about any other.
RETIRED = {
    "model.loss_kernel": (
        ("auto", "chunked"),
        "leave it out; the loss is computed in chunks, which no other kernel beat where it was measured",
    ),
}
# Pairs of keys that exclude each other: an override of one takes the other out of the TOML.
ALTERNATIVES = (
    ("train.steps", "train.epochs"),
    ("lr_schedule.warmup_steps", "lr_schedule.warmup_ratio"),
    ("data.path", "data.sources"),
)


def read_toml(path: str | Path) -> dict[str, Any]:
    """Parse a TOML file.

    Raises:
        UserError: the file is missing, not readable, or not TOML.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors write a byte-order mark
        return tomli.loads(text)
    except FileNotFoundError:
        raise UserError(str(path), "no such file", "check the path of the TOML") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(str(path), f"cannot be read ({error})", "check the file and its permissions") from None
    except RecursionError:
        raise UserError(str(path), "not valid TOML: it is nested too deep", "write flatter values") from None
    except tomli.TOMLDecodeError as error:
        lines = text.splitlines()
        found = re.search(r"line (\d+)", str(error))
        todo = _advise_on_line(lines[int(found[1]) - 1]) if found and int(found[1]) <= len(lines) else "mend that line"
        if path.suffix == ".jsonl":
            todo = f"name a run's TOML first, and this as data.path={path}"
        raise UserError(str(path), f"not valid TOML: {error}", todo) from None


def _advise_on_line(line: str) -> str:
    """What to do about a line that is not TOML; many are Python's or YAML's."""
    key, equals, value = (part.strip() for part in line.partition("="))
    if not equals:
        yaml = re.match(r"([\w.-]+)\s*:\s*(.*)", key)
        return f"{_from_yaml(yaml[1], yaml[2])}: this looks like YAML" if yaml else "mend that line"
    if (word := re.match(r"[A-Za-z]+", value)) and (truth := _TRUTHS.get(word[0].lower())):
        return f"write {key} = {truth}"
    if word and word[0].lower() in ("none", "null", "nil"):
        return f"leave {key} out: TOML has no null, and what is not given has its default"
    return "put quotes around text" if re.match(r"[A-Za-z/~.]", value) else "mend that line"


def _from_yaml(key: str, value: str) -> str:
    """A line of YAML as TOML."""
    if not value:
        return f"write {key} = …"
    if truth := _TRUTHS.get(value.lower()) if value.isalpha() else None:
        return f"write {key} = {truth}"
    if value.lower() in ("none", "null", "~"):
        return f"leave {key} out"
    try:
        tomli.loads(f"value = {value}")
    except tomli.TOMLDecodeError:
        value = json.dumps(value, ensure_ascii=False)
    return f"write {key} = {value}"


def load_config(
    schema: type[ConfigT],
    values: Mapping[str, Any],
    *,
    source: str | Path,
    overrides: Sequence[str] = (),
    say: Callable[[str], object] = lambda line: None,
) -> ConfigT:
    """Validate a TOML's values, with overrides on top, against a recipe's config class.

    Args:
        schema: the recipe's ``Config``.
        values: what `read_toml` returned.
        source: the TOML's path: it is named in errors, and input paths in ``values`` are relative to it.
        overrides: ``section.key=value`` strings; the value is TOML, a bare word is a string, ``none`` takes the key
            out of the TOML (where "none" is not a value of its own). Input paths in them are relative to the working
            directory.
        say: called with a line for each key of the TOML that an override took out.

    Raises:
        UserError: naming the file (or the override), the key, and the nearest known key.
    """
    source = Path(source)
    known = known_keys(schema)
    merged = without_idle(values, schema)
    context = {"base": source.resolve().parent}
    for override in overrides:
        _apply_override(merged, override, known)
    _drop_alternatives(merged, source, overrides, say)
    _drop_other_variants(merged, known, source, overrides, say)
    _drop_retired(merged)
    try:
        return schema.model_validate(merged, context=context)
    except ValidationError as error:

        def is_accepted(location: Sequence[str], value: Any) -> bool:
            """Whether a config with this value has no mistake there, nor in it."""
            try:
                schema.model_validate(_with(merged, location, value), context=context)
            except ValidationError as other:
                places = [_locate(_plain(problem), known)[0] for problem in other.errors()]
                return all(place[: len(location)] != [*location] for place in places)
            return True

        raise _explain(error, known, source, overrides, is_accepted) from None


def without_idle(values: Mapping[str, Any], schema: type[Section]) -> dict[str, Any]:
    """A copy of a TOML's values without keys that change nothing, as settings of earlier runs have them.

    These are keys that only other variants of a section have, with their default, and retired keys that mean what is
    done now.
    """
    kept = copy.deepcopy(dict(values))
    known = known_keys(schema)
    for stray in _strays(kept, known):
        if kept[stray.section][stray.name] == known[f"{stray.section}.{stray.name}"][0].default:
            del kept[stray.section][stray.name]
    _drop_retired(kept)
    return kept


def dump_toml(config: Section) -> str:
    """The config as TOML text that `load_config` accepts; fields that are unset (None) are left out."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def parse_override(override: str) -> tuple[list[str], Any]:
    """Split ``section.key=value`` into its dotted path and its TOML value."""
    if override.startswith("-"):
        plain = override.lstrip("-")
        is_whole = re.fullmatch(r"[\w-]+\.[\w.-]+=.*", plain, re.DOTALL)
        todo = f"write {plain}" if is_whole else "--help shows the options; write overrides as train.steps=100"
        raise UserError(f"option {override!r}", "there is none of that name", todo)
    key, equals, text = override.partition("=")
    path = key.strip().split(".")
    if not equals or not all(re.fullmatch(r"[\w-]+", part) for part in path):
        raise UserError(f"override {override!r}", "not of the form section.key=value", "write e.g. train.steps=100")
    try:
        return path, tomli.loads(f"value = {text}")["value"]
    except RecursionError:
        raise UserError(f"override {key}", "its value is nested too deep", "write a flatter value") from None
    except tomli.TOMLDecodeError:
        return path, text.strip()


def _apply_override(values: dict[str, Any], override: str, known: _Known) -> None:
    path, value = parse_override(override)
    if _is_unset(override, path, known):
        _take_out(values, path)
        return
    target: Any = values
    for number, part in enumerate(path[:-1]):
        if isinstance(target, list):  # of tables, counted from 0
            if not part.isdigit() or int(part) >= len(target):
                what = f"{'.'.join(path[:number])} has {len(target)} entries, counted from 0"
                todo = f"write {'.'.join(path[:number])}.0.KEY=…, or add the entry to the TOML"
                raise UserError(f"override {override!r}", what, todo)
            target = target[int(part)]
        else:
            target = target.setdefault(part, {})
        if not isinstance(target, (dict, list)):
            raise UserError(f"override {override!r}", f"{part} is a value, not a section", "name an existing section")
    if isinstance(target, list):
        what = "an entry of a list cannot be set"
        name = ".".join(path[:-1])
        raise UserError(f"override {override!r}", what, f"set a key of it ({name}.0.KEY=…), or all of {name}")
    target[path[-1]] = _from_command_line(value)


def _is_unset(override: str, path: Sequence[str], known: _Known) -> bool:
    """Whether an override is a bare ``none`` (or null) for a known key that does not take "none" as a value."""
    word = override.partition("=")[2].strip().lower()
    key = _known_key(path, known)
    if word not in ("none", "null") or key is None:  # an unknown key is refused later
        return False
    return not any("none" in _literals(field.annotation) for field in known[key])


def _take_out(values: dict[str, Any], path: Sequence[str]) -> Any:
    """Delete a key, in place, and return its value; None if it is not there."""
    section: Any = values
    for part in path[:-1]:
        if isinstance(section, list) and part.isdigit():
            section = section[int(part)] if int(part) < len(section) else None
        else:
            section = section.get(part) if isinstance(section, dict) else None
    return section.pop(path[-1], None) if isinstance(section, dict) else None


def _drop_alternatives(
    values: dict[str, Any], source: Path, overrides: Sequence[str], say: Callable[[str], object]
) -> None:
    """Where an override gives one key of a pair in `ALTERNATIVES`, take the TOML's other one out, in place."""
    given = {key.strip(): text.strip() for key, _, text in (override.partition("=") for override in overrides)}
    for pair in ALTERNATIVES:
        for key, other in (pair, pair[::-1]):
            is_given = key in given and other not in given and given[key].lower() not in ("none", "null")
            if is_given and (replaced := _take_out(values, other.split("."))):
                what = f"{len(replaced)} entries" if isinstance(replaced, list) else replaced
                say(f"override {key}={given[key]} takes the place of {other} = {what} of {source}")


def _drop_other_variants(
    values: dict[str, Any], known: _Known, source: Path, overrides: Sequence[str], say: Callable[[str], object]
) -> None:
    """Where an override chooses a section's variant, take the TOML's keys of other variants out, in place."""
    overridden = {".".join(parse_override(override)[0]) for override in overrides}
    for stray in _strays(values, known):
        key = f"{stray.section}.{stray.name}"
        if stray.chosen_by in overridden and key not in overridden:
            value = values[stray.section].pop(stray.name)
            if value != known[key][0].default:
                taken = f"{key} = {value} of {source}, a key of {_either(stray.owners)}"
                say(f"override {stray.chosen_by}={stray.variant} takes out {taken}")


def _strays(values: Mapping[str, Any], known: _Known) -> list[_Stray]:
    found = []
    for section, given in values.items():
        tag_key, variants = _variants([section], known)
        if not tag_key or not isinstance(given, dict):
            continue
        default = known[section][0].default
        chosen = getattr(default, tag_key) if isinstance(default, Section) else None
        variant = str(given.get(tag_key, chosen))
        for name in given if variant in variants else ():
            owners = [other for other, names in variants.items() if name in names]
            if owners and variant not in owners:
                found.append(_Stray(section, name, f"{section}.{tag_key}", variant, owners))
    return found


def _drop_retired(values: dict[str, Any]) -> None:
    """Take retired keys that mean what is done now out, in place; any other value is an unknown key."""
    for key, (harmless, _) in RETIRED.items():
        section, name = key.split(".")
        given = values.get(section)
        if isinstance(given, dict) and given.get(name) in harmless:
            del given[name]


def _literals(annotation: Any) -> set[Any]:
    """The values of all `Literal` in a type."""
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    return {value for part in get_args(annotation) for value in _literals(part)}


def _from_command_line(value: Any) -> Any:
    """The value with its strings marked as `OverrideText`."""
    if isinstance(value, dict):
        return {key: _from_command_line(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_from_command_line(item) for item in value]
    return OverrideText(value) if isinstance(value, str) else value


def _where(location: Sequence[str], source: Path, overrides: Sequence[str]) -> str:
    """The key with its file, or with "override" if an override sets it."""
    paths = [parse_override(text)[0] for text in overrides]
    overridden = any(all(a == b for a, b in zip(path, location, strict=False)) for path in paths)
    key = ".".join(location)
    return f"override {key}" if overridden else f"{source}: {key}"


def _with(values: Mapping[str, Any], location: Sequence[str], value: Any) -> dict[str, Any]:
    """A copy of a TOML's values with another value at a place that it has."""
    changed = copy.deepcopy(dict(values))
    target: Any = changed
    for part in location[:-1]:
        target = target[int(part)] if isinstance(target, list) else target[part]
    target[int(location[-1]) if isinstance(target, list) else location[-1]] = value
    return changed


def _explain(
    error: ValidationError,
    known: _Known,
    source: Path,
    overrides: Sequence[str],
    is_accepted: Callable[[Sequence[str], Any], bool],
) -> UserError:
    """The first mistake, and what to do about it: a value is advised only if it is accepted there."""
    problems = [(problem, *_locate(problem, known)) for problem in map(_plain, error.errors())]
    # Report a misspelt key first: it may be why another key is missing.
    problems.sort(key=lambda one: one[0]["type"] != "extra_forbidden")
    first, location, key = problems[0]
    kind = first["type"]
    given = first["input"]
    where = _where(location, source, overrides)
    others = len({tuple(other) for _, other, _ in problems}) - 1
    more = f" (and {others} more)" if others else ""
    if kind == "extra_forbidden":
        if ".".join(key) in RETIRED:
            return UserError(where, f"was removed{more}", RETIRED[".".join(key)][1])
        tag_key, variants = _variants(key[:-1], known)
        if owners := [tag for tag, names in variants.items() if key[-1] in names]:
            name = f"{'.'.join(location[:-1])}.{tag_key}"
            tag = first["loc"][-2]
            todo = f"leave it out, or set {name} = {_either(owners)}"
            return UserError(where, f"not a key of {name} = {tag!r}{more}", todo)
        name = "key" if len(location) > 1 else "section or key"
        return UserError(where, f"unknown {name} {location[-1]!r}{more}", _nearest(location, key, given, known))
    if kind == "missing" and not location[-1].isdecimal():
        return UserError(where, f"is required{more}", "add it to the TOML")
    if kind in ("model_type", "model_attributes_type", "union_tag_not_found"):
        todo = _as_section(given, location, key, known, is_override=where.startswith("override"))
        return UserError(where, f"{given!r} is not a section{more}", todo)
    if kind == "missing":  # an item of a list that must have more: the list is what is wrong
        location = location[:-1]
        where = _where(location, source, overrides)
    # A union has an error for each of its members.
    same = [problem for problem, other, _ in problems if other == problems[0][1]]
    reasons = " or ".join(dict.fromkeys(text[0].lower() + text[1:] for text in (one["msg"] for one in same)))
    while key[-1] == _ANY:
        key = key[:-1]
    fields = known[".".join(key)]
    docs = dict.fromkeys(field.description for field in fields if field.description)
    doc = f"{key[-1]}: {' '.join(docs)}" if docs else ""
    what = f"{given!r} is not accepted: {reasons}{more}"
    accepted = (value for value in _spellings(given, same, fields) if is_accepted(location, value))
    spelt = None
    if (value := next(accepted, None)) is not None:
        text = _as_toml(value)
        if isinstance(value, list) and where.startswith("override"):  # which a shell would split
            text = shlex.quote(f"{'.'.join(location)}={text}")
        spelt = f"write {text}"
    return UserError(where, what, "; ".join(filter(None, (spelt, doc))) or "see toml/schema.json for what is accepted")


def _plain(problem: Mapping[str, Any]) -> Mapping[str, Any]:
    """pydantic's problem; an unknown variant of a section becomes a wrong value of the key that chooses it."""
    if problem["type"] != "union_tag_invalid":
        return problem
    context = problem["ctx"]
    key = context["discriminator"].strip("'")
    expected = " or ".join(context["expected_tags"].rsplit(", ", 1))  # as pydantic lists a literal's values
    said = {"type": "literal_error", "msg": f"Input should be {expected}", "ctx": {"expected": expected}}
    return {**said, "loc": (*problem["loc"], key), "input": problem["input"][key]}


def _locate(problem: Mapping[str, Any], known: _Known) -> tuple[list[str], list[str]]:
    """Where a mistake is in the TOML, and the known key of that place, both in parts.

    pydantic's locations also have the names of a union's members, which are left out.
    """
    location: list[str] = []
    key: list[str] = []
    parts = [str(part) for part in problem["loc"]]
    for number, part in enumerate(parts, start=1):
        match = _match(key, part, known)
        if match is not None or (problem["type"] == "extra_forbidden" and number == len(parts)):
            location.append(part)
            key.append(match or part)
    return location, key


def _variants(section: Sequence[str], known: _Known) -> tuple[str, dict[str, set[str]]]:
    """The key that chooses a section's variant, and each variant's keys by that key's value; ("", {}) for others."""
    for field in known.get(".".join(section), ()):
        if isinstance(tag_key := field.discriminator, str):
            fields = [member.model_fields for member in get_args(field.annotation)]
            return tag_key, {tag: {*each} for each in fields for tag in _literals(each[tag_key].annotation)}
    return "", {}


def _either(values: Sequence[str]) -> str:
    return " or ".join(map(repr, values))


def _match(key: Sequence[str], part: str, known: _Known) -> str | None:
    """``part``, or `_ANY` in its place, if that is a known key after ``key``."""
    return next((one for one in (part, _ANY) if ".".join([*key, one]) in known), None)


def _known_key(path: Sequence[str], known: _Known) -> str | None:
    """The known key of a dotted path, with `_ANY` for names that the user chooses; None if there is none."""
    key: list[str] = []
    for part in path:
        match = _match(key, part, known)
        if match is None:
            inside = ".".join(key)
            is_free = key[-1:] == [_ANY] and not any(one.startswith(f"{inside}.") for one in known)
            return inside if is_free else None
        key.append(match)
    return ".".join(key)


def _as_section(given: Any, location: Sequence[str], key: Sequence[str], known: _Known, *, is_override: bool) -> str:
    """What to do about a value in a section's place."""
    section = ".".join(location)
    tag_key, variants = _variants(key, known)
    if isinstance(given, str) and given in variants:
        return f"write {section}.{tag_key}={given}" if is_override else f'write {section}.{tag_key} = "{given}"'
    if is_override:
        return f"set a key of it: {section}.KEY=…; `fsdp2kit keys {section}` lists them"
    return f"write [{section}], and its keys under it"


def _spellings(given: Any, problems: Sequence[Mapping[str, Any]], fields: Sequence[FieldInfo]) -> Iterator[Any]:
    """Values that may be meant by one that is not accepted: as a list, a choice, a truth or a number.

    Args:
        problems: pydantic's, one for each member of the field's union.
        fields: of the key.
    """
    kinds = {problem["type"] for problem in problems}
    is_short = isinstance(given, list) and "missing" in kinds
    if not is_short and (not isinstance(given, (str, int, float)) or isinstance(given, bool)):
        return
    if is_short or kinds & {"list_type", "tuple_type"}:
        items: list[Any] = given if isinstance(given, list) else _items(given)
        yield items
        for field in fields:  # one of two numbers: the others as they are by default
            if isinstance(field.default, (list, tuple)):
                yield [*items, *field.default[len(items) :]]
        return
    expected = " ".join(problem.get("ctx", {}).get("expected", "") for problem in problems)
    if option := advise_on_value(given, re.findall(r"'([^']*)'", expected)):
        yield option
    if "bool_type" in kinds and (truth := _TRUTHS.get(str(given).lower())):
        yield truth == "true"
    comma = "" if re.fullmatch(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?", str(given)) else "."
    number = _as_number(str(given).replace(",", comma))
    if number is not None and "int_type" in kinds and float(number).is_integer():
        yield int(number)
    if number is not None and "float_type" in kinds:
        yield float(number)


def _items(given: Any) -> list[Any]:
    """The items of a text that looks like a list: numbers, or else texts."""
    text = str(given).strip().strip("()[]")
    words = [re.sub(r"""^(["'])(.*)\1$""", r"\2", word) for word in re.split(r"\s*,\s*", text.strip(" ,"))]
    numbers = [_as_number(word) for word in re.split(r"[\s,]+", text.strip(" ,"))]
    return words if None in numbers else numbers


def _as_number(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def _as_toml(value: Any) -> str:
    """A value as a TOML has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_as_toml, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)


def _nearest(location: Sequence[str], key: Sequence[str], given: Any, known: _Known) -> str:
    """What to do about an unknown key that was given this value."""
    name = location[-1]
    section = ".".join(key[:-1])
    siblings = [one.rpartition(".")[2] for one in known if one.rpartition(".")[0] == section]
    is_section = isinstance(given, Mapping)
    if len(location) == 1 and name in RECIPE_OF:
        return f'that is of recipe = "{RECIPE_OF[name]}"; leave it out, or use that recipe'
    # The same name in another section, before similar names; [tokenizer] is not the key model.tokenizer.
    elsewhere = [one for one in known if one.rpartition(".")[2] == name and is_section == _has_keys(one, known)]
    if advice := advise_on_path(location, known):
        return advice
    if elsewhere:
        nearby = next((one for one in elsewhere if one.startswith(f"{location[0]}.")), elsewhere[0])
        return f"did you mean {_as_written(nearby, known)}?"
    is_foreign = is_section and snake_case(name) in SECTION_OF
    misspelt = not is_foreign and nearest(name, siblings, cutoff=_MISSPELT)
    if not misspelt and (advice := advise_on_key(location, given, known)):
        return advice
    if near := nearest(name, siblings, cutoff=_SIMILAR):
        tag_key, variants = _variants(key[:-1], known)
        owners = [tag for tag, names in variants.items() if near in names]
        of = f", of {section}.{tag_key} = {_either(owners)}" if len(owners) < len(variants) else ""
        return f"did you mean {'.'.join([*location[:-1], near])}{of}?"
    return f"known here: {', '.join(siblings)}"


def _as_written(key: str, known: _Known) -> str:
    """A known key as a TOML has it: without an index, and with NAME for a name that the user chooses."""
    outer, is_inside, inner = key.partition(f".{_ANY}")
    is_named = is_inside and any(get_origin(field.annotation) is dict for field in known[outer])
    return f"{outer}{'.NAME' if is_named else ''}{inner.replace(f'.{_ANY}', '')}"


def _has_keys(key: str, known: Collection[str]) -> bool:
    return any(one.startswith(f"{key}.") for one in known)


def known_keys(schema: type[BaseModel], prefix: str = "") -> _Known:
    """Every dotted key of a config class; `_ANY` stands for an index or for a name that the user chooses."""
    known: _Known = {}
    for name, field in schema.model_fields.items():
        key = f"{prefix}{name}"
        members = get_args(field.annotation) or (field.annotation,)
        known[key] = [field]
        if get_origin(field.annotation) in (list, dict, tuple):
            key = f"{key}.{_ANY}"
            known[key] = []
        for section in members:
            if isinstance(section, type) and not get_args(section) and issubclass(section, BaseModel):
                for inner, fields in known_keys(section, f"{key}.").items():
                    known.setdefault(inner, []).extend(fields)
    return known
