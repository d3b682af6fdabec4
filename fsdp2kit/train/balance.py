"""Keeping the experts of a mixture of experts evenly loaded (``[moe]``), and figures of their load; docs/moe.md.

The loss of a row counts as often as the row has items (targets), so that its mean over a global batch is the same
however rows are dealt out. Ranks that share a row add up the counts before they are multiplied. Each then adds its own
tokens' part of the loss: the probabilities need no exchange, and the gradients are summed with those of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2kit.config.optimization import AuxiliaryLossConfig, MoEConfig, RouterBiasConfig
from fsdp2kit.job.mesh import Mesh
from fsdp2kit.model.loss_head import IGNORE
from fsdp2kit.parallel.context_parallel.layout import chunks_of, take_chunks, to_device
from fsdp2kit.parallel.expert_parallel.routing import Routed, RoutingHooks, balance_losses, routing_biases
from fsdp2kit.parallel.plan import ParallelPlan
from fsdp2kit.train.metrics import Metrics
from fsdp2kit.train.step import Objective

Shard = Callable[[Any], dict[str, Any]]


class NoBalance:
    """Balances nothing. It has what the loop calls of `Balance`."""

    def __enter__(self) -> None: ...
    def __exit__(self, *exception: Any) -> None: ...
    def end_step(self, *, moves: bool) -> None: ...

    def shard(self, shard: Shard) -> Shard:
        return shard

    def objective(self, objective: Objective) -> Objective:
        return objective


def build_balance(
    section: MoEConfig, model: Any, *, plan: ParallelPlan, mesh: Mesh, metrics: Metrics
) -> Balance | NoBalance:
    """What keeps the experts of ``model`` evenly loaded, as ``[moe]`` says.

    Args:
        model: with its values, made parallel by ``plan``, which has checked that the section fits it.
        metrics: their records get figures of the load.
    """
    return NoBalance() if section.balance == "none" else Balance(section, model, plan=plan, mesh=mesh, metrics=metrics)


class Balance:
    """Balances experts while it is entered; see `build_balance`."""

    def __init__(self, section: MoEConfig, model: Any, *, plan: ParallelPlan, mesh: Mesh, metrics: Metrics) -> None:
        self._section, self._plan, self._mesh, self._metrics = section, plan, mesh, metrics
        self._weight = section.aux_weight if isinstance(section, AuxiliaryLossConfig) else None
        self._hooks = RoutingHooks(model, probabilities=self._weight is not None)
        self._sizes = [experts.num_experts for experts in self._hooks.experts.values()]
        self._biases = routing_biases(model)
        self._counts: Tensor | None = None  # of all layers, this step's micro-batches on this rank so far
        self._load: list[Tensor] | None = None  # of each layer, the global batch of the last step

    def __enter__(self) -> Balance:
        self._hooks.__enter__()
        self._metrics.sources.append(self.figures)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._metrics.sources.remove(self.figures)
        self._hooks.__exit__(*exception)

    def shard(self, shard: Shard) -> Shard:
        """``shard`` of a step, which also tells `objective` of the rows: their tokens and their items."""

        def with_rows(micro: Any) -> dict[str, Any]:
            shape, mesh = micro.labels.shape, self._mesh
            lengths = getattr(micro, "lengths", None)
            lengths = torch.full(shape[:1], shape[1]) if lengths is None else lengths
            chunks = chunks_of(mesh.cp_rank, cp=mesh.sizes.cp, length=shape[1], method=self._plan.attention.method)
            is_token = take_chunks(torch.arange(shape[1]) < lengths[:, None], chunks)
            rows = (to_device(each, mesh.device) for each in (is_token, lengths, _items(micro)))
            return {**shard(micro), "rows": tuple(rows)}

        return with_rows

    def objective(self, objective: Objective) -> Objective:
        """``objective`` with the load-balancing loss added to its gradient, not to its value, and the experts counted.

        The loss is a metric, ``moe/aux_loss``: as other metrics it is a sum over items until it is logged.
        """

        def balanced(model: Any, inputs: dict[str, Any]) -> Any:
            is_token, lengths, items = inputs.pop("rows")
            with self._hooks.recording(is_token) as routed:
                loss, parts, *rest = objective(model, inputs)
            counts = torch.cat([routed.counts[name].sum(0) for name in self._hooks.experts])
            self._counts = counts if self._counts is None else self._counts + counts
            if self._weight is None:
                return loss, parts, *rest
            auxiliary = (self._row_losses(routed, lengths) * items).sum()
            metrics = {**(rest[0] if rest else {}), "moe/aux_loss": auxiliary.detach()}
            return loss + self._weight * (auxiliary - auxiliary.detach()), parts, metrics

        return balanced

    def _row_losses(self, routed: Routed, lengths: Tensor) -> Tensor:
        """This rank's part of each row's loss, ``[B]``. Collective over the ranks that share rows."""
        counts, probabilities = routed.over_layers()
        if self._mesh.sizes.cp > 1:
            dist.all_reduce(counts, group=self._mesh.cp_group)
        return balance_losses(counts, probabilities, len(routed.probabilities) * lengths)

    @torch.no_grad()
    def end_step(self, *, moves: bool) -> None:
        """Move the routers' biases by what the step counted. Collective for ``balance = "bias"``.

        Args:
            moves: whether the step changed the parameters, too.
        """
        assert self._counts is not None, "a step has a micro-batch"
        counts, self._counts = self._counts, None
        self._load = list(counts.split(self._sizes))
        if not isinstance(self._section, RouterBiasConfig):
            return
        self._mesh.sum_loss(counts)
        for name, load in zip(self._hooks.experts, self._load, strict=True) if moves else ():
            below = torch.sign(load.sum() - load * len(load))  # in integers: the mean need not be one
            self._biases[name].add_(self._section.bias_update_rate * below)

    def figures(self, _record: Mapping[str, Any]) -> dict[str, float]:
        """For a step's record, over its global batch; `load_figures`. Collective."""
        if self._load is None:  # an evaluation alone
            return {}
        counts, self._load = torch.cat(self._load), None
        if not isinstance(self._section, RouterBiasConfig):  # else summed already
            self._mesh.sum_loss(counts)
        return load_figures([each.tolist() for each in counts.split(self._sizes)])


def load_figures(layers: list[list[int]]) -> dict[str, float]:
    """How even the load is, from the tokens of each layer's experts.

    Returns:
        ``moe/load_max`` and ``moe/load_mean``: a layer's largest load ÷ its mean load, the maximum and the mean over
        the layers. ``moe/entropy``: the entropy of a layer's shares of tokens ÷ log E, the mean over the layers. All
        are 1 where the load is even.
    """
    peaks, entropies = [], []
    for counts in layers:
        total = sum(counts)
        shares = [count / total for count in counts if count]
        peaks.append(max(shares) * len(counts))
        entropies.append(-sum(share * math.log(share) for share in shares) / math.log(max(2, len(counts))))
    mean = sum(peaks) / len(peaks)
    return {"moe/load_max": max(peaks), "moe/load_mean": mean, "moe/entropy": sum(entropies) / len(entropies)}


def _items(micro: Any) -> Tensor:
    """How many items each row has, ``[B]``: targets, or pairs of a preference."""
    documents = micro.per_target.get("documents") if getattr(micro, "num_documents", 0) else None
    if documents is None:
        return (micro.labels != IGNORE).sum(1)
    # Neighbours have neighbouring numbers, and padding has −1.
    first = torch.where(documents < 0, documents.max() + 1, documents).amin(1)
    return ((documents.amax(1) - first + 1) // 2).clamp(min=0)
