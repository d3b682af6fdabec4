"""What all starts of a run must share, and what may change between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli

from fsdp2kit.checkpoint.manifest import read_manifest
from fsdp2kit.checkpoint.store import MANIFEST, is_complete
from fsdp2kit.config import TrainingConfig, dump_toml
from fsdp2kit.config.load import without_idle
from fsdp2kit.data.contents import changes
from fsdp2kit.errors import UserError
from fsdp2kit.files.local import read_text, sha256
from fsdp2kit.files.redaction import cleaned
from fsdp2kit.files.remote import to_path
from fsdp2kit.job.distributed import gather_objects, host_of
from fsdp2kit.job.events import changes as settings_changes
from fsdp2kit.job.events import flat
from fsdp2kit.model.assets import config_digest
from fsdp2kit.weights.adapters import Adapter
from fsdp2kit.weights.record import ModelSource
from fsdp2kit.weights.stored import weights_digest


def run_identity(
    config: TrainingConfig,
    source: ModelSource,
    *,
    data: str,
    adapter: Adapter | None = None,
    models: Mapping[str, Path] | None = None,
) -> dict[str, str]:
    """What may not change when a run is resumed, by the name of the TOML field that the user would look at.

    Args:
        source: where the model comes from.
        data: digest of the data.
        adapter: the adapters that are trained, if any are.
        models: directories of the models that are read beside, by TOML key.
    """
    weights = config.model.weights
    if weights == "pretrained" and source.directory is not None:
        weights = f"pretrained {weights_digest(source.directory)}"
    elif weights not in ("pretrained", "random") and is_complete(path := to_path(weights)):
        weights = f"{weights} {sha256(path / MANIFEST)[:16]}"
    of_adapter = {} if adapter is None else adapter.identity()
    if adapter is not None and adapter.directory is not None:
        of_adapter["model.adapter"] = weights_digest(adapter.directory)
    return {
        "model": config_digest(source.config),
        "model.weights": weights,
        **of_adapter,
        **settings_identity(config),
        **{key: weights_digest(directory) for key, directory in (models or {}).items()},
        "data": data,
    }


def settings_identity(config: TrainingConfig) -> dict[str, str]:
    """The part of `run_identity` that the TOML alone tells."""
    return {
        "optimizer.name": config.optimizer.name,
        "run.seed": str(config.run.seed),
        # Before the data's digest, which depends on where documents were cut.
        "data.seq_len": str(config.data.seq_len),
        "data.pack": str(config.data.pack).lower(),
        "data.shuffle": str(config.data.shuffle).lower(),
        "train.global_batch_size": str(config.train.global_batch_size),
        **({"data.limit": str(config.data.limit)} if config.data.limit else {}),
        **({} if isinstance(config.eval.split, str) else {"eval.split": str(config.eval.split)}),
        **config.identity(),
    }


def check_alike(identity: Mapping[str, str]) -> None:
    """Refuse a job whose ranks have read different data or models. Collective.

    Args:
        identity: of this rank, as `run_identity` returned it.
    """
    main, *others = gather_objects(identity)
    for rank, other in enumerate(others, start=1):
        for field in main:
            if other.get(field) != main[field]:
                what = (
                    f"{main[field]} on rank 0 ({host_of(0)}), and {other.get(field)} on rank {rank} ({host_of(rank)})"
                )
                raise UserError(field, what, "see that all ranks read the same files, and one revision of a hub id")


def check_same_run(
    path: Path,
    *,
    saved: dict[str, str],
    current: dict[str, str],
    contents_saved: Mapping[str, Any] | None = None,
    contents: Mapping[str, Any] | None = None,
    changed: Mapping[str, Sequence[Any]] | None = None,
) -> None:
    """Refuse a checkpoint of another run, naming the first field that differs, and both values.

    Some fields are digests of what several keys say: these keys are named, too, with both values.

    Args:
        saved, current: what `run_identity` returned when the checkpoint was saved, and now.
        contents_saved, contents: what was read then and now (`fsdp2kit.data.contents`), to say which rows differ.
        changed: what `changed_settings` found.
    """
    # A manifest has no secrets; those of older versions had.
    saved = cleaned(saved)
    current = cleaned(current)
    contents_saved = cleaned(contents_saved)
    contents = cleaned(contents)
    for field in [*current, *(field for field in saved if field not in current)]:
        before = saved.get(field)
        now = current.get(field)
        if before != now:
            anew = f"start from the weights alone with model.weights = '{path}'"
            if saved.get("lora.rank") is not None:  # it has no weights but the adapter's
                anew = "go on from its adapter: export it (fsdp2kit convert) and give that as model.adapter"
            what = f"was made with {field} = {before!r}, and this run has {field} = {now!r}"
            if field == "data" and contents_saved and contents:
                trained_on = {key: value for key, value in contents.items() if key.startswith("data.")}
                how = "its files are the same, and what is read of them or the tokenizer changed"
                what = f"was made with other data: {'; '.join(changes(contents_saved, trained_on)) or how}"
            keys = [key for key in changed or {} if key != field and key.startswith(_SECTIONS.get(field, "\0"))]
            if changed and keys:
                what += f" (changed: {', '.join(describe_changes({key: changed[key] for key in keys}))})"
            raise UserError(str(path), what, f"undo that, or choose another run.dir, or {anew}")


# The keys that decide about a field of the identity which is a digest.
_SECTIONS = {
    "model": ("model.",),
    "model.weights": ("model.",),
    "model.adapter": ("model.",),
    "lora.target_modules": ("lora.", "model."),
    "data": ("data.", "model.path", "model.tokenizer", "model.chat_template", "eval."),
    "distill.teacher": ("distill.",),
}


def changed_settings(checkpoint: Path, config: TrainingConfig) -> dict[str, list[Any]]:
    """The keys whose values differ between the config that a checkpoint was saved with and this one: [then, now].

    None stands for a key that is not set. {} if the checkpoint has no config. Logins in URLs are hidden, as in the
    config that was saved.
    """
    settings = _settings_of(checkpoint, config)
    if not settings:
        return {}
    before = flat(cleaned(settings))
    now = flat(cleaned(tomli.loads(dump_toml(config))))
    differing = settings_changes(before, now)
    return {key: pair for key, pair in differing.items() if key not in ("run.dir", "run.resume")}


def describe_changes(pairs: Mapping[str, Sequence[Any]]) -> list[str]:
    """Each key with its value then and now, which are its pair; None: it is not set."""
    texts = []
    for key, pair in pairs.items():
        before, now = ("unset" if value is None else value for value in pair)
        texts.append(f"{key} {before} → {now}")
    return texts


def describe_resumed(checkpoint: Path, config: TrainingConfig, environment: dict[str, Any]) -> str:
    """One line: the step that a run resumes from, and what changed since.

    Args:
        config, environment: those of this start.
    """
    manifest = read_manifest(checkpoint)
    settings = _settings_of(checkpoint, config)
    before = _compared(settings, manifest.environment)
    now = _compared(tomli.loads(dump_toml(config)), environment)
    before = cleaned(before)
    now = cleaned(now)
    if not settings:  # nothing to compare with
        now = {name: value for name, value in now.items() if name in before}
    pairs = {name: (before.get(name), now.get(name)) for name in dict.fromkeys([*now, *before])}
    differing = {
        name: (one, other)
        for name, (one, other) in pairs.items()
        if one != other and name not in ("run.dir", "run.resume")
    }
    changed = describe_changes(differing)
    changed += changes(cleaned(manifest.environment.get("contents", {})), cleaned(environment.get("contents", {})))
    return f"resumed from step {manifest.step}; changed since: {', '.join(changed) or 'nothing'}"


def _settings_of(checkpoint: Path, config: TrainingConfig) -> dict[str, Any]:
    """What the config of a checkpoint sets; nothing if it has none, or none that a run writes."""
    saved = checkpoint / "config.toml"
    try:
        settings = tomli.loads(read_text(saved)) if saved.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return without_idle(settings, type(config))


def _compared(settings: dict[str, Any], environment: dict[str, Any]) -> dict[str, Any]:
    facts = {name: environment[name] for name in ("world_size", "mesh", "versions") if name in environment}
    return {**flat(settings), **flat(facts)}
