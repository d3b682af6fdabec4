"""Conversations: messages as the data writes them, their text, and where in the text the assistant speaks.

The chat template gives the assistant's text in one of two ways. ``{% generation %}`` markers enclose it. Without
markers, the conversation is rendered turn by turn: an assistant turn's text is what follows its generation prompt, and
it is checked to be a piece of the whole text. Both ways give character spans of one text.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fsdp2kit.data.fields import CALL_ROLES, MEDIA, REASONING, learnt_by, no_media, read_fields, unfolded
from fsdp2kit.data.special import SpecialTokens, StandIns, restored, without_quotes
from fsdp2kit.data.template import CLOSE, OPEN, Message, Template, Tokenizer, parsed
from fsdp2kit.errors import UserError

TrainOn = Literal["assistant", "all", "last"]
Span = tuple[int, int]  # characters [start, end)

_TODO = 'a row needs "messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]'

_SPOKEN = ("tool_calls", *REASONING)  # fields with text of a turn, beside its content
_BORDERS = re.compile(f"[{OPEN}{CLOSE}]")
_OTHER = "\ue002"  # of Unicode's private use: no content begins with it
_LITERAL = re.compile(r"""'[^'\n]*'|"[^"\n]*\"""")  # a text in a template
_RENDERED = 16  # turns that are rendered one by one
_RENDERED_CALLS = 100  # the same, of turns without a content
_NAMED = ("name", "tool_call_id")
_TAIL = 16  # characters by which the end of an answer is recognised


def check_messages(messages: Any, where: str, *, name: str = "messages") -> list[dict[str, Any]]:
    """The messages as a list of dicts without None values, which pyarrow fills in for missing keys.

    What other tools write in another way becomes OpenAI's (`fsdp2kit.data.fields`): ShareGPT's
    ``{"from": "human", "value": "…"}``, Anthropic's parts of a content. One message may become several.

    Raises:
        UserError: a message has another form; it names the row and the message.
    """
    if isinstance(messages, Sequence) and not messages:
        raise UserError(where, f"{name} is empty", _TODO)
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        kinds = "a list" if name == "messages" else "a text or a list of messages"
        todo = _TODO if name == "messages" else "give one of these"
        raise UserError(where, f"{name} is {_kind(messages)}, not {kinds}", todo)
    found: list[dict[str, Any]] = []
    for position, message in enumerate(messages):
        is_call = isinstance(message, Mapping) and message.get("from", message.get("role")) in CALL_ROLES
        read = _check_message(message, where, f"{name}[{position}]", before=found)
        if is_call and found and found[-1]["role"] == "assistant":
            found[-1] = _one_turn(found[-1], read[0], where, f"{name}[{position}]")
        else:
            found += read
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
        self.rendered = self.messages
        """The messages as the template gets them: with stand-ins where they quote special tokens (`quoting`)."""
        self.stand_ins: StandIns = {}
        self.own_special: list[str] = []
        """Special tokens in the texts that are read as tokens, since the template never writes them (`quoting`)."""
        self._whole = (train_on is None, text)

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
        has_prompt, whole = self._whole
        if turns is None and prompt is has_prompt:
            return whole
        return self.template.render(self.rendered[:turns], prompt=prompt)

    def quoting(self, special: SpecialTokens, *, prompt: bool = False) -> Chat:
        """The conversation with stand-ins in its texts where it quotes special tokens; itself if it quotes none.

        Args:
            prompt: check the text with the generation prompt.

        Raises:
            UserError: the template makes another text of it.
        """
        values, stand_ins, self.own_special = without_quotes(
            [*self.template.inputs, self.messages], special, where=self.where
        )
        if not stand_ins:
            return self
        other = copy.copy(self)
        tools, variables, other.rendered = values
        other.template, other.stand_ins = self.template.with_inputs(tools, variables), stand_ins
        own = self.text(prompt=prompt)
        text = other.template.render(other.rendered, prompt=prompt)
        if restored(text, stand_ins) == own:
            other._whole = (prompt, text)
            return other
        if [special.at(own, at) for at in special.starts_in(own)] == [
            special.at(text, at) for at in special.starts_in(text)
        ]:
            return self  # the template leaves out what is quoted
        what = "the row quotes a special token, and the chat template makes another text of the row because of it"
        raise UserError(self.where, what, "take the quoted token out of the row, or drop the row")

    def begin_of(self, turn: int) -> int:
        """Where the whole text begins to depend on what ``messages[turn]`` says.

        Some templates render the messages before it in another way when nothing follows.
        """
        try:
            other = self.template.render([*self.rendered[:turn], self.saying_other(turn)])
        except UserError:  # a template that reads the content
            other = self.text(turn)
        return same_at_start(self.text(), other)

    def saying_other(self, turn: int) -> Message:
        """A message with another text and nothing beside it."""
        said = {key: value for key, value in self.rendered[turn].items() if key not in _SPOKEN}
        said["content"] = [{"type": "text", "text": _OTHER}] if isinstance(said.get("content"), list) else _OTHER
        return said


