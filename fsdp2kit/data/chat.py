"""Conversations: messages as the data writes them, their text, and where in the text the assistant speaks.

The chat template gives the assistant's text in one of two ways. ``{% generation %}`` markers enclose it. Without
markers, the conversation is rendered turn by turn: an assistant turn's text is what follows its generation prompt, and
it is checked to be a piece of the whole text. Both ways give character spans of one text.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fsdp2kit.data.fields import CALL_ROLES, MEDIA, REASONING, learnt_by, no_media, read_fields, unfolded
from fsdp2kit.data.template import CLOSE, OPEN, Message, Template, Tokenizer, parsed
from fsdp2kit.errors import UserError

TrainOn = Literal["assistant", "all", "last"]
Span = tuple[int, int]  # characters [start, end)

_TODO = 'a row needs "messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]'

_SPOKEN = ("tool_calls", *REASONING)  # fields with text of a turn, beside its content
_BORDERS = re.compile(f"[{OPEN}{CLOSE}]")
_OTHER = "\ue002"  # of Unicode's private use: no content begins with it


def check_messages(messages: Any, where: str, *, name: str = "messages", mask: Any = None) -> list[dict[str, Any]]:
    """The messages as a list of dicts without None values, which pyarrow fills in for missing keys.

    What other tools write in another way becomes OpenAI's (`fsdp2kit.data.fields`): ShareGPT's
    ``{"from": "human", "value": "…"}``, Anthropic's parts of a content. One message may become several.

    Args:
        mask: 0 or 1 for each of the messages, whether it is learnt; it is noted in the message as ``loss_mask``.

    Raises:
        UserError: a message has another form; it names the row and the message.
    """
    if isinstance(messages, Sequence) and not messages:
        raise UserError(where, f"{name} is empty", _TODO)
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        kinds = "a list" if name == "messages" else "a text or a list of messages"
        todo = _TODO if name == "messages" else "give one of these"
        raise UserError(where, f"{name} is {_kind(messages)}, not {kinds}", todo)
    if mask is not None:
        messages = _masked(messages, mask, where, name)
    found: list[dict[str, Any]] = []
    for position, message in enumerate(messages):
        is_call = isinstance(message, Mapping) and message.get("from", message.get("role")) in CALL_ROLES
        read = _check_message(message, where, f"{name}[{position}]", before=found)
        if is_call and found and found[-1]["role"] == "assistant":
            found[-1] = _one_turn(found[-1], read[0], where, f"{name}[{position}]")
        else:
            found += read
    return found


def _masked(messages: Sequence[Any], mask: Any, where: str, name: str) -> list[Any]:
    """The messages, each with its entry of a row's mask."""
    if not isinstance(mask, Sequence) or isinstance(mask, (str, bytes)) or len(mask) != len(messages):
        count = f"{len(mask)} entries" if isinstance(mask, Sequence) else f"of type {type(mask).__name__}"
        what = f"loss_mask is {count} for {len(messages)} {name}"
        raise UserError(where, what, "give a list with 0 or 1 for each message")
    found = []
    for position, (message, entry) in enumerate(zip(messages, mask, strict=True)):
        if isinstance(message, Mapping):
            own = {key: value for key, value in message.items() if value is not None}
            if "loss_mask" in own:
                learnt_by({"loss_mask": own.pop("loss_mask"), "loss": entry}, where, f"{name}[{position}]")
            message = {**own, "loss_mask": entry}
        found.append(message)
    return found


def _one_turn(message: Message, call: Message, where: str, name: str) -> Message:
    """A turn of the assistant with the calls of ShareGPT's or ms-swift's turn behind it, which belong to it."""
    marks = [learnt_by(one, where, name) for one in (message, call)]
    if marks[0] != marks[1] and False in marks:
        what = f"{name} and the turn before it are one turn of the assistant, and are learnt otherwise"
        raise UserError(where, what, "mark both alike")
    if "reasoning_content" in call:
        what = f"{name} thinks again within a turn of the assistant"
        raise UserError(where, what, "put the thought before the turn")
    return {**message, "tool_calls": [*message.get("tool_calls", ()), *call["tool_calls"]]}


def _check_message(message: Any, where: str, name: str, *, before: Sequence[Message]) -> list[dict[str, Any]]:
    if not isinstance(message, Mapping):
        raise UserError(where, f"{name} is {_kind(message)}, not an object", _TODO)
    message = read_fields(message, where, name)
    if not isinstance(message.get("role"), str):
        raise UserError(where, f"{name} has no role", _TODO)
    _check_calls(message, where, name)
    content = message.get("content")
    if content is None and not any(message.get(field) for field in _SPOKEN):
        raise UserError(where, f"{name} has no content", _TODO)
    if content is not None and not isinstance(content, (str, list)):
        raise UserError(where, f"{name}.content is {_kind(content)}, not text", _TODO)
    return unfolded(message, where, name, before) if isinstance(content, list) else [message]


