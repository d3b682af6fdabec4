"""Reward functions in common use, for ``[[reward]]``. docs/grpo.md has a table of them and of their options.

A completion is a text or a list of messages; of several messages (a conversation of several turns) the last one of the
assistant counts. This file imports nothing of fsdp2kit, and what an extra installs only where it is used: each
function's process imports it, and you can copy it.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

REQUIREMENTS = {"math_verify": "math-verify>=0.9", "jsonschema": "jsonschema>=4.20", "referencing": "jsonschema>=4.20"}
"""What pip installs for a module."""

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
# A sign directly after a digit or a bracket is a minus between two numbers. Digits after / or ^ are part of a term.
_NUMBER = (
    rf"(?<![\w./^])(?P<above>(?:(?<![)\]])[-+])?(?:{_DIGITS})(?:[eE][-+]?[0-9]{{1,3}}(?![0-9]))?)"
    rf"(?:\s?/\s?(?P<below>{_DIGITS}))?(?P<percent>\s?%)?"
)
_NAMED = rf"(?:[A-Za-z]\w*\s*=\s*)?{_NUMBER}"  # x = 5
_WITH_UNIT = rf"{_NAMED}(?:\s*[A-Za-z]{{2,}}[A-Za-z\s./]*)?"  # not "2x": that is another value than 2
_BRACES = re.compile(r"(?P<boxed>\\f?boxed\s*\{)|\\.|[{}]", re.DOTALL)
_HASHES = re.compile(r"^####[ \t]*(\S.*)$", re.MULTILINE)
_FENCE = re.compile(r"^```json[ \t]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_MIXED = re.compile(r"([0-9]{1,9})\s*\\[dt]?frac\s*\{?([0-9]{1,9})\}?\s*\{?([0-9]{1,9})\}?")
_CLEANED = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}(?:\^\{?[23]\}?)?", r" \1"),  # cm^2 is a unit
        (r"\\[dt]?frac\s*(?:([0-9])\s*([0-9])|\{([^{}]+)\}\s*\{([^{}]+)\})", r"\1\3/\2\4"),
        (r"\^\{?\\circ\}?|\\[,!]", ""),
        (r"\\([$%])", r"\1"),
        (r"\{,\}|(?<=[0-9])[\u00a0\u2009\u202f](?=[0-9]{3})", ","),
        (r"(?<=[-+])[$€£¥₹]|[{}]", ""),
        (r"[$€£¥₹]|\\(?:left|right|f?boxed|displaystyle|[()\[\];: ])", " "),
    )
]


def _checked_by(check: Callable[..., object]) -> Callable[[Any], Any]:
    """Have ``check(**options)`` called at the start: it raises a ValueError or ImportError, which stops the run."""

    def mark(function: Any) -> Any:
        function.check_options = check
        return function

    return mark


def exact_answer(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
    r"""1 if the final answer is that of the row, else 0; None where the row has none.

    The final answer is the last ``\boxed{…}``, else what follows the last ``####`` that begins a line with a number,
    else the last number. Numbers are compared as fractions. A percentage equals its number with and without ÷ 100. If
    the row's answer is no number, texts are compared, but for case and how long spaces are.
    """
    pairs = zip(completions, answer, strict=True)
    return [None if wanted is None else _is_answer(_text_of(one), str(wanted)) for one, wanted in pairs]


def _math_seconds(seconds: int = 2) -> int:
    if type(seconds) is not int or seconds < 1:
        raise ValueError(f"seconds = {seconds!r} is no whole number from 1 on")
    _extra("math_verify")
    return seconds


@_checked_by(_math_seconds)
def math_answer(
    completions: Sequence[Any], answer: Sequence[Any], *, seconds: int = 2, **_: Any
) -> list[float | None]:
    """1 if math-verify finds the final answer equal to the row's, else 0; None where it can read no answer of the row.

    Args:
        seconds: most time for reading one answer, and for comparing two; an answer that takes longer counts 0.
    """
    library = _extra("math_verify")
    limit = {"parsing_timeout": seconds}
    # A box counts before other formulae, as in TRL.
    boxed_first = library.LatexExtractionConfig(boxed_match_priority=0)
    kinds = [boxed_first, library.ExprExtractionConfig()]
    found: list[float | None] = []
    for completion, wanted in zip(completions, answer, strict=True):
        reference = "" if wanted is None else _marked(str(wanted)) or str(wanted)
        # math-verify reads LaTeX only where it is marked as such.
        is_marked = re.search(r"\$|\\\(|\\\[", reference)
        gold = _in_time(library.parse, reference if is_marked else rf"\boxed{{{reference}}}", **limit)
        if not gold:
            found.append(None)
            continue
        given = _in_time(library.parse, _text_of(completion), extraction_config=kinds, **limit)
        found.append(float(bool(given) and library.verify(gold, given, timeout_seconds=seconds)))
    return found


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    if not isinstance(pattern, str):
        raise ValueError(f"pattern = {pattern!r} is no text")
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"pattern = {pattern!r} is no regular expression: {error}") from None


@_checked_by(_compiled)
def matches_pattern(completions: Sequence[Any], *, pattern: str, **_: Any) -> list[float]:
    """1 if the whole completion matches, else 0.

    Args:
        pattern: a regular expression of Python's ``re``, with DOTALL: a dot matches line breaks, too.
    """
    return [float(_compiled(pattern).fullmatch(_text_of(one)) is not None) for one in completions]


def _check_lengths(limit: int, buffer: int) -> None:
    if type(limit) is not int or type(buffer) is not int or not 0 < buffer <= limit:
        raise ValueError(f"limit = {limit!r}, buffer = {buffer!r}: they are whole numbers, 0 < buffer ≤ limit")


@_checked_by(_check_lengths)
def overlong_penalty(completion_ids: Sequence[Sequence[int]], *, limit: int, buffer: int, **_: Any) -> list[float]:
    """DAPO's soft overlong punishment, equation 13 of https://arxiv.org/abs/2503.14476.

    0 up to ``limit - buffer`` tokens, then in a straight line down to −1 at ``limit``, and −1 beyond.

    Args:
        limit: most tokens, usually `rollout.max_new_tokens`.
        buffer: how many of them are punished.
    """
    return [-min(1.0, max(0, len(ids) - (limit - buffer)) / buffer) for ids in completion_ids]


def _schema_validator(schema: dict[str, Any] | None = None, schema_file: str | None = None) -> Any:
    if (schema is None) == (schema_file is None):
        raise ValueError("give one of schema and schema_file")
    return _validator(json.dumps(schema), schema_file)


@functools.cache
def _validator(schema: str, file: str | None) -> Any:
    """A validator for a schema as JSON, or in a file, which is read once."""
    library = _extra("jsonschema")
    referencing = _extra("referencing")
    try:
        wanted = json.loads(schema if file is None else Path(file).read_text(encoding="utf-8-sig"))
        if not isinstance(wanted, dict):
            raise ValueError("it is no table")
        kind = library.validators.validator_for(wanted, default=library.Draft202012Validator)
        kind.check_schema(wanted)
    except (OSError, ValueError, RecursionError, library.SchemaError) as error:
        reason = getattr(error, "message", error)
        raise ValueError(f"{'schema' if file is None else file} is no JSON schema: {reason}") from None
    return kind(wanted, registry=referencing.Registry())  # the default one downloads what is referred to


@_checked_by(_schema_validator)
def matches_schema(
    completions: Sequence[Any],
    *,
    schema: dict[str, Any] | None = None,
    schema_file: str | None = None,
    **_: Any,
) -> list[float]:
    """1 if the completion, or else its last block fenced by ```json, is JSON that the schema allows, else 0.

    Args:
        schema: a table.
        schema_file: a JSON file with the schema, instead.
    """
    validator = _schema_validator(schema, schema_file)
    return [float(_is_valid(_text_of(one), validator)) for one in completions]


def _text_of(completion: Any) -> str:
    """A completion's text: its last message of the assistant; empty without one."""
    if isinstance(completion, str):
        return completion
    content = next((one.get("content") for one in reversed(completion) if one.get("role") == "assistant"), None)
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    return content or ""


def _extra(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        what = f"needs {package}, which cannot be imported ({error})"
        raise ImportError(f"{what}: install it: pip install '{REQUIREMENTS[package]}'") from None


def _in_time(function: Callable[..., list[Any]], *arguments: Any, **options: Any) -> list[Any]:
    """What a function of math-verify finds; nothing if it takes too long."""
    try:
        return function(*arguments, **options)
    except importlib.import_module("math_verify.errors").TimeoutException:  # a BaseException, and not caught there
        return []


def _is_valid(text: str, validator: Any) -> bool:
    for part in (text, *_FENCE.findall(text)[-1:]):
        try:
            return validator.is_valid(json.loads(part, parse_constant=int))  # int("NaN") is a ValueError, too
        except (ValueError, RecursionError):  # no JSON, or nested too deeply
            continue
    return False


class _Number(NamedTuple):
    value: Fraction
    is_percent: bool


def _is_answer(text: str, wanted: str) -> float:
    wanted = _marked(wanted) or wanted
    reference = _number(wanted, _NAMED)
    if reference is None:
        return float(_normal(_marked(text) or text) == _normal(wanted))
    found = _final_number(text)
    if found is None:
        return 0.0
    # A percentage beside a plain number: 50 % is 50 or 1/2.
    values = [found.value * (100 if reference.is_percent else Fraction(1, 100))]
    return float(reference.value in [found.value, *(values if found.is_percent != reference.is_percent else ())])


def _final_number(text: str) -> _Number | None:
    boxed = _boxed(text)
    lines = _HASHES.findall(text)
    if boxed is not None:
        return _number(boxed, _WITH_UNIT)
    if lines and (found := _number(lines[-1], _WITH_UNIT)):
        return found
    numbers = [*re.finditer(_NUMBER, _clean(text))]
    return _value(numbers[-1]) if numbers else None


def _marked(text: str) -> str | None:
    """What is marked as the answer, in a box or after ``####``."""
    boxed = _boxed(text)
    return boxed if boxed is not None else next(reversed(_HASHES.findall(text)), None)


def _boxed(text: str) -> str | None:
    r"""What the last complete ``\boxed{…}`` holds."""
    found = None
    opened: list[tuple[bool, int]] = []
    for match in _BRACES.finditer(text):
        if match[0] == "{" or match["boxed"]:
            opened.append((bool(match["boxed"]), match.end()))
        elif match[0] == "}" and opened:
            is_box, start = opened.pop()
            found = text[start : match.start()] if is_box else found
    return found


def _number(text: str, form: str) -> _Number | None:
    match = re.fullmatch(form, _clean(text).strip(" \n*."))
    return _value(match) if match else None


def _value(match: re.Match[str]) -> _Number | None:
    try:
        above, below = (Fraction((match[name] or "1").replace(",", "")) for name in ("above", "below"))
        return _Number(above / below, bool(match["percent"]))
    except (ValueError, ZeroDivisionError):  # Python converts at most 4300 digits
        return None


def _clean(text: str) -> str:
    """The text without LaTeX's spaces, signs of currency and the like, with fractions as a/b."""
    text = text.replace("\u2212", "-")  # the minus of typography
    text = _MIXED.sub(lambda found: f"{int(found[1]) * int(found[3]) + int(found[2])}/{found[3]}", text)
    for pattern, by in _CLEANED:
        text = pattern.sub(by, text)
    return text


def _normal(text: str) -> str:
    """A text without LaTeX's fonts, for a comparison that ignores case and how long spaces are."""
    is_font, by = _CLEANED[0]
    words = unicodedata.normalize("NFKC", is_font.sub(by, text)).casefold().split()
    return " ".join(words).strip(" .$*")
