"""Tokens → documents: token sequences of at most ``seq_len`` tokens, cut from the tokens of rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from fsdp2kit.config.data_formats import Overlong
from fsdp2kit.config.schema import DataConfig
from fsdp2kit.console import counted
from fsdp2kit.data.cache import DEFAULT, Cache
from fsdp2kit.data.formats.table import FORMATS
from fsdp2kit.data.tables import TokenTable, read_tokens
from fsdp2kit.data.template import Tokenizer
from fsdp2kit.data.tokens import NO_ENDING, ending_of
from fsdp2kit.errors import UserError
from fsdp2kit.job.distributed import agreement
from fsdp2kit.model.tokenizer import special_ids

Document = tuple[np.ndarray, np.ndarray]  # token ids int64 [L], supervised bool [L]
SYNTHETIC_DOCUMENTS = 65536
SAMPLE = 2000  # documents that are read for warnings
_ENDINGS_OF = 64  # documents whose endings are collected


@dataclass(frozen=True)
class Counts:
    """What became of the rows."""

    rows: int
    documents: int
    tokens: int
    supervised_tokens: int
    """Targets of the loss. A document's first token is never a target, whatever its mask says."""
    truncated: int = 0
    """Rows (of packed rows, documents) cut off at seq_len."""
    dropped: int = 0
    """Rows left out because they are longer than seq_len."""
    split: int = 0
    """Rows cut into several documents."""
    unsupervised: int = 0
    """Documents left out because nothing in them is supervised."""
    without_end: int = 0
    """Answers of pairs that are cut off, and so lack an end-of-turn token."""

    @property
    def overlong(self) -> int:
        """Rows (of packed rows, documents) longer than seq_len."""
        return self.truncated + self.dropped + self.split

    def __str__(self) -> str:
        lost = [("truncated", self.truncated), ("dropped", self.dropped), ("split", self.split)]
        lost += [("without a target", self.unsupervised), ("answers cut, with no end of turn", self.without_end)]
        notes = "".join(f", {count:,} {what}" for what, count in lost if count)
        return (
            f"{counted(self.documents, 'document')} of {counted(self.rows, 'row')}{notes}; {self.tokens:,} tokens, "
            f"{self.supervised_tokens / self.tokens:.0%} supervised"
        )


@dataclass(frozen=True)
class Documents:
    """A sequence of documents; ``documents[i]`` reads one from the memory-mapped tokens, or generates it."""

    lengths: np.ndarray
    """int64 [documents], in tokens."""
    fingerprint: str
    """Digest of every token id and mask bit. It does not depend on where they were read."""
    report: Counts
    largest_id: int
    """The largest token id of the rows, before they were cut."""
    read: Callable[[int], Document]
    row_digests: np.ndarray | None = None
    """V16 [documents]: digest of each document's row, to find copies; None for synthetic tokens."""
    row_lengths: np.ndarray | None = None
    """int64 [rows; answers of preferences; documents of packed rows]: tokens before the cut; None for synthetic
    tokens."""
    together: int = 1
    """This many neighbours share a pack: 2 for the two answers of a preference."""
    endings: frozenset[int] = frozenset()
    """Special tokens at the end of the first documents' rows."""
    warnings: tuple[str, ...] = ()
    """What a person should look at in the rows before training."""
    notes: tuple[str, ...] = ()
    """What was done with the rows."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Document:
        """``(ids, supervised)``: int64 [L] and bool [L]."""
        return self.read(index)


def build_documents(
    section: DataConfig,
    *,
    tokenizer: Tokenizer | None,
    seed: int = 0,
    vocab_size: int | None = None,
    key: str = "data.path",
    cache: Cache = DEFAULT,
    tokens: TokenTable | None = None,
    lines: np.ndarray | None = None,
) -> Documents:
    """Read, tokenise and cut a set of rows. Collective; one rank on each machine fills the cache.

    Args:
        section: with the set's own path, split, format and columns; `sources` are not read.
        tokenizer: required by all formats but "synthetic".
        seed: of synthetic tokens.
        vocab_size: rows of the model's embedding. Default: the tokenizer's size.
        key: the TOML key that names the set, for errors.
        tokens: the result of `read_tokens`, if it was called already.
        lines: int64, the lines of the table to cut; None: all.

    Raises:
        UserError: the data is missing or malformed, too long under ``overlong = "error"``, has nothing to learn, or
            holds a token beyond the vocabulary.
    """
    vocab_size = (len(tokenizer) if tokenizer is not None else 0) if vocab_size is None else vocab_size
    if section.format == "synthetic":
        return _synthetic(seq_len=section.seq_len, vocab_size=vocab_size, seed=seed)
    found = tokens or read_tokens(section, tokenizer=tokenizer, key=key, cache=cache)
    with agreement():
        documents = cut_rows(found.table, section, name=found.name, lines=lines)
        if not documents.report.documents:
            raise _nothing_to_learn(documents, found.where, section.seq_len)
        check_vocabulary(documents.largest_id, vocab_size)
        warnings = found.findings.warnings(key, found.name_of_row)
        return replace(documents, warnings=tuple(warnings), notes=tuple(found.findings.notes(key)))


def check_vocabulary(largest: int, vocab_size: int) -> None:
    """Check that the model's embedding has a row for every token id up to ``largest``."""
    if largest >= vocab_size:
        what = f"the data holds token id {largest}, but the model's vocabulary has {vocab_size}"
        todo = (
            "use the model's own tokenizer, to which tokens may be added (they get rows), or for random weights a "
            "model.config.vocab_size that covers it"
        )
        raise UserError("model.tokenizer", what, todo)


