"""Count how often the host waits for the device in a stretch of code, and where.

On CUDA, torch itself reports waits (`torch.cuda.set_sync_debug_mode`), except in collectives and sparse tensors. On a
CPU nothing waits, so the device is imagined, and operators that would wait are counted. All tensors that existed
before, except those named as the host's, are imagined on the device, and so is everything computed from one. Tensors
made without a device, and what is computed from them alone, are on the host. ``tensor.to(device)`` moves to the
device; ``cpu()``, ``tolist()``, ``numpy()`` and ``to("cpu")`` move back. Waits inside CUDA kernels are not seen here:
the count on a GPU decides, and this one finds most waits before there is a GPU.
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from fsdp2kit.torch_compat import TorchDispatchMode, tree_leaves

_TORCH = str(Path(torch.__file__).parent)
_WARNING = "called a synchronizing CUDA operation"

# Operators whose result has a size or a value that the host must know before it can go on.
_WAITING = {
    "aten._local_scalar_dense",
    "aten._linalg_check_errors",
    "aten._unique2",
    "aten.allclose",
    "aten.bincount",
    "aten.equal",
    "aten.masked_select",
    "aten.nonzero",
    "aten.unique_consecutive",
    "aten.unique_dim",
}
_INDEXING = {"aten.index", "aten.index_put", "aten.index_put_"}
_TO_HOST = {"cpu", "tolist", "numpy", "__array__"}
_FROM_VALUES = {"tensor", "as_tensor", "new_tensor"}


@dataclass
class HostSyncs:
    """Waits by kind, and the line of code of each, innermost first outside of torch."""

    calls: dict[str, int] = field(default_factory=dict)
    places: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Waits in all."""
        return sum(self.calls.values())

    def add(self, kind: str) -> None:
        """One more, at the caller's place."""
        self.calls[kind] = self.calls.get(kind, 0) + 1
        self.places.append(f"{kind} at {_place()}")


@contextlib.contextmanager
def count_host_syncs(device: torch.device, *, host: Iterable[Tensor] = ()) -> Iterator[HostSyncs]:
    """While it is open, every wait of the host for ``device`` is counted; not thread-safe.

    Args:
        host: on a CPU run, tensors that would be the host's on any machine (a batch as it was read).
    """
    syncs = HostSyncs()
    if device.type == "cuda":
        with _torchs_own_warnings(syncs), _explicit_waits(syncs):
            yield syncs
    else:
        known = _HostTensors(host)
        with _Operators(syncs, known), _Calls(syncs, known):
            yield syncs


