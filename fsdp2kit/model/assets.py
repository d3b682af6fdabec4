"""What a Hugging Face directory holds beside weights: config, generation config, tokenizer, chat template."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path

from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

# Keys of a config that say nothing about which model it is.
_INCIDENTAL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache")


def save_assets(
    directory: Path,
    *,
    config: PretrainedConfig,
    architecture: str,
    tokenizer: PreTrainedTokenizerBase | None,
    source: Path | None,
) -> None:
    """Write everything but weights into ``directory``.

    Args:
        architecture: the model's class in transformers, by name (`fully_shard` puts one of its own in front).
        source: the model directory that training started from; its generation config is kept.
    """
    config = copy.deepcopy(config)
    config.architectures = [architecture]
    config.save_pretrained(directory)
    if source is not None and (source / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(source)
    else:
        generation = GenerationConfig.from_model_config(config)
        if tokenizer is not None:
            # A model from a bare config has no idea of the tokenizer's ids, and would never stop.
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                setattr(generation, name, getattr(tokenizer, name))
    generation.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def config_digest(config: PretrainedConfig) -> str:
    """A digest of what makes two configs the same model: architecture, sizes, positions, not its origin."""
    fields = {key: value for key, value in config.to_dict().items() if key not in _INCIDENTAL}
    text = json.dumps(fields, sort_keys=True, default=str)
    return f"{config.model_type} {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def weights_digest(directory: Path) -> str:
    """A digest of which safetensors a model directory holds: their sizes, headers and last bytes.

    Wherever the directory lies, the same files give the same digest; reading them whole would take minutes.
    """
    digest = hashlib.sha256()
    edge = 64 * 1024
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            digest.update(f"{path.name} {size}".encode())
            digest.update(file.read(edge))
            file.seek(max(0, size - edge))
            digest.update(file.read(edge))
    return digest.hexdigest()[:16]


def source_dtype(config: PretrainedConfig, source: Path | None) -> str:
    """The dtype an export takes by default: the source model's; float32 for a model that starts from a config."""
    dtype = getattr(config, "dtype", None)
    return str(dtype).removeprefix("torch.") if source is not None and dtype is not None else "float32"
