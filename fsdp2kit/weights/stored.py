"""The safetensors of a Hugging Face directory: found, read in parts, and digested."""

from __future__ import annotations

import contextlib
import hashlib
import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.modeling_utils import str_to_torch_dtype

from fsdp2kit.errors import UserError
from fsdp2kit.files.local import is_plain_name, read_json_object

INDEX_NAME = "model.safetensors.index.json"
_EDGE = 64 * 1024
_SAMPLE = 4096
_SAMPLES = 4
"""Bytes of each end of a file, of a sample of a tensor, and how many samples."""


@contextlib.contextmanager
def open_safetensors(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """A slice object of every stored tensor by name: ``get_shape()``, and indexing reads just that part."""
    slices: dict[str, Any] = {}
    with contextlib.ExitStack() as files:
        for path in paths:
            try:
                file = files.enter_context(safe_open(str(path), framework="pt"))
            except FileNotFoundError:
                raise UserError(str(path), "is named in the index but missing", "fetch the model again") from None
            except (SafetensorError, OSError) as error:
                raise UserError(str(path), f"is not a whole safetensors file ({error})", "fetch it again") from None
            slices.update((name, file.get_slice(name)) for name in file.keys())  # noqa: SIM118 (not a dict)
        yield slices


def safetensors_files(directory: Path) -> list[Path]:
    """The files of a model's weights, which transformers takes: one whole file before an index, which may be older.

    Raises:
        UserError: there are none, or the index cannot be read.
    """
    index = directory / INDEX_NAME
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    if index.is_file():
        return [directory / name for name in indexed_files(index)]
    what = f"{directory} has no model.safetensors and no {INDEX_NAME}"
    raise UserError("model.path", what, "convert its weights to safetensors, or set model.weights = 'random'")


def indexed_files(index: Path) -> list[str]:
    """The names of the files that an index of weights names, sorted.

    Raises:
        UserError: it is no index, or it names what is no regular file in its directory.
    """
    try:
        weight_map = read_json_object(index)["weight_map"]
        named = {str(tensor): name for tensor, name in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(str(index), f"is not a safetensors index ({error!r})", "fetch it again") from None
    for tensor, name in named.items():
        if not isinstance(name, str):
            what = f"names no file for {tensor}, but {textwrap.shorten(repr(name), 100)}"
            raise UserError(str(index), what, "fetch it again")
    names = sorted(set(named.values()))
    for name in names:
        if not is_plain_name(name):
            what = f"names {name!r}, which is no file in its directory"
            raise UserError(str(index), what, "do not use it, or fetch it again from a source that you trust")
        there = index.parent / name
        if there.exists() and not there.is_file():
            raise UserError(str(index), f"names {name!r}, which is not a regular file", "fetch the model again")
    return names


def check_indexes(directory: str | Path) -> None:
    """Refuse a directory with an index that names files outside of it, before transformers opens them."""
    for index in sorted(Path(directory).glob("*.index.json")):
        indexed_files(index)


def usual_dtype(directory: Path) -> str:
    """The dtype of most floating-point tensors in a model's files, by name; float32 if there are none."""
    with open_safetensors(safetensors_files(directory)) as slices:
        dtypes = Counter(meta_of(piece).dtype for piece in slices.values())
    floating = {dtype: count for dtype, count in dtypes.items() if dtype.is_floating_point}
    return str(max(floating, key=lambda dtype: floating[dtype], default=torch.float32)).removeprefix("torch.")


def meta_of(piece: Any) -> Tensor:
    """A meta tensor like what a slice object reads."""
    dtype = str_to_torch_dtype.get(piece.get_dtype()) or piece[...].dtype
    return torch.empty(piece.get_shape(), dtype=dtype, device="meta")


def some(names: list[str]) -> str:
    """ "a is", or "a, b, c and 2 more are"."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more} {'is' if len(names) == 1 else 'are'}"


def weights_digest(place: str | Path) -> str:
    """Two digests of a safetensors file, or of a directory's: of sizes, headers and last bytes, and of samples of each
    tensor.

    They do not depend on the directory's path. Reading the files whole would take minutes.
    """
    edges = hashlib.sha256()
    samples = hashlib.sha256()
    place = Path(place)
    for path in [place] if place.is_file() else sorted(place.glob("*.safetensors")):
        if not path.is_file():
            raise UserError(str(path), "is no file, or a link to one that is not there", "fetch the model again")
        size = path.stat().st_size
        with path.open("rb") as file:
            edges.update(f"{path.name} {size}".encode())
            edges.update(file.read(_EDGE))
            file.seek(max(0, size - _EDGE))
            edges.update(file.read(_EDGE))
            for start, end in _tensor_bytes(file):
                last = max(start, end - _SAMPLE)
                for number in range(_SAMPLES):
                    file.seek(start + (last - start) * number // (_SAMPLES - 1))
                    samples.update(file.read(min(_SAMPLE, end - start)))
    return f"{edges.hexdigest()[:16]} {samples.hexdigest()[:16]}"


def _tensor_bytes(file: BinaryIO) -> list[tuple[int, int]]:
    """Where each tensor of a safetensors file begins and ends; empty for a damaged file, which loading reports."""
    file.seek(0)
    try:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        places = sorted(value["data_offsets"] for name, value in header.items() if name != "__metadata__")
        return [(8 + length + start, 8 + length + end) for start, end in places]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError):
        return []
