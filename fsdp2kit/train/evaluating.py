"""When a run is evaluated, and which of its steps was the best."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from fsdp2kit.config.schema import EvalConfig
from fsdp2kit.job import status
from fsdp2kit.job.distributed import gather_objects
from fsdp2kit.job.progress import Progress
from fsdp2kit.job.stop import Stopped
from fsdp2kit.train.metrics import Metrics
from fsdp2kit.train.step import is_due


class Evaluates(Protocol):
    """What the loop calls of `fsdp2kit.train.evaluation.Evaluation`, or of a recipe's own evaluation.

    It may also have the attributes of `EvaluationTraits`.
    """

    def __call__(self) -> Mapping[str, float]:
        """The figures of an evaluation, among them ``eval_loss``. Collective."""
        ...

    def answers(self) -> Sequence[Mapping[str, Any]]:
        """The model's answers to prompts, as ``{"prompt", "answer"}``. Collective."""
        ...


@dataclass(frozen=True)
class EvaluationTraits:
    """What an evaluation, or its objective, may say of its figures by attributes of these names."""

    measured_by: Mapping[str, str] = field(default_factory=dict)
    """What ``eval_loss`` depends on besides the weights, by name: only losses with the same values are compared."""
    maximizes: str | None = None
    """The name of a metric that is −``eval_loss``: the best step is then shown by that metric."""
    shown: Sequence[str] | None = None
    """An objective's metrics that the console shows with their ``eval_NAME``; None: those of training."""


def read_traits(owner: object) -> EvaluationTraits:
    """The traits of an evaluation or an objective; a recipe's own may be any function, which has none of them."""
    none = EvaluationTraits()
    return EvaluationTraits(
        measured_by=getattr(owner, "measured_by", none.measured_by),
        maximizes=getattr(owner, "maximizes", none.maximizes),
        shown=getattr(owner, "shown", none.shown),
    )


class Evaluations:
    """The evaluations of one call of `fsdp2kit.train.loop.train_loop`.

    Args:
        evaluate: None: there are none.
        section: ``[eval]``.
        metrics: records get the figures; the time of an evaluation is none of training's.
        last_step: of the run; it is evaluated, too.
    """

    def __init__(self, evaluate: Evaluates | None, section: EvalConfig, *, metrics: Metrics, last_step: int) -> None:
        self._evaluate = evaluate
        self._section = section
        self._metrics = metrics
        self._last_step = last_step
        self._measured_by: dict[str, str] = {}
        self.maximizes = None if evaluate is None else read_traits(evaluate).maximizes
        """See `EvaluationTraits`."""

    @property
    def are_wanted(self) -> bool:
        """Whether there is anything to evaluate by."""
        return self._evaluate is not None

    def begin(self, progress: Progress) -> Progress:
        """Forget the best step where evaluations measure by something else from here on. Collective."""
        if self._evaluate is None:
            return progress
        best_step = progress.best_step
        measured_by = dict(read_traits(self._evaluate).measured_by)
        self._measured_by = gather_objects(measured_by)[0]  # ranks may have read different copies of the rows
        progress, differing = progress.compared_by(self._measured_by)
        if differing:
            why = f"{', '.join(differing)} changed since step {best_step} was the best"
            self._metrics.message(f"evaluations are compared anew from step {progress.step} on: {why}")
        return progress

    def is_due(self, step: int) -> bool:
        """Whether the model is evaluated after ``step``."""
        every = self._section.every
        return self._evaluate is not None and every > 0 and (step == self._last_step or is_due(every, step))

    def found_best(self, progress: Progress) -> bool:
        """Whether the last step is the best so far, and its checkpoint is kept for that."""
        return self._section.keeps_best and progress.best_step == progress.step

    def evaluate_and_log(self, progress: Progress, record: dict[str, Any], *, is_completed: bool = False) -> Progress:
        """Log a step's record with the figures of an evaluation, then the model's answers. Collective.

        An evaluation that is left by a request to stop has no figures. The step is not logged then: the next start
        evaluates and logs it (`Progress.unevaluated`).

        Args:
            is_completed: as of `Metrics.log`.

        Returns:
            The progress, with the best step so far.
        """
        if self._evaluate is None:
            self._metrics.log(record)
            return progress
        status.begin("evaluating")
        try:
            figures = self._evaluate()
        except Stopped:
            left = record if is_completed else self._metrics.completed(record)
            return replace(progress, unevaluated=left)
        shown = read_traits(self._evaluate).shown
        if shown is not None:
            self._metrics.shown = shown
        self._metrics.log({**record, **figures}, is_completed=is_completed)
        progress = progress.after_evaluation(
            figures["eval_loss"], min_delta=self._section.min_delta, by=self._measured_by
        )
        with contextlib.suppress(Stopped):  # samples without some of the answers are not written
            self._metrics.log_samples(progress.step, self._evaluate.answers())
        self._metrics.throughput.restart()
        return progress
