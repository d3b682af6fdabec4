"""The engine of a run, and its responses with the model's current weights.

Every rank asks for a part of the responses; then all ranks get all of them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.optim import Optimizer
from transformers import PreTrainedModel

from fsdp2kit.config.rl_schema import RLConfig
from fsdp2kit.job import status
from fsdp2kit.job.distributed import agreement, gather_objects, rank, reduce_numbers, world_size
from fsdp2kit.job.stop import Stopped
from fsdp2kit.model.assets import generation_config
from fsdp2kit.model.build import build_model, materialize, source_of
from fsdp2kit.model.dtypes import cast_model
from fsdp2kit.model.tokenizer import turn_ends
from fsdp2kit.parallel.tensor_parallel import apply_tensor_parallel
from fsdp2kit.rl.conversations import Conversations, Question
from fsdp2kit.rl.engine import Engine, Response
from fsdp2kit.rl.server_engine import ServerEngine
from fsdp2kit.rl.sglang_server import SGLangServer
from fsdp2kit.rl.sleep import give_back_memory, sleep, wake_up
from fsdp2kit.rl.transformers_engine import TransformersEngine
from fsdp2kit.rl.vllm_server import VLLMServer
from fsdp2kit.rl.weight_sync import sync_weights
from fsdp2kit.train.metrics import Metrics


def build_engine(config: RLConfig, model: PreTrainedModel, *, tokenizer: Any, device: torch.device) -> Engine:
    """The engine of ``[rollout]``, which waits for its first weights. Collective.

    Args:
        model: the trained model; the engine's has the same config and no adapters.
        device: where an embedded engine keeps its weights.
    """
    section, source, dtype = config.rollout, source_of(model), getattr(torch, config.engine_dtype)
    found, _ = generation_config(
        source.config, tokenizer=tokenizer, source=source.directory, stops=turn_ends(tokenizer)
    )
    ends = [] if found.eos_token_id is None else found.eos_token_id
    stops = [ends] if isinstance(ends, int) else list(ends)
    if section.engine != "transformers":
        server = {"vllm": VLLMServer, "sglang": SGLangServer}[section.engine]
        run, seconds = gather_objects(secrets.token_hex(4))[0], 60 * config.run.timeout_minutes
        options: Any = {"run": run, "is_main": rank() == 0, "stops": stops, "weight_sync": config.weight_sync}
        with agreement():
            servers = [server(section, url, timeout=seconds, **options) for url in section.urls]
            first = rank() % len(servers)  # where a rank begins: a few requests of each do not meet at one server
            servers = servers[first:] + servers[:first]
            return ServerEngine(servers, dtype=dtype, stops=stops, at_once=section.batch_size)
    copy: Any = build_model(config.model.model_copy(update={"adapter": None, "freeze": []}))
    with agreement():
        cast_model(copy.eval().requires_grad_(False), dtype)
        tp = section.tp
        group = apply_tensor_parallel(copy, tp, device=device).get_group() if tp > 1 else None
        materialize(copy, device=device)
        return TransformersEngine(section, copy, stops=stops, pad_id=tokenizer.pad_token_id, group=group)


def rest_until_asked(engine: Engine, config: RLConfig) -> None:
    """With ``rollout.sleep``, leave the devices to the trainer. Collective.

    Call it once the run directory is open: until then another run with this directory may be using the server.
    """
    if config.rollout.sleep:
        with agreement():
            engine.sleep()


_PHASES = ("sync", "sleep", "generate", "wake_up", "wait", "reward", "evaluate")


class Phases:
    """Seconds and peak memory of what a step does besides training."""

    def __init__(self, metrics: Metrics) -> None:
        self._memory = metrics.throughput.memory
        self.seconds: dict[str, float] = {}
        """Seconds of this step, by phase."""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure what this encloses."""
        start = time.perf_counter()
        self._memory.end(None)
        status.enter(name)
        yield
        self._memory.end(name)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def figures(self) -> dict[str, float]:
        """``seconds/PHASE`` and ``memory_gib/PHASE`` of the step, the largest of any rank, no zeros. Collective."""
        mine = {f"seconds/{name}": self.seconds.get(name, 0.0) for name in _PHASES}
        mine |= {f"memory_gib/{name}": self._memory.phases.get(name, 0) / 2**30 for name in _PHASES}
        largest = reduce_numbers(list(mine.values()), dist.ReduceOp.MAX)
        return {name: value for name, value in zip(mine, largest, strict=True) if value}


class Generation:
    """Responses of the trained model, from an engine that receives its weights.

    Args:
        sleepers: with ``rollout.sleep``, these models leave the device while the engine generates, each with its
            optimizer, if any.
        phases: measures each part.
    """

    def __init__(
        self,
        config: RLConfig,
        model: Any,
        sleepers: Sequence[tuple[Any, Optimizer | None]],
        *,
        engine: Engine,
        conversations: Conversations,
        device: torch.device,
        phases: Phases,
    ) -> None:
        self._config, self._model, self._sleepers = config, model, sleepers
        self.engine, self._conversations, self._device, self._phase = engine, conversations, device, phases

    def respond(self, questions: Sequence[Question], version: int) -> list[Response]:
        """Responses to all questions with the current weights, on every rank. Collective.

        Args:
            version: the weights' version: the number of steps done.

        Raises:
            Stopped: on all ranks, if any is asked to stop.
        """
        self.sync(version)
        with self._asleep() if self._config.rollout.sleep else nullcontext(), self._phase("generate"), agreement():
            mine = self.generate(my_part(questions), version)
        return from_all_ranks(mine)

    def sync(self, version: int) -> None:
        """Send the current weights to the engine, which must not be generating. Collective."""
        with self._phase("sync"):
            if self._config.rollout.sleep:
                with agreement():  # the last step's memory must be free on all ranks' devices
                    give_back_memory(self._device)
                with agreement():
                    self.engine.wake("weights")
            sync = {"dtype": self.engine.dtype, "bucket_mib": self._config.weight_sync.bucket_mib}
            sync_weights(self._model, self.engine, version=version, **sync)

    def generate(self, questions: Sequence[Question], version: int) -> list[Response]:
        """Responses to this rank's questions, with the weights of ``version``."""
        self.engine.require(version)
        return self._conversations.respond(questions, self.engine)

    @contextmanager
    def _asleep(self) -> Iterator[None]:
        """Keep training state on the host inside; at the end, also after `Stopped`, the engine frees its memory.

        Collective.
        """

        def wake_up_all() -> None:
            for model, _ in self._sleepers:
                wake_up(model)

        with self._phase("sleep"), agreement():
            for model, optimizer in self._sleepers:
                sleep(model, optimizer)
        left: Stopped | None = None
        try:
            with agreement():  # once all ranks' devices are free: a server may use several
                self.engine.wake("cache")
            try:
                yield
            except Stopped as request:  # on all ranks
                left = request
            with agreement():  # once no rank generates any more
                self.engine.sleep()
        except BaseException:
            with suppress(Exception):  # the first error is the one to report
                wake_up_all()
            raise
        with self._phase("wake_up"), agreement():
            wake_up_all()
        if left is not None:
            raise left


def my_part(items: Sequence[Any]) -> Sequence[Any]:
    """This rank's part of items that all ranks have: those with the numbers r, r + R, … on rank r of R."""
    return items[rank() :: world_size()]


def from_all_ranks(mine: Sequence[Any] | np.ndarray) -> list[Any]:
    """Gather every rank's `my_part` and restore the order. Collective."""
    parts = gather_objects(mine)
    return [parts[number % len(parts)][number // len(parts)] for number in range(sum(map(len, parts)))]
