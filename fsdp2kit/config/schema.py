"""The TOML's sections as frozen pydantic models.

The string under each field is its documentation; the JSON schema has it, so editors show it. A recipe's ``Config``
names the sections that its TOML may have.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from fsdp2kit.config.data_schema import ChatDataConfig as ChatDataConfig
from fsdp2kit.config.data_schema import ColumnsConfig as ColumnsConfig
from fsdp2kit.config.data_schema import DataConfig as DataConfig
from fsdp2kit.config.data_schema import DataFormat as DataFormat
from fsdp2kit.config.data_schema import DataPathConfig as DataPathConfig
from fsdp2kit.config.data_schema import Overlong as Overlong
from fsdp2kit.config.data_schema import PreferenceDataConfig as PreferenceDataConfig
from fsdp2kit.config.data_schema import SourceConfig as SourceConfig
from fsdp2kit.config.data_schema import TextDataConfig as TextDataConfig
from fsdp2kit.config.optimization import DistillConfig as DistillConfig
from fsdp2kit.config.optimization import DPOConfig as DPOConfig
from fsdp2kit.config.optimization import LoraConfig as LoraConfig
from fsdp2kit.config.optimization import LRScheduleConfig as LRScheduleConfig
from fsdp2kit.config.optimization import OptimizerConfig as OptimizerConfig
from fsdp2kit.config.section import Duration, InputPath, LocalPath, OutputPath, TrainingDType, seconds_of
from fsdp2kit.config.section import Section as Section
from fsdp2kit.config.section import TemplatePath as TemplatePath

DType = Literal["float32", "bfloat16", "float16"]
Size = Annotated[int, Field(ge=1)] | Literal["auto"]


Message = Annotated[dict[Literal["role", "content"], str], Field(min_length=2)]
"""A message of a conversation: whose it is, as the chat template calls them, and its text."""


class RunConfig(Section):
    """Where the run is kept, how it starts and when it stops."""

    dir: OutputPath = "runs/default"
    """Run directory, relative to the working directory: config, metrics, checkpoints, export."""
    seed: NonNegativeInt = 0
    """Seed of the random initialisation, of the data order and of any dropout."""
    resume: Literal["auto", "never"] | LocalPath = "auto"
    """"auto" (the newest complete checkpoint in `dir`, if any), "never", or the path of a checkpoint."""
    deterministic: bool = False
    """Use deterministic kernels on CUDA, so that runs repeat bit for bit (slower). A CPU run always does."""
    max_minutes: PositiveFloat | None = None
    """Stop after this many minutes: finish the step, write a checkpoint, exit 0."""
    timeout_minutes: PositiveFloat = 30.0
    """Minutes that a collective may take before the job fails."""


class ModelConfig(Section):
    """Which model, from where."""

    path: InputPath | None = None
    """A Hugging Face model directory or hub id. Optional when `config.model_type` is given."""
    weights: Literal["pretrained", "random"] | LocalPath = "pretrained"
    """"pretrained" (from `path`), "random", or the path of a DCP checkpoint (weights only)."""
    config: dict[str, Any] = {}
    """Overrides of the Hugging Face config, e.g. `{ num_hidden_layers = 4 }`; with `model_type`, a complete config.
    A key may have any name that transformers knows it by."""
    attention: str = "auto"
    """"varlen" (ours: documents and sliding windows without masks), or an attention implementation of transformers:
    "sdpa", "eager", "flash_attention_2", "flex_attention", …. "auto": "varlen" if it computes the same as the
    model's own, else "sdpa" ("eager" for models without it). The start says which and why."""
    liger: bool = False
    """Use Liger's kernels for norms, RoPE and gated MLPs. Needs a GPU and the extra `liger`."""
    tokenizer: InputPath | None = None
    """Directory or hub id of the tokenizer. Default: `path`."""
    chat_template: TemplatePath | None = None
    """A Jinja chat template file, or the name of a ready one ("chatml", "llama3", "gemma", "mistral", "zephyr"), used
    instead of the tokenizer's own and exported with the model. Special tokens that it needs are added."""
    trust_remote_code: bool = False
    """Run the model repository's own Python code. Leave it off unless you have read that code."""
    freeze: list[str] = []
    """Name patterns of parameters that are not trained: `["model.embed_tokens.*", "*.layers.[0-7].*"]`."""
    adapter: InputPath | None = None
    """Train this LoRA adapter further: a directory as peft writes it (such as an earlier run's `hf`), or a hub id."""


