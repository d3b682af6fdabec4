"""The embedded rollout engine: rows that leave their batch, batches run to the end, and continuous batching."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import ContinuousBatchingConfig

from fsdp2kit.bench.harness import Side, Task, run_sides, task_rows
from fsdp2kit.bench.storage import llama_config
from fsdp2kit.config.rl_schema import RLConfig
from fsdp2kit.errors import RunFailure
from fsdp2kit.job.distributed import World
from fsdp2kit.rl.engine import Request
from fsdp2kit.rl.transformers_engine import TransformersEngine


def bench_rollouts(
    world: World,
    *,
    params: float = 0.05,
    requests: int = 32,
    batch_size: int = 32,
    lengths: Literal["tail", "uniform", "equal"] = "tail",
    longest: int = 100,
    rounds: int = 3,
    continuous: bool = False,
) -> dict[str, Any]:
    """The embedded engine beside its batches run to their longest response, and transformers' continuous batching.

    A random Llama in float32. Prompts have 20 to ``longest`` tokens. Responses end by their lengths, not by a token.

    Args:
        params: size of the model, in 10^9 parameters.
        requests: in a round.
        batch_size: rows of a batch.
        lengths: tail: an eighth have the longest, the others 10 tokens on average; uniform: 1 to the longest.
        longest: tokens of the longest response.
        rounds: that are timed.
        continuous: also transformers' continuous batching, which takes no random numbers of a request's own.
    """
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(llama_config(params * 1e9), dtype=torch.float32)
    model.to(world.device).eval().generation_config.eos_token_id = None
    asked = _requests(requests, lengths, longest, model.config.vocab_size)
    options = {"recipe": "bench", "reward": [{"function": "none:none"}], "rollout": {"batch_size": batch_size}}
    section, found = RLConfig.model_validate(options).rollout, {}

    def work(name: str, kind: type[TransformersEngine]) -> None:
        engine = kind(section, model, stops=(), pad_id=0)
        found[name] = engine.generate(asked, max_new_tokens=longest, temperature=1.0)

    kinds = {"fsdp2kit": TransformersEngine, "to the longest": _ToTheLongest}
    sides: dict[str, Side] = {name: Task(partial(work, name, kind)) for name, kind in kinds.items()}
    if continuous:
        sides["continuous batching"] = _Continuous(copy.deepcopy(model), asked, batch_size)
    rows = task_rows(run_sides(sides, rounds=rounds, warmup=1, world=world))
    ours, others = ([one.ids for one in responses] for responses in found.values())
    return {"rows": rows, "checks": {"same_responses": ours == others}, "tokens": sum(map(len, ours))}


class _ToTheLongest(TransformersEngine):
    share = 1.0


def _requests(count: int, lengths: str, longest: int, vocabulary: int) -> list[Request]:
    generator = np.random.default_rng(0)
    rooms = generator.integers(1, longest, count, endpoint=True)
    if lengths == "tail":
        short = generator.geometric(1 / 10, count).clip(max=longest)
        rooms = np.where(np.arange(count) % 8 == 0, longest, short)
    elif lengths == "equal":
        rooms[:] = longest
    prompts = [
        generator.integers(vocabulary, size=size).tolist() for size in generator.integers(20, longest + 20, count)
    ]
    return [Request(prompt, (at,), room=int(rooms[at])) for at, prompt in enumerate(prompts)]


class _Continuous(Side):
    """Every request by continuous batching; starting and ending it is not timed.

    transformers' ``generate_batch`` would give all responses the same length.
    """

    def __init__(self, model: Any, asked: Sequence[Request], at_once: int) -> None:
        self._model, self._asked, self._at_once = model, asked, at_once

    def prepare(self) -> None:
        sampling: Any = {"do_sample": True, "eos_token_id": -1, "pad_token_id": 0}  # no token ends a response
        sizes: Any = {
            "max_requests_per_batch": self._at_once,
            "num_blocks": 4 * self._at_once,
            "max_batch_tokens": 512,
        }
        batching = ContinuousBatchingConfig(return_logprobs=True, **sizes)
        options = {"generation_config": GenerationConfig(**sampling), "continuous_batching_config": batching}
        self._manager = self._model.init_continuous_batching(**options)
        self._manager.start()

    def step(self) -> None:
        for one in self._asked:
            self._manager.add_request(list(one.ids), max_new_tokens=one.room)
        ended = 0
        while ended < len(self._asked):
            result = self._manager.get_result(timeout=1)
            if not self._manager.is_running():
                raise RunFailure("continuous batching ended before its last response")
            ended += result is not None and result.is_finished()

    def outcome(self) -> None:
        self._manager.stop(block=True)
