"""Keeping the experts of a mixture of experts evenly loaded (``[moe]``), and figures of their load; docs/moe.md.

The loss of a row counts as often as the row has items (targets), so that its mean over a global batch is the same
however rows are distributed. Ranks that share a row add up the counts before they are multiplied. Each then adds its
own tokens' part of the loss: the probabilities need no exchange, and the gradients are summed with those of the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2kit.config.sections.moe import AuxiliaryLossConfig, MoEConfig, RouterBiasConfig
from fsdp2kit.job.distributed import to_device
from fsdp2kit.job.mesh import Mesh
from fsdp2kit.parallel.context_parallel.layout import chunks_of, take_chunks
from fsdp2kit.parallel.expert_parallel.routing import Routed, RoutingHooks, balance_losses, routing_biases
from fsdp2kit.parallel.plan import ParallelPlan
from fsdp2kit.train.metrics import Metrics
from fsdp2kit.train.micro_batch import items_of_rows, lengths_of_rows


@dataclass(frozen=True)
class CountedRows:
    """The rows of a micro-batch on this rank, and where their tokens were routed."""

    routed: Routed
    lengths: Tensor
    """int64 ``[B]``: tokens of each row, without its padding."""
    items: Tensor
    """int64 ``[B]``: what each row counts in the loss."""


class NoBalance:
    """Same interface as `Balance`; balances nothing."""

    def __enter__(self) -> None: ...
    def __exit__(self, *exception: Any) -> None: ...
    def end_step(self, *, moves: bool) -> None: ...

    @contextmanager
    def counting(self, micro: Any) -> Iterator[Any]:
        yield None

    def add_loss(self, loss: Tensor, metrics: Mapping[str, Tensor], rows: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
        return loss, metrics


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
        self._section = section
        self._plan = plan
        self._mesh = mesh
        self._metrics = metrics
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

    @contextmanager
    def counting(self, micro: Any) -> Iterator[CountedRows]:
        """Count the tokens that a forward pass of ``micro`` routes to each expert."""
        mesh = self._mesh
        lengths = lengths_of_rows(micro)
        length = micro.labels.shape[1]
        chunks = chunks_of(mesh.cp_rank, cp=mesh.sizes.cp, length=length, method=self._plan.attention.method)
        is_token = take_chunks(torch.arange(length) < lengths[:, None], chunks)
        items = to_device(items_of_rows(micro), mesh.device)
        with self._hooks.recording(to_device(is_token, mesh.device)) as routed:
            yield CountedRows(routed, to_device(lengths, mesh.device), items)

    def add_loss(
        self, loss: Tensor, metrics: Mapping[str, Tensor], rows: CountedRows
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The loss with the gradient of the load-balancing loss, not with its value; and that as ``moe/aux_loss``.

        The load-balancing loss is a sum over items, as other metrics are.
        """
        counts = torch.cat([rows.routed.counts[name].sum(0) for name in self._hooks.experts])
        self._counts = counts if self._counts is None else self._counts + counts
        if self._weight is None:
            return loss, metrics
        auxiliary = (self._row_losses(rows) * rows.items).sum()
        loss = loss + self._weight * (auxiliary - auxiliary.detach())
        return loss, {**metrics, "moe/aux_loss": auxiliary.detach()}

    def _row_losses(self, rows: CountedRows) -> Tensor:
        """This rank's part of each row's loss, ``[B]``. Collective over the ranks that share rows."""
        counts, probabilities = rows.routed.over_layers()
        if self._mesh.sizes.cp > 1:
            dist.all_reduce(counts, group=self._mesh.cp_group)
        return balance_losses(counts, probabilities, len(rows.routed.probabilities) * rows.lengths)

    @torch.no_grad()
    def end_step(self, *, moves: bool) -> None:
        """Move the routers' biases by what the step counted. Collective for ``balance = "bias"``.

        Args:
            moves: whether the step changed the parameters, too.
        """
        assert self._counts is not None, "a step has a micro-batch"
        counts = self._counts
        self._counts = None
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
        counts = torch.cat(self._load)
        self._load = None
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
    peaks = []
    entropies = []
    for counts in layers:
        total = sum(counts)
        shares = [count / total for count in counts if count]
        peaks.append(max(shares) * len(counts))
        entropies.append(-sum(share * math.log(share) for share in shares) / math.log(max(2, len(counts))))
    mean = sum(peaks) / len(peaks)
    return {"moe/load_max": max(peaks), "moe/load_mean": mean, "moe/entropy": sum(entropies) / len(entropies)}
