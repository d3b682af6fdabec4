"""Rows → tokens: each row's token ids, and which of them are supervised.

A row becomes one text with character spans and is tokenised once, as a whole; the tokenizer's offsets map the spans to
tokens. transformers' ``assistant_masks`` is not used. If a span begins or ends in a space that the offsets leave out,
it silently loses turns or runs on to the end of the text.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fsdp2kit.config.sections.data import DataConfig
from fsdp2kit.data.columns import RowColumns, read_columns
from fsdp2kit.data.conversation import Conversation, PlainText, WholeText
from fsdp2kit.data.findings import Findings
from fsdp2kit.data.formats.prompts import read_prompt
from fsdp2kit.data.formats.table import FORMATS, Read, looks_unwrapped
from fsdp2kit.data.formats.tokens import LabelledTokens
from fsdp2kit.data.memory import check_room
from fsdp2kit.data.rendered import Rendered, Renderer, Span, supervised_spans
from fsdp2kit.data.rows import Row
from fsdp2kit.data.special import encode_quotes
from fsdp2kit.data.template import Tokenizer, template_variables
from fsdp2kit.data.unread import check_unread
from fsdp2kit.errors import UserError

Encoded = tuple[list[int], list[bool]]  # token ids, and whether each is supervised
NO_ENDING = -1
_CHARACTERS = 4 << 20  # that are tokenised in one call, unless one text has more


@dataclass(frozen=True)
class Prompt:
    """A prompt that responses are sampled for."""

    row: Mapping[str, Any]
    """All columns of its row."""
    messages: list[dict[str, Any]] | str
    """A conversation; a text if the tokenizer has no chat template. Empty where an environment makes it."""
    ids: list[int]
    """Token ids of the messages with the generation prompt, or of the text."""


class _Spoken(NamedTuple):
    """The text of a conversation, and what of it is learnt."""

    text: str
    spans: Sequence[Span]
    """Characters that are learnt, ascending."""
    where: str
    rendered: Rendered


_Encodable = _Spoken | PlainText | WholeText | LabelledTokens
_WithSpans = TypeVar("_WithSpans", _Spoken, PlainText)
_Text = TypeVar("_Text", _Spoken, PlainText, WholeText)


def encode_rows(
    rows: Sequence[Row], section: DataConfig, tokenizer: Tokenizer, *, follows: bool = False
) -> list[Encoded]:
    """Token ids and masks of the rows' documents, in their order: `encode_documents`, as one list."""
    return list(itertools.chain.from_iterable(encode_documents(rows, section, tokenizer, follows=follows)))


def encode_documents(
    rows: Sequence[Row],
    section: DataConfig,
    tokenizer: Tokenizer,
    *,
    follows: bool = False,
    findings: Findings | None = None,
) -> list[list[Encoded]]:
    """Token ids and masks of each row's documents: its answers, or what a row of tokens packs.

    The assistant's tokens and its end-of-turn tokens are supervised, the whitespace after them is not. A token is the
    assistant's if any of its characters is. The chat template alone decides whether a conversation has a BOS. A plain
    text gets the tokenizer's special tokens, and keeps one BOS and one EOS where it has them already.

    Args:
        section: its `format`, `columns`, `train_on` and `wrap` are read.
        follows: whether rows before these were encoded. An error then does not advise to read other columns.
        findings: what is noticed of the rows is added here.
    """
    findings = Findings() if findings is None else findings
    format = FORMATS[section.format]
    renderer = Renderer(tokenizer)
    columns = read_columns(rows, section, follows=follows)
    of_rows: list[list[_Encodable]] = []
    for row in columns:
        read = format.read(row)
        _check_rest(row, read, renderer, findings)
        of_rows.append([_rendered(one, renderer, section, findings) for one in read])
    if columns:
        findings.unwrapped |= looks_unwrapped(columns[0], tokenizer)
    encoded = iter(_encode(list(itertools.chain.from_iterable(of_rows)), renderer, findings))
    return [list(itertools.islice(encoded, len(of_row))) for of_row in of_rows]


def _check_rest(row: RowColumns, read: Sequence[Any], renderer: Renderer, findings: Findings) -> None:
    """Refuse a row with a column that goes unread, and a tokenizer that cannot render its conversations.

    Args:
        read: what the row's format has read of it.
    """
    conversations = [one for one in read if isinstance(one, Conversation)]
    for conversation in conversations:
        renderer.check_template(conversation)
    variables = template_variables(renderer.tokenizer) if conversations else frozenset()
    unread = check_unread(row, variables)
    findings.note_row(unread=unread, systems_twice=[one.has_system_twice for one in conversations])


