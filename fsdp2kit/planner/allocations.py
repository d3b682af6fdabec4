"""What operators allocate: `Allocations` follows each storage from its allocation to its end, by category."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp2kit.job.distributed import local_part
from fsdp2kit.torch_compat import FakeTensorMode, TorchDispatchMode, tree_leaves

_GROUPED = torch.ops.aten._grouped_mm.default


@dataclass(eq=False)
class Allocation:
    """One storage."""

    bytes: int
    category: str


Snapshot = list[tuple[Allocation, int]]
"""What was allocated at one moment, with its bytes then."""


class Allocations(TorchDispatchMode):
    """Follows the storages that operators allocate while it is open.

    Args:
        fake: the mode whose tensors are followed; DTensor tries operators out in others. None: real tensors.
    """

    def __init__(self, fake: FakeTensorMode | None = None) -> None:
        super().__init__()
        self._fake = fake
        self._alive: dict[int, tuple[Any, Allocation]] = {}
        self._total = self._highest = self._peak = 0
        self._at_start: Snapshot = []
        self._changes: Snapshot = []
        """The sizes that storages have had since `start`; the peak comes after the first ``_peak`` changes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _GROUPED and self._fake is not None:
            result = _fake_grouped(*args, **(kwargs or {}))
        else:
            result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and getattr(leaf, "fake_mode", None) is self._fake:
                self._see(leaf)
        return result

    def category_of(self, tensor: Tensor) -> str:
        """The category of a new storage until `mark` gives it another."""
        return "activations"

    def mark(self, tensors: Iterable[Any], category: str) -> None:
        """Put tensors, known or new, into a category."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._see(local_part(tensor)).category = category

    def start(self) -> None:
        """Forget the peak."""
        self._highest, self._peak = self._total, 0
        self._at_start, self._changes = self.snapshot(), []

    def peak(self) -> Snapshot:
        """What was allocated when that was most, since `start`; a later `mark` still changes its categories."""
        sizes = dict(self._at_start)
        for number, (allocation, size) in enumerate(self._changes):
            sizes[allocation] = size if number < self._peak else sizes.get(allocation, 0)
        return list(sizes.items())

    def snapshot(self) -> Snapshot:
        """What is allocated now; a later `mark` still changes its categories."""
        return [(allocation, allocation.bytes) for _, allocation in self._alive.values()]

    def _see(self, tensor: Tensor) -> Allocation:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive and self._alive[key][0]() is not None:
            return self._alive[key][1]
        allocation = Allocation(0, self.category_of(tensor))
        reference = weakref.ref(storage, lambda _, key=key: self._resize_to(self._alive.pop(key)[1], 0))
        self._alive[key] = (reference, allocation)
        self._resize_to(allocation, storage.nbytes())
        return allocation

    def _resize_to(self, allocation: Allocation, size: int) -> None:
        """Allocation and end are changes of size, too."""
        self._total += size - allocation.bytes
        allocation.bytes = size
        self._changes.append((allocation, size))
        if self._total > self._highest:
            self._highest, self._peak = self._total, len(self._changes)


def by_category(snapshot: Snapshot) -> Counter[str]:
    """Bytes of each category."""
    found = Counter[str]()
    for allocation, size in snapshot:
        found[allocation.category] += size
    return found


def _fake_grouped(one: Tensor, other: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """What torch's grouped product allocates. For fake tensors torch only knows it in bfloat16.

    Args:
        one, other: rows in groups ending at ``offs`` ``[E]``, and a matrix for each: ``[R, in]`` and ``[E, in, out]``.
            Or two matrices whose groups are cut along what is summed: ``[out, R]`` and ``[R, in]``.
    """
    shape = (len(one), other.shape[-1])
    return one.new_empty((len(offs), *shape) if other.ndim == 2 and offs is not None else shape)
