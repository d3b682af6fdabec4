"""Configs of short runs, and evaluations that give what they are told."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.data.loader import Loader, Share, build_loader
from fsdp2kit.job.events import Events
from fsdp2kit.job.progress import Progress
from fsdp2kit.model.flops import ModelFlops
from fsdp2kit.train.metrics import Metrics, build_metrics
from tests.data.helpers.documents import as_documents
from tests.support.cases import Case
from tests.support.models import LENGTH, VOCABULARY


def config_of(
    folder: Path, case: Case, *, steps: int = 2, rows: int = 4, **sections: dict[str, Any]
) -> TrainingConfig:
    """The case's config with other values in its sections."""
    config = case.config(folder, steps=steps, rows=rows)
    changed = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=changed)


class Evaluates:
    """An evaluation that finds these losses, in turn; ``attributes`` are what else the loop asks it for."""

    def __init__(
        self, losses: Iterable[float], on_call: Callable[[], object] = lambda: None, **attributes: Any
    ) -> None:
        self._losses, self._on_call = iter(losses), on_call
        vars(self).update(attributes)

    def __call__(self) -> dict[str, float]:
        self._on_call()
        return {"eval_loss": next(self._losses)}

    def answers(self) -> list[Any]:
        return []


def build(
    run_dir: Path,
    *,
    resume_step: int = 0,
    unevaluated: dict[str, Any] | None = None,
    is_main: bool = True,
    wandb_id: str | None = None,
    mode: str = "disabled",
    total_steps: int = 100,
    closing: contextlib.ExitStack | None = None,
    sections: dict[str, Any] | None = None,
) -> Metrics:
    job: Any = SimpleNamespace(
        run_dir=run_dir,
        is_main=is_main,
        world=SimpleNamespace(device=torch.device("cpu"), size=1),
        environment={},
        events=Events(),
        closing=closing or contextlib.ExitStack(),
    )
    plan: Any = SimpleNamespace(flops=ModelFlops(1, 1))
    config = TrainingConfig.model_validate({"recipe": "none", "wandb": {"mode": mode}, **(sections or {})})
    progress = Progress(step=resume_step, wandb_id=wandb_id, unevaluated=unevaluated)
    return build_metrics(config, job=job, plan=plan, progress=progress, total_steps=total_steps)


NAMES = ("code", "chat", "rare")
GLOBAL = 4


def mixed_loader(*, micro: int, dp_rank: int = 0, dp_size: int = 1) -> Loader:
    """Three sources of documents of many lengths; a global batch holds rows of two or three of them."""
    generator, sources = torch.Generator().manual_seed(0), []
    for source, count in enumerate((20, 12, 2)):
        rows = []
        for number in range(count):
            ids = torch.randint(VOCABULARY, (5 + 7 * number % 23,), generator=generator).tolist()
            rows.append([(token, at % (2 + source) > 0) for at, token in enumerate(ids)])
        sources.append(as_documents(rows))
    share = Share(LENGTH, GLOBAL, micro, dp_rank, dp_size)
    return build_loader(sources, share=share, pack=True, shuffle=True, seed=1, names=NAMES, epochs=[1.0] * 3)
