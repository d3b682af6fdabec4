"""A tokenizer's chat template: it renders messages, and messages are first fitted to the fields that it renders.

Templates differ in the fields and roles they render, in the name of the reasoning, and in whether a call's arguments
are an object or its JSON. No template is known by name here. A probe is rendered in the field's place, and its text
shows or does not. Each question is asked once for a template and a kind of field, so later rows need no extra
rendering.
"""

from __future__ import annotations

import copy
import difflib
import itertools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from fsdp2kit.config.section import TEMPLATES
from fsdp2kit.data.bounds import Unbounded, bounded, bounds
from fsdp2kit.data.messages import (
    Message,
    is_text,
    shortened,
)
from fsdp2kit.data.names import FLAGS, OPPOSITE, PLAIN, REASONING, ROLES, STANDARD_ROLES
from fsdp2kit.data.rows import parsed
from fsdp2kit.errors import UserError
from fsdp2kit.job.distributed import gather_objects
from fsdp2kit.job.events import began
from fsdp2kit.model.tokenizer import facts_of, set_facts

_FIELDS = ("role", "content", "tool_calls", "tool_call_id")  # of every message
_PROBE = "fsdp2kit_probe"
_KEY = "fsdp2kit_key"
LEFT_OUT = "set model.chat_template to a template that renders it, or take it out of the data"

_GENERATION = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
_END_GENERATION = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")
# Unicode noncharacters, which text must not hold. `fsdp2kit.data.rendered` checks that.
OPEN = "\ufdd0"
CLOSE = "\ufdd1"
# The empty expression keeps Jinja's trim_blocks from removing a newline that opens the template.
_MACRO = "{% macro fsdp2kit_span() %}{{ '" + OPEN + "' }}{{ caller() }}{{ '" + CLOSE + "' }}{% endmacro %}{{ '' }}"


