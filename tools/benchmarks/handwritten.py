"""The loop that a good engineer writes by hand over torch and transformers alone: fsdp2kit is measured beside it.

It imports nothing of fsdp2kit. It has no resumption, agreement on errors or records in a file, and it is given its
batches, as if a data loader's workers had hidden the reading.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM


class PlainLoop:
    """A sharded model of transformers with its optimizer, trained on whole logits."""

    def __init__(self, model: Any, optimizer: Optimizer, *, max_grad_norm: float, device: torch.device) -> None:
        self.model = model
        self.optimizer = optimizer
        self.max_grad_norm = max_grad_norm
        self.device = device

    def step(self, micro_batches: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[float, float]:
        """One optimizer step.

        Args:
            micro_batches: this rank's ``(input_ids, labels, position_ids)``, each ``[B, S]`` int64, labels shifted.

        Returns:
            Mean loss over the supervised tokens of the global batch, and the gradient norm before clipping.
        """
        tokens = torch.tensor(sum(int((labels != -100).sum()) for _, labels, _ in micro_batches), device=self.device)
        dist.all_reduce(tokens)
        loss = torch.zeros((), device=self.device)
        for number, batch in enumerate(micro_batches, start=1):
            input_ids, labels, position_ids = (tensor.to(self.device) for tensor in batch)
            with self.reduction(is_last=number == len(micro_batches)):
                logits = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
                # FSDP averages over ranks, hence the world size.
                summed = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
                (summed * dist.get_world_size() / tokens).backward()
            loss += summed.detach() / tokens
        norm = self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(loss)
        return loss.item(), norm.item()

    def reduction(self, *, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """A context in which gradients are reduced after the last micro-batch only."""
        self.model.set_requires_gradient_sync(is_last)
        return contextlib.nullcontext()

    def clip(self) -> Tensor:
        """Clip the gradients to the global norm, and return the norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def describe(self) -> str:
        """What it runs, in words."""
        attention = self.model.config._attn_implementation
        return f"fully_shard by hand, float32 reduction, the same packed rows, attention {attention}"


def build_handwritten(config: Any, *, device: torch.device) -> PlainLoop:
    """Plain FSDP2 over all ranks: each decoder layer a unit, then the root; shards and AdamW in float32.

    Args:
        config: settings by the names of fsdp2kit's TOML: the model's directory, learning rate, compute dtype.
    """
    load: Any = AutoModelForCausalLM.from_pretrained
    model = load(config.model.path, dtype=torch.float32, attn_implementation="sdpa")
    model.to(device).train()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    compute = getattr(torch, config.fsdp.param_dtype)
    optimizer = config.optimizer
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    adamw = torch.optim.AdamW(
        model.parameters(), lr=optimizer.lr, betas=optimizer.betas, eps=1e-8, weight_decay=0.0, fused=True
    )
    return PlainLoop(model, adamw, max_grad_norm=config.train.max_grad_norm, device=device)
