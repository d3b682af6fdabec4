"""Reading distributed checkpoints: without running what may be hidden in their pickles, and in blocks.

``.metadata`` is a pickle, and `DefaultLoadPlanner.load_bytes` unpickles whatever was saved as an object. Here only
tensors are read (torch reads those with ``weights_only=True``), and the metadata only through an allow-list.

DCP's own reader holds more than two copies of a stored piece while it loads it. In a ``.distcp`` file every piece is
what `torch.save` writes of one tensor: a zip archive with the bytes uncompressed in one entry. `StoredTensors` asks
`torch.load` which tensor that is, without reading those bytes, and the zip's directory where they lie.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import gc
import importlib
import io
import pickle
import sys
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from fsdp2kit.console import progress_bar
from fsdp2kit.errors import RunFailure, UserError
from fsdp2kit.files.local import open_regular
from fsdp2kit.files.remote import file_names, fsspec_url, part_of_file
from fsdp2kit.job.distributed import host_of, local_part
from fsdp2kit.torch_compat import FsspecReader
from fsdp2kit.weights.transfer import BLOCK_BYTES, Reader, in_blocks

# Dataclasses and enums of these modules only hold data; nothing else that they define may be named by a pickle.
DATA_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.planner",
    "torch.distributed.checkpoint.filesystem",
)

_Stream = io.BufferedReader | io.BytesIO


class _MetadataUnpickler(pickle.Unpickler):
    """Finds DCP's data classes and a few harmless values; refuses every other name."""

    def find_class(self, module_name: str, name: str) -> Any:
        if module_name in DATA_MODULES and name.isidentifier():
            found = getattr(importlib.import_module(module_name), name, None)
            is_data = isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, enum.Enum))
            if is_data and found.__module__ == module_name:
                return found
        elif module_name == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        elif module_name.partition(".")[0] == "pathlib":  # pathlib._local on Python 3.13
            return PurePosixPath
        elif (module_name, name) in _HARMLESS:
            return _HARMLESS[module_name, name]
        raise pickle.UnpicklingError(f"it names {module_name}.{name}")


def _layout(name: str) -> torch.layout:
    """``"torch.strided"`` → `torch.strided`."""
    layout = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(layout, torch.layout):
        raise pickle.UnpicklingError(f"it names the layout {name}")
    return layout


def _enum_member(kind: type[enum.Enum], name: str) -> enum.Enum:
    """A member of an enum by name: the one use that pickles of some Python versions make of `getattr`."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise pickle.UnpicklingError("it calls getattr on something that is no enum")
    return kind[name]


_HARMLESS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
    ("builtins", "getattr"): _enum_member,
}


class SafeReader(dcp.FileSystemReader):
    """A `FileSystemReader` of one checkpoint whose metadata is read once, and through an allow-list."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        url = fsspec_url(path)
        if url is not None:
            remote = FsspecReader(url)
            self.fs = remote.fs
            self.path = remote.path
        self.directory = path
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's metadata."""
        if self._metadata is None:
            self._metadata = _read_metadata(self.directory / ".metadata")
        return self._metadata

    def stored_tensors(self) -> dict[str, TensorStorageMetadata]:
        """Global shape, dtype and chunks of every tensor in the checkpoint, by key."""
        stored = self.read_metadata().state_dict_metadata
        return {key: value for key, value in stored.items() if isinstance(value, TensorStorageMetadata)}

    def metas(self) -> dict[str, Tensor]:
        """A meta tensor like every tensor in the checkpoint, whole, by key."""
        stored = self.stored_tensors()
        return {key: torch.empty(one.size, dtype=one.properties.dtype, device="meta") for key, one in stored.items()}


