"""From a distributed checkpoint to a Hugging Face directory, a block at a time, on one process or many.

`plan_export` decides on every rank alike what goes into which file. Then every rank calls `write_files`. `exporting`
surrounds that: one rank runs `begin_export` before it, and `publish_export` once all have written.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from transformers import PreTrainedModel

from fsdp2kit.checkpoint.adapter import MergedTensors, find_base, holds_adapter, names_experts
from fsdp2kit.checkpoint.carried import CARRIED, TensorReader, beside_carried, find_carried
from fsdp2kit.checkpoint.export_directory import ExportDirectory, write_json
from fsdp2kit.checkpoint.manifest import Manifest, check_contents, check_sizes, no_manifest, read_manifest
from fsdp2kit.checkpoint.reader import SafeReader, StoredTensors, in_blocks
from fsdp2kit.checkpoint.safetensors_file import file_size, write_safetensors
from fsdp2kit.checkpoint.state import MODEL_PREFIX, find_weights
from fsdp2kit.checkpoint.store import MANIFEST, fill, in_use, is_complete, is_remote, on_disk, to_path
from fsdp2kit.console import progress_bar
from fsdp2kit.errors import RunFailure, UserError
from fsdp2kit.files.local import read_json_object, replace_file, sha256
from fsdp2kit.files.redaction import cleaned
from fsdp2kit.job import distributed, stop
from fsdp2kit.job.distributed import agreement
from fsdp2kit.model.adapters import CONFIG_NAME as ADAPTER_CONFIG
from fsdp2kit.model.adapters import WEIGHTS_NAME as ADAPTER_WEIGHTS
from fsdp2kit.model.assets import copy_assets
from fsdp2kit.model.build import model_on_meta
from fsdp2kit.model.code_files import code_files
from fsdp2kit.model.config_file import config_text, dtype_of, with_dtype
from fsdp2kit.model.dtypes import tensor_dtypes
from fsdp2kit.model.expert_adapters import adapter_files
from fsdp2kit.model.names import adapter_file_name, conversion_groups, tied_names, to_file_names
from fsdp2kit.model.stored import INDEX_NAME, Carried, usual_dtype
from fsdp2kit.model.weights import open_pretrained

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Group:
    """Tensors that are converted together."""

    keys: dict[str, str]
    """Module name → key in the checkpoint."""
    forms: dict[str, Tensor]
    """Name in the exported file → a meta tensor like what is written there."""
    is_copied: bool
    """There is one tensor, and nothing but its name and dtype may change."""

    @property
    def size(self) -> int:
        """Bytes in the exported file."""
        return sum(form.nbytes for form in self.forms.values())


@dataclass(frozen=True, eq=False)
class ExportPlan:
    """What an export will write; the same on every rank."""

    checkpoint: Path | None
    """What is exported; None: a model in memory, by `fsdp2kit.checkpoint.export_model`."""
    out: ExportDirectory
    config_dir: Path
    dtype: str
    files: dict[str, list[Group]]
    """File name → what goes into it, in the order of its bytes."""
    manifest: Manifest | None
    """The checkpoint's; None without a checkpoint, and for one that is not ours."""
    model: PreTrainedModel | None
    """Without values; None for one that transformers does not know itself, and for an adapter."""
    base: Path | None = None
    """The directory of the model that the checkpoint's adapter is merged into; None: nothing is merged."""
    adapted: PreTrainedModel | None = None
    """The adapter's model without values, if factors of its experts are written one by one."""
    carried: Carried | None = None
    """What is carried over beside the model, which is a text part; None for another model, and for an adapter."""
    dtype_from: str = "as asked for"
    """Who chose `dtype`, as the end of a sentence that names it."""

    @property
    def is_adapter(self) -> bool:
        """Whether an adapter is exported, without the model that it belongs to."""
        return self.base is None and holds_adapter(self.config_dir)

    def forms(self, file: str) -> dict[str, Tensor]:
        """The tensors of a file by name, in the order of their bytes."""
        return {name: form for group in self.files[file] for name, form in group.forms.items()}

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
        if dtype_of(config) != self.dtype:
            changed = with_dtype(config, self.dtype, is_whole=self.carried is not None)
        if self.model is not None and self.carried is None and not config.get("architectures"):
            changed = {**changed, "architectures": [type(self.model).__name__]}  # configs made in code have none
        if changed != config:
            replace_file(path, config_text(changed))
        self._write_index(folder)

    def _write_index(self, folder: Path) -> None:
        if len(self.files) > 1:
            weight_map = {name: file for file in self.files for name in self.forms(file)}
            total = sum(group.size for groups in self.files.values() for group in groups)
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
    merge: bool | str = False,
    parts_dir: str | None = None,
) -> str:
    """Write a checkpoint as a Hugging Face directory. Collective: every rank writes its share of files.

    A checkpoint of adapters becomes a directory as peft writes it, or with `merge` a model's. A rank
    holds a block of 16 MiB in memory, or a whole tensor where its pieces are no ranges of rows or where
    transformers stores the model in other pieces than it runs it (fused experts).

    Args:
        checkpoint: a directory, or a URL that fsspec knows.
        out: the same; only an earlier export is ever replaced.
        dtype: of floating-point tensors, but for those that transformers keeps in float32 (`tensor_dtypes`). Default:
            the manifest's export dtype, else float32.
        max_shard_bytes: largest file, unless a single tensor is larger.
        config_dir: a Hugging Face directory for config, tokenizer, …. Default: the checkpoint's own ``hf``.
        group: of all ranks. Default: the default group.
        check: compare every byte of the checkpoint with its manifest's checksums, beside the writing.
        merge: add the checkpoint's adapter to the weights that it was trained on, in one process: True, or where
            those are now.
        parts_dir: where the weights of the parts beside a text part are on this machine. Default: what `config_dir`
            holds, or where they were by the manifest.

    Returns:
        Which dtype was written, and why.

    Raises:
        UserError: the checkpoint is unusable, does not fit the config, or `out` holds something else than an export.
        RunFailure: a file cannot be read, or a rank's files are not there.
    """
    checkpoint, out = to_path(checkpoint), to_path(out)
    with contextlib.ExitStack() as stack:
        stack.enter_context(in_use(checkpoint))
        with agreement(group):
            if config_dir is None and is_remote(checkpoint):
                config_dir = stack.enter_context(on_disk(checkpoint / "hf"))
            plan = plan_export(
                checkpoint,
                out,
                dtype=dtype,
                max_shard_bytes=max_shard_bytes,
                config_dir=config_dir,
                merge=merge,
                parts_dir=parts_dir,
            )
        with exporting(plan, group), agreement(group):
            write_files(plan, rank=distributed.rank(), world_size=distributed.world_size(), check=check)
    return plan.describe_dtype()


