"""Values for a sharded model: streamed out of safetensors, or random.

Every rank reads only the rows of its shards, through the files' memory maps, straight into the shards: nothing is
gathered or sent, and at most one tensor's rows live beside the shards. An embedding with new tokens is read whole, in
blocks, for the mean of its rows. `names` says which stored tensors make a tensor of the model.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from fsdp2kit.console import progress_bar
from fsdp2kit.errors import UserError
from fsdp2kit.job.distributed import local_part, sharded_like
from fsdp2kit.model.adapters import WEIGHTS_NAME as ADAPTER_WEIGHTS
from fsdp2kit.model.adapters import adapter_of
from fsdp2kit.model.build import source_of
from fsdp2kit.model.expert_adapters import adapter_files, from_adapter_files
from fsdp2kit.model.names import (
    ADAPTER,
    Source,
    adapter_file_name,
    base_module,
    base_tensors,
    build_skeleton,
    find_sources,
    is_of_adapter,
    nf4_weights,
    tied_names,
    whole_of,
)
from fsdp2kit.model.nf4 import NF4Linear
from fsdp2kit.model.stored import open_safetensors, safetensors_files
from fsdp2kit.torch_compat import local_slices, tree_leaves

_BLOCK = 1 << 22  # elements


def load_pretrained(
    model: PreTrainedModel, directory: str | Path | None = None, *, allow_unexpected: bool = False, seed: int = 0
) -> None:
    """Fill a materialised (sharded) model from the safetensors of a Hugging Face directory, in place.

    Adapters on it get the values of ``model.adapter``, or peft's first ones. Collective where there are adapters.

    Args:
        model: parameters and persistent buffers are DTensors or plain tensors of any floating-point dtype.
        directory: holds ``model.safetensors``, or several files with their index. Default: that of the ``model.path``
            from which `build_model` made it.
        allow_unexpected: accept tensors in the files that the model has no use for (a cut depth, say).
        seed: of the adapters' first values.

    Raises:
        UserError: no, missing, truncated or corrupt files; missing or unexpected tensors; wrong shapes.
    """
    if directory is None and (directory := source_of(model).directory) is None:
        raise UserError("load_pretrained", "the model comes from a config alone", "give a directory, or initialize it")
    directory = Path(directory)
    targets = base_tensors(model)  # they share storage with the parameters and buffers
    quantized = nf4_weights(model)
    skeleton = build_skeleton(model)  # conversions look names up in it
    shapes = {name: tensor.shape for name, tensor in skeleton.state_dict().items()}
    grown, new = grown_tensors(model)
    size = sum(local_part(targets[name][0]).nbytes for name in targets.keys() - tied_names(model).keys())
    paths = safetensors_files(directory)
    with open_safetensors(paths) as slices, progress_bar("reading weights", total=size) as bar:
        for source in _checked_sources(model, directory, slices, allow_unexpected=allow_unexpected):
            for name, value in source.tensors(skeleton, slices):
                where = f"{directory}: {source.name}"
                stored = grown.get(name)
                _check_shape(value, shapes[name] if stored is None else stored, where=where)
                try:
                    for target in targets[name]:
                        if name in quantized:
                            quantized[name](value)
                        elif stored is None:
                            _copy_part(target, value)
                        else:
                            fill_vocabulary(target, _row_blocks(value, stored), new_tokens=new)
                except SafetensorError as error:
                    raise UserError(where, f"cannot be read ({error})", "fetch the file again") from None
                bar.advance(local_part(targets[name][0]).nbytes)
    fill_adapter(model, seed=seed)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the model that is stored in a Hugging Face directory, not yet read."""

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], Tensor]


