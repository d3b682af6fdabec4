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
from typing import Any, NamedTuple

import numpy as np

from fsdp2kit.config.schema import DataConfig
from fsdp2kit.data.chat import Chat, Span, supervised_spans
from fsdp2kit.data.column_checks import check_columns, unread_columns
from fsdp2kit.data.findings import Findings
from fsdp2kit.data.formats import WRAPPED, Columns, Plain, asked_in, looks_unwrapped, text_in, texts_of
from fsdp2kit.data.memory import check_room
from fsdp2kit.data.rows import Row
from fsdp2kit.data.special import SpecialTokens, encode_quotes, special_tokens
from fsdp2kit.data.template import Tokenizer
from fsdp2kit.data.token_rows import Encoded, labelled_documents
from fsdp2kit.errors import UserError
from fsdp2kit.model.tokenizer import stop_tokens

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
    """Token ids and masks of each row's documents: its answers (`answers_per_row`), or what a row of tokens packs.

    The assistant's tokens and its end-of-turn tokens are supervised, the whitespace after them is not. A token is the
    assistant's if any of its characters is. The chat template alone decides whether a conversation has a BOS. A plain
    text gets the tokenizer's special tokens, and keeps one BOS and one EOS where it has them already.

    Args:
        section: its `format`, `columns`, `train_on` and `wrap` are read.
        follows: whether rows before these were encoded. An error then does not advise to read other columns.
        findings: what is noticed of the rows is added here.
    """
    findings = Findings() if findings is None else findings
    named = [Columns(row, section, tokenizer, block=rows, follows=follows) for row in rows]
    if section.format == "tokens":
        found = [labelled_documents(row) for row in named]
        for row in named:
            _look_at(row, findings, ())
        return found
    if section.format == "text":
        texts = [Plain(text_in(row), 0, row.where) for row in named]
        for row in named:
            _look_at(row, findings, ())
        return [[one] for one in _encode_texts(texts, tokenizer, findings)]
    by_row = []
    for row in named:
        by_row.append(texts_of(row))
        _look_at(row, findings, by_row[-1])
    if section.format in WRAPPED and rows:
        findings.unwrapped |= looks_unwrapped(rows[0], section, tokenizer)
    encoded = iter(_encode([text for texts in by_row for text in texts], section, tokenizer, findings))
    return [list(itertools.islice(encoded, len(texts))) for texts in by_row]


def _look_at(row: Columns, findings: Findings, texts: Sequence[Chat | Plain]) -> None:
    """Refuse columns that would have to be read, and note what else a person should know of a row."""
    chats = [text for text in texts if isinstance(text, Chat)]
    check_columns(row, is_rendered=bool(chats))
    findings.note_unread(unread_columns(row))
    for chat in chats:
        roles = itertools.pairwise(message["role"] for message in chat.messages)
        findings.note_conversation(has_system_twice=("system", "system") in roles)
    findings.rows += 1


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
    begin, stop = len(before), len(ids)
    for count in range(len(before), 0, -1):  # the text may begin with the last of several
        while begin + count <= stop - len(after) and list(ids[begin : begin + count]) == before[-count:]:
            begin += count
    while after and stop - 2 * len(after) >= begin and ids[stop - 2 * len(after) : stop - len(after)] == after:
        stop -= len(after)
    return _Once(len(before), begin, stop)


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
    found, special = [], special_tokens(tokenizer)
    for row in [Columns(one, section, tokenizer, block=rows) for one in rows]:
        asked = asked_in(row)
        if isinstance(asked, str):
            _look_at(row, findings, ())
            ids = plain_prompt_ids(tokenizer, asked)
        else:
            chat = row.chat(asked)
            _look_at(row, findings, [chat])
            asked = chat.messages
            chat = chat.quoting(special, prompt=True)
            findings.note_special(chat.where, chat.own_special, quotes=bool(chat.stand_ins))
            ids = encode_text(chat.text(prompt=True), chat, tokenizer, special)
        if not ids:
            raise UserError(row.where, "the prompt is empty", "drop the row")
        found.append(Prompt(row.whole, asked, ids))
    return found


def encode_prompt(chat: Chat, tokenizer: Tokenizer, special: SpecialTokens) -> list[int]:
    """Token ids of a conversation with the generation prompt.

    Raises:
        UserError: it quotes a special token, and cannot be encoded without it.
    """
    chat = chat.quoting(special, prompt=True)
    return encode_text(chat.text(prompt=True), chat, tokenizer, special)