def encode_prompts(
    rows: Sequence[Row], section: DataConfig, tokenizer: Tokenizer, *, findings: Findings | None = None
) -> list[Prompt]:
    """The prompts of rows of the format "prompts", tokenised with the generation prompt.

    Rows of the format "rows" have none: an environment makes them, each time a row is asked.

    Args:
        findings: what is noticed of the rows is added here.
    """
    findings = Findings() if findings is None else findings
    if section.format == "rows":
        return [Prompt(row.parse(), [], []) for row in rows]
    found = []
    renderer = Renderer(tokenizer)
    for row in read_columns(rows, section):
        asked = read_prompt(row, has_template=tokenizer.chat_template is not None)
        _check_rest(row, [asked], renderer, findings)
        if isinstance(asked, str):
            messages = asked
            ids = plain_prompt_ids(tokenizer, asked)
        else:
            rendered = renderer.render(asked)
            findings.note_special(rendered.conversation.where, rendered.own_special, quotes=bool(rendered.stand_ins))
            messages = rendered.messages
            ids = encode_text(rendered.text, rendered, renderer)
        if not ids:
            raise UserError(row.where, "the prompt is empty", "drop the row")
        found.append(Prompt(row.whole, messages, ids))
    return found


def encode_text(text: str, rendered: Rendered, renderer: Renderer) -> list[int]:
    """Token ids of a part of a conversation's text.

    Raises:
        UserError: it quotes a special token, and cannot be encoded without it.
    """
    tokenizer = renderer.tokenizer
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if not rendered.stand_ins:
        return ids
    return encode_quotes(text, ids, rendered.stand_ins, tokenizer, renderer.special, where=rendered.where)[0]


def _rendered(read: Read, renderer: Renderer, section: DataConfig, findings: Findings) -> _Encodable:
    """A conversation's text with the spans of its characters that are supervised; anything else unchanged."""
    if not isinstance(read, Conversation):
        return read
    rendered = renderer.render(read)
    findings.note_special(rendered.conversation.where, rendered.own_special, quotes=bool(rendered.stand_ins))
    text, spans = supervised_spans(rendered, renderer.special, section.train_on)
    return _Spoken(text, spans, rendered.where, rendered)


def _encode(texts: Sequence[_Encodable], renderer: Renderer, findings: Findings) -> list[Encoded]:
    """Token ids and masks. Neighbours of one kind are tokenised together."""
    tokenizer = renderer.tokenizer
    encoded: list[Encoded] = []
    for kind, alike in itertools.groupby(texts, key=type):
        some: list[Any] = list(alike)
        if kind is _Spoken:
            encoded += _encode_conversations(some, renderer)
        elif kind is PlainText:
            encoded += _encode_plain_texts(some, tokenizer, findings)
        elif kind is WholeText:
            encoded += _encode_whole_texts(some, tokenizer, findings)
        else:
            encoded += [(one.ids, one.supervised) for one in some]
    return encoded


def _encode_conversations(texts: Sequence[_Spoken], renderer: Renderer) -> list[Encoded]:
    """Tokenise conversations and supervise the tokens that overlap their spans."""
    encoded: list[Encoded] = []
    for one, ids, offsets in _with_offsets(texts, renderer.tokenizer, add_special_tokens=False):
        if stand_ins := one.rendered.stand_ins:
            ids, offsets = encode_quotes(
                one.text, ids, stand_ins, renderer.tokenizer, renderer.special, where=one.where
            )
        encoded.append((ids, _mask(offsets, one.spans)))
    return encoded


def _encode_plain_texts(texts: Sequence[PlainText], tokenizer: Tokenizer, findings: Findings) -> list[Encoded]:
    """Tokenise prompts with their answers, and end them with an end-of-text token. The answers are supervised."""
    before, after = special_affixes(tokenizer)
    encoded: list[Encoded] = []
    for one, ids, offsets in _with_offsets(texts, tokenizer, add_special_tokens=True):
        kept = _once(ids, before, after)
        findings.note_affixes(has_bos=kept.begin > kept.added, has_eos=kept.stop < len(ids))
        mask = _mask(kept.of(offsets), [(one.start, len(one.text))])
        encoded.append(_ended(kept.of(ids), mask, tokenizer))
    return encoded


def _encode_whole_texts(texts: Sequence[WholeText], tokenizer: Tokenizer, findings: Findings) -> list[Encoded]:
    """Tokenise texts, and end them with an end-of-text token. Every token is supervised, so no offsets are needed."""
    for one in texts:
        check_room(one.text, one.where, tokenizer, with_offsets=False)
    before, after = special_affixes(tokenizer)
    encoded: list[Encoded] = []
    for some in _calls(texts):
        for ids in tokenizer([one.text for one in some], truncation=False, verbose=False)["input_ids"]:
            kept = _once(ids, before, after)
            findings.note_affixes(has_bos=kept.begin > kept.added, has_eos=kept.stop < len(ids))
            once = kept.of(ids)
            encoded.append(_ended(once, [True] * len(once), tokenizer))
    return encoded


