"""Random values that depend on a seed and on a module's name alone, so that they are the same on any mesh."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor


def seed_by_name(seed: int, name: str) -> None:
    """Seed torch for the module ``name``."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def unset(tensor: Tensor) -> Tensor:
    """A tensor on meta becomes a real one, of NaN; others stay."""
    if not tensor.is_meta:
        return tensor
    return torch.full(tensor.shape, math.nan if tensor.is_floating_point() else 0, dtype=tensor.dtype)
