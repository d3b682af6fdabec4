"""The policy for long rows, one row at a time: what `Documents` does to a whole table, for streams."""

from __future__ import annotations

from typing import Literal

import numpy as np

from fsdp2kit.data.masks import Encoded
from fsdp2kit.data.tokens import NO_ENDING, ending_of
from fsdp2kit.errors import UserError

Overlong = Literal["truncate", "drop", "split", "error"]
Document = tuple[np.ndarray, np.ndarray]  # token ids int64 [L], supervised bool [L]


class Cutter:
    """Cuts rows to at most ``seq_len`` tokens, and counts what it does.

    Args:
        special: ids of the tokens that may end a turn, as `special_ids` returns them.
        vocab_size: rows of the model's embedding.
        where: what errors call the data.
    """

    def __init__(
        self, *, seq_len: int, overlong: Overlong, special: frozenset[int], vocab_size: int, where: str = "data"
    ) -> None:
        self._seq_len, self._overlong, self._special = seq_len, overlong, special
        self._vocab_size, self._where = vocab_size, where
        self.rows = self.kept = self.long = 0

    def cut(self, row: Encoded, where: str) -> list[Document]:
        """The documents that a row becomes: those in which something is learnt.

        Raises:
            UserError: the row is too long under ``overlong = "error"``, or holds a token that the model has not.
        """
        ids, supervised = np.asarray(row[0], dtype=np.int64), np.asarray(row[1], dtype=bool)
        self.rows += 1
        if len(ids) and ids.max() >= self._vocab_size:
            raise vocabulary_overflow(int(ids.max()), self._vocab_size)
        pieces = [(ids, supervised)]
        if len(ids) > self._seq_len:
            self.long += 1
            pieces = self._shorten(ids, supervised, where)
        pieces = [piece for piece in pieces if piece[1][1:].any()]
        self.kept += len(pieces)
        return pieces

    def nothing_to_learn(self) -> UserError:
        """The error of a stream that ended without a document."""
        what = f"no document holds a token to learn ({self.rows} rows)"
        return UserError(self._where, what, "look at the data with tools/preview.py")

    def _shorten(self, ids: np.ndarray, supervised: np.ndarray, where: str) -> list[Document]:
        length = self._seq_len
        if self._overlong == "error":
            what = f"{len(ids)} tokens, more than data.seq_len = {length}"
            raise UserError(where, what, 'raise data.seq_len, or set data.overlong to "truncate", "split" or "drop"')
        if self._overlong == "drop":
            return []
        if self._overlong == "split":
            starts = range(0, len(ids), length)
            return [(ids[at : at + length], supervised[at : at + length]) for at in starts]
        kept, mask = ids[:length].copy(), supervised[:length].copy()
        ending = ending_of(ids, supervised, self._special)
        if mask[-1] and ending != NO_ENDING:
            kept[-1] = ending
        return [(kept, mask)]


def vocabulary_overflow(largest: int, vocab_size: int) -> UserError:
    """The error of a token id that the model's embedding has no row for."""
    return UserError(
        "model.tokenizer",
        f"the data holds token id {largest}, but the model's vocabulary has {vocab_size}",
        "use the model's own tokenizer, or a model.config.vocab_size that covers it",
    )
