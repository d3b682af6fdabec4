"""What a checkpoint holds: the model's tensors and the optimizer's, listed to be saved, or filled from one.

Everything that is not a tensor is JSON, in the manifest. Whatever is filled is checked first: every name, shape and
dtype.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.optim import Optimizer
from transformers import PreTrainedModel

from fsdp2kit.checkpoint.keys import check_same_names, check_same_state, check_shape, find_weights, start_anew
from fsdp2kit.checkpoint.manifest import check_contents, in_use, read_manifest
from fsdp2kit.checkpoint.reader import SafeReader, StoredTensors, load_tensors
from fsdp2kit.checkpoint.save_plan import BriefFsspecWriter, BriefWriter, SharedSavePlanner
from fsdp2kit.checkpoint.store import is_complete
from fsdp2kit.config.schema import ModelConfig
from fsdp2kit.errors import UserError
from fsdp2kit.files.remote import fsspec_url, to_path
from fsdp2kit.job.distributed import agreement, gather_objects, local_part, rank, sharded_like, world_size
from fsdp2kit.parallel.fsdp import reshard_all
from fsdp2kit.weights.adapter_values import fill_adapter
from fsdp2kit.weights.adapters import holds_factors
from fsdp2kit.weights.initialize import initialize
from fsdp2kit.weights.load import load_pretrained
from fsdp2kit.weights.record import find_ties, source_of, weights_of
from fsdp2kit.weights.shards import fill_vocabulary, grown_tensors


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by Hugging Face name, a tied parameter once, under its first name.

    With adapters, only what is trained, under the names of its modules: the rest is where the model came from.

    The tensors are detached and share the model's storage: loading into them loads the model. Sharded parameters are
    DTensors of the global shape.
    """
    reshard_all(model)
    everything = weights_of(model).adapter is None
    parameters = {name: p.detach() for name, p in model.named_parameters() if everything or p.requires_grad}
    return parameters | persistent_buffers(model)


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that belong to the model's state, by name, detached; none with adapters."""
    saved = model.state_dict().keys() if weights_of(model).adapter is None else ()
    return {name: buffer.detach() for name, buffer in model.named_buffers() if name in saved}


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's state by key ``state.<parameter name>.<field>``, e.g. ``state.lm_head.weight.exp_avg``.

    A quantised moment is two tensors, e.g. ``….exp_avg.codes`` and ``….exp_avg.scale``.
    State that does not exist yet is made first (`initialise_state`). The tensors share the optimizer's storage.
    Hyper-parameters are left out: on resume they come from the config.
    """
    initialise_state(optimizer)
    if not optimizer.state:  # every parameter is frozen
        return {}
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = get_optimizer_state_dict(model, optimizer, options=options)
    state = {key: value for key, value in flat.items() if key.startswith("state.") and isinstance(value, Tensor)}
    return {name: part for key, value in state.items() for name, part in _plain_parts(key, value)}


def _plain_parts(key: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors that ``value`` is made of, by key; they share its storage.

    torchao's 8-bit moments hold codes and a scale a block. Blocks stay within rows (see ``adamw_8bit``), so both have
    the rows of the moment, are sharded as it is, and can be read back onto another mesh. A third tensor in them, what
    the codes stand for, is a constant.
    """
    local: Any = local_part(value)
    if not hasattr(local, "codes"):
        yield key, value
        return
    for name in ("codes", "scale"):
        part = getattr(local, name).view(*local.shape[:-1], -1)
        yield f"{key}.{name}", sharded_like(value, part, torch.Size((*value.shape[:-1], part.shape[-1])))


