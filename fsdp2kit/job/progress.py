"""How far a run has come: what the loop moves along and a checkpoint keeps beside tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A run's position. The defaults are those of a fresh run.

    Nothing here depends on the mesh: the next global batch (of a stream, with `data`), its random streams and the
    learning rate are functions of the step.
    """

    step: int = 0
    """Optimizer steps taken; also the index of the next global batch."""
    tokens_total: int = 0
    """Supervised tokens seen by the whole job."""
    input_tokens_total: int = 0
    """Tokens seen by the whole job, without padding."""
    wandb_id: str | None = None
    """Weights & Biases run to continue."""
    data: dict[str, Any] | None = None
    """Where a stream stands, and the documents that its packer holds back; None for data that is read whole."""
    best_eval_loss: float | None = None
    """The lowest held-out loss so far."""
    best_step: int | None = None
    """The step that it was measured after."""
    best_by: dict[str, str] | None = None
    """What it was measured by (held-out rows, reward functions, …); None: nothing was measured."""
    stale_evaluations: int = 0
    """Evaluations since then."""
    nonfinite_steps: int = 0
    """How many of the last steps in a row were skipped, because loss or gradient was not finite."""
    unevaluated: dict[str, Any] | None = None
    """The record of the last step, whose evaluation was left by a request to stop: it is logged once that is done."""

    def after_step(self, tokens: int, input_tokens: int, *, is_finite: bool = True) -> Progress:
        """The progress when one more global batch, of so many tokens, is done."""
        total, input_total = self.tokens_total + tokens, self.input_tokens_total + input_tokens
        nonfinite = 0 if is_finite else self.nonfinite_steps + 1
        return replace(
            self, step=self.step + 1, tokens_total=total, input_tokens_total=input_total, nonfinite_steps=nonfinite
        )

    def after_evaluation(self, eval_loss: float, *, min_delta: float, by: Mapping[str, str]) -> Progress:
        """The progress with an evaluation's loss: the best so far, or one more that was not.

        Args:
            min_delta: by how much a loss must be lower to be better.
            by: what it was measured by.
        """
        is_better = self.best_eval_loss is None or eval_loss < self.best_eval_loss - min_delta
        if is_better and math.isfinite(eval_loss):
            return replace(self, best_eval_loss=eval_loss, best_step=self.step, best_by=dict(by), stale_evaluations=0)
        return replace(self, stale_evaluations=self.stale_evaluations + 1)

    def compared_by(self, by: Mapping[str, str]) -> tuple[Progress, list[str]]:
        """The progress of a run whose evaluations measure by ``by`` from here on, and what of that is new.

        The best, and the count of evaluations since, begin again where it was measured by anything else.
        """
        if self.best_step is None:
            return self, []
        before = self.best_by or {}
        differing = [name for name in dict.fromkeys([*by, *before]) if by.get(name) != before.get(name)]
        if not differing:
            return replace(self, best_by=dict(by)), []
        return replace(self, best_eval_loss=None, best_step=None, best_by=None, stale_evaluations=0), differing

    def describe_best(self, maximizes: str | None = None) -> str:
        """The best figure so far with its name, e.g. ``eval_loss 2.31``.

        Args:
            maximizes: a metric that is −``eval_loss``, e.g. ``eval_reward``, to be named in its place.
        """
        assert self.best_eval_loss is not None
        return (
            f"eval_loss {self.best_eval_loss:.6g}" if maximizes is None else f"{maximizes} {-self.best_eval_loss:.6g}"
        )

    def is_over(self, total_steps: int, *, patience: int | None) -> bool:
        """Whether all is done: all steps, or the last ``patience`` evaluations (None: any number) did not improve.

        A step whose evaluation was left is not done.
        """
        if self.unevaluated is not None:
            return False
        return self.step >= total_steps or (patience is not None and self.stale_evaluations >= patience)
