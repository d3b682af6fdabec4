"""Small models with the proportions of real ones, and what the planner says of them."""

from __future__ import annotations

from typing import Any

from fsdp2kit.config.checks import check_config
from fsdp2kit.config.rl_schema import RLConfig
from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.model.build import build_model
from fsdp2kit.parallel.plan import plan_parallel
from fsdp2kit.planner.estimate import Estimate, estimate

LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
LLAMA_1B = {
    **LLAMA_8B,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
LLAMA_70B = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
LLAMA2_7B = {
    **LLAMA_8B,
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "num_key_value_heads": 32,
}
QWEN3_8B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
}
QWEN3_30B = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
REAL = {"llama1b": LLAMA_1B, "llama8b": LLAMA_8B, "llama70b": LLAMA_70B, "qwen3": QWEN3_8B, "mixtral": MIXTRAL}


def small(model: dict[str, Any], *, layers: int = 2, by: int = 16) -> dict[str, Any]:
    """A scaled-down copy: as many heads of each kind, every width divided by ``by``, few layers."""
    widths = ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim")
    narrow = {name: max(8, model[name] // by) for name in widths if name in model}
    return {**model, **narrow, "num_hidden_layers": layers}


def config_of(model: dict[str, Any], /, *, ranks: int = 8, rows: int | None = None, **sections: Any) -> TrainingConfig:
    """A config for a model from its config alone; ``rows``: the global batch, by default one micro-batch a rank."""
    cp = sections.get("mesh", {}).get("cp", 1)
    micro = sections.get("train", {}).get("micro_batch_size", 1)
    values: dict[str, Any] = {
        "recipe": "none",
        "model": {"weights": "random", "config": model},
        "train": {"steps": 1, "global_batch_size": rows or ranks // cp * micro},
        "preflight": {"allow": ["router_aux_loss"]},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return TrainingConfig.model_validate(values)


def rl_config(model: dict[str, Any], /, **sections: Any) -> RLConfig:
    """`config_of` for a recipe that learns from rewards."""
    values = config_of(model).model_dump(exclude_unset=True)
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return RLConfig.model_validate(values)


def planned(
    config: TrainingConfig, *, ranks: int = 8, local: int = 8, device_type: str = "cuda", **named: Any
) -> Estimate:
    """The estimate for ``ranks`` ranks."""
    sizes = check_config(config, world_size=ranks, local_world_size=min(local, ranks))
    model = build_model(config.model, lora=config.lora)
    plan = plan_parallel(model, config, sizes, device_type)
    return estimate(config, model, plan, local_world_size=local, **named)
