"""From a distributed checkpoint to a Hugging Face directory, a block at a time, on one process or many.

`plan_export` decides on every rank alike what goes into which file. Then every rank calls `write_files`. `exporting`
surrounds that: one rank runs `begin_export` before it, and `publish_export` once all have written.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from transformers import PreTrainedModel

from fsdp2kit.checkpoint.adapter import holds_adapter
from fsdp2kit.checkpoint.export_directory import ExportDirectory, write_json
from fsdp2kit.checkpoint.manifest import Manifest, check_contents, check_sizes, no_manifest, read_manifest
from fsdp2kit.checkpoint.reader import open_checkpoint
from fsdp2kit.checkpoint.state import stored_weights
from fsdp2kit.checkpoint.store import MANIFEST, in_use, is_complete
from fsdp2kit.console import progress_bar
from fsdp2kit.errors import RunFailure, UserError
from fsdp2kit.files.local import read_json_object, replace_file, sha256
from fsdp2kit.files.redaction import cleaned
from fsdp2kit.files.remote import can_read_in_threads, fill, on_disk, to_path
from fsdp2kit.job import distributed, stop
from fsdp2kit.job.distributed import agreement
from fsdp2kit.model.adapters import names_experts
from fsdp2kit.model.assets import copy_assets
from fsdp2kit.model.build import model_on_meta
from fsdp2kit.model.code_files import code_files
from fsdp2kit.model.config_file import config_text, dtype_of, with_dtype
from fsdp2kit.weights.adapters import CONFIG_NAME as ADAPTER_CONFIG
from fsdp2kit.weights.adapters import WEIGHTS_NAME as ADAPTER_WEIGHTS
from fsdp2kit.weights.entries import adapter_entries, entries
from fsdp2kit.weights.parts import find_parts
from fsdp2kit.weights.record import weights_of
from fsdp2kit.weights.safetensors_file import file_size, write_safetensors
from fsdp2kit.weights.stored import INDEX_NAME
from fsdp2kit.weights.transfer import Reader, WeightEntry, forms_of, transfer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True, eq=False)
class ExportPlan:
    """What an export will write; the same on every rank."""

    checkpoint: Path | None
    """What is exported; None: a model in memory, by `fsdp2kit.checkpoint.export_model`."""
    out: ExportDirectory
    config_dir: Path
    dtype: str
    files: dict[str, list[WeightEntry]]
    """File name → what goes into it, in the order of its bytes."""
    manifest: Manifest | None = None
    """The checkpoint's; None without a checkpoint, and for one that is not ours."""
    model: PreTrainedModel | None = None
    """Without values; None for one that transformers does not know itself, and for an adapter."""
    is_adapter: bool = False
    """Whether an adapter is exported, without the model that it belongs to."""
    reader: Callable[[], contextlib.AbstractContextManager[Reader]] | None = None
    """Opens what the tensors are read from; None: a model in memory."""
    dtype_from: str = "as asked for"
    """Who chose `dtype`, as the end of a sentence that names it."""

    def forms(self, file: str) -> dict[str, Tensor]:
        """The tensors of a file by name, in the order of their bytes."""
        return forms_of(self.files[file])

    def describe_dtype(self) -> str:
        """Which dtype is written, and why; tensors that have another one."""
        forms = [form for file in self.files for form in self.forms(file).values() if form.is_floating_point()]
        others = Counter(str(form.dtype).removeprefix("torch.") for form in forms if form.dtype != DTYPES[self.dtype])
        kept = "".join(f"; {count} tensors stay in {dtype}" for dtype, count in sorted(others.items()))
        return f"{self.dtype}, {self.dtype_from}{kept}"

    def write_assets(self, folder: Path) -> None:
        """Write config, tokenizer, …; the config names the weights' dtype. Add an index if there are several files."""
        copy_assets(self.config_dir, folder)
        path = folder / "config.json"
        if self.is_adapter:  # as peft writes it: the model's own config would pass it off as a model
            code, _ = code_files(folder)
            kept, _ = code_files(folder, ("tokenizer_config.json",))
            for module in (one for one in code if one not in kept):
                (folder / module).unlink()
            path.unlink(missing_ok=True)
            shutil.copyfile(self.config_dir / ADAPTER_CONFIG, folder / ADAPTER_CONFIG)
            return
        config = read_json_object(path)
        changed = config
        is_part = self.model is not None and weights_of(self.model).names.whole is not None
        if dtype_of(config) != self.dtype:
            changed = with_dtype(config, self.dtype, is_whole=is_part)
        if self.model is not None and not is_part and not config.get("architectures"):
            changed = {**changed, "architectures": [type(self.model).__name__]}  # configs made in code have none
        if changed != config:
            replace_file(path, config_text(changed))
        self._write_index(folder)

    def _write_index(self, folder: Path) -> None:
        if len(self.files) > 1:
            weight_map = {name: file for file in self.files for name in self.forms(file)}
            total = sum(entry.nbytes for entries in self.files.values() for entry in entries)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            write_json(folder / INDEX_NAME, index)


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

    Returns:
        Which dtype was written, and why.

    Raises:
        UserError: the checkpoint is unusable, does not fit the config, or `out` holds something else than an export.
        RunFailure: a file cannot be read, or a rank's files are not there.
    """
    checkpoint = to_path(checkpoint)
    with reading(checkpoint, config_dir, group) as own_config_dir:
        with agreement(group):
            plan = plan_export(
                checkpoint,
                to_path(out),
                dtype=dtype,
                max_shard_bytes=max_shard_bytes,
                config_dir=own_config_dir,
                parts_dir=to_path(parts_dir) if parts_dir else None,
            )
        run_export(plan, group, check=check)
    return plan.describe_dtype()


@contextlib.contextmanager
def reading(
    checkpoint: Path, config_dir: str | Path | None, group: dist.ProcessGroup | None = None
) -> Iterator[Path | None]:
    """Keep a checkpoint while it is read, and have its config and assets on a disk. Collective.

    Yields:
        Where these are; None: in the checkpoint.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(in_use(checkpoint))
        with agreement(group):
            if config_dir:
                found = to_path(config_dir)
            else:
                assets = checkpoint / "hf"
                on_this_disk = stack.enter_context(on_disk(assets))
                found = None if on_this_disk is assets else on_this_disk
        yield found


