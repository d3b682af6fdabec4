"""Messages as their chat template takes them, or refused: what it makes of a field is found by rendering it.

Templates differ in which fields and roles they render, in what they call the reasoning, and in whether a call's
arguments are an object or its JSON. Nothing here knows a template: a probe in the field's place shows in the text, or
does not. Each question is asked once for a template and a kind of field, so that rows cost no further rendering.
"""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
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

    nested: bool
    """``{"function": {"name", "arguments"}}``, not ``{"name", "arguments"}``."""
    as_text: bool
    """Arguments are JSON in a string, not an object."""
    blank: str | None = "as it is"
    """The content of a turn that has nothing but calls."""


class MessageFit:
    """One conversation on its way to its template.

    Args:
        template: the Jinja source.
        render: the text of some messages with some tools; raises a `UserError` where the template does.
        where: names the row in errors.
    """

    _answers: dict[tuple[Any, ...], Any] = {}  # noqa: RUF012 (one for the whole process, by template)

    def __init__(self, template: str, render: Callable[[list[Message], Any], str], *, where: str) -> None:
        self._template, self._render, self._where = template, render, where

    def fit(self, messages: list[Message], tools: Any) -> list[Message]:
        """The messages as the template renders them whole.

        Raises:
            UserError: a role is unknown, or the template leaves out what a message or the tools say.
        """
        for at, message in enumerate(messages):
            self._check_role(at, message["role"])
        if any("tool_calls" in message for message in messages):
            messages = self._fit_calls(messages, tools)
        for at, message in enumerate(messages):
            name = next((name for name in REASONING if isinstance(message.get(name), str) and message[name]), None)
            if name is not None and message["role"] == "assistant":
                messages = self._fit_reasoning(messages, at, name, tools)
        for at, message in enumerate(messages):
            if message.get("content"):
                messages = self._fit_content(messages, at, tools)
        if tools:
            self._once(("tools",), lambda: self._check_tools(messages, tools))
        return messages

    def _once(self, kind: tuple[Any, ...], ask: Callable[[], Any]) -> Any:
        """The answer to a question about a kind of field, asked of the first row that has it."""
        key = (self._template, *kind)
        if key not in self._answers:
            answer = ask()
            if answer is None:  # the template refuses this row, which another will say
                return None
            self._answers[key] = answer
        return self._answers[key]

    def _texts(self, conversations: Sequence[list[Message]], tools: Any) -> Iterator[str]:
        """What the template makes of those it does not refuse, in lower case: it may change that."""
        for messages in conversations:
            try:
                yield self._render(messages, tools).lower()
            except UserError:
                continue

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

    def _fit_calls(self, messages: list[Message], tools: Any) -> list[Message]:
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        forms = {
            _CallForm("function" in call, isinstance(call.get("function", call).get("arguments"), str))
            for call in calls
        }
        several = any(len(message.get("tool_calls", ())) > 1 for message in messages)
        blank = {bool(message.get("content")) for message in messages if "tool_calls" in message}
        bare = any("arguments" not in call.get("function", call) for call in calls)
        form = self._once(("calls", several, bare, *sorted(blank)), lambda: self._choose_form(messages, tools))
        return messages if form is None or {form} == forms else _rewritten(messages, form, self._where)

    def _choose_form(self, messages: list[Message], tools: Any) -> _CallForm | None:
        """The first form that the template renders whole.

        Objects come first: where a template takes both, it may print a string as it is, and an object as its model
        writes calls.
        """
        last = max(at for at, message in enumerate(messages) if "tool_calls" in message)
        rendered = False
        for blank, as_text, nested in itertools.product(("as it is", None, ""), (False, True), (True, False)):
            form = _CallForm(nested, as_text, blank)
            probe, values = _probe_calls(messages, form)
            for text in self._texts([probe, probe[: last + 1]], tools):
                rendered = True
                is_whole = all(value in text for value in values)
                # Escaped quotes: JSON within JSON. Single ones: Python's notation.
                if is_whole and f'\\"{_KEY}' not in text and f"'{_KEY}'" not in text:
                    return form
        if rendered:
            at = next(at for at, message in enumerate(messages) if "tool_calls" in message)
            self._refuse(f"messages[{at}].tool_calls")
        return None

    def _fit_reasoning(self, messages: list[Message], at: int, name: str, tools: Any) -> list[Message]:
        def choose() -> str | None:
            rendered = False
            for other in dict.fromkeys((name, *REASONING)):
                probe = _replaced(messages, at, {name: None, other: _PROBE})
                # Cut behind it: some templates leave out all reasoning but that of the last turn.
                for text in self._texts([probe[: at + 1], probe], tools):
                    rendered = True
                    if _PROBE in text:
                        return other
            if rendered:
                self._refuse(f"messages[{at}].{name}")
            return None

        chosen = self._once(("reasoning", name, "tool_calls" in messages[at]), choose)
        return (
            messages if chosen in (None, name) else _replaced(messages, at, {name: None, chosen: messages[at][name]})
        )

    def _fit_content(self, messages: list[Message], at: int, tools: Any) -> list[Message]:
        message = messages[at]
        content, parts = message["content"], isinstance(message["content"], list)
        if isinstance(content, str) and not content.strip():
            return messages

        def choose() -> str | None:
            rendered = False
            probed = {"as it is": [*content, {"type": "text", "text": _PROBE}] if parts else f"{content} {_PROBE}"}
            if parts and (joined := _joined(content)) is not None:
                probed["joined"] = f"{joined} {_PROBE}"
            for form, value in probed.items():
                probe = _replaced(messages, at, {"content": value})
                for text in self._texts([probe, probe[: at + 1]], tools):
                    rendered = True
                    is_quoted = parts and form == "as it is" and (f"'{_PROBE}'" in text or f'"{_PROBE}"' in text)
                    if _PROBE in text and not is_quoted:
                        return form
            if rendered:
                beside = " beside its tool_calls" if "tool_calls" in message else ""
                self._refuse(f'messages[{at}].content (role "{message["role"]}"){beside}')
            return None

        # Some templates know a system message in the first place only, or a text or calls in a turn, not both.
        others = tuple(name for name in ("tool_calls", *REASONING) if message.get(name))
        form = self._once(("content", message["role"], at == 0, parts, others), choose)
        joined = _joined(content) if form == "joined" else None
        return messages if joined is None else _replaced(messages, at, {"content": joined})

    def _check_tools(self, messages: list[Message], tools: Any) -> bool | None:
        for text in self._texts([messages], tools):
            if text == next(self._texts([messages], None), None):
                self._refuse("the row's tools")
            return True
        return None

    def _refuse(self, what: str) -> None:
        raise UserError(self._where, f"the chat template leaves out {what}", _TODO)


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
        raise UserError(where, f"{name} is not valid JSON ({error.msg})", "give it as an object, or as JSON") from None


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


