"""How a run starts: where its values come from, and what makes it this run and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli
from transformers import PretrainedConfig, PreTrainedModel

from fsdp2kit.checkpoint.loading import load_weights
from fsdp2kit.checkpoint.manifest import read_manifest
from fsdp2kit.config import dump_toml
from fsdp2kit.config.schema import ModelConfig, TrainingConfig
from fsdp2kit.distributed import agreement
from fsdp2kit.model.assets import config_digest, weights_digest
from fsdp2kit.model.weights import initialize, load_pretrained


def fill_weights(section: ModelConfig, model: PreTrainedModel, *, source: Path | None, seed: int) -> None:
    """Give a materialised (sharded) model the values that ``model.weights`` names. Collective.

    Args:
        source: the model directory, for "pretrained".
        seed: for "random".

    Raises:
        UserError: the weights cannot be read, or are another model's.
    """
    if section.weights == "random":
        initialize(model, seed=seed)
    elif section.weights == "pretrained":
        assert source is not None, "check_config refuses pretrained weights without a path"
        with agreement():
            # A model that was made shallower than its source leaves some of the source's tensors over.
            load_pretrained(model, source, allow_unexpected="num_hidden_layers" in section.config)
    else:
        load_weights(Path(section.weights), model)


def describe_resume(checkpoint: Path, config: TrainingConfig, *, environment: dict[str, Any]) -> str:
    """One line that says where a run goes on, and what is not as it was: settings, mesh and versions.

    Args:
        checkpoint: the one that it resumes from, restored and so known to be whole.
        environment: of this run, as `CheckpointManager` writes it into manifests.
    """
    manifest, saved = read_manifest(checkpoint), checkpoint / "config.toml"
    settings = tomli.loads(saved.read_text(encoding="utf-8")) if saved.is_file() else {}
    before = {**_flat(settings), **_flat(_compared(manifest.environment))}
    now = {**_flat(tomli.loads(dump_toml(config))), **_flat(_compared(environment))}
    if not settings:  # nothing to compare with
        now = {name: value for name, value in now.items() if name in before}
    changed = [
        f"{name} {_shown(before.get(name))} → {_shown(now.get(name))}"
        for name in dict.fromkeys([*now, *before])
        if before.get(name) != now.get(name) and name not in ("run.dir", "run.resume")
    ]
    return f"resumed from step {manifest.step}; changed since: {', '.join(changed) or 'nothing'}"


def _compared(environment: dict[str, Any]) -> dict[str, Any]:
    return {name: environment[name] for name in ("world_size", "mesh", "versions") if name in environment}


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def _shown(value: object) -> str:
    return "default" if value is None else str(value)


def run_identity(
    config: TrainingConfig, hf_config: PretrainedConfig, *, source: Path | None, data: str
) -> dict[str, str]:
    """What may not change when a run is resumed, by the name of the TOML field that the user would look at.

    Args:
        source: the directory that pretrained weights come from.
        data: digest of the data, `Documents.fingerprint`.
    """
    weights = config.model.weights
    if weights == "pretrained" and source is not None:
        weights = f"pretrained {weights_digest(source)}"
    return {
        "model": config_digest(hf_config),
        "model.weights": weights,
        "optimizer.name": config.optimizer.name,
        "run.seed": str(config.run.seed),
        # Before the data's digest, which depends on where documents were cut.
        "data.seq_len": str(config.data.seq_len),
        "data.pack": str(config.data.pack).lower(),
        "data.shuffle": str(config.data.shuffle).lower(),
        "train.global_batch_size": str(config.train.global_batch_size),
        "data": data,
    }