def run_export(plan: ExportPlan, group: dist.ProcessGroup | None = None, *, check: bool = True) -> None:
    """Write and publish the plan of a checkpoint's export. Collective."""
    with exporting(plan, group), agreement(group):
        write_files(plan, rank=distributed.rank(), world_size=distributed.world_size(), check=check)


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
    checkpoint = to_path(checkpoint)
    directory = ExportDirectory(to_path(out))
    # Rank 0's answer is everybody's: a file system may show the others an older state of the directory.
    stale = True
    with agreement(group):
        if distributed.rank() == 0:
            digest = _manifest_digest(checkpoint)
            record = directory.record()
            if digest is not None and (record.get("manifest"), record.get("dtype")) == (digest, dtype):
                stale = not directory.is_whole()
    stale = bool(distributed.gather_objects(stale, group=group)[0])
    if stale:
        with reading(checkpoint, None, group) as config_dir:
            with agreement(group):
                plan = plan_export(checkpoint, directory.path, dtype=dtype, config_dir=config_dir, parts_dir=parts_dir)
            run_export(plan, group, check=check)
    return stale


def plan_export(
    checkpoint: Path,
    out: Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    config_dir: Path | None = None,
    parts_dir: Path | None = None,
) -> ExportPlan:
    """Decide what goes into which file; see `dcp_to_hf`. Reads metadata only, and writes nothing."""
    directory = ExportDirectory(out.absolute())
    manifest, config_dir = read_source(checkpoint, config_dir)
    dtype_from = "as asked for"
    if dtype is None and manifest is not None:
        dtype = manifest.export_dtype
        dtype_from = "which the checkpoint names for its exports"
    if dtype is None:
        dtype = "float32"
        dtype_from = "since the checkpoint names no dtype for its exports"
    check_dtype(dtype)
    is_adapter = holds_adapter(config_dir)
    model = model_on_meta(config_dir)
    if model is None and manifest is None and not is_adapter:
        what = "the model runs code of its own, so its tensors cannot be told from others in the checkpoint"
        raise UserError(str(config_dir), what, "export from a checkpoint that fsdp2kit wrote")
    parts = None
    if not is_adapter:
        environment = manifest.environment if manifest else {}
        parts = find_parts(model, checkpoint, environment, parts_dir or config_dir)
    directory.check_replaceable(read=[parts])
    keys, tensors = stored_weights(checkpoint, None if is_adapter else model)
    if is_adapter:
        one_by_one = model is not None and names_experts(model, config_dir)
        found = adapter_entries(model, tensors, DTYPES[dtype], one_by_one=one_by_one)
        files = {ADAPTER_WEIGHTS: found}
    else:
        kept = manifest.in_float32(dtype) if manifest else ()
        found = entries(model, tensors, DTYPES[dtype], kept=kept, parts=parts)
        files = into_files(found, max_shard_bytes)
    return ExportPlan(
        checkpoint,
        directory,
        config_dir,
        dtype,
        files,
        manifest,
        None if is_adapter else model,
        is_adapter=is_adapter,
        reader=partial(open_checkpoint, checkpoint, keys),
        dtype_from=dtype_from,
    )


