"""From a config, a model and its data to the run's `Checkpoints`."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fsdp2kit.checkpoint.adapter import check_same_base, describe_base
from fsdp2kit.checkpoint.checkpoints import Checkpoints
from fsdp2kit.checkpoint.identity import check_alike, run_identity
from fsdp2kit.config import TrainingConfig
from fsdp2kit.config.data_formats import RENDERED
from fsdp2kit.data.contents import Content
from fsdp2kit.job.distributed import agreement, rank
from fsdp2kit.job.events import Events
from fsdp2kit.model.assets import find_hf_dir, generation_config, save_assets
from fsdp2kit.model.inspect import value_of
from fsdp2kit.model.tokenizer import new_tokens, turn_ends
from fsdp2kit.weights import parts
from fsdp2kit.weights.record import own_class, source_of, weights_of
from fsdp2kit.weights.recorded_parts import RECORD


class RunJob(Protocol):
    """What a run's checkpoints need of its job (`fsdp2kit.job.start.Job`): versions, mesh, …, kept with each."""

    @property
    def environment(self) -> Mapping[str, Any]: ...

    @property
    def events(self) -> Events: ...


class RunData(Protocol):
    """What a run's checkpoints need of its data (`fsdp2kit.data.build.Data`, `fsdp2kit.rl.prompts.Prompts`)."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def total_steps(self) -> int: ...

    @property
    def endings(self) -> Collection[int]: ...

    @property
    def contents(self) -> Mapping[str, Content]: ...


def build_checkpoints(
    config: TrainingConfig,
    model: PreTrainedModel,
    optimizer: Optimizer,
    *,
    job: RunJob,
    data: RunData,
    tokenizer: PreTrainedTokenizerBase | None,
    contents: Mapping[str, Content] | None = None,
) -> Checkpoints:
    """The checkpoints of a run. Collective.

    Args:
        model: materialised (and sharded), its values still anything.
        tokenizer: is part of an export; None: the export has none.
        contents: what else the run reads, by TOML key. A resumed run lists what changed.

    Raises:
        UserError: a rank cannot write there, or where the export goes, or that holds what it must not replace; the
            model's directory cannot be fetched.
    """
    source = source_of(model)
    assets = Assets(model, tokenizer, _stops(config, data, tokenizer))
    models = {key: find_hf_dir(path, key=key, with_weights=True) for key, path in config.models().items()}
    with agreement():
        adapter = weights_of(model).adapter
        identity = run_identity(config, source, data=data.fingerprint, adapter=adapter, models=models)
        if adapter is not None and adapter.directory is not None:
            check_same_base(adapter.directory, identity["model.weights"])
        beside: dict[str, Any] = {}
        if source.whole is not None and source.directory is not None:
            beside[RECORD] = parts.parts_record(source.directory)
        if rank() == 0:
            assets.prepare()
    check_alike(identity)
    notes = assets.notes()
    if adapter is not None and adapter.directory is not None:
        notes += describe_base(adapter.directory, config.model.path)
    read = {**data.contents, **(contents or {})}
    statistics = getattr(data, "statistics", dict)()  # data of a recipe's own may tell none
    job.events.record("data", total_steps=data.total_steps, **statistics)
    recorded: dict[str, Any] = {"contents": {key: asdict(content) for key, content in read.items()}} if read else {}
    return Checkpoints(
        config,
        model,
        optimizer,
        identity=identity,
        write_assets=assets.write,
        environment={**job.environment, **recorded, **beside},
        source_dtype=source.dtype,
        read=[source.directory, *models.values(), None if adapter is None else adapter.directory],
        notes=notes,
        can_answer=tokenizer is not None and not value_of(source.config, "auto_map"),  # it runs no such code
        total_steps=data.total_steps,
        events=job.events,
    )


def _stops(config: TrainingConfig, data: RunData, tokenizer: PreTrainedTokenizerBase | None) -> set[int]:
    stops = set(data.endings)
    formats = {config.data.format, *(source.format for source in config.data.sources)}
    if tokenizer is not None and formats & {*RENDERED}:  # a stream does not know how its documents end
        stops |= turn_ends(tokenizer)
    return stops


@dataclass(eq=False)
class Assets:
    """What an export has besides its weights."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    stops: set[int]
    """Tokens that end what is trained."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Of an export, by their names in it: read once, since the source may be gone when a checkpoint is saved."""
    warnings: list[str] = field(default_factory=list)
    """What other readers of an export may miss, a line each."""

    def prepare(self) -> None:
        """Make the files: config, tokenizer, chat template and generation config. No collective."""
        source = source_of(self.model)
        with tempfile.TemporaryDirectory() as folder:
            self.warnings = save_assets(
                folder,
                config=source.config,
                architecture=own_class(self.model).__name__,
                tokenizer=self.tokenizer,
                source=source.directory,
                stops=self.stops,
                adapter=weights_of(self.model).adapter,
                whole=source.whole,
            )
            found = [path for path in Path(folder).rglob("*") if path.is_file()]
            self.files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}

    def write(self, directory: Path) -> None:
        """Write the files that `prepare` made. No collective."""
        for name, content in self.files.items():
            path = directory / name
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_bytes(content)

    def notes(self) -> list[str]:
        """What an export has that its source lacks, a line each."""
        tokenizer = self.tokenizer
        source = source_of(self.model)
        if tokenizer is None:
            return [*self.warnings]

        def named(tokens: Sequence[int]) -> str:
            return ", ".join(f"{tokenizer.convert_ids_to_tokens(token)} ({token})" for token in tokens)

        notes = [*self.warnings]
        markers = new_tokens(tokenizer)
        others = [token for token in source.new_tokens if token not in markers and token < len(tokenizer)]
        _, added = generation_config(source.config, tokenizer=tokenizer, source=source.directory, stops=self.stops)
        begin = "their rows begin as the mean of the others"
        if markers:
            notes.append(f"model.chat_template: new tokens {named(markers)}; {begin}")
        if others:
            stay = "" if source.trains_new else ", and stay so: the embedding is frozen"
            notes.append(f"tokenizer: new tokens {named(others)}; {begin}{stay}")
        if added:
            notes.append(f"export: generation_config.json also stops at {named(added)}, which ends what is trained")
        return notes
