"""Losses of pairs of answers, a better and a worse one: DPO, IPO, SimPO and ORPO, and what is logged of them.

docs/preferences.md has the formulae and says where other implementations differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp2kit.config.optimization import DPOConfig, PlainDPOConfig, SimPOConfig
from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.job.mesh import Mesh
from fsdp2kit.objectives.reference import Reference, build_reference
from fsdp2kit.parallel.plan import ParallelPlan


def build_preference(
    section: DPOConfig, model: Any, *, config: TrainingConfig, plan: ParallelPlan, mesh: Mesh
) -> Preference:
    """The objective of ``[dpo]``, with its reference if it has one. Collective.

    Args:
        model: the model that is trained, made parallel by ``plan``.
    """
    reference = build_reference(config, model, plan=plan, mesh=mesh) if section.needs_reference else None
    return Preference(section, reference, mesh)


@dataclass(frozen=True)
class Preference:
    """A `fsdp2kit.train.step.Objective` on pairs of answers; see `build_preference`."""

    section: DPOConfig
    reference: Reference | None
    mesh: Mesh

    def __call__(self, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, None, dict[str, Tensor]]:
        """The loss summed over the micro-batch's pairs, and sums of the metrics; collective under a ``cp`` > 1."""
        inputs = {name: value for name, value in inputs.items() if name not in ("groups", "num_groups")}
        documents, count = inputs.pop("documents"), inputs.pop("num_documents")
        # First, while no activations are kept for a backward.
        expected = self.reference.token_log_probs(**inputs)[0] if self.reference else None
        log_probs, _ = model.token_log_probs(**inputs)
        # Tokens' differences are summed: sums of long answers, subtracted, would lose the last digits.
        ratios = log_probs if expected is None else log_probs - expected
        by_token = [ratios, log_probs.detach(), torch.ones_like(ratios), ratios.detach() ** 2 / 2]
        rows = torch.stack(by_token).double()
        sums = self.mesh.sum_over_cp(rows.new_zeros(len(rows), count).index_add(1, documents, rows))
        scores, totals, tokens, squares = sums
        if self.section.is_normalised:
            scores, totals = scores / tokens, totals / tokens
        chosen, rejected = scores[0::2], scores[1::2]
        losses, beta = pair_losses(chosen, rejected, section=self.section), self.section.beta
        margins = beta * (chosen - rejected).detach()
        metrics = {  # the console leaves out names with a "/"
            "accuracy": (margins > 0).to(margins.dtype),
            "margin": margins,
            "rewards/chosen": beta * chosen.detach(),
            "rewards/rejected": beta * rejected.detach(),
            "logps/chosen": totals[0::2],
            "logps/rejected": totals[1::2],
        }
        if expected is not None:
            metrics["kl"] = (squares[0::2] + squares[1::2]) / (tokens[0::2] + tokens[1::2])
        # All ranks that share a row have the same sums, which count once.
        share = {name: values.sum() / self.mesh.ranks_per_row for name, values in {"loss": losses, **metrics}.items()}
        return share.pop("loss").float(), None, share

    @property
    def measured_by(self) -> dict[str, str]:
        """What a held-out loss depends on, by the TOML's keys: `fsdp2kit.train.evaluation.Evaluation.measured_by`."""
        section = self.section
        found = {"dpo.beta": section.beta, "dpo.label_smoothing": getattr(section, "label_smoothing", 0.0)}
        found |= {"dpo.gamma": section.margin} if isinstance(section, SimPOConfig) else {}
        return {name: str(value) for name, value in found.items()}

    def describe(self) -> list[str]:
        """A line for the start of a run."""
        section = self.section
        keys = [f"beta {section.beta:g}"]
        keys += [f"gamma {section.margin:g}"] if isinstance(section, SimPOConfig) else []
        is_smoothed = isinstance(section, PlainDPOConfig) and section.label_smoothing
        keys += [f"label_smoothing {section.label_smoothing:g}"] if is_smoothed else []
        reference = self.reference.describe() if self.reference else "none"
        return [f"preferences: {section.loss}, {', '.join(keys)}; reference: {reference}"]


def pair_losses(chosen: Tensor, rejected: Tensor, *, section: DPOConfig) -> Tensor:
    """The loss of each pair, ``[P]``.

    Args:
        chosen, rejected: each answer's score, ``[P]``: log π(y|x) − log π_ref(y|x), or without a reference log π(y|x);
            summed over the answer's tokens, or their mean where `DPOConfig.is_normalised`.
    """
    beta, difference = section.beta, chosen - rejected
    if isinstance(section, PlainDPOConfig):
        wrong = section.label_smoothing
        return -(1 - wrong) * F.logsigmoid(beta * difference) - wrong * F.logsigmoid(-beta * difference)
    if section.loss == "ipo":
        return (difference - 1 / (2 * beta)) ** 2
    if isinstance(section, SimPOConfig):
        return -F.logsigmoid(beta * difference - section.margin)
    return -chosen - beta * F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(log_prob: Tensor) -> Tensor:
    """log(p ÷ (1 − p)) with p = exp(log_prob), p at most a rounding error below 1."""
    log_prob = log_prob.clamp(max=-torch.finfo(torch.float32).eps)
    return log_prob - (-torch.expm1(log_prob)).log()
