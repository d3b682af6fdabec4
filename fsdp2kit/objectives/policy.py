"""The policy loss of GRPO, Dr. GRPO and DAPO: advantages within groups, and a clipped loss of sampled tokens.

Every normalisation is a weight of each token, computed once for all rollouts of a step, so that the loss is a weighted
sum over tokens, whatever the packing, the micro-batches and the mesh.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2kit.config.rl_schema import GRPOConfig, RLConfig, RolloutConfig
from fsdp2kit.job.distributed import reduce_numbers
from fsdp2kit.job.mesh import Mesh
from fsdp2kit.objectives.reference import Reference, build_reference
from fsdp2kit.parallel.plan import ParallelPlan

_EPSILON = 1e-4  # added to a group's standard deviation, as in TRL


def group_advantages(section: GRPOConfig, rewards: np.ndarray) -> np.ndarray:
    """How much better each response was than the mean of its group: float64 ``[groups, n]``.

    Divided by the group's standard deviation (that of a sample) + 1e-4, but not for "dr_grpo". Exactly 0 in a group
    whose rewards are all the same.

    Args:
        rewards: ``[groups, n]``.
    """
    rewards = rewards.astype(np.float64)
    advantages = rewards - rewards.mean(axis=1, keepdims=True)
    if section.loss != "dr_grpo":
        advantages /= rewards.std(axis=1, ddof=1, keepdims=True) + _EPSILON
    return np.where(has_signal(rewards)[:, None], advantages, 0.0)


def has_signal(rewards: np.ndarray) -> np.ndarray:
    """Whether the rewards ``[groups, n]`` of each group differ: bool ``[groups]``."""
    return rewards.max(axis=1) > rewards.min(axis=1)


def build_policy_loss(config: RLConfig, model: Any, *, plan: ParallelPlan, mesh: Mesh) -> PolicyLoss:
    """The policy loss of ``[grpo]``, with a reference if it has a KL term. Collective.

    Args:
        model: the model that is trained, made parallel by ``plan``.
    """
    reference = build_reference(config, model, plan=plan, mesh=mesh) if config.grpo.kl else None
    return PolicyLoss(config.grpo, config.rollout, reference=reference)


class PolicyLoss:
    """The objective of a step on rollouts; see docs/recipes.md for what an objective is.

    A micro-batch has ``advantages``, ``weights`` and ``engine_log_probs`` (`fsdp2kit.rl.packing`) of each target,
    float32 ``[N]``. Metrics are means over all tokens of responses: ``entropy``, ``clip_fraction``, ``log_prob_gap``
    (mean absolute difference of trainer's and engine's log-probability), where tokens are weighted for that difference
    ``importance_weight`` and ``importance_capped`` (the share at the cap), and, with a reference, ``kl``.

    Args:
        reference: the frozen model that the KL term compares with; None: there is no such term.
    """

    def __init__(self, section: GRPOConfig, rollout: RolloutConfig, *, reference: Reference | None = None) -> None:
        self._section, self._rollout, self._reference = section, rollout, reference
        self._largest_gap: Tensor | None = None

    def __call__(self, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, None, dict[str, Tensor]]:
        advantages, weights, engine = (inputs.pop(name) for name in ("advantages", "weights", "engine_log_probs"))
        inputs["temperature"] = self._rollout.temperature
        # First: no other forward may come between the trained model's and its backward.
        anchor = None if self._reference is None else self._reference.token_log_probs(**inputs)[0]
        log_probs, entropies = model.token_log_probs(**inputs)
        current = log_probs.detach()
        # A single update is on policy: the ratio is 1, and only its gradient matters.
        before = current if self._rollout.updates == 1 else engine
        losses, clipped = clipped_losses(self._section, log_probs, before, advantages)
        metrics = {"entropy": entropies.sum(), "clip_fraction": clipped.sum()}
        cap = self._section.importance_cap
        if self._rollout.updates == 1 and cap:
            ratio = (current - engine).exp()
            losses = losses * ratio.clamp(max=cap)
            metrics |= {"importance_weight": ratio.clamp(max=cap).sum(), "importance_capped": (ratio >= cap).sum()}
        if anchor is not None:
            # An estimate of the KL that is unbiased and never negative ("k3"): q − log q − 1, q = anchor ÷ policy.
            difference = anchor - log_probs
            kl = difference.exp() - difference - 1
            losses = losses + self._section.kl * kl
            metrics["kl"] = kl.detach().sum()
        gaps = (current - engine).abs()
        metrics["log_prob_gap"] = gaps.sum()
        largest = torch.cat([gaps, gaps.new_zeros(1)]).max()  # a micro-batch may have no target
        self._largest_gap = largest if self._largest_gap is None else torch.maximum(self._largest_gap, largest)
        return (losses * weights).sum(), None, metrics

    @property
    def frozen_models(self) -> list[Any]:
        """Models beside the one that is trained."""
        return [] if self._reference is None or self._reference.is_trained else [self._reference.model]

    def describe(self) -> list[str]:
        """A line for the start of a run."""
        return [] if self._reference is None else [f"reference: {self._reference.describe()}"]

    def figures(self, record: Mapping[str, Any]) -> dict[str, float]:
        """For a step's record: ``log_prob_gap_max`` over all ranks since the last call. Collective."""
        if "log_prob_gap" not in record:  # of an evaluation alone
            return {}
        mine = 0.0 if self._largest_gap is None else self._largest_gap.item()
        self._largest_gap = None
        return {"log_prob_gap_max": reduce_numbers([mine], dist.ReduceOp.MAX)[0]}


def clipped_losses(
    section: GRPOConfig, log_probs: Tensor, before: Tensor, advantages: Tensor
) -> tuple[Tensor, Tensor]:
    """−min(ratio · A, clip(ratio) · A) of each token, and whether it is clipped; float32 and bool ``[N]``.

    Args:
        log_probs: ``[N]``, under the policy that is trained.
        before: ``[N]``, under the policy that the ratio is relative to.
    """
    ratio = (log_probs - before).exp()
    low, high = 1 - section.clip_low, 1 + section.clip_high
    losses = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    return losses, ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))
