"""A tokenizer's chat template: it renders messages, and messages are first fitted to the fields that it renders.

Templates differ in the fields and roles they render, in the name of the reasoning, and in whether a call's arguments
are an object or its JSON. No template is known by name here. A probe is rendered in the field's place, and its text
shows or does not. Each question is asked once for a template and a kind of field, so later rows need no extra
rendering.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from fsdp2kit.config.section import TEMPLATES
from fsdp2kit.data.day import dated
from fsdp2kit.data.rows import load_json
from fsdp2kit.errors import UserError

Message = dict[str, Any]

# ShareGPT's names of the roles.
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

_GENERATION = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
_END_GENERATION = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")
# Unicode noncharacters, which text must not hold. `fsdp2kit.data.chat` checks that.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
# The empty expression keeps Jinja's trim_blocks from removing a newline that opens the template.
_MACRO = "{% macro fsdp2kit_span() %}{{ '" + OPEN + "' }}{{ caller() }}{{ '" + CLOSE + "' }}{% endmacro %}{{ '' }}"


class _CallForm(NamedTuple):
    """A way to write tool calls."""

    blank: str | None
    """The content of a turn that has only calls; "as it is" leaves it."""
    as_text: bool
    """Arguments are JSON in a string, not an object."""
    nested: bool
    """``{"function": {"name", "arguments"}}``, not ``{"name", "arguments"}``."""


class Template:
    """A tokenizer's chat template, with the tools and variables of one row.

    Args:
        variables: passed to the template, like ``enable_thinking``.
        where: names the row in errors.
    """

    _answers: dict[tuple[Any, ...], Any] = {}  # noqa: RUF012 (shared by all rows: the key holds the template)

    def __init__(self, tokenizer: Tokenizer, *, tools: Any, variables: Mapping[str, Any], where: str) -> None:
        try:
            self._source = dated(tokenizer.get_chat_template(tools=tools), tokenizer)
        except ValueError as error:
            what = f"the tokenizer has no chat template to use ({str(error).splitlines()[0]})"
            others = ", ".join(sorted(file.stem for file in TEMPLATES.glob("*.jinja") if file.stem != "chatml"))
            todo = f'set model.chat_template = "chatml", to another ready one ({others}) or to a Jinja file'
            todo += ", or use an instruction-tuned model's tokenizer"
            raise UserError("model.chat_template", what, todo) from None
        self._marked = mark_answers(self._source)
        self._tokens = tokenizer.special_tokens_map
        self._variables, self._tools, self._where = variables, tools, where
        self._context = {**self._tokens, **variables}
        self._kind = (self._source, bool(tools), json.dumps(variables, sort_keys=True, default=str))

    @property
    def has_markers(self) -> bool:
        """Whether ``{% generation %}`` says where the assistant's text is."""
        return self._marked is not None

    @property
    def source(self) -> str:
        """The template itself."""
        return self._source

    @property
    def inputs(self) -> tuple[Any, Mapping[str, Any]]:
        """The row's tools and variables."""
        return self._tools, self._variables

    def with_inputs(self, tools: Any, variables: Mapping[str, Any]) -> Template:
        """The template with other tools and variables."""
        other = copy.copy(self)
        other._tools, other._variables = tools, variables
        other._context = {**self._tokens, **variables}
        return other

    def render(
        self, messages: list[Message], *, prompt: bool = False, marked: bool = False, with_tools: bool = True
    ) -> str:
        """The text of the messages.

        Args:
            prompt: append the generation prompt.
            marked: put `OPEN` and `CLOSE` around what ``{% generation %}`` encloses.
        """
        try:
            texts, _ = render_jinja_template(
                [messages],
                tools=self._tools if with_tools else None,
                chat_template=self._marked if marked else self._source,
                add_generation_prompt=prompt,
                **self._context,
            )
        except TemplateSyntaxError as error:
            what = f"is no Jinja template: line {error.lineno}: {error.message}"
            raise UserError("model.chat_template", what, "mend that line, or choose another template") from None
        except (RecursionError, MemoryError, SyntaxError) as error:  # of Python, which Jinja compiles to
            what = f"the chat template cannot be run ({type(error).__name__}: {error})"
            raise UserError("model.chat_template", what, "nest it less, or choose another template") from None
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            what = f"the chat template refuses the messages ({error})"
            todo = "change the row to what the template accepts, or set model.chat_template"
            raise UserError(self._where, what, todo) from None
        return texts[0]

    def fit(self, messages: list[Message]) -> list[Message]:
        """The messages, changed so that the template renders every field."""
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

            def shows_tools(text: str) -> bool:
                return text != next(self._texts(messages, with_tools=False), None)

            self._choose(("tools",), "the row's tools", [(True, messages)], shows_tools)
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
        """The first option whose probe the template renders whole. Remembered for each kind of field.

        Args:
            what: names the field in the error that the template leaves it out.
            probes: each option, with the messages that it stands for.
            is_whole: whether a text shows the whole probe.
            at: index of the message with the probe. The text up to this message is tried, too: some templates render
                only the last turn's reasoning.

        Returns:
            None if the template rejects the row; rendering reports the error later.
        """
        key = (*self._kind, *kind)
        if key in self._answers:
            return self._answers[key]
        rendered = False
        for option, probe in probes:
            for text in self._texts(probe, probe[: at + 1 or None]):
                rendered = True
                if is_whole(text):
                    self._answers[key] = option
                    return option
        if rendered:
            raise UserError(self._where, f"the chat template leaves out {what}", _TODO)
        return None

    def _texts(self, *conversations: list[Message], with_tools: bool = True) -> Iterator[str]:
        """The texts of the conversations that the template accepts, in lower case: templates may change the case."""
        for messages in conversations:
            with contextlib.suppress(UserError):
                yield self.render(messages, with_tools=with_tools).lower()

    def _check_role(self, at: int, role: str) -> None:
        if role in _STANDARD:
            return
        # The template's own role is accepted. Another name of the assistant is not: the turn would not be learnt.
        is_named = f"'{role}'" in self._source or f'"{role}"' in self._source
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
            # Escaped quotes are JSON within JSON; single ones are Python's notation.
            is_quoted = f'\\"{_KEY}' in text or f"'{_KEY}'" in text
            return not is_quoted and all(value in text for value in values)

        # Try objects first: a template that takes both may print a string unchanged, but writes an object as the
        # model's calls.
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
            # A probe in quotes of its own comes from a list of parts, printed as Python or JSON.
            return _PROBE in text and f"'{_PROBE}'" not in text and f'"{_PROBE}"' not in text

        beside = " beside its tool_calls" if "tool_calls" in message else ""
        what = f'messages[{at}].content (role "{message["role"]}"){beside}'
        # Some templates render a system message only at the start, or either the text or the calls of a turn.
        others = tuple(name for name in ("tool_calls", *REASONING) if message.get(name))
        form = self._choose(("content", message["role"], at == 0, parts, others), what, probes(), is_whole, at=at)
        return _replaced(messages, at, {"content": joined}) if form == "joined" and joined is not None else messages


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


@lru_cache(maxsize=16)
def mark_answers(template: str) -> str | None:
    """The template with `OPEN` and `CLOSE` around what its ``{% generation %}`` markers enclose; None without them.

    The tag becomes a Jinja call block of a macro, which renders the same text between the two characters.
    """
    if not _GENERATION.search(template):
        return None
    template = _END_GENERATION.sub(r"{%\1 endcall \2%}", template)
    return _MACRO + _GENERATION.sub(r"{%\1 call fsdp2kit_span() \2%}", template)
