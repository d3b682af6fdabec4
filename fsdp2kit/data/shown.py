"""Whether a conversation's text shows what its messages say: each content, part, thought and argument of a call.

Each text is searched for, which is cheap. Where it is not found as it stands, it is searched for without spaces and
case, and as JSON; templates trim, indent and escape. What is left after that is tried: marks are put into the texts,
and the template is rendered again.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp2kit.data.messages import (
    CLOSING,
    OPENING,
    Message,
    empty_thought,
    is_text,
    shortened,
    thought_in,
    without_thoughts,
)
from fsdp2kit.data.names import PLAIN, REASONING
from fsdp2kit.data.template import LEFT_OUT, Template
from fsdp2kit.errors import UserError

Path = tuple[str | int, ...]

_TAG = re.compile(r"</?[\w|:.-]+>|\[/?[A-Z_]+\]|<\|[\w.-]+\|>|◁/?think▷")
_PROBE = "fsdp2kit_probe"
_SURE = 32  # letters of a text that does not stand in another one by chance
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


def settle(
    template: Template, messages: list[Message], text: str, learnt: Sequence[int], *, prompt: bool = False
) -> tuple[list[Message], str]:
    """The messages and their text, which shows each text that they say.

    A text that is shown whole stays as it is. A thought that the template cuts out of a content, or writes behind
    an empty one of its own, is moved to ``reasoning_content`` if it renders that.

    Args:
        text: of the messages, as the template renders them.
        learnt: indices of the turns that are learnt. Thoughts of the others may be left out.
        prompt: append the generation prompt.

    Raises:
        UserError: the template leaves out a text.
    """
    said = said_in(messages, learnt)
    is_whole = _shows(template, messages, text, said, prompt=prompt)
    moved = _thoughts_moved(template, messages, learnt)
    if moved is not messages:
        other = next(template.texts(moved, prompt=prompt, keep_case=True), "")
        # A text that is shown whole keeps each letter. Only an empty thought before it may go.
        is_same = shows_all(other, said) and len(squeezed(other)) < len(squeezed(text))
        if (is_same or not is_whole) and _shows(template, moved, other, said_in(moved, learnt), prompt=prompt):
            return moved, other
    if is_whole:
        return messages, text
    for one in _hidden(template, messages, said, prompt=prompt):
        raise _left_out(template, messages, one)
    return messages, text


def _shows(template: Template, messages: list[Message], text: str, said: Sequence[Said], *, prompt: bool) -> bool:
    """Whether the messages' text shows all that they say.

    A short thought may stand in it by chance, so it is tried.
    """
    if not shows_all(text, said):
        return False
    short = [one for one in said if one.path[0] in REASONING and len(one.text.strip()) < _SURE]
    return not short or next(_hidden(template, messages, short, prompt=prompt), None) is None


def _thoughts_moved(template: Template, messages: list[Message], learnt: Sequence[int]) -> list[Message]:
    """The messages with the thoughts that learnt contents begin with as a field, by the template's name for it."""
    for at in learnt:
        content = messages[at].get("content")
        found = _thought_in(template, messages, at, content) if isinstance(content, str) else None
        if found is not None and not any(messages[at].get(name) for name in REASONING):
            messages = template.with_thought_apart(messages, at, *found)
    return messages


def _thought_in(template: Template, messages: list[Message], at: int, content: str) -> tuple[str, str] | None:
    """The thought that a content begins with, also where the generation prompt opens it, and what follows it."""
    found = thought_in(content)
    if found is None and CLOSING in content and OPENING not in content:
        asked = next(template.texts(messages[:at], prompt=True), "")
        if asked.rstrip().endswith(OPENING):
            found = thought_in(OPENING + content)
    return found


def _hidden(
    template: Template, messages: list[Message], said: Sequence[Said], *, prompt: bool = False
) -> Iterator[Said]:
    """Those of the texts that the template leaves out, found by trials: marks are put into them.

    A text that cannot be tried, since the template refuses what is tried, counts as shown.
    """
    probed = messages
    marks = []
    for number, one in enumerate(said):
        text = one.text
        its = []
        for place, (start, end) in reversed(list(enumerate(one.runs()))):
            ends = [f"{_PROBE}{number}x{place}{side}" for side in "ab"]
            text = f"{text[:start]}{ends[0]} {text[start:end]} {ends[1]}{text[end:]}"
            its += ends
        probed = one.replaced(probed, text)
        marks.append(its)
    shown = next(template.texts(probed, prompt=prompt), "")
    for one, its in zip(said, marks, strict=True):
        empty = "" if one.may_hide else empty_thought(one.text)
        lacks_empty = bool(empty) and empty not in squeezed(shown)
        may_be_hidden = not all(mark in shown for mark in its)
        if lacks_empty or (may_be_hidden and _is_hidden(template, messages, one, prompt=prompt)):
            yield one


def _is_hidden(template: Template, messages: list[Message], one: Said, *, prompt: bool) -> bool:
    """Whether the template leaves out the beginning or the end of one of a text's pieces."""
    for start, end in one.runs():
        piece = one.text[start:end]
        for marked in (f"{_PROBE} {piece}", f"{piece} {_PROBE}"):
            probe = one.replaced(messages, one.text[:start] + marked + one.text[end:])
            if any(_PROBE not in text for text in template.texts(probe, prompt=prompt)):
                return True
    return False


def _left_out(template: Template, messages: list[Message], one: Said) -> UserError:
    """The error of a text that the template leaves out."""
    is_thought = one.path[0] in REASONING or bool(without_thoughts(one.text))
    what = f"the chat template leaves out {'the thought in ' if is_thought else ''}{one.name}"
    if not is_thought:
        return UserError(template.where, f"{what}: {shortened(one.text.strip())}", LEFT_OUT)
    until = messages[: one.at + 1]
    is_earlier = one.at + 1 < len(messages) and not list(_hidden(template, until, [one]))
    last = 'set data.train_on = "last" to learn the last answer of each row, ' if is_earlier else ""
    keeps = 'set model.chat_template to a template that keeps all thoughts, such as "chatml"'
    return UserError(template.where, what, f"{last}{keeps}, or take the thought out of the data")
