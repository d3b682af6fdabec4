"""Rollouts as the batches that the loop asks for: prompts → responses → rewards → advantages → packed micro-batches.

Every rank generates a part of a step's responses and calls the reward functions on some groups; then all ranks have
all of them, and come to the same plan of rows.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from fsdp2kit.config.rl_schema import GRPOConfig, RLConfig
from fsdp2kit.data.loader import Batch, PackedRow, Share
from fsdp2kit.distributed import agreement, gather_objects, reduce_numbers, world_size
from fsdp2kit.job import Job
from fsdp2kit.objectives.policy import PolicyLoss, group_advantages, has_signal, response_weights
from fsdp2kit.parallel.mesh import Mesh
from fsdp2kit.progress import Progress
from fsdp2kit.rl.engine import Engine, Request, Response, build_engine
from fsdp2kit.rl.prompts import Prompts, arguments_of
from fsdp2kit.rl.rewards import Rewards
from fsdp2kit.rl.sleep import sleep, wake_up
from fsdp2kit.rl.weight_sync import sync_weights
from fsdp2kit.train.metrics import Metrics

_BLOCK = 64  # rows are as long as needed, in steps of this many tokens: a compiled model sees few lengths
_PHASES = ("sync", "sleep", "generate", "wake_up", "reward")


@dataclass(frozen=True)
class Rollout:
    """A response to a prompt, and what the reward functions gave it."""

    prompt: int
    """Index of the prompt."""
    response: Response
    rewards: tuple[float, ...]
    """By function, without weights."""


def build_rollouts(
    config: RLConfig,
    model: Any,
    optimizer: Optimizer,
    prompts: Prompts,
    *,
    objective: PolicyLoss,
    job: Job,
    metrics: Metrics,
    progress: Progress,
    tokenizer: PreTrainedTokenizerBase,
) -> Rollouts:
    """The rollouts of a run, with the engine and the reward functions of ``[rollout]`` and ``[[reward]]``. Collective.

    Args:
        model: sharded, with its weights.
        optimizer: its state sleeps while responses are generated, where `rollout.sleep` says so.
        objective: its figures become a part of the records; its reference sleeps too.
        metrics: get the rollouts' figures and samples with each record.
        progress: where the run starts.

    Raises:
        UserError: a reward function cannot be imported.
    """
    rewards = job.closing.enter_context(Rewards(config.reward))
    engine = build_engine(config, model, tokenizer=tokenizer, device=job.mesh.device)
    sleepers: list[tuple[Any, Optimizer | None]] = []
    if config.rollout.sleep:
        sleepers = [(model, optimizer), *((frozen, None) for frozen in objective.frozen_models)]
    built = {"engine": engine, "rewards": rewards, "mesh": job.mesh, "metrics": metrics, "tokenizer": tokenizer}
    rollouts = Rollouts(config, model, prompts, **built, sleepers=sleepers)
    if progress.data is not None:
        rollouts.resume(progress.data)
    metrics.sources += [rollouts.figures, objective.figures]
    return rollouts


class Rollouts:
    """Batches of rollouts of the model that is trained; see `fsdp2kit.train.step.Batches`."""

    source_names: tuple[str, ...] = ()

    def __init__(
        self,
        config: RLConfig,
        model: Any,
        prompts: Prompts,
        *,
        engine: Engine,
        rewards: Rewards,
        mesh: Mesh,
        metrics: Metrics,
        tokenizer: PreTrainedTokenizerBase,
        sleepers: Sequence[tuple[Any, Optimizer | None]] = (),
    ) -> None:
        self._config, self._model, self._prompts = config, model, prompts
        self._engine, self._rewards, self._mesh, self._metrics = engine, rewards, mesh, metrics
        self._tokenizer, self._sleepers = tokenizer, sleepers
        self._round: tuple[int, list[Rollout]] | None = None
        self._figures: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._warned = False

    @property
    def steps_per_epoch(self) -> float:
        """Steps in which every prompt is asked once."""
        return self._prompts.steps_per_epoch

    def describe(self) -> list[str]:
        """What the user should know of the rollouts before training, a line each."""
        pairs = zip(self._rewards.weights, self._rewards.names, strict=True)
        rewards = ", ".join(f"{weight:g} × {name}" for weight, name in pairs)
        return [self._engine.describe(), f"reward: {rewards}"]

    def batch(self, index: int, /) -> Sequence[Batch]:
        """This data-parallel rank's micro-batches of step ``index`` (0-based). Collective.

        The engine gets the current weights and generates first, where a new batch of rollouts begins.

        Raises:
            UserError: a reward function failed.
        """
        number, part = divmod(index, self._config.rollout.updates)
        self._seconds = {}
        if self._round is None or self._round[0] != number:
            self._round = number, self._roll_out(number, version=index)
        size = self._config.train.global_batch_size
        rollouts = self._round[1][part * size : (part + 1) * size]
        self._figures = self._figures_of(rollouts, number)
        return self._pack(rollouts)

    def state(self, index: int, /) -> dict[str, Any] | None:
        """The rollouts that step ``index`` still learns from: with other weights they could not be made again."""
        number, part = divmod(index, self._config.rollout.updates)
        if not part or self._round is None:
            return None
        return {"round": number, "rollouts": [asdict(rollout) for rollout in self._round[1]]}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state` returned, unless a round has another size now."""
        rollouts = [
            Rollout(one["prompt"], Response(**one["response"]), tuple(one["rewards"])) for one in state["rollouts"]
        ]
        if len(rollouts) == self._prompts.per_round * self._config.rollout.n:
            self._round = state["round"], rollouts

    def figures(self, record: Mapping[str, Any]) -> dict[str, float]:
        """What a step's record has of its rollouts; a warning where engine and trainer disagree. Collective."""
        gap, limit = record["log_prob_gap"], self._config.grpo.gap_warning
        # Later updates on the same rollouts: the gap has what the earlier ones changed, too.
        is_first = (record["step"] - 1) % self._config.rollout.updates == 0
        if is_first and gap > limit and not self._warned:
            what = (
                f"trainer and engine differ by {gap:.3g} in a token's log-probability (grpo.gap_warning = {limit:g})"
            )
            self._metrics.message(f"warning: step {record['step']}: {what}; is rollout.dtype fsdp.param_dtype?")
        self._warned = gap > limit if is_first else self._warned
        every = self._config.rollout.samples_every
        if every and record["step"] % every == 0:
            self._metrics.log_samples(record["step"], self._samples())
        mine = {f"seconds/{name}": self._seconds.get(name, 0.0) for name in _PHASES}
        memory = self._metrics.throughput.memory.phases
        mine |= {f"memory_gib/{name}": memory.get(name, 0) / 2**30 for name in _PHASES}
        largest = reduce_numbers(list(mine.values()), dist.ReduceOp.MAX)
        return {**self._figures, **{name: value for name, value in zip(mine, largest, strict=True) if value}}

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Measures the seconds and the peak memory of what it encloses."""
        memory, start = self._metrics.throughput.memory, time.perf_counter()
        memory.end(None)
        yield
        memory.end(name)
        self._seconds[name] = time.perf_counter() - start

    @contextmanager
    def _asleep(self) -> Iterator[None]:
        """Training state is on the host while this is open."""
        with self._phase("sleep"):
            for model, optimizer in self._sleepers:
                sleep(model, optimizer)
        try:
            yield
        finally:
            with self._phase("wake_up"):
                for model, _ in self._sleepers:
                    wake_up(model)

    def _roll_out(self, number: int, *, version: int) -> list[Rollout]:
        """All rollouts of a round, on every rank, group by group. Collective."""
        config, rollout, rank, size = self._config, self._config.rollout, self._mesh.rank, world_size()
        with self._phase("sync"):
            sync = {"dtype": self._engine.dtype, "bucket_mib": config.weight_sync.bucket_mib}
            sync_weights(self._model, self._engine, version=version, **sync)
            self._engine.flush_cache()
        indices = self._prompts.of_round(number)
        asked = [(at, index, turn) for at, index in enumerate(indices) for turn in range(rollout.n)]
        with self._asleep() if self._sleepers else nullcontext(), self._phase("generate"), agreement():
            self._engine.require(version)
            ids = self._prompts.prompts
            # A prompt is known by its place in the round, since a round may reach from one epoch into the next.
            requests = [Request(ids[index].ids, (config.run.seed, number, at, turn)) for at, index, turn in asked]
            mine = self._engine.generate(
                requests[rank::size], max_new_tokens=rollout.max_new_tokens, temperature=rollout.temperature
            )
        responses = _in_turn(gather_objects(mine), len(asked))
        groups = [responses[start : start + rollout.n] for start in range(0, len(responses), rollout.n)]
        with self._phase("reward"), agreement():
            scored = self._score(indices[rank::size], groups[rank::size])
        rewards = _in_turn(gather_objects(scored), len(groups))
        return [
            Rollout(index, response, tuple(reward))
            for index, group, values in zip(indices, groups, rewards, strict=True)
            for response, reward in zip(group, values, strict=True)
        ]

    def _score(self, indices: Sequence[int], groups: Sequence[Sequence[Response]]) -> list[list[list[float]]]:
        """The rewards ``[groups][n][functions]`` of whole groups, so that a function may compare within them."""
        prompts = [self._prompts.prompts[index] for index, group in zip(indices, groups, strict=True) for _ in group]
        responses = [response for group in groups for response in group]
        texts = [self._text(response) for response in responses]
        ids, cut = [response.ids for response in responses], [not response.is_whole for response in responses]
        found = self._rewards(arguments_of(prompts, texts, ids, cut))
        return found.reshape(len(groups), -1, found.shape[1]).tolist()

    def _text(self, response: Response) -> str:
        return str(self._tokenizer.decode(response.ids, skip_special_tokens=True))

    def _totals(self, rollouts: Sequence[Rollout]) -> np.ndarray:
        """The weighted sum of each rollout's rewards, float64 ``[groups, n]``."""
        rewards = np.array([rollout.rewards for rollout in rollouts])
        return (rewards @ self._rewards.weights).reshape(-1, self._config.rollout.n)

    def _figures_of(self, rollouts: Sequence[Rollout], number: int) -> dict[str, float]:
        totals, responses = self._totals(rollouts), [rollout.response for rollout in rollouts]
        by_function = np.mean([rollout.rewards for rollout in rollouts], axis=0)
        return {
            "reward": float(totals.mean()),
            "response_length": float(np.mean([len(response.ids) for response in responses])),
            **{f"reward/{name}": float(mean) for name, mean in zip(self._rewards.names, by_function, strict=True)},
            "reward/deviation": float(totals.std(axis=1, ddof=1).mean()),
            "rollout/truncated": float(np.mean([not response.is_whole for response in responses])),
            "rollout/without_signal": float(np.mean(~has_signal(totals))),
            "rollout/weight_version": float(number * self._config.rollout.updates),
        }

    def _samples(self) -> list[dict[str, Any]]:
        """The best and the worst response to the first prompt."""
        assert self._round is not None, "a step was made"
        rollouts = self._round[1][: self._config.rollout.n]
        totals = self._totals(rollouts)[0]
        prompt = self._prompts.prompts[rollouts[0].prompt].messages
        text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content") or "")
        chosen = dict.fromkeys((int(totals.argmax()), int(totals.argmin())))
        return [
            {
                "prompt": text,
                "answer": self._text(rollouts[at].response),
                "reward": float(totals[at]),
                "truncated": not rollouts[at].response.is_whole,
            }
            for at in chosen
        ]

    def _pack(self, rollouts: Sequence[Rollout]) -> list[Batch]:
        config, sizes = self._config, self._mesh.sizes
        values = token_values(config.grpo, rollouts, self._totals(rollouts), config.rollout.max_new_tokens)
        documents = []
        for rollout in rollouts:
            prompt, response = self._prompts.prompts[rollout.prompt].ids, rollout.response.ids
            documents.append((np.array([*prompt, *response]), np.arange(len(prompt) + len(response)) >= len(prompt)))
        pad_id: Any = self._tokenizer.pad_token_id or 0
        micro = config.train.micro_batch_size
        return pack(
            documents,
            values,
            seq_len=config.data.seq_len,
            micro_batch_size=micro,
            dp=sizes.dp,
            dp_rank=self._mesh.dp_rank,
            cp=sizes.cp,
            pad_id=pad_id,
        )


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


def _in_turn(parts: Sequence[Sequence[Any]], count: int) -> list[Any]:
    """All items in order, of which rank r of R has those with the numbers r, r + R, …"""
    return [parts[number % len(parts)][number // len(parts)] for number in range(count)]
