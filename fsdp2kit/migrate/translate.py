"""The translation of an FSDP1 configuration: row by row of fields.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsdp2kit.config.foreign import NOT_OFFERED, WITHOUT_KEY
from fsdp2kit.migrate import data as of_data
from fsdp2kit.migrate import rules
from fsdp2kit.migrate.draft import Draft
from fsdp2kit.migrate.fields import TABLE, Field, read_fields
from fsdp2kit.migrate.values import READERS, as_bool, as_int, as_word, told

_RULES = {**vars(rules), **vars(of_data)}
"""The functions that rows of fields.toml name with `rule`."""


def translate(
    source: Path, *, toml: str, world_size: int | None = None, model: str | None = None, data: str | None = None
) -> Draft:
    """Translate an FSDP1 configuration file: `Draft.toml` is the result.

    Args:
        source: JSON, or YAML.
        toml: the path that the TOML will have: it is in its first line, and paths in it are relative to it.
        world_size: processes in the job; None: what the file says, else one.
        model: a model instead of the file's; data: likewise.

    Raises:
        UserError: the file cannot be read, or one of its values makes no sense.
    """
    given = [
        Field("--world-size", "num_processes", world_size, source),
        Field("--model", "model_path", model, source),
        Field("--data", "data_path", data, source),
    ]
    fields = [*(field for field in given if field.value is not None), *read_fields(source)]
    draft = Draft(fields, source=source.name, path=toml)
    for row in TABLE["rows"]:
        if "rule" in row:
            _RULES[row["rule"]](draft)
        else:
            _write(draft, row)
    draft.fill("run.dir", f"runs/{source.stem}")
    for why, names in WITHOUT_KEY.items():
        draft.explain(names, why)
    _warn(draft)
    return draft


def _write(draft: Draft, row: dict[str, Any]) -> None:
    """Write the line of a row that needs no rule."""
    beside = draft.get(row["beside"]) if "beside" in row else True
    is_wanted = beside and beside in row.get("only", [beside])
    if "fill" in row:
        if is_wanted:
            draft.fill(row["fill"], row.get("value"), row.get("why", ""))
        return
    key = row["key"]
    field = draft.take(row.get("from", key))
    if field is None:
        return
    if draft.get(key) is not None:
        draft.overrule(field, key)
        return
    value = _value(row, field)  # read also if it is not wanted: a value that makes no sense is refused
    if is_wanted:
        draft.was(key, value, field, note=row.get("note", ""))
    else:
        draft.note(field, row["otherwise"])


def _value(row: dict[str, Any], field: Field) -> Any:
    """What a field says of a row's key; None: nothing."""
    if "words" in row:
        return as_word(field, row["words"], row.get("else"))
    if "as" in row:
        return READERS[row["as"]](field)
    if "least" in row:
        # Programs put switches and shares below it.
        number = READERS["float"](field)
        return as_int(field) if number >= row["least"] else None
    if "value" in row:
        return row["value"]
    return told(row.get("on" if as_bool(field) else "off"))


def _warn(draft: Draft) -> None:
    """Warn of fields without which something else is trained."""
    unquantised = {"as": "word", "harmless": ["false", "no", "none"]}
    unquantised["warning"] = "not offered; weights would be stored unquantised"
    rows = [{"names": names, "fate": fate, **unquantised} for fate, names in NOT_OFFERED.items()]
    for row in [*TABLE["warned"][:1], *rows, *TABLE["warned"][1:]]:
        for field in draft.explain(row["names"], row["fate"]):
            said = READERS[row["as"]](field)
            if any(one not in row["harmless"] for one in (said if isinstance(said, list) else [said])):
                draft.warnings.append(f"{field}: {row['warning']}")
