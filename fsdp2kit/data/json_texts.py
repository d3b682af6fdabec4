"""JSON that stands in a row: a whole line, or a text in a column, a message or a call."""

from __future__ import annotations

import json
from typing import Any

from fsdp2kit.errors import UserError

_LONGEST = 60  # letters of a value in an error


class KeyTwice(UserError):
    """An object has two values of one key."""


class _Twice(Exception):
    """Two values of a key."""


def _as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs of an object as a dict, which keeps the last value of a key without a word."""
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    first: dict[str, Any] = {}
    for key, value in pairs:
        texts = [json.dumps(one, sort_keys=True) for one in (first.setdefault(key, value), value)]
        if texts[0] != texts[1]:
            one, other = (text if len(text) <= _LONGEST else text[:_LONGEST] + "…" for text in texts)
            raise _Twice(f"the key {key!r}: {one} and {other}")
    return found


_decode = json.JSONDecoder(object_pairs_hook=_as_object).decode


def load_json(text: str, where: str, name: str = "", *, keeps_last: bool = False) -> Any:
    """A text's JSON.

    Args:
        name: of the column that the text is in.
        keeps_last: of two values of a key the last one is kept, as Python does, and there is no error.

    Raises:
        json.JSONDecodeError: it is no JSON.
        KeyTwice: an object in it has two values of one key.
        UserError: it is other JSON that no row may have.
    """
    its = f"{name} " if name else ""
    dropped = "mend or drop that row"
    try:
        value = json.loads(text) if keeps_last else _decode(text)
    except _Twice as twice:
        raise KeyTwice(where, f"{its}holds an object with two values of {twice}", "keep one of them") from None
    except RecursionError:
        raise UserError(where, f"{its}is nested too deep", "give flatter rows") from None
    except json.JSONDecodeError:
        raise
    except ValueError:  # Python reads none that is longer
        raise UserError(where, f"{its}holds an integer of more than 4300 digits", dropped) from None
    try:
        # One search finds most texts to be without escapes; two would take as long as reading the text.
        if "\\u" in text and ("\\ud" in text or "\\uD" in text):  # half of a surrogate pair, which no tokenizer takes
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        what = f"{its}holds \\u{ord(error.object[error.start]):04x}, half of a surrogate pair and no character"
        raise UserError(where, what, dropped) from None
    return value


def row_with_key_twice(text: str) -> int:
    """The index of the first entry of an array that holds an object with two values of one key.

    Args:
        text: the array, for which `load_json` raises `KeyTwice`.
    """
    decoder = json.JSONDecoder(object_pairs_hook=_as_object)
    at = text.index("[") + 1
    number = 0
    while True:
        while text[at] in " \t\r\n,":
            at += 1
        try:
            _, at = decoder.raw_decode(text, at)
        except _Twice:
            return number
        number += 1


def parsed(value: Any, where: str, name: str) -> Any:
    """A string read as JSON; an empty string and any other value unchanged. A string that is not JSON is an error."""
    if not isinstance(value, str) or not value:
        return value
    try:
        return load_json(value, where, name)
    except json.JSONDecodeError as error:
        what = f"{name} is not valid JSON ({error.msg}, column {error.colno})"
        todo = "give it as a list or an object, or as JSON (json.dumps writes it; Python's str writes none)"
        raise UserError(where, what, todo) from None