def cut_rows(
    tokens: pa.Table, section: DataConfig, *, name: Callable[[int], str], lines: np.ndarray | None = None
) -> Documents:
    """Cut rows longer than ``seq_len`` by the policy ``overlong``, and keep the documents with something to learn.

    "truncate" may cut the assistant's text. The document's last token is then the end-of-turn token of the row, and is
    learnt: a model that never sees turns end would not stop. The two answers of a preference get no such token, since
    their probabilities are compared. Both answers of a pair are kept, or neither.

    Args:
        tokens: a table of tokens: of all rows, or of a block of a stream.
        name: names the row of a line in errors.
        lines: int64, the lines to cut; None: all.
    """
    overlong = section.overlong
    together = FORMATS[section.format].answers
    chosen = np.arange(len(tokens)) if lines is None else lines
    lengths = tokens["length"].to_numpy()[chosen]
    room, is_long = _room(lengths, seq_len=section.seq_len, together=together)
    rows = int(tokens["is_first"].to_numpy()[chosen].sum())
    long = int(is_long.sum()) // together
    if overlong == "error" and long:
        first = int(np.flatnonzero(is_long)[0])
        what = f"{lengths[first : first + together].sum()} tokens, more than data.seq_len = {section.seq_len}"
        todo = 'raise data.seq_len, or set data.overlong to "truncate", "split" or "drop"'
        raise UserError(name(int(chosen[first])), f"{what} ({long} such rows of {len(lengths) // together})", todo)
    numbers, starts, stops = _slices(lengths, room, is_long, overlong=overlong)
    lines = chosen[numbers]
    targets, is_open = _targets(tokens, lines, starts, stops)
    row_endings = tokens["ending"].to_numpy()[lines]
    endings = np.where(is_open & (overlong == "truncate" and together == 1), row_endings, NO_ENDING)
    kept = np.flatnonzero(np.repeat((targets > 0).reshape(-1, together).all(1), together))
    lines = lines[kept]
    starts = starts[kept]
    stops = stops[kept]
    endings = endings[kept]
    digests = np.frombuffer(b"".join(tokens["digest"].to_pylist()), dtype="V16")[lines]
    cuts = np.stack([starts, stops, endings]).astype("<i8").tobytes()
    report = Counts(
        rows=rows,
        documents=len(kept),
        tokens=int((stops - starts).sum()),
        supervised_tokens=int(targets[kept].sum()),
        truncated=long if overlong == "truncate" else 0,
        dropped=long if overlong == "drop" else 0,
        split=long if overlong == "split" else 0,
        unsupervised=len(targets) - len(kept),
        without_end=int(is_open[kept].sum()) if together > 1 else 0,
    )
    return Documents(
        lengths=stops - starts,
        fingerprint=hashlib.blake2b(cuts + digests.tobytes(), digest_size=16).hexdigest(),
        report=report,
        largest_id=int(tokens["largest_id"].to_numpy().max(initial=-1)),
        read=_reader(tokens, lines, starts, stops, endings),
        row_digests=digests,
        row_lengths=lengths,
        together=together,
        endings=frozenset(row_endings[kept][:_ENDINGS_OF].tolist()) - {NO_ENDING},
    )


