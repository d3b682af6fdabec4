"""A conversation → its text under a chat template, and where in the text the assistant speaks.

The chat template gives the assistant's text in one of two ways. ``{% generation %}`` markers enclose it. Without
markers, the conversation is rendered turn by turn: an assistant turn's text is what follows its generation prompt, and
it is checked to be a piece of the whole text. Both ways give character spans of one text.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp2kit.data.conversation import Conversation
from fsdp2kit.data.fields import same_at_start
from fsdp2kit.data.fitting import fit
from fsdp2kit.data.messages import BESIDE, Message, Messages, TrainOn
from fsdp2kit.data.names import REASONING
from fsdp2kit.data.special import SpecialTokens, restored, special_tokens, without_quotes
from fsdp2kit.data.template import CLOSE, OPEN, Template, Tokenizer
from fsdp2kit.errors import UserError

Span = tuple[int, int]  # characters [start, end)

_BORDERS = re.compile(f"[{OPEN}{CLOSE}]")
_OTHER = "\ue002"  # of Unicode's private use: no content begins with it
_LITERAL = re.compile(r"""'[^'\n]*'|"[^"\n]*\"""")  # a text in a template
_RENDERED = 16  # turns that are rendered one by one
_RENDERED_CALLS = 100  # the same, of turns without a content
_NAMED = ("name", "tool_call_id")
_TAIL = 16  # characters by which the end of an answer is recognised


@dataclass(frozen=True)
class Rendered:
    """A conversation as its chat template writes it. Parts of it can be rendered, too."""

    conversation: Conversation
    template: Template
    """With the conversation's tools and variables."""
    messages: Messages
    """The messages, fitted to what the template renders."""
    given: Messages
    """The messages as the template gets them: with stand-ins where they quote special tokens."""
    text: str
    """The rendered text of all messages; a prompt's ends with the generation prompt."""
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    """Each stand-in, and the character that it stands for."""
    own_special: Sequence[str] = ()
    """Special tokens in the texts that are read as tokens, since the template never writes them."""

    @property
    def where(self) -> str:
        """Names the row in errors."""
        return self.conversation.where

    def text_of(self, turns: int | None = None, *, prompt: bool = False) -> str:
        """The text of the first ``turns`` messages, by default of all; ``prompt`` appends the generation prompt."""
        if turns is None and prompt is self.conversation.is_prompt:
            return self.text
        return self.template.render(self.given[:turns], prompt=prompt)

    def begin_of(self, turn: int) -> int:
        """Where the whole text begins to depend on what ``messages[turn]`` says.

        Some templates render the messages before it in another way when nothing follows.
        """
        try:
            other = self.template.render([*self.given[:turn], self.saying_other(turn)])
        except UserError:  # a template that reads the content
            other = self.text_of(turn)
        return same_at_start(self.text, other)

    def saying_other(self, turn: int) -> Message:
        """A message with another text and nothing beside it."""
        said = {key: value for key, value in self.given[turn].items() if key not in BESIDE}
        said["content"] = [{"type": "text", "text": _OTHER}] if isinstance(said.get("content"), list) else _OTHER
        return said


class Renderer:
    """A tokenizer's chat template and special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._special: SpecialTokens | None = None
        self._known: set[bool] = set()  # whether conversations with tools, and without, were looked at

    def check_template(self, conversation: Conversation) -> None:
        """Refuse a tokenizer without a chat template. Call it before other checks of a row.

        Raises:
            UserError: there is none.
        """
        has_tools = bool(conversation.tools)
        if has_tools not in self._known:
            Template(self.tokenizer, tools=conversation.tools, variables={}, where=conversation.where)
            self._known.add(has_tools)

    @property
    def special(self) -> SpecialTokens:
        """The tokenizer's special tokens."""
        # No `cached_property`: before Python 3.12 it has a lock, with which a process may fork.
        if self._special is None:
            self._special = special_tokens(self.tokenizer)
        return self._special

    def render(self, conversation: Conversation) -> Rendered:
        """A conversation's text, which shows each text that its messages say.

        Stand-ins take the place of special tokens that the messages quote.

        Raises:
            UserError: there is no template, it leaves out a text, or it makes another text of what is quoted.
        """
        tools = conversation.tools
        variables = conversation.variables
        is_prompt = conversation.is_prompt
        template = Template(self.tokenizer, tools=tools, variables=variables, where=conversation.where)
        messages, text = fit(template, conversation.messages, conversation.turns, prompt=is_prompt)
        special = self.special
        values = [tools, variables, messages]
        changed, stand_ins, own_special = without_quotes(values, special, where=conversation.where)
        rendered = Rendered(conversation, template, messages, messages, text, own_special=own_special)
        if not stand_ins:
            return rendered
        tools, variables, given = changed
        quoting = template.with_inputs(tools, variables)
        quoted = quoting.render(given, prompt=is_prompt)
        if restored(quoted, stand_ins) == text:
            return Rendered(conversation, quoting, messages, given, quoted, stand_ins, own_special)
        if special.found_in(quoted) == special.found_in(text):
            return rendered  # the template leaves out what is quoted
        what = "the row quotes a special token, and the chat template makes another text of the row because of it"
        raise UserError(conversation.where, what, "take the quoted token out of the row, or drop the row")


