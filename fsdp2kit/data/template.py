"""Messages as their chat template takes them, or refused: what it makes of a field is found by rendering it.

Templates differ in which fields and roles they render, in what they call the reasoning, and in whether a call's
arguments are an object or its JSON. Nothing here knows a template: a probe in the field's place shows in the text, or
does not. Each question is asked once for a template and a kind of field, so that rows cost no further rendering.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fsdp2kit.errors import UserError

Message = dict[str, Any]

# What ShareGPT-style data calls the roles.
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "function_response": "tool",
    "observation": "tool",
    "tool_response": "tool",
}
_STANDARD = ("system", "developer", "user", "assistant", "tool")
REASONING = ("reasoning_content", "reasoning", "thinking")
_PROBE = "fsdp2kit_probe"
_KEY = "fsdp2kit_key"
_TODO = "set model.chat_template to a template that renders it, or take it out of the data"


class _CallForm(NamedTuple):
    """How tool calls are written."""

    blank: str | None
    """The content of a turn that has nothing but calls; "as it is" leaves it."""
    as_text: bool
    """Arguments are JSON in a string, not an object."""
    nested: bool
    """``{"function": {"name", "arguments"}}``, not ``{"name", "arguments"}``."""


class MessageFit:
    """One conversation on its way to its template.

    Args:
        template: the Jinja source.
        render: the text of some messages with some tools; raises a `UserError` where the template does.
        tools: those of the row.
        where: names the row in errors.
    """

    _answers: dict[tuple[Any, ...], Any] = {}  # noqa: RUF012 (one for the whole process, by template)

    def __init__(self, template: str, render: Callable[[list[Message], Any], str], *, tools: Any, where: str) -> None:
        self._template, self._render, self._tools, self._where = template, render, tools, where

    def fit(self, messages: list[Message]) -> list[Message]:
        """The messages as the template renders them whole.

        Raises:
            UserError: a role is unknown, or the template leaves out what a message or the tools say.
        """
        for at, message in enumerate(messages):
            self._check_role(at, message["role"])
        if any("tool_calls" in message for message in messages):
            messages = self._fit_calls(messages)
        for at, message in enumerate(messages):
            name = next((name for name in REASONING if isinstance(message.get(name), str) and message[name]), None)
            if name is not None and message["role"] == "assistant":
                messages = self._fit_reasoning(messages, at, name)
        for at, message in enumerate(messages):
            if message.get("content"):
                messages = self._fit_content(messages, at)
        if self._tools:

            def is_told(text: str) -> bool:
                return text != next(self._texts(messages, tools=None), None)

            self._choose(("tools",), "the row's tools", [(True, messages)], is_told)
        return messages

    def _choose(
        self,
        kind: tuple[Any, ...],
        what: str,
        probes: Iterable[tuple[Any, list[Message]]],
        is_whole: Callable[[str], bool],
        *,
        at: int = -1,
    ) -> Any:
        """The first option whose probe the template renders whole, asked of the first row with this kind of field.

        Args:
            what: the field, for the error where the template leaves it out.
            probes: each option with the messages as it has them.
            is_whole: whether a text has all of the probe.
            at: the probe's message. The text up to it counts as well: some templates leave out all reasoning but that
                of the last turn.

        Returns:
            None: the template refuses this row, which another will say.
        """
        key = (self._template, *kind)
        if key in self._answers:
            return self._answers[key]
        rendered = False
        for option, probe in probes:
            for text in self._texts(probe, probe[: at + 1 or None], tools=self._tools):
                rendered = True
                if is_whole(text):
                    self._answers[key] = option
                    return option
        if rendered:
            raise UserError(self._where, f"the chat template leaves out {what}", _TODO)
        return None

    def _texts(self, *conversations: list[Message], tools: Any) -> Iterator[str]:
        """What the template makes of those it does not refuse, in lower case: it may change that."""
        for messages in conversations:
            with contextlib.suppress(UserError):
                yield self._render(messages, tools).lower()

    def _check_role(self, at: int, role: str) -> None:
        if role in _STANDARD:
            return
        # A role of the template's own; another name for the assistant would be read and never learnt.
        is_named = f"'{role}'" in self._template or f'"{role}"' in self._template
        if is_named and ROLES.get(role) != "assistant":
            return
        near = ROLES.get(role.strip().lower()) or next(iter(difflib.get_close_matches(role.lower(), _STANDARD)), None)
        todo = f"did you mean {near!r}?" if near else f"use {', '.join(_STANDARD)}, or a template that names the role"
        raise UserError(self._where, f"messages[{at}] has the unknown role {role!r}", todo)

    def _fit_calls(self, messages: list[Message]) -> list[Message]:
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
            # Escaped quotes: JSON within JSON. Single ones: Python's notation.
            is_quoted = f'\\"{_KEY}' in text or f"'{_KEY}'" in text
            return not is_quoted and all(value in text for value in values)

        # Objects come first: where a template takes both, it may print a string as it is, and an object as its model
        # writes calls.
        product = itertools.product(("as it is", None, ""), (False, True), (True, False))
        probes = ((form, _rewritten(probe, form)) for form in itertools.starmap(_CallForm, product))
        kind, what = ("calls", several, bare, *sorted(blank)), f"messages[{with_calls[0]}].tool_calls"
        form = self._choose(kind, what, probes, is_whole, at=with_calls[-1])
        return messages if form is None or {form} == forms else _rewritten(messages, form, self._where)

    def _fit_reasoning(self, messages: list[Message], at: int, name: str) -> list[Message]:
        names = dict.fromkeys((name, *REASONING))
        probes = ((other, _replaced(messages, at, {name: None, other: _PROBE})) for other in names)
        kind, what = ("reasoning", name, "tool_calls" in messages[at]), f"messages[{at}].{name}"
        chosen = self._choose(kind, what, probes, lambda text: _PROBE in text, at=at)
        if chosen in (None, name):
            return messages
        return _replaced(messages, at, {name: None, chosen: messages[at][name]})

    def _fit_content(self, messages: list[Message], at: int) -> list[Message]:
        message, content = messages[at], messages[at]["content"]
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
            # In quotes by itself: a list of parts as Python or JSON prints it.
            return _PROBE in text and f"'{_PROBE}'" not in text and f'"{_PROBE}"' not in text

        beside = " beside its tool_calls" if "tool_calls" in message else ""
        what = f'messages[{at}].content (role "{message["role"]}"){beside}'
        # Some templates know a system message in the first place only, or a text or calls in a turn, not both.
        others = tuple(name for name in ("tool_calls", *REASONING) if message.get(name))
        form = self._choose(("content", message["role"], at == 0, parts, others), what, probes(), is_whole, at=at)
        return _replaced(messages, at, {"content": joined}) if form == "joined" and joined is not None else messages


def check_calls(message: Message, where: str, name: str) -> None:
    """Bring a message's tool calls to a list of objects without None, in place; an empty list is left out.

    Raises:
        UserError: they are something else.
    """
    if "function_call" in message:  # what OpenAI once had in the place of tool_calls
        message["tool_calls"] = [{"type": "function", "function": message.pop("function_call")}]
    calls = parsed(message.get("tool_calls"), where, f"{name}.tool_calls")
    if not calls:
        message.pop("tool_calls", None)
        return
    if not isinstance(calls, Sequence) or not all(
        isinstance(call, Mapping) and isinstance(call.get("function", call), Mapping) for call in calls
    ):
        todo = 'give [{"type": "function", "function": {"name": "…", "arguments": {…}}}]'
        raise UserError(where, f"{name}.tool_calls is no list of calls", todo)
    message["tool_calls"] = [_call_without_none(call) for call in calls]


def _call_without_none(call: Mapping[str, Any]) -> Message:
    """Without the keys that a table fills in; None among the arguments stays."""
    kept = {key: value for key, value in call.items() if value is not None}
    if "function" in kept:
        kept["function"] = {key: value for key, value in kept["function"].items() if value is not None}
    return kept


def parsed(value: Any, where: str, name: str) -> Any:
    """What a string holds as JSON; anything else, and an empty string, as it is.

    Raises:
        UserError: it is no JSON.
    """
    if not isinstance(value, str) or not value:
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        what = f"{name} is not valid JSON ({error.msg}, column {error.colno})"
        todo = "give it as a list or an object, or as JSON (json.dumps writes it; Python's str writes none)"
        raise UserError(where, what, todo) from None


def check_tools(tools: Any, where: str) -> Any:
    """Tool schemas, or strings of their JSON, whole or each or their parameters, as a list of objects; None for none.

    Raises:
        UserError: a string is no JSON.
    """
    tools = parsed(tools, where, "tools")
    if not isinstance(tools, list):
        return tools or None
    tools = [parsed(tool, where, f"tools[{at}]") for at, tool in enumerate(tools)]
    for at, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("parameters"), str):
            parameters = parsed(function["parameters"], where, f"tools[{at}].parameters")
            function = {**function, "parameters": parameters}
            tools[at] = {**tool, "function": function} if "function" in tool else function
    return tools or None


def _replaced(messages: list[Message], at: int, fields: Mapping[str, Any]) -> list[Message]:
    """The messages with other fields in one of them; None leaves a field out."""
    kept = {key: value for key, value in messages[at].items() if key not in fields}
    given = {key: value for key, value in fields.items() if value is not None}
    return [*messages[:at], {**kept, **given}, *messages[at + 1 :]]


def _joined(parts: Any) -> str | None:
    """Parts of a content as one text; None where one is no text."""
    texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else None


def _rewritten(messages: list[Message], form: _CallForm, where: str = "") -> list[Message]:
    """The messages with their tool calls in a form."""
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
    """The messages with a probe in the place of each call's arguments (or name), and the probes' values."""
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
