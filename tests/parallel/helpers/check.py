"""The check of a config before a run."""

from __future__ import annotations

from typing import Any

from fsdp2kit.config.checks import MeshSizes
from fsdp2kit.config.schema import (
    ActivationCheckpointingConfig,
    ContextParallelConfig,
    DataConfig,
    MeshConfig,
    ModelConfig,
    PreflightConfig,
    TrainingConfig,
)
from fsdp2kit.model.build import build_model
from fsdp2kit.parallel.plan import plan_parallel


def check(
    model_type: str,
    *,
    cp: int = 1,
    ep: int = 1,
    pack: bool = True,
    allow: list[Any] | None = None,
    method: Any = "auto",
    attention: str = "eager",
    checkpointing: Any = "none",
    **overrides: Any,
) -> None:
    """`check_model` for a small model of that type."""
    sizes = {"vocab_size": 128, "model_type": model_type, **overrides}
    section = ModelConfig(config=sizes, weights="random", attention=attention)
    config = TrainingConfig(
        recipe="x",
        model=section,
        mesh=MeshConfig(cp=cp, ep=ep),
        context_parallel=ContextParallelConfig(method=method),
        data=DataConfig(pack=pack),
        activation_checkpointing=ActivationCheckpointingConfig(mode=checkpointing),
        preflight=PreflightConfig(allow=allow or []),
    )
    plan_parallel(build_model(section), config, MeshSizes(1, ep, cp, ep))
