"""What a rollout engine is, and the embedded one: transformers, with a copy of the model on every rank or few."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel

from fsdp2kit.config.rl_schema import RLConfig, RolloutConfig
from fsdp2kit.distributed import agreement, gather_objects, local_part, rank
from fsdp2kit.errors import RunFailure
from fsdp2kit.model.assets import generation_config
from fsdp2kit.model.build import build_model, materialize, source_of
from fsdp2kit.model.names import Source, find_sources, tied_names
from fsdp2kit.model.tokenizer import turn_ends
from fsdp2kit.parallel.tensor_parallel import apply_tensor_parallel, copy_part
from fsdp2kit.rl.bucket import Bucket, VersionedWeights
from fsdp2kit.rl.sleep import check_awake, sleep, wake_up


@dataclass(frozen=True)
class Request:
    """A prompt to be answered."""

    ids: Sequence[int]
    """Token ids of the prompt."""
    seed: tuple[int, ...]
    """Decides what is sampled, together with the prompt and the weights."""


@dataclass(frozen=True)
class Response:
    """A sampled answer."""

    ids: list[int]
    """Token ids, with the stop token if there is one."""
    log_probs: list[float]
    """Of each token when it was sampled, at the sampling's temperature."""
    is_whole: bool
    """Whether a stop token ends it; else it was cut at ``max_new_tokens``."""


EngineMemory = Literal["weights", "cache"]


class Engine(VersionedWeights):
    """Generates responses with weights that `sync_weights` sends to it; every rank has one."""

    dtype: torch.dtype
    """Of its weights."""

    def generate(self, requests: Sequence[Request], *, max_new_tokens: int, temperature: float) -> list[Response]:
        """Sample a response to each request, with the weights of the last update."""
        raise NotImplementedError

    def flush_cache(self) -> None:
        """Forget what was computed with earlier weights."""

    def sleep(self) -> None:
        """Give device memory back, that of the weights and of the cache. Call it when no rank generates."""

    def wake(self, what: EngineMemory) -> None:
        """Take memory again: that of the weights before an update, that of the cache before `generate`."""

    def describe(self) -> str:
        """A line for the start of a run."""
        raise NotImplementedError


def build_engine(config: RLConfig, model: PreTrainedModel, *, tokenizer: Any, device: torch.device) -> Engine:
    """The engine of ``[rollout]``, which waits for its first weights. Collective.

    Args:
        model: the model that is trained; the engine's has the same config, and no adapters.
        device: where an embedded engine keeps its weights.
    """
    source = source_of(model)
    found, _ = generation_config(
        source.config, tokenizer=tokenizer, source=source.directory, stops=turn_ends(tokenizer)
    )
    ends = [] if found.eos_token_id is None else found.eos_token_id
    stops = [ends] if isinstance(ends, int) else list(ends)
    dtype = getattr(torch, config.engine_dtype)
    engine: Engine
    if config.rollout.engine == "transformers":
        copy = build_model(config.model.model_copy(update={"adapter": None, "freeze": []}))
        with agreement():
            engine = _embed(config, copy.eval().requires_grad_(False), dtype, stops, tokenizer.pad_token_id, device)
    else:
        from fsdp2kit.rl.sglang_engine import SGLangEngine
        from fsdp2kit.rl.vllm_engine import VLLMEngine

        server = VLLMEngine if config.rollout.engine == "vllm" else SGLangEngine
        run = gather_objects(secrets.token_hex(4))[0]
        with agreement():
            seconds = 60 * config.run.timeout_minutes
            engine = server(config.rollout, dtype=dtype, run=run, is_main=rank() == 0, stops=stops, timeout=seconds)
    return engine


def rest_until_asked(engine: Engine, config: RLConfig) -> None:
    """With ``rollout.sleep``, leave the devices to the trainer. Collective.

    Only when the run directory is this run's: a server may be in the hands of another that has it.
    """
    if config.rollout.sleep:
        with agreement():
            engine.sleep()


def _embed(
    config: RLConfig,
    copy: PreTrainedModel,
    dtype: torch.dtype,
    stops: Sequence[int],
    pad_id: int | None,
    device: torch.device,
) -> TransformersEngine:
    for parameter in copy.parameters():
        parameter.data = parameter.data.to(dtype)
    tp, group = config.rollout.tp, None
    if tp > 1:
        group = apply_tensor_parallel(copy, tp, device=device).get_group()
    materialize(copy, device=device)  # buffers keep their values and dtypes
    return TransformersEngine(config.rollout, copy, stops=stops, pad_id=pad_id, group=group)


