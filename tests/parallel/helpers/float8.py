"""What the float8 tests run on every rank: a tiny model whose sides float8 kernels take, trained by our own loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp2kit.config.schema import Float8Config, TrainingConfig
from fsdp2kit.job import distributed
from fsdp2kit.optim.build import build_optimizer
from fsdp2kit.parity.engine import Sharded
from fsdp2kit.parity.reference import Curves, Rows
from tests.checkpoint.helpers import checkpoints_of, full_state, progress_at
from tests.support.cases import Case, accumulate
from tests.support.models import VOCABULARY, make_batches

KIND = "float8"


def write_model(folder: Path) -> None:
    """A tiny Llama under ``folder / KIND``, every side of whose linear maps is divisible by 16, and by 2 ranks."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder / KIND)


def config_of(folder: Path, case: Case, float8: dict[str, Any], *, steps: int = 5) -> TrainingConfig:
    config = case.config(folder, steps=steps, rows=4)
    return config.model_copy(update={"float8": Float8Config.model_validate(float8)})


def curves(folder: Path, case: Case, float8: dict[str, Any], batches: Sequence[Rows]) -> Curves:
    """First-step gradients and the whole run, with ``[float8]``."""
    return Sharded(config_of(folder, case, float8, steps=len(batches)), world=distributed.start()).curves(batches)


class Run:
    """A model and its optimizer that take one step a batch."""

    def __init__(self, folder: Path, case: Case, float8: dict[str, Any]) -> None:
        config = config_of(folder, case, float8)
        self.sharded = Sharded(config, world=distributed.start())
        self.optimizer = build_optimizer(config.optimizer, self.sharded.model)

    def train(self, steps: range) -> None:
        for step in steps:
            batch = make_batches(1, seed=step)[0]
            accumulate(self.sharded, batch)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, np.ndarray]:
        return full_state(self.sharded.model, self.optimizer)


def interrupted(
    folder: Path, run_dir: Path, case: Case, float8: dict[str, Any]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The state after four steps in one go, and after two, a save, a restore into fresh objects and two more."""
    straight = Run(folder, case, float8)
    straight.train(range(4))
    before = Run(folder, case, float8)
    before.train(range(2))
    section = {"export_hf": "never", "async_save": True}
    with checkpoints_of(run_dir, before.sharded.model, before.optimizer, **section) as checkpoints:
        path = checkpoints.save(progress_at(2))
    after = Run(folder, case, float8)
    checkpoints_of(run_dir, after.sharded.model, after.optimizer).restore(path)
    after.train(range(2, 4))
    return straight.state(), after.state()
