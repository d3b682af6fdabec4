"""A run's checkpoints: where its values come from, what it saves and exports, and what makes it the same run."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tomli
import torch
import transformers
from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fsdp2kit.checkpoint.adapter import RECORD, check_same_base, describe_base
from fsdp2kit.checkpoint.hf import DTYPES
from fsdp2kit.checkpoint.identity import describe_changes, run_identity
from fsdp2kit.checkpoint.manager import CheckpointManager
from fsdp2kit.checkpoint.manifest import read_manifest
from fsdp2kit.checkpoint.space import check_room
from fsdp2kit.checkpoint.state import load_weights
from fsdp2kit.checkpoint.store import to_path
from fsdp2kit.config import TrainingConfig
from fsdp2kit.config.data_schema import RENDERED
from fsdp2kit.config.schema import ModelConfig
from fsdp2kit.console import say
from fsdp2kit.data.contents import Content
from fsdp2kit.distributed import agreement, gather_objects, rank
from fsdp2kit.errors import tool_command
from fsdp2kit.model.adapters import adapter_of
from fsdp2kit.model.assets import find_hf_dir, generation_config, save_assets
from fsdp2kit.model.build import source_of
from fsdp2kit.model.dtypes import kept_in_float32
from fsdp2kit.model.names import own_class
from fsdp2kit.model.tokenizer import new_tokens, turn_ends
from fsdp2kit.model.weights import fill_adapter, initialize, load_pretrained
from fsdp2kit.progress import Progress


def build_checkpoints(
    config: TrainingConfig,
    model: PreTrainedModel,
    optimizer: Optimizer,
    *,
    job: Any,
    data: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    contents: Mapping[str, Content] | None = None,
) -> Checkpoints:
    """The checkpoints of a run. Collective.

    Args:
        model: materialised (and sharded), its values still anything.
        job: has ``run_dir``, and ``environment`` (versions, mesh, …), which is kept with each checkpoint.
        data: has a ``fingerprint``, which must not change when the run is resumed. It may have ``contents``, which
            tell a resumed run what changed; ``endings``, the tokens at which an export's generation stops; and
            ``total_steps``, of the whole run.
        tokenizer: is part of an export; None: the export has none.
        contents: what else the run reads, by TOML key. A resumed run lists what changed.

    Raises:
        UserError: a rank cannot write there, or where the export goes, or that holds what it must not replace; the
            model's directory cannot be fetched.
    """
    source = source_of(model)
    stops = set(getattr(data, "endings", ()))
    formats = {config.data.format, *(source.format for source in config.data.sources)}
    if tokenizer is not None and formats & {*RENDERED}:  # streams do not know what their documents end in
        stops |= turn_ends(tokenizer)
    assets = {"config": source.config, "tokenizer": tokenizer, "source": source.directory, "stops": stops}
    models = {key: find_hf_dir(path, key=key, with_weights=True) for key, path in config.models().items()}
    with agreement():
        adapter = adapter_of(model)
        identity = run_identity(config, source, data=data.fingerprint, adapter=adapter, models=models)
        if adapter is not None and adapter.directory is not None:
            check_same_base(adapter.directory, identity["model.weights"])
        kept = _kept_in_float32(model) if adapter is None else {}
    architecture = own_class(model).__name__
    read = {**getattr(data, "contents", {}), **(contents or {})}
    recorded = {"contents": {key: asdict(content) for key, content in read.items()}} if read else {}
    manager = CheckpointManager(
        config.checkpoint,
        run_dir=job.run_dir,
        identity=identity,
        write_assets=partial(save_assets, architecture=architecture, adapter=adapter, **assets),
        export_dtype=source.dtype,
        kept_in_float32=kept,
        read=[source.directory, *models.values(), None if adapter is None else adapter.directory],
        environment={**job.environment, **recorded},
        tell=say,
    )
    notes = _notes(**assets)
    if adapter is not None and adapter.directory is not None:
        notes += describe_base(adapter.directory, config.model.path)
    if tokenizer is not None and config.data.format == "chat" and not stops:
        notes.append("no special token ends the answers that are trained, so the model may not learn to stop")
    total_steps = getattr(data, "total_steps", None)
    return Checkpoints(
        manager, config, model, optimizer, notes, can_answer=tokenizer is not None, total_steps=total_steps
    )


@dataclass(eq=False)
class Checkpoints:
    """The checkpoints of one run; every method is a collective, as those of the `CheckpointManager` it rests on.

    As a context manager it ends when all that is under way is done.
    """

    manager: CheckpointManager
    config: TrainingConfig
    model: PreTrainedModel
    optimizer: Optimizer
    notes: Sequence[str] = ()
    """What an export has that its source had not, a line each."""
    can_answer: bool = False
    """Whether an export has a tokenizer."""
    total_steps: int | None = None
    """Those of the whole run. Default: ``train.steps``; under ``train.epochs`` only the data tell."""
    resumed: Path | None = None
    """The checkpoint that `start` resumed from."""
    exporting: Progress | None = None
    """That of the newest checkpoint when an export was last due."""

    def __post_init__(self) -> None:
        # What the loop asks of an asynchronous save is the manager's own answer.
        self.wait_until_staged = self.manager.wait_until_staged
        self.has_failed = self.manager.has_failed
        self.finish_save = self.manager.finish_save

    def __enter__(self) -> Checkpoints:
        self.manager.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.manager.__exit__(*exception)

    def start(self) -> Progress:
        """Fill model and optimizer from what ``run.resume`` means, else the model with what ``model.weights`` names.

        Raises:
            UserError: the checkpoint or the weights cannot be used; the error says what differs. Or the disk has no
                room for one checkpoint.
        """
        self.resumed = self.manager.resolve(self.config.run.resume)
        with agreement():
            if rank() == 0:
                self.notes = [*self.notes, *self._check_room()]
        if self.resumed is None or adapter_of(self.model) is not None:  # checkpoints of adapters hold nothing else
            fill_weights(self.config.model, self.model, seed=self.config.run.seed)
        if self.resumed:
            return self.manager.restore(self.resumed, self.model, self.optimizer)
        return Progress()

    def _check_room(self) -> list[str]:
        """`check_room`, unless nothing will be saved."""
        done = read_manifest(self.resumed).step if self.resumed else 0
        total = self.config.train.steps if self.total_steps is None else self.total_steps
        if total is not None and done >= total:
            return []
        manager, dtype = self.manager, DTYPES[self.manager.export_dtype or "float32"]
        return check_room(
            self.config, self.model, manager.store, manager.out, export_dtype=dtype, make_room=manager.finish_sweep
        )

    def describe(self) -> list[str]:
        """What a start has to say: what exports add, what a disk has no room for, what changed since a checkpoint."""
        if self.resumed is None:
            return [*self.notes]
        manifest, saved = read_manifest(self.resumed), self.resumed / "config.toml"
        settings = tomli.loads(saved.read_text(encoding="utf-8")) if saved.is_file() else {}
        changed = describe_changes(manifest, settings, self.config, self.manager.environment)
        return [*self.notes, f"resumed from step {manifest.step}; changed since: {changed}"]

    def describe_end(self, *, is_over: bool) -> list[str]:
        """What the run leaves behind: the newest checkpoint, the export, and how to try it. On one rank only.

        Where ``checkpoint.push_to_hub`` asks for it, the export of a run that is over is uploaded first.
        """
        newest, exported, lines = self.manager.saved or self.resumed, self.manager.exported, []
        if newest:
            lines.append(f"checkpoint: {newest}")
        if exported:
            kind = "model" if adapter_of(self.model) is None else "adapter"
            lines.append(f"{kind}: {self.manager.out}, of {self._describe_step(exported)}")
            if self.can_answer:
                lines.append(f'try it: {tool_command("generate")} {self.manager.out} "…"')
        if exported and is_over and (repository := self.config.checkpoint.push_to_hub):
            lines.append(push_to_hub(self.manager.out, repository))
        return lines

    def _describe_step(self, exported: Path) -> str:
        """The step of an export, and where evaluations were compared, whether it is the best."""
        progress = self.exporting
        if progress is None or progress.best_step is None:
            return exported.name
        name = self.manager.store.path(progress.best_step).name
        best = f"{name}, the best (eval_loss {progress.best_eval_loss:.6g})"
        if name == exported.name:
            return best
        return f"{exported.name}, the last; {'no checkpoint was kept' if self.exports_best else 'not'} of {best}"

    def save(self, progress: Progress, *, is_over: bool = False) -> Path:
        """Save the run as it stands, and export that where it is due; see `CheckpointManager.save`.

        Args:
            progress: with wandb's id and the state of the data, if there are any.
            is_over: this is the run's end, which is when ``export_hf = "final"`` exports.
        """
        exported = self._to_export(progress, self.manager.store.path(progress.step), is_over=is_over)
        return self.manager.save(self.model, self.optimizer, progress, exported=exported)

    def export_resumed(self, progress: Progress, *, is_over: bool) -> None:
        """Export what is due of a run that was resumed, where that was not done.

        A run that was killed between a checkpoint and its export, or that now asks for another dtype, is put right so.

        Args:
            progress: as `start` returned it.
        """
        if self.resumed and (exported := self._to_export(progress, self.resumed, is_over=is_over)):
            self.manager.export(exported, check=exported != self.resumed)

    @property
    def exports_best(self) -> bool:
        """``checkpoint.export``, or its default."""
        which = self.config.checkpoint.export
        return self.config.eval.keeps_best if which is None else which == "best"

    def _to_export(self, progress: Progress, newest: Path, *, is_over: bool) -> Path | None:
        """The checkpoint to export when the newest is there; None if none is due. Collective."""
        when = self.config.checkpoint.export_hf
        if when == "never" or (when == "final" and not is_over):
            return None
        self.exporting = progress
        if not self.exports_best or progress.best_step in (None, progress.step):
            return newest
        self.finish_save()  # that of the best step may be under way
        # Rank 0's answer is everybody's: a file system may show the others an older state of the directory.
        found = gather_objects(self._find_best(progress) if rank() == 0 else None)[0]
        return found or newest

    def _find_best(self, progress: Progress) -> Path | None:
        """The checkpoint of this very history's best step, here or beside the one that was resumed from."""
        path = self.manager.store.path(progress.best_step or 0)
        for candidate in (path, self.resumed.parent / path.name) if self.resumed else (path,):
            # It is not there, or cannot be read: that must not hinder the save of the newest.
            with contextlib.suppress(Exception):
                if read_manifest(candidate).progress.get("best_eval_loss") == progress.best_eval_loss:
                    return candidate
        return None


