"""Names that torch keeps private or has moved, each with the reason why we need it; nothing else imports them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

# There is no public way to ask a DTensor which part of the global tensor it holds; DCP asks the same function.
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["local_slices", "torch_at_least"]


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """The part of the global tensor that this rank's shard of ``tensor`` holds, one slice a dimension."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def torch_at_least(major: int, minor: int) -> bool:
    """Whether the running torch is at least ``major.minor``."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (major, minor)
