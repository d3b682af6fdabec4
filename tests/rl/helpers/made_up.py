"""Made-up rollouts, and the policy loss of them by plain transformers and torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdp2kit.config.sections.grpo import GRPOConfig
from fsdp2kit.rl.engines.engine import Episode, Response
from fsdp2kit.rl.packing import Rollout

MAX_NEW, TEMPERATURE = 12, 0.7
# Of each group: its prompt's length, the lengths of its responses and their rewards. The last group has no signal.
GROUPS = [
    (7, (1, 12, 5), (0.0, 1.0, 0.25)),
    (3, (12, 4, 9), (-1.0, 2.0, 0.5)),
    (11, (6, 2, 12), (1.0, 0.0, 0.0)),
    (5, (3, 8, 7), (0.1, 0.1, 0.1)),
]
REWARDS = np.array([rewards for *_, rewards in GROUPS])


def make_rollouts(model: Any, vocabulary: int = 128, *, turns: bool = False) -> tuple[list[list[int]], list[Rollout]]:
    """Prompts, and responses whose log-probabilities are near to those under ``model``, as an engine's would be.

    Args:
        turns: an environment wrote a part of every response that is long enough.
    """
    generator = torch.Generator().manual_seed(5)
    prompts, rollouts = [], []
    for number, (length, lengths, rewards) in enumerate(GROUPS):
        prompts.append(torch.randint(vocabulary, (length,), generator=generator).tolist())
        for count, reward in zip(lengths, rewards, strict=True):
            ids = torch.randint(vocabulary, (count,), generator=generator).tolist()
            with torch.no_grad():
                exact, _ = plain_log_probs(model, prompts[number], ids)
            near = exact + 0.3 * torch.randn(count, generator=generator)
            sampled = [count <= 4 or at not in (2, 3) for at in range(count)]
            talk = Episode(prompts[number], [], [], sampled, reward) if turns else None
            response = Response(ids, near.tolist(), is_whole=count < MAX_NEW, conversation=talk)
            rollouts.append(Rollout(number, response, (reward,)))
    return prompts, rollouts


def plain_log_probs(model: Any, prompt: Sequence[int], ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Log-probability of each token of a response and the entropy of its distribution, one row without padding."""
    logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    log_probs = torch.log_softmax(logits, dim=-1)
    return log_probs[range(len(ids)), list(ids)], -(log_probs.exp() * log_probs).sum(-1)


def plain_loss(
    section: GRPOConfig, model: Any, reference: Any, prompts: list[list[int]], rollouts: list[Rollout], *, updates: int
) -> tuple[Tensor, dict[str, float]]:
    """The loss as docs/grpo.md writes it, and the metrics; one response at a time."""
    sums, lengths, whole = [], [], []
    totals: dict[str, float] = {}
    for rollout in rollouts:
        prompt, response = prompts[rollout.prompt], rollout.response
        group = torch.tensor([one.rewards[0] for one in rollouts if one.prompt == rollout.prompt], dtype=torch.float64)
        advantage = rollout.rewards[0] - group.mean() if len(set(group.tolist())) > 1 else torch.tensor(0.0)
        if section.loss != "dr_grpo":
            advantage = advantage / (group.std() + 1e-4)
        sampled = torch.tensor(response.sampled)
        log_probs, entropies = (one[sampled] for one in plain_log_probs(model, prompt, response.ids))
        engine = torch.tensor(response.log_probs)[sampled]
        ratio = torch.exp(log_probs - (log_probs.detach() if updates == 1 else engine))
        clipped = torch.clamp(ratio, 1 - section.clip_low, 1 + section.clip_high)
        tokens = -torch.minimum(ratio * advantage, clipped * advantage)
        weights = np.minimum(np.exp((log_probs.detach() - engine).numpy()), section.importance_cap)
        is_weighted = updates == 1 and section.importance_cap > 0
        if is_weighted:
            tokens = tokens * torch.from_numpy(weights)
        with torch.no_grad():
            anchor = plain_log_probs(reference, prompt, response.ids)[0][sampled]
        kl = torch.exp(anchor - log_probs) - (anchor - log_probs) - 1
        tokens = tokens + section.kl * kl
        counts = response.is_whole or section.truncated == "keep"
        sums.append(tokens.sum() * counts)
        lengths.append(len(log_probs))
        whole.append(counts)
        inactive = clipped != ratio
        figures = {
            "entropy": entropies.sum(),
            "clip_fraction": (inactive & ((ratio > 1) == (advantage > 0)) & (advantage != 0)).sum(),
            "log_prob_gap": (log_probs - engine).abs().sum(),
            **({"kl": kl.sum()} if section.kl else {}),
        }
        if is_weighted:
            figures["importance_weight"] = torch.tensor(weights.sum())
            figures["importance_capped"] = torch.tensor((weights == np.float32(section.importance_cap)).sum())
        for name, value in figures.items():
            totals[name] = totals.get(name, 0.0) + value.detach().item()
    metrics = {name: value / sum(lengths) for name, value in totals.items()}
    if section.loss == "grpo":
        loss = sum(one / n for one, n in zip(sums, lengths, strict=True)) / len(sums)
    elif section.loss == "dr_grpo":
        loss = sum(sums) / (len(sums) * MAX_NEW)
    else:
        loss = sum(sums) / sum(n for n, counts in zip(lengths, whole, strict=True) if counts)
    assert isinstance(loss, Tensor)
    return loss, metrics
