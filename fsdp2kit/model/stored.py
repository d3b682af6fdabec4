"""The safetensors of a Hugging Face directory, read in parts; and those that a text part's export carries over."""

from __future__ import annotations

import contextlib
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from fsdp2kit.errors import UserError
from fsdp2kit.files.local import is_plain_name, read_json_object
from fsdp2kit.model.names import find_others, find_sources

INDEX_NAME = "model.safetensors.index.json"


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
    index, single = directory / INDEX_NAME, directory / "model.safetensors"
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
        dtypes = Counter(_meta(piece).dtype for piece in slices.values())
    floating = {dtype: count for dtype, count in dtypes.items() if dtype.is_floating_point}
    return str(max(floating, key=lambda dtype: floating[dtype], default=torch.float32)).removeprefix("torch.")


@dataclass(frozen=True, eq=False)
class Carried:
    """What the files of a whole hold beside its text part (`fsdp2kit.model.names.Whole`), and how they name that."""

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


def read_carried(model: PreTrainedModel, directory: str | Path) -> Carried:
    """What the files of a text part's whole hold beside it; headers alone are read.

    Args:
        model: the text part, on any device.
        directory: the whole's.
    """
    directory = Path(directory)
    with open_safetensors(safetensors_files(directory)) as slices:
        metas = {name: _meta(piece) for name, piece in slices.items()}
    sources, _ = find_sources(model, metas)
    return Carried(
        directory,
        {name: metas[name] for name in find_others(model, metas)},
        {stored: metas[stored] for source in sources for stored, _ in source.stored},
        {source.name: source.stored[0][0] for source in sources if source.converter is None},
    )


def _meta(piece: Any) -> Tensor:
    dtype = piece[:0].dtype if piece.get_shape() else piece[...].dtype
    return torch.empty(piece.get_shape(), dtype=dtype, device="meta")
