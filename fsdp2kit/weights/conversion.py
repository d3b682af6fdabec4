"""A model's tensors as its modules name them, and as Hugging Face's files do; both ways.

transformers 5 stores some models under other names, or in other pieces, than it runs them (the experts of a mixture
become one fused parameter). Loading applies its conversion mapping one target at a time; exports revert it group by
group, so that no whole model need be in memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import getitem
from typing import Any

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
from fsdp2kit.weights.whole import OWN_NAMES, FileNames


@dataclass
class TensorSource:
    """The stored tensors that make one tensor of a model; or several, where a stored tensor is split."""

    name: str
    """The name of the model's tensor; the first of several."""
    converter: WeightConverter | None
    """transformers' recipe; None where a tensor is at most renamed."""
    stored: list[tuple[str, str]] = field(default_factory=list)
    """Stored name, and the pattern of the converter that it matches."""
    copies: list[str] = field(default_factory=list)
    """Stored names of a tied tensor's second copy."""
    names: FileNames = OWN_NAMES
    """Of the files, by which the recipe names its tensors."""

    def targets(self, names: Iterable[str]) -> set[str]:
        """Those of the model's ``names`` that this makes."""
        if self.converter is None or len(self.converter.target_patterns) == 1:
            return {self.name}
        # A converter's patterns are about a layer's tensors, so that their names may begin as those of a text part.
        first, *_ = patterns = self.converter.target_patterns
        return {self.name, *({self.name.replace(first, pattern) for pattern in patterns} & set(names))}

    def tensors(self, model: PreTrainedModel, slices: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Name in the model and value of each target: something sliceable with a shape, read when it is sliced.

        Args:
            slices: safetensors slices by stored name.
        """
        if self.converter is None:
            yield self.name, slices[self.stored[0][0]]
            return
        converter = copy.deepcopy(self.converter)
        name = str(self.names.outer(self.name))
        model = self.names.stored_model(model)
        for stored, pattern in self.stored:
            read: Any = partial(getitem, slices[stored], ...)
            converter.add_tensor(name, stored, pattern, read)
        for target, tensor in converter.convert(name, model=model, config=model.config).items():
            yield str(self.names.inner(target)), tensor[0] if isinstance(tensor, list) else tensor


def find_sources(model: PreTrainedModel, stored: Iterable[str]) -> tuple[list[TensorSource], list[str]]:
    """What each of the model's tensors is made of, a tied one once; and the stored names that the model does not use.

    The tensors of the other parts, in the files of a text part's whole, are neither.

    Args:
        model: on any device, sharded or not.
        stored: all names in its files.
    """
    names = weights_of(model).names
    found, unexpected = _find_sources(names.stored_model(model), stored)
    for source in found:
        source.name = names.inner(source.name) or ""
        source.names = names
    left = [key for key, name in unexpected.items() if names.inner(name) is not None]
    return [source for source in found if source.name], left


def find_others(model: PreTrainedModel, stored: Iterable[str]) -> list[str]:
    """The names in the files of a text part's whole of all that is not the text part's; a layer it lacks included.

    A tied tensor's second copy is the text part's: it would not follow the first.
    """
    names = weights_of(model).names
    stored = list(stored)
    of_text = [source for source in _find_sources(names.stored_model(model), stored)[0] if names.inner(source.name)]
    used = {key for source in of_text for key in (*(key for key, _ in source.stored), *source.copies)}
    return [key for key in stored if key not in used]


def _find_sources(model: PreTrainedModel, stored: Iterable[str]) -> tuple[list[TensorSource], dict[str, str]]:
    """As `find_sources`, of a model of its own; and the stored names that it does not use, with the names that they
    would have in it."""
    skeleton = build_skeleton(model)  # some entries go by the class, which FSDP changes
    mapping = get_model_conversion_mapping(skeleton)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    targets = skeleton.state_dict()
    found: dict[str, TensorSource] = {}
    unexpected: dict[str, str] = {}
    for key in sorted(stored, key=_natural):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, targets)
        if name not in targets and key in targets:
            name = key
            pattern = None
        if name not in targets:
            unexpected[key] = name
            continue
        source = found.setdefault(name, TensorSource(name, None if pattern is None else by_pattern[pattern]))
        source.stored.append((key, pattern or key))
    # A tied parameter may be stored under either name, or both: one source is kept, under the canonical name.
    for alias, name in find_ties(model).items():
        source = found.pop(alias, None)
        if source is not None and name not in found:
            source.name = name
            found[name] = source
        elif source is not None:
            found[name].copies += [key for key, _ in source.stored]
    return list(found.values()), unexpected


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
