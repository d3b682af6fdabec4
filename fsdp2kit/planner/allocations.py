"""What operators allocate: `Allocations` follows each storage from its allocation to its end, by category.

torch's `FSDPMemTracker` does the same, but does not know methods that are registered beside ``forward``, as our loss.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp2kit.distributed import local_part
from fsdp2kit.torch_compat import FakeTensorMode, TorchDispatchMode, tree_leaves

# What FSDP2 says of itself while it allocates, and the category of it. Of nested ranges the innermost that is named.
_RANGES = {
    "FSDP::all_gather": "all-gather buffers",
    "FSDP::all_gather_copy_out": "unsharded parameters",
    "FSDP::pre_forward": "unsharded parameters",
    "FSDP::pre_backward": "unsharded parameters",
    "FSDP::post_backward_reduce": "reduction buffers",
    "FSDP::post_backward_accumulate": "unsharded gradients",
    "FSDP::post_backward_reshard": "unsharded gradients",
}


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
        vocabulary: tensors of forward with a dimension of this size count for the loss.
    """

    def __init__(self, fake: FakeTensorMode | None = None, *, vocabulary: int = 0) -> None:
        super().__init__()
        self._fake, self._vocabulary = fake, vocabulary
        self._alive: dict[int, tuple[Any, Allocation]] = {}
        self._ranges: list[str] = []
        self._total = self._highest = self._peak = 0
        self._at_start: Snapshot = []
        self._changes: Snapshot = []
        """Since `start`, the sizes that storages came to have; most was allocated after ``_peak`` of them."""
        self._default = "activations"
        self._resize = torch.UntypedStorage.resize_
        self.on_range: Callable[[str], None] = lambda name: None
        """Called when a range of FSDP2 begins."""

    def __enter__(self) -> Allocations:
        tracker, original = self, self._resize

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            if storage._cdata in tracker._alive:
                tracker._resize_to(tracker._alive[storage._cdata][1], storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resize_  # FSDP2 frees and allocates gathered parameters so
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if name.startswith("profiler._record_function_enter"):
            self._ranges.append(args[0])
            self.on_range(args[0])
        elif name.startswith("profiler._record_function_exit"):
            self._ranges.pop()
        adds = name == "aten.add.Tensor" and self._fake is not None and not torch.is_grad_enabled()
        if adds and all(
            isinstance(arg, Tensor) and arg.ndim == 2 and len(arg) == self._vocabulary for arg in args[:2]
        ):
            # The parts of a tied table's gradient: autograd adds to the first in place, but not to a fake tensor.
            self._resize_to(self._see(args[0]), 0)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and getattr(leaf, "fake_mode", None) is self._fake:
                self._see(leaf)
        return result

    def mark(self, tensors: Iterable[Any], category: str) -> None:
        """Put tensors, known or new, into a category."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._see(local_part(tensor)).category = category

    def start(self, category: str = "activations") -> None:
        """Forget the peak; what is allocated from now on, outside of FSDP2, is of this category."""
        self._default, self._highest, self._peak = category, self._total, 0
        self._at_start, self._changes = self.snapshot(), []

    def peak(self) -> Snapshot:
        """What was allocated when that was most, since `start`; a later `mark` still changes its categories."""
        sizes = dict(self._at_start)
        for number, (allocation, size) in enumerate(self._changes):
            sizes[allocation] = size if number < self._peak else sizes.get(allocation, 0)
        return list(sizes.items())

    def snapshot(self) -> Snapshot:
        """What is allocated; as with `peak`, its categories may still change."""
        return [(allocation, allocation.bytes) for _, allocation in self._alive.values()]

    def _see(self, tensor: Tensor) -> Allocation:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive and self._alive[key][0]() is not None:
            return self._alive[key][1]
        allocation = Allocation(0, self._category(tensor))
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

    def _category(self, tensor: Tensor) -> str:
        for name in reversed(self._ranges):
            if category := _RANGES.get(name.partition(" (")[0]):
                return category
        return "loss" if self._vocabulary and self._vocabulary in tensor.shape else self._default


def by_category(snapshot: Snapshot) -> Counter[str]:
    """Bytes of each category."""
    found = Counter[str]()
    for allocation, size in snapshot:
        found[allocation.category] += size
    return found
