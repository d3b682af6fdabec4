"""What the loop needs to know of the config, and what follows from how far it has come."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.parallel.fsdp import reshards_after_forward
from fsdp2kit.parallel.mesh import Mesh
from fsdp2kit.progress import Progress


@dataclass(frozen=True)
class Plan:
    """What the loop needs to know of the config and the mesh, as plain numbers."""

    total_steps: int
    seed: int
    dp_rank: int = 0
    cp_size: int = 1
    max_grad_norm: float = 1.0
    on_nonfinite: Literal["stop", "skip"] = "stop"
    reduce_every_micro_batch: bool = False
    gather_once: bool = False
    log_every: int = 1
    save_every: int = 0
    evaluate_every: int = 0
    evaluate_steps: int | None = None
    patience: int | None = None
    min_delta: float = 0.0
    keep_best: bool = False
    source_names: tuple[str, ...] = ()
    max_minutes: float | None = None
    heeds_signals: bool = True
    """Whether Ctrl-C, SIGTERM and SIGUSR1 stop after a step; False: they do what they do elsewhere."""

    def is_over(self, progress: Progress) -> bool:
        """Whether there is nothing left to train: all steps are done, or evaluations no longer get better."""
        is_stale = self.patience is not None and progress.stale_evaluations >= self.patience
        return is_stale or progress.step >= self.total_steps

    def is_due(self, every: int, step: int, *, also_last: bool = False) -> bool:
        """Whether something that happens every ``every`` steps (0: never) happens after ``step``."""
        return every > 0 and (step % every == 0 or (also_last and step == self.total_steps))


def build_plan(
    config: TrainingConfig, *, steps_per_epoch: int, mesh: Mesh, source_names: tuple[str, ...] = ()
) -> Plan:
    """The plan of ``[train]`` and of what is due when, with ``epochs`` turned into steps.

    Args:
        source_names: of the sources of a mix.
    """
    steps = config.train.steps
    return Plan(
        total_steps=steps if steps is not None else (config.train.epochs or 0) * steps_per_epoch,
        seed=config.run.seed,
        dp_rank=mesh.dp_rank,
        cp_size=mesh.sizes.cp,
        max_grad_norm=config.train.max_grad_norm,
        on_nonfinite=config.train.on_nonfinite,
        reduce_every_micro_batch=config.fsdp.reduce_every_micro_batch,
        gather_once=reshards_after_forward(config.fsdp) is False,
        log_every=config.train.log_every,
        save_every=config.checkpoint.every,
        evaluate_every=config.eval.every,
        evaluate_steps=config.eval.steps,
        patience=config.eval.patience,
        min_delta=config.eval.min_delta,
        keep_best=config.eval.keep_best,
        source_names=source_names,
        max_minutes=config.run.max_minutes,
    )


def judge(progress: Progress, eval_loss: float | None, *, plan: Plan) -> Progress:
    """The progress after an evaluation (None: there was none): is it the best, or how many were better ago."""
    if eval_loss is None:
        return progress
    best = progress.best_eval_loss
    if best is None or eval_loss < best - plan.min_delta:
        return replace(progress, best_eval_loss=eval_loss, best_step=progress.step, stale_evaluations=0)
    return replace(progress, stale_evaluations=progress.stale_evaluations + 1)