class MeshConfig(Section):
    """The device mesh: dp_replicate × dp_shard × cp = world size. One size may be left to "auto"."""

    dp_replicate: Size = "auto"
    """Replicas of the sharded model (hybrid sharding). "auto": 1, or the number of nodes under a hybrid strategy."""
    dp_shard: Size = "auto"
    """Data-parallel ranks over which one replica is sharded. "auto": the remaining ranks."""
    cp: PositiveInt = 1
    """Context-parallel ranks: each sequence is split over this many."""


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


class EvalConfig(Section):
    """Held-out loss and perplexity, over all sets and of each."""

    every: NonNegativeInt = 0
    """Evaluate every n steps and at the end; 0: never."""
    path: InputPath | None = None
    """Held-out data in the training data's format. Default: `data.path`, with another `split`."""
    split: Annotated[float, Field(gt=0, lt=1)] | PositiveInt | str = "train"
    """A split like `data.split`; or a share (`0.02`) or number (`500`) of rows that are held out of the training data.
    Which ones, their content decides: copies of a row stay together, on any mesh and in any order."""
    sets: dict[str, DataPathConfig] = {}
    """Named held-out sets, instead of or besides `path`: `[eval.sets.code]`, with `path`, `split`, `format`."""
    steps: PositiveInt | None = None
    """Global batches per evaluation and set. Default: the whole set."""
    patience: PositiveInt | None = None
    """Stop after this many evaluations in a row without a lower eval_loss. Default: train to the end."""
    min_delta: NonNegativeFloat = 0.0
    """How much lower than the best so far eval_loss must be to count as lower."""
    keep_best: bool | None = None
    """Write a checkpoint whenever eval_loss is the lowest so far, and keep it besides the newest ones; the end exports
    it (`checkpoint.export`). Default: with `patience`."""
    prompts: list[str | Annotated[list[Message], Field(min_length=1)]] = []
    """What the model answers after each evaluation, on the console, into `samples.jsonl` and wandb: a user's message,
    or a list of messages like `[{ role = "system", content = "Be brief." }, { role = "user", content = "Hello" }]`."""
    max_new_tokens: PositiveInt = 64
    """Most tokens of such an answer. Each takes a forward pass without a cache."""

    @property
    def keeps_best(self) -> bool:
        """`keep_best`, or its default."""
        return self.patience is not None if self.keep_best is None else self.keep_best