class TransformersEngine(Engine):
    """transformers' own generation in padded batches with a cache; see `Engine`.

    Args:
        model: materialised, in evaluation mode.
        stops: tokens that end a response.
        pad_id: fills prompts up from the left; attention leaves it out. None: any token does.
        group: of the ranks that the model is split over; they generate together. None: it is whole.
    """

    def __init__(
        self,
        section: RolloutConfig,
        model: PreTrainedModel,
        *,
        stops: Sequence[int],
        pad_id: int | None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._model: Any = model
        self._group = group
        self._batch_size, self._stops = section.batch_size, tuple(stops)
        self._pad_id = pad_id if pad_id is not None else next(iter(stops), 0)
        self._missing = set(model.state_dict()) - set(tied_names(model))
        self._sources: dict[tuple[str, ...], list[Source]] = {}
        first = next(model.parameters())
        self._device, self.dtype = first.device, first.dtype

    def describe(self) -> str:
        size = sum(local_part(parameter).nbytes for parameter in self._model.parameters()) / 2**30
        dtype = str(self.dtype).removeprefix("torch.")
        where = "on every rank" if self._group is None else f"on every {self._group.size()} ranks, on each"
        return f"rollouts: transformers, a whole copy of the model {where}, {size:.2f} GiB in {dtype}"

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], *, max_new_tokens: int, temperature: float) -> list[Response]:
        """Sample a response to each request. Collective among the ranks that share the model.

        What is sampled depends on the weights, the prompt and the request's seed; on its neighbours in a batch only
        by rounding.
        """
        check_awake(self._model)
        if self._group is None:
            return self._respond(requests, max_new_tokens, temperature)
        # They answer what any of them was asked, and each keeps its own.
        asked = gather_objects(list(requests), group=self._group)
        found = self._respond([request for part in asked for request in part], max_new_tokens, temperature)
        start = sum(map(len, asked[: self._group.rank()]))
        return found[start : start + len(requests)]

    def _respond(self, requests: Sequence[Request], max_new_tokens: int, temperature: float) -> list[Response]:
        # Of similar lengths together, so that little is padded.
        order = sorted(range(len(requests)), key=lambda at: -len(requests[at].ids))
        found: dict[int, Response] = {}
        for start in range(0, len(order), self._batch_size):
            part = order[start : start + self._batch_size]
            responses = self._generate([requests[at] for at in part], max_new_tokens, temperature)
            found.update(zip(part, responses, strict=True))
        return [found[at] for at in range(len(requests))]

    def _generate(self, requests: Sequence[Request], max_new_tokens: int, temperature: float) -> list[Response]:
        width = max(len(request.ids) for request in requests)
        ids = torch.full((len(requests), width), self._pad_id)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, width - len(request.ids) :] = torch.tensor(request.ids)
            mask[row, width - len(request.ids) :] = 1
        # The bits of PCG64 are the same on every machine and in every numpy.
        bits = np.stack([np.random.PCG64(request.seed).random_raw(max_new_tokens) for request in requests])
        uniform = torch.from_numpy((bits >> 11) * 2.0**-53).to(self._device)
        sampler = _Sampler(uniform, temperature, group=self._group)
        settings = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,  # the sampler has chosen already
            eos_token_id=list(self._stops) or None,
            pad_token_id=self._pad_id,
        )
        sequences = self._model.generate(
            ids.to(self._device),
            attention_mask=mask.to(self._device),
            generation_config=settings,
            logits_processor=[sampler],
            synced_gpus=False,  # other ranks generate something else
        )
        log_probs = torch.stack(sampler.log_probs, dim=1).tolist()
        return [self._cut(*row) for row in zip(sequences[:, width:].tolist(), log_probs, strict=True)]

    def _cut(self, ids: list[int], log_probs: list[float]) -> Response:
        length = next((at + 1 for at, token in enumerate(ids) if token in self._stops), None)
        return Response(ids[:length], log_probs[: length or len(ids)], is_whole=length is not None)

    def load_weights(self, bucket: Bucket) -> None:
        """Copy a bucket's tensors, converted as those of a Hugging Face directory are, into the engine's model."""
        stored, targets = dict(bucket.tensors()), self._model.state_dict()
        names = tuple(stored)
        if names not in self._sources:
            self._sources[names], unknown = find_sources(self._model, names)
            assert not unknown, f"a bucket holds {unknown[0]}, which the engine's model does not have"
        for source in self._sources[names]:
            for name, value in source.tensors(self._model, stored):
                copy_part(targets[name], value[...])
                self._missing.discard(name)

    def finish_update(self, version: int) -> None:
        """All weights of this version were loaded.

        Raises:
            RunFailure: some never came, or another update was begun.
        """
        if self._missing:
            raise RunFailure(f"the rollout engine did not get {min(self._missing)} ({len(self._missing)} in all)")
        super().finish_update(version)

    def sleep(self) -> None:
        sleep(self._model, None)

    def wake(self, what: EngineMemory) -> None:
        if what == "weights":
            wake_up(self._model)


class _Sampler(LogitsProcessor):
    """Chooses each row's next token by that row's own random numbers, and leaves no other choice.

    Args:
        uniform: float64 ``[B, max_new_tokens]`` in [0, 1): one number a token.
        group: of ranks that take the tokens which its first one chooses.
    """

    def __init__(self, uniform: Tensor, temperature: float, *, group: dist.ProcessGroup | None) -> None:
        self._uniform, self._temperature, self._group = uniform, temperature, group
        self.log_probs: list[Tensor] = []
        """Of the chosen tokens, float32 ``[B]`` of each step."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        log_probs = torch.log_softmax(scores.float() / self._temperature, dim=-1)
        # In float64, since a sum over the vocabulary in float32 would miss rare tokens.
        reached = log_probs.double().exp().cumsum(dim=-1)
        wanted = self._uniform[:, len(self.log_probs), None] * reached[:, -1:]
        tokens = torch.searchsorted(reached, wanted, right=True).clamp(max=scores.shape[1] - 1)
        if self._group is not None:  # a rounding apart, ranks would go on with different texts
            dist.broadcast(tokens, group_src=0, group=self._group)
        self.log_probs.append(log_probs.gather(1, tokens).squeeze(1))
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)
