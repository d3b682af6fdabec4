"""What a person should look at in documents before training. The preview, a run's start and ``check`` say it."""

from __future__ import annotations

import numpy as np

from fsdp2kit.data.documents import Documents
from fsdp2kit.data.template import Tokenizer
from fsdp2kit.data.tokens import NO_ENDING, ending_of, special_ids

SAMPLE = 2000  # documents that are read


def find_document_warnings(documents: Documents, tokenizer: Tokenizer) -> list[str]:
    """What is suspicious in documents, each in a line. The first `SAMPLE` of them are read, or their lengths alone."""
    if not len(documents):
        return []
    special, bos, report = special_ids(tokenizer), tokenizer.bos_token_id, documents.report
    read = [documents[index] for index in range(min(SAMPLE, len(documents)))]
    open_ended = sum(ending_of(ids, supervised, special) == NO_ENDING for ids, supervised in read)
    twice = sum(bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos for ids, _ in read)
    of, share = f"of {len(read):,} documents", report.supervised_tokens / report.tokens
    overlong, copies = overlong_share(documents), count_copies(documents)
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