@contextlib.contextmanager
def open_pretrained(
    model: PreTrainedModel, directory: str | Path, *, allow_unexpected: bool = False, grow: bool = False
) -> Iterator[dict[str, StoredTensor]]:
    """Every tensor of the model by name, a tied one once, in the files' dtypes; readable while the context is open.

    Args:
        model: may be on meta.
        allow_unexpected: as for `load_pretrained`.
        grow: the model's embedding and head may have more rows than the files; these are the mean of the others.
    """
    directory, ends = Path(directory), vocabulary_tensors(model)
    with open_safetensors(safetensors_files(directory)) as slices:
        shapes, found = {name: tensor.shape for name, tensor in model.state_dict().items()}, {}

        def read(source: Source, name: str) -> Tensor:
            tensor = dict(source.tensors(model, slices))[name][...]
            if grow and name in ends and len(tensor) < (rows := shapes[name][0]):
                grown = tensor.new_empty(rows, *tensor.shape[1:])
                fill_vocabulary(grown, [tensor], new_tokens=range(len(tensor), rows))
                tensor = grown
            _check_shape(tensor, shapes[name], where=f"{directory}: {name}")
            return tensor

        for source in _checked_sources(model, directory, slices, allow_unexpected=allow_unexpected):
            piece = slices[source.stored[0][0]]
            dtype = piece[:0].dtype if piece.get_shape() else piece[...].dtype
            for name in sorted(source.targets(shapes)):
                found[name] = StoredTensor(shapes[name], dtype, partial(read, source, name))
        yield found


def load_adapter(model: PreTrainedModel, directory: str | Path) -> None:
    """Fill the adapters of a materialised (sharded) model from peft's ``adapter_model.safetensors``, in place."""
    # By name, not by `requires_grad`: a frozen copy of the model has adapters, too.
    targets = {name: tensor for name, tensor in model.named_parameters() if is_of_adapter(name)}
    skeleton = build_skeleton(model)
    path, todo = Path(directory) / ADAPTER_WEIGHTS, "give an adapter that was trained on this very model"
    if not path.is_file():
        raise UserError("model.adapter", f"{directory} has no {ADAPTER_WEIGHTS}", todo)
    with open_safetensors([path]) as slices:
        # Factors of experts are all in one tensor, as peft writes them, or in one each.
        files = {name: _adapter_files(skeleton, name, target, slices) for name, target in targets.items()}
        wanted = {file: shape for shapes in files.values() for file, shape in shapes.items()}
        for where, names in (("the model", wanted.keys() - slices), ("the adapter", slices.keys() - wanted)):
            if names:
                raise UserError("model.adapter", f"{_some(sorted(names))} only in {where} ({path})", todo)
        for file, expected in wanted.items():
            if (shape := slices[file].get_shape()) != list(expected):
                what = f"{path}: {file} has shape {shape}, and the model wants {list(expected)}"
                raise UserError("model.adapter", what, todo)
        for name, target in targets.items():
            stored = slices.get(adapter_file_name(name, skeleton))
            if stored is None:
                stored = from_adapter_files(skeleton, name, target.shape, slices)
            _copy_part(target.detach(), stored)


def _adapter_files(
    skeleton: PreTrainedModel, name: str, target: Tensor, stored: Collection[str]
) -> dict[str, torch.Size]:
    """The tensors of an adapter's file that hold one of the model's, by name, with their shapes."""
    if (file := adapter_file_name(name, skeleton)) in stored:
        return {file: target.shape}
    tensors = {name: torch.empty(target.shape, device="meta")}
    return {file: part.shape for file, part in adapter_files(skeleton, tensors).items()}


def _checked_sources(
    model: PreTrainedModel, directory: Path, stored: Mapping[str, Any], *, allow_unexpected: bool
) -> list[Source]:
    """What `find_sources` gives; missing and unexpected tensors are refused, and tied ones that are stored apart.

    Args:
        stored: safetensors slices by name.
    """
    sources, unexpected = find_sources(model, stored)
    targets = base_tensors(model).keys()
    missing = targets - tied_names(model).keys()
    for source in sources:
        missing -= source.targets(targets)
    kind = type(model).__name__
    if missing:
        what = f"{_some(sorted(missing))} not in its safetensors"
        raise UserError(str(directory), what, f"is it a checkpoint of {kind}, and whole?")
    ignored = [r"rotary_emb\.inv_freq", *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or [])]
    unexpected = [name for name in unexpected if not any(re.search(pattern, name) for pattern in ignored)]
    # A text part's layers that are not run would be carried over as they are.
    if unexpected and (not allow_unexpected or whole_of(model) is not None):
        what = f"{_some(unexpected)} in its safetensors and unknown to {kind}"
        todo = "is it a checkpoint of this architecture? A shallower model needs model.config.num_hidden_layers"
        raise UserError(str(directory), what, todo)
    for source in sources:
        for copy in source.copies:
            _check_same(stored, source.stored[0][0], copy, where=str(directory))
    return sources


