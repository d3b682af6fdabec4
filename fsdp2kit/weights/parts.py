"""The parts beside a text part that is trained (images, audio, …): an export carries their weights over, bit for bit.

A distributed checkpoint holds the text part alone. Its manifest names the directory that has the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fsdp2kit.errors import UserError
from fsdp2kit.weights.conversion import match_files
from fsdp2kit.weights.record import weights_of
from fsdp2kit.weights.recorded_parts import RECORD
from fsdp2kit.weights.stored import meta_of, open_safetensors, safetensors_files, usual_dtype, weights_digest


@dataclass(frozen=True, eq=False)
class Parts:
    """What the files of a whole hold beside its text part, and how they name that."""

    directory: Path
    others: dict[str, Tensor]
    """Meta tensors like those of the other parts, and like those that transformers itself does not read, by name."""
    text: dict[str, Tensor]
    """The same of the tensors that the text part is made of."""
    names: dict[str, str]
    """The stored name of each of the text part's tensors that is at most renamed, by its name in the model."""

    @property
    def dtype(self) -> torch.dtype:
        """The usual dtype of the text part's tensors."""
        return Counter(one.dtype for one in self.text.values()).most_common(1)[0][0]


def read_parts(model: PreTrainedModel, directory: str | Path) -> Parts:
    """What the files of a text part's whole hold beside it; headers alone are read.

    Args:
        model: the text part, on any device.
        directory: the whole's.
    """
    directory = Path(directory)
    with open_safetensors(safetensors_files(directory)) as slices:
        metas = {name: meta_of(piece) for name, piece in slices.items()}
    match = match_files(model, metas)
    return Parts(
        directory,
        {name: metas[name] for name in match.others},
        {name: meta for entry in match.entries for name, meta in entry.sources.items()},
        {next(iter(one.forms)): next(iter(one.sources)) for one in match.entries if one.convert is None},
    )


def parts_record(directory: Path) -> dict[str, str]:
    """Where a text part's whole is, and its digest, for a manifest's environment.

    Raises:
        UserError: there are no weights.
    """
    if not any(directory.glob("*.safetensors")):
        what = "has no safetensors, and a checkpoint of the text part alone needs the other parts' weights for exports"
        raise UserError(str(directory), what, "give the directory with the model's weights")
    return {"directory": str(directory.resolve()), "weights": weights_digest(directory)}


def find_parts(
    model: PreTrainedModel | None, checkpoint: Path, environment: Mapping[str, Any], other: Path
) -> Path | None:
    """The directory whose other parts an export of a checkpoint carries over; None for a model that is no text part.

    Args:
        environment: the manifest's.
        other: a directory that is taken if it holds weights.

    Raises:
        UserError: no directory holds the other parts' weights, or it holds another model's.
    """
    if model is None or weights_of(model).names.whole is None:
        return None
    record = environment.get(RECORD, {})
    directory = other if any(other.glob("*.safetensors")) else Path(record.get("directory") or other)
    if not directory.is_dir() or not any(directory.glob("*.safetensors")):
        what = f"holds a text part alone, and {directory}, which has the other parts' weights, is not there"
        raise UserError(str(checkpoint), what, "bring it back, or name where it is now with --config")
    if record and record["weights"] != weights_digest(directory):
        what = f"{directory} holds other weights than those whose text part was trained"
        raise UserError(str(checkpoint), what, "name the directory of that model with --config")
    return directory


def parts_bytes(model: Any) -> int:
    """Bytes of what an export carries over; 0 for a model that is no text part, and for adapters."""
    weights = weights_of(model)
    if weights.names.whole is None or weights.adapter is not None:
        return 0
    if weights.source is None or weights.source.directory is None:
        return 0
    return sum(one.nbytes for one in read_parts(model, weights.source.directory).others.values())


def usual_dtype_of(model: PreTrainedModel, directory: Path) -> str:
    """The dtype that most of a model's stored tensors have, by name; of a text part, the text's."""
    if weights_of(model).names.whole is None:
        return usual_dtype(directory)
    return str(read_parts(model, directory).dtype).removeprefix("torch.")
