"""The parts of a step: read a global batch, accumulate its gradients, clip them, read its figures."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2kit.config.schema import FSDPConfig, TrainingConfig
from fsdp2kit.console import rows_text
from fsdp2kit.errors import NonFiniteFailure, RunFailure, UserError
from fsdp2kit.job import status
from fsdp2kit.job.distributed import agree, by_mesh, gather_objects, local_part
from fsdp2kit.job.lost_ranks import name_ranks
from fsdp2kit.job.mesh import Mesh
from fsdp2kit.job.stop import Stopped
from fsdp2kit.parallel.fsdp import reshards_after_forward
from fsdp2kit.torch_compat import float32_norms
from fsdp2kit.train.balance import Balance, NoBalance
from fsdp2kit.train.micro_batch import items_of, packs_of

_MOST_PACKS = 32  # that are named

Parts = tuple[Tensor, Tensor | None]
Objective = Callable[[Any, dict[str, Any]], Parts | tuple[Tensor, Tensor | None, Mapping[str, Tensor]]]
"""Takes the model and a micro-batch's inputs on the device; returns the loss summed over this rank's items (a float32
scalar for backward) and, for a mix, the detached sum of each source (float64 ``[G]``), otherwise None. It may also
return metrics: scalars summed over this rank's items, by name. An item is a target unless the batch says otherwise
(`GlobalBatch.num_items`). See docs/recipes.md."""


def cross_entropy(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """The `Objective` of supervised training: next-token cross-entropy on the model's own head.

    Args:
        inputs: of `slice_batch`: ``input_ids``, ``labels`` (already shifted, −100 is no target) and ``position_ids``,
            ``[B, s]`` int64 each, and what attention needs.

    Returns:
        This rank's sum of losses in nats, a scalar for backward; for a mix also each source's, ``[G]``.
    """
    loss = model.loss_sum(**inputs)
    return loss if isinstance(loss, tuple) else (loss, None)


def call_objective(
    objective: Objective, model: Any, inputs: dict[str, Any]
) -> tuple[Tensor, Tensor | None, Mapping[str, Tensor]]:
    """What an objective returns, with no metrics where it returns none."""
    loss, by_source, *rest = objective(model, inputs)
    return loss, by_source, rest[0] if rest else {}


class MetricNames:
    """The names of an objective's metrics: the same in every micro-batch and on every rank, in one order.

    Args:
        reserved: names that a metric may not have, nor begin with before a "/".
    """

    def __init__(self, *, reserved: Collection[str] = ()) -> None:
        self._reserved = reserved
        self._is_first = True
        self.names: tuple[str, ...] = ()
        """In order; known from the first micro-batch on."""

    @property
    def shown(self) -> list[str]:
        """Names of the metrics that are worth a place on the console's line: those without a "/"."""
        return [name for name in self.names if "/" not in name]

    def check(self, metrics: Collection[str]) -> None:
        """Take the names of the first micro-batch, which is a collective; compare those of the others with them.

        Raises:
            UserError: ranks have other names, or one is reserved.
            RunFailure: a later micro-batch has other names.
        """
        if self._is_first:
            self._take(metrics)
        if set(metrics) != set(self.names):
            what = f"returned {', '.join(metrics) or 'none'} after {', '.join(self.names) or 'none'}"
            raise RunFailure(f"objective: its metrics must be the same in every micro-batch: it {what}")

    def _take(self, metrics: Collection[str]) -> None:
        """Ranks that add up other numbers would mix them."""
        names = tuple(metrics)
        for other in gather_objects(names):
            if set(other) != set(names):
                what = f"metrics {', '.join(names) or 'none'} on one rank and {', '.join(other) or 'none'} on another"
                raise UserError("objective", f"returns {what}", "return the same ones on every rank, 0 where unknown")
        if taken := [name for name in names if name.partition("/")[0] in self._reserved]:
            raise UserError("objective", f"names a metric {taken[0]!r}, which records have", "choose another name")
        self.names = tuple(sorted(names))
        self._is_first = False


def pack_sums(
    loss: Tensor, by_source: Tensor | None, metrics: Mapping[str, Tensor], *, names: Sequence[str]
) -> Tensor:
    """The sums of a micro-batch in one tensor, to be added up, reduced and copied to the host together.

    Args:
        names: of the metrics, in order.

    Returns:
        Detached, in the loss's dtype: ``[1 + sources + metrics]``, or a scalar if there is only the loss.
    """
    loss = loss.detach()
    if by_source is None and not names:
        return loss
    parts = [loss[None]]
    if by_source is not None:
        parts.append(by_source.to(loss.dtype))
    if names:
        scalars = [torch.as_tensor(metrics[name]).detach().to(loss).reshape(()) for name in names]
        parts.append(torch.stack(scalars))
    return torch.cat(parts)