def ensure_export(
    checkpoint: str | Path,
    group: dist.ProcessGroup | None = None,
    *,
    out: str | Path,
    dtype: str,
    check: bool = False,
    parts_dir: str | None = None,
) -> bool:
    """Export a checkpoint as `dcp_to_hf` does, unless ``out`` holds that export; returns whether it did. Collective.

    Args:
        check: as in `dcp_to_hf`; not needed for a checkpoint that was just written, or checked for a resume.
        parts_dir: as in `dcp_to_hf`.
    """
    checkpoint, directory = to_path(checkpoint), ExportDirectory(to_path(out))
    # Rank 0's answer is everybody's: a file system may show the others an older state of the directory.
    stale = True
    with agreement(group):
        if distributed.rank() == 0:
            record, digest = directory.record(), _manifest_digest(checkpoint)
            if digest is not None and (record.get("manifest"), record.get("dtype")) == (digest, dtype):
                stale = not directory.is_whole()
    stale = bool(distributed.gather_objects(stale, group=group)[0])
    if stale:
        dcp_to_hf(checkpoint, directory.path, dtype=dtype, group=group, check=check, parts_dir=parts_dir)
    return stale


def plan_export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    config_dir: str | Path | None = None,
    merge: bool | str = False,
    parts_dir: str | None = None,
) -> ExportPlan:
    """Decide what goes into which file; see `dcp_to_hf`. Reads metadata only, and writes nothing."""
    checkpoint, directory = to_path(checkpoint), ExportDirectory(to_path(out).absolute())
    manifest: Manifest | None = None
    if is_complete(checkpoint) or not checkpoint.is_dir():
        manifest = read_manifest(checkpoint)
        check_sizes(checkpoint, manifest)
    elif config_dir is None:
        raise no_manifest(checkpoint, "give a complete checkpoint, or for one written by torch alone --config HF_DIR")
    config_dir = to_path(config_dir) if config_dir else checkpoint / "hf"
    base: Path | None = None
    if merge:
        if not holds_adapter(config_dir):
            raise UserError("--merge", f"{checkpoint} holds a whole model, and no adapter", "leave it out")
        base = find_base(config_dir, manifest, merge if isinstance(merge, str) else None)
    model = model_on_meta(config_dir)
    carried = None
    if merge or not holds_adapter(config_dir):
        carried = find_carried(model, checkpoint, manifest, to_path(parts_dir) if parts_dir else base or config_dir)
    dtype, dtype_from = _choose_dtype(dtype, manifest, config_dir, base, carried)
    check_dtype(dtype)
    if holds_adapter(config_dir) and not merge:
        directory.check_replaceable()
        adapted = model if names_experts(config_dir) else None
        files = plan_adapter_file(_shapes(checkpoint, None, None), dtype, model, adapted)
        return ExportPlan(
            checkpoint,
            directory,
            config_dir,
            dtype,
            files,
            manifest,
            model=None,
            adapted=adapted,
            dtype_from=dtype_from,
        )
    if model is None and merge:
        what = "the model runs code of its own, so the adapter cannot be put into it here"
        raise UserError(str(config_dir), what, "export the adapter, and merge it with peft's merge_and_unload")
    if model is None and manifest is None:
        what = "the model runs code of its own, so its tensors cannot be told from others in the checkpoint"
        raise UserError(str(config_dir), what, "export from a checkpoint that fsdp2kit wrote")
    kept = manifest.kept_in_float32.get(dtype, ()) if manifest else ()
    directory.check_replaceable(read=[base, carried and carried.directory])
    files = plan_files(_shapes(checkpoint, model, base), model, dtype, max_shard_bytes, kept=kept, carried=carried)
    return ExportPlan(
        checkpoint, directory, config_dir, dtype, files, manifest, model, base, carried=carried, dtype_from=dtype_from
    )


