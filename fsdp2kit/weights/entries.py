"""What a model's files hold: each stored tensor's name, its form, and what it is made of.

`entries` lists a model's, `adapter_entries` an adapter's. Exports from checkpoints and from memory and syncs to
engines go by the same list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fsdp2kit.errors import UserError
from fsdp2kit.weights.adapter_files import adapter_files
from fsdp2kit.weights.adapters import adapter_file_name
from fsdp2kit.weights.conversion import to_file_names
from fsdp2kit.weights.parts import Parts, read_parts
from fsdp2kit.weights.record import weights_of
from fsdp2kit.weights.transfer import WeightEntry
from fsdp2kit.weights.whole import OWN_NAMES


def entries(
    model: PreTrainedModel | None,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    *,
    kept: Iterable[str] = (),
    parts: Path | None = None,
) -> list[WeightEntry]:
    """What the files of a model hold, in the order of its tensors.

    Args:
        model: without adapters and of its own class, not `fully_shard`'s (`build_skeleton` gives one), on any device;
            None for one that transformers does not know: nothing is renamed or converted.
        tensors: the model's by name, a tied one once; on any device.
        dtype: of floating-point tensors, but for those that transformers keeps in float32.
        kept: the names of these, where ``model`` is None.
        parts: the directory with the parts beside a model that is a text part. Their tensors are entries, too. The
            model's keep the names of its files, and their dtypes unless another than the usual one is asked for.

    Raises:
        UserError: transformers cannot convert the architecture a decoder layer at a time; the files of ``parts`` have
            other names than transformers writes.
    """
    dtypes = dict.fromkeys(kept, torch.float32) if model is None else weights_of(model).dtypes(dtype)
    metas = {name: _meta(tensor, dtypes.get(name, dtype)) for name, tensor in tensors.items()}
    found = grouped_entries(model, metas)
    if parts is None:
        return found
    assert model is not None, "a text part is of a class that transformers knows"
    beside = read_parts(model, parts)
    found = [_as_stored(entry, beside, dtype) for entry in found]
    return found + [WeightEntry({name: one}, {name: one}, directory=parts) for name, one in beside.others.items()]


def adapter_entries(
    model: PreTrainedModel | None, tensors: Mapping[str, Tensor], dtype: torch.dtype, *, one_by_one: bool
) -> list[WeightEntry]:
    """What the one file of an adapter holds.

    Args:
        model: the adapter's, as for `entries`.
        tensors: the adapter's, and of modules that are trained whole, by their names in the model with adapters.
        one_by_one: whether factors of the model's experts are one tensor for each layer of each expert.
    """
    names = OWN_NAMES if model is None else weights_of(model).names
    found = []
    for name, tensor in tensors.items():
        meta = {name: _meta(tensor, dtype)}
        own = adapter_file_name(name, names)
        entry = WeightEntry(meta, {own: meta[name]})
        if model is not None and one_by_one:
            forms = adapter_files(model, meta)
            entry = WeightEntry(meta, forms, None if [*forms] == [own] else partial(adapter_files, model))
        found.append(entry)
    return found


def grouped_entries(model: PreTrainedModel | None, tensors: dict[str, Tensor]) -> list[WeightEntry]:
    """The finest of three groupings of ``tensors`` that converts to the same names and shapes as all of them at once.

    Tried in turn are every tensor by itself, the tensors of one module, and those of one decoder layer.

    Args:
        model: as for `entries`.
        tensors: meta tensors by the model's names.
    """
    expected = _shapes(to_file_names(model, tensors))
    for group_of in (str, _module_of, _layer_of):
        names_of: dict[str, list[str]] = {}
        for name in tensors:
            names_of.setdefault(group_of(name), []).append(name)
        try:
            found = [_converted(model, {name: tensors[name] for name in names}) for names in names_of.values()]
        except Exception:  # a conversion of an incomplete group may raise anything; try larger groups
            continue
        if expected == {name: shape for entry in found for name, shape in _shapes(entry.forms).items()}:
            return found
    kind = type(model).__name__
    what = f"the export of {kind} is not supported yet: its tensors cannot be converted a decoder layer at a time"
    raise UserError("export", what, f"load the checkpoint into a {kind} and call save_pretrained")


def _converted(model: PreTrainedModel | None, tensors: dict[str, Tensor]) -> WeightEntry:
    forms = to_file_names(model, tensors)
    # transformers returns the same tensor where it only renames it.
    is_copied = len(tensors) == len(forms) == 1 and next(iter(tensors.values())) is next(iter(forms.values()))
    return WeightEntry(tensors, forms, None if is_copied else partial(to_file_names, model))


def _as_stored(entry: WeightEntry, beside: Parts, dtype: torch.dtype) -> WeightEntry:
    """An entry of a text part under the names of the whole's files, and in their dtypes unless another than the usual
    one is asked for."""
    own = next(iter(entry.sources))
    if entry.convert is None and own in beside.names:
        entry = replace(entry, forms={beside.names[own]: next(iter(entry.forms.values()))})
    if strange := sorted(entry.forms.keys() - beside.text.keys()):
        what = f"{beside.directory} does not name its tensors as transformers writes them ({strange[0]} is not in it)"
        raise UserError("export", what, "load the model with from_pretrained, save it, and train from that")
    if dtype != beside.dtype:
        return entry
    return replace(entry, forms={name: form.to(beside.text[name].dtype) for name, form in entry.forms.items()})


def _meta(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    dtype = dtype if tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=dtype, device="meta")


def _module_of(name: str) -> str:
    return name.rpartition(".")[0].rpartition(".")[0]


def _layer_of(name: str) -> str:
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: number + 1])


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