def unpack_sums(values: Sequence[float], names: Sequence[str]) -> tuple[float, list[float], dict[str, float]]:
    """The loss, what each source has of it, and the metrics by name: the numbers of `pack_sums`."""
    first_metric = len(values) - len(names)
    metrics = dict(zip(names, values[first_metric:], strict=True))
    return values[0], list(values[1:first_metric]), metrics


class Batches(Protocol):
    """What the loop calls of a loader."""

    @property
    def source_names(self) -> tuple[str, ...]: ...

    def batch(self, index: int, /) -> Sequence[Any]:
        """This data-parallel rank's micro-batches of a global batch."""
        ...

    def state(self, index: int, /) -> dict[str, Any] | None:
        """A stream's state from which batch ``index`` can be made again; None for data that is not a stream."""
        ...


class HeldOut(Batches, Protocol):
    """What an evaluation calls of a loader, which has an end."""

    @property
    def steps_per_epoch(self) -> int: ...


def epoch_of(batches: Batches, step: int) -> dict[str, float]:
    """``epoch``: passes over the data after ``step``; nothing for a stream.

    Batches of a recipe's own may have no ``steps_per_epoch``.
    """
    steps_per_epoch = getattr(batches, "steps_per_epoch", 0)
    return {"epoch": step / steps_per_epoch} if steps_per_epoch else {}


@dataclass(frozen=True)
class GlobalBatch:
    """This rank's micro-batches of a global batch, and the counts of the whole global batch."""

    micro_batches: Sequence[Any]
    num_items: int
    """What the summed loss is divided by: the micro-batches' own ``num_items``, else supervised tokens."""
    supervised_tokens: int
    input_tokens: int
    attention_pairs: int
    capacity: int
    """Tokens including padding."""
    tokens_by_source: Mapping[str, int]
    """Supervised tokens of each source of a mix."""
    stop: bool
    """Whether any rank was asked to stop."""
    save_failed: bool
    """Whether a save failed on any rank."""
    save_due: bool
    """Whether any rank asked for a checkpoint."""
    seconds: float
    """How long this rank waited for the data."""
    profile: bool = False
    """Whether any rank was asked for a profile."""
    losses: list[Tensor] = field(default_factory=list)
    """Each micro-batch's summed loss, on the device; `accumulate_gradients` adds them."""


def next_batch(
    batches: Batches,
    index: int,
    *,
    mesh: Mesh,
    stop: bool = False,
    save_failed: bool = False,
    save_due: bool = False,
    profile: bool = False,
) -> GlobalBatch:
    """Read this rank's share of global batch ``index``; exchange errors, stops and counts with all ranks. Collective.

    A batch that any rank was asked to `stop` at is not to be used: reading it may have been left.

    Args:
        stop: whether this rank was asked to stop.
        save_failed: whether a save failed on this rank.
        save_due: whether this rank asks for a checkpoint.
        profile: whether this rank was asked for a profile.
    """
    status.enter("reading data")
    start = time.perf_counter()
    micro_batches: Sequence[Any] = []
    error: Exception | None = None
    try:
        micro_batches = batches.batch(index)
    except torch.OutOfMemoryError:  # other ranks may be in a collective of their batch
        raise
    except Stopped:  # in generating, for example
        stop = True
    except Exception as problem:
        error = problem
    seconds = time.perf_counter() - start
    counts = [
        sum(items_of(micro) for micro in micro_batches),
        sum(micro.supervised_tokens for micro in micro_batches),
        sum(micro.input_tokens for micro in micro_batches),
        sum(micro.attention_pairs for micro in micro_batches),
        sum(micro.capacity for micro in micro_batches),
        # A rank whose batch failed sends as many numbers as the others.
        *(sum(micro.tokens_by_source[at] for micro in micro_batches) for at in range(len(batches.source_names))),
    ]
    status.enter("exchanging the batch's counts")
    flags = [error is not None, stop, save_failed, save_due, profile]
    ranks, sums = mesh.sum_over_rows([float(flag) for flag in flags], [float(count) for count in counts])
    has_failed, any_stop, any_save_failed, any_save_due, any_profile = (count > 0 for count in ranks)
    if has_failed:
        agree(error)
    items, supervised, inputs, pairs, capacity, *by_source = sums
    if not supervised and not any_stop:
        raise UserError(f"global batch {index}", "has no supervised token", "look at that part of the data")
    return GlobalBatch(
        micro_batches,
        num_items=items,
        supervised_tokens=supervised,
        input_tokens=inputs,
        attention_pairs=pairs,
        capacity=capacity,
        tokens_by_source=dict(zip(batches.source_names, by_source, strict=True)),
        stop=any_stop,
        save_failed=any_save_failed,
        save_due=any_save_due,
        profile=any_profile,
        seconds=seconds,
    )


