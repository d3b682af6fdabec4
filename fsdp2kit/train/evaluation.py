"""Held-out loss with perplexity or an objective's metrics, and the model's answers to prompts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fsdp2kit.config.schema import EvalConfig
from fsdp2kit.data.conversation import prompt_of
from fsdp2kit.data.loader import Batch
from fsdp2kit.data.rendered import Renderer
from fsdp2kit.data.tokens import encode_text, plain_prompt_ids
from fsdp2kit.errors import UserError
from fsdp2kit.job import status, stop
from fsdp2kit.job.distributed import agreement, reduce_numbers
from fsdp2kit.job.mesh import Mesh
from fsdp2kit.job.stop import Stopped
from fsdp2kit.model.loss_head import IGNORE
from fsdp2kit.model.tokenizer import special_ids
from fsdp2kit.parallel.context_parallel.batch import build_slice_batch
from fsdp2kit.parallel.context_parallel.layout import indices_of
from fsdp2kit.parallel.fsdp import reshard_all
from fsdp2kit.parallel.plan import ParallelPlan
from fsdp2kit.train.evaluating import read_traits
from fsdp2kit.train.step import (
    HeldOut,
    MetricNames,
    Objective,
    call_objective,
    next_batch,
    pack_sums,
    unpack_sums,
)

_BLOCK = 64  # rows grow by this many tokens at a time, so that a compiled model sees few lengths


def build_evaluation(
    section: EvalConfig,
    model: PreTrainedModel,
    held_out: Mapping[str, HeldOut],
    *,
    plan: ParallelPlan,
    mesh: Mesh,
    tokenizer: Any = None,
    objective: Objective | None = None,
) -> Evaluation | None:
    """The evaluation of ``[eval]``, or None if there are no held-out sets. Collective.

    Args:
        held_out: held-out batches by name; "" is the set without a name.
        tokenizer: with a chat template ``eval.prompts`` are messages, without one the beginnings of texts.
        objective: its loss and metrics are what is evaluated; None: cross-entropy, and perplexity.

    Raises:
        UserError: there are prompts and no tokenizer, or its template does not take them.
    """
    prompts: list[tuple[Any, list[int]]] = []
    with agreement():
        if section.prompts and tokenizer is None:
            raise UserError("eval.prompts", "need a tokenizer", "set model.tokenizer or model.path, or leave them out")
        for at, prompt in enumerate(section.model_dump()["prompts"]):
            prompts.append((prompt, prompt_ids(tokenizer, prompt, where=f"eval.prompts.{at}")))
    if not held_out:
        return None
    # Held-out batches of a recipe's own may have no digest.
    digests = {f"held-out rows {name}".strip(): getattr(one, "fingerprint", "") for name, one in held_out.items()}
    measured_by = {**digests, "eval.steps": str(section.steps), **read_traits(objective).measured_by}
    return Evaluation(section, model, held_out, prompts, plan, mesh, tokenizer, objective, measured_by)


@dataclass
class Evaluation:
    """Evaluates the sharded model during training; see `build_evaluation`."""

    section: EvalConfig
    model: Any
    held_out: Mapping[str, HeldOut]
    prompts: Sequence[tuple[Any, list[int]]]
    """Texts or lists of messages, each with its token ids."""
    plan: ParallelPlan
    mesh: Mesh
    tokenizer: Any
    objective: Objective | None = None
    measured_by: Mapping[str, str] = field(default_factory=dict)
    """What a loss depends on besides the weights; losses with the same values are comparable."""
    names: MetricNames = field(default_factory=MetricNames)
    """Of the objective's metrics."""

    @property
    def shown(self) -> list[str] | None:
        """The objective's metrics that the console shows; None without an objective."""
        return None if self.objective is None else self.names.shown

    def __call__(self) -> dict[str, float]:
        """Mean loss over the supervised tokens of the held-out sets, and its exponential, the perplexity. Collective.

        Returns:
            ``eval_loss`` and ``eval_perplexity`` over all tokens of all sets, and ``eval_loss/NAME`` and
            ``eval_perplexity/NAME`` of each named set. With an objective, its loss and, in place of the perplexity,
            its metrics ``eval_METRIC`` and ``eval_METRIC/NAME``, as means over its items.

        Raises:
            Stopped: before a batch, on all ranks, if any was asked to stop.
        """
        of_sets: dict[str, float] = {}
        sums = [0.0]
        items = 0
        with _in_eval_mode(self.model):
            for name, batches in self.held_out.items():
                of_set, count = self._sum_of_set(batches)
                sums = [one + other for one, other in zip_longest(sums, of_set, fillvalue=0.0)]
                items += count
                if name:
                    of_sets |= self._figures(of_set, count, f"/{name}")
        return {**self._figures(sums, items, ""), **of_sets}

    def answers(self) -> list[dict[str, Any]]:
        """Greedy answers to ``eval.prompts``, as ``{"prompt", "answer"}``; a prompt is as it was given. Collective.

        Raises:
            Stopped: before a token, on all ranks, if any was asked to stop.
        """
        found = []
        for prompt, ids in self.prompts:
            answer = generate(
                self.model,
                ids,
                max_new_tokens=self.section.max_new_tokens,
                stops=special_ids(self.tokenizer),
                plan=self.plan,
                mesh=self.mesh,
            )
            text = self.tokenizer.decode(answer, skip_special_tokens=True)
            found.append({"prompt": prompt, "answer": text.strip()})
        return found

    @torch.no_grad()
    def _sum_of_set(self, batches: HeldOut) -> tuple[list[float], int]:
        """A set's summed loss, then the sums of the objective's metrics, over all ranks; and the number of items."""
        shard = build_slice_batch(self.model.config, path=self.plan.attention, mesh=self.mesh)
        total: Tensor | None = None
        items = 0
        steps = batches.steps_per_epoch
        for index in range(min(steps, self.section.steps or steps)):
            batch = next_batch(batches, index, mesh=self.mesh, stop=stop.requested())
            if batch.stop:
                raise Stopped("an evaluation")
            status.enter("forward")
            items += batch.supervised_tokens if self.objective is None else batch.num_items
            for micro in batch.micro_batches:
                sums = self._sums_of(shard(micro)).double()
                total = sums if total is None else total + sums
        assert total is not None, "an evaluation has at least one batch"
        return self.mesh.sum_loss(total).tolist(), items

    def _sums_of(self, inputs: dict[str, Any]) -> Tensor:
        """The sums of a micro-batch, ``[1 + sources + metrics]``."""
        if self.objective is None:
            for name in ("documents", "num_documents"):  # for a recipe's objective
                inputs.pop(name, None)
            return self.model.loss_sum(**inputs)[None]
        loss, by_source, metrics = call_objective(self.objective, self.model, inputs)
        self.names.check(metrics)
        return pack_sums(loss, by_source, metrics, names=self.names.names).flatten()

    def _figures(self, sums: Sequence[float], items: int, suffix: str) -> dict[str, float]:
        """Means over items, by the keys of a record.

        Args:
            sums: over all ranks, as of `_sums_of`.
            suffix: of the keys.
        """
        means = [value / items for value in sums]
        loss, _, metrics = unpack_sums(means, self.names.names)
        figures = {f"eval_loss{suffix}": loss}
        if self.objective is None:
            figures[f"eval_perplexity{suffix}"] = math.exp(min(loss, 700.0))
        return figures | {f"eval_{name}{suffix}": mean for name, mean in metrics.items()}


