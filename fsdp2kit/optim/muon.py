"""Muon for matrices that are sharded by rows, and AdamW for everything else, as one optimizer.

Muon's update is a matrix's momentum made orthogonal (Jordan et al., https://kellerjordan.github.io/posts/muon), which
needs the whole matrix. torch's own Muon also accepts sharded matrices and is right up to rounding, but it runs 12 to
16 collectives a matrix one after another, and sums bfloat16 products across ranks where rows outnumber columns. Here a
batch has as many matrices as there are shards. One all-to-all brings each whole matrix to one rank, that rank runs
torch's own iteration on it, and another all-to-all returns the rows. Every rank orthogonalises its share of the
matrices once, and the result equals that of one process.

Experts in one tensor ``[E, out, in]`` are one matrix each, with the gate and up projections that share the tensor.
Where ranks hold whole experts, nothing is sent. Where they hold slices of experts, an all-to-all brings each rank its
share of whole ones. A rank's experts are orthogonalised in batched products.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from fsdp2kit.job.distributed import local_part
from fsdp2kit.model.adapters import adapter_of
from fsdp2kit.model.experts import DOWN, UP
from fsdp2kit.torch_compat import orthogonalize, orthogonalize_each

ParameterGroup = dict[str, Any]


class MuonAdamW(Optimizer):
    """`torch.optim.Muon` with Nesterov momentum on some groups, `torch.optim.AdamW` on the others.

    Every rank of the parameters' mesh must call `step`, with gradients for the same parameters.

    Muon's updates are scaled to the root mean square that AdamW's have, by 0.2 · sqrt(max(rows, columns))
    (arXiv:2502.16982, torch's ``adjust_lr_fn="match_rms_adamw"``), so that one learning rate serves both.

    Args:
        matrices: parameter groups of Muon: matrices, whole or sharded over their first dimension; and experts
            ``[E, out, in]``, which may be sharded over another dimension as well, evenly.
        others: parameter groups of AdamW.
    """

    def __init__(
        self,
        matrices: Iterable[ParameterGroup],
        others: Iterable[ParameterGroup],
        *,
        lr: float,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        self._adamw: torch.optim.AdamW | None = None
        groups = [{"lr": lr, "momentum": momentum, **group} for group in matrices]
        if others := list(others):
            self._adamw = torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps, fused=True)
            groups += self._adamw.param_groups
        super().__init__(groups, {"weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient."""
        if self._adamw is not None:
            # The same dicts and tensors, looked up anew because loading a state dict replaces them.
            self._adamw.param_groups = [group for group in self.param_groups if "betas" in group]
            self._adamw.state = self.state
            self._adamw.step()
        for group in self.param_groups:
            if "momentum" in group:
                self._step_matrices(group)

    def _step_matrices(self, group: ParameterGroup) -> None:
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        matrices = [parameter for parameter in trained if parameter.ndim == 2]
        matrices.sort(key=lambda matrix: matrix.shape)  # so that a batch has matrices of nearly one size
        at_once = max((_shards(matrix)[0] for matrix in matrices), default=1)
        for start in range(0, len(matrices), at_once):
            batch = matrices[start : start + at_once]
            updates = [self._momentum(matrix, matrix.grad, group["momentum"]) for matrix in batch]
            for matrix, update in zip(batch, orthogonal(batch, updates), strict=True):
                _update(matrix, update, group)
        for experts in (parameter for parameter in trained if parameter.ndim == 3):
            momentum = self._momentum(experts, experts.grad, group["momentum"])
            _update(experts, orthogonal_experts(experts, momentum), group)

    def _momentum(self, matrix: Tensor, gradient: Tensor, momentum: float) -> Tensor:
        """This rank's rows of the Nesterov momentum, in bfloat16, the dtype of torch's iteration."""
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        rows, buffer = local_part(gradient), local_part(state["momentum_buffer"])
        buffer.lerp_(rows, 1 - momentum)
        return rows.lerp(buffer, momentum).bfloat16()


def _update(parameter: Tensor, update: Tensor, group: ParameterGroup) -> None:
    rate = group["lr"] * (0.2 * math.sqrt(max(parameter.shape[-2:])))
    local = local_part(parameter)
    local.mul_(1 - group["lr"] * group["weight_decay"])
    local.add_(update, alpha=-rate)


def orthogonal(matrices: Sequence[Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
    """This rank's rows of each matrix made orthogonal.

    Args:
        matrices: at most as many as each has shards, with their global shapes; only their layout is read.
        parts: this rank's rows of each, in bfloat16.
    """
    shards, group = _shards(matrices[0])
    if shards == 1:
        return [orthogonalize(part) for part in parts]
    rank = dist.get_rank(group)
    # Elements that each rank sends of this rank's whole matrix, and that this rank holds of every matrix.
    whole = _sizes(matrices[rank], shards) if rank < len(matrices) else [0] * shards
    own = [part.numel() for part in parts] + [0] * (shards - len(parts))
    collected = parts[0].new_empty(sum(whole))
    dist.all_to_all_single(collected, torch.cat([part.flatten() for part in parts]), whole, own, group=group)
    if rank < len(matrices):
        collected = orthogonalize(collected.view(matrices[rank].shape)).flatten()
    returned = parts[0].new_empty(sum(own))
    dist.all_to_all_single(returned, collected, own, whole, group=group)
    pieces = returned.split(own)
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=False)]


def orthogonal_experts(experts: Tensor, part: Tensor) -> Tensor:
    """This rank's part of each expert made orthogonal.

    Args:
        experts: ``[E, out, in]``; only its layout is read.
        part: this rank's part, in bfloat16: some of the experts, whole or a slice of each.
    """
    dim, ranks, group = _slices(experts)
    if ranks == 1:
        return orthogonalize_each(part)
    rank, most = dist.get_rank(group), -(-len(part) // ranks)
    held = [max(0, min(most, len(part) - at * most)) for at in range(ranks)]
    of_rank = [part[0].numel() * count for count in held]
    mine = [of_rank[rank]] * ranks
    slices = part.new_empty(ranks, held[rank], *part.shape[1:])
    dist.all_to_all_single(slices.view(-1), part.reshape(-1), mine, of_rank, group=group)
    whole = orthogonalize_each(torch.cat(slices.unbind(), dim))
    slices = torch.stack(whole.chunk(ranks, dim))
    returned = torch.empty_like(part, memory_format=torch.contiguous_format)
    dist.all_to_all_single(returned.view(-1), slices.view(-1), of_rank, mine, group=group)
    return returned


def _slices(experts: Tensor) -> tuple[int, int, dist.ProcessGroup | None]:
    """The dimension over which each expert is sharded, over how many ranks, and their group; 1 rank: it is not."""
    if not isinstance(experts, DTensor):
        return 0, 1, None
    mesh, placements = experts.device_mesh, experts.placements
    spread = [at for at, one in enumerate(placements) if one.is_shard() and mesh.size(at) > 1 and one.dim > 0]
    if not spread:
        return 0, 1, None
    dim = placements[spread[0]].dim
    if len(spread) > 1 or experts.shape[dim] % mesh.size(spread[0]):
        raise NotImplementedError(f"Muon wants experts sliced evenly over one mesh dimension, not {placements}")
    return dim, mesh.size(spread[0]), mesh.get_group(spread[0])


def _sizes(matrix: Tensor, shards: int) -> list[int]:
    """Elements of each rank's rows under `Shard(0)`; the last ranks may have fewer, or none."""
    rows, columns = matrix.shape
    most = -(-rows // shards)
    return [columns * max(0, min(most, rows - rank * most)) for rank in range(shards)]


def _shards(matrix: Tensor) -> tuple[int, dist.ProcessGroup | None]:
    """The number of ranks over which the rows are sharded, and their group."""
    if not isinstance(matrix, DTensor):
        return 1, None
    mesh, placements = matrix.device_mesh, matrix.placements
    spread = [dim for dim, placement in enumerate(placements) if placement.is_shard() and mesh.size(dim) > 1]
    if not spread:
        return 1, None
    if len(spread) > 1 or placements[spread[0]] != Shard(0):
        raise NotImplementedError(f"Muon wants matrices sharded by rows over one mesh dimension, not {placements}")
    return mesh.size(spread[0]), mesh.get_group(spread[0])


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The trainable weights that Muon is meant for: those of linear maps inside the model.

    These are the two-dimensional parameters named ``weight``, except embeddings and the output head, which the authors
    leave to AdamW; and experts in one tensor, ``[E, out, in]``. Adapters on such experts are left out: their factors
    are one matrix for all experts.
    """
    adapter = adapter_of(model)
    stacked = tuple(f"{name}." for name in adapter.experts) if adapter is not None else ()
    head = getattr(model, "get_output_embeddings", lambda: None)()
    outside = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding) or module is head}
    return [
        parameter
        for name, parameter in model.named_parameters()  # names a tied one once
        if (parameter.ndim == 2 and name.endswith(".weight")) or (parameter.ndim == 3 and name.endswith((*UP, DOWN)))
        if parameter.requires_grad and id(parameter) not in outside and not name.startswith(stacked)
    ]
