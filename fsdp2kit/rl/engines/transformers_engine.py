"""The embedded rollout engine: transformers' generation, with a copy of the model on every rank or group of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, PreTrainedModel, StoppingCriteria

from fsdp2kit.config.sections.rollout import RolloutConfig
from fsdp2kit.errors import RunFailure
from fsdp2kit.job import stop
from fsdp2kit.job.distributed import agreement, gather_objects, local_part
from fsdp2kit.job.stop import Stopped
from fsdp2kit.parallel.tensor_parallel import fill_split
from fsdp2kit.rl.engines.engine import Bucket, EngineMemory, Request, Response, RolloutEngine
from fsdp2kit.rl.sleep import check_awake, sleep, wake_up
from fsdp2kit.weights.conversion import match_files
from fsdp2kit.weights.record import find_ties
from fsdp2kit.weights.transfer import MappingReader, Reader, WeightEntry, transfer


class TransformersEngine(RolloutEngine):
    """Generates in padded batches with a cache, which rows leave as they end; see `RolloutEngine`.

    Args:
        model: materialised, in evaluation mode.
        stops: tokens that end a response.
        pad_id: fills prompts up from the left; attention leaves it out. None: any token does.
        group: the ranks that the model is split over; they generate together. None: the model is whole.
    """

    share = 0.25
    """Rows leave their batch when this share of them have ended; 1: when all have."""

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
        self._batch_size = section.batch_size
        self._stops = tuple(stops)
        self._pad_id = pad_id if pad_id is not None else next(iter(stops), 0)
        self._missing = set(model.state_dict()) - set(find_ties(model))
        self._entries: dict[tuple[str, ...], list[WeightEntry]] = {}
        embedding: Any = model.get_input_embeddings()  # other parameters may be kept in float32
        self._device = embedding.weight.device
        self.dtype = embedding.weight.dtype

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
        asked = list(requests)
        before = 0
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
        """A batch. Whenever `share` of its rows have ended, generation goes on with the others alone."""
        left: Any = {"batch_first": True, "padding_side": "left"}
        rooms = [min(request.room or max_new_tokens, max_new_tokens) for request in requests]
        prompts = [torch.tensor(request.ids) for request in requests]
        ids = pad_sequence(prompts, padding_value=self._pad_id, **left).to(self._device)
        mask = pad_sequence([torch.ones_like(prompt) for prompt in prompts], **left).to(self._device)
        # The bits of PCG64 are the same on every machine and in every numpy.
        bits = np.stack([np.random.PCG64(request.seed).random_raw(max(rooms)) for request in requests])
        uniform = torch.from_numpy((bits >> 11) * 2.0**-53).to(self._device)
        sampler = _Sampler(uniform, temperature, rooms=rooms, stops=self._stops, group=self._group)
        cache = {}
        while len(ids):
            settings = GenerationConfig(
                max_new_tokens=max(rooms) - sampler.steps,
                do_sample=False,  # the sampler has chosen already
                eos_token_id=list(self._stops),  # none: not those of the model either
                pad_token_id=self._pad_id,
                return_dict_in_generate=True,
            )
            found = self._model.generate(
                ids,
                attention_mask=mask,
                generation_config=settings,
                logits_processor=[sampler],
                stopping_criteria=[_Leaves(sampler, self.share)],
                synced_gpus=False,  # other ranks generate something else
                **cache,
            )
            going = sampler.drop_ended()
            new = found.sequences.shape[1] - ids.shape[1]
            ids = found.sequences[going]
            mask = pad(mask, (0, new), value=1)[going]
            cache = self._part(found.past_key_values, going)
        return [
            self._cut(*row) for row in zip(sampler.tokens.tolist(), sampler.log_probs.tolist(), rooms, strict=True)
        ]

    def _part(self, cache: Any, rows: Any) -> dict[str, Any]:
        """What `generate` goes on from with these rows.

        Nothing if the cache is not transformers' usual one: the rows are computed anew. That is slow, so it happens
        once, and from then on this model's batches run to their longest response.
        """
        if type(cache) is DynamicCache and "past_key_values" in signature(self._model.forward).parameters:
            cache.reorder_cache(rows)
            return {"past_key_values": cache}
        self.share = 1.0
        return {}

    def _cut(self, ids: list[int], log_probs: list[float], room: int) -> Response:
        ids = ids[:room]
        length = next((at + 1 for at, token in enumerate(ids) if token in self._stops), None)
        return Response(ids[:length], log_probs[: length or len(ids)], is_whole=length is not None)

    def _any_rank(self, waits: bool) -> bool:
        return waits if self._group is None else any(gather_objects(waits, group=self._group))

    def together(self) -> AbstractContextManager[None]:
        return nullcontext() if self._group is None else agreement(self._group)

    def load_weights(self, bucket: Bucket) -> None:
        """Copy a bucket's tensors into the engine's model, converted like those of a Hugging Face directory."""
        stored = dict(bucket.tensors())
        names = tuple(stored)
        if names not in self._entries:
            match = match_files(self._model, {name: tensor.to("meta") for name, tensor in stored.items()})
            assert not match.unexpected, (
                f"a bucket holds {match.unexpected[0]}, which the engine's model does not have"
            )
            self._entries[names] = match.entries
        transfer(self._entries[names], MappingReader(stored), self._fill)

    def _fill(self, forms: Iterable[str], reader: Reader) -> None:
        targets = self._model.state_dict()
        for name in forms:
            fill_split(targets[name], reader.read(name))
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
    """Chooses each row's next token by the row's own random numbers, and masks all others.

    It raises `Stopped` where the run is asked to stop, on all ranks of a group at the same token.

    Args:
        uniform: float64 ``[B, N]`` in [0, 1): one number a token.
        rooms: most tokens of each row, N at most.
        stops: tokens that end a row.
        group: ranks that take the tokens of its first rank.
    """

    def __init__(
        self,
        uniform: Tensor,
        temperature: float,
        *,
        rooms: Sequence[int],
        stops: Sequence[int],
        group: dist.ProcessGroup | None,
    ) -> None:
        self._uniform = uniform
        self._temperature = temperature
        self._group = group
        self._rooms = torch.tensor(rooms, device=uniform.device)
        self._stops = torch.tensor(stops, dtype=torch.long, device=uniform.device)
        self._rows = torch.arange(len(uniform), device=uniform.device)
        self.steps = 0
        self.goes_on = torch.ones_like(self._rows, dtype=torch.bool)
        """Which of the rows that are left have not ended."""
        self.tokens = torch.zeros_like(uniform, dtype=torch.long)
        """The chosen tokens ``[B, N]``; those after a row's end mean nothing."""
        self.log_probs = torch.zeros_like(uniform, dtype=torch.float32)
        """Their log-probabilities ``[B, N]``."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        log_probs = torch.log_softmax(scores.float() / self._temperature, dim=-1)
        # In float64, since a sum over the vocabulary in float32 would miss rare tokens.
        reached = log_probs.double().exp().cumsum(dim=-1)
        wanted = self._uniform[self._rows, self.steps, None] * reached[:, -1:]
        tokens = torch.searchsorted(reached, wanted, right=True).clamp(max=scores.shape[1] - 1)
        asked_to_stop = stop.requested()
        if self._group is not None:  # rounding differs among ranks, and texts would then differ, too
            sent = torch.cat([tokens, tokens.new_tensor([[asked_to_stop]])])  # they leave at the same token
            dist.broadcast(sent, group_src=0, group=self._group)
            tokens = sent[:-1]
            asked_to_stop = bool(sent[-1])
        if asked_to_stop:
            raise Stopped("rollouts")
        self.tokens[self._rows, self.steps] = tokens.squeeze(1)
        self.log_probs[self._rows, self.steps] = log_probs.gather(1, tokens).squeeze(1)
        self.steps += 1
        self.goes_on &= ~torch.isin(tokens.squeeze(1), self._stops) & (self.steps < self._rooms[self._rows])
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)

    def drop_ended(self) -> Tensor:
        """Leave out the rows that have ended; the places of the others among the rows so far."""
        going = self.goes_on.nonzero().squeeze(1)
        self._rows = self._rows[going]
        self.goes_on = self.goes_on[going]
        return going


class _Leaves(StoppingCriteria):
    """Ends a call of `generate` once this share of its rows have ended."""

    def __init__(self, sampler: _Sampler, share: float) -> None:
        self._sampler = sampler
        self._share = share

    def __call__(self, input_ids: Tensor, scores: Tensor, **options: Any) -> Tensor:
        goes_on = self._sampler.goes_on
        return (goes_on.sum() <= (1 - self._share) * len(goes_on)).expand(len(goes_on))
