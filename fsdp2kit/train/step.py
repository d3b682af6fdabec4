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


class Measured:
    """An objective as the loop calls it: the sums of its metrics follow the parts, in the order of `names`.

    This way they are accumulated, reduced and copied to the host together with the loss.

    Args:
        reserved: names that a metric may not have, nor begin with before a "/".
    """

    def __init__(self, objective: Objective, *, reserved: Collection[str] = ()) -> None:
        self._objective, self._reserved, self._is_first = objective, reserved, True
        self.names: tuple[str, ...] = ()
        """The metrics' names; known from the first micro-batch on."""

    @property
    def shown(self) -> list[str]:
        """Names of the metrics that are worth a place on the console's line: those without a "/"."""
        return [name for name in self.names if "/" not in name]

    def __call__(self, model: Any, inputs: dict[str, Any]) -> Parts:
        loss, parts, *rest = self._objective(model, inputs)
        metrics = rest[0] if rest else {}
        if self._is_first:
            self._fix_names(tuple(metrics))
        if metrics.keys() != set(self.names):
            what = f"returned {', '.join(metrics) or 'none'} after {', '.join(self.names) or 'none'}"
            raise RunFailure(f"objective: its metrics must be the same in every micro-batch: it {what}")
        if not self.names:
            return loss, parts
        sums = torch.stack([torch.as_tensor(metrics[name]).detach().to(loss).reshape(()) for name in self.names])
        return loss, sums if parts is None else torch.cat([parts.to(loss.dtype), sums])

    def _fix_names(self, names: tuple[str, ...]) -> None:
        """Take the names of the first micro-batch. Collective: ranks that add up other numbers would mix them."""
        for other in gather_objects(names):
            if set(other) != set(names):
                what = f"metrics {', '.join(names) or 'none'} on one rank and {', '.join(other) or 'none'} on another"
                raise UserError("objective", f"returns {what}", "return the same ones on every rank, 0 where unknown")
        if taken := [name for name in names if name.partition("/")[0] in self._reserved]:
            raise UserError("objective", f"names a metric {taken[0]!r}, which records have", "choose another name")
        self.names, self._is_first = tuple(sorted(names)), False


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
    names = ("supervised_tokens", "input_tokens", "attention_pairs", "capacity")
    counts = [float(sum(getattr(batch, "num_items", batch.supervised_tokens) for batch in micro_batches))]
    counts += [float(sum(getattr(batch, name) for batch in micro_batches)) for name in names]
    # A rank whose batch failed sends as many numbers as the others.
    for number in range(len(batches.source_names)):
        counts.append(float(sum(batch.tokens_by_source[number] for batch in micro_batches)))
    status.enter("exchanging the batch's counts")
    flags = [error is not None, stop, save_failed, save_due, profile]
    (failed, *others), sums = mesh.sum_over_rows([float(flag) for flag in flags], counts)
    if failed:
        agree(error)
    items, supervised, inputs, pairs, capacity, *by_source = sums
    if not supervised and not others[0]:
        raise UserError(f"global batch {index}", "has no supervised token", "look at that part of the data")
    named = dict(zip(batches.source_names, by_source, strict=True))
    counted = micro_batches, items, supervised, inputs, pairs, capacity, named
    *others, profile = (other > 0 for other in others)
    return GlobalBatch(*counted, *others, seconds=seconds, profile=profile)


def accumulate_gradients(
    model: Any,
    batch: GlobalBatch,
    *,
    objective: Objective,
    shard: Callable[[Any], dict[str, Any]],
    fsdp: FSDPConfig,
    end_phase: Callable[[str], None] = lambda phase: None,
) -> Tensor:
    """Forward and backward over this rank's micro-batches, one at a time on the device.

    Units that are not freed after forward stay gathered until the last micro-batch: their parameters do not change
    within a step.

    Args:
        model: a sharded model.
        shard: from a micro-batch on the host to this rank's inputs of ``objective``, on the device.
        end_phase: called with "forward" and "backward" when each is over.

    Returns:
        This rank's summed loss ÷ the global batch's items, a float32 scalar on the device, to be summed
        over all ranks. For a mix, float32 ``[1 + G]``: that, and each source's part of it. The metrics of a
        `Measured` objective follow.
    """
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
        loss, parts, *_ = objective(model, shard(micro))
        batch.losses.append(loss.detach())
        end_phase("forward")
        status.enter("backward")
        (loss / batch.num_items).backward()  # gradients add up over ranks: `apply_fsdp`
        end_phase("backward")
        found = loss.detach() if parts is None else torch.cat([loss.detach()[None], parts.to(loss.dtype)])
        total = found if total is None else total + found
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


def step_record(
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
    figures = (mesh.sum_loss(local_loss.clone()), norm.detach().to(local_loss.device))
    status.enter_device_wait()
    loss, *parts, norm_value = torch.cat([figure.double().flatten() for figure in figures]).tolist()
    status.enter("optimizer")
    parts, means = parts[: len(parts) - len(names)], parts[len(parts) - len(names) :]
    record = {"loss": loss, "grad_norm": norm_value, "lr": lr, **dict(zip(names, means, strict=True))}
    for (name, tokens), part in zip(batch.tokens_by_source.items(), parts, strict=False):
        if tokens:
            record[f"loss/{name}"] = part * batch.num_items / tokens
    return record


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


def is_finite(record: Mapping[str, float]) -> bool:
    """Whether loss and gradient norm of a step are finite; if not, the step changed no parameter."""
    return math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"])


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
    bad, whole = [], []
    for micro, loss in zip(batch.micro_batches, batch.losses, strict=True):
        packs = list(getattr(micro, "rows", ()))
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