def _reader(
    tokens: pa.Table, lines: np.ndarray, starts: np.ndarray, stops: np.ndarray, endings: np.ndarray
) -> Callable[[int], Document]:
    """A function that reads a document by its number, with its ending, if it has one, in the last place."""

    def read(index: int) -> Document:
        where = lines[index], starts[index], stops[index]
        ids = _slice(tokens["ids"], *where).astype(np.int64)
        supervised = _slice(tokens["supervised"], *where)
        if endings[index] != NO_ENDING:
            supervised = supervised.copy()
            ids[-1] = endings[index]
            supervised[-1] = True
        return ids, supervised

    return read


def _targets(
    tokens: pa.Table, lines: np.ndarray, starts: np.ndarray, stops: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Targets in each slice, int64 [documents], and whether the slice ends within supervised text, bool."""
    lengths = tokens["length"].to_numpy()[lines]
    targets = tokens["targets"].to_numpy()[lines]
    is_cut = stops - starts < lengths
    is_open = stops < lengths
    is_all_supervised = targets == lengths - 1
    targets = np.where(is_cut, stops - starts - 1, targets)
    # Read masks only of lines that are cut and supervised in part.
    for index in np.flatnonzero(is_cut & ~is_all_supervised):
        mask = _slice(tokens["supervised"], lines[index], starts[index], stops[index])
        targets[index] = mask[1:].sum()
        is_open[index] &= mask[-1]
    return targets, is_open


def _slice(lists: pa.ChunkedArray, line: int, start: int, stop: int) -> np.ndarray:
    """Part of one line of a column of lists."""
    return lists[int(line)].values[int(start) : int(stop)].to_numpy(zero_copy_only=False)


def _room(lengths: np.ndarray, *, seq_len: int, together: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that each line may have, int64 [lines], and whether it, or its pair, has more, bool [lines].

    In a pair that is too long, the shorter answer keeps up to half of ``seq_len``, and the longer one gets the rest.
    """
    if together == 1:
        return np.full(len(lengths), seq_len), lengths > seq_len
    pairs = lengths.reshape(-1, 2)
    is_long = np.repeat(pairs.sum(1) > seq_len, 2)
    return np.where(is_long, np.maximum(seq_len // 2, seq_len - pairs[:, ::-1].flatten()), seq_len), is_long


def _slices(
    lengths: np.ndarray, room: np.ndarray, is_long: np.ndarray, *, overlong: Overlong
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``(lines, starts, stops)``, each int64 [documents]: the slice of a line that becomes each document."""
    lines = np.arange(len(lengths))
    if overlong == "drop":
        lines = lines[~is_long]
    starts = np.zeros_like(lines)
    if overlong == "split":
        pieces = np.maximum(1, -(-lengths // room))
        lines = np.repeat(lines, pieces)
        starts = (np.arange(len(lines)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * room[lines]
    return lines, starts, np.minimum(lengths[lines], starts + room[lines])


def _nothing_to_learn(documents: Documents, where: str, seq_len: int) -> UserError:
    report = documents.report
    assert documents.row_lengths is not None, "synthetic tokens are all learnt"
    count = len(documents.row_lengths) // documents.together
    if report.dropped == count:
        return UserError(where, f"all {count} rows are longer than data.seq_len = {seq_len}", "raise it")
    if report.truncated == count:
        what = f"all {count} rows are cut at data.seq_len = {seq_len} before their first token to learn"
        return UserError(where, what, "raise it")
    what = f"no document holds a token to learn ({counted(report.rows, 'row')})"
    todo = (
        'chat rows need messages with the role "assistant" within the first data.seq_len tokens, and chat templates '
        "with {% generation %} markers need them around the assistant's text"
    )
    return UserError(where, what, todo)


def find_document_warnings(documents: Documents, tokenizer: Tokenizer) -> list[str]:
    """What is suspicious in documents, each in a line. The first `SAMPLE` of them are read, or their lengths alone."""
    if not len(documents):
        return []
    special = special_ids(tokenizer)
    bos = tokenizer.bos_token_id
    report = documents.report
    read = [documents[index] for index in range(min(SAMPLE, len(documents)))]
    open_ended = sum(ending_of(ids, supervised, special) == NO_ENDING for ids, supervised in read)
    twice = sum(bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos for ids, _ in read)
    of = f"of {len(read):,} documents"
    share = report.supervised_tokens / report.tokens
    overlong = overlong_share(documents)
    copies = count_copies(documents)
    checks = {
        f"{open_ended:,} {of} teach no end-of-turn or end-of-text token as their last: the model may not learn to "
        "stop (split documents, cut ones, or a template or tokenizer without such a token)": open_ended,
        f"{twice:,} {of} begin with the BOS token twice: the text or the template adds it as well": twice,
        f"{report.unsupervised:,} rows hold nothing to learn and are left out: there is no assistant turn, or it "
        "begins after seq_len tokens": report.unsupervised,
        f"{overlong:.0%} of the rows are longer than seq_len": overlong > 0.05,
        f"{copies:,} documents are copies of earlier ones": copies,
        f"only {share:.1%} of the tokens are learnt": share < 0.05,
    }
    return [text for text, is_found in checks.items() if is_found]


def overlong_share(documents: Documents) -> float:
    """Rows longer than seq_len over rows; of packed rows, documents."""
    rows = len(documents) if documents.row_lengths is None else len(documents.row_lengths)
    return documents.report.overlong * documents.together / rows


def count_copies(documents: Documents) -> int:
    """Documents whose row has the same tokens and mask as an earlier one; 0 where rows are split."""
    if documents.row_digests is None or documents.report.split:
        return 0
    # Half of a digest is enough to tell documents apart, and sorts fast.
    halves = np.frombuffer(documents.row_digests.tobytes(), dtype=np.uint64)[::2]
    return len(halves) - len(np.unique(halves))


def _synthetic(*, seq_len: int, vocab_size: int, seed: int) -> Documents:
    """Uniformly random tokens in documents of seq_len / 8 to seq_len tokens, generated when they are read.

    They are made of PCG64's raw bits, which numpy promises never to change, unlike its distributions.
    """
    if vocab_size < 1:
        raise UserError("data.format", '"synthetic" needs a vocabulary size', "set model.tokenizer or model.path")
    shortest = max(2, seq_len // 8)
    bits = np.random.PCG64([seed, 0]).random_raw(SYNTHETIC_DOCUMENTS)
    lengths = (shortest + bits % np.uint64(seq_len - shortest + 1)).astype(np.int64)
    text = f"synthetic {seed} {seq_len} {vocab_size} {SYNTHETIC_DOCUMENTS}"

    def read(index: int) -> Document:
        bits = np.random.PCG64([seed, 1 + index]).random_raw(int(lengths[index]))
        return (bits % np.uint64(vocab_size)).astype(np.int64), np.ones(len(bits), dtype=bool)

    tokens = int(lengths.sum())
    report = Counts(SYNTHETIC_DOCUMENTS, SYNTHETIC_DOCUMENTS, tokens, tokens - SYNTHETIC_DOCUMENTS)
    fingerprint = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return Documents(lengths, fingerprint, report, vocab_size - 1, read)