def accumulate_gradients(
    model: Any,
    batch: GlobalBatch,
    *,
    objective: Objective,
    shard: Callable[[Any], dict[str, Any]],
    fsdp: FSDPConfig,
    balance: Balance | NoBalance | None = None,
    names: MetricNames | None = None,
    end_phase: Callable[[str], None] = lambda phase: None,
) -> Tensor:
    """Forward and backward over this rank's micro-batches, one at a time on the device.

    Units that are not freed after forward stay gathered until the last micro-batch: their parameters do not change
    within a step.

    Args:
        model: a sharded model.
        shard: from a micro-batch on the host to this rank's inputs of ``objective``, on the device.
        balance: adds the loss that balances experts, and counts their tokens; None: there is none.
        names: of the objective's metrics; None: its metrics are not used.
        end_phase: called with "forward" and "backward" when each is over.

    Returns:
        What `pack_sums` made of this rank's micro-batches, ÷ the global batch's items, float32 on the device, to be
        summed over all ranks.
    """
    balance = balance or NoBalance()
    keeps_units = reshards_after_forward(fsdp) is False
    total = None
    batch.losses.clear()
    for number, micro in enumerate(batch.micro_batches, start=1):
        last = number == len(batch.micro_batches)
        model.set_is_last_backward(last)
        # What is reduced adds up in shards, in `storage_dtype`; gradients that are held back add up whole, in
        # `reduce_dtype`. Replicas need only the sum: their shards add up in `reduce_dtype` until the last micro-batch.
        model.set_requires_gradient_sync(last or fsdp.accumulates_shards)
        model.set_requires_all_reduce(last)
        model.set_reshard_after_backward(last or not keeps_units)
        status.enter("forward")
        with balance.counting(micro) as counted:
            loss, by_source, metrics = call_objective(objective, model, shard(micro))
        loss, metrics = balance.add_loss(loss, metrics, counted)
        if names is not None:
            names.check(metrics)
        sums = pack_sums(loss, by_source, metrics, names=() if names is None else names.names)
        batch.losses.append(loss.detach())
        end_phase("forward")
        status.enter("backward")
        (loss / batch.num_items).backward()  # gradients add up over ranks: `apply_fsdp`
        end_phase("backward")
        total = sums if total is None else total + sums
    assert total is not None, "a data-parallel rank has at least one micro-batch"
    return total / batch.num_items


def clip_gradients(model: nn.Module, *, max_norm: float) -> Tensor:
    """Scale all gradients so that their global norm is at most ``max_norm`` (0: never); returns the norm before.

    It is the norm over all ranks, a float32 scalar, the same on each of them. Collective.
    """
    status.enter("gradient norm")
    norm = gradient_norm(model)
    if max_norm > 0:
        for parameters in by_mesh(model.parameters()):
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def step_figures(
    local_loss: Tensor, norm: Tensor, lr: float, batch: GlobalBatch, *, names: Sequence[str], mesh: Mesh
) -> dict[str, float]:
    """Sum a step's loss over the ranks and read its figures, for which the host waits for the device once. Collective.

    Args:
        local_loss: what `accumulate_gradients` returned.
        norm: of the gradients before clipping.
        names: of the objective's metrics.

    Returns:
        ``loss``, ``grad_norm`` and ``lr``; the objective's metrics, divided by the items of the global batch; for a
        mix also ``loss/NAME``, the mean over that source's supervised tokens, if it has any in this batch.
    """
    sums = mesh.sum_loss(local_loss.clone())
    on_device = torch.cat([sums.double().flatten(), norm.detach().to(local_loss.device).double().flatten()])
    status.enter_device_wait()
    *values, norm_value = on_device.tolist()
    status.enter("optimizer")
    loss, by_source, metrics = unpack_sums(values, names)
    figures = {"loss": loss, "grad_norm": norm_value, "lr": lr, **metrics}
    for (name, tokens), part in zip(batch.tokens_by_source.items(), by_source, strict=False):
        if tokens:
            figures[f"loss/{name}"] = part * batch.num_items / tokens
    return figures