def host_tensors(micro_batches: Iterable[Any], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What a step is handed on the host: batches as they were read, and a learning rate that is kept as a tensor."""
    found = [value for batch in micro_batches for value in vars(batch).values()]
    found += [value for group in optimizer.param_groups for name, value in group.items() if name != "params"]
    return [value for value in found if isinstance(value, Tensor)]


class _HostTensors:
    """Knows tensors of the host by their storage."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._storages = {_storage_of(tensor) for tensor in tensors}

    def add(self, tensor: Tensor) -> None:
        self._storages.add(_storage_of(tensor))

    def uploaded(self, tensor: Tensor) -> Tensor:
        """A copy that is on the device."""
        copy = tensor.clone()
        self._storages.discard(_storage_of(copy))
        return copy

    def __contains__(self, tensor: Tensor) -> bool:
        storage = _storage_of(tensor)
        return storage is not None and storage in self._storages


class _Operators(TorchDispatchMode):
    """Operators as they reach the kernels, wherever they were called from."""

    def __init__(self, syncs: HostSyncs, host: _HostTensors) -> None:
        super().__init__()
        self._syncs, self._host = syncs, host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if FakeTensor in types:  # DTensor tries every operator on these before it runs it
            return func(*args, **(kwargs or {}))
        if any(kind not in (Tensor, nn.Parameter, nn.Buffer) for kind in types):
            return NotImplemented  # a DTensor is taken apart first, and its parts come here
        kwargs = kwargs or {}
        tensors = _tensors_in((args, kwargs))
        on_device = [tensor for tensor in tensors if tensor not in self._host]
        if on_device and (kind := _waits(func, args, kwargs, on_device)):
            self._syncs.add(kind)
        result = func(*args, **kwargs)
        if tensors and not on_device:
            for tensor in _tensors_in(result):
                self._host.add(tensor)
        return result


class _Calls(TorchFunctionMode):
    """Calls from Python: on a CPU the way to the host and back is no operator, and only here is a device named."""

    def __init__(self, syncs: HostSyncs, host: _HostTensors) -> None:
        super().__init__()
        self._syncs, self._host = syncs, host

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        tensors = _tensors_in((args, kwargs))
        on_device = any(tensor not in self._host for tensor in tensors)
        device, targets = kwargs.get("device"), (*args[1:], kwargs.get("device"))
        if on_device and (name in _TO_HOST or (name == "to" and "cpu" in map(str, filter(_is_text, targets)))):
            self._syncs.add(name)
        if name in _FROM_VALUES and (device is not None or on_device):
            self._syncs.add(f"{name} on the device")
        result = func(*args, **kwargs)
        if name == "to" and tensors and not on_device and any(isinstance(one, torch.device) for one in targets):
            return self._host.uploaded(result)
        if not tensors and device is None:
            for tensor in _tensors_in(result):
                self._host.add(tensor)
        return result


def _waits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], on_device: list[Tensor]) -> str | None:
    """What the operator is called, if the host waits for it, else None."""
    name = str(func.overloadpacket)
    short = name.removeprefix("aten.")
    if name in _WAITING:
        return short
    if name in _INDEXING:
        masks = [index for index in args[1] if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)]
        return f"{short} by a mask" if any(mask is tensor for mask in masks for tensor in on_device) else None
    if str(func) == "aten.repeat_interleave.Tensor":
        return short if kwargs.get("output_size") is None else None
    if name == "aten.copy_" and len(on_device) == 1 and isinstance(args[1], Tensor):
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        return "copy_ between host and device" if waits else None
    return None


def _tensors_in(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _storage_of(tensor: Tensor) -> StorageWeakRef | None:
    """What views share; a weak reference keeps its address from being used again. None: a tensor without one."""
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        return None
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except NotImplementedError:  # inside vmap, and where a layout is sparse
        return None


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _place() -> str:
    for frame in reversed(traceback.extract_stack()):
        if frame.filename != __file__ and not frame.filename.startswith(_TORCH) and not frame.filename.startswith("<"):
            return f"{frame.filename}:{frame.lineno} {frame.name}"
    return "torch"


@contextlib.contextmanager
def _torchs_own_warnings(syncs: HostSyncs) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("warn")
        warnings.filterwarnings("always", message=_WARNING)
        show = warnings.showwarning

        def note(message: Warning | str, *arguments: Any, **named: Any) -> None:
            if str(message).startswith(_WARNING):
                syncs.add("synchronizing operation")
            else:
                show(message, *arguments, **named)

        warnings.showwarning = note
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


@contextlib.contextmanager
def _explicit_waits(syncs: HostSyncs) -> Iterator[None]:
    """Those that the debug mode leaves out, since whoever calls them knows."""
    owners: list[Any] = [torch.cuda, torch.cuda.Stream, torch.cuda.Event]
    originals: list[Callable[..., Any]] = [owner.synchronize for owner in owners]

    def counting(original: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def synchronize(*arguments: Any, **named: Any) -> Any:
            syncs.add(kind)
            return original(*arguments, **named)

        return synchronize

    for owner, original in zip(owners, originals, strict=True):
        owner.synchronize = counting(original, f"{owner.__name__}.synchronize")
    try:
        yield
    finally:
        for owner, original in zip(owners, originals, strict=True):
            owner.synchronize = original
