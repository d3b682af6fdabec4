"""Values for a sharded model: streamed out of safetensors, or drawn from (seed, name).

Every rank reads by itself just the rows that its shards hold, through the files' memory maps, straight into the
shards; nothing is gathered or sent, and no more than one tensor's rows live beside the shards at any time.
Where transformers stores a model under other names or in other pieces than it runs it (fused experts), its own
conversion mapping is applied, one target tensor at a time.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from fsdp2kit.config.schema import ModelConfig
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import tied_names
from fsdp2kit.model.folder import SafetensorsFolder
from fsdp2kit.model.random_init import build_skeleton, draw
from fsdp2kit.torch_compat import local_slices


def find_model_dir(section: ModelConfig) -> Path | None:
    """The local directory of ``model.path``; a hub id's safetensors and small files are fetched into the cache.

    Returns:
        None where the model starts from a config alone.

    Raises:
        UserError: neither a directory nor a hub model that can be fetched.
    """
    path = section.path
    if path is None or Path(path).is_dir():
        return None if path is None else Path(path)
    if Path(path).is_absolute():
        raise UserError("model.path", f"{path} is not a directory", "check the path")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.jinja", "*.model", "*.txt"]
    if section.weights == "pretrained":
        patterns.append("*.safetensors")
    try:
        return Path(snapshot_download(path, allow_patterns=patterns))
    except Exception as error:  # the hub client raises errors of many kinds; each means: not to be had
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError("model.path", f"{path}: {reason}", "check the path, or the hub id and your access") from None


def load_pretrained(model: PreTrainedModel, directory: Path, *, allow_unexpected: bool = False) -> None:
    """Fill a materialised (sharded) model from the safetensors of a Hugging Face directory, in place.

    Args:
        model: parameters and persistent buffers are DTensors or plain tensors of any floating-point dtype.
        directory: holds ``model.safetensors``, or several files with their index.
        allow_unexpected: accept tensors in the files that the model has no place for (a cut depth, say).

    Raises:
        UserError: no, missing, truncated or corrupt files; missing or unexpected tensors; wrong shapes.
    """
    with SafetensorsFolder(directory) as folder:
        plan = _plan(model, folder, allow_unexpected=allow_unexpected)
        for name, source in plan.items():
            for target_name, read in source.resolve(name, model):
                _fill(model, target_name, read, where=f"{directory}: {name}")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a Hugging Face directory as the model has it, not yet read."""

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], Tensor]


@contextlib.contextmanager
def open_pretrained(model: PreTrainedModel, directory: Path) -> Iterator[dict[str, StoredTensor]]:
    """Every tensor of the model by name, a tied one once, in the files' dtypes; readable while this lasts.

    Args:
        model: may be on meta.

    Raises:
        UserError: as `load_pretrained`.
    """
    with SafetensorsFolder(directory) as folder:
        targets, found = model.state_dict(), {}
        for name, source in _plan(model, folder, allow_unexpected=False).items():
            for target in sorted(_target_names(name, source, targets)):
                read = partial(_read_target, model, target, name=name, source=source)
                found[target] = StoredTensor(targets[target].shape, source.dtype, read)
        yield found


def _read_target(model: PreTrainedModel, target: str, *, name: str, source: _Source) -> Tensor:
    tensor = dict(source.resolve(name, model))[target][...]
    if tensor.shape != model.state_dict()[target].shape:
        what = (
            f"is stored with shape {list(tensor.shape)}, but the model wants {list(model.state_dict()[target].shape)}"
        )
        raise UserError(target, what, "check the model's config.json")
    return tensor


def initialize(model: PreTrainedModel, *, seed: int) -> None:
    """Draw every parameter and persistent buffer of a materialised model from (seed, its module's name).

    The distribution is the model's own (transformers' ``_init_weights``); the values depend neither on the mesh
    nor on the device: each module is drawn whole on the CPU and every rank keeps its part.

    Raises:
        UserError: the architecture's initialisation leaves a parameter out.
    """
    for name, value in draw(model, seed=seed):
        _copy_part(_tensor_of(model, name), value)