class TensorsOnlyPlanner(dcp.DefaultLoadPlanner):
    """The default load planner, without the unpickling of objects; ``advance`` is called with the bytes of a read."""

    def __init__(self, advance: Callable[[int], object]) -> None:
        super().__init__()
        self._advance = advance

    def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
        self._advance(tensor.nbytes)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Refuse: an object in a checkpoint is a pickle that could run anything."""
        raise RunFailure(f"{read_item.storage_index.fqn} is a pickled object, not a tensor; it is not loaded")


def load_tensors(reader: SafeReader, tensors: Mapping[str, Tensor], *, alone: bool = False) -> None:
    """Fill `tensors`, keyed as in the checkpoint, in place; DTensors read their own shards.

    Collective over the default process group, if there is one, unless `alone`. The caller
    has checked names and shapes.
    """
    size = sum(local_part(one).nbytes for one in tensors.values() if isinstance(one, Tensor))
    alone = alone or not torch.distributed.is_initialized()
    try:
        with warnings.catch_warnings(), progress_bar("reading weights", total=size) as bar:
            # dcp.load warns when it runs in one process; that is intended here.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            planner = TensorsOnlyPlanner(bar.advance)
            dcp.load(dict(tensors), storage_reader=reader, planner=planner, no_dist=alone)
    except dcp.CheckpointException as error:
        raise RunFailure(f"{reader.directory}: cannot be read: {first_failure(error)}") from error


def first_failure(error: BaseException) -> str:
    """The cause of a failed save or load in one line; of DCP's own exception, that of the lowest rank."""
    if isinstance(error, dcp.CheckpointException) and error.failures:
        rank = min(error.failures)
        return f"rank {rank} on {host_of(rank)}: {first_failure(error.failures[rank][0])}"
    return f"{type(error).__name__}: {error}"


