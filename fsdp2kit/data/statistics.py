"""What can be counted of data before it is trained on, and what in it is suspicious."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fsdp2kit.data.loader import Part
from fsdp2kit.data.tokens import NO_ENDING, ending_of, special_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLE = 2000  # documents that are read for what lengths alone do not tell
_BINS = 10


@dataclass(frozen=True)
class Statistics:
    """Figures of one source."""

    rows: int
    documents: int
    tokens: int
    supervised_tokens: int
    supervised_share: float
    """Supervised tokens over tokens."""
    truncated: int
    dropped: int
    split: int
    unsupervised: int
    """Rows in which nothing is learnt."""
    overlong_share: float
    """Rows longer than seq_len over rows: the truncation rate under ``overlong = "truncate"``."""
    duplicates: int
    """Documents whose row was there before, token for token."""
    shortest: int
    median: int
    longest: int
    histogram: list[tuple[int, int, int]]
    """``(from, to, documents)`` by length in tokens; the last bin includes its end."""
    packed_rows: int
    packing_efficiency: float
    """Tokens over places in the packed rows."""


def compute_statistics(part: Part, *, seq_len: int) -> Statistics:
    """Count one source's documents and packs."""
    documents, report = part.documents, part.documents.report
    lengths = documents.lengths
    counts, edges = np.histogram(lengths, bins=min(_BINS, int(np.ptp(lengths)) + 1))
    borders = [round(edge) for edge in edges.tolist()]
    digests = documents.row_digests() if documents.row_digests is not None else []
    repeated = sum(count - 1 for count in Counter(digests).values()) if not report.split else 0
    return Statistics(
        rows=report.rows,
        documents=report.documents,
        tokens=report.tokens,
        supervised_tokens=report.supervised_tokens,
        supervised_share=report.supervised_tokens / report.tokens,
        truncated=report.truncated,
        dropped=report.dropped,
        split=report.split,
        unsupervised=report.unsupervised,
        overlong_share=(report.truncated + report.dropped + report.split) / report.rows,
        duplicates=repeated,
        shortest=int(lengths.min()),
        median=int(np.median(lengths)),
        longest=int(lengths.max()),
        histogram=list(zip(borders, borders[1:], counts.tolist(), strict=False)),
        packed_rows=len(part.plan),
        packing_efficiency=float(lengths.sum()) / (len(part.plan) * seq_len),
    )


def find_warnings(
    part: Part, statistics: Statistics, *, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> list[str]:
    """What a person should look at before training; the first `SAMPLE` documents are read for it."""
    documents = part.documents
    read = [documents[index] for index in range(min(SAMPLE, len(documents)))]
    special = special_ids(tokenizer)
    open_ended = sum(ending_of(ids, supervised, special) == NO_ENDING for ids, supervised in read)
    bos = tokenizer.bos_token_id
    twice = sum(bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos for ids, _ in read)
    found, of = [], f"of {len(read):,} documents"
    if open_ended:
        found.append(
            f"{open_ended:,} {of} teach no end-of-turn or end-of-text token as their last: the model may not learn to "
            "stop (split documents, cut ones, or a template without such a token)"
        )
    if twice:
        found.append(f"{twice:,} {of} begin with the BOS token twice: the text or the template adds it as well")
    if documents.largest_id >= vocab_size:
        largest = f"token id {documents.largest_id:,}"
        found.append(f"{largest} is beyond the model's vocabulary of {vocab_size:,}: training refuses it")
    if statistics.unsupervised:
        found.append(
            f"{statistics.unsupervised:,} rows hold nothing to learn and are left out: there is no assistant turn, or "
            "it begins after seq_len tokens"
        )
    if statistics.overlong_share > 0.05:
        found.append(f"{statistics.overlong_share:.0%} of the rows are longer than seq_len")
    if statistics.duplicates:
        found.append(f"{statistics.duplicates:,} documents are copies of earlier ones")
    if statistics.supervised_share < 0.05:
        found.append(f"only {statistics.supervised_share:.1%} of the tokens are learnt")
    return found
