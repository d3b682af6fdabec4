"""Messages → the messages, fitted to a chat template, and their text, which shows all that they say.

Templates differ in the fields and roles they render, in the name of the reasoning, and in whether a call's arguments
are an object or its JSON. No template is known by name here. A probe is rendered in the field's place, and its text
shows or does not. Each question is asked once for a template and a kind of field, so later rows need no extra
rendering.

Then each content, part, thought and argument of a call is searched for in the text, which is cheap. Where it is not
found as it stands, it is searched for without spaces and case, and as JSON; templates trim, indent and escape. What is
left after that is tried: marks are put into the texts, and the template is rendered again.
"""

from __future__ import annotations

import difflib
import html
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fsdp2kit.data.fields import (
    CLOSING,
    OPENING,
    empty_thought,
    is_text,
    shortened,
    thought_in,
    without_thoughts,
)
from fsdp2kit.data.json_texts import parsed
from fsdp2kit.data.messages import Message, Messages
from fsdp2kit.data.names import FLAGS, OPPOSITE, PLAIN, REASONING, ROLES, STANDARD_ROLES
from fsdp2kit.data.template import Endless, Template
from fsdp2kit.errors import UserError

_Path = tuple[str | int, ...]

_FIELDS = ("role", "content", "tool_calls", "tool_call_id")  # of every message
_PROBE = "fsdp2kit_probe"
_KEY = "fsdp2kit_key"
_LEFT_OUT = "set model.chat_template to a template that renders it, or take it out of the data"
_TAG = re.compile(r"</?[\w|:.-]+>|\[/?[A-Z_]+\]|<\|[\w.-]+\|>|◁/?think▷")
_SURE = 32  # letters of a text that does not stand in another one by chance
_TRIED = 100  # places of a text that already hold another one

# What a template has answered, by its key and the question.
_ANSWERS: dict[tuple[Any, ...], Any] = {}


def fit(template: Template, messages: Messages, learnt: Sequence[int], *, prompt: bool) -> tuple[Messages, str]:
    """The messages with the fields that the template renders, and their text, which shows each text that they say.

    Args:
        learnt: indices of the turns that are learnt. Thoughts of the others may be left out.
        prompt: append the generation prompt.

    Raises:
        UserError: the template leaves out a field or a text, or refuses the messages.
    """
    fitted = _fit_fields(template, [_without_flags(template, message) for message in messages])
    text = template.render(fitted, prompt=prompt)
    return _settle(template, fitted, text, learnt, prompt=prompt)


class _CallForm(NamedTuple):
    """A way to write tool calls."""

    blank: str | None
    """The content of a turn that has only calls; "as it is" leaves it."""
    as_text: bool
    """Arguments are JSON in a string, not an object."""
    nested: bool
    """``{"function": {"name", "arguments"}}``, not ``{"name", "arguments"}``."""


def _fit_fields(template: Template, messages: list[Message]) -> list[Message]:
    """The messages, changed so that the template renders every field."""
    for at, message in enumerate(messages):
        if (role := _role(template, at, message["role"])) != message["role"]:
            messages = _replaced(messages, at, {"role": role})
        _check_parts(template, at, message)
    if any("tool_calls" in message for message in messages):
        messages = _fit_calls(template, messages)
    for at, message in enumerate(messages):
        name = next((name for name in REASONING if isinstance(message.get(name), str) and message[name]), None)
        if name is not None and message["role"] == "assistant":
            messages = _fit_reasoning(template, messages, at, name)
    for at, message in enumerate(messages):
        if message.get("content"):
            messages = _fit_content(template, messages, at)
    if template.has_tools:

        def shows_tools(text: str) -> bool:
            return text != next(_texts(template, messages, with_tools=False), None)

        _choose(template, ("tools",), "the row's tools", [(True, messages)], shows_tools)
    for at, message in enumerate(messages):
        _check_fields(template, messages, at, message)
    return messages


def _without_flags(template: Template, message: Message) -> Message:
    """A message without what says whether it is learnt, unless the template reads it."""
    if message.keys() <= PLAIN:
        return message
    names = [key for key in message if (key in FLAGS or key == OPPOSITE) and not _is_named(key, template.source)]
    return {key: value for key, value in message.items() if key not in names}


