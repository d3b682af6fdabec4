"""Rollouts as the batches that the loop asks for: prompts → responses → rewards → advantages → packed micro-batches.

Every rank generates a part of a step's responses and calls the reward functions on some groups; then all ranks have
all of them, and come to the same plan of rows.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fsdp2kit.config.rl_schema import RLConfig
from fsdp2kit.data.formats import Prompt
from fsdp2kit.data.loader import Batch
from fsdp2kit.distributed import agreement, gather_objects, rank, reduce_numbers, world_size
from fsdp2kit.model.assets import generation_config
from fsdp2kit.model.build import build_model, materialize, source_of
from fsdp2kit.model.dtypes import cast_model
from fsdp2kit.model.tokenizer import turn_ends
from fsdp2kit.objectives.policy import PolicyLoss, has_signal
from fsdp2kit.parallel.mesh import Mesh
from fsdp2kit.parallel.tensor_parallel import apply_tensor_parallel
from fsdp2kit.progress import Progress
from fsdp2kit.rl.engine import Engine, Request, Response
from fsdp2kit.rl.packing import Rollout, pack, token_values
from fsdp2kit.rl.prompts import Prompts, arguments_of
from fsdp2kit.rl.rewards import Rewards
from fsdp2kit.rl.rounds import Asked, Round, kept_rounds, round_state
from fsdp2kit.rl.sglang_engine import SGLangEngine
from fsdp2kit.rl.sleep import give_back_memory, sleep, wake_up
from fsdp2kit.rl.transformers_engine import TransformersEngine
from fsdp2kit.rl.vllm_engine import VLLMEngine
from fsdp2kit.rl.weight_sync import sync_weights
from fsdp2kit.train.metrics import Metrics

_PHASES = ("sync", "sleep", "generate", "wake_up", "wait", "reward", "evaluate")


def build_engine(config: RLConfig, model: PreTrainedModel, *, tokenizer: Any, device: torch.device) -> Engine:
    """The engine of ``[rollout]``, which waits for its first weights. Collective.

    Args:
        model: the model that is trained; the engine's has the same config, and no adapters.
        device: where an embedded engine keeps its weights.
    """
    section, source, dtype = config.rollout, source_of(model), getattr(torch, config.engine_dtype)
    found, _ = generation_config(
        source.config, tokenizer=tokenizer, source=source.directory, stops=turn_ends(tokenizer)
    )
    ends = [] if found.eos_token_id is None else found.eos_token_id
    stops = [ends] if isinstance(ends, int) else list(ends)
    if section.engine != "transformers":
        server = VLLMEngine if section.engine == "vllm" else SGLangEngine
        run, seconds = gather_objects(secrets.token_hex(4))[0], 60 * config.run.timeout_minutes
        with agreement():
            return server(section, dtype=dtype, run=run, is_main=rank() == 0, stops=stops, timeout=seconds)
    copy: Any = build_model(config.model.model_copy(update={"adapter": None, "freeze": []}))
    with agreement():
        cast_model(copy.eval().requires_grad_(False), dtype)
        tp = section.tp
        group = apply_tensor_parallel(copy, tp, device=device).get_group() if tp > 1 else None
        materialize(copy, device=device)
        return TransformersEngine(section, copy, stops=stops, pad_id=tokenizer.pad_token_id, group=group)


def rest_until_asked(engine: Engine, config: RLConfig) -> None:
    """With ``rollout.sleep``, leave the devices to the trainer. Collective.

    Only when the run directory is this run's: a server may be in the hands of another that has it.
    """
    if config.rollout.sleep:
        with agreement():
            engine.sleep()


class Rollouts:
    """Batches of rollouts of the model that is trained (`fsdp2kit.train.step.Batches`); called, it evaluates.

    Args:
        model: sharded, with its weights.
        optimizer: its state sleeps while responses are generated, where `rollout.sleep` says so.
        engine: waits for its first weights.
        objective: its figures become a part of the records; its reference sleeps too.
        metrics: get the rollouts' figures and samples with each record.
        progress: where the run starts.
    """

    source_names: tuple[str, ...] = ()

    def __init__(
        self,
        config: RLConfig,
        model: Any,
        optimizer: Optimizer,
        prompts: Prompts,
        *,
        engine: Engine,
        rewards: Rewards,
        objective: PolicyLoss,
        mesh: Mesh,
        metrics: Metrics,
        progress: Progress,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self._config, self._model, self._prompts = config, model, prompts
        self._engine, self._rewards, self._mesh, self._metrics = engine, rewards, mesh, metrics
        self._tokenizer = tokenizer
        self._sleepers = [(model, optimizer), *((frozen, None) for frozen in objective.frozen_models)]
        self._step = progress.step  # that are done, once the batch that was asked for last is learnt from
        self._round: Round | None = None
        self._asked: Asked | None = None
        self._notes: list[str] = []
        self._figures: dict[str, float] = {}
        self._held_out_samples: list[dict[str, Any]] = []
        self._seconds: dict[str, float] = {}
        self._warned: set[str] = set()
        if progress.data is not None:
            self.resume(progress.data)
        metrics.sources += [self.figures, objective.figures]

    maximizes = "eval_reward"
    """The metric that is −``eval_loss``, by which the best is shown."""

    @property
    def steps_per_epoch(self) -> float:
        """Steps in which every prompt is asked once."""
        return self._prompts.steps_per_epoch

    def describe(self) -> list[str]:
        """What the user should know of the rollouts before training, a line each."""
        pairs = zip(self._rewards.weights, self._rewards.names, strict=True)
        rewards = ", ".join(f"{weight:g} × {name}" for weight, name in pairs)
        return [self._engine.describe(), f"reward: {rewards}", *self._notes]

    @cached_property
    def measured_by(self) -> dict[str, str]:
        """What held-out rewards depend on besides the weights: those by the same are comparable."""
        weights = zip(self._rewards.names, self._rewards.weights.tolist(), strict=True)
        return {
            "held-out prompts": self._prompts.held_out_fingerprint,
            **{name: str(value) for name, value in self._made_by.items()},
            **{f"reward.{name}.weight": str(weight) for name, weight in weights},
        }

    @property
    def _made_by(self) -> dict[str, Any]:
        """What decides rollouts and rewards and may change between starts: each with its value or digest."""
        sampling = {f"rollout.{name}": value for name, value in self._config.rollout.sampling.items()}
        return sampling | {name: content.digest for name, content in self._rewards.contents.items()}

    def batch(self, index: int, /) -> Sequence[Batch]:
        """This data-parallel rank's micro-batches of step ``index`` (0-based). Collective.

        The engine gets the current weights and generates first, where a new batch of rollouts begins; with
        ``rollout.ahead`` it then has those responses already, and begins with the next ones.

        Raises:
            UserError: a reward function failed.
        """
        number, part = divmod(index, self._config.rollout.updates)
        self._step, self._seconds = index + 1, {}
        if self._round is None or self._round.number != number:
            self._round = self._make_round(number, version=index)
        now, config, mesh = self._round, self._config, self._mesh
        oldest = (number - config.rollout.ahead) * config.rollout.updates
        assert oldest <= now.version <= index, f"step {index} would learn from rollouts of version {now.version}"
        size = config.train.global_batch_size
        rollouts = now.rollouts[part * size : (part + 1) * size]
        totals = self._totals(rollouts)
        self._figures = {
            **self._means(np.array([rollout.rewards for rollout in rollouts]), [one.response for one in rollouts]),
            "reward/deviation": float(totals.std(axis=1, ddof=1).mean()),
            "rollout/truncated": float(np.mean([not rollout.response.is_whole for rollout in rollouts])),
            "rollout/without_signal": float(np.mean(~has_signal(totals))),
            "rollout/weight_version": float(now.version),
        }
        texts = [(self._prompts.prompts[rollout.prompt].ids, rollout.response.ids) for rollout in rollouts]
        values = token_values(config.grpo, rollouts, totals, config.rollout.max_new_tokens)
        rows = {"seq_len": config.data.seq_len, "micro_batch_size": config.train.micro_batch_size}
        sizes = {"dp": mesh.sizes.dp, "dp_rank": mesh.dp_rank, "cp": mesh.sizes.cp}
        pad_id: Any = self._tokenizer.pad_token_id or 0
        return pack(texts, values, **rows, **sizes, pad_id=pad_id)

    def state(self, index: int, /) -> dict[str, Any] | None:
        """What steps from ``index`` on learn from and other weights could not make again. Collective.

        It waits for the responses under way.
        """
        number, part = divmod(index, self._config.rollout.updates)
        now, asked = self._round, self._asked
        if now is not None and (now.number != number or (not part and now.version == index)):
            now = None
        found = round_state(now, None if asked is None else (asked, self._responses(asked)))
        return {**found, "made_by": self._made_by} if found else None

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state` returned, but for what this config would not have made."""
        section = self._config.rollout
        kept = kept_rounds(state, section, count=self._prompts.per_round * section.n, made_by=self._made_by)
        self._round = kept.now
        if kept.ahead is not None:
            self._asked, responses = kept.ahead
            self._asked.responses.set_result(list(self._mine(responses)))
        if kept.dropped:
            self._notes.append(f"rollouts in progress are made again ({kept.dropped})")

    def __call__(self) -> dict[str, float]:
        """Rewards of one response to each held-out prompt, with the weights of now. Collective.

        Sampled as in training, with the same random numbers each time.

        Returns:
            ``eval_reward``, ``eval_reward/NAME`` of each function, ``eval_response_length``; and ``eval_loss``, which
            is −``eval_reward``, by which the best checkpoint is known.
        """
        prompts, start, seconds = self._prompts.held_out, time.perf_counter(), self._seconds
        if self._asked is not None:  # the engine still needs the weights that it has
            with agreement():
                self._asked.responses.result()
        seed = self._config.run.seed
        # A round's seeds have four numbers; the last one here is not 0, which would be the same as none.
        requests = [Request(prompt.ids, (seed, 0, at, 0, 1)) for at, prompt in enumerate(prompts)]
        responses = _from_all_ranks(self._generate_awake_or_asleep(requests, self._step))
        rewards = self._rewarded(prompts, responses, n=1)
        totals = rewards @ self._rewards.weights
        first = zip(prompts[:2], responses[:2], totals[:2].tolist(), strict=True)
        self._held_out_samples = [self._sample(*one) for one in first]
        self._seconds = {**seconds, "evaluate": time.perf_counter() - start}
        means = self._means(rewards, responses)
        return {"eval_loss": -means["reward"], **{f"eval_{name}": mean for name, mean in means.items()}}

    def answers(self) -> list[dict[str, Any]]:
        """The responses to the first prompts of the last evaluation."""
        return self._held_out_samples

    def figures(self, record: Mapping[str, Any]) -> dict[str, float]:
        """What a step's record has of its rollouts; a warning where they teach nothing, or where engine and trainer
        disagree. Collective."""
        if self._round is not None and "log_prob_gap" in record:
            self._look_at(record, self._round)
        mine = {f"seconds/{name}": self._seconds.get(name, 0.0) for name in _PHASES}
        memory = self._metrics.throughput.memory.phases
        mine |= {f"memory_gib/{name}": memory.get(name, 0) / 2**30 for name in _PHASES}
        largest = reduce_numbers(list(mine.values()), dist.ReduceOp.MAX)
        return {**self._figures, **{name: value for name, value in zip(mine, largest, strict=True) if value}}

    def _look_at(self, record: Mapping[str, Any], now: Round) -> None:
        """Warnings of a step, and its samples."""
        step, gap, limit = record["step"], record["log_prob_gap"], self._config.grpo.gap_warning
        what = f"trainer and engine differ by {gap:.3g} in a token's log-probability (grpo.gap_warning = {limit:g})"
        # With other weights than those that sampled, the gap has what the updates in between changed, too.
        if now.version == step - 1:
            self._warn("gap", gap > limit, step, f"{what}; is rollout.dtype fsdp.param_dtype?")
        what = "no group has a signal: the rewards within each are all the same, and teach nothing"
        todo = "look at samples.jsonl: are the prompts too hard or too easy, or the reward too coarse?"
        self._warn("signal", self._figures["rollout/without_signal"] == 1, step, f"{what}; {todo}")
        every = self._config.rollout.samples_every
        if every and step % every == 0:
            self._metrics.log_samples(step, self._best_and_worst(now))

    def _warn(self, name: str, is_so: bool, step: int, text: str) -> None:
        """A warning when something begins, not while it goes on."""
        if is_so and name not in self._warned:
            self._metrics.message(f"warning: step {step}: {text}")
        self._warned = self._warned | {name} if is_so else self._warned - {name}

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
        """Training state is on the host while this is open; at its end the engine gives memory back. Collective."""

        def wake_up_all() -> None:
            for model, _ in self._sleepers:
                wake_up(model)

        with self._phase("sleep"), agreement():
            for model, optimizer in self._sleepers:
                sleep(model, optimizer)
        try:
            with agreement():  # when all ranks' devices are free: a server may use several
                self._engine.wake("cache")
            yield
            with agreement():  # when no rank generates any more
                self._engine.sleep()
        except BaseException:
            with suppress(Exception):  # what went wrong first is what is reported
                wake_up_all()
            raise
        with self._phase("wake_up"), agreement():
            wake_up_all()

    def _make_round(self, number: int, *, version: int) -> Round:
        """A round with its rewards, on every rank; the next one is begun. Collective."""
        asked, sampled_by = self._asked, version
        if asked is not None and asked.number == number:
            responses, sampled_by = self._responses(asked), asked.version
        else:
            responses = _from_all_ranks(self._generate_awake_or_asleep(self._requests(number), version))
        self._asked = None
        if self._config.rollout.ahead and (number + 1) * self._config.rollout.updates < self._prompts.total_steps:
            self._asked = self._begin(number + 1, version)
        indices, n = self._prompts.of_round(number), self._config.rollout.n
        rewards = self._rewarded([self._prompts.prompts[index] for index in indices], responses, n=n)
        scored = enumerate(zip(responses, rewards.tolist(), strict=True))
        rollouts = [Rollout(indices[at // n], response, tuple(values)) for at, (response, values) in scored]
        return Round(number, sampled_by, rollouts)

    def _requests(self, number: int) -> list[Request]:
        """Of all responses of a round, group by group."""
        seed, ids = self._config.run.seed, self._prompts.prompts
        # A prompt is known by its place in the round, since a round may reach from one epoch into the next.
        places = enumerate(self._prompts.of_round(number))
        turns = range(self._config.rollout.n)
        return [Request(ids[index].ids, (seed, number, at, turn)) for at, index in places for turn in turns]

    def _generate_awake_or_asleep(self, requests: Sequence[Request], version: int) -> list[Response]:
        """This rank's part of the responses to ``requests``, after a sync. Collective."""
        self._sync(version)
        with self._asleep() if self._config.rollout.sleep else nullcontext(), self._phase("generate"), agreement():
            return self._generate(requests, version)

    def _begin(self, number: int, version: int) -> Asked:
        """Send the weights of now, and let the engine generate a round with them while the trainer goes on."""
        asked = Asked(number, version)
        self._sync(version)

        def work() -> None:
            start = time.perf_counter()
            try:
                found = self._generate(self._requests(number), version)
                asked.seconds = time.perf_counter() - start
                asked.responses.set_result(found)
            except Exception as error:
                asked.responses.set_exception(error)

        threading.Thread(target=work, daemon=True).start()  # a pool's would keep the process from ending
        return asked

    def _responses(self, asked: Asked) -> list[Response]:
        """All responses of a round, on every rank, once they have come. Collective."""
        with self._phase("wait"), agreement():
            mine = asked.responses.result()
        if asked.seconds is not None:
            self._seconds["generate"] = asked.seconds
        return _from_all_ranks(mine)

    def _sync(self, version: int) -> None:
        with self._phase("sync"):
            if self._config.rollout.sleep:
                with agreement():  # when the last step's memory is free on all ranks' devices
                    give_back_memory(self._mesh.device)
                with agreement():
                    self._engine.wake("weights")
            sync = {"dtype": self._engine.dtype, "bucket_mib": self._config.weight_sync.bucket_mib}
            sync_weights(self._model, self._engine, version=version, **sync)

    def _generate(self, requests: Sequence[Request], version: int) -> list[Response]:
        """This rank's part of the responses."""
        self._engine.require(version)
        return self._engine.generate(self._mine(requests), **self._config.rollout.sampling)

    def _mine(self, items: Sequence[Any]) -> Sequence[Any]:
        """Of what all ranks have alike, those that this one deals with."""
        return items[self._mesh.rank :: world_size()]

    def _rewarded(self, prompts: Sequence[Prompt], responses: Sequence[Response], *, n: int) -> np.ndarray:
        """Each response's reward by each function, float64 ``[responses, functions]``, on every rank. Collective.

        A rank scores whole groups of ``n``, so that a function may compare within them.
        """
        mine = [group * n + turn for group in self._mine(range(len(prompts))) for turn in range(n)]
        with self._phase("reward"), agreement():
            found = self._score([prompts[at // n] for at in mine], [responses[at] for at in mine])
        return np.concatenate(_from_all_ranks(found.reshape(-1, n, found.shape[1])))

    def _score(self, prompts: Sequence[Prompt], responses: Sequence[Response]) -> np.ndarray:
        """The rewards of this rank's responses, of which there may be none."""
        texts, ids = [self._text(response) for response in responses], [response.ids for response in responses]
        return self._rewards(arguments_of(prompts, texts, ids, [not response.is_whole for response in responses]))

    def _text(self, response: Response) -> str:
        return str(self._tokenizer.decode(response.ids, skip_special_tokens=True))

    def _totals(self, rollouts: Sequence[Rollout]) -> np.ndarray:
        """The weighted sum of each rollout's rewards, float64 ``[groups, n]``."""
        rewards = np.array([rollout.rewards for rollout in rollouts])
        return (rewards @ self._rewards.weights).reshape(-1, self._config.rollout.n)

    def _means(self, rewards: np.ndarray, responses: Sequence[Response]) -> dict[str, float]:
        """Of responses and their rewards ``[responses, functions]``."""
        by_function = zip(self._rewards.names, rewards.mean(axis=0).tolist(), strict=True)
        return {
            "reward": float((rewards @ self._rewards.weights).mean()),
            "response_length": float(np.mean([len(response.ids) for response in responses])),
            **{f"reward/{name}": mean for name, mean in by_function},
        }

    def _best_and_worst(self, now: Round) -> list[dict[str, Any]]:
        """The best and the worst response to the first prompt."""
        rollouts = now.rollouts[: self._config.rollout.n]
        totals, prompt = self._totals(rollouts)[0], self._prompts.prompts[rollouts[0].prompt]
        chosen = dict.fromkeys((int(totals.argmax()), int(totals.argmin())))
        return [self._sample(prompt, rollouts[at].response, float(totals[at])) for at in chosen]

    def _sample(self, prompt: Prompt, response: Response, reward: float) -> dict[str, Any]:
        asked = prompt.messages
        text = asked if isinstance(asked, str) else str(asked[-1].get("content") or "")
        answer = self._text(response)
        return {"prompt": text, "answer": answer, "reward": reward, "truncated": not response.is_whole}


def _from_all_ranks(mine: Sequence[Any] | np.ndarray) -> list[Any]:
    """All items in order, of which rank r of R has those with the numbers r, r + R, … Collective."""
    parts = gather_objects(mine)
    return [parts[number % len(parts)][number // len(parts)] for number in range(sum(map(len, parts)))]