def same_at_start(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many letters or messages are the same at the beginning of two texts or conversations."""
    return next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )


def supervised_spans(chat: Chat, special: SpecialTokens, train_on: TrainOn) -> tuple[str, list[Span]]:
    """A chat's text, and its supervised spans in ascending order, each with its end-of-turn token.

    The text is the template's. If its last answer is learnt and ends in no special token, the stop token follows that
    would come next in a longer conversation, or else the EOS.
    """
    text, learn_from = chat.text(), chat.learn_from
    turns = chat.turns
    for turn in turns:
        if not any(str(chat.messages[turn].get(field) or "").strip() for field in ("content", *_SPOKEN)):
            raise _empty_turn(chat, turn)
    ended = text + _last_stop(chat, text, special)
    if train_on == "all" and not learn_from:
        return ended, [(0, len(ended))]
    if not chat.template.has_markers:
        spans = _prefix_spans(chat, text, special, turns)
    else:
        closing = tuple(ending for ending in special.texts if ending != chat.bos_token)
        spans = _marked_spans(chat, text, closing)
        first = turns[0] if turns and train_on == "last" else learn_from
        if first:
            begin = chat.begin_of(first)
            spans = [span for span in spans if span[1] > begin]
        if False in chat.marks:
            spans = _spans_of_turns(chat, text, spans, turns)
    if len(spans) == len(turns):  # markers may enclose a turn in several pieces, and some may be empty
        for turn, (start, end) in zip(turns, spans, strict=True):
            if text[start:end].strip() in ("", *special.texts):
                raise _empty_turn(chat, turn)
    spans = [_whole_turn(ended, span, special) for span in spans]
    is_learnt = bool(spans) and spans[-1][1] == len(ended)
    return ended if is_learnt else text, spans


def _last_stop(chat: Chat, text: str, special: SpecialTokens) -> str:
    """What ends the last answer, where the template ends it with no special token; otherwise "".

    It is the stop token that begins the next turn: a tool's after calls, otherwise the user's. Without one it is the
    EOS.
    """
    last, answer = chat.rendered[-1], text.rstrip()
    if last["role"] != "assistant" or answer.endswith(special.texts):
        return ""
    content = last.get("content")
    known = content.strip() if isinstance(content, str) and not last.get("tool_calls") else ""
    size = min(len(known) or _TAIL, _TAIL)
    for following in _what_may_follow(last):
        try:
            begun = chat.template.render([*chat.rendered, following]).partition(_OTHER)[0]
        except UserError:
            continue
        marker = max(special.stops, key=begun.rfind, default="")
        said = begun.rpartition(marker)[0] if marker else ""
        # What precedes the marker must be the end of the answer, which may have lost its reasoning there.
        end = len(said.rstrip())
        if end and answer.endswith(said[max(0, end - size) : end]):
            return said[end:].removeprefix(text[len(answer) :]) + marker
    return special.eos


def _what_may_follow(answer: Message) -> list[Message]:
    """Messages that may come after an assistant's, the likeliest first."""
    user = {"role": "user", "content": _OTHER}
    if not answer.get("tool_calls"):
        return [user]
    call = answer["tool_calls"][-1]
    name = call.get("function", call).get("name")
    return [{"role": "tool", "content": _OTHER, "name": name, "tool_call_id": call.get("id")}, user]


def _whole_turn(text: str, span: Span, special: SpecialTokens) -> Span:
    """The span up to its end-of-turn token: without the space after it, or with the stop token that follows the span.

    Generation stops at the token.
    """
    start, end = span
    stripped = text[start:end].rstrip()
    if stripped.endswith(special.texts):
        return start, start + len(stripped)
    return (start, special.end_of_stop(text, end)) if start < end else span


def _marked_spans(chat: Chat, text: str, endings: tuple[str, ...]) -> list[Span]:
    """What ``{% generation %}`` markers enclose, with the special token that ends a span or follows it."""
    # Pieces alternate: other text, the assistant's text, other text, …
    pieces = _BORDERS.split(marked := chat.template.render(chat.rendered, marked=True))
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
    for at, message in enumerate(chat.rendered):
        if message["role"] == "assistant":
            other = [*chat.rendered[:at], chat.saying_other(at), *chat.rendered[at + 1 :]]
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


def _prefix_spans(chat: Chat, whole: str, special: SpecialTokens, turns: Sequence[int]) -> list[Span]:
    """What each assistant turn adds to its generation prompt, checked to be a piece of the whole text.

    Each turn needs renderings of the conversation up to it. Of many turns, only some of each kind are rendered: the
    first, the middle and the last one. The others of the kind must stand between the same texts as these; those that
    do not are rendered as well.
    """
    contents = _find_contents(chat, whole) if len(turns) > _RENDERED else None
    if contents is None:
        return [_prefix_span(chat, whole, special, turn, is_last=turn == turns[-1]) for turn in turns]
    kinds: dict[Any, list[int]] = {}
    marks = _marks_of(chat)
    for turn in turns:
        is_between = all(contents[turn - 1 : turn] + contents[turn + 1 : turn + 2])
        # What a turn without a content adds can only be told from its calls where it is rendered.
        is_sure = is_between and (contents[turn] is not None or len(turns) > _RENDERED_CALLS)
        kind = tuple(marks[max(turn - 1, 0) : turn + 2]) if is_sure else turn
        kinds.setdefault(kind, []).append(turn)
    tried = sorted({alike[at] for alike in kinds.values() for at in (0, len(alike) // 2, -1)})
    spans = {turn: _prefix_span(chat, whole, special, turn, is_last=turn == turns[-1]) for turn in tried}
    for alike in kinds.values():
        if len(alike) > 1:
            found = _spans_alike(chat, whole, contents, alike, spans[alike[0]])
            if all(found.get(turn) == spans[turn] for turn in alike if turn in spans):
                spans = {**found, **spans}
    rest = {turn: _prefix_span(chat, whole, special, turn, is_last=False) for turn in turns if turn not in spans}
    spans.update(rest)
    return [spans[turn] for turn in turns]


def _find_contents(chat: Chat, whole: str) -> list[Span | None] | None:
    """Where the content of each message is in the whole text, without the space around it; None where it has no text.

    None for all if a rendering with marks around the contents does not give the same text, or gives them in another
    order.
    """
    marked, cores = [], []
    for message in chat.rendered:
        content = message.get("content")
        core = content.strip() if isinstance(content, str) else ""
        if isinstance(content, str) and core:
            message = {**message, "content": content.replace(core, f"{OPEN}{core}{CLOSE}", 1)}
        marked.append(message)
        cores.append(core)
    try:
        pieces = _BORDERS.split(text := chat.template.render(marked))
    except UserError:
        return None
    expected = [core for core in cores if core]
    if "".join(pieces) != whole or _BORDERS.findall(text) != [OPEN, CLOSE] * len(expected) or pieces[1::2] != expected:
        return None
    ends = list(itertools.accumulate(map(len, pieces)))
    spans = iter(list(zip(ends[::2], ends[1::2], strict=False)))
    return [next(spans) if core else None for core in cores]


def _marks_of(chat: Chat) -> list[Any]:
    """What a template may tell messages apart by, for each: role, fields, space around the content, and those texts
    which the template itself names."""
    literals = {found[1:-1] for found in _LITERAL.findall(chat.template.source)}
    named = sorted(one for one in literals if len(one) > 1 and not re.fullmatch(r"[\w\s]*", one))
    marks = []
    for message in chat.rendered:
        content, calls = message.get("content"), message.get("tool_calls") or ()
        fields = tuple(sorted((key, type(value).__name__) for key, value in message.items() if value))
        text = content if isinstance(content, str) else ""
        spoken = [text, *(str(message[field]) for field in REASONING if message.get(field))]
        found = tuple(one for one in named if any(one in said for said in spoken))
        space = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
        marks.append((message["role"], fields, len(calls), space, found))
    return marks


def _spans_alike(
    chat: Chat, whole: str, contents: Sequence[Span | None], alike: Sequence[int], first: Span
) -> dict[int, Span]:
    """The spans of turns, after that of the first of them; those of turns between other texts are left out.

    The texts may differ in the names and ids of the messages around the turns.
    """

    def room(turn: int) -> Span:
        """What lies between the contents before a turn and after it."""
        before, after = contents[turn - 1], contents[turn + 1] if turn + 1 < len(contents) else None
        return before[1] if before else 0, after[0] if after else len(whole)

    def named(text: str, at: int, other: int) -> str:
        """A text beside the message ``at`` as it is beside another one."""
        if at < len(contents):
            for field in _NAMED:
                name, new = chat.rendered[at].get(field), chat.rendered[other].get(field)
                if name and isinstance(name, str) and isinstance(new, str):
                    text = text.replace(name, new)
        return text

    def around(turn: int, span: Span) -> tuple[str, str]:
        """What the span adds to the turn's content, before and after it."""
        content = contents[turn]
        return (whole[span[0] : content[0]], whole[content[1] : span[1]]) if content else ("", "")

    origin = alike[0]
    begin, end = room(origin)
    if not begin <= first[0] <= first[1] <= end:
        return {}
    before, after = whole[begin : first[0]], whole[first[1] : end]
    added = around(origin, first)
    found = {}
    for turn in alike:
        begin, end = room(turn)
        head, tail = named(before, origin - 1, turn - 1), named(after, origin + 1, turn + 1)
        is_wide = end - begin >= len(head) + len(tail)
        if not (is_wide and whole.startswith(head, begin) and whole.endswith(tail, begin, end)):
            continue
        span = (begin + len(head), end - len(tail))
        # Within the span, too, nothing else may stand beside the content.
        if around(turn, span) == added:
            found[turn] = span
    return found


def _prefix_span(chat: Chat, whole: str, special: SpecialTokens, turn: int, *, is_last: bool) -> Span:
    """What an assistant turn adds to its generation prompt, checked to be a piece of the whole text.

    Args:
        is_last: whether no later turn is learnt.
    """
    if turn == 0:
        what = "the conversation begins with the assistant, so nothing says where its text begins"
        todo = "begin with a user or system message, or use a chat template with {% generation %} markers"
        raise UserError(chat.where, what, todo)
    prompt = chat.text(turn, prompt=True)
    until = _turn_end(chat, turn, whole=whole, endings=special.texts)
    if not (until.startswith(prompt) and whole.startswith(until)):
        advice = "" if is_last else 'set data.train_on = "last" to learn the last answer of each row, '
        what = (
            f"the chat template renders the assistant's messages[{turn}] differently within the conversation and "
            "when it is generated (some drop reasoning, or begin it in the prompt), so the mask would be wrong"
        )
        todo = "set model.chat_template to a template with {% generation %} markers"
        todo += ", or use single-turn rows" if turn + 1 < len(chat.messages) else ""
        raise UserError(chat.where, what, advice + todo)
    _refuse_header(chat, turn, added=until[len(prompt) :], prompt=prompt, endings=special.texts)
    return len(prompt), len(until)


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
    content = chat.rendered[turn].get("content")
    header = added[: max(added.find(content.strip()), 0)] if isinstance(content, str) else ""
    if "assistant" in header and any(ending in header for ending in endings) and prompt == chat.text(turn):
        what = (
            f"the chat template ignores add_generation_prompt, so {header!r} would be learnt as the assistant's text"
        )
        todo = "set model.chat_template to a template with a generation prompt or {% generation %} markers"
        raise UserError(chat.where, what, todo)
