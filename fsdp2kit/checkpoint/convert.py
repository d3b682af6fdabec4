"""From a distributed checkpoint to a Hugging Face directory, a file at a time, on one process or many.

`plan_export` decides, on every rank alike, which tensors go into which file; `write_shards` writes a rank's files next
to the destination; `publish`, on one rank once all have written, adds the assets and moves the directory into place.
"""

from __future__ import annotations

import contextlib
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from fsdp2kit.checkpoint.assets import copy_assets, describe_weights
from fsdp2kit.checkpoint.conversion import conversion_groups, model_on_meta, to_file_names
from fsdp2kit.checkpoint.export_record import check_replaceable, is_export_of, write_record
from fsdp2kit.checkpoint.files import in_use, sync, sync_tree, write_json
from fsdp2kit.checkpoint.loading import MODEL_PREFIX, check_shape, find_weights
from fsdp2kit.checkpoint.manifest import MANIFEST, Manifest, check_contents, check_sizes, read_manifest
from fsdp2kit.checkpoint.safe_reader import SafeReader, load_tensors
from fsdp2kit.distributed import agreement, gather_objects
from fsdp2kit.errors import RunFailure, UserError
from fsdp2kit.model.build import tied_names

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_SHARD_BYTES = 5 * 10**9
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Group:
    """Tensors that are converted together."""

    keys: dict[str, str]
    """Module name → key in the checkpoint."""
    sizes: dict[str, int]
    """Name in the exported file → bytes."""


@dataclass(frozen=True)
class ExportPlan:
    """What an export will write; the same on every rank."""

    checkpoint: Path
    out: Path
    config_dir: Path
    dtype: str
    files: dict[str, list[Group]]
    """File name → what goes into it."""
    manifest: Manifest | None
    """The checkpoint's; None for one that is not ours."""
    architecture: str | None
    """The model's class; None for one that transformers does not know itself."""

    @property
    def staging(self) -> Path:
        """Where the directory is written before it is moved to `out`."""
        return self.out.with_name(f".{self.out.name}.partial")


def dcp_to_hf(
    checkpoint: Path,
    out: Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    config_dir: Path | None = None,
    rank: int = 0,
    world_size: int = 1,
    group: dist.ProcessGroup | None = None,
    check: bool = True,
) -> None:
    """Write a checkpoint as a Hugging Face directory; no rank holds more than about a file and a tensor in memory.

    With `world_size` > 1 this is a collective of `group`, and every rank writes its share of files.

    Args:
        dtype: of floating-point tensors. Default: the manifest's export dtype, else float32.
        max_shard_bytes: largest file, unless a single tensor is larger.
        config_dir: a Hugging Face directory for config, tokenizer, …. Default: the checkpoint's own ``hf``.
        group: of all ranks. Default: the default group.
        check: compare every byte of the checkpoint with its manifest's checksums, beside the writing.

    Raises:
        UserError: the checkpoint is unusable, does not fit the config, or `out` holds something else than an export.
        RunFailure: a file cannot be read, or a rank's files are not there.
    """
    settle = partial(agreement, group) if world_size > 1 else contextlib.nullcontext
    with in_use(checkpoint / MANIFEST):
        with settle():
            plan = plan_export(checkpoint, out, dtype=dtype, max_shard_bytes=max_shard_bytes, config_dir=config_dir)
        with settle():
            write_shards(plan, rank=rank, world_size=world_size, check=check)
        with settle():
            if rank == 0:
                publish(plan)


def ensure_export(
    checkpoint: Path,
    group: dist.ProcessGroup | None = None,
    *,
    out: Path,
    dtype: str,
    rank: int = 0,
    world_size: int = 1,
) -> bool:
    """Export a checkpoint as `dcp_to_hf` does unless ``out`` holds that very export; whether it had to. Collective.

    A run that was killed between a checkpoint and its export, or that now asks for another dtype, is put right so.
    """
    # Rank 0's answer is everybody's: a file system may show the others an older state of the directory.
    stale = not is_export_of(checkpoint, out, dtype=dtype) if rank == 0 else None
    if world_size > 1:
        stale = gather_objects(stale, group=group)[0]
    if stale:
        # A run has just written this checkpoint, or checked it before it resumed from it.
        dcp_to_hf(checkpoint, out, dtype=dtype, rank=rank, world_size=world_size, group=group, check=False)
    return bool(stale)


def plan_export(
    checkpoint: Path,
    out: Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    config_dir: Path | None = None,
) -> ExportPlan:
    """Decide what goes into which file; see `dcp_to_hf`. Reads metadata only, and writes nothing."""
    manifest: Manifest | None = None
    if (checkpoint / MANIFEST).is_file() or not checkpoint.is_dir():
        manifest = read_manifest(checkpoint)
        check_sizes(checkpoint, manifest)
    elif config_dir is None:
        what = f"has no {MANIFEST}, so it is incomplete or was not written by fsdp2kit"
        todo = "give a complete checkpoint, or for one written by torch alone --config HF_DIR"
        raise UserError(str(checkpoint), what, todo)
    dtype = dtype or (manifest and manifest.export_dtype) or "float32"
    if dtype not in DTYPES:
        raise UserError("--dtype", f"{dtype!r} is not a dtype for exports", f"use one of {', '.join(DTYPES)}")
    config_dir = config_dir or checkpoint / "hf"
    out = out.absolute()
    check_replaceable(out)
    model = model_on_meta(config_dir)
    if model is None and manifest is None:
        what = "the model runs code of its own, so its tensors cannot be told from others in the checkpoint"
        raise UserError(str(config_dir), what, "export from a checkpoint that fsdp2kit wrote")
    return ExportPlan(
        checkpoint,
        out,
        config_dir,
        dtype,
        files=_pack(_groups(checkpoint, model, DTYPES[dtype]), max_shard_bytes),
        manifest=manifest,
        architecture=type(model).__name__ if model else None,
    )