@torch.no_grad()
def generate(
    model: Any,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    stops: Collection[int],
    plan: ParallelPlan,
    mesh: Mesh,
) -> list[int]:
    """Greedy continuation of ``prompt``, without a cache: one forward pass per token. Collective.

    Every rank runs the same row, or its part of it with context parallelism; the rank with the last token chooses.

    Raises:
        Stopped: after a token, on all ranks, if any was asked to stop.
    """
    shard = build_slice_batch(model.config, path=plan.attention, mesh=mesh)
    tokens = list(prompt)
    with _in_eval_mode(model):
        while len(tokens) < len(prompt) + max_new_tokens:
            multiple = _BLOCK * mesh.sizes.cp
            row = torch.zeros((1, -(-len(tokens) // multiple) * multiple), dtype=torch.int64)
            row[0, : len(tokens)] = torch.tensor(tokens)
            # The row is one document, so the padding after the tokens does not affect them.
            batch = Batch(row, torch.full_like(row, IGNORE), torch.arange(row.numel())[None], 0, len(tokens), 0)
            inputs = {name: value for name, value in shard(batch).items() if name not in ("labels", "index")}
            logits = model(**inputs, use_cache=False).logits
            local = indices_of(mesh.cp_rank, cp=mesh.sizes.cp, length=row.numel(), method=plan.attention.method)
            last = len(tokens) - 1
            decides = last in local and mesh.reads_first_share
            mine = float(logits[0, local.index(last)].argmax()) if decides else 0.0
            chosen, asked_to_stop = reduce_numbers([mine, float(stop.requested())])
            if asked_to_stop:
                raise Stopped("an answer")
            tokens.append(int(chosen))
            if tokens[-1] in stops:
                break
    return tokens[len(prompt) :]


@contextmanager
def _in_eval_mode(model: Any) -> Iterator[None]:
    """Evaluate inside; after it, also after `Stopped`, the model can be trained and saved."""
    model.eval()
    left: Stopped | None = None
    try:
        yield
    except Stopped as request:
        left = request
    # Units that keep their parameters for backward stay gathered here, and a checkpoint would not see the shards.
    reshard_all(model)
    model.train()
    if left is not None:
        raise left


def prompt_ids(tokenizer: Any, prompt: str | list[dict[str, Any]], *, where: str = "eval.prompts") -> list[int]:
    """Token ids of a prompt: messages where the tokenizer has a chat template, else the beginning of a text.

    Args:
        prompt: a text, which is a user's message, or messages.
        where: names it in errors.
    """
    if isinstance(prompt, str) and tokenizer.chat_template is None:
        return plain_prompt_ids(tokenizer, prompt)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if messages[-1]["role"] == "assistant":
        raise UserError(where, "ends in the assistant's message, so nothing is asked", "end it in a user's message")
    renderer = Renderer(tokenizer)
    rendered = renderer.render(prompt_of(messages, where=where))
    return encode_text(rendered.text, rendered, renderer)
