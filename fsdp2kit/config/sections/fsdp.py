"""[fsdp]: how parameters are sharded, in which precision, and where they are stored."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from fsdp2kit.config.facts import MeshSizes
from fsdp2kit.config.section import Section, TrainingDType
from fsdp2kit.errors import UserError


class FSDPConfig(Section):
    """How parameters are sharded, in which precision, and where they are stored."""

    strategy: Literal["full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"] = "full_shard"
    """full_shard (ZeRO-3), shard_grad_op (ZeRO-2: parameters stay gathered between forward and backward), no_shard
    (replicated, like DDP), hybrid_shard (ZeRO-3 within a node, replicated across), hybrid_shard_zero2 (ZeRO-2 so)."""
    unit: Literal["layer", "size", "root"] = "layer"
    """What is gathered at a time. "layer": each decoder layer, and an untied embedding and head. "size": the smallest
    modules of at least `min_params` parameters (FSDP1's size-based wrapping). "root": the whole model at once."""
    min_params: PositiveInt = 100_000_000
    """unit = "size" only: fewest parameters of a unit."""
    unit_classes: list[str] = []
    """Class names of modules that also become units of their own, e.g. `["Qwen3MoeExperts"]`."""
    ignored_modules: list[str] = []
    """Name patterns of modules that stay whole on every rank, stored, saved and exported in `param_dtype`. They must
    be frozen (`model.freeze`): nothing reduces their gradients."""
    param_dtype: TrainingDType = "bfloat16"
    """Dtype of the gathered parameters, and so of the computation."""
    class_dtypes: dict[str, TrainingDType] = {}
    """Modules that compute in another dtype, by class name, e.g. `{ LlamaRMSNorm = "float32" }`. Each is a unit of its
    own, whose output is cast back to `param_dtype`."""
    reduce_dtype: TrainingDType = "float32"
    """Dtype in which gradients are accumulated and reduced."""
    output_dtype: TrainingDType | None = None
    """Cast each unit's floating-point outputs to this dtype. Default: do not cast."""
    storage_dtype: TrainingDType = "float32"
    """Dtype of the shards that the optimizer updates, and of its state. "bfloat16" halves both and loses updates
    smaller than 1/512 of a parameter, except with optimizer.name = "adamw_bf16"."""
    offload: Literal["none", "params", "optimizer"] = "none"
    """"params": shards, gradients and optimizer state are kept in pinned host memory, and the optimizer runs there.
    "optimizer": only its state is, and is copied to the device in parts. Neither has an effect on a CPU run."""
    reshard_after_forward: bool | PositiveInt | None = None
    """Free the gathered parameters after forward (true), keep them (false), or reshard to this many ranks (int).
    Default: what the strategy does."""
    forward_prefetch: NonNegativeInt = 0
    """Units gathered ahead of the one that runs, in forward. 0: no explicit prefetch; on CUDA the host usually issues
    the next all-gather early anyway."""
    backward_prefetch: NonNegativeInt = 1
    """Units gathered ahead in backward: n keeps n + 1 units whole in memory. 1 is FSDP1's BACKWARD_PRE."""
    reduce_every_micro_batch: Literal["auto"] | bool = "auto"
    """true: reduce gradients after every micro-batch, so that a rank keeps only its shards of them. false: keep whole
    gradients, in `reduce_dtype`, until the last micro-batch, and send them once a step: for slow networks, where there
    is memory. "auto": true, but false under no_shard, and where `storage_dtype` is coarser than `reduce_dtype`.
    Replicas of hybrid strategies are reduced once a step in any case."""

    @property
    def accumulates_shards(self) -> bool:
        """`reduce_every_micro_batch`, resolved: whether a rank keeps shards of gradients between micro-batches."""
        if self.reduce_every_micro_batch != "auto":
            return self.reduce_every_micro_batch
        # Reduced gradients add up in the shards' dtype.
        is_coarser = self.storage_dtype == "bfloat16" and self.reduce_dtype != "bfloat16"
        return self.strategy != "no_shard" and not is_coarser

    def check(self, config: Any, sizes: MeshSizes) -> None:
        if self.unit != "size" and "min_params" in self.changed():
            what = f"{self.min_params} with fsdp.unit = {self.unit!r}, whose units do not go by size"
            raise UserError("fsdp.min_params", what, 'leave it out, or set fsdp.unit = "size"')
        reshard = self.reshard_after_forward
        ranks = sizes.dp_shard * sizes.cp // sizes.ep
        if type(reshard) is int and reshard == 1:
            raise UserError("fsdp.reshard_after_forward", "1 rank would hold everything", "use false, which says so")
        if type(reshard) is int and ranks % reshard:
            of_experts = " of experts" if sizes.ep > 1 else ""
            what = f"{reshard} does not divide the shard size {ranks}{of_experts}"
            raise UserError("fsdp.reshard_after_forward", what, "use true, false, or a divisor of dp_shard × cp ÷ ep")
