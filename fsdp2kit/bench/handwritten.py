"""The loop that a good engineer writes by hand over torch and transformers alone: what fsdp2kit is measured against.

It imports nothing of fsdp2kit. It leaves out what such a loop would leave out (resumption, agreement on errors,
records in a file), and it gets its batches ready made, as if a data loader's workers had hidden all of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM


class HandWrittenLoop:
    """Plain FSDP2 over all ranks: each decoder layer a unit, then the root; shards and AdamW in float32.

    Args:
        model_dir: a Hugging Face directory.
        param_dtype: dtype of the computation; gradients are reduced in float32.
        attention: a transformers attention implementation.
        lr: learning rate of AdamW.
        betas: of AdamW.
        max_grad_norm: gradients are clipped to this global norm.
        device: of this rank.
    """

    def __init__(
        self,
        model_dir: str,
        *,
        param_dtype: torch.dtype,
        attention: str,
        lr: float,
        betas: tuple[float, float],
        max_grad_norm: float,
        device: torch.device,
    ) -> None:
        self.device, self.max_grad_norm = device, max_grad_norm
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation=attention
        )
        self.model.to(device)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.model.train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=lr, betas=betas, eps=1e-8, weight_decay=0.0, fused=True
        )

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
            self.model.set_requires_gradient_sync(number == len(micro_batches))
            logits = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
            # FSDP2 averages over ranks, hence the world size.
            summed = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
            (summed * dist.get_world_size() / tokens).backward()
            loss += summed.detach() / tokens
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(loss)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        return loss.item(), norm.item()
