"""A model's tensors as its modules name them, and as Hugging Face's files do; both ways.

transformers 5 stores some models under other names, or in other pieces, than it runs them (the experts of a mixture
become one fused parameter). Loading applies its conversion mapping one target at a time; exports revert it group by
group, so that no whole model need be in memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from fsdp2kit.weights.modules import build_skeleton
from fsdp2kit.weights.record import find_ties, weights_of
from fsdp2kit.weights.transfer import WeightEntry


@dataclass(frozen=True, eq=False)
class FileNamesMatch:
    """How a model's files and the model fit; see `match_files`."""

    entries: list[WeightEntry]
    """From the files to the model, a tied tensor once."""
    copies: dict[str, str]
    """Stored name of a tied tensor's second copy → that of the first."""
    unexpected: list[str]
    """Stored names that the model does not use, but for those of the parts beside a text part."""
    others: list[str]
    """Stored names of all that is not the model's, of these parts and of layers that it lacks, as they are sorted in
    the files. A second copy is the model's: it would not follow the first."""


def match_files(model: PreTrainedModel, stored: Mapping[str, Tensor]) -> FileNamesMatch:
    """What each of the model's tensors is made of.

    Args:
        model: on any device, sharded or not.
        stored: all tensors of its files by name, or meta tensors like them. A form in the model has the dtype in the
            files.
    """
    names = weights_of(model).names
    skeleton = build_skeleton(model)  # some conversions go by the class, which FSDP changes
    shapes = {name: tensor.shape for name, tensor in skeleton.state_dict().items()}
    stored_model = names.stored_model(skeleton)
    mapping = get_model_conversion_mapping(stored_model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    targets = stored_model.state_dict()
    # Stored names of each tensor of the files' model, with the converter's pattern that each matches.
    pieces: dict[str, list[tuple[str, str | None]]] = {}
    unexpected = []
    for key in sorted(stored, key=_natural):
        name, pattern = rename_source_key(key, renamings, converters, stored_model.base_model_prefix, targets)
        if name not in targets and key in targets:
            name = key
            pattern = None
        if name in targets:
            pieces.setdefault(name, []).append((key, pattern))
        elif names.inner(name) is not None:
            unexpected.append(key)
    copies = {}
    # A tied parameter may be stored under either name, or both: the entry has the canonical one.
    for alias, name in find_ties(names.stored_model(model)).items():
        again = pieces.pop(alias, None)
        if again is not None and name not in pieces:
            pieces[name] = again
        elif again is not None and names.inner(name) is not None:
            copies |= {key: pieces[name][0][0] for key, _ in again}
    found = []
    for outer, its_pieces in pieces.items():
        inner = names.inner(outer)
        if inner is None:
            continue
        sources = {key: stored[key] for key, _ in its_pieces}
        (first, pattern), *_ = its_pieces
        made = {inner}
        convert = None
        if pattern is not None:
            converter = by_pattern[pattern]
            # A converter's patterns are about a layer's tensors: their names may begin as those of a text part.
            one, *more = converter.target_patterns
            made |= {inner.replace(one, other) for other in more} & shapes.keys()
            convert = partial(_to_model, skeleton, converter, outer, its_pieces)
        dtype = stored[first].dtype
        forms = {name: torch.empty(shapes[name], dtype=dtype, device="meta") for name in sorted(made)}
        found.append(WeightEntry(sources, forms, convert))
    used = {*copies, *(key for entry in found for key in entry.sources)}
    return FileNamesMatch(found, copies, unexpected, [key for key in stored if key not in used])


def _to_model(
    model: PreTrainedModel,
    converter: WeightConverter,
    name: str,
    pieces: Iterable[tuple[str, str | None]],
    tensors: dict[str, Tensor],
) -> dict[str, Tensor]:
    """Convert the stored ``tensors`` that make one tensor of a model, or several; the dict is empty afterwards.

    Args:
        name: of the first of them in the model of the files.
        pieces: stored names, each with the pattern of the converter that it matches.
    """
    converter = copy.deepcopy(converter)
    names = weights_of(model).names
    stored_model: Any = names.stored_model(model)
    add: Any = converter.add_tensor  # typed for loading, where tensors are futures
    for key, pattern in pieces:
        add(name, key, pattern or key, tensors.pop(key))
    found: Any = converter.convert(name, model=stored_model, config=stored_model.config)
    return {str(names.inner(one)): value[0] if isinstance(value, list) else value for one, value in found.items()}


def to_file_names(model: PreTrainedModel | None, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A group of tensors, named and converted as `save_pretrained` writes them.

    Args:
        model: of its own class, not `fully_shard`'s (`build_skeleton` gives one); None: nothing is converted.
        tensors: by the model's names; a group that can be converted by itself (see
            `fsdp2kit.weights.entries.grouped_entries`).
    """
    if model is None:
        return tensors
    names = weights_of(model).names
    outer = {str(names.outer(name)): tensor for name, tensor in tensors.items()}
    return revert_weight_conversion(names.stored_model(model), outer)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key in which expert 10 follows expert 9; converters stack pieces in this order."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]