def encode_text(text: str, chat: Chat, tokenizer: Tokenizer, special: SpecialTokens) -> list[int]:
    """Token ids of a part of the text of a conversation, which `Chat.quoting` returned.

    Raises:
        UserError: it quotes a special token, and cannot be encoded without it.
    """
    if chat.stand_ins:
        return encode_quotes(text, chat.stand_ins, tokenizer, special, where=chat.where)[0]
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _encode(
    rows: Sequence[Chat | Plain], section: DataConfig, tokenizer: Tokenizer, findings: Findings
) -> list[Encoded]:
    """Tokenise texts and supervise the tokens that overlap their spans; plain texts get an end-of-text token."""
    if not tokenizer.is_fast:
        raise UserError(
            "model.tokenizer",
            f"{type(tokenizer).__name__} gives no character offsets, which data with prompts needs",
            "use a fast tokenizer (one with a tokenizer.json)",
        )
    encoded, special = [], special_tokens(tokenizer)
    for kind, alike in itertools.groupby(rows, key=type):
        texts, spans, quoting = [], [], dict[int, Chat]()
        for row in alike:
            if isinstance(row, Chat):
                chat = row.quoting(special)
                findings.note_special(chat.where, chat.own_special, quotes=bool(chat.stand_ins))
                text, of_text = supervised_spans(chat, special, section.train_on)
                if chat.stand_ins:
                    quoting[len(texts)] = chat
            else:
                text, of_text = row.text, [(row.start, len(row.text))]
            check_room(text, row.where, tokenizer, with_offsets=True)
            texts.append(text)
            spans.append(of_text)
        before, after = special_affixes(tokenizer) if kind is Plain else ([], [])
        for part in _calls(texts):
            encoding = tokenizer(
                texts[part],
                add_special_tokens=kind is Plain,
                return_attention_mask=False,
                return_token_type_ids=False,
                truncation=False,
                verbose=False,
            )
            assert encoding.encodings is not None, "a fast tokenizer has them"
            # Read the offsets row by row: a batch's are one tuple a token, which slows the garbage collector.
            for at, ids, of_row in zip(
                range(*part.indices(len(texts))), encoding["input_ids"], encoding.encodings, strict=True
            ):
                offsets = of_row.offsets
                if kind is not Plain:
                    if chat := quoting.get(at):
                        ids, offsets = encode_quotes(texts[at], chat.stand_ins, tokenizer, special, where=chat.where)
                    encoded.append((ids, _mask(offsets, spans[at])))
                    continue
                kept = _once(ids, before, after)
                findings.note_affixes(has_bos=kept.begin > kept.added, has_eos=kept.stop < len(ids))
                mask = _mask(kept.of(offsets), spans[at])
                encoded.append(_ended(kept.of(ids), mask, tokenizer))
    return encoded


def _encode_texts(rows: Sequence[Plain], tokenizer: Tokenizer, findings: Findings) -> list[Encoded]:
    """Tokenise plain texts, every token of which is supervised."""
    texts, encoded = [row.text for row in rows], []
    for row in rows:
        check_room(row.text, row.where, tokenizer, with_offsets=False)
    before, after = special_affixes(tokenizer)
    for part in _calls(texts):
        for ids in tokenizer(texts[part], truncation=False, verbose=False)["input_ids"]:
            kept = _once(ids, before, after)
            findings.note_affixes(has_bos=kept.begin > kept.added, has_eos=kept.stop < len(ids))
            once = kept.of(ids)
            encoded.append(_ended(once, [True] * len(once), tokenizer))
    return encoded


def _calls(texts: Sequence[str]) -> Iterator[slice]:
    """The texts in neighbours of at most `_CHARACTERS` together: a call holds hundreds of bytes for each token."""
    start, characters = 0, 0
    for at, text in enumerate(texts):
        if at > start and characters + len(text) > _CHARACTERS:
            yield slice(start, at)
            start, characters = at, 0
        characters += len(text)
    if texts:
        yield slice(start, len(texts))


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


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids of the tokens that may end a turn or a text."""
    ids = {at for at, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(ids | {*stop_tokens(tokenizer)})


def ending_of(ids: np.ndarray, supervised: np.ndarray, special: frozenset[int]) -> int:
    """The last supervised token if it is special; otherwise `NO_ENDING`."""
    targets = np.flatnonzero(supervised)
    last = int(ids[targets[-1]]) if len(targets) else NO_ENDING
    return last if last in special else NO_ENDING
