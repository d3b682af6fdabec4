"""The mean loss of a global batch, for a training loop of one's own."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fsdp2kit.data.loader import batch_of
from fsdp2kit.errors import UserError
from fsdp2kit.job.mesh import Mesh
from fsdp2kit.model.loss_head import IGNORE
from fsdp2kit.parallel.context_parallel.batch import build_slice_batch
from fsdp2kit.parallel.plan import ParallelPlan
from fsdp2kit.train.step import Objective, cross_entropy


class MeanLoss(Protocol):
    """What `build_mean_loss` returns."""

    def __call__(
        self, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None, *, num_items: int | None = None
    ) -> Tensor:
        """The mean loss of a global batch, a float32 scalar, the same on every rank. Collective.

        Args:
            input_ids: int64 ``[B, S]`` on the host, the same on every rank.
            labels: int64 ``[B, S]``; ``labels[:, t]`` is the target after token ``t``, −100 is none.
            position_ids: int64 ``[B, S]``, from 0 in every document; None: each row is one document.
            num_items: what the summed loss is divided by; None: the number of targets. To accumulate gradients over
                several calls, give each of them the number of all their targets.

        Raises:
            UserError: shapes or dtypes differ, a row begins at another position than 0, or no label is a target.
        """
        ...


def build_mean_loss(
    model: PreTrainedModel, *, plan: ParallelPlan, mesh: Mesh, objective: Objective = cross_entropy
) -> MeanLoss:
    """``mean_loss(input_ids, labels, position_ids)`` of a global batch ``[B, S]``, for a loop of your own.

    Every rank gives it the whole batch, and computes its rows (dp) and its slice of them (cp). ``backward()`` leaves
    the gradient of the batch's mean, on any mesh. Positions restart at documents; labels are shifted, −100 is none.

    Args:
        model: after `parallelize_model`.
        objective: the loss, summed over a rank's targets; metrics that it returns are not used.
    """
    slice_batch = build_slice_batch(model.config, path=plan.attention, mesh=mesh)
    # Ring and allgather cut a sequence into two chunks a rank.
    multiple = 1 if mesh.sizes.cp == 1 else 2 * mesh.sizes.cp

    def mean_loss(
        input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None, *, num_items: int | None = None
    ) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[-1]).expand(input_ids.shape)
        _check_rows(input_ids, labels, position_ids)
        items = int((labels != IGNORE).sum()) if num_items is None else num_items
        if items < 1:
            raise UserError("labels", "no label is a target, so there is no mean", "give a batch with targets")
        batch = batch_of(
            input_ids,
            labels,
            position_ids,
            dp_rank=mesh.dp_rank,
            dp_size=mesh.sizes.dp,
            length_multiple=multiple,
        )
        loss, *_ = objective(model, slice_batch(batch))
        total = mesh.sum_loss(loss.detach().clone())
        # The value is the sum over ranks, the gradient that of this rank's part.
        return (total + (loss - loss.detach())) / items

    return mean_loss


def _check_rows(input_ids: Tensor, labels: Tensor, position_ids: Tensor) -> None:
    for name, tensor in (("input_ids", input_ids), ("labels", labels), ("position_ids", position_ids)):
        if tensor.ndim != 2 or tensor.shape != input_ids.shape or tensor.dtype != torch.int64:
            what = f"is {tensor.dtype} {list(tensor.shape)}, beside input_ids {list(input_ids.shape)}"
            raise UserError(name, what, "give three int64 tensors [B, S] of one shape")
    if input_ids.numel() == 0:
        raise UserError("input_ids", f"is empty: {list(input_ids.shape)}", "give a batch with tokens")
    if position_ids[:, 0].any():
        what = f"a row begins at position {int(position_ids[:, 0].max())}"
        raise UserError("position_ids", what, "begin every row at 0; positions restart at 0 in every document")