def _check_same(stored: Mapping[str, Any], one: str, other: str, *, where: str) -> None:
    """Refuse two tensors that differ and would become one. transformers then unties them, with a warning."""
    shapes = [torch.Size(stored[name].get_shape()) for name in (one, other)]
    pairs = zip(*(_row_blocks(stored[name], shapes[0]) for name in (one, other)), strict=True)
    if shapes[0] != shapes[1] or not all(torch.equal(first.float(), second.float()) for first, second in pairs):
        what = f"{one} and {other} differ, and the model's config makes them one tensor"
        todo = "set model.config.tie_word_embeddings = false to train both, or drop the one that is not meant"
        raise UserError(where, what, todo)


def _check_shape(stored: Any, wanted: torch.Size, *, where: str) -> None:
    """`stored` is a tensor or a safetensors slice."""
    shape = list(stored.get_shape() if hasattr(stored, "get_shape") else stored.shape)
    if shape != list(wanted):
        what = f"stored with shape {shape}, but the model wants {list(wanted)}"
        raise UserError(where, what, "check model.config overrides against the model's config.json")


@torch.no_grad()
def _copy_part(target: Tensor, source: Any) -> None:
    """Copy into ``target`` the part of ``source`` (whole, sliceable) that this rank holds, converting its dtype."""
    local = local_part(target)
    if local.numel():
        part = local_slices(target)
        stored = source[part] if part else source[...]
        # `copy_` converts on the device: 16 bits that become float32 are half the bytes to send.
        local.copy_(stored.to(local.device))


def grown_tensors(model: PreTrainedModel) -> tuple[dict[str, torch.Size], tuple[int, ...]]:
    """Stored shapes of the embedding's and the head's tensors by name, and new tokens' ids; both empty without any."""
    source = vars(model).get("_fsdp2kit_source")
    if source is None or not source.new_tokens:
        return {}, ()
    tensors = vocabulary_tensors(model)
    shapes = {name: torch.Size((source.stored_vocab, *tensor.shape[1:])) for name, tensor in tensors.items()}
    return shapes, source.new_tokens


def vocabulary_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of the embedding and the head by each of their names in the model without adapters."""
    ends = [id(module) for module in (model.get_input_embeddings(), model.get_output_embeddings())]
    return {
        f"{name}.{key}": tensor
        for name, module in model.named_modules(remove_duplicate=False)
        if id(module) in ends
        # Beside adapters a module may be wrapped, with a copy of it that is trained.
        for key, tensor in getattr(module, "original_module", module).named_parameters(recurse=False)
    }


@torch.no_grad()
def fill_vocabulary(target: Tensor, blocks: Iterable[Tensor], *, new_tokens: Sequence[int]) -> None:
    """Fill this rank's rows of an embedding or a head: stored ones as they are, new tokens' with the others' mean.

    A new token may have a stored row: vocabularies are padded. Every rank reads all blocks, one at a time.

    Args:
        target: ``[vocabulary, …]``.
        blocks: the stored tensor's rows, in order, some at a time.
        new_tokens: their ids; every row of the target that is not stored is one of them.
    """
    local, (rows, *others) = local_part(target), local_slices(target)
    total, count, start = torch.zeros(target.shape[1:], dtype=torch.float64), 0, 0
    for block in blocks:
        stop = start + len(block)
        first, last = max(start, rows.start), min(stop, rows.stop)
        if first < last:
            local[first - rows.start : last - rows.start].copy_(block[(slice(first - start, last - start), *others)])
        excluded = [token - start for token in new_tokens if start <= token < stop]
        total += block.sum(0, dtype=torch.float64) - block[excluded].sum(0, dtype=torch.float64)
        count, start = count + len(block) - len(excluded), stop
    for token in new_tokens:
        if rows.start <= token < rows.stop:
            local[token - rows.start].copy_((total / count)[tuple(others)])


def _row_blocks(source: Any, shape: torch.Size) -> Iterator[Tensor]:
    """The rows of something sliceable, at most 4 Mi elements at a time."""
    size = max(1, _BLOCK // max(1, math.prod(shape[1:])))
    return (source[start : start + size] for start in range(0, shape[0], size))


def _some(names: list[str]) -> str:
    """ "a is", or "a, b, c and 2 more are"."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more} {'is' if len(names) == 1 else 'are'}"