def _with_offsets(
    texts: Sequence[_WithSpans], tokenizer: Tokenizer, *, add_special_tokens: bool
) -> Iterator[tuple[_WithSpans, list[int], Sequence[Span]]]:
    """Each text with its token ids, and the characters of each token."""
    if not tokenizer.is_fast:
        raise UserError(
            "model.tokenizer",
            f"{type(tokenizer).__name__} gives no character offsets, which data with prompts needs",
            "use a fast tokenizer (one with a tokenizer.json)",
        )
    for one in texts:
        check_room(one.text, one.where, tokenizer, with_offsets=True)
    for some in _calls(texts):
        encoding = tokenizer(
            [one.text for one in some],
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            truncation=False,
            verbose=False,
        )
        assert encoding.encodings is not None, "a fast tokenizer has them"
        # Read the offsets text by text: a batch's are one tuple a token, which slows the garbage collector.
        for one, ids, of_text in zip(some, encoding["input_ids"], encoding.encodings, strict=True):
            yield one, ids, of_text.offsets


def _calls(texts: Sequence[_Text]) -> Iterator[Sequence[_Text]]:
    """The texts in neighbours of at most `_CHARACTERS` together: a call holds hundreds of bytes for each token."""
    start = 0
    characters = 0
    for at, one in enumerate(texts):
        if at > start and characters + len(one.text) > _CHARACTERS:
            yield texts[start:at]
            start = at
            characters = 0
        characters += len(one.text)
    if texts:
        yield texts[start:]


def _ended(ids: list[int], mask: list[bool], tokenizer: Any) -> Encoded:
    """The tokens with a supervised end-of-text token, whether or not the tokenizer has added one."""
    end = tokenizer.eos_token_id
    if end is None:
        return ids, mask
    if ids and ids[-1] == end:
        return ids, [*mask[:-1], True]
    return [*ids, end], [*mask, True]


def _mask(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Whether each token, given by its characters, overlaps one of the ascending spans.

    Some tokenizers give a space's token empty offsets: it counts as one character where it stands. Tokens that the
    tokenizer adds at the end have the offsets ``(0, 0)`` and are not supervised.
    """
    count = len(offsets)
    while count > 1 and offsets[count - 1] == (0, 0):
        count -= 1
    mask = [False] * len(offsets)
    for start, end in spans:
        # Tokens are in the order of their characters, so a span's tokens are neighbours.
        first = bisect_left(offsets, (start,), hi=count)
        while first > 0 and max(offsets[first - 1][1], offsets[first - 1][0] + 1) > start:
            first -= 1
        last = bisect_left(offsets, (end,), hi=count)
        mask[first:last] = [True] * (last - first)
    return mask


def special_affixes(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The token ids that a tokenizer puts before and after every text: BOS and EOS, or none."""
    whole = tokenizer("a", verbose=False)["input_ids"]
    bare = tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"]
    for at in range(len(whole) - len(bare) + 1):
        if bare and whole[at : at + len(bare)] == bare:
            return whole[:at], whole[at + len(bare) :]
    return [], []


def plain_prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of the beginning of a text, which the model continues: with one BOS, if the tokenizer adds one.

    An EOS that the tokenizer appends is left out: the model would continue after the end.
    """
    before, after = special_affixes(tokenizer)
    ids = tokenizer(text, verbose=False)["input_ids"]
    ids = ids[: len(ids) - len(after)]
    return _once(ids, before, []).of(ids)


class _Once(NamedTuple):
    """Which tokens of a text to keep, so that what the tokenizer adds around it is there once."""

    added: int
    """Tokens that the tokenizer put before the text."""
    begin: int
    """The first token of the text that is no repetition of these."""
    stop: int

    def of(self, values: Sequence[Any]) -> list[Any]:
        return [*values[: self.added], *values[self.begin : self.stop]]


def _once(ids: Sequence[int], before: list[int], after: list[int]) -> _Once:
    """What to keep of a text that the tokenizer put ``before`` and ``after`` around.

    A text that begins with the BOS has it twice then, and one that ends with the EOS, too.
    """
    begin = len(before)
    stop = len(ids)
    for count in range(len(before), 0, -1):  # the text may begin with the last of several
        while begin + count <= stop - len(after) and list(ids[begin : begin + count]) == before[-count:]:
            begin += count
    while after and stop - 2 * len(after) >= begin and ids[stop - 2 * len(after) : stop - len(after)] == after:
        stop -= len(after)
    return _Once(len(before), begin, stop)


def ending_of(ids: np.ndarray, supervised: np.ndarray, special: frozenset[int]) -> int:
    """The last supervised token if it is special; otherwise `NO_ENDING`."""
    targets = np.flatnonzero(supervised)
    last = int(ids[targets[-1]]) if len(targets) else NO_ENDING
    return last if last in special else NO_ENDING