def _check_parts(template: Template, at: int, message: Message) -> None:
    """Refuse parts of a type that the template does not name."""
    content = message.get("content")
    for number, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") or "unknown"
        if kind != "text" and not _is_named(str(kind), template.source):
            what = f"messages[{at}].content[{number}] is of type {kind}, which neither this nor the template reads"
            raise UserError(template.where, what, 'make it a part of type "text", or drop it')


def _check_fields(template: Template, messages: list[Message], at: int, message: Message) -> None:
    """Refuse a field that holds a text, unless the template reads it."""
    if message.keys() <= PLAIN:
        return
    role = message["role"]
    read = (*_FIELDS, *FLAGS, *(REASONING if role == "assistant" else ()))
    for name, value in message.items():
        if name in read or not is_text(name, value, role):
            continue

        def is_read(text: str, name: str = name) -> bool:
            return text != next(_texts(template, _replaced(messages, at, {name: None})), None)

        what = f"messages[{at}].{name}, which is {shortened(value)}"
        _choose(template, ("field", role, name), what, [(True, messages)], is_read)


def _choose(
    template: Template,
    question: tuple[Any, ...],
    what: str,
    probes: Iterable[tuple[Any, list[Message]]],
    is_whole: Callable[[str], bool],
    *,
    at: int = -1,
) -> Any:
    """The first option whose probe the template renders whole. Remembered for each question.

    Args:
        question: what is asked of the template, of which field.
        what: names the field in the error that the template leaves it out.
        probes: each option, with the messages that it stands for.
        is_whole: whether a text shows the whole probe.
        at: index of the message with the probe. The text up to this message is tried, too: some templates render
            only the last turn's reasoning.

    Returns:
        None if the template rejects the row; rendering reports the error later.
    """
    key = (*template.key, *question)
    if key in _ANSWERS:
        return _ANSWERS[key]
    rendered = False
    for option, probe in probes:
        for text in _texts(template, probe, probe[: at + 1 or None]):
            rendered = True
            if is_whole(text):
                _ANSWERS[key] = option
                return option
    if rendered:
        raise UserError(template.where, f"the chat template leaves out {what}", _LEFT_OUT)
    return None


def _texts(
    template: Template,
    *conversations: list[Message],
    with_tools: bool = True,
    prompt: bool = False,
    keep_case: bool = False,
) -> Iterator[str]:
    """The texts of the conversations that the template accepts, in lower case: templates may change the case."""
    for messages in conversations:
        try:
            text = template.render(messages, with_tools=with_tools, prompt=prompt)
        except Endless:  # so would the others be
            raise
        except UserError:
            continue
        yield text if keep_case else text.lower()


def _role(template: Template, at: int, role: str) -> str:
    """The role of a message by its usual name."""
    if role in STANDARD_ROLES:
        return role
    # The template's own role is accepted. Another name of the assistant is not: the turn would not be learnt.
    is_own = _is_quoted(role, template.source) and ROLES.get(role) != "assistant"
    if role == "function":  # OpenAI's former name of "tool"; templates name it as the type of a tool as well
        return role if is_own and not _is_quoted("tool", template.source) else "tool"
    if is_own:
        return role
    near = ROLES.get(role.strip().lower()) or next(iter(difflib.get_close_matches(role.lower(), STANDARD_ROLES)), None)
    if near == "tool":
        return near
    todo = f"did you mean {near!r}?" if near else f"use {', '.join(STANDARD_ROLES)}, or a template that names the role"
    raise UserError(template.where, f"messages[{at}] has the unknown role {role!r}", todo)


def _fit_calls(template: Template, messages: list[Message]) -> list[Message]:
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    forms = {
        _CallForm("as it is", isinstance(call.get("function", call).get("arguments"), str), "function" in call)
        for call in calls
    }
    with_calls = [at for at, message in enumerate(messages) if "tool_calls" in message]
    several = any(len(messages[at]["tool_calls"]) > 1 for at in with_calls)
    blank = {bool(messages[at].get("content")) for at in with_calls}
    bare = any("arguments" not in call.get("function", call) for call in calls)
    probe, values = _probe_calls(messages)

    def is_whole(text: str) -> bool:
        # Escaped quotes are JSON within JSON; single ones are Python's notation.
        is_quoted = f'\\"{_KEY}' in text or f"'{_KEY}'" in text
        return not is_quoted and all(value in text for value in values)

    # Try objects first: a template that takes both may print a string unchanged, but writes an object as the
    # model's calls.
    product = itertools.product(("as it is", None, ""), (False, True), (True, False))
    probes = ((form, _rewritten(probe, form)) for form in itertools.starmap(_CallForm, product))
    question = ("calls", several, bare, *sorted(blank))
    what = f"messages[{with_calls[0]}].tool_calls"
    form = _choose(template, question, what, probes, is_whole, at=with_calls[-1])
    return messages if form is None or {form} == forms else _rewritten(messages, form, template.where)


