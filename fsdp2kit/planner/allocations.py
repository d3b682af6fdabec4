"""What operators allocate: `Allocations` follows each storage from its allocation to its end, by category.

torch's `FSDPMemTracker` does the same, but does not know methods that are registered beside ``forward``, as our loss.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
    before: list[tuple[int, int]] = field(default_factory=list)
    """The sizes that it had, each with the number of the event that ended it; none before it was allocated."""

    def at(self, event: int) -> int:
        """Its bytes after that event."""
        return next((size for end, size in self.before if event < end), self.bytes)

    def resize(self, size: int, event: int) -> None:
        self.before.append((event, self.bytes))
        self.bytes = size


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
        self._total = self._highest = 0
        self._seen: list[Allocation] = []
        """All that was allocated at any time since `start`."""
        self._event = self._peak = 0
        """Allocations, resizes and frees so far; how many there were when most was allocated."""
        self._default = "activations"
        self._resize = torch.UntypedStorage.resize_
        self.on_range: Callable[[str], None] = lambda name: None
        """Called when a range of FSDP2 begins."""

    def __enter__(self) -> Allocations:
        tracker, original = self, self._resize

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            tracker._resized(storage)
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
        if name == "aten.add.Tensor" and self._adds_gradients(args):
            # Autograd adds to the first in place, but not if it is a fake tensor.
            self._resize_to(self._see(args[0]), 0)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and getattr(leaf, "fake_mode", None) is self._fake:
                self._see(leaf)
        return result

    def mark(self, tensors: Iterator[Any] | list[Any], category: str) -> None:
        """Put tensors, known or new, into a category."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._see(local_part(tensor)).category = category

    def start(self, category: str = "activations") -> None:
        """Forget the peak; what is allocated from now on, outside of FSDP2, is of this category."""
        self._default, self._highest, self._peak = category, self._total, self._event
        self._seen = [allocation for _, allocation in self._alive.values()]
        for allocation in self._seen:
            allocation.before.clear()

    def peak(self) -> Snapshot:
        """What was allocated when that was most, since `start`; a later `mark` still changes its categories."""
        return [(allocation, allocation.at(self._peak)) for allocation in self._seen]

    def alive(self) -> dict[str, int]:
        """Bytes that are allocated, by category."""
        return by_category(self.snapshot())

    def snapshot(self) -> Snapshot:
        """What is allocated; as with `peak`, its categories may still change."""
        return [(allocation, allocation.bytes) for _, allocation in self._alive.values()]

    def _adds_gradients(self, args: Any) -> bool:
        """Whether both parts of a tied table's gradient are added up."""
        tables = all(isinstance(arg, Tensor) and arg.ndim == 2 and len(arg) == self._vocabulary for arg in args[:2])
        return tables and self._fake is not None and not torch.is_grad_enabled()

    def _see(self, tensor: Tensor) -> Allocation:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive and self._alive[key][0]() is not None:
            return self._alive[key][1]
        allocation = Allocation(0, self._category(tensor))
        reference = weakref.ref(storage, lambda _, key=key: self._resize_to(self._alive.pop(key)[1], 0))
        self._alive[key] = (reference, allocation)
        self._seen.append(allocation)
        self._resize_to(allocation, storage.nbytes())
        return allocation

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._alive:
            self._resize_to(self._alive[storage._cdata][1], storage.nbytes())

    def _resize_to(self, allocation: Allocation, size: int) -> None:
        """Allocation and end are changes of size, too; each is one event, and `peak` goes back to the highest."""
        self._event += 1
        self._total += size - allocation.bytes
        allocation.resize(size, self._event)
        if self._total > self._highest:
            self._highest, self._peak = self._total, self._event

    def _category(self, tensor: Tensor) -> str:
        for name in reversed(self._ranges):
            if category := _RANGES.get(name.partition(" (")[0]):
                return category
        return "loss" if self._vocabulary and self._vocabulary in tensor.shape else self._default


def by_category(peak: Snapshot) -> dict[str, int]:
    """Bytes of each category."""
    found: dict[str, int] = {}
    for allocation, size in peak:
        found[allocation.category] = found.get(allocation.category, 0) + size
    return found