def supervised_spans(rendered: Rendered, special: SpecialTokens, train_on: TrainOn) -> tuple[str, list[Span]]:
    """A conversation's text, and its supervised spans in ascending order, each with its end-of-turn token.

    The text is the template's. If its last answer is learnt and ends in no special token, the stop token follows that
    would come next in a longer conversation, or else the EOS.
    """
    text = rendered.text
    turns = rendered.conversation.turns
    learn_from = rendered.conversation.learn_from
    for turn in turns:
        if not any(str(rendered.messages[turn].get(name) or "").strip() for name in ("content", *BESIDE)):
            raise _empty_turn(rendered, turn)
    ended = text + _last_stop(rendered, text, special)
    if train_on == "all" and not learn_from:
        return ended, [(0, len(ended))]
    if not rendered.template.has_markers:
        spans = _prefix_spans(rendered, text, special, turns)
    else:
        spans = _marked_spans(rendered, text, tuple(ending for ending in special.texts if ending != special.bos))
        first = turns[0] if turns and train_on == "last" else learn_from
        if first:
            begin = rendered.begin_of(first)
            spans = [span for span in spans if span[1] > begin]
        if rendered.conversation.skips_turns:
            spans = _spans_of_turns(rendered, text, spans, turns)
    if len(spans) == len(turns):  # markers may enclose a turn in several runs, and some may be empty
        for turn, (start, end) in zip(turns, spans, strict=True):
            if text[start:end].strip() in ("", *special.texts):
                raise _empty_turn(rendered, turn)
    spans = [_whole_turn(ended, span, special) for span in spans]
    is_learnt = bool(spans) and spans[-1][1] == len(ended)
    return ended if is_learnt else text, spans


def _last_stop(rendered: Rendered, text: str, special: SpecialTokens) -> str:
    """What ends the last answer, where the template ends it with no special token; otherwise "".

    It is the stop token that begins the next turn: a tool's after calls, otherwise the user's. Without one it is the
    EOS.
    """
    last = rendered.given[-1]
    answer = text.rstrip()
    if last["role"] != "assistant" or answer.endswith(special.texts):
        return ""
    content = last.get("content")
    known = content.strip() if isinstance(content, str) and not last.get("tool_calls") else ""
    size = min(len(known) or _TAIL, _TAIL)
    for following in _what_may_follow(last):
        try:
            begun = rendered.template.render([*rendered.given, following]).partition(_OTHER)[0]
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