def check_no_media(row: Mapping[str, Any], where: str) -> None:
    """Refuse a row with a column of what its messages show: ``image``, ``images``, ``video``, … A list of nulls is
    empty."""
    for kind in MEDIA:
        for name in (kind, f"{kind}s"):
            if (value := row.get(name)) and (not isinstance(value, list) or any(value)):
                raise no_media(where, repr(name), kind)


def _kind(value: Any) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"


def _check_calls(message: Message, where: str, name: str) -> None:
    """Turn a message's tool calls into a list of objects without None, in place; an empty list is removed."""
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
    """The call without None values, which pyarrow fills in; None among the arguments stays."""
    kept = {key: value for key, value in call.items() if value is not None}
    if "function" in kept:
        kept["function"] = {key: value for key, value in kept["function"].items() if value is not None}
    elif "args" in kept and "arguments" not in kept:  # LangChain's
        kept["arguments"] = kept.pop("args")
    return kept


def check_tools(tools: Any, where: str) -> Any:
    """Tool schemas as a list of objects; None without tools. Any part may be a string of JSON."""
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


class Chat:
    """A conversation under its chat template.

    Args:
        messages: what `check_messages` returned.
        where: names the row in errors.
        variables: passed to the template, like ``enable_thinking``.
        learn_from: index of the first message that may be supervised; the messages before it are a prompt.
        train_on: which of the assistant's turns are learnt; None: none, the messages are a prompt.

    Raises:
        UserError: the template leaves out a text of the messages, or they allow no turn to be learnt.
    """

    def __init__(
        self,
        messages: list[Message],
        tokenizer: Tokenizer,
        *,
        where: str,
        tools: Any = None,
        variables: Mapping[str, Any],
        learn_from: int = 0,
        train_on: TrainOn | None = None,
    ) -> None:
        self.where, self.learn_from, self.bos_token = where, learn_from, tokenizer.bos_token
        self.template = Template(tokenizer, tools=tools, variables=variables, where=where)
        self.marks = [learnt_by(message, where, f"messages[{at}]") for at, message in enumerate(messages)]
        """What each message says of whether it is learnt; None: nothing."""
        self.turns = self._turns_of(messages, train_on)
        """The turns that are learnt, by their indices. All of them are the assistant's."""
        fitted = self.template.fit([self.template.without_flags(message) for message in messages])
        self.messages, text = self.template.settle(fitted, self.turns, prompt=train_on is None)
        self._whole = (self.messages, train_on is None, text)

    def _turns_of(self, messages: Sequence[Message], train_on: TrainOn | None) -> list[int]:
        if train_on is None:
            return []
        for at, (message, mark) in enumerate(zip(messages, self.marks, strict=True)):
            its = f'messages[{at}] (role "{message["role"]}")'
            if mark and message["role"] != "assistant" and train_on != "all":
                what = f"{its} is marked as learnt, and only turns of the assistant are"
                raise UserError(self.where, what, 'take the mark out, or set data.train_on = "all"')
            if mark is False and train_on == "all":
                what = f'{its} is marked as not learnt, and data.train_on = "all" learns every token'
                raise UserError(self.where, what, 'set data.train_on = "assistant", or take the mark out')
        found = [at for at, one in enumerate(messages) if one["role"] == "assistant" and at >= self.learn_from]
        found = found[-1:] if train_on == "last" else found
        learnt = [at for at in found if self.marks[at] is not False]
        if found and not learnt:
            which = "the last turn" if train_on == "last" else "every turn"
            what = f"{which} of the assistant is marked as not learnt, so the row has nothing to learn"
            raise UserError(self.where, what, "drop the row, or mark a turn as learnt")
        return learnt

    def text(self, turns: int | None = None, *, prompt: bool = False) -> str:
        """The text of the first ``turns`` messages, by default of all; ``prompt`` appends the generation prompt."""
        messages, has_prompt, text = self._whole
        if turns is None and self.messages is messages and prompt is has_prompt:
            return text
        return self.template.render(self.messages[:turns], prompt=prompt)

    def begin_of(self, turn: int) -> int:
        """Where the whole text begins to depend on what ``messages[turn]`` says.

        Some templates render the messages before it in another way when nothing follows.
        """
        try:
            other = self.template.render([*self.messages[:turn], self.saying_other(turn)])
        except UserError:  # a template that reads the content
            other = self.text(turn)
        return same_at_start(self.text(), other)

    def saying_other(self, turn: int) -> Message:
        """A message with another text and nothing beside it."""
        said = {key: value for key, value in self.messages[turn].items() if key not in _SPOKEN}
        said["content"] = [{"type": "text", "text": _OTHER}] if isinstance(said.get("content"), list) else _OTHER
        return said


