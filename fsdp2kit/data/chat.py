"""Conversations: their messages, their text, and where in it the assistant speaks, as the chat template says.

A chat template says where the assistant speaks in one of two ways. With ``{% generation %}`` markers it says so
itself. Without them, the conversation is rendered turn by turn: what an assistant turn adds after its generation
prompt is the assistant's, which is verified to be a piece of the whole text. Both give character spans of one text.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from jinja2 import TemplateError, TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from fsdp2kit.data.template import REASONING, ROLES, MessageFit, check_calls
from fsdp2kit.errors import UserError

if TYPE_CHECKING:  # workers that tokenise need no torch
    from transformers import PreTrainedTokenizerBase

Tokenizer: TypeAlias = "PreTrainedTokenizerBase"
TrainOn = Literal["assistant", "all", "last"]
Span = tuple[int, int]  # characters [start, end)

_TODO = 'a row needs "messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]'

_SPOKEN = ("tool_calls", *REASONING)  # what a turn may hold beside its content
# By which other tools (OpenAI's, axolotl's, mistral's) take a turn out of the loss where they are 0 or false.
_UNLEARNT = ("weight", "train", "training", "loss", "trainable")

_GENERATION = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
_END_GENERATION = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")
# Unicode noncharacters: no text holds them, and whoever reads a marked text checks that.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
# The empty expression keeps Jinja's trim_blocks from eating a newline that opens the template.
_MACRO = "{% macro fsdp2kit_span() %}{{ '" + _OPEN + "' }}{{ caller() }}{{ '" + _CLOSE + "' }}{% endmacro %}{{ '' }}"
_BORDERS = re.compile(f"[{_OPEN}{_CLOSE}]")


def check_messages(messages: Any, where: str, *, name: str = "messages") -> list[dict[str, Any]]:
    """The messages as a list of dicts without their None values (pyarrow fills in missing keys with None).

    ShareGPT's ``{"from": "human", "value": "…"}`` becomes ``{"role": "user", "content": "…"}``.

    Raises:
        UserError: naming the row and the message that is not of the form ``{"role": …, "content": …}``.
    """
    if isinstance(messages, Sequence) and not messages:
        raise UserError(where, f"{name} is empty", _TODO)
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        kinds = "a list" if name == "messages" else "a text or a list of messages"
        todo = _TODO if name == "messages" else "give one of these"
        raise UserError(where, f"{name} is {_kind(messages)}, not {kinds}", todo)
    return [_check_message(message, where, f"{name}[{position}]") for position, message in enumerate(messages)]


def _check_message(message: Any, where: str, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UserError(where, f"{name} is {_kind(message)}, not an object", _TODO)
    message = {key: value for key, value in message.items() if value is not None}
    if "from" in message and "role" not in message:
        role, content = message.pop("from"), message.pop("value", None)
        message = {"role": ROLES.get(role, role) if isinstance(role, str) else role, **message}
        if content is not None:
            message["content"] = content
    if not isinstance(message.get("role"), str):
        raise UserError(where, f"{name} has no role", _TODO)
    check_calls(message, where, name)
    content = message.get("content")
    if content is None and not any(message.get(field) for field in _SPOKEN):
        raise UserError(where, f"{name} has no content", _TODO)
    if content is not None and not isinstance(content, (str, list)):
        raise UserError(where, f"{name}.content is {_kind(content)}, not text", _TODO)
    for field in _UNLEARNT:
        if message["role"] == "assistant" and field in message and not message[field]:
            what = f"{name}.{field} is {json.dumps(message[field])}, which is not read here: the turn would be learnt"
            todo = 'end rows in a turn to learn and set data.train_on = "last", or take the field out'
            raise UserError(where, what, todo)
    return message


def _kind(value: Any) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"


def turn_endings(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Everything that may end a turn: the special tokens, the longest first."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    special |= {str(tokenizer.eos_token)} if tokenizer.eos_token else set()
    return tuple(sorted(special, key=lambda text: (-len(text), text)))


def supervised_spans(chat: Chat, endings: tuple[str, ...], train_on: TrainOn) -> tuple[str, list[Span]]:
    """A chat's text and the ascending spans of it that are supervised, each with its end-of-turn token.

    Raises:
        UserError: the template refuses the messages, or cannot say which text is the assistant's.
    """
    text, learn_from = chat.text(), chat.learn_from
    turns = [at for at, one in enumerate(chat.messages) if one["role"] == "assistant" and at >= learn_from]
    turns = turns[-1:] if train_on == "last" else turns
    for turn in turns:
        if not any(str(chat.messages[turn].get(field) or "").strip() for field in ("content", *_SPOKEN)):
            raise _empty_turn(chat, turn)
    if train_on == "all" and not learn_from:
        return text, [(0, len(text))]
    if chat.marked_template is None:
        spans = _prefix_spans(chat, text, endings, turns)
    else:
        closing = tuple(ending for ending in endings if ending != chat.bos_token)
        begin = len(chat.text(learn_from)) if learn_from else 0
        spans = [span for span in _marked_spans(chat, text, closing) if span[0] >= begin]
        spans = spans[-1:] if train_on == "last" else spans
    if len(spans) == len(turns):  # markers may enclose a turn in several pieces, of which some are empty
        for turn, (start, end) in zip(turns, spans, strict=True):
            if text[start:end].strip() in ("", *endings):
                raise _empty_turn(chat, turn)
    return text, [_trim(text, span, endings) for span in spans]


def _marked_spans(chat: Chat, text: str, endings: tuple[str, ...]) -> list[Span]:
    """Between ``{% generation %}`` and ``{% endgeneration %}``, with the special token that ends a span or follows."""
    # Other text, the assistant's, other text, …
    pieces = _BORDERS.split(marked := chat.text(marked=True))
    if "".join(pieces) != text or _BORDERS.findall(marked) != [_OPEN, _CLOSE] * (len(pieces) // 2):
        what = "the chat template's {% generation %} markers cannot be located in its text"
        todo = "let the markers enclose the assistant's text alone, without nesting or filters over them"
        raise UserError(chat.where, what, todo)
    ends = list(itertools.accumulate(map(len, pieces)))
    spans = []
    for start, end in zip(ends[::2], ends[1::2], strict=False):
        is_ended = text[start:end].rstrip().endswith(endings)
        following = next((len(one) for one in endings if text.startswith(one, end)), 0)
        spans.append((start, end if is_ended else end + following))
    return spans


def _empty_turn(chat: Chat, turn: int) -> UserError:
    what = f"the assistant says nothing in messages[{turn}], so the model would learn to end its turn at once"
    return UserError(chat.where, what, "drop the turn or the row, or set model.chat_template to one that renders it")


def _prefix_spans(chat: Chat, whole: str, endings: tuple[str, ...], turns: Sequence[int]) -> list[Span]:
    """What each assistant turn adds to its generation prompt, verified to be a piece of the whole text."""
    spans = []
    for turn in turns:
        if turn == 0:
            what = "the conversation begins with the assistant, so nothing says where its text begins"
            todo = "begin with a user or system message, or use a chat template with {% generation %} markers"
            raise UserError(chat.where, what, todo)
        prompt = chat.text(turn, prompt=True)
        until = _turn_end(chat, turn, whole=whole, endings=endings)
        if not (until.startswith(prompt) and whole.startswith(until)):
            advice = "" if turn == turns[-1] else 'set data.train_on = "last" to learn the last answer of each row, '
            what = (
                f"the chat template renders the assistant's messages[{turn}] differently within the conversation and "
                "when it is generated (some drop earlier reasoning), so the mask would be wrong"
            )
            todo = "set model.chat_template to a template with {% generation %} markers, or use single-turn rows"
            raise UserError(chat.where, what, advice + todo)
        _refuse_header(chat, turn, added=until[len(prompt) :], prompt=prompt, endings=endings)
        spans.append((len(prompt), len(until)))
    return spans


def _turn_end(chat: Chat, turn: int, *, whole: str, endings: tuple[str, ...]) -> str:
    """The text up to the end of ``messages[turn]``.

    Templates like Phi-3's close a text, not a turn, with a token of its own, unless a generation prompt follows:
    what comes after the assistant's last turn but not before a generation prompt is no turn's.
    """
    is_last = turn + 1 == len(chat.messages)
    text = whole if is_last else chat.text(turn + 1)
    closing = next((ending for ending in endings if text.endswith(ending)), "")
    if not closing:
        return text
    shorter = text[: -len(closing)]
    if is_last and not shorter.rstrip().endswith(endings):
        return text
    going_on = chat.text(prompt=True) if is_last else whole
    return shorter if going_on.startswith(shorter) and not going_on.startswith(text) else text


def _refuse_header(chat: Chat, turn: int, *, added: str, prompt: str, endings: tuple[str, ...]) -> None:
    """A template that has no generation prompt must not make the turn's header part of the assistant's text.

    Templates like Mistral's need no prompt (the user's turn ends in ``[/INST]``); those add no special token and
    role before the content.
    """
    content = chat.messages[turn].get("content")
    header = added[: max(added.find(content.strip()), 0)] if isinstance(content, str) else ""
    if "assistant" in header and any(ending in header for ending in endings) and prompt == chat.text(turn):
        what = (
            f"the chat template ignores add_generation_prompt, so {header!r} would be learnt as the assistant's text"
        )
        todo = "set model.chat_template to a template with a generation prompt or {% generation %} markers"
        raise UserError(chat.where, what, todo)


def _trim(text: str, span: Span, endings: tuple[str, ...]) -> Span:
    """The span without whitespace after its end-of-turn token: nobody generates that."""
    start, end = span
    stripped = text[start:end].rstrip()
    return (start, start + len(stripped)) if stripped.endswith(endings) else span


class Chat:
    """A conversation under its chat template."""

    def __init__(
        self,
        messages: list[dict[str, Any]],
        tokenizer: Tokenizer,
        *,
        where: str,
        tools: Any = None,
        variables: Mapping[str, Any],
        learn_from: int = 0,
    ) -> None:
        """
        Args:
            messages: what `check_messages` returned.
            where: names the row in errors.
            variables: of the template, like ``enable_thinking``.
            learn_from: index of the first message that may be supervised: those before it are a prompt.

        Raises:
            UserError: the tokenizer has no template, or one that leaves out what the messages say.
        """
        self.where, self.learn_from = where, learn_from
        self.bos_token = tokenizer.bos_token
        try:
            self._template = tokenizer.get_chat_template(tools=tools)
        except ValueError as error:
            what = f"the tokenizer has no chat template to use ({str(error).splitlines()[0]})"
            todo = "set model.chat_template to a Jinja file, or use an instruction-tuned model's tokenizer"
            raise UserError("model.chat_template", what, todo) from None
        self.marked_template = mark_answers(self._template)
        self._variables = {**tokenizer.special_tokens_map, **variables}
        self._tools = tools
        self.messages = MessageFit(self._template, self._render, tools=tools, where=where).fit(messages)

    def text(self, turns: int | None = None, *, prompt: bool = False, marked: bool = False) -> str:
        """The text of the first ``turns`` messages, all by default.

        Args:
            prompt: with the generation prompt after them.
            marked: with `_OPEN` and `_CLOSE` around what ``{% generation %}`` encloses.

        Raises:
            UserError: the template refuses the messages.
        """
        return self._render(self.messages[:turns], self._tools, prompt=prompt, marked=marked)

    def _render(
        self, messages: list[dict[str, Any]], tools: Any, *, prompt: bool = False, marked: bool = False
    ) -> str:
        try:
            texts, _ = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=self.marked_template if marked else self._template,
                add_generation_prompt=prompt,
                **self._variables,
            )
        except TemplateSyntaxError as error:
            what = f"is no Jinja template: line {error.lineno}: {error.message}"
            raise UserError("model.chat_template", what, "mend that line, or choose another template") from None
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            what = f"the chat template refuses the messages ({error})"
            todo = "change the row to what the template accepts, or set model.chat_template"
            raise UserError(self.where, what, todo) from None
        return texts[0]


@lru_cache(maxsize=16)
def mark_answers(template: str) -> str | None:
    """The template with `_OPEN` and `_CLOSE` around what its ``{% generation %}`` markers enclose; None without them.

    The tag is a Jinja call block. As a call of a macro that puts a character of ours on either side, it renders the
    same text with the borders to be seen.
    """
    if not _GENERATION.search(template):
        return None
    template = _END_GENERATION.sub(r"{%\1 endcall \2%}", template)
    return _MACRO + _GENERATION.sub(r"{%\1 call fsdp2kit_span() \2%}", template)