def initialise_state(optimizer: Optimizer) -> None:
    """Create step-0 state for trainable parameters that have none.

    The optimizer makes it itself, in a step with zero gradients and learning rate 0, whose count is then taken back.
    Parameters, gradients, learning rates and existing state stay as they are. (torch's own initialisation leaves the
    step counts at 1, drops the gradients and does nothing when only some parameters have state.)
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    fresh = {p for p in parameters if p.requires_grad and p not in optimizer.state}
    if not fresh:
        return
    gradients = [parameter.grad for parameter in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter in fresh else None
        for group in optimizer.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        optimizer.step()
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    for parameter in fresh:
        if "step" in optimizer.state[parameter]:  # not every optimizer counts
            optimizer.state[parameter]["step"].zero_()


def check_together(path: str | Path) -> None:
    """Check every byte of a checkpoint against its manifest, each rank its share of the files. Collective.

    The error is the same on every rank, and names the file.
    """
    with agreement():
        path = to_path(path)
        check_contents(path, read_manifest(path), rank=rank(), world_size=world_size())


def save_tensors(
    tensors: Mapping[str, Mapping[str, Tensor]],
    directory: Path,
    *,
    group: dist.ProcessGroup | None = None,
    planner: dcp.SavePlanner | None = None,
    alone: bool = False,
) -> None:
    """Write nested tensors, synced, as DCP does; every rank its own file. Collective over `group` unless `alone`."""
    alone = alone or not dist.is_initialized()
    if planner is None:
        own, count = (0, 1) if alone else (dist.get_rank(group), dist.get_world_size(group))
        planner = SharedSavePlanner(rank=own, world_size=count)
    with warnings.catch_warnings():
        # dcp.save warns when it runs in one process; that is intended here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        url = fsspec_url(directory)
        dcp.save(
            dict(tensors),
            storage_writer=BriefWriter(directory) if url is None else BriefFsspecWriter(url, sync_files=False),
            planner=planner,
            process_group=group,
            no_dist=alone,
        )


def load_all(path: Path, wanted: Mapping[str, Tensor]) -> None:
    """Fill `wanted`, in place, from a checkpoint that holds exactly these tensors; collective."""
    with agreement():
        reader = SafeReader(path)
        stored = reader.stored_tensors()
        check_same_state(path, wanted=set(wanted), stored=set(stored))
        check_same_names(path, wanted=set(wanted), stored=set(stored))
        for key, tensor in wanted.items():
            check_shape(path, key, stored[key].size, tensor.shape)
            if stored[key].properties.dtype != tensor.dtype:
                raise UserError(
                    f"{path}: {key}",
                    f"is {stored[key].properties.dtype} in the checkpoint and {tensor.dtype} in the run",
                    "set fsdp.storage_dtype, fsdp.ignored_modules and (for those) fsdp.param_dtype "
                    f"as they were when that was saved, or {start_anew(path)}",
                )
    load_tensors(reader, wanted)


def fill_weights(section: ModelConfig, model: PreTrainedModel, *, seed: int) -> None:
    """Give a materialised (sharded) model the values that ``model.weights`` names, and its adapters theirs.

    Collective.

    Args:
        seed: for "random", and for adapters.
    """
    if section.weights == "random":
        initialize(model, seed=seed)
    elif section.weights == "pretrained":
        directory = source_of(model).directory
        assert directory is not None, "check_config refuses pretrained weights without a path"
        with agreement():
            # A model that was made shallower than its source leaves some of the source's tensors over.
            load_pretrained(model, directory, allow_unexpected="num_hidden_layers" in section.config, seed=seed)
    else:
        with agreement():
            path = to_path(section.weights)
        load_weights(path, model)
        with agreement():
            fill_adapter(model, seed=seed)


def load_weights(path: str | Path, model: Any) -> None:
    """Fill a model's parameters and persistent buffers from a distributed checkpoint, and read no more. Collective.

    The checkpoint is ours, or plain DCP of a Hugging Face state dict, with or without a ``model.`` before its names.
    Values are cast to the model's dtypes. A tied parameter may be stored under any of its names. Where there is a
    manifest, every byte is first checked against it. A checkpoint without rows for the tokens that a chat template
    adds is completed as `load_pretrained` does; rows that it has are kept.

    Raises:
        UserError: this is no checkpoint, it is damaged, or a tensor is missing, left over, or of another shape; the
            error names the file or the tensor.
        RunFailure: a file cannot be read.
    """
    path = to_path(path)
    with in_use(path):
        if any(gather_objects(is_complete(path))):
            check_together(path)
        tensors = model_tensors(model)
        with agreement():
            reader = SafeReader(path)
            shapes = {key: one.size for key, one in reader.stored_tensors().items()}
            if holds_factors(shapes):
                export = "export it (fsdp2kit convert)"
                todo = f"{export} and give that as model.adapter, or with --merge as model.path"
                raise UserError(str(path), "holds an adapter, and not the model that it belongs to", todo)
            grown, new = grown_tensors(model)
            keys = find_weights(path, shapes, tensors, tied=find_ties(model), smaller=grown)
        as_stored = {name: tensor for name, tensor in tensors.items() if shapes[keys[name]] == tensor.shape}
        load_tensors(reader, {keys[name]: tensor for name, tensor in as_stored.items()})
        with agreement():
            for name in (name for name in tensors if name not in as_stored):
                blocks = _whole_rows(StoredTensors(reader).blocks(keys[name]), grown[name])
                fill_vocabulary(tensors[name], blocks, new_tokens=new)


def _whole_rows(blocks: Iterable[Tensor], shape: torch.Size) -> Iterator[Tensor]:
    """Flat blocks of a tensor as blocks of rows."""
    width = shape[1:].numel()
    rest = torch.empty(0)
    for block in blocks:
        flat = torch.cat([rest.to(block.dtype), block])
        end = len(flat) // width * width
        yield flat[:end].view(-1, *shape[1:])
        rest = flat[end:].clone()