def _kept_in_float32(model: PreTrainedModel) -> dict[str, list[str]]:
    """As in the manifest: an export of a model that transformers itself does not know cannot ask its class."""
    if hasattr(transformers, own_class(model).__name__):
        return {}
    narrow = {name: dtype for name, dtype in DTYPES.items() if dtype != torch.float32}
    return {name: sorted(kept_in_float32(model, dtype)) for name, dtype in narrow.items()}


def _notes(tokenizer: PreTrainedTokenizerBase | None, **assets: Any) -> list[str]:
    if tokenizer is None:
        return []

    def named(tokens: Sequence[int]) -> str:
        return ", ".join(f"{tokenizer.convert_ids_to_tokens(token)} ({token})" for token in tokens)

    notes, new = [], new_tokens(tokenizer)
    _, added = generation_config(tokenizer=tokenizer, **assets)
    if new:
        notes.append(f"model.chat_template: new tokens {named(new)}; their rows begin as the mean of the others")
    if added:
        notes.append(f"export: generation_config.json also stops at {named(added)}, which ends what is trained")
    return notes


def push_to_hub(directory: Path, repository: str) -> str:
    """Upload an export to a repository of the Hugging Face hub, which is made, private, if there is none.

    Returns:
        A line that says where it is, or why it is not there: an outage is no failure of the run.
    """
    from huggingface_hub import HfApi

    try:
        found = HfApi().create_repo(repository, private=True, exist_ok=True)
        HfApi().upload_folder(repo_id=found.repo_id, folder_path=directory, ignore_patterns=[RECORD])
    except Exception as error:  # the hub client raises errors of many kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        later = f"`hf upload {repository} {directory}` uploads it later"
        return f"checkpoint.push_to_hub: {repository}: not uploaded ({reason}); {later}"
    return f"uploaded to {found}"


def fill_weights(section: ModelConfig, model: PreTrainedModel, *, seed: int) -> None:
    """Give a materialised (sharded) model the values that ``model.weights`` names, and its adapters theirs.

    Collective.

    Args:
        seed: for "random".

    Raises:
        UserError: the weights cannot be read, or are another model's.
    """
    if section.weights == "random":
        initialize(model, seed=seed)
    elif section.weights == "pretrained":
        directory = source_of(model).directory
        assert directory is not None, "check_config refuses pretrained weights without a path"
        with agreement():
            # A model that was made shallower than its source leaves some of the source's tensors over.
            load_pretrained(model, directory, allow_unexpected="num_hidden_layers" in section.config)
    else:
        with agreement():
            path = to_path(section.weights)
        load_weights(path, model)
    with agreement():
        fill_adapter(model, seed=seed)
