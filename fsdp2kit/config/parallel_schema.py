"""The TOML's sections about the mesh, and how the model is sharded over it, recomputed and compiled."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from fsdp2kit.config.facts import MeshSizes
from fsdp2kit.config.section import Section, TrainingDType
from fsdp2kit.errors import UserError, check_installed

Size = Annotated[int, Field(ge=1)] | Literal["auto"]


class MeshConfig(Section):
    """The device mesh: dp_replicate × dp_shard × cp = world size. One size may be left to "auto"."""

    dp_replicate: Size = "auto"
    """Replicas of the sharded model (hybrid sharding). "auto": 1, or the number of nodes under a hybrid strategy."""
    dp_shard: Size = "auto"
    """Data-parallel ranks over which one replica is sharded. "auto": the remaining ranks."""
    cp: PositiveInt = 1
    """Context-parallel ranks: each sequence is split over this many."""
    ep: PositiveInt = 1
    """Expert-parallel ranks: the experts of each layer are dealt out over this many neighbours among the dp_shard × cp
    ranks, and tokens travel to them. It adds no ranks; docs/moe.md."""


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
        reshard, ranks = self.reshard_after_forward, sizes.dp_shard * sizes.cp // sizes.ep
        if type(reshard) is int and reshard == 1:
            raise UserError("fsdp.reshard_after_forward", "1 rank would hold everything", "use false, which says so")
        if type(reshard) is int and ranks % reshard:
            of_experts = " of experts" if sizes.ep > 1 else ""
            what = f"{reshard} does not divide the shard size {ranks}{of_experts}"
            raise UserError("fsdp.reshard_after_forward", what, "use true, false, or a divisor of dp_shard × cp ÷ ep")


class ContextParallelConfig(Section):
    """How attention sees the whole sequence when `mesh.cp` > 1."""

    method: Literal["auto", "ulysses", "ring", "allgather"] = "auto"
    """"ulysses": all-to-all between sequence shards and heads, around any attention implementation. "ring": keys and
    values are sent round the ranks during the computation. "allgather": every rank gathers all keys and values.
    "auto" picks one by heads, packing, sequence length and mesh, and says why at the start."""


class ActivationCheckpointingConfig(Section):
    """Which activations are recomputed in backward instead of kept."""

    mode: Literal["none", "full", "selective"] = "none"
    """"full": keep only each decoder layer's input and recompute the rest: about a third more computation.
    "selective": keep the results of attention and of matmuls with weights, about half of all activations, and
    recompute the others, which are cheap."""
    every: PositiveInt = 1
    """Checkpoint every n-th decoder layer."""
    offload: bool = False
    """mode = "full" only: keep the layers' inputs in pinned host memory. No effect on a CPU run."""

    def check(self, config: Any, sizes: MeshSizes) -> None:
        if self.offload and self.mode != "full":
            what = f"with mode = {self.mode!r}, which keeps more than the layers' inputs"
            raise UserError("activation_checkpointing.offload", what, 'set activation_checkpointing.mode = "full"')
        if self.every != 1 and self.mode == "none":
            what = f"{self.every} with mode = 'none', which checkpoints no layer"
            todo = 'leave it out, or set activation_checkpointing.mode = "full" or "selective"'
            raise UserError("activation_checkpointing.every", what, todo)


class CompileConfig(Section):
    """torch.compile."""

    enabled: bool = False
    """Compile each decoder layer: the first step takes minutes, the others less time and memory. torch caches the
    compiled code in TORCHINDUCTOR_CACHE_DIR."""


class Float8Config(Section):
    """Float8 matmuls (torchao's) in the linear layers of the decoder layers; docs/float8.md. Extra `lowbit`."""

    recipe: Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp"] = "none"
    """"tensorwise": one scale per tensor, the fastest. "rowwise": one per row, more accurate. "rowwise_with_gw_hp":
    rowwise, with weight gradients in `fsdp.param_dtype`; the only one whose results do not depend on the mesh."""
    exclude: list[str] = []
    """Name patterns of linear layers that are left out, e.g. `["*.down_proj", "model.layers.0.*"]`."""
    emulate: bool = False
    """Round to float8 and multiply in float32, on devices without float8 matmuls: for checking numerics; slower than
    bfloat16. A CPU run always does this."""

    def check(self, config: Any, sizes: MeshSizes) -> None:
        if self.recipe == "none":
            for name in self.changed():
                what = f"is set, but float8.recipe is {self.recipe!r}"
                raise UserError(f"float8.{name}", what, "set float8.recipe, or leave it out")
            return
        check_installed("torchao", where="float8.recipe")
        for key, names in (("class_dtypes", config.fsdp.class_dtypes), ("unit_classes", config.fsdp.unit_classes)):
            if "Linear" in names:
                what = "names Linear, whose modules get another class with float8"
                raise UserError(f"fsdp.{key}", what, "name the class of the module around them, or use float8.exclude")