def _fit_reasoning(template: Template, messages: list[Message], at: int, name: str) -> list[Message]:
    names = dict.fromkeys((name, *REASONING))
    probes = ((other, _replaced(messages, at, {name: None, other: _PROBE})) for other in names)
    question = ("reasoning", name, "tool_calls" in messages[at])
    what = f"messages[{at}].{name}"
    chosen = _choose(template, question, what, probes, lambda text: _PROBE in text, at=at)
    if chosen in (None, name):
        return messages
    return _replaced(messages, at, {name: None, chosen: messages[at][name]})


def _with_thought_apart(
    template: Template, messages: list[Message], at: int, thought: str, rest: str
) -> list[Message]:
    """The messages with the thought in a content as a field, by the template's name for it.

    They are returned as they are if the template renders no such field.
    """
    lacks_field = (*template.key, "no reasoning", "tool_calls" in messages[at])
    if lacks_field in _ANSWERS:
        return messages
    moved = _replaced(messages, at, {"content": rest, REASONING[0]: thought})
    try:
        return _fit_reasoning(template, moved, at, REASONING[0])
    except Endless:
        raise
    except UserError:
        _ANSWERS[lacks_field] = True
        return messages


def _fit_content(template: Template, messages: list[Message], at: int) -> list[Message]:
    message = messages[at]
    content = message["content"]
    parts = isinstance(content, list)
    if isinstance(content, str) and not content.strip():
        return messages
    joined = _joined(content) if parts else None

    def probes() -> Iterator[tuple[str, list[Message]]]:
        value = [*content, {"type": "text", "text": _PROBE}] if parts else f"{content}. {_PROBE}"
        yield "as it is", _replaced(messages, at, {"content": value})
        if joined is not None:
            yield "joined", _replaced(messages, at, {"content": f"{joined}. {_PROBE}"})

    def is_whole(text: str) -> bool:
        # A probe in quotes of its own comes from a list of parts, printed as Python or JSON.
        return _PROBE in text and f"'{_PROBE}'" not in text and f'"{_PROBE}"' not in text

    beside = " beside its tool_calls" if "tool_calls" in message else ""
    what = f'messages[{at}].content (role "{message["role"]}"){beside}'
    # Some templates render a system message only at the start, or either the text or the calls of a turn.
    others = tuple(name for name in ("tool_calls", *REASONING) if message.get(name))
    form = _choose(template, ("content", message["role"], at == 0, parts, others), what, probes(), is_whole, at=at)
    return _replaced(messages, at, {"content": joined}) if form == "joined" and joined is not None else messages


def _is_quoted(name: str, source: str) -> bool:
    """Whether a template's source has a name in quotes."""
    return f"'{name}'" in source or f'"{name}"' in source


def _is_named(field: str, source: str) -> bool:
    """Whether a template's source has a field's name as Jinja writes it: ``.name`` or ``'name'``."""
    return _is_quoted(field, source) or re.search(rf"\.{re.escape(field)}\b", source) is not None


def _replaced(messages: list[Message], at: int, fields: Mapping[str, Any]) -> list[Message]:
    """The messages with fields of one of them replaced; None removes a field."""
    kept = {key: value for key, value in messages[at].items() if key not in fields}
    given = {key: value for key, value in fields.items() if value is not None}
    return [*messages[:at], {**kept, **given}, *messages[at + 1 :]]


def _joined(parts: Any) -> str | None:
    """The parts of a content as one text; None if one is not a text."""
    texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else None


def _rewritten(messages: list[Message], form: _CallForm, where: str = "") -> list[Message]:
    """The messages with their tool calls written in the given form."""
    fitted = []
    for at, message in enumerate(messages):
        if "tool_calls" in message:
            name = f"messages[{at}].tool_calls"
            message = {**message, "tool_calls": [_in_form(call, form, where, name) for call in message["tool_calls"]]}
            if form.blank != "as it is" and not message.get("content"):
                message["content"] = form.blank
        fitted.append(message)
    return fitted