def _marked_spans(rendered: Rendered, text: str, endings: tuple[str, ...]) -> list[Span]:
    """What ``{% generation %}`` markers enclose, with the special token that ends a span or follows it."""
    # Pieces alternate: other text, the assistant's text, other text, …
    pieces = _BORDERS.split(marked := rendered.template.render(rendered.given, marked=True))
    if "".join(pieces) != text or _BORDERS.findall(marked) != [OPEN, CLOSE] * (len(pieces) // 2):
        what = "the chat template's {% generation %} markers cannot be located in its text"
        todo = "let the markers enclose the assistant's text alone, without nesting or filters over them"
        raise UserError(rendered.where, what, todo)
    ends = list(itertools.accumulate(map(len, pieces)))
    spans = []
    for start, end in zip(ends[::2], ends[1::2], strict=False):
        is_ended = text[start:end].rstrip().endswith(endings)
        if start < end and not is_ended:
            end += next((len(one) for one in endings if text.startswith(one, end)), 0)
        spans.append((start, end))
    return spans


def _spans_of_turns(rendered: Rendered, text: str, spans: Sequence[Span], turns: Sequence[int]) -> list[Span]:
    """Those spans that belong to some of the assistant's turns.

    A turn begins where the text changes if the turn says something else.
    """
    begins = []
    for at, message in enumerate(rendered.given):
        if message["role"] == "assistant":
            other = [*rendered.given[:at], rendered.saying_other(at), *rendered.given[at + 1 :]]
            try:
                begins.append((same_at_start(text, rendered.template.render(other)), at))
            except UserError:  # a result follows, and its call is gone
                begins.append((rendered.begin_of(at), at))
    found = []
    for span in spans:
        owner = next((at for begin, at in reversed(begins) if begin < span[1]), None)
        if owner in turns:
            found.append(span)
    return found


def _empty_turn(rendered: Rendered, turn: int) -> UserError:
    what = f"the assistant says nothing in messages[{turn}], so the model would learn to end its turn at once"
    todo = "drop the turn or the row, or set model.chat_template to one that renders it"
    return UserError(rendered.where, what, todo)


def _prefix_spans(rendered: Rendered, whole: str, special: SpecialTokens, turns: Sequence[int]) -> list[Span]:
    """What each assistant turn adds to its generation prompt, checked to be a piece of the whole text.

    Each turn needs renderings of the conversation up to it. Of many turns, only some of each kind are rendered: the
    first, the middle and the last one. The others of the kind must stand between the same texts as these; those that
    do not are rendered as well.
    """
    contents = _find_contents(rendered, whole) if len(turns) > _RENDERED else None
    if contents is None:
        return [_prefix_span(rendered, whole, special, turn, is_last=turn == turns[-1]) for turn in turns]
    kinds: dict[Any, list[int]] = {}
    marks = _marks_of(rendered)
    for turn in turns:
        is_between = all(contents[turn - 1 : turn] + contents[turn + 1 : turn + 2])
        # What a turn without a content adds can only be told from its calls where it is rendered.
        is_sure = is_between and (contents[turn] is not None or len(turns) > _RENDERED_CALLS)
        kind = tuple(marks[max(turn - 1, 0) : turn + 2]) if is_sure else turn
        kinds.setdefault(kind, []).append(turn)
    tried = sorted({alike[at] for alike in kinds.values() for at in (0, len(alike) // 2, -1)})
    spans = {turn: _prefix_span(rendered, whole, special, turn, is_last=turn == turns[-1]) for turn in tried}
    for alike in kinds.values():
        if len(alike) > 1:
            found = _spans_alike(rendered, whole, contents, alike, spans[alike[0]])
            if all(found.get(turn) == spans[turn] for turn in alike if turn in spans):
                spans = {**found, **spans}
    rest = {turn: _prefix_span(rendered, whole, special, turn, is_last=False) for turn in turns if turn not in spans}
    spans.update(rest)
    return [spans[turn] for turn in turns]


def _find_contents(rendered: Rendered, whole: str) -> list[Span | None] | None:
    """Where the content of each message is in the whole text, without the space around it; None where it has no text.

    None for all if a rendering with marks around the contents does not give the same text, or gives them in another
    order.
    """
    marked = []
    cores = []
    for message in rendered.given:
        content = message.get("content")
        core = content.strip() if isinstance(content, str) else ""
        if isinstance(content, str) and core:
            message = {**message, "content": content.replace(core, f"{OPEN}{core}{CLOSE}", 1)}
        marked.append(message)
        cores.append(core)
    try:
        pieces = _BORDERS.split(text := rendered.template.render(marked))
    except UserError:
        return None
    expected = [core for core in cores if core]
    if "".join(pieces) != whole or _BORDERS.findall(text) != [OPEN, CLOSE] * len(expected) or pieces[1::2] != expected:
        return None
    ends = list(itertools.accumulate(map(len, pieces)))
    spans = iter(list(zip(ends[::2], ends[1::2], strict=False)))
    return [next(spans) if core else None for core in cores]


def _marks_of(rendered: Rendered) -> list[Any]:
    """What a template may tell messages apart by, for each: role, fields, space around the content, and those texts
    which the template itself names."""
    literals = {found[1:-1] for found in _LITERAL.findall(rendered.template.source)}
    named = sorted(one for one in literals if len(one) > 1 and not re.fullmatch(r"[\w\s]*", one))
    marks = []
    for message in rendered.given:
        content = message.get("content")
        calls = message.get("tool_calls") or ()
        fields = tuple(sorted((key, type(value).__name__) for key, value in message.items() if value))
        text = content if isinstance(content, str) else ""
        spoken = [text, *(str(message[name]) for name in REASONING if message.get(name))]
        found = tuple(one for one in named if any(one in said for said in spoken))
        space = (text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :])
        marks.append((message["role"], fields, len(calls), space, found))
    return marks


def _spans_alike(
    rendered: Rendered, whole: str, contents: Sequence[Span | None], alike: Sequence[int], first: Span
) -> dict[int, Span]:
    """The spans of turns, after that of the first of them; those of turns between other texts are left out.

    The texts may differ in the names and ids of the messages around the turns.
    """

    def room(turn: int) -> Span:
        """What lies between the contents before a turn and after it."""
        before = contents[turn - 1]
        after = contents[turn + 1] if turn + 1 < len(contents) else None
        return before[1] if before else 0, after[0] if after else len(whole)

    def named(text: str, at: int, other: int) -> str:
        """A text beside the message ``at`` as it is beside another one."""
        if at < len(contents):
            for key in _NAMED:
                name = rendered.given[at].get(key)
                new = rendered.given[other].get(key)
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
    before = whole[begin : first[0]]
    after = whole[first[1] : end]
    added = around(origin, first)
    found = {}
    for turn in alike:
        begin, end = room(turn)
        head = named(before, origin - 1, turn - 1)
        tail = named(after, origin + 1, turn + 1)
        is_wide = end - begin >= len(head) + len(tail)
        if not (is_wide and whole.startswith(head, begin) and whole.endswith(tail, begin, end)):
            continue
        span = (begin + len(head), end - len(tail))
        # Within the span, too, nothing else may stand beside the content.
        if around(turn, span) == added:
            found[turn] = span
    return found


def _prefix_span(rendered: Rendered, whole: str, special: SpecialTokens, turn: int, *, is_last: bool) -> Span:
    """What an assistant turn adds to its generation prompt, checked to be a piece of the whole text.

    Args:
        is_last: whether no later turn is learnt.
    """
    if turn == 0:
        what = "the conversation begins with the assistant, so nothing says where its text begins"
        todo = "begin with a user or system message, or use a chat template with {% generation %} markers"
        raise UserError(rendered.where, what, todo)
    prompt = rendered.text_of(turn, prompt=True)
    until = _turn_end(rendered, turn, whole=whole, endings=special.texts)
    if not (until.startswith(prompt) and whole.startswith(until)):
        advice = "" if is_last else 'set data.train_on = "last" to learn the last answer of each row, '
        what = (
            f"the chat template renders the assistant's messages[{turn}] differently within the conversation and "
            "when it is generated (some drop reasoning, or begin it in the prompt), so the mask would be wrong"
        )
        todo = "set model.chat_template to a template with {% generation %} markers"
        todo += ", or use single-turn rows" if turn + 1 < len(rendered.messages) else ""
        raise UserError(rendered.where, what, advice + todo)
    _refuse_header(rendered, turn, added=until[len(prompt) :], prompt=prompt, endings=special.texts)
    return len(prompt), len(until)


def _turn_end(rendered: Rendered, turn: int, *, whole: str, endings: tuple[str, ...]) -> str:
    """The text up to the end of ``messages[turn]``.

    Templates like Phi-3's close the whole text with one more token, unless a generation prompt follows. This token
    belongs to no turn and is left out.
    """
    is_last = turn + 1 == len(rendered.messages)
    text = whole if is_last else rendered.text_of(turn + 1)
    closing = next((ending for ending in endings if text.endswith(ending)), "")
    if not closing:
        return text
    shorter = text[: -len(closing)]
    if is_last and not shorter.rstrip().endswith(endings):
        return text
    going_on = rendered.text_of(prompt=True) if is_last else whole
    return shorter if going_on.startswith(shorter) and not going_on.startswith(text) else text


def _refuse_header(rendered: Rendered, turn: int, *, added: str, prompt: str, endings: tuple[str, ...]) -> None:
    """Refuse a template without a generation prompt whose turn's header would become the assistant's text.

    Templates like Mistral's need no prompt, since the user's turn ends in ``[/INST]``. They write no special token and
    no role before the content.
    """
    content = rendered.given[turn].get("content")
    header = added[: max(added.find(content.strip()), 0)] if isinstance(content, str) else ""
    if "assistant" in header and any(ending in header for ending in endings) and prompt == rendered.text_of(turn):
        what = (
            f"the chat template ignores add_generation_prompt, so {header!r} would be learnt as the assistant's text"
        )
        todo = "set model.chat_template to a template with a generation prompt or {% generation %} markers"
        raise UserError(rendered.where, what, todo)