def write_shards(plan: ExportPlan, *, rank: int = 0, world_size: int = 1, check: bool = True) -> None:
    """Write every `world_size`-th file of the plan, beginning with number `rank`, into ``plan.staging``.

    Raises:
        UserError: with `check`, a file of this rank's share of the checkpoint is not what was written.
    """
    with ThreadPoolExecutor(max_workers=1) as beside:
        checked = None
        if check and plan.manifest:
            checked = beside.submit(check_contents, plan.checkpoint, plan.manifest, rank=rank, world_size=world_size)
        try:
            _write_files(plan, list(plan.files)[rank::world_size])
        finally:  # a damaged file may well be why it cannot be read, and then is what should be said
            if checked:
                checked.result()


def _write_files(plan: ExportPlan, files: list[str]) -> None:
    plan.staging.mkdir(parents=True, exist_ok=True)
    reader, model = SafeReader(plan.checkpoint), model_on_meta(plan.config_dir)
    stored = reader.stored_tensors()
    for file in files:
        exported: dict[str, Tensor] = {}
        for group in plan.files[file]:
            tensors = {
                key: torch.empty(stored[key].size, dtype=stored[key].properties.dtype) for key in group.keys.values()
            }
            load_tensors(reader, tensors, alone=True)
            converted = to_file_names(model, {name: tensors[key] for name, key in group.keys.items()})
            for name, tensor in converted.items():
                # Conversions return views of one tensor; safetensors wants each one contiguous and its own.
                exported[name] = torch.empty(tensor.shape, dtype=_cast(tensor.dtype, DTYPES[plan.dtype])).copy_(tensor)
        save_file(exported, plan.staging / file, metadata={"format": "pt"})


def publish(plan: ExportPlan) -> None:
    """Add assets, index and marker to the written files, and move the directory to ``plan.out``. On one rank only.

    Raises:
        UserError: `out` has meanwhile come to hold something else.
        RunFailure: a file of the plan is missing or cut short.
    """
    weight_map = {name: file for file, groups in plan.files.items() for group in groups for name in group.sizes}
    for file in plan.files:
        _check_written(plan.staging / file, {name for name, home in weight_map.items() if home == file})
    for leftover in plan.staging.iterdir():  # of an export that was cut short
        if leftover.name not in plan.files:
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    copy_assets(plan.config_dir, plan.staging)
    describe_weights(plan.staging / "config.json", dtype=plan.dtype, architecture=plan.architecture)
    for file in plan.files:  # safetensors leaves them readable by their owner alone
        shutil.copymode(plan.staging / "config.json", plan.staging / file)
    if len(plan.files) > 1:
        total = sum(size for groups in plan.files.values() for group in groups for size in group.sizes.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(plan.staging / INDEX, index)
    written = [path.relative_to(plan.staging).as_posix() for path in plan.staging.rglob("*") if path.is_file()]
    write_record(
        plan.staging,
        checkpoint=plan.checkpoint,
        step=plan.manifest.step if plan.manifest else None,
        dtype=plan.dtype,
        files=written,
    )
    sync_tree(plan.staging)

    check_replaceable(plan.out)
    old = plan.out.with_name(f".{plan.out.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if plan.out.exists():
        plan.out.rename(old)
    plan.staging.rename(plan.out)
    sync(plan.out.parent)
    shutil.rmtree(old, ignore_errors=True)


def _groups(checkpoint: Path, model: PreTrainedModel | None, dtype: torch.dtype) -> list[Group]:
    """Every tensor of the model, in the model's order, in groups that can be converted by themselves."""
    stored = SafeReader(checkpoint).stored_tensors()
    if model is None:
        names = (key.removeprefix(MODEL_PREFIX) for key in stored if key.startswith(MODEL_PREFIX))
        keys = {name: MODEL_PREFIX + name for name in names}
    else:
        tied = tied_names(model)
        expected = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
        keys = find_weights(checkpoint, set(stored), names=expected, tied=tied)
        for name, tensor in expected.items():
            check_shape(checkpoint, keys[name], stored[keys[name]], tuple(tensor.shape))
    tensors = {
        name: torch.empty(stored[key].size, dtype=stored[key].properties.dtype, device="meta")
        for name, key in keys.items()
    }
    groups = []
    for names in conversion_groups(model, tensors):
        converted = to_file_names(model, {name: tensors[name] for name in names})
        sizes = {name: t.numel() * _cast(t.dtype, dtype).itemsize for name, t in converted.items()}
        groups.append(Group(keys={name: keys[name] for name in names}, sizes=sizes))
    return groups


def _pack(groups: list[Group], max_bytes: int) -> dict[str, list[Group]]:
    """Fill files of at most `max_bytes` in order (a larger group gets its own), under transformers' names."""
    files: list[list[Group]] = []
    room = 0
    for group in groups:
        size = sum(group.sizes.values())
        if not files or size > room:
            files.append([])
            room = max_bytes
        files[-1].append(group)
        room -= size
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {f"model-{number:05d}-of-{len(files):05d}.safetensors": file for number, file in enumerate(files, start=1)}


def _cast(dtype: torch.dtype, to: torch.dtype) -> torch.dtype:
    """The exported dtype of a tensor: `to` for floating point, its own for anything else."""
    return to if dtype.is_floating_point else dtype


def _check_written(path: Path, names: set[str]) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            missing = names - set(file.keys())
    except (OSError, SafetensorError) as error:
        raise RunFailure(f"{path}: was not written, or not whole: {error}") from error
    if missing:
        raise RunFailure(f"{path}: {sorted(missing)[0]} is missing from it")
