"""The embedded rollout engine: transformers' generation, with a copy of the model on every rank or group of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel

from fsdp2kit.config.rl_schema import RolloutConfig
from fsdp2kit.distributed import agreement, gather_objects, local_part
from fsdp2kit.errors import RunFailure
from fsdp2kit.model.names import Source, find_sources, tied_names
from fsdp2kit.parallel.tensor_parallel import copy_part
from fsdp2kit.rl.engine import Bucket, Engine, EngineMemory, Request, Response
from fsdp2kit.rl.sleep import check_awake, sleep, wake_up


class TransformersEngine(Engine):
    """Generates in padded batches with a cache; see `Engine`.

    Args:
        model: materialised, in evaluation mode.
        stops: tokens that end a response.
        pad_id: fills prompts up from the left; attention leaves it out. None: any token does.
        group: the ranks that the model is split over; they generate together. None: the model is whole.
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
        self._group, self._batch_size, self._stops = group, section.batch_size, tuple(stops)
        self._pad_id = pad_id if pad_id is not None else next(iter(stops), 0)
        self._missing = set(model.state_dict()) - set(tied_names(model))
        self._sources: dict[tuple[str, ...], list[Source]] = {}
        embedding: Any = model.get_input_embeddings()  # other parameters may be kept in float32
        self._device, self.dtype = embedding.weight.device, embedding.weight.dtype

    def describe(self) -> str:
        size = sum(local_part(parameter).nbytes for parameter in self._model.parameters()) / 2**30
        dtype = str(self.dtype).removeprefix("torch.")
        where = "on every rank" if self._group is None else f"on every {self._group.size()} ranks, on each"
        return f"rollouts: transformers, a whole copy of the model {where}, {size:.2f} GiB in {dtype}"

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], *, max_new_tokens: int, temperature: float) -> list[Response]:
        """Sample a response to each request. Collective among the ranks that share the model.

        A response depends on the weights, the prompt and the request's seed; on its neighbours in a batch only
        through rounding.
        """
        check_awake(self._model)
        asked, before = list(requests), 0
        if self._group is not None:  # they answer the requests of all of them, and each keeps its own
            by_rank = gather_objects(asked, group=self._group)
            asked = [request for part in by_rank for request in part]
            before = sum(map(len, by_rank[: self._group.rank()]))
        # Similar lengths together, so that little is padded.
        order = sorted(range(len(asked)), key=lambda at: -len(asked[at].ids))
        found: dict[int, Response] = {}
        for start in range(0, len(order), self._batch_size):
            part = order[start : start + self._batch_size]
            responses = self._generate([asked[at] for at in part], max_new_tokens, temperature)
            found.update(zip(part, responses, strict=True))
        return [found[before + at] for at in range(len(requests))]

    def _generate(self, requests: Sequence[Request], max_new_tokens: int, temperature: float) -> list[Response]:
        left: Any = {"batch_first": True, "padding_side": "left"}
        max_new_tokens = max(min(request.room or max_new_tokens, max_new_tokens) for request in requests)
        prompts = [torch.tensor(request.ids) for request in requests]
        ids = pad_sequence(prompts, padding_value=self._pad_id, **left)
        mask = pad_sequence([torch.ones_like(prompt) for prompt in prompts], **left)
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
        rooms = [request.room for request in requests]
        return [self._cut(*row) for row in zip(sequences[:, ids.shape[1] :].tolist(), log_probs, rooms, strict=True)]

    def _cut(self, ids: list[int], log_probs: list[float], room: int | None) -> Response:
        ids = ids[:room]
        length = next((at + 1 for at, token in enumerate(ids) if token in self._stops), None)
        return Response(ids[:length], log_probs[: length or len(ids)], is_whole=length is not None)

    def _any_rank(self, waits: bool) -> bool:
        return waits if self._group is None else any(gather_objects(waits, group=self._group))

    def together(self) -> AbstractContextManager[None]:
        return nullcontext() if self._group is None else agreement(self._group)

    def load_weights(self, bucket: Bucket) -> None:
        """Copy a bucket's tensors into the engine's model, converted like those of a Hugging Face directory."""
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
        """See `VersionedWeights.finish_update`; a RunFailure if some weights never came."""
        if self._missing:
            raise RunFailure(f"the rollout engine did not get {min(self._missing)} ({len(self._missing)} in all)")
        super().finish_update(version)

    def sleep(self) -> None:
        sleep(self._model, None)

    def wake(self, what: EngineMemory) -> None:
        if what == "weights":
            wake_up(self._model)


class _Sampler(LogitsProcessor):
    """Chooses each sequence's next token by the sequence's own random numbers, and masks all others.

    Args:
        uniform: float64 ``[B, max_new_tokens]`` in [0, 1): one number a token.
        group: ranks that take the tokens of its first rank.
    """

    def __init__(self, uniform: Tensor, temperature: float, *, group: dist.ProcessGroup | None) -> None:
        self._uniform, self._temperature, self._group = uniform, temperature, group
        self.log_probs: list[Tensor] = []
        """Log-probabilities of the chosen tokens: float32 ``[B]`` for each step."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        log_probs = torch.log_softmax(scores.float() / self._temperature, dim=-1)
        # In float64, since a sum over the vocabulary in float32 would miss rare tokens.
        reached = log_probs.double().exp().cumsum(dim=-1)
        wanted = self._uniform[:, len(self.log_probs), None] * reached[:, -1:]
        tokens = torch.searchsorted(reached, wanted, right=True).clamp(max=scores.shape[1] - 1)
        if self._group is not None:  # rounding differs among ranks, and texts would then differ, too
            dist.broadcast(tokens, group_src=0, group=self._group)
        self.log_probs.append(log_probs.gather(1, tokens).squeeze(1))
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)
