"""From a reader to a sink, an entry at a time and a block at a time.

A reader has a model's tensors: those of a checkpoint (`fsdp2kit.checkpoint.reader`), of files with an adapter merged
in (`fsdp2kit.checkpoint.merge`), or in the memory of all ranks (`fsdp2kit.weights.gathered`). A sink takes what
files hold, as `fsdp2kit.weights.safetensors_file` does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from fsdp2kit.weights.entries import WeightEntry
from fsdp2kit.weights.stored import open_safetensors, safetensors_files

BLOCK_BYTES = 1 << 24


class TensorReader(Protocol):
    """Where a model's tensors come from, by their names in it."""

    def read(self, name: str, /) -> Tensor:
        """A whole tensor."""
        ...

    def blocks(self, name: str, /) -> Iterator[Tensor]:
        """Its elements in order, as flat tensors of at most 16 MiB."""
        ...


Sink = Callable[[dict[str, Tensor], Iterable[Iterable[Tensor]]], object]
"""Takes meta tensors by their names in the files, and the elements of each of them in order, in flat blocks."""


def transfer(entries: Sequence[WeightEntry], reader: TensorReader, sink: Sink) -> None:
    """Hand a sink all that the entries become, in their order; one entry after the other is read.

    A block of 16 MiB is in memory at a time; all tensors of an entry where transformers stores other pieces than it
    runs.
    """
    with contextlib.ExitStack() as files:
        sink(forms_of(entries), _pieces(entries, reader, files))


def forms_of(entries: Iterable[WeightEntry]) -> dict[str, Tensor]:
    """Meta tensors by their names in the files, in the order of the entries."""
    return {name: form for entry in entries for name, form in entry.forms.items()}


def in_blocks(tensor: Tensor) -> tuple[Tensor, ...]:
    """The elements of a tensor in order, as flat tensors of at most 16 MiB."""
    return tensor.reshape(-1).split(BLOCK_BYTES // tensor.dtype.itemsize)


def _pieces(
    entries: Iterable[WeightEntry], reader: TensorReader, files: contextlib.ExitStack
) -> Iterator[Iterable[Tensor]]:
    slices: dict[str, Any] | None = None
    for entry in entries:
        if entry.directory is not None:  # copied from files as it is
            if slices is None:
                slices = files.enter_context(open_safetensors(safetensors_files(entry.directory)))
            yield in_blocks(slices[next(iter(entry.forms))][...])
        elif entry.convert is None:
            yield reader.blocks(next(iter(entry.tensors)))
        else:
            tensors = entry.convert({name: reader.read(name) for name in entry.tensors})
            yield from (in_blocks(tensors[name]) for name in entry.forms)