def _choose_dtype(
    dtype: str | None, manifest: Manifest | None, config_dir: Path, base: Path | None, carried: Carried | None
) -> tuple[str, str]:
    """The dtype of an export, and who chose it, as the end of a sentence."""
    if dtype is not None:
        return dtype, "as asked for"
    if base is not None:
        named = dtype_of(read_json_object(config_dir / "config.json"))
        if named is not None:
            return named, "which the config of the model that the adapter was trained on names"
        usual = usual_dtype(base) if carried is None else str(carried.dtype).removeprefix("torch.")
        return usual, f"in which {base} has most weights"
    if manifest is not None and manifest.export_dtype is not None:
        return manifest.export_dtype, "which the checkpoint names for its exports"
    return "float32", "since the checkpoint names no dtype for its exports"


def _shapes(checkpoint: Path, model: PreTrainedModel | None, base: Path | None) -> dict[str, tuple[str, Tensor]]:
    """Every tensor of the model, by name and in its order: its key in the checkpoint, and a meta tensor like it."""
    if base is not None and model is not None:
        with open_pretrained(model, base, allow_unexpected=True, grow=True) as tensors:
            metas = {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in tensors.items()}
        return {name: (name, metas[name]) for name in model.state_dict() if name in metas}
    stored = SafeReader(checkpoint).stored_tensors()
    if model is None:
        keys = {key.removeprefix(MODEL_PREFIX): key for key in stored if key.startswith(MODEL_PREFIX)}
    else:
        tied = tied_names(model)
        expected = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
        keys = find_weights(checkpoint, {key: one.size for key, one in stored.items()}, expected, tied=tied)
    metas = {key: torch.empty(one.size, dtype=one.properties.dtype, device="meta") for key, one in stored.items()}
    return {name: (key, metas[key]) for name, key in keys.items()}


def check_dtype(dtype: str) -> None:
    """Refuse a dtype that no export has."""
    if dtype not in DTYPES:
        raise UserError("dtype", f"{dtype!r} is not a dtype for exports", f"use one of {', '.join(DTYPES)}")


