"""Rollouts as packed micro-batches: every rank comes to the same plan of rows, balanced by tokens."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fsdp2kit.config.rl_schema import GRPOConfig, RLConfig
from fsdp2kit.data.formats import Prompt
from fsdp2kit.data.loader import Batch, PackedRow, Share
from fsdp2kit.objectives.policy import group_advantages, response_weights
from fsdp2kit.parallel.mesh import Mesh
from fsdp2kit.rl.engine import Response

_BLOCK = 64  # rows are as long as needed, in steps of this many tokens: a compiled model sees few lengths


@dataclass(frozen=True)
class Rollout:
    """A response to a prompt, and what the reward functions gave it."""

    prompt: int
    """Index of the prompt."""
    response: Response
    rewards: tuple[float, ...]
    """By function, without weights."""


def pack_rollouts(
    config: RLConfig,
    rollouts: Sequence[Rollout],
    rewards: np.ndarray,
    prompts: Sequence[Prompt],
    *,
    mesh: Mesh,
    pad_id: int,
) -> list[Batch]:
    """This data-parallel rank's micro-batches of a step's rollouts.

    Args:
        rewards: the weighted sums, ``[groups, n]``.
        prompts: of the whole run, which rollouts name by index.
    """
    values = token_values(config.grpo, rollouts, rewards, config.rollout.max_new_tokens)
    documents = []
    for rollout in rollouts:
        prompt, response = prompts[rollout.prompt].ids, rollout.response.ids
        documents.append((np.array([*prompt, *response]), np.arange(len(prompt) + len(response)) >= len(prompt)))
    sizes = {"dp": mesh.sizes.dp, "dp_rank": mesh.dp_rank, "cp": mesh.sizes.cp}
    micro = config.train.micro_batch_size
    return pack(documents, values, seq_len=config.data.seq_len, micro_batch_size=micro, pad_id=pad_id, **sizes)


def token_values(
    section: GRPOConfig, rollouts: Sequence[Rollout], rewards: np.ndarray, max_new_tokens: int
) -> dict[str, list[np.ndarray]]:
    """What the policy loss is given of each response's tokens, by name, float32 ``[tokens]`` for each rollout.

    Args:
        rewards: ``[groups, n]``.
    """
    responses = [rollout.response for rollout in rollouts]
    lengths = [len(response.ids) for response in responses]
    counts = [response.is_whole or section.truncated == "keep" for response in responses]
    weights = response_weights(section, lengths, counts=counts, max_new_tokens=max_new_tokens)
    advantages = group_advantages(section, rewards).flatten()
    return {
        "advantages": [np.full(n, value, np.float32) for n, value in zip(lengths, advantages, strict=True)],
        "weights": [np.full(n, value, np.float32) for n, value in zip(lengths, weights, strict=True)],
        "engine_log_probs": [np.array(response.log_probs, np.float32) for response in responses],
    }


def pack(
    documents: Sequence[tuple[np.ndarray, np.ndarray]],
    values: Mapping[str, Sequence[np.ndarray]],
    *,
    seq_len: int,
    micro_batch_size: int,
    dp: int,
    dp_rank: int,
    cp: int,
    pad_id: int,
) -> list[Batch]:
    """A data-parallel rank's micro-batches of a step's documents, in rows of nearly equal numbers of tokens.

    All rows of the step are as long as the longest needs. Every rank has equally many.

    Args:
        documents: token ids and which are supervised, of all rollouts of the step.
        values: by name, for each document, one number for each of its last tokens.
    """
    lengths = [len(ids) for ids, _ in documents]
    rows = deal_rows(lengths, seq_len=seq_len, multiple=dp * micro_batch_size)
    block = _BLOCK * cp
    longest = max(sum(lengths[at] for at in row) for row in rows)
    share = Share(min(seq_len, -(-longest // block) * block), len(rows), micro_batch_size, dp_rank, dp, pad_id)

    def packed(row: Sequence[int]) -> PackedRow:
        per_token = {
            name: [np.pad(of_all[at], (lengths[at] - len(of_all[at]), 0)) for at in row]
            for name, of_all in values.items()
        }
        return PackedRow([documents[at] for at in row], per_token=per_token)

    return share.batches([packed(rows[at]) for at in share.rows], sources=1)


def deal_rows(lengths: Sequence[int], *, seq_len: int, multiple: int) -> list[list[int]]:
    """The fewest rows, a multiple of ``multiple``, to which documents can be dealt, longest first, to the emptiest.

    Args:
        lengths: each at most ``seq_len``.

    Returns:
        Indices of the documents of each row; a row may have none.
    """
    order = sorted(range(len(lengths)), key=lambda at: -lengths[at])
    count = -(-sum(lengths) // (seq_len * multiple)) * multiple
    while True:
        rows: list[list[int]] = [[] for _ in range(count)]
        filled = [(0, row) for row in range(count)]
        for at in order:
            tokens, row = filled[0]
            if tokens + lengths[at] > seq_len:
                break
            heapq.heapreplace(filled, (tokens + lengths[at], row))
            rows[row].append(at)
        else:
            return rows
        count += multiple
