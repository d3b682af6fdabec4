"""From a sharded model in memory to a Hugging Face directory: how your own training loop saves a model.

The plan, the files and their publication are those of a checkpoint's export (`fsdp2kit.checkpoint.hf`); only the
tensors come from memory. Each rank writes some of the files, all ranks at the same time. For each file in turn, all
ranks cast their shards and gather the next tensors, and the file's writer keeps them. So a rank holds no more than
three tensors (or groups of tensors that transformers stores in other pieces) beside the model.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fsdp2kit.checkpoint.carried import TensorReader, beside_carried
from fsdp2kit.checkpoint.export_directory import ExportDirectory
from fsdp2kit.checkpoint.hf import (
    MAX_SHARD_BYTES,
    ExportPlan,
    check_dtype,
    exporting,
    plan_adapter_file,
    plan_files,
    tensors_of,
)
from fsdp2kit.checkpoint.reader import in_blocks
from fsdp2kit.checkpoint.safetensors_file import file_size, write_safetensors
from fsdp2kit.checkpoint.state import model_tensors
from fsdp2kit.checkpoint.store import check_writable, is_remote, to_path
from fsdp2kit.console import progress_bar, say
from fsdp2kit.errors import UserError
from fsdp2kit.job import distributed
from fsdp2kit.job.distributed import agree, agreement, sharded_like
from fsdp2kit.model.adapters import adapter_of
from fsdp2kit.model.assets import save_assets
from fsdp2kit.model.build import ModelSource, source_of
from fsdp2kit.model.names import build_skeleton, own_class
from fsdp2kit.model.stored import read_carried
from fsdp2kit.model.tokenizer import turn_ends


def export_model(
    model: PreTrainedModel,
    out: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: str | torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a model as a Hugging Face directory, which `from_pretrained` loads. Collective: every rank calls it.

    It holds weights, config and generation config, and with a tokenizer its files; what was not changed is as the
    model's and the tokenizer's own directories have it. It is written beside ``out``,
    checked, and moved there whole. A model with adapters gives what peft would write: the adapter alone.

    Args:
        model: as `build_model` and `parallelize_model` made it, with its values; unchanged, but units that a
            forward left gathered are freed.
        out: a directory, or a URL that fsspec knows, which all ranks reach; only an export is ever replaced.
        tokenizer: what ends an answer in its chat template also ends generation.
        dtype: float32, bfloat16 or float16, of floating-point tensors, as torch's dtype or its name. Default: that of
            the model it was built from; float32 for adapters and for a model from a config alone.
        max_shard_bytes: largest file, unless a single tensor is larger.

    Raises:
        UserError: ``out`` cannot be written, holds something else than an export, or is where the model came from; a
            dtype that is none of these; transformers cannot convert the architecture in parts.
        RunFailure: a file was not written whole, or another rank failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        with agreement():
            source = _source(model)
            tensors = model_tensors(model)
            name = None if dtype is None else str(dtype).removeprefix("torch.")
            plan = _plan(model, source, tensors, to_path(out), Path(folder), name, max_shard_bytes)
            if not is_remote(plan.out.path):
                check_writable(plan.out.path.parent, where="export_model")
            if distributed.rank() == 0:
                notes = save_assets(
                    Path(folder),
                    config=source.config,
                    architecture=own_class(model).__name__,
                    tokenizer=tokenizer,
                    source=source.directory,
                    stops=turn_ends(tokenizer) if tokenizer is not None else (),
                    adapter=adapter_of(model),
                    whole=source.whole,
                )
                for note in notes:
                    say(note)
        with exporting(plan), torch.no_grad():
            _write_files(plan, tensors)


def _source(model: PreTrainedModel) -> ModelSource:
    try:
        return source_of(model)
    except KeyError:
        what = f"this {type(model).__name__} does not say where it comes from"
        raise UserError("export_model", what, "build it with fsdp2kit.model.build.build_model") from None


def _plan(
    model: PreTrainedModel,
    source: ModelSource,
    tensors: Mapping[str, Tensor],
    out: Path,
    config_dir: Path,
    dtype: str | None,
    max_shard_bytes: int,
) -> ExportPlan:
    """What goes into which file; the same on every rank."""
    dtype = dtype or source.dtype
    check_dtype(dtype)
    directory, adapter = ExportDirectory(out.absolute()), adapter_of(model)
    directory.check_replaceable(read=[source.directory, adapter.directory if adapter is not None else None])
    shapes = {name: (name, torch.empty(one.shape, dtype=one.dtype, device="meta")) for name, one in tensors.items()}
    skeleton = build_skeleton(model)
    if adapter is None:
        carried = None if source.whole is None or source.directory is None else read_carried(model, source.directory)
        files = plan_files(shapes, skeleton, dtype, max_shard_bytes, carried=carried)
        return ExportPlan(None, directory, config_dir, dtype, files, manifest=None, model=skeleton, carried=carried)
    adapted = skeleton if adapter.expert_leaves else None
    files = plan_adapter_file(shapes, dtype, skeleton, adapted)
    return ExportPlan(None, directory, config_dir, dtype, files, manifest=None, model=None, adapted=adapted)


def _write_files(plan: ExportPlan, tensors: Mapping[str, Tensor]) -> None:
    """Write every file of the plan into ``plan.out.staging``, each on one rank. Collective."""
    rank, world_size = distributed.rank(), distributed.world_size()
    files, problem = list(plan.files), None
    size = sum(file_size(plan.forms(file)) for file in files[rank::world_size])
    with progress_bar("exporting", total=size) as bar:
        for start in range(0, len(files), world_size):
            turn = files[start : start + world_size]
            mine = turn[rank] if rank < len(turn) and problem is None else None
            gathered = _gather(plan, tensors, turn, mine)
            try:
                if mine is not None:
                    with _reader(plan, gathered) as reader:
                        blocks = tensors_of(plan, mine, reader)
                        write_safetensors(plan.out.staging / mine, plan.forms(mine), blocks, advance=bar.advance)
            except Exception as error:  # a full disk, say
                problem = error
            try:
                for _ in gathered:  # what the others write also needs this rank's shards
                    pass
            except Exception as error:
                problem = problem or error
    agree(problem)


@contextlib.contextmanager
def _reader(plan: ExportPlan, gathered: Iterator[dict[str, Tensor]]) -> Iterator[TensorReader]:
    if plan.carried is None:
        yield _Gathered(gathered)
    else:
        with beside_carried(plan.carried, _Gathered(gathered)) as reader:
            yield reader


def _gather(
    plan: ExportPlan, tensors: Mapping[str, Tensor], turn: Sequence[str], mine: str | None
) -> Iterator[dict[str, Tensor]]:
    """The groups of file ``mine``, one after the other: whole tensors by key, on the CPU. Collective.

    Args:
        turn: the files that are written at the same time. All ranks go through the groups of all of them together.
    """
    problem: Exception | None = None
    for number in range(max(len(plan.files[file]) for file in turn)):
        kept = None
        for file in turn:
            if number < len(plan.files[file]):
                group = plan.files[file][number]
                dtypes = {form.dtype for form in group.forms.values()}
                # The writer casts to float16, since it looks whether that holds all values.
                dtype = dtypes.pop() if len(dtypes) == 1 and torch.float16 not in dtypes else None
                # What is carried over is read from a file, by the writer alone.
                whole = {key: _whole(tensors[key], dtype) for key in group.keys.values() if key in tensors}
                if whole and file == mine and problem is None:
                    try:
                        kept = {key: tensor.cpu() for key, tensor in whole.items()}
                    except Exception as error:  # no memory, say
                        problem = error
                del whole
        if kept is not None:
            yield kept
    if problem is not None:
        raise problem


def _whole(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A tensor that is sharded as a whole one, cast on its shards to ``dtype``, if there is one."""
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor.to_local().to(tensor.device_mesh.device_type, dtype or tensor.dtype)  # offloaded ones go there, too
    gathered = sharded_like(tensor, local)
    return gathered.full_tensor() if isinstance(gathered, DTensor) else gathered


class _Gathered:
    """The tensors of a file, read in the order of its plan."""

    def __init__(self, groups: Iterator[dict[str, Tensor]]) -> None:
        self._groups = groups
        self._held: dict[str, Tensor] = {}

    def read(self, key: str) -> Tensor:
        if key not in self._held:
            self._held = next(self._groups)
        return self._held.pop(key)

    def blocks(self, key: str) -> Iterator[Tensor]:
        yield from in_blocks(self.read(key))
