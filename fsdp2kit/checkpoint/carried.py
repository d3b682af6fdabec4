"""What an export carries over from the checkpoint whose text part was trained: the other parts' weights, bit for bit.

A distributed checkpoint holds the text part alone. Its manifest names the directory that has the rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from fsdp2kit.checkpoint.manifest import Manifest
from fsdp2kit.checkpoint.reader import in_blocks
from fsdp2kit.errors import UserError
from fsdp2kit.model.assets import weights_digest
from fsdp2kit.weights.record import source_of, weights_of
from fsdp2kit.weights.stored import Carried, open_safetensors, read_carried, safetensors_files

CARRIED = "carried:"
"""What begins an export's key of a tensor that is carried over."""


class TensorReader(Protocol):
    """Where the tensors of an export come from, by the keys of its plan; see `StoredTensors`."""

    def read(self, key: str, /) -> Tensor:
        """A whole tensor."""
        ...

    def blocks(self, key: str, /) -> Iterator[Tensor]:
        """Its elements in order, as flat tensors."""
        ...


def carried_record(directory: Path) -> dict[str, str]:
    """Where a text part's whole is, and its digest, for ``environment["carried"]`` of a manifest.

    Raises:
        UserError: there are no weights.
    """
    if not any(directory.glob("*.safetensors")):
        what = "has no safetensors, and a checkpoint of the text part alone needs the other parts' weights for exports"
        raise UserError(str(directory), what, "give the directory with the model's weights")
    return {"directory": str(directory.resolve()), "weights": weights_digest(directory)}


def find_carried(
    model: PreTrainedModel | None, checkpoint: Path, manifest: Manifest | None, other: Path
) -> Carried | None:
    """What an export of a checkpoint carries over; None for a model that is no text part.

    Args:
        other: a directory that is taken if it holds weights.

    Raises:
        UserError: no directory holds the other parts' weights, or it holds another model's.
    """
    if model is None or weights_of(model).whole is None:
        return None
    record = manifest.environment.get("carried", {}) if manifest else {}
    directory = other if any(other.glob("*.safetensors")) else Path(record.get("directory") or other)
    if not directory.is_dir() or not any(directory.glob("*.safetensors")):
        what = f"holds a text part alone, and {directory}, which has the other parts' weights, is not there"
        raise UserError(str(checkpoint), what, "bring it back, or name where it is now with --config")
    if record and record["weights"] != weights_digest(directory):
        what = f"{directory} holds other weights than those whose text part was trained"
        raise UserError(str(checkpoint), what, "name the directory of that model with --config")
    return read_carried(model, directory)


def carried_bytes(model: Any) -> int:
    """Bytes of what an export carries over; 0 for a model that is no text part, and for adapters."""
    if (
        weights_of(model).whole is None
        or weights_of(model).adapter is not None
        or (directory := source_of(model).directory) is None
    ):
        return 0
    return sum(one.nbytes for one in read_carried(model, directory).others.values())


@contextlib.contextmanager
def beside_carried(carried: Carried, text: TensorReader) -> Iterator[TensorReader]:
    """A reader of the text part's tensors and of those that are carried over; readable while the context is open."""
    with open_safetensors(safetensors_files(carried.directory)) as slices:
        yield _Beside(slices, text)


class _Beside:
    def __init__(self, slices: dict[str, Any], text: TensorReader) -> None:
        self._slices, self._text = slices, text

    def read(self, key: str, /) -> Tensor:
        return self._slices[key.removeprefix(CARRIED)][...] if key.startswith(CARRIED) else self._text.read(key)

    def blocks(self, key: str, /) -> Iterator[Tensor]:
        yield from in_blocks(self.read(key)) if key.startswith(CARRIED) else self._text.blocks(key)