def gradient_norm(model: nn.Module) -> Tensor:
    """The global L2 norm of all gradients, before clipping: a float32 scalar, the same on every rank."""
    trained = by_mesh(parameter for parameter in model.parameters() if parameter.grad is not None)
    norms = [_norm_over_mesh([p.grad for p in group if p.grad is not None]) for group in trained]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def _norm_over_mesh(gradients: list[Tensor]) -> Tensor:
    """The L2 norm of gradients that are sharded over one mesh, all with the same placements. Collective."""
    parts = [local_part(gradient) for gradient in gradients]
    if any(part.device.type == "cpu" for part in parts):
        # On a CPU torch's float32 norm adds squares one by one: for 28 million of them the error is 1e-4, and another
        # one for each sharding.
        norm = torch.linalg.vector_norm(torch.stack([_norm(part) for part in parts]))
    else:
        norm = _device_norm(parts)
    first = gradients[0]
    if isinstance(first, DTensor):
        # DTensor's own reduction warns where it takes more than one collective.
        squares = norm.square()
        for dim, placement in enumerate(first.placements):
            if not placement.is_replicate() and first.device_mesh.size(dim) > 1:
                dist.all_reduce(squares, group=first.device_mesh.get_group(dim))
        norm = squares.sqrt()
    return norm.float()


def _device_norm(gradients: list[Tensor]) -> Tensor:
    """As `torch.nn.utils.get_total_norm`, which rounds the norms of 16-bit gradients, and their norm, to 16 bits."""
    return torch.linalg.vector_norm(torch.stack(float32_norms(gradients)))


def _norm(gradient: Tensor) -> Tensor:
    """The L2 norm, a float64 scalar: float32 within rows, which are short enough for it, and float64 over the rows.

    float64 throughout would copy all elements to float64: 5 % of the time of a step of SmolLM2 with 8 layers.
    """
    rows = torch.linalg.vector_norm(gradient, dim=-1, dtype=torch.float32) if gradient.ndim > 1 else gradient
    return torch.linalg.vector_norm(rows, dtype=torch.float64)


def is_finite(figures: Mapping[str, float]) -> bool:
    """Whether loss and gradient norm of a step are finite; if not, the step changed no parameter."""
    return math.isfinite(figures["loss"]) and math.isfinite(figures["grad_norm"])


def is_due(every: int | str, step: int) -> bool:
    """Whether something that happens every ``every`` steps (0, or a time: never) happens after ``step``."""
    return isinstance(every, int) and every > 0 and step % every == 0


def raise_nonfinite(local_loss: Tensor, norm: float, batch: GlobalBatch, *, config: TrainingConfig, step: int) -> None:
    """Raise a `NonFiniteFailure` that names the step, and the ranks and packs with a non-finite loss. Collective."""
    is_bad = not math.isfinite(local_loss.flatten()[0].item())
    ranks = [rank for rank, is_its in enumerate(gather_objects(is_bad)) if is_its]
    packs = nonfinite_packs(batch, config)
    if ranks:
        what = f"the loss is not finite on {name_ranks(ranks)}{packs}"
    else:
        what = f"the gradient norm is {norm} although every rank's loss is finite{packs}"
    raise NonFiniteFailure(
        f"step {step}: {what}; the last checkpoint is untouched. Lower the learning rate, look at this batch, "
        'or set train.on_nonfinite = "skip"'
    )


def nonfinite_packs(batch: GlobalBatch, config: TrainingConfig) -> str:
    """Names the packs whose loss is not finite, and how to see them; all of the batch where each loss is. Collective.

    A pack without packing is a padded row. "" for batches that do not know their packs.
    """
    bad = []
    whole = []
    for micro, loss in zip(batch.micro_batches, batch.losses, strict=True):
        packs = packs_of(micro)
        whole += packs
        if not math.isfinite(loss.flatten()[0].item()):
            bad += packs
    gathered = gather_objects((bad, whole))
    packs = sorted({pack for bad, _ in gathered for pack in bad} or {pack for _, whole in gathered for pack in whole})
    if not packs:
        return ""
    shown = rows_text(packs[:_MOST_PACKS])
    more = f" and {len(packs) - _MOST_PACKS:,} more" if len(packs) > _MOST_PACKS else ""
    noun = "pack" if config.data.pack else "row"
    text = f", in {f'{noun} {packs[0]}' if len(packs) == 1 else f'{noun}s {shown}'}{more} of training"
    if config.data.streaming:
        return text
    return f"{text} (fsdp2kit preview {Path(config.run.dir) / 'config.toml'} --rows {shown} shows them)"