def _rewritten(messages: list[Message], form: _CallForm, where: str) -> list[Message]:
    """The messages with their tool calls in a form."""
    fitted = []
    for at, message in enumerate(messages):
        if "tool_calls" in message:
            name = f"messages[{at}].tool_calls"
            calls = [_in_form(call, form, where, name) for call in message["tool_calls"]]
            message = _with_blank({**message, "tool_calls": calls}, form)
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


def _with_blank(message: Message, form: _CallForm) -> Message:
    return message if form.blank == "as it is" or message.get("content") else {**message, "content": form.blank}


def _probe_calls(messages: list[Message], form: _CallForm) -> tuple[list[Message], list[str]]:
    """The messages with a probe in the place of each call's arguments (or name), and the probes' values."""
    values: list[str] = []
    probed = []
    for message in messages:
        if "tool_calls" in message:
            calls = []
            for call in message["tool_calls"]:
                values.append(f"{_PROBE}_{len(values)}_")
                function = dict(call.get("function", call))
                takes = "arguments" in function
                function |= {"arguments": {_KEY: values[-1]}} if takes else {"name": values[-1]}
                call = {**call, "function": function} if "function" in call else function
                calls.append(_in_form(call, form, "", ""))
            message = _with_blank({**message, "tool_calls": calls}, form)
        probed.append(message)
    return probed, values
