"""Documents made of lists."""

from __future__ import annotations

import numpy as np

from fsdp2kit.data.documents import Counts, Documents


def as_documents(corpus: list[list[tuple[int, bool]]]) -> Documents:
    def read(index: int) -> tuple[np.ndarray, np.ndarray]:
        ids, supervised = zip(*corpus[index], strict=True)
        return np.array(ids), np.array(supervised)

    lengths = np.array([len(document) for document in corpus])
    return Documents(lengths, "x", Counts(len(corpus), len(corpus), int(lengths.sum()), 0), 90, read)
