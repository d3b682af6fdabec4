"""From a distributed checkpoint to a Hugging Face directory, a block at a time, on one process or many.

`export_checkpoint` opens the checkpoint, decides on every rank alike what goes into which file, and has every rank
write its share of the files. The directory is published once all have written.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch.distributed as dist

from fsdp2kit.checkpoint.export_directory import ExportDirectory
from fsdp2kit.checkpoint.export_plan import MAX_SHARD_BYTES, ExportPlan, plan_export
from fsdp2kit.checkpoint.manifest import check_contents
from fsdp2kit.checkpoint.source import open_source
from fsdp2kit.console import progress_bar
from fsdp2kit.files.remote import can_read_in_threads, to_path
from fsdp2kit.job import stop
from fsdp2kit.job.distributed import agreement, rank, world_size
from fsdp2kit.weights.safetensors_file import write_safetensors
from fsdp2kit.weights.transfer import transfer


def dcp_to_hf(
    checkpoint: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    config_dir: str | Path | None = None,
    group: dist.ProcessGroup | None = None,
    check: bool = True,
    parts_dir: str | Path | None = None,
    trust_remote_code: bool = False,
) -> str:
    """Write a checkpoint as a Hugging Face directory. Collective: every rank writes its share of files.

    A checkpoint of adapters becomes a directory as peft writes it; `fsdp2kit.checkpoint.merge.merge_to_hf` gives a
    model's. A rank holds a block of 16 MiB in memory, or a whole tensor where its pieces are no ranges of rows or
    where transformers stores the model in other pieces than it runs it (fused experts).

    Args:
        checkpoint: a directory, or a URL that fsspec knows.
        out: the same; only an earlier export is ever replaced.
        dtype: of floating-point tensors, but for those that transformers keeps in float32 (`Weights.dtypes`). Default:
            the manifest's export dtype, else float32.
        max_shard_bytes: largest file, unless a single tensor is larger.
        config_dir: a Hugging Face directory for config, tokenizer, …. Default: the checkpoint's own ``hf``.
        group: of all ranks. Default: the default group.
        check: compare every byte of the checkpoint with its manifest's checksums, beside the writing.
        parts_dir: where the weights of the parts beside a text part are on this machine. Default: what `config_dir`
            holds, or where they were by the manifest.
        trust_remote_code: run the model's own Python code. fsdp2kit's checkpoints are exported without it.

    Returns:
        Which dtype was written, and why.

    Raises:
        UserError: the checkpoint is unusable, does not fit the config, or `out` holds something else than an export.
        RunFailure: a file cannot be read, or a rank's files are not there.
    """
    with agreement(group):
        directory = ExportDirectory(to_path(out).absolute())
        checkpoint = to_path(checkpoint)
        config_dir = to_path(config_dir) if config_dir else None
        parts_dir = to_path(parts_dir) if parts_dir else None
    plan = export_checkpoint(
        checkpoint,
        directory,
        group,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        config_dir=config_dir,
        parts_dir=parts_dir,
        check=check,
        trust_remote_code=trust_remote_code,
    )
    return plan.describe_dtype()


def ensure_export(
    checkpoint: str | Path,
    group: dist.ProcessGroup | None = None,
    *,
    out: str | Path,
    dtype: str,
    check: bool = False,
    parts_dir: Path | None = None,
) -> bool:
    """Export a checkpoint as `dcp_to_hf` does, unless ``out`` holds that export; returns whether it did. Collective.

    Args:
        check: as in `dcp_to_hf`; not needed for a checkpoint that was just written, or checked for a resume.
        parts_dir: as in `dcp_to_hf`.
    """
    with agreement(group):
        directory = ExportDirectory(to_path(out).absolute())
        checkpoint = to_path(checkpoint)
    if directory.holds(checkpoint, dtype, group):
        return False
    export_checkpoint(checkpoint, directory, group, dtype=dtype, parts_dir=parts_dir, check=check)
    return True


def export_checkpoint(
    checkpoint: Path,
    directory: ExportDirectory,
    group: dist.ProcessGroup | None = None,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    config_dir: Path | None = None,
    parts_dir: Path | None = None,
    check: bool = True,
    trust_remote_code: bool = False,
) -> ExportPlan:
    """`dcp_to_hf`, with paths. Collective."""
    with contextlib.ExitStack() as opened:
        with agreement(group):
            source = opened.enter_context(open_source(checkpoint, config_dir, trust_remote_code=trust_remote_code))
            plan = plan_export(source, dtype=dtype, max_shard_bytes=max_shard_bytes, parts_dir=parts_dir)
        write_export(plan, directory, group, check=check)
    return plan


def write_export(
    plan: ExportPlan, directory: ExportDirectory, group: dist.ProcessGroup | None = None, *, check: bool = True
) -> None:
    """Write and publish the export of a checkpoint. Collective."""
    with directory.replaced(plan, group) as folder, agreement(group):
        write_files(plan, folder, rank=rank(), world_size=world_size(), check=check)


def write_files(plan: ExportPlan, folder: Path, *, rank: int = 0, world_size: int = 1, check: bool = True) -> None:
    """Write every `world_size`-th file of the plan, beginning with number `rank`, into a folder."""
    source = plan.source
    assert source is not None, "a model in memory is written by `export_model`"
    assert plan.reader is not None
    with ThreadPoolExecutor(max_workers=1) as beside, contextlib.ExitStack() as checked:
        if check and source.manifest is not None:
            share = beside.submit(check_contents, source.checkpoint, source.manifest, rank=rank, world_size=world_size)
            # Always report checksum errors: they explain read failures.
            checked.callback(share.result)
            if not can_read_in_threads(source.checkpoint):
                share.result()
        reader = checked.enter_context(plan.reader())
        mine = {name: plan.files[name] for name in list(plan.files)[rank::world_size]}
        with progress_bar("converting", total=sum(file.size for file in mine.values())) as bar:

            def advance(count: float) -> None:
                bar.advance(count)
                stop.check()

            for name, file in mine.items():
                transfer(file.entries, reader, partial(write_safetensors, folder / name, advance=advance))