# Random values, as functions of (seed, module name)


def initialize(model: PreTrainedModel, *, seed: int) -> None:
    """Fill a materialised (sharded) model, and adapters on it, with values that depend on the seed and on names alone.

    The distribution is the model's own (``_init_weights``), the same on any mesh. Every rank calls it with the
    same seed.
    """
    # transformers calls ``_init_weights`` on every module, children first. What a call changes depends on the
    # architecture: the module's tensors, its children's (ModernBERT), even all of the model's. So the calls get a
    # skeleton on meta instead of the sharded model. Its parts are made real in turn, whole, on the CPU, and every rank
    # copies its shards. A part is a module's own tensors if no other call changes them, otherwise the smallest module
    # that holds everything its calls change.
    skeleton, targets, quantized = build_skeleton(model), base_tensors(model), nf4_weights(model)
    wanted = targets.keys() - tied_names(model).keys()
    calls = list(_init_calls(skeleton, "", skeleton, set()))
    for name, recurse in _parts(skeleton, calls):
        part, prefix = skeleton.get_submodule(name), name and f"{name}."
        if wanted.isdisjoint(_tensors_of(part, prefix, recurse=recurse)):  # a tied parameter's other name
            continue
        # NaN shows what an initialisation leaves out.
        part._apply(_unset, recurse=recurse)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for call in calls:
                if call.name == name or (recurse and call.name.startswith(prefix)):
                    _seed_by_name(seed, call.name)
                    call.owner._init_weights(call.module)
        values = _tensors_of(part, prefix, recurse=recurse)
        for key in sorted(wanted & values.keys()):
            if values[key].isnan().any():
                what = f'"random", but the initialisation of {type(skeleton).__name__} leaves {key} out'
                raise UserError("model.weights", what, "start from a checkpoint of this architecture")
            if key in quantized:
                quantized[key](values[key])
                continue
            for target in targets[key]:
                _copy_part(target, values[key])
        done = {id(value) for value in values.values()}
        part._apply(lambda tensor, done=done: tensor.to("meta") if id(tensor) in done else tensor, recurse=recurse)
    fill_adapter(model, seed=seed)


def _seed_by_name(seed: int, name: str) -> None:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _tensors_of(part: nn.Module, prefix: str, *, recurse: bool) -> dict[str, Tensor]:
    """A module's parameters and persistent buffers, or only its own, by their names in the model."""
    tensors = part.state_dict(prefix=prefix, keep_vars=True)
    return {name: tensor for name, tensor in tensors.items() if recurse or "." not in name.removeprefix(prefix)}


def _unset(tensor: Tensor) -> Tensor:
    """A tensor on meta becomes a real one, of NaN; others stay."""
    if not tensor.is_meta:
        return tensor
    return torch.full(tensor.shape, math.nan if tensor.is_floating_point() else 0, dtype=tensor.dtype)