class TrainConfig(Section):
    """How long and in which batches."""

    steps: NonNegativeInt | None = None
    """Optimizer steps; 0 only evaluates. Give `steps` or `epochs`."""
    epochs: PositiveInt | None = None
    """Passes over the data. Give `steps` or `epochs`."""
    global_batch_size: PositiveInt = 8
    """Sequences (with packing: packs) in one optimizer step, over the whole job; it does not depend on the mesh."""
    micro_batch_size: PositiveInt = 1
    """Sequences in one forward pass of one data-parallel rank."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Clip the global gradient norm to this; 0 does not clip."""
    log_every: PositiveInt = 1
    """Log every n steps. The loss is that of the logged step; speeds are averages over the n."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """On a non-finite loss or gradient: stop, naming step and rank, or skip that optimizer step."""
    max_nonfinite: PositiveInt = 5
    """on_nonfinite = "skip" only: stop at this many such steps in a row."""

    def total_steps(self, steps_per_epoch: int) -> int:
        """Optimizer steps of a whole run."""
        return self.steps if self.steps is not None else (self.epochs or 0) * steps_per_epoch


class CheckpointConfig(Section):
    """Checkpoints and the Hugging Face export."""

    dir: OutputPath | None = None
    """Where checkpoints are kept: a directory that all nodes share, relative to the working directory, or an fsspec
    URL (`s3://bucket/run`, `gs://…`) to which only one run at a time may save. Default: `checkpoints` in `run.dir`."""
    every: NonNegativeInt | Duration = "30m"
    """Write a checkpoint every n steps, or after a time ("30m", "2h", "90s"); 0: at the end only."""
    keep: PositiveInt = 2
    """How many of the newest checkpoints are kept."""
    keep_every: NonNegativeInt = 0
    """Checkpoints whose step is a multiple of this are never deleted; 0: no such rule."""
    async_save: bool = False
    """Save in the background: shards are copied to host memory during the next forward and backward pass, then written
    while training continues. A save that fails stops the run at its next step."""
    export_hf: Literal["final", "every", "never"] = "final"
    """Write a Hugging Face directory at the end, with every checkpoint, or never."""
    export: Literal["best", "last"] | None = None
    """Which checkpoint that is: the one with the lowest eval_loss so far, or the newest. Default: "best" with
    `eval.keep_best`, else "last"."""
    export_dir: OutputPath | None = None
    """Where the export goes: a directory, relative to the working directory, or an fsspec URL (`s3://bucket/model`).
    Default: `hf` in `run.dir`."""
    export_dtype: DType | None = None
    """Dtype of the export. Default: the source model's; for a model from a config, float32."""
    push_to_hub: str | None = None
    """A repository of the Hugging Face hub (`me/my-model`) to upload the final export to; a new one is private. An
    upload that fails is reported, and the run still succeeds."""

    @property
    def every_seconds(self) -> float | None:
        """Seconds between checkpoints; None where `every` counts steps."""
        return None if isinstance(self.every, int) else seconds_of(self.every)

    def most_at_once(self, steps: int | None, *, keeps_best: bool) -> int:
        """Most checkpoints at a time, with the one being written: old ones are deleted when it is complete.

        Args:
            steps: `train.steps`.
            keeps_best: whether the best one is kept beside the newest.
        """
        most = self.keep + int(keeps_best) + 1
        if self.keep_every and steps:
            most += steps // self.keep_every
        if isinstance(self.every, int) and steps:  # and one at the end
            most = min(most, steps // (self.every or steps) + 1)
        return most


class PreflightConfig(Section):
    """Waives refusals of combinations that would silently change the mathematics."""

    allow: list[Literal["dropout", "router_aux_loss"]] = []
    """Names of the refusals to waive."""


class WandbConfig(Section):
    """Weights & Biases."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """"auto": online if there is a login, else offline (and the run says so)."""
    entity: str | None = None
    """User or team. Default: that of the login."""
    project: str = "fsdp2kit"
    """Project name."""
    name: str | None = None
    """Run name. Default: the run directory's."""
    group: str | None = None
    """Group of runs."""
    tags: list[str] = []
    """Tags of the run."""


class ProfileConfig(Section):
    """A torch profiler trace of a few steps, one file per rank, in `trace/` of the run directory."""

    enabled: bool = False
    """Write a trace."""
    start_step: PositiveInt = 3
    """First step that is traced."""
    steps: PositiveInt = 2
    """How many steps are traced."""
    memory: bool = False
    """Also write a CUDA memory snapshot of those steps."""


class TrainingConfig(Section):
    """The sections that every training recipe has; a recipe's own ``Config`` adds its ``data``."""

    recipe: str
    """A name under `recipes/`, or the path of a `.py` file."""
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    lora: LoraConfig = LoraConfig()
    mesh: MeshConfig = MeshConfig()
    fsdp: FSDPConfig = FSDPConfig()
    context_parallel: ContextParallelConfig = ContextParallelConfig()
    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    compile: CompileConfig = CompileConfig()
    float8: Float8Config = Float8Config()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_schedule: LRScheduleConfig = LRScheduleConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    preflight: PreflightConfig = PreflightConfig()
    wandb: WandbConfig = WandbConfig()
    profile: ProfileConfig = ProfileConfig()

    @property
    def evaluates(self) -> bool:
        """Whether held-out data are evaluated."""
        return self.eval.every > 0 or self.train.steps == 0

    @property
    def trains_adapter(self) -> bool:
        """Whether adapters are trained, beside a frozen model."""
        return self.lora.rank is not None or self.model.adapter is not None
