"""Whether a conversation's text shows what its messages say: each content, part, thought and argument of a call.

Each text is searched for, which is cheap. Where it is not found as it stands, it is searched for without spaces and
case, and as JSON; templates trim, indent and escape. What is left after that is a matter for trials, which
`fsdp2kit.data.template` makes.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp2kit.data.messages import Message, is_text, without_thoughts
from fsdp2kit.data.names import PLAIN, REASONING

Path = tuple[str | int, ...]

_TAG = re.compile(r"</?[\w|:.-]+>|\[/?[A-Z_]+\]|<\|[\w.-]+\|>|◁/?think▷")
_TRIED = 100  # places of a text that already hold another one


@dataclass(frozen=True)
class Said:
    """A text that a message says."""

    at: int
    """Index of the message."""
    path: Path
    """Keys of the text in the message."""
    text: str
    may_hide: bool = False
    """Thoughts in it may be left out."""

    @property
    def name(self) -> str:
        """The text's name in an error."""
        steps = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.path)
        return f"messages[{self.at}]{steps}"

    def ways(self) -> list[str]:
        """The text, and what stands for it where its thoughts may be left out."""
        hidden = without_thoughts(self.text) if self.may_hide else []
        return [self.text.strip(), *(one.strip() for one in hidden)]

    def runs(self) -> list[tuple[int, int]]:
        """Where its pieces between tags stand, without the spaces around them; none of what may be left out."""
        hidden = without_thoughts(self.text) if self.may_hide else []
        shown = min(hidden, key=len) if hidden else self.text
        start = max(self.text.rfind(shown), 0)
        found = []
        for begin, end in _between_tags(self.text, start):
            piece = self.text[begin:end]
            if piece.strip():
                begin += len(piece) - len(piece.lstrip())
                found.append((begin, begin + len(piece.strip())))
        return found

    def replaced(self, messages: Sequence[Message], text: str) -> list[Message]:
        """The messages with another text in its place."""
        found = list(messages)
        found[self.at] = _with(found[self.at], self.path, text)
        return found


def said_in(messages: Sequence[Message], learnt: Sequence[int]) -> list[Said]:
    """All texts of the messages, in the order in which templates write them.

    Thoughts of the assistant in turns that are not learnt may be left out, as they are when a model is asked.
    """
    found = []
    for at, message in enumerate(messages):
        may_hide = message["role"] == "assistant" and at not in learnt
        content = message.get("content")
        if isinstance(content, str) and message.keys() == PLAIN:
            found.append(Said(at, ("content",), content, may_hide))
            continue
        for key in REASONING if not may_hide else ():
            if isinstance(message.get(key), str) and message["role"] == "assistant":
                found.append(Said(at, (key,), message[key]))
        found += [Said(at, path, text, may_hide) for path, text in _texts_of(content, ("content",))]
        for number, call in enumerate(message.get("tool_calls", ())):
            path: Path = ("tool_calls", number, "function") if "function" in call else ("tool_calls", number)
            function = call.get("function", call)
            arguments = function.get("arguments")
            if arguments is None and isinstance(function.get("name"), str):
                found.append(Said(at, (*path, "name"), function["name"]))
            found += [Said(at, (*path, "arguments", *rest), text) for rest, text in _leaves(arguments)]
    return [one for one in found if one.text.strip()]


def _texts_of(content: Any, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(content, str):
        yield path, content
    for number, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, str):
            yield (*path, number), part
        elif part.get("type", "text") == "text" and isinstance(part.get("text"), str):
            yield (*path, number, "text"), part["text"]
        else:
            yield from ((one, text) for one, text in _leaves(part, (*path, number)) if is_text(str(one[-1]), text))


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """The texts within a value."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _leaves(item, (*path, number))


def _between_tags(text: str, start: int) -> Iterator[tuple[int, int]]:
    for tag in _TAG.finditer(text, start):
        yield start, tag.start()
        start = tag.end()
    yield start, len(text)


def _with(value: Any, path: Path, text: str) -> Any:
    if not path:
        return text
    first, *rest = path
    copied: Any = list(value) if isinstance(value, list) else dict(value)
    copied[first] = _with(copied[first], tuple(rest), text)
    return copied


def shows_all(text: str, said: Sequence[Said]) -> bool:
    """Whether a text shows each of some texts, at a place of its own."""
    if _have_places(text, said, lambda one: one.ways()):
        return True
    return _have_places(squeezed(text), said, _squeezed_ways)


def _squeezed_ways(one: Said) -> list[str]:
    """A text without spaces and case, as it stands and as templates escape it."""
    found = []
    for way in one.ways():
        forms = [way, json.dumps(way, ensure_ascii=False)[1:-1], json.dumps(way)[1:-1], html.escape(way)]
        found += [squeezed(form) for form in forms]
    return list(dict.fromkeys(found))


def squeezed(text: str) -> str:
    """A text without spaces, in lower case."""
    return "".join(text.split()).lower()


def _have_places(text: str, said: Sequence[Said], ways: Callable[[Said], Sequence[str]]) -> bool:
    """Whether the texts stand in a text without sharing letters: behind each other, or else in any order."""
    taken: list[tuple[int, int]] = []
    end = 0
    for one in said:
        place = None
        for way in ways(one):
            place = place or _place(text, way, end, taken)
        if place is None:
            return False
        taken.append(place)
        end = max(end, place[1])
    return True


def _place(text: str, way: str, end: int, taken: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """Where a text stands and no other does: behind ``end``, or else before it."""
    start = text.find(way, end)
    if start >= 0:
        return start, start + len(way)
    start = text.find(way)
    for _ in range(_TRIED):
        if start < 0:
            return None
        stop = start + len(way)
        if all(stop <= other[0] or other[1] <= start for other in taken):
            return start, stop
        start = text.find(way, start + 1)
    return None
