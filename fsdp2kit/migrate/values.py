"""Readers of a field's value, which rows of fields.toml name with `as`, `words` and `on`.

The `as_…` functions also take None, if the file has no such field, and then return None or an empty list.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError

from fsdp2kit.config.foreign import ADAMW_WORDS, DTYPE_WORDS, STRATEGY_WORDS, spellings
from fsdp2kit.migrate.fields import TABLE, Field

T = TypeVar("T")


class Told(NamedTuple):
    """A key's value, a comment for its line, and a warning if the value is not what the field says."""

    value: Any
    note: str = ""
    warning: str = ""


def told(entry: Any) -> Told:
    """A value of fields.toml, alone or with a note and a warning."""
    return Told(**entry) if isinstance(entry, dict) else Told(entry)


def _converter(kind: type[T], todo: str) -> Callable[[Field | None], T | None]:
    adapter = TypeAdapter(kind)

    def convert(field: Field | None) -> T | None:
        if field is None:
            return None
        try:
            return adapter.validate_python(field.value)
        except ValidationError:
            raise field.mistake(todo) from None

    return convert


as_bool = _converter(bool, "write true or false")
"""A truth value, as YAML and shell scripts write it."""
as_float = _converter(float, "write a number")
"""A number, or a text that is one (YAML reads ``1e-5`` as a text)."""


def as_int(field: Field | None) -> int | None:
    """A whole number; ``1e8`` and ``"100_000_000"`` are."""
    number = as_float(field)
    if field is None or number is None:
        return None
    if number != int(number):
        raise field.mistake("write a whole number")
    return int(number)


def as_text(field: Field | None) -> str | None:
    return None if field is None else str(field.value)


def as_words(field: Field | None) -> list[str]:
    """A list of names, written as a list or as one text with commas or spaces; none without a field."""
    if field is None:
        return []
    parts = field.value if isinstance(field.value, list) else re.split(r"[,\s]+", str(field.value))
    return [str(part).strip() for part in parts if str(part).strip()]


def as_parts(field: Field | None) -> list[Field]:
    """`as_words`, each name as a field."""
    return [replace(field, value=one) for one in as_words(field) if field is not None]


STRATEGIES = spellings(STRATEGY_WORDS)
_WORDS: dict[str, dict[str, Any]] = {
    **TABLE["words"],
    "strategies": STRATEGY_WORDS,
    "dtypes": DTYPE_WORDS,
    "compute_dtypes": DTYPE_WORDS | TABLE["words"]["compute_dtypes"],
    "optimizers": ADAMW_WORDS | TABLE["words"]["optimizers"],
}


def as_word(field: Field, table: str, otherwise: Any = None) -> Told:
    """What a word of a table of ``[words]`` means; without ``otherwise`` an unknown one is a `UserError`."""
    value = spellings(_WORDS[table]).get(field.word, otherwise)
    if value is None:
        raise field.mistake(f"known: {', '.join(names.split()[0] for names in _WORDS[table])}")
    return told(TABLE["means"].get(value, value) if isinstance(value, str) else value)


def _as_schedule(field: Field) -> Any:
    """A schedule, also by the name of its function; one that is not offered becomes one that is."""
    word = "wsd" if "stable_decay" in field.word else field.word
    name = next((name for name in ("cosine", "linear", "constant", "wsd") if name in word), None)
    if name is None:
        return Told("constant", warning="not offered; constant was written")
    is_repeated = "restart" in word or "cycl" in word
    return Told(name, warning="not offered; one half cosine over the whole run was written" if is_repeated else "")


def _as_number(field: Field) -> int | None:
    """A number, in a field that may be a switch."""
    return field.value if type(field.value) is int else None


def _as_mode(field: Field) -> str:
    return field.word if field.word in ("full", "selective", "none") else "full" if as_bool(field) else "none"


_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
READERS: dict[str, Callable[[Field], Any]] = {
    "bool": as_bool,
    "float": as_float,
    "int": as_int,
    "text": as_text,
    "word": lambda field: field.word,
    "words": as_words,
    "schedule": _as_schedule,
    "number": _as_number,
    "number_or_switch": lambda field: int(as_bool(field) or 0) if (n := _as_number(field)) is None else n,
    "minutes": lambda field: (as_int(field) or 0) / 60,
    "mode": _as_mode,
    # A number means every n-th layer.
    "selective": lambda field: "selective" if _as_number(field) is None and as_bool(field) else None,
    "offload": lambda field: "params" if field.word == "params" or as_bool(field) else None,
    "attention": lambda field: field.word if field.word in _ATTENTION else "sdpa",
    "targets": lambda field: "all-linear" if field.word in ("all", "all_linear") else as_words(field),
    "qlora": lambda field: "nf4" if field.word == "qlora" else None,
    # transformers' fsdp = "full_shard auto_wrap offload"
    "offload_among": lambda field: "params" if "offload" in as_words(field) else None,
    "first_strategy": lambda field: next(
        (STRATEGIES[one.word] for one in as_parts(field) if one.word in STRATEGIES), None
    ),
}
"""By their names in `as`."""