def same_at_start(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many letters or messages are the same at the beginning of two texts or conversations."""
    return next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )


def turn_endings(tokenizer: Tokenizer) -> tuple[str, ...]:
    """The texts that may end a turn: those of the special tokens, the longest first."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    special |= {str(tokenizer.eos_token)} if tokenizer.eos_token else set()
    return tuple(sorted(special, key=lambda text: (-len(text), text)))


def supervised_spans(chat: Chat, endings: tuple[str, ...], train_on: TrainOn) -> tuple[str, list[Span]]:
    """A chat's text, and its supervised spans in ascending order, each with its end-of-turn token."""
    text, learn_from = chat.text(), chat.learn_from
    turns = chat.turns
    for turn in turns:
        if not any(str(chat.messages[turn].get(field) or "").strip() for field in ("content", *_SPOKEN)):
            raise _empty_turn(chat, turn)
    if train_on == "all" and not learn_from:
        return text, [(0, len(text))]
    if not chat.template.has_markers:
        spans = _prefix_spans(chat, text, endings, turns)
    else:
        closing = tuple(ending for ending in endings if ending != chat.bos_token)
        spans = _marked_spans(chat, text, closing)
        first = turns[0] if turns and train_on == "last" else learn_from
        if first:
            begin = chat.begin_of(first)
            spans = [span for span in spans if span[1] > begin]
        if False in chat.marks:
            spans = _spans_of_turns(chat, text, spans, turns)
    if len(spans) == len(turns):  # markers may enclose a turn in several pieces, and some may be empty
        for turn, (start, end) in zip(turns, spans, strict=True):
            if text[start:end].strip() in ("", *endings):
                raise _empty_turn(chat, turn)
    return text, [_trim(text, span, endings) for span in spans]


def _marked_spans(chat: Chat, text: str, endings: tuple[str, ...]) -> list[Span]:
    """What ``{% generation %}`` markers enclose, with the special token that ends a span or follows it."""
    # Pieces alternate: other text, the assistant's text, other text, …
    pieces = _BORDERS.split(marked := chat.template.render(chat.messages, marked=True))
    if "".join(pieces) != text or _BORDERS.findall(marked) != [OPEN, CLOSE] * (len(pieces) // 2):
        what = "the chat template's {% generation %} markers cannot be located in its text"
        todo = "let the markers enclose the assistant's text alone, without nesting or filters over them"
        raise UserError(chat.where, what, todo)
    ends = list(itertools.accumulate(map(len, pieces)))
    spans = []
    for start, end in zip(ends[::2], ends[1::2], strict=False):
        is_ended = text[start:end].rstrip().endswith(endings)
        if start < end and not is_ended:
            end += next((len(one) for one in endings if text.startswith(one, end)), 0)
        spans.append((start, end))
    return spans


def _spans_of_turns(chat: Chat, text: str, spans: Sequence[Span], turns: Sequence[int]) -> list[Span]:
    """Those spans that belong to some of the assistant's turns.

    A turn begins where the text changes if the turn says something else.
    """
    begins = []
    for at, message in enumerate(chat.messages):
        if message["role"] == "assistant":
            other = [*chat.messages[:at], chat.saying_other(at), *chat.messages[at + 1 :]]
            try:
                begins.append((same_at_start(text, chat.template.render(other)), at))
            except UserError:  # a result follows, and its call is gone
                begins.append((chat.begin_of(at), at))
    found = []
    for span in spans:
        owner = next((at for begin, at in reversed(begins) if begin < span[1]), None)
        if owner in turns:
            found.append(span)
    return found


def _empty_turn(chat: Chat, turn: int) -> UserError:
    what = f"the assistant says nothing in messages[{turn}], so the model would learn to end its turn at once"
    return UserError(chat.where, what, "drop the turn or the row, or set model.chat_template to one that renders it")


def _prefix_spans(chat: Chat, whole: str, endings: tuple[str, ...], turns: Sequence[int]) -> list[Span]:
    """What each assistant turn adds to its generation prompt, checked to be a piece of the whole text."""
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
                "when it is generated (some drop reasoning, or begin it in the prompt), so the mask would be wrong"
            )
            todo = "set model.chat_template to a template with {% generation %} markers"
            todo += ", or use single-turn rows" if turn + 1 < len(chat.messages) else ""
            raise UserError(chat.where, what, advice + todo)
        _refuse_header(chat, turn, added=until[len(prompt) :], prompt=prompt, endings=endings)
        spans.append((len(prompt), len(until)))
    return spans


def _turn_end(chat: Chat, turn: int, *, whole: str, endings: tuple[str, ...]) -> str:
    """The text up to the end of ``messages[turn]``.

    Templates like Phi-3's close the whole text with one more token, unless a generation prompt follows. This token
    belongs to no turn and is left out.
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
    """Refuse a template without a generation prompt whose turn's header would become the assistant's text.

    Templates like Mistral's need no prompt, since the user's turn ends in ``[/INST]``. They write no special token and
    no role before the content.
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
    """The span without the whitespace after its end-of-turn token: generation stops at the token."""
    start, end = span
    stripped = text[start:end].rstrip()
    return (start, start + len(stripped)) if stripped.endswith(endings) else span