class Endless(UserError):
    """A template does not come to its end."""


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
            self.source = _dated(tokenizer.get_chat_template(tools=tools), tokenizer)
            """The template itself."""
        except ValueError as error:
            what = f"the tokenizer has no chat template to use ({str(error).splitlines()[0]})"
            others = ", ".join(sorted(file.stem for file in TEMPLATES.glob("*.jinja") if file.stem != "chatml"))
            todo = f'set model.chat_template = "chatml", to another ready one ({others}) or to a Jinja file'
            todo += ", or use an instruction-tuned model's tokenizer"
            raise UserError("model.chat_template", what, todo) from None
        self._marked = mark_answers(self.source)
        self.has_markers = self._marked is not None
        """Whether ``{% generation %}`` says where the assistant's text is."""
        self._tokens = tokenizer.special_tokens_map
        self._tools = tools
        self.where = where
        self._context = {**self._tokens, **variables}
        # What answers are remembered for: all that a row adds to the template, but for its messages.
        self._key = (self.source, bool(tools), json.dumps(variables, sort_keys=True, default=str))

    def with_inputs(self, tools: Any, variables: Mapping[str, Any]) -> Template:
        """The template with other tools and variables."""
        other = copy.copy(self)
        other._tools = tools
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
            with bounds():
                texts, _ = render_jinja_template(
                    [messages],
                    tools=self._tools if with_tools else None,
                    chat_template=bounded(self._marked if marked else self.source),  # type: ignore (Jinja takes it)
                    add_generation_prompt=prompt,
                    **self._context,
                )
        except TemplateSyntaxError as error:
            what = f"is no Jinja template: line {error.lineno}: {error.message}"
            raise UserError("model.chat_template", what, "mend that line, or choose another template") from None
        except Unbounded as error:
            todo = "set model.chat_template to a template that ends, or drop the row"
            raise Endless(self.where, f"the chat template does not end ({error})", todo) from None
        except SyntaxError as error:  # of Python, which Jinja compiles to
            what = f"the chat template cannot be run ({type(error).__name__}: {error})"
            raise UserError("model.chat_template", what, "nest it less, or choose another template") from None
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            what = f"the chat template refuses the messages ({error})"
            todo = "change the row to what the template accepts, or set model.chat_template"
            raise UserError(self.where, what, todo) from None
        return texts[0]

    def fit(self, messages: list[Message]) -> list[Message]:
        """The messages, changed so that the template renders every field."""
        for at, message in enumerate(messages):
            if (role := self._role(at, message["role"])) != message["role"]:
                messages = _replaced(messages, at, {"role": role})
            self._check_parts(at, message)
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
                return text != next(self.texts(messages, with_tools=False), None)

            self._choose(("tools",), "the row's tools", [(True, messages)], shows_tools)
        for at, message in enumerate(messages):
            self._check_fields(messages, at, message)
        return messages

    def without_flags(self, message: Message) -> Message:
        """A message without what says whether it is learnt, unless the template reads it."""
        if message.keys() <= PLAIN:
            return message
        names = [key for key in message if (key in FLAGS or key == OPPOSITE) and not _is_named(key, self.source)]
        return {key: value for key, value in message.items() if key not in names}

    def _check_parts(self, at: int, message: Message) -> None:
        """Refuse parts of a type that the template does not name."""
        content = message.get("content")
        for number, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") or "unknown"
            if kind != "text" and not _is_named(str(kind), self.source):
                what = f"messages[{at}].content[{number}] is of type {kind}, which neither this nor the template reads"
                raise UserError(self.where, what, 'make it a part of type "text", or drop it')

    def _check_fields(self, messages: list[Message], at: int, message: Message) -> None:
        """Refuse a field that holds a text, unless the template reads it."""
        if message.keys() <= PLAIN:
            return
        role = message["role"]
        read = (*_FIELDS, *FLAGS, *(REASONING if role == "assistant" else ()))
        for name, value in message.items():
            if name in read or not is_text(name, value, role):
                continue

            def is_read(text: str, name: str = name) -> bool:
                return text != next(self.texts(_replaced(messages, at, {name: None})), None)

            what = f"messages[{at}].{name}, which is {shortened(value)}"
            self._choose(("field", role, name), what, [(True, messages)], is_read)

    def _choose(
        self,
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
        key = (*self._key, *question)
        if key in self._answers:
            return self._answers[key]
        rendered = False
        for option, probe in probes:
            for text in self.texts(probe, probe[: at + 1 or None]):
                rendered = True
                if is_whole(text):
                    self._answers[key] = option
                    return option
        if rendered:
            raise UserError(self.where, f"the chat template leaves out {what}", LEFT_OUT)
        return None

    def texts(
        self, *conversations: list[Message], with_tools: bool = True, prompt: bool = False, keep_case: bool = False
    ) -> Iterator[str]:
        """The texts of the conversations that the template accepts, in lower case: templates may change the case."""
        for messages in conversations:
            try:
                text = self.render(messages, with_tools=with_tools, prompt=prompt)
            except Endless:  # so would the others be
                raise
            except UserError:
                continue
            yield text if keep_case else text.lower()

    def _role(self, at: int, role: str) -> str:
        """The role of a message by its usual name."""
        if role in STANDARD_ROLES:
            return role
        # The template's own role is accepted. Another name of the assistant is not: the turn would not be learnt.
        is_own = _is_quoted(role, self.source) and ROLES.get(role) != "assistant"
        if role == "function":  # OpenAI's former name of "tool"; templates name it as the type of a tool as well
            return role if is_own and not _is_quoted("tool", self.source) else "tool"
        if is_own:
            return role
        near = ROLES.get(role.strip().lower()) or next(
            iter(difflib.get_close_matches(role.lower(), STANDARD_ROLES)), None
        )
        if near == "tool":
            return near
        todo = (
            f"did you mean {near!r}?"
            if near
            else f"use {', '.join(STANDARD_ROLES)}, or a template that names the role"
        )
        raise UserError(self.where, f"messages[{at}] has the unknown role {role!r}", todo)

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
        question = ("calls", several, bare, *sorted(blank))
        what = f"messages[{with_calls[0]}].tool_calls"
        form = self._choose(question, what, probes, is_whole, at=with_calls[-1])
        return messages if form is None or {form} == forms else _rewritten(messages, form, self.where)

    def _fit_reasoning(self, messages: list[Message], at: int, name: str) -> list[Message]:
        names = dict.fromkeys((name, *REASONING))
        probes = ((other, _replaced(messages, at, {name: None, other: _PROBE})) for other in names)
        question = ("reasoning", name, "tool_calls" in messages[at])
        what = f"messages[{at}].{name}"
        chosen = self._choose(question, what, probes, lambda text: _PROBE in text, at=at)
        if chosen in (None, name):
            return messages
        return _replaced(messages, at, {name: None, chosen: messages[at][name]})

    def with_thought_apart(self, messages: list[Message], at: int, thought: str, rest: str) -> list[Message]:
        """The messages with the thought in a content as a field, by the template's name for it.

        They are returned as they are if the template renders no such field.
        """
        lacks_field = (*self._key, "no reasoning", "tool_calls" in messages[at])
        if lacks_field in self._answers:
            return messages
        moved = _replaced(messages, at, {"content": rest, REASONING[0]: thought})
        try:
            return self._fit_reasoning(moved, at, REASONING[0])
        except Endless:
            raise
        except UserError:
            self._answers[lacks_field] = True
            return messages

    def _fit_content(self, messages: list[Message], at: int) -> list[Message]:
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
        form = self._choose(("content", message["role"], at == 0, parts, others), what, probes(), is_whole, at=at)
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


@lru_cache(maxsize=16)
def mark_answers(template: str) -> str | None:
    """The template with `OPEN` and `CLOSE` around what its ``{% generation %}`` markers enclose; None without them.

    The tag becomes a Jinja call block of a macro, which renders the same text between the two characters.
    """
    if not _GENERATION.search(template):
        return None
    template = _END_GENERATION.sub(r"{%\1 endcall \2%}", template)
    return _MACRO + _GENERATION.sub(r"{%\1 call fsdp2kit_span() \2%}", template)


# The day that chat templates write: that on which the run first began, on every rank and after every resume. Templates
# of Llama 3.2, gpt-oss, SmolLM3 and others ask for today's date. Ranks would differ around midnight, and a run that is
# resumed on another day would have other tokens than its checkpoint.
_DAY_FUNCTION = "strftime_now"  # transformers' name of it
_DAY_CALL = re.compile(_DAY_FUNCTION + r"""\(\s*(["'])(.*?)\1\s*\)""")


def settle_day(tokenizer: Tokenizer | None, run_dir: Path) -> None:
    """Give a tokenizer the day on which the run first began, if its template writes one. Collective."""
    if tokenizer is not None and writes_date(tokenizer):
        seconds = gather_objects(began(run_dir) or time.time())[0]
        set_facts(tokenizer, day=datetime.fromtimestamp(seconds).date())


def writes_date(tokenizer: Tokenizer) -> bool:
    """Whether the chat template asks for the date."""
    return _DAY_FUNCTION in str(tokenizer.chat_template)


def day_of(tokenizer: Tokenizer) -> date:
    """The day that the chat template writes: `settle_day`'s, else today."""
    return facts_of(tokenizer).day or datetime.now().date()


def _dated(source: str, tokenizer: Tokenizer) -> str:
    """A template with the day in place of its calls for the date; at midnight, so that no text depends on the hour.

    A function cannot be handed to the template: transformers makes texts of its variables.
    """
    if _DAY_FUNCTION not in source:
        return source
    midnight = datetime.combine(day_of(tokenizer), datetime.min.time())
    return _DAY_CALL.sub(lambda call: json.dumps(midnight.strftime(call[2])), source)
