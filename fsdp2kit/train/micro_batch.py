"""What the loop reads of a micro-batch on the host: `fsdp2kit.data.loader.Batch`, or one of a recipe's own.

One of a recipe's own need not have what `Batch` has a default for; it is read here alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsdp2kit.model.loss_head import IGNORE


def items_of(micro: Any) -> int:
    """What a micro-batch counts in the loss: its ``num_items``, else its supervised tokens."""
    return getattr(micro, "num_items", micro.supervised_tokens)


def packs_of(micro: Any) -> list[int]:
    """The numbers of its packs in the order of training; empty if they have none."""
    return list(getattr(micro, "rows", ()))


def lengths_of_rows(micro: Any) -> Tensor:
    """int64 ``[B]``: how many tokens of each row come before its padding; all, if it does not say."""
    lengths = getattr(micro, "lengths", None)
    count, length = micro.labels.shape
    return torch.full((count,), length) if lengths is None else lengths


def items_of_rows(micro: Any) -> Tensor:
    """int64 ``[B]``: what each row counts in the loss: targets, or pairs of a preference."""
    documents = micro.per_target.get("documents") if getattr(micro, "num_documents", 0) else None
    if documents is None:
        return (micro.labels != IGNORE).sum(1)
    # Neighbours have neighbouring numbers, and padding has −1.
    first = torch.where(documents < 0, documents.max() + 1, documents).amin(1)
    return ((documents.amax(1) - first + 1) // 2).clamp(min=0)
