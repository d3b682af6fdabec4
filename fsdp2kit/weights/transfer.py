"""A tensor's one route: an *entry* says what is read and what it becomes, a *reader* reads, a *sink* takes.

- Entries: of a model's files, or an adapter's (`fsdp2kit.weights.entries`); of a model that is loaded from files
  (`fsdp2kit.weights.conversion`); of an adapter (`fsdp2kit.weights.adapter_values`).
- Readers: of what can be sliced, as safetensors can (`MappingReader`); of a checkpoint (`fsdp2kit.checkpoint.reader`);
  of files with an adapter merged in (`fsdp2kit.checkpoint.merge`); of the memory of all ranks
  (`fsdp2kit.weights.gathered`).
- Sinks: the shards of a model (`fsdp2kit.weights.shards`), a safetensors file (`fsdp2kit.weights.safetensors_file`), a
  checkpoint (`fsdp2kit.checkpoint.from_hf`). Buckets to an engine (`fsdp2kit.rl.weight_sync`) go by the same entries.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from fsdp2kit.weights.stored import open_safetensors, safetensors_files

BLOCK_BYTES = 1 << 24

_Result = TypeVar("_Result")


@dataclass(frozen=True, eq=False)
class WeightEntry:
    """Tensors that are converted together, from a model to its files or back: one, or those that transformers stores
    in other pieces."""

    sources: dict[str, Tensor]
    """Name where it is read → a meta tensor like it; of a model's, in the dtype in which it is written."""
    forms: dict[str, Tensor]
    """Name where it goes → a meta tensor like what is given to the sink."""
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None
    """From ``sources`` to ``forms``, by name; None: there is one tensor, and nothing but its name and dtype may
    change."""
    directory: Path | None = None
    """The Hugging Face directory from which the tensor is copied under its name there; None: it is the reader's."""

    @property
    def nbytes(self) -> int:
        """Bytes of the forms."""
        return sum(form.nbytes for form in self.forms.values())


class Reader:
    """Where tensors come from, by name. A subclass has `read`."""

    def read(self, name: str) -> Any:
        """A tensor, or what can be sliced as one and reads what is sliced: ``[...]`` is the whole tensor."""
        raise NotImplementedError

    def blocks(self, name: str) -> Iterator[Tensor]:
        """A tensor's elements in order, as flat tensors of at most 16 MiB."""
        yield from in_blocks(self.read(name)[...])


class MappingReader(Reader):
    """Reads what can be sliced (safetensors slices, tensors)."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors

    def read(self, name: str) -> Any:
        return self._tensors[name]


Sink = Callable[[dict[str, Tensor], Reader], _Result]
"""Takes meta tensors by name, and a reader of these tensors, which are best asked for in this order."""


def transfer(entries: Sequence[WeightEntry], reader: Reader, sink: Sink[_Result]) -> _Result:
    """Hand a sink all that the entries become; what it asks for is read then, and not kept.

    In memory is what the sink asks for (a part of a tensor, or a block of 16 MiB); of an entry with a conversion, all
    its tensors.

    Returns:
        What the sink returns.
    """
    with converted(entries, reader) as found:
        return sink(forms_of(entries), found)


@contextlib.contextmanager
def converted(entries: Iterable[WeightEntry], reader: Reader) -> Iterator[Reader]:
    """A reader of what the entries become."""
    with contextlib.ExitStack() as files:
        yield _Converted(entries, reader, files)


def forms_of(entries: Iterable[WeightEntry]) -> dict[str, Tensor]:
    """Meta tensors by the names where they go, in the order of the entries."""
    return {name: form for entry in entries for name, form in entry.forms.items()}


def in_blocks(tensor: Tensor) -> tuple[Tensor, ...]:
    """The elements of a tensor in order, as flat tensors of at most 16 MiB."""
    return tensor.reshape(-1).split(BLOCK_BYTES // tensor.dtype.itemsize)


class _Converted(Reader):
    def __init__(self, entries: Iterable[WeightEntry], reader: Reader, files: contextlib.ExitStack) -> None:
        self._entries = {name: entry for entry in entries for name in entry.forms}
        self._reader = reader
        self._files = files
        self._copied: dict[Path, MappingReader] = {}
        self._held: dict[str, Tensor] = {}  # of the last conversion

    def read(self, name: str) -> Any:
        reader, source = self._source(name)
        if source is not None:
            return reader.read(source)
        if name not in self._held:
            self._held = {}
            entry = self._entries[name]
            assert entry.convert is not None
            self._held = entry.convert({one: reader.read(one)[...] for one in entry.sources})
        return self._held.pop(name)

    def blocks(self, name: str) -> Iterator[Tensor]:
        reader, source = self._source(name)
        yield from super().blocks(name) if source is None else reader.blocks(source)

    def _source(self, name: str) -> tuple[Reader, str | None]:
        """The reader of a tensor, and its name there; None: it is converted."""
        entry = self._entries[name]
        if entry.directory is None:
            return self._reader, next(iter(entry.sources)) if entry.convert is None else None
        if entry.directory not in self._copied:
            slices = self._files.enter_context(open_safetensors(safetensors_files(entry.directory)))
            self._copied[entry.directory] = MappingReader(slices)
        return self._copied[entry.directory], name
