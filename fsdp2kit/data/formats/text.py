"""Rows of the format "text": a ``text`` that is learnt as a whole."""

from __future__ import annotations

from fsdp2kit.data.columns import RowColumns
from fsdp2kit.data.conversation import WholeText
from fsdp2kit.errors import UserError


def read_text(row: RowColumns) -> list[WholeText]:
    """The row's text."""
    text = row["text"]
    if not isinstance(text, str):
        raise UserError(row.where, f"text is of type {type(text).__name__}", "give rows with a string `text`")
    return [WholeText(text, row.where)]