def plan_files(
    shapes: dict[str, tuple[str, Tensor]],
    model: PreTrainedModel | None,
    dtype: str,
    max_shard_bytes: int,
    *,
    kept: Iterable[str] = (),
    carried: Carried | None = None,
) -> dict[str, list[Group]]:
    """What goes into which file of a model's export: files are filled in order, and have transformers' names.

    Args:
        shapes: the model's tensors by name, a tied one once: the key under which each is read, and a meta tensor.
        max_shard_bytes: of a file; a larger group gets its own.
        kept: the tensors that stay in float32, where `model` is None; else its class is asked.
        carried: what is carried over beside a text part.
    """
    groups = _groups(shapes, model, DTYPES[dtype], kept=kept)
    if carried is not None:
        groups = [_as_stored(group, carried, DTYPES[dtype]) for group in groups]
        groups += [Group({name: CARRIED + name}, {name: one}, is_copied=True) for name, one in carried.others.items()]
    split = split_state_dict_into_shards_factory(
        {str(number): group for number, group in enumerate(groups)},
        get_storage_size=lambda group: group.size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    files = {name: [groups[int(number)] for number in numbers] for name, numbers in split.filename_to_tensors.items()}
    for file in files.values():  # wider dtypes first, so that each tensor is aligned
        file.sort(key=lambda group: -max(form.itemsize for form in group.forms.values()))
    return files


def _as_stored(group: Group, carried: Carried, dtype: torch.dtype) -> Group:
    """A group of a text part's tensors under the names of the whole's files, and in their dtypes unless another than
    the usual one is asked for."""
    if group.is_copied and (own := next(iter(group.keys))) in carried.names:
        group = Group(group.keys, {carried.names[own]: next(iter(group.forms.values()))}, is_copied=True)
    if strange := sorted(group.forms.keys() - carried.text.keys()):
        what = f"{carried.directory} does not name its tensors as transformers writes them ({strange[0]} is not in it)"
        raise UserError("export", what, "load the model with from_pretrained, save it, and train from that")
    if dtype != carried.dtype:
        return group
    forms = {name: form.to(carried.text[name].dtype) for name, form in group.forms.items()}
    return Group(group.keys, forms, group.is_copied and len(forms) == 1)


def plan_adapter_file(
    shapes: dict[str, tuple[str, Tensor]],
    dtype: str,
    model: PreTrainedModel | None,
    adapted: PreTrainedModel | None,
) -> dict[str, list[Group]]:
    """The one file of an adapter's export; see `plan_files`.

    Args:
        model: the adapter's model, without adapters, on any device; None if transformers does not know it.
        adapted: as in `ExportPlan`.
    """
    groups = []
    for name, (key, tensor) in shapes.items():
        meta = {name: tensor.to(DTYPES[dtype]) if tensor.is_floating_point() else tensor}
        own = adapter_file_name(name, model)
        forms = {own: meta[name]} if adapted is None else adapter_files(adapted, meta)
        groups.append(Group({name: key}, forms, is_copied=[*forms] == [own]))
    return {ADAPTER_WEIGHTS: groups}


def _groups(
    shapes: dict[str, tuple[str, Tensor]],
    model: PreTrainedModel | None,
    dtype: torch.dtype,
    *,
    kept: Iterable[str] = (),
) -> list[Group]:
    """The tensors of `_shapes` in groups that can be converted by themselves, in the dtypes of the files."""
    dtypes = dict.fromkeys(kept, torch.float32) if model is None else tensor_dtypes(model, dtype)
    tensors = {
        name: tensor.to(dtypes.get(name, dtype)) if tensor.is_floating_point() else tensor
        for name, (_, tensor) in shapes.items()
    }
    groups = conversion_groups(model, tensors)
    return [Group({name: shapes[name][0] for name in one.names}, one.forms, one.is_copied) for one in groups]


@contextlib.contextmanager
def exporting(plan: ExportPlan, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Around the writing of a plan's files: begin the export, and publish it or clear it away. Collective."""
    is_first = distributed.rank() == 0
    try:
        with agreement(group):
            if is_first:
                begin_export(plan)
        if not is_remote(plan.out.path):
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
    with ThreadPoolExecutor(max_workers=1) as beside, contextlib.ExitStack() as checked:
        if check and plan.manifest is not None:
            share = beside.submit(check_contents, plan.checkpoint, plan.manifest, rank=rank, world_size=world_size)
            # Always report checksum errors: they explain read failures.
            checked.callback(share.result)
            if is_remote(plan.checkpoint):  # not every store's files can be read in two threads
                share.result()
        reader: TensorReader = StoredTensors(SafeReader(plan.checkpoint))
        if plan.base is not None and plan.model is not None:
            base = checked.enter_context(open_pretrained(plan.model, plan.base, allow_unexpected=True, grow=True))
            reader = MergedTensors(plan.config_dir, base, reader)
        if plan.carried is not None:
            reader = checked.enter_context(beside_carried(plan.carried, reader))
        forms = {file: plan.forms(file) for file in list(plan.files)[rank::world_size]}
        with progress_bar("converting", total=sum(map(file_size, forms.values()))) as bar:

            def advance(count: float) -> None:
                bar.advance(count)
                stop.check()

            for file, tensors in forms.items():
                path, blocks = plan.out.staging / file, tensors_of(plan, file, reader)
                write_safetensors(path, tensors, blocks, advance=advance)


def tensors_of(plan: ExportPlan, file: str, stored: TensorReader) -> Iterator[Iterable[Tensor]]:
    """The tensors of a file as flat blocks, in the order of its bytes; read one group after the other."""
    for group in plan.files[file]:
        if group.is_copied:
            yield stored.blocks(*group.keys.values())
            continue
        read = {name: stored.read(key) for name, key in group.keys.items()}
        tensors = adapter_files(plan.adapted, read) if plan.adapted is not None else to_file_names(plan.model, read)
        yield from (in_blocks(tensors[name]) for name in group.forms)


def publish_export(plan: ExportPlan) -> None:
    """Add assets, index and record to the written files, and publish the directory. On one rank only."""
    for file in plan.files:
        path, size = plan.out.staging / file, file_size(plan.forms(file))
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
