"""Reading distributed checkpoints without running what may be hidden in their pickles.

``.metadata`` is a pickle, and `DefaultLoadPlanner.load_bytes` unpickles whatever was saved as an object. Here only
tensors are read (torch reads those with ``weights_only=True``), and the metadata only through an allow-list.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import io
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fsdp2kit.checkpoint.places import is_remote
from fsdp2kit.errors import RunFailure, UserError
from fsdp2kit.torch_compat import FsspecReader

# Dataclasses and enums of these modules only hold data; nothing else that they define may be named by a pickle.
DATA_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.planner",
    "torch.distributed.checkpoint.filesystem",
)


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
        if is_remote(path):
            remote = FsspecReader(str(path))
            self.fs, self.path = remote.fs, remote.path
        self.directory = path
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's metadata.

        Raises:
            UserError: it is missing, damaged, or holds something that does not belong there.
        """
        if self._metadata is None:
            self._metadata = _read_metadata(self.directory / ".metadata")
        return self._metadata

    def stored_tensors(self) -> dict[str, TensorStorageMetadata]:
        """Global shape, dtype and chunks of every tensor in the checkpoint, by key."""
        stored = self.read_metadata().state_dict_metadata
        return {key: value for key, value in stored.items() if isinstance(value, TensorStorageMetadata)}


class TensorsOnlyPlanner(dcp.DefaultLoadPlanner):
    """The default load planner, without the unpickling of objects."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Refuse: an object in a checkpoint is a pickle that could run anything."""
        raise RunFailure(f"{read_item.storage_index.fqn} is a pickled object, not a tensor; it is not loaded")


def load_tensors(reader: SafeReader, tensors: Mapping[str, Tensor], *, alone: bool = False) -> None:
    """Fill `tensors`, keyed as in the checkpoint, in place; DTensors read their own shards.

    Collective over the default process group, if there is one, unless `alone`. Names and shapes are the caller's to
    check beforehand.

    Raises:
        RunFailure: a file cannot be read; on every rank.
    """
    alone = alone or not torch.distributed.is_initialized()
    try:
        with warnings.catch_warnings():
            # dcp.load says so each time it works in one process, which here is what was asked for.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(dict(tensors), storage_reader=reader, planner=TensorsOnlyPlanner(), no_dist=alone)
    except dcp.CheckpointException as error:
        raise RunFailure(f"{reader.directory}: cannot be read: {first_failure(error)}") from error


def first_failure(error: BaseException) -> str:
    """The cause of a failed save or load in one line; of DCP's own exception, that of the lowest rank."""
    if isinstance(error, dcp.CheckpointException) and error.failures:
        rank = min(error.failures)
        return f"rank {rank}: {first_failure(error.failures[rank][0])}"
    return f"{type(error).__name__}: {error}"


def _read_metadata(path: Path) -> Metadata:
    todo = "give the directory of a distributed checkpoint that you trust"
    try:
        with path.open("rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds a {type(metadata).__name__}")
        # A relative path of a chunk must not lead out of the checkpoint.
        outside = {info.relative_path for info in metadata.storage_data.values()} - {
            entry.name for entry in path.parent.iterdir()
        }
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
