"""Rows held out of the training data for the evaluation: those whose `row_key` is below a border.

The key depends on a row's content alone. So copies of a row stay together, and neither the order nor the files matter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from fsdp2kit.config.sections.data import DataConfig
from fsdp2kit.data.columns import row_key
from fsdp2kit.data.rows import RowReader, blocks_of
from fsdp2kit.data.sources import Location
from fsdp2kit.data.tables import TokenTable, encode_table, names_of_lines
from fsdp2kit.data.template import Tokenizer
from fsdp2kit.errors import UserError

_BLOCK = 64  # rows


def key_border(share: float) -> int:
    """The key that this share of all possible keys is below."""
    return int(share * 2**64)


def hold_out(
    keys: Sequence[np.ndarray], held_out: float, *, names: Sequence[str]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The rows of each set to train on, and those that are held out: int64, both ascending.

    Args:
        keys: uint64, of the rows of each set. Copies have the same key, and stay together.
        held_out: a share of all rows, or (an int) their number, without copies; at least one row is held out.
        names: of the sets, for the error that no row of one is left to train on.
    """
    everything = np.unique(np.concatenate(keys))
    if isinstance(held_out, int):
        border = int(everything[min(held_out, len(everything)) - 1]) + 1
    else:
        border = max(key_border(held_out), int(everything[0]) + 1)
    for name, key in zip(names, keys, strict=True):
        if key.max() < border:
            what = f"{held_out} holds out every row of {name}"
            raise UserError("eval.split", what, "hold fewer rows out, or give more data")
    return [(np.flatnonzero(key >= border), np.flatnonzero(key < border)) for key in keys]


def read_held_out(
    location: Location, section: DataConfig, tokenizer: Tokenizer, *, border: int, packs: int
) -> TokenTable:
    """The first rows of a stream whose key is below ``border``: enough to fill ``packs`` packs."""
    names = []
    blocks = []
    room = packs * section.seq_len
    rows = (row for row in RowReader(location) if row_key(row.parse(), section) < border)
    for some in blocks_of(rows, _BLOCK):
        blocks.append(encode_table(some, section, tokenizer))
        names += names_of_lines(blocks[-1], [row.where for row in some])
        lengths = np.minimum(blocks[-1]["length"].to_numpy(), section.seq_len)
        room -= int(lengths.sum()) if section.pack else section.seq_len * len(lengths)
        if room <= 0:
            break
    if not blocks:
        raise UserError("eval.split", f"holds no row of {location.path} out", "give a larger share, or eval.path")
    return TokenTable(pa.concat_tables(blocks), location.where, names.__getitem__)
