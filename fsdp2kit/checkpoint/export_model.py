"""From a sharded model in memory to a Hugging Face directory: how your own training loop saves a model.

The plan and the directory are those of a checkpoint's export (`fsdp2kit.checkpoint.export_plan`,
`fsdp2kit.checkpoint.export_directory`); only the tensors come from memory. Each rank writes some of the files, all
ranks at the same time. For each file in turn, all ranks cast their shards and gather the next tensors, and the file's
writer keeps them. So a rank holds no more than three tensors (or groups of tensors that transformers stores in other
pieces) beside the model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fsdp2kit.checkpoint.export_directory import ExportDirectory
from fsdp2kit.checkpoint.export_plan import (
    MAX_SHARD_BYTES,
    ExportFile,
    ExportPlan,
    choose_dtype,
    into_files,
)
from fsdp2kit.checkpoint.state import model_tensors
from fsdp2kit.console import progress_bar, say
from fsdp2kit.errors import UserError
from fsdp2kit.files.remote import to_path
from fsdp2kit.job import distributed
from fsdp2kit.job.distributed import agree, agreement
from fsdp2kit.model.assets import save_assets
from fsdp2kit.model.tokenizer import turn_ends
from fsdp2kit.weights.adapters import WEIGHTS_NAME
from fsdp2kit.weights.entries import adapter_entries, entries
from fsdp2kit.weights.gathered import GatheredTensors, gather
from fsdp2kit.weights.modules import build_skeleton
from fsdp2kit.weights.record import ModelSource, own_class, weights_of
from fsdp2kit.weights.safetensors_file import write_safetensors
from fsdp2kit.weights.transfer import transfer


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
            plan = _plan(model, source, tensors, Path(folder), name, max_shard_bytes)
            directory = ExportDirectory(to_path(out).absolute())
            directory.check_writable(where="export_model")
            notes = []
            if distributed.rank() == 0:
                notes = save_assets(
                    Path(folder),
                    config=source.config,
                    architecture=own_class(model).__name__,
                    tokenizer=tokenizer,
                    source=source.directory,
                    stops=turn_ends(tokenizer) if tokenizer is not None else (),
                    adapter=weights_of(model).adapter,
                    whole=source.whole,
                )
        with directory.replaced(plan) as staging, torch.no_grad():
            for note in notes:
                say(note)
            _write_files(plan, tensors, staging)


def _source(model: PreTrainedModel) -> ModelSource:
    source = weights_of(model).source
    if source is None:
        what = f"this {type(model).__name__} does not say where it comes from"
        raise UserError("export_model", what, "build it with fsdp2kit.model.build.build_model")
    return source


def _plan(
    model: PreTrainedModel,
    source: ModelSource,
    tensors: Mapping[str, Tensor],
    config_dir: Path,
    dtype: str | None,
    max_shard_bytes: int,
) -> ExportPlan:
    """What goes into which file; the same on every rank."""
    chosen = choose_dtype(dtype, [(source.dtype, "which the model was built from")])
    weights = weights_of(model)
    adapter = weights.adapter
    skeleton = build_skeleton(model)
    if adapter is not None:
        found = adapter_entries(skeleton, tensors, chosen.torch, one_by_one=bool(adapter.expert_leaves))
        files = {WEIGHTS_NAME: ExportFile(found)}
        return ExportPlan(config_dir, chosen, files, is_adapter=True, read=[source.directory, adapter.directory])
    parts = source.directory if weights.names.whole is not None else None
    files = into_files(entries(skeleton, tensors, chosen.torch, parts=parts), max_shard_bytes)
    return ExportPlan(config_dir, chosen, files, model=skeleton, read=[source.directory])


def _write_files(plan: ExportPlan, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write every file of the plan into a folder, each on one rank. Collective."""
    rank = distributed.rank()
    world_size = distributed.world_size()
    files = list(plan.files)
    problem = None
    size = sum(plan.files[file].size for file in files[rank::world_size])
    with progress_bar("exporting", total=size) as bar:
        for start in range(0, len(files), world_size):
            turn = files[start : start + world_size]
            mine = turn[rank] if rank < len(turn) and problem is None else None
            gathered = gather({file: plan.files[file].entries for file in turn}, tensors, mine)
            try:
                if mine is not None:
                    sink = partial(write_safetensors, folder / mine, advance=bar.advance)
                    transfer(plan.files[mine].entries, GatheredTensors(gathered), sink)
            except Exception as error:  # a full disk, say
                problem = error
            try:
                for _ in gathered:  # what the others write also needs this rank's shards
                    pass
            except Exception as error:
                problem = problem or error
    agree(problem)