def _in_form(call: Message, form: _CallForm, where: str, name: str) -> Message:
    function = dict(call.get("function", call))
    arguments = function.get("arguments")
    if form.as_text and arguments is not None and not isinstance(arguments, str):
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    elif not form.as_text and isinstance(arguments, str):
        function["arguments"] = parsed(arguments, where, f"{name} arguments") or {}
    if form.nested == ("function" in call):
        return {**call, "function": function} if form.nested else function
    if form.nested:
        outer = {key: function.pop(key) for key in ("id", "type") if key in function}
        return {"type": "function", **outer, "function": function}
    return {**{key: value for key, value in call.items() if key not in ("function", "type")}, **function}


def _probe_calls(messages: list[Message]) -> tuple[list[Message], list[str]]:
    """The messages with a probe instead of each call's arguments (or name), and the values of the probes."""
    values: list[str] = []

    def probe(call: Message) -> Message:
        values.append(f"{_PROBE}_{len(values)}_")
        function = dict(call.get("function", call))
        function |= {"arguments": {_KEY: values[-1]}} if "arguments" in function else {"name": values[-1]}
        return {**call, "function": function} if "function" in call else function

    probed = [
        {**message, "tool_calls": [probe(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]
    return probed, values


@dataclass(frozen=True)
class _Said:
    """A text that a message says."""

    at: int
    """Index of the message."""
    path: _Path
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


def _said_in(messages: Sequence[Message], learnt: Sequence[int]) -> list[_Said]:
    """All texts of the messages, in the order in which templates write them.

    Thoughts of the assistant in turns that are not learnt may be left out, as they are when a model is asked.
    """
    found = []
    for at, message in enumerate(messages):
        may_hide = message["role"] == "assistant" and at not in learnt
        content = message.get("content")
        if isinstance(content, str) and message.keys() == PLAIN:
            found.append(_Said(at, ("content",), content, may_hide))
            continue
        for key in REASONING if not may_hide else ():
            if isinstance(message.get(key), str) and message["role"] == "assistant":
                found.append(_Said(at, (key,), message[key]))
        found += [_Said(at, path, text, may_hide) for path, text in _texts_of(content, ("content",))]
        for number, call in enumerate(message.get("tool_calls", ())):
            path: _Path = ("tool_calls", number, "function") if "function" in call else ("tool_calls", number)
            function = call.get("function", call)
            arguments = function.get("arguments")
            if arguments is None and isinstance(function.get("name"), str):
                found.append(_Said(at, (*path, "name"), function["name"]))
            found += [_Said(at, (*path, "arguments", *rest), text) for rest, text in _leaves(arguments)]
    return [one for one in found if one.text.strip()]


def _texts_of(content: Any, path: _Path) -> Iterator[tuple[_Path, str]]:
    if isinstance(content, str):
        yield path, content
    for number, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, str):
            yield (*path, number), part
        elif part.get("type", "text") == "text" and isinstance(part.get("text"), str):
            yield (*path, number, "text"), part["text"]
        else:
            yield from ((one, text) for one, text in _leaves(part, (*path, number)) if is_text(str(one[-1]), text))


def _leaves(value: Any, path: _Path = ()) -> Iterator[tuple[_Path, str]]:
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


def _with(value: Any, path: _Path, text: str) -> Any:
    if not path:
        return text
    first, *rest = path
    copied: Any = list(value) if isinstance(value, list) else dict(value)
    copied[first] = _with(copied[first], tuple(rest), text)
    return copied


def _shows_all(text: str, said: Sequence[_Said]) -> bool:
    """Whether a text shows each of some texts, at a place of its own."""
    if _have_places(text, said, lambda one: one.ways()):
        return True
    return _have_places(_squeezed(text), said, _squeezed_ways)


def _squeezed_ways(one: _Said) -> list[str]:
    """A text without spaces and case, as it stands and as templates escape it."""
    found = []
    for way in one.ways():
        forms = [way, json.dumps(way, ensure_ascii=False)[1:-1], json.dumps(way)[1:-1], html.escape(way)]
        found += [_squeezed(form) for form in forms]
    return list(dict.fromkeys(found))


def _squeezed(text: str) -> str:
    """A text without spaces, in lower case."""
    return "".join(text.split()).lower()


def _have_places(text: str, said: Sequence[_Said], ways: Callable[[_Said], Sequence[str]]) -> bool:
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


def _settle(
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
    said = _said_in(messages, learnt)
    is_whole = _shows(template, messages, text, said, prompt=prompt)
    moved = _thoughts_moved(template, messages, learnt)
    if moved is not messages:
        other = next(_texts(template, moved, prompt=prompt, keep_case=True), "")
        # A text that is shown whole keeps each letter. Only an empty thought before it may go.
        is_same = _shows_all(other, said) and len(_squeezed(other)) < len(_squeezed(text))
        if (is_same or not is_whole) and _shows(template, moved, other, _said_in(moved, learnt), prompt=prompt):
            return moved, other
    if is_whole:
        return messages, text
    for one in _hidden(template, messages, said, prompt=prompt):
        raise _left_out(template, messages, one)
    return messages, text


def _shows(template: Template, messages: list[Message], text: str, said: Sequence[_Said], *, prompt: bool) -> bool:
    """Whether the messages' text shows all that they say.

    A short thought may stand in it by chance, so it is tried.
    """
    if not _shows_all(text, said):
        return False
    short = [one for one in said if one.path[0] in REASONING and len(one.text.strip()) < _SURE]
    return not short or next(_hidden(template, messages, short, prompt=prompt), None) is None


def _thoughts_moved(template: Template, messages: list[Message], learnt: Sequence[int]) -> list[Message]:
    """The messages with the thoughts that learnt contents begin with as a field, by the template's name for it."""
    for at in learnt:
        content = messages[at].get("content")
        found = _thought_in(template, messages, at, content) if isinstance(content, str) else None
        if found is not None and not any(messages[at].get(name) for name in REASONING):
            messages = _with_thought_apart(template, messages, at, *found)
    return messages


def _thought_in(template: Template, messages: list[Message], at: int, content: str) -> tuple[str, str] | None:
    """The thought that a content begins with, also where the generation prompt opens it, and what follows it."""
    found = thought_in(content)
    if found is None and CLOSING in content and OPENING not in content:
        asked = next(_texts(template, messages[:at], prompt=True), "")
        if asked.rstrip().endswith(OPENING):
            found = thought_in(OPENING + content)
    return found


def _hidden(
    template: Template, messages: list[Message], said: Sequence[_Said], *, prompt: bool = False
) -> Iterator[_Said]:
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
    shown = next(_texts(template, probed, prompt=prompt), "")
    for one, its in zip(said, marks, strict=True):
        empty = "" if one.may_hide else empty_thought(one.text)
        lacks_empty = bool(empty) and empty not in _squeezed(shown)
        may_be_hidden = not all(mark in shown for mark in its)
        if lacks_empty or (may_be_hidden and _is_hidden(template, messages, one, prompt=prompt)):
            yield one


def _is_hidden(template: Template, messages: list[Message], one: _Said, *, prompt: bool) -> bool:
    """Whether the template leaves out the beginning or the end of one of a text's pieces."""
    for start, end in one.runs():
        piece = one.text[start:end]
        for marked in (f"{_PROBE} {piece}", f"{piece} {_PROBE}"):
            probe = one.replaced(messages, one.text[:start] + marked + one.text[end:])
            if any(_PROBE not in text for text in _texts(template, probe, prompt=prompt)):
                return True
    return False


def _left_out(template: Template, messages: list[Message], one: _Said) -> UserError:
    """The error of a text that the template leaves out."""
    is_thought = one.path[0] in REASONING or bool(without_thoughts(one.text))
    what = f"the chat template leaves out {'the thought in ' if is_thought else ''}{one.name}"
    if not is_thought:
        return UserError(template.where, f"{what}: {shortened(one.text.strip())}", _LEFT_OUT)
    until = messages[: one.at + 1]
    is_earlier = one.at + 1 < len(messages) and not list(_hidden(template, until, [one]))
    last = 'set data.train_on = "last" to learn the last answer of each row, ' if is_earlier else ""
    keeps = 'set model.chat_template to a template that keeps all thoughts, such as "chatml"'
    return UserError(template.where, what, f"{last}{keeps}, or take the thought out of the data")