@dataclass
class _Source:
    """Where one target tensor comes from: one stored tensor, or several through a transformers converter."""

    pieces: list[tuple[str, str, Any]] = field(default_factory=list)
    """(stored name, pattern that matched, safetensors slice)"""
    converter: WeightConverter | None = None

    @property
    def dtype(self) -> torch.dtype:
        """As stored."""
        piece = self.pieces[0][2]
        return piece[:0].dtype if piece.get_shape() else piece[...].dtype

    def resolve(self, name: str, model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
        """``(target name, something that can be sliced)``; several targets where a stored tensor is split."""
        if self.converter is None:
            yield name, self.pieces[0][2]
            return
        converter = copy.deepcopy(self.converter)
        for stored, pattern, piece in self.pieces:
            converter.add_tensor(name, stored, pattern, _reader(piece))
        for target, tensor in converter.convert(name, model=model, config=model.config).items():
            yield target, tensor[0] if isinstance(tensor, list) else tensor


def _reader(piece: Any) -> Any:
    return lambda: piece[...]


def _plan(model: PreTrainedModel, folder: SafetensorsFolder, *, allow_unexpected: bool) -> dict[str, _Source]:
    """For every target tensor, in the model's order, the stored tensors that make it."""
    # Some of its entries go by the class's name, which FSDP changes.
    mapping = get_model_conversion_mapping(build_skeleton(model))
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    targets = model.state_dict()
    plan: dict[str, _Source] = {}
    unexpected = []
    for stored in sorted(folder.names(), key=_natural):
        name, pattern = rename_source_key(stored, renamings, converters, model.base_model_prefix, targets)
        if name not in targets and stored in targets:
            name, pattern = stored, None
        if name not in targets:
            unexpected.append(stored)
            continue
        converter = by_pattern[pattern] if pattern is not None else None
        source = plan.setdefault(name, _Source(converter=converter))
        source.pieces.append((stored, pattern or stored, folder.lazy(stored)))
    _resolve_aliases(model, plan)
    produced = {target for name, source in plan.items() for target in _target_names(name, source, targets)}
    _check_names(model, folder.directory, set(targets) - produced, unexpected, allow_unexpected=allow_unexpected)
    return plan


def _target_names(name: str, source: _Source, targets: dict[str, Any]) -> set[str]:
    """All targets a source makes; a converter with several target patterns splits one stored tensor."""
    if source.converter is None or len(source.converter.target_patterns) == 1:
        return {name}
    first = source.converter.target_patterns[0]
    candidates = {name.replace(first, pattern) for pattern in source.converter.target_patterns}
    return {name, *(candidates & set(targets))}


def _resolve_aliases(model: PreTrainedModel, plan: dict[str, _Source]) -> None:
    """A tied parameter may be stored under either name, or both: keep one source, under the canonical name."""
    for alias, name in tied_names(model).items():
        source = plan.pop(alias, None)
        if source is not None:
            plan.setdefault(name, source)


def _check_names(
    model: PreTrainedModel, directory: Path, missing: set[str], unexpected: list[str], *, allow_unexpected: bool
) -> None:
    missing -= set(tied_names(model))
    if missing:
        raise UserError(
            str(directory),
            f"{_some(sorted(missing))} of {type(model).__name__} {_are(missing)} not in its safetensors",
            "is it a checkpoint of this architecture, and whole?",
        )
    ignored = [r"rotary_emb\.inv_freq", *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or [])]
    unexpected = [name for name in unexpected if not any(re.search(pattern, name) for pattern in ignored)]
    if unexpected and not allow_unexpected:
        raise UserError(
            str(directory),
            f"{_some(unexpected)} in its safetensors {_are(unexpected)} unknown to {type(model).__name__}",
            "is it a checkpoint of this architecture? A shallower model needs model.config.num_hidden_layers",
        )


def _fill(model: PreTrainedModel, name: str, source: Any, *, where: str) -> None:
    target = _tensor_of(model, name)
    stored_shape = tuple(source.get_shape()) if hasattr(source, "get_shape") else tuple(source.shape)
    if stored_shape != tuple(target.shape):
        raise UserError(
            where,
            f"stored with shape {list(stored_shape)}, but the model wants {list(target.shape)}",
            "check model.config overrides against the model's config.json",
        )
    try:
        _copy_part(target, source)
    except SafetensorError as error:
        raise UserError(where, f"cannot be read ({error})", "fetch the file again") from None


def _tensor_of(model: nn.Module, name: str) -> Tensor:
    owner, _, attribute = name.rpartition(".")
    return getattr(model.get_submodule(owner), attribute)


@torch.no_grad()
def _copy_part(target: Tensor, source: Any) -> None:
    """Copy into ``target`` the part of ``source`` (whole, sliceable) that this rank holds, converting its dtype."""
    local = target.to_local() if isinstance(target, DTensor) else target
    if local.numel():
        part = local_slices(target)
        local.copy_(source[part] if part else source[...])


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key in which expert 10 follows expert 9; converters stack pieces in this order."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _are(names: Any) -> str:
    return "is" if len(names) == 1 else "are"
