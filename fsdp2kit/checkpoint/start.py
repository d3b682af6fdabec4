"""How a run starts: where its values come from, and what makes it this run and no other."""

from __future__ import annotations

from pathlib import Path

from transformers import PretrainedConfig, PreTrainedModel

from fsdp2kit.checkpoint.loading import load_weights
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