def read_source(checkpoint: Path, config_dir: Path | None) -> tuple[Manifest | None, Path]:
    """The manifest of a checkpoint whose files have their sizes, if it has one; and where its config and assets are.

    Args:
        config_dir: None: the checkpoint's own.
    """
    manifest: Manifest | None = None
    if is_complete(checkpoint) or not checkpoint.is_dir():
        manifest = read_manifest(checkpoint)
        check_sizes(checkpoint, manifest)
    elif config_dir is None:
        raise no_manifest(checkpoint, "give a complete checkpoint, or for one written by torch alone --config HF_DIR")
    return manifest, config_dir or checkpoint / "hf"


def check_dtype(dtype: str) -> None:
    """Refuse a dtype that no export has."""
    if dtype not in DTYPES:
        raise UserError("dtype", f"{dtype!r} is not a dtype for exports", f"use one of {', '.join(DTYPES)}")


def into_files(entries: Sequence[WeightEntry], max_shard_bytes: int) -> dict[str, list[WeightEntry]]:
    """What goes into which file of a model's export: files are filled in order, and have transformers' names.

    Args:
        max_shard_bytes: of a file; a larger entry gets its own.
    """
    split = split_state_dict_into_shards_factory(
        {str(number): entry for number, entry in enumerate(entries)},
        get_storage_size=lambda entry: entry.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    files = {name: [entries[int(number)] for number in numbers] for name, numbers in split.filename_to_tensors.items()}
    for file in files.values():  # wider dtypes first, so that each tensor is aligned
        file.sort(key=lambda entry: -max(form.itemsize for form in entry.forms.values()))
    return files


@contextlib.contextmanager
def exporting(plan: ExportPlan, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Around the writing of a plan's files: begin the export, and publish it or clear it away. Collective."""
    is_first = distributed.rank() == 0
    try:
        with agreement(group):
            if is_first:
                begin_export(plan)
        if plan.out.is_moved_there:
            staging = plan.out.staging if is_first else None
            plan.out.join(distributed.gather_objects(staging, group=group)[0])
        yield
        with agreement(group):
            if is_first:
                publish_export(plan)
    except BaseException:
        if is_first:
            plan.out.abandon()
        raise


def begin_export(plan: ExportPlan) -> None:
    """Make an empty directory to write to. On one rank only, before any rank writes."""
    assets = {path.relative_to(plan.config_dir).as_posix() for path in plan.config_dir.rglob("*")}
    plan.out.begin({*plan.files, INDEX_NAME, *assets})


def write_files(plan: ExportPlan, *, rank: int = 0, world_size: int = 1, check: bool = True) -> None:
    """Write every `world_size`-th file of the plan, beginning with number `rank`, into the staging directory."""
    assert plan.checkpoint is not None, "a model in memory is written by `export_model`"
    assert plan.reader is not None
    with ThreadPoolExecutor(max_workers=1) as beside, contextlib.ExitStack() as checked:
        if check and plan.manifest is not None:
            share = beside.submit(check_contents, plan.checkpoint, plan.manifest, rank=rank, world_size=world_size)
            # Always report checksum errors: they explain read failures.
            checked.callback(share.result)
            if not can_read_in_threads(plan.checkpoint):
                share.result()
        reader = checked.enter_context(plan.reader())
        mine = list(plan.files)[rank::world_size]
        with progress_bar("converting", total=sum(file_size(plan.forms(file)) for file in mine)) as bar:

            def advance(count: float) -> None:
                bar.advance(count)
                stop.check()

            for file in mine:
                sink = partial(write_safetensors, plan.out.staging / file, advance=advance)
                transfer(plan.files[file], reader, sink)


def publish_export(plan: ExportPlan) -> None:
    """Add assets, index and record to the written files, and publish the directory. On one rank only."""
    for file in plan.files:
        path = plan.out.staging / file
        size = file_size(plan.forms(file))
        if not path.is_file() or path.stat().st_size != size:
            raise RunFailure(f"{path}: was not written, or not whole ({size} bytes are expected)")
    plan.out.check_replaceable()
    written = {*plan.files, *fill(plan.out.staging, plan.write_assets)}
    facts: dict[str, Any] = {
        "checkpoint": plan.checkpoint and str(plan.checkpoint),
        "step": plan.manifest.step if plan.manifest else None,
        "manifest": _manifest_digest(plan.checkpoint),
        "dtype": plan.dtype,
        # By this an adapter recognises its model.
        **({"base": plan.manifest.identity.get("model.weights")} if plan.is_adapter and plan.manifest else {}),
    }
    plan.out.publish(written, cleaned(facts))


def _manifest_digest(checkpoint: Path | None) -> str | None:
    return sha256(checkpoint / MANIFEST) if checkpoint is not None and is_complete(checkpoint) else None
