"""An engine of a tiny model, and what it is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fsdp2kit.config.rl_schema import RLConfig
from fsdp2kit.rl.engines.engine import Request
from fsdp2kit.rl.engines.transformers_engine import TransformersEngine
from tests.support.cases import Case
from tests.support.models import DEMO

STOPS = (3, 9, 20, 41, 66, 77, 90, 103)


def engine_of(model: Any, **options: Any) -> TransformersEngine:
    section = RLConfig.model_validate({"recipe": "x", "reward": [{"function": "a:b"}], "rollout": options}).rollout
    engine = TransformersEngine(section, model.eval(), stops=STOPS, pad_id=0)
    engine.version = 1
    return engine


def requests(*lengths: int, seed: int = 0) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    return [
        Request(torch.randint(128, (length,), generator=generator).tolist(), (seed, at))
        for at, length in enumerate(lengths)
    ]


def config_of(folder: Path, case: Case, **rollout: Any) -> RLConfig:
    return RLConfig.model_validate(
        {
            **case.config(folder, steps=1, rows=2).model_dump(exclude={"data", "recipe"}),
            "data": {"seq_len": 64},
            "recipe": "x",
            "reward": [{"function": "a:b"}],
            "rollout": rollout,
            "model": {"path": str(folder / case.kind), "tokenizer": str(DEMO / "tokenizer"), "attention": "sdpa"},
        }
    )