def _read_metadata(path: Path) -> Metadata:
    todo = "give the directory of a distributed checkpoint that you trust"
    try:
        with open_regular(path) as stream, no_garbage_collection():
            metadata = _MetadataUnpickler(stream).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds a {type(metadata).__name__}")
        # A relative path of a chunk must not lead out of the checkpoint.
        outside = {info.relative_path for info in metadata.storage_data.values()} - file_names(path.parent)
    except FileNotFoundError:
        raise UserError(str(path), "is missing", todo) from None
    except pickle.UnpicklingError as error:
        what = f"is not the metadata of a checkpoint, so it was not loaded: {error}"
        raise UserError(str(path), what, todo) from error
    except Exception as error:  # a damaged pickle may raise nearly anything
        raise UserError(str(path), f"cannot be read ({type(error).__name__}: {error})", todo) from error
    if outside:
        raise UserError(str(path), f"names {sorted(outside)[0]}, which is not a file of the checkpoint", todo)
    return metadata


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """While millions of objects are made, looking for garbage among them takes longer than making them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class StoredTensors(Reader):
    """Reads the tensors of the checkpoint that `reader` reads.

    Args:
        names: name → key of ``reader.stored_tensors()``. Default: tensors are asked for by their keys.
    """

    def __init__(self, reader: SafeReader, names: Mapping[str, str] | None = None) -> None:
        self._reader = reader
        self._names = names or {}
        self._stored = reader.stored_tensors()
        self.keys = self._stored.keys()

    def blocks(self, name: str) -> Iterator[Tensor]:
        """The elements of a tensor in order, as flat tensors of at most 16 MiB.

        A block is valid until the next is asked for. Only a tensor whose pieces are no ranges of rows is held whole.
        """
        key = self._names.get(name, name)
        dtype = self._stored[key].properties.dtype
        pieces = self._row_ranges(key)
        if pieces is None:
            yield from in_blocks(self._assembled(key))
            return
        buffer = torch.empty(min(BLOCK_BYTES, max(piece.size for piece in pieces)), dtype=torch.uint8)
        for piece in pieces:
            with piece.opened() as stream:
                for start in range(0, piece.size, BLOCK_BYTES):
                    block = buffer[: piece.size - start]
                    piece.fill(block, stream)
                    yield block.view(dtype)

    def read(self, name: str) -> Tensor:
        """A whole tensor."""
        key = self._names.get(name, name)
        stored = self._stored[key]
        if self._row_ranges(key) is None:
            return self._assembled(key)
        whole = torch.empty(stored.size, dtype=stored.properties.dtype)
        start = 0
        for block in self.blocks(name):
            whole.view(-1)[start : start + len(block)] = block
            start += len(block)
        return whole

    def _row_ranges(self, key: str) -> list[_RowRange] | None:
        """The pieces of a tensor from the first row to the last; None where they are something else."""
        stored = self._stored[key]
        pieces = []
        row = 0
        places: dict[Any, Any] = self._reader.read_metadata().storage_data
        for chunk in sorted(stored.chunks, key=lambda chunk: tuple(chunk.offsets)):
            place = places[MetadataIndex(key, chunk.offsets)]
            if getattr(place, "transform_descriptors", None):  # compressed, say
                return None
            if chunk.sizes.numel() == 0:  # of a rank that has no rows
                continue
            if chunk.sizes[1:] != stored.size[1:] or (chunk.sizes and chunk.offsets[0] != row):
                return None
            row += chunk.sizes[0] if chunk.sizes else 0
            path = self._reader.directory / place.relative_path
            pieces.append(_RowRange(path, place.offset, place.length, chunk.sizes, stored.properties.dtype))
        is_whole = sum(piece.shape.numel() for piece in pieces) == stored.size.numel()
        return pieces if is_whole and pieces else None

    def _assembled(self, key: str) -> Tensor:
        stored = self._stored[key]
        if sum(chunk.sizes.numel() for chunk in stored.chunks) < stored.size.numel():
            raise RunFailure(f"{self._reader.directory}: holds only parts of {key}")
        whole = torch.empty(stored.size, dtype=stored.properties.dtype)
        load_tensors(self._reader, {key: whole}, alone=True)
        return whole


@dataclass(frozen=True)
class _RowRange:
    """A range of a tensor's rows, and where in a file its archive lies."""

    path: Path
    offset: int
    length: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    @contextlib.contextmanager
    def opened(self) -> Iterator[_Stream]:
        """A stream that stands at the first of the rows' bytes."""
        with contextlib.ExitStack() as stack:
            try:
                archive = stack.enter_context(part_of_file(self.path, self.offset, self.length))
                stream = self._at_first_byte(archive)
            except Exception as error:  # a damaged archive may raise nearly anything
                raise RunFailure(f"{self.path}: cannot be read: {first_failure(error)}") from error
            yield stream

    def fill(self, block: Tensor, stream: _Stream) -> None:
        """Read the next bytes of `stream` into a tensor of them."""
        if stream.readinto(block.numpy().data) != len(block):
            raise RunFailure(f"{self.path}: cannot be read: it ends too early")

    def _at_first_byte(self, archive: _Stream) -> _Stream:
        tensor = torch.load(archive, map_location="meta", weights_only=True)  # reads no values
        if not isinstance(tensor, Tensor) or (tensor.shape, tensor.dtype) != (self.shape, self.dtype):
            raise ValueError(f"it holds something else than a {self.dtype} of shape {tuple(self.shape)}")
        start = _data_start(archive)
        if start is None or not tensor.is_contiguous():
            archive.seek(0)
            loaded: Tensor = torch.load(archive, map_location="cpu", weights_only=True)
            return io.BytesIO(loaded.contiguous().view(-1).view(torch.uint8).numpy().data)
        archive.seek(start + int(tensor.storage_offset()) * self.dtype.itemsize)
        return archive


def _data_start(archive: _Stream) -> int | None:
    """Where in an archive of `torch.save` the bytes of its one storage begin; None where they cannot be read as is."""
    with zipfile.ZipFile(archive) as directory:
        records = [entry for entry in directory.infolist() if entry.filename.split("/")[1:-1] == ["data"]]
        order = next((entry for entry in directory.infolist() if entry.filename.endswith("/byteorder")), None)
        byteorder = directory.read(order).decode() if order else "little"
    if len(records) != 1 or records[0].compress_type != zipfile.ZIP_STORED or byteorder != sys.byteorder:
        return None
    # A local header: 26 bytes, the lengths of name and extra field, name, extra field; the last is torch's padding.
    archive.seek(records[0].header_offset + 26)
    lengths = archive.read(4)
    return archive.tell() + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