@torch.no_grad()
def fill_adapter(model: PreTrainedModel, *, seed: int) -> None:
    """Give the adapters of a materialised (sharded) model their first values; without adapters do nothing.

    The values are those of ``model.adapter``, or peft's initialisation of each layer, which depends on the seed and
    the layer's name alone, and for DoRA the lengths of the weight's rows. The model must have its weights. Collective.
    """
    adapter, tensors = adapter_of(model), model.state_dict()
    if adapter is not None and adapter.directory is not None:
        load_adapter(model, adapter.directory)
        return
    for name in () if adapter is None else adapter.layers:
        layer = build_skeleton(model.get_submodule(name))  # given the layer itself, it keeps the adapter
        for part in (layer.lora_A, layer.lora_B):
            part._apply(_unset)
        with torch.random.fork_rng(devices=[]):
            _seed_by_name(seed, name)
            layer.reset_lora_parameters(ADAPTER, True)
        for part in ("lora_A", "lora_B"):
            key = f"{part}.{ADAPTER}.weight"
            _copy_part(tensors[f"{name}.{key}"], layer.get_parameter(key))
        lengths = tensors.get(f"{name}.lora_magnitude_vector.{ADAPTER}.weight")
        if lengths is not None:
            _copy_part(lengths, _row_lengths(base_module(model.get_submodule(name))))


def _row_lengths(layer: Any) -> Tensor:
    """The lengths of all rows of a linear layer's stored weight, float32 ``[out]``. Collective."""
    packs = isinstance(layer, NF4Linear)
    stored = layer.nf4 if packs else layer.weight
    local = local_part(stored)
    rows, together = (layer.unpack(local), layer.layout.together) if packs else (local, 1)
    lengths = torch.linalg.norm(rows.float(), dim=1).view(len(local), together)
    found: Any = sharded_like(stored, lengths, torch.Size((len(stored), together)))
    whole = found.full_tensor() if isinstance(found, DTensor) else found
    return whole.flatten()[: layer.out_features]


class _InitCall(NamedTuple):
    """One call of ``_init_weights``."""

    name: str
    """The name of the module; it seeds the call."""
    module: nn.Module
    owner: PreTrainedModel
    """The innermost model around the module; its ``_init_weights`` is the one to call."""


def _init_calls(module: nn.Module, name: str, owner: PreTrainedModel, seen: set[nn.Module]) -> Iterator[_InitCall]:
    """Every module in the order in which transformers initialises them: children first."""
    if module in seen:
        return
    seen.add(module)
    for key, child in module.named_children():
        of_child = child if isinstance(child, PreTrainedModel) else owner
        yield from _init_calls(child, f"{name}.{key}" if name else key, of_child, seen)
    yield _InitCall(name, module, owner)


class _Touched(TorchFunctionMode):
    """Notes every tensor that is an argument of a torch function.

    Functions are noted, not operations: torch's truncated normal runs none on a tensor on meta. A write through a view
    is noted when the view is made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ids.update(id(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor))
        return func(*args, **(kwargs or {}))


def _parts(skeleton: PreTrainedModel, calls: list[_InitCall]) -> list[tuple[str, bool]]:
    """The parts of `initialize`: names of modules, and whether a part has the modules inside it, too."""
    tensors = skeleton.state_dict(keep_vars=True)
    owners = {id(tensor): name.rpartition(".")[0] for name, tensor in tensors.items()}
    with_own, whole, own = set(owners.values()), set(), set()
    for call in calls:
        # transformers has already initialised this model on meta, so this cannot fail.
        with torch.random.fork_rng(devices=[]), torch.no_grad(), _Touched() as record:
            call.owner._init_weights(call.module)
        touched = {owners[tensor] for tensor in record.ids & owners.keys()}
        # A call may also replace its module's own tensors, which no record shows.
        if touched or call.name in with_own:
            paths = [name.replace(".", "/") for name in (call.name, *touched)]
            (whole if touched - {call.name} else own).add(PurePosixPath(os.path.commonpath(paths)))
    parts = [(part, True) for part in whole if whole.isdisjoint(part.parents)]
    parts += [(part, False) for part in own if whole.isdisjoint([part, *part.parents])]
    return [(".".join(part.parts), recurse) for part, recurse in sorted(parts)]
