"""Rollouts as packed micro-batches. Every rank makes the same plan of packs, balanced by tokens."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fsdp2kit.config.sections.grpo import GRPOConfig
from fsdp2kit.data.loader import Batch, Pack, Share
from fsdp2kit.objectives.policy import group_advantages
from fsdp2kit.rl.engines.engine import Response

_BLOCK = 64  # packs are as long as needed, in steps of this many tokens: a compiled model sees few lengths


@dataclass(frozen=True)
class Rollout:
    """A response to a prompt, and what the reward functions gave it."""

    prompt: int
    """Index of the prompt."""
    response: Response
    rewards: tuple[float, ...]
    """By function, without weights."""


def token_values(
    section: GRPOConfig, rollouts: Sequence[Rollout], rewards: np.ndarray, max_new_tokens: int
) -> dict[str, list[np.ndarray]]:
    """The policy loss's inputs for each response's tokens, by name: float32 ``[tokens]`` for each rollout.

    ``weights`` are a token's share in a loss that is summed over all sampled tokens and divided by their number. A
    response that takes no part has weight 0 and still counts as a response. Tokens of an environment have weight 0.

    Args:
        rewards: ``[groups, n]``.
    """
    responses = [rollout.response for rollout in rollouts]
    masks = [np.array(response.sampled, np.float32) for response in responses]
    lengths = np.array([mask.sum() for mask in masks])
    kept = np.array([response.is_whole or section.truncated == "keep" for response in responses], dtype=np.float64)
    if section.loss == "grpo":
        share = 1 / (len(responses) * lengths)
    elif section.loss == "dr_grpo":
        share = 1 / (len(responses) * max_new_tokens)
    else:
        share = 1 / max(1.0, (lengths * kept).sum())
    advantages = group_advantages(section, rewards).flatten()
    weights = share * kept * lengths.sum()
    return {
        "advantages": [mask * np.float32(value) for mask, value in zip(masks, advantages, strict=True)],
        "weights": [mask * np.float32(value) for mask, value in zip(masks, weights, strict=True)],
        "engine_log_probs": [np.array(response.log_probs, np.float32) for response in responses],
    }


def pack(
    texts: Sequence[tuple[Sequence[int], Sequence[int], Sequence[bool]]],
    values: Mapping[str, Sequence[np.ndarray]],
    *,
    seq_len: int,
    micro_batch_size: int,
    dp: int,
    dp_rank: int,
    cp: int,
    pad_id: int,
) -> list[Batch]:
    """A data-parallel rank's micro-batches of a step's rollouts, in packs of nearly equal numbers of tokens.

    All packs of a step are padded to the length of the longest. Every rank has the same number of them.

    Args:
        texts: token ids of each rollout's prompt and of its response, and which of the latter the model sampled.
        values: by name, for each rollout, one number for each token of its response.
    """
    lengths = [len(prompt) + len(response) for prompt, response, _ in texts]
    packs = balanced_packs(lengths, seq_len=seq_len, multiple=dp * micro_batch_size)
    block = _BLOCK * cp
    longest = max(sum(lengths[at] for at in one) for one in packs)
    share = Share(min(seq_len, -(-longest // block) * block), len(packs), micro_batch_size, dp_rank, dp, pad_id)

    def filled(members: Sequence[int]) -> Pack:
        starts = {at: len(texts[at][0]) for at in members}  # of responses
        documents = [
            (np.array([*prompt, *response]), np.array([*[False] * len(prompt), *sampled]))
            for prompt, response, sampled in (texts[at] for at in members)
        ]
        padded = {name: [np.pad(of_all[at], (starts[at], 0)) for at in members] for name, of_all in values.items()}
        return Pack(documents, per_token=padded)

    return share.batches([filled(packs[at]) for at in share.packs], sources=1)


def balanced_packs(lengths: Sequence[int], *, seq_len: int, multiple: int) -> list[list[int]]:
    """Put documents, longest first, each into the emptiest pack; as few packs as fit, a multiple of ``multiple``.

    Args:
        lengths: each at most ``seq_len``.

    Returns:
        Indices of the documents of each pack; a pack may have none.
    """
    order = sorted(range(len(lengths)), key=lambda at: -lengths[at])
    count = -(-sum(lengths) // (seq_len * multiple)) * multiple
    while True:
        packs: list[list[int]] = [[] for _ in range(count)]
        filled = [(0, number) for number in range(count)]
        for at in order:
            tokens, emptiest = filled[0]
            if tokens + lengths[at] > seq_len:
                break
            heapq.heapreplace(filled, (tokens + lengths[at], emptiest))
            packs[emptiest].append(at)
        else:
            return packs
        count += multiple
