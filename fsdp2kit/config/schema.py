"""The TOML's sections as frozen pydantic models.

The string under each field documents it; the JSON schema has it, so editors show it. A recipe's ``Config`` lists the
sections that its TOML may have.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
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
from fsdp2kit.config.facts import EngineNeeds, MeshSizes
from fsdp2kit.config.optimization import (
    AdamWConfig,
    AnyMoE,
    AnyOptimizer,
    AnySchedule,
    CosineScheduleConfig,
    LoraConfig,
    UnbalancedConfig,
)
from fsdp2kit.config.optimization import DistillConfig as DistillConfig
from fsdp2kit.config.optimization import DPOConfig as DPOConfig
from fsdp2kit.config.optimization import LRScheduleConfig as LRScheduleConfig
from fsdp2kit.config.optimization import OptimizerConfig as OptimizerConfig
from fsdp2kit.config.parallel_schema import (
    ActivationCheckpointingConfig,
    CompileConfig,
    ContextParallelConfig,
    Float8Config,
    FSDPConfig,
    MeshConfig,
)
from fsdp2kit.config.section import (
    Duration,
    InputPath,
    LocalPath,
    OutputPath,
    may_be_hub_id,
    seconds_of,
)
from fsdp2kit.config.section import Section as Section
from fsdp2kit.config.section import TemplatePath as TemplatePath
from fsdp2kit.errors import UserError, check_installed

DType = Literal["float32", "bfloat16", "float16"]

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
    """Stop this many minutes after the first step began: finish the step, write a checkpoint, exit 0."""
    timeout_minutes: Annotated[float, Field(ge=0.001, le=1e6)] = 30.0
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

    def check(self, config: Any, sizes: MeshSizes) -> None:
        if self.path is None and "model_type" not in self.config:
            todo = "give a Hugging Face directory or hub id, or a config with its model_type"
            raise UserError("model", "neither model.path nor model.config.model_type is given", todo)
        if self.path is None and self.weights == "pretrained":
            what = "'pretrained' without a model.path to load from"
            raise UserError("model.weights", what, "give model.path, or set model.weights = 'random'")
        if self.liger and config.activation_checkpointing.mode == "selective":
            # torch does not see what Triton's kernels write, so its own checks would not notice.
            what = "true with mode = 'selective': Liger's RoPE changes in place the results that are kept for backward"
            raise UserError("model.liger", what, 'set activation_checkpointing.mode = "full"')


class EvalConfig(Section):
    """Held-out loss and perplexity, over all sets and of each."""

    every: NonNegativeInt = 0
    """Evaluate every n steps and at the end; 0: never."""
    path: InputPath | None = None
    """Held-out data in the training data's format. Default: `data.path`, with another `split`."""
    name: str | None = None
    """Configuration of `path`, like `data.name`. Default: without `path`, that of the training data."""
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
    def configuration(self) -> str | None:
        """The configuration of the set that `path` names."""
        return self.name

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
    global_batch_size: Annotated[PositiveInt, Field(lt=2**31)] = 8
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

    def check(self, config: Any, sizes: MeshSizes) -> None:
        if (self.steps is None) == (self.epochs is None):
            what = "neither steps nor epochs is given" if self.steps is None else "both steps and epochs are given"
            raise UserError("train", what, "give exactly one of train.steps and train.epochs")
        if "max_nonfinite" in self.changed() and self.on_nonfinite == "stop":
            what = f"{self.max_nonfinite} with train.on_nonfinite = 'stop', which stops at the first"
            raise UserError("train.max_nonfinite", what, "leave it out, or set train.on_nonfinite = 'skip'")


class CheckpointConfig(Section):
    """Checkpoints and the Hugging Face export."""

    dir: OutputPath | None = None
    """Where checkpoints are kept: a directory that all nodes share, relative to the working directory, or an fsspec
    URL (`s3://bucket/run`, `gs://…`) to which only one run at a time may save. Default: `checkpoints` in `run.dir`."""
    every: NonNegativeInt | Duration = "30m"
    """Save a checkpoint every n steps, or after a time ("30m", "2h", "90s"); 0: at the end only."""
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
        """Most checkpoints at a time, with the one being written. Old ones are deleted when it is complete.

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

    def check(self, config: Any, sizes: MeshSizes) -> None:
        repository, key = self.push_to_hub, "checkpoint.push_to_hub"
        if repository is None:
            return
        if not may_be_hub_id(repository):
            raise UserError(key, f"{repository!r} is no name of a repository", "write user/model, or model")
        if self.export_hf == "never":
            raise UserError(key, "nothing is exported", 'set checkpoint.export_hf = "final"')
        if self.export_dir and "://" in self.export_dir:
            raise UserError(key, f"{self.export_dir} is on no disk", "leave one of them out")


class PreflightConfig(Section):
    """Waives refusals of combinations that would silently change the mathematics."""

    allow: list[Literal["dropout", "router_aux_loss", "other_tokenizer"]] = []
    """Names of the refusals to waive; "other_tokenizer": `model.tokenizer` gives tokens other ids than the model's."""


class WandbConfig(Section):
    """Weights & Biases. A key that is set here comes before wandb's environment variable for the same."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """"auto": WANDB_MODE; without it online if there is a login, else offline. The run says whether and where to it
    is uploaded."""
    entity: str | None = None
    """User or team. Default: WANDB_ENTITY, else that of the login."""
    project: str | None = None
    """Project name. Default: WANDB_PROJECT, else "fsdp2kit"."""
    name: str | None = None
    """Run name. Default: WANDB_NAME, else the run directory's."""
    group: str | None = None
    """Group of runs. Default: WANDB_RUN_GROUP."""
    tags: list[str] = []
    """Tags of the run. Default: those of WANDB_TAGS."""


class TensorBoardConfig(Section):
    """TensorBoard's event files, in `tensorboard/` of the run directory."""

    enabled: bool = False
    """Write them. Needs the extra `tensorboard`."""

    def check(self, config: Any, sizes: MeshSizes) -> None:
        if self.enabled:
            check_installed("tensorboard", where="tensorboard.enabled")


class MlflowConfig(Section):
    """MLflow: to the server or store of MLFLOW_TRACKING_URI, or to `mlflow.db` beside the run directory."""

    enabled: bool = False
    """Log to it. Needs the extra `mlflow`."""
    experiment: Annotated[str, Field(min_length=1)] | None = None
    """Name of the experiment. Default: MLFLOW_EXPERIMENT_NAME, else "fsdp2kit"."""

    def check(self, config: Any, sizes: MeshSizes) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:"
        is_database = uri.startswith(("sqlite", "postgresql", "mysql", "mssql"))
        for package in ("mlflow", *(("sqlalchemy", "alembic") if is_database else ())) if self.enabled else ():
            check_installed(package, where="mlflow.enabled")


class ProfileConfig(Section):
    """A torch profiler trace of a few steps, one file per rank, in `trace/` of the run directory.

    SIGUSR2, or a file `profile-now` in the run directory, asks for one at any time, in `trace/step-N/`.
    """

    enabled: bool = False
    """Write a trace of steps planned in advance."""
    start_step: PositiveInt = 3
    """First step that is traced, if planned."""
    steps: PositiveInt = 2
    """How many steps are traced, planned or asked for."""
    memory: bool = False
    """Also write a CUDA memory snapshot of the planned steps; those asked for have one anyway."""


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
    moe: AnyMoE = UnbalancedConfig()
    """How the experts of a mixture of experts are kept evenly loaded; docs/moe.md."""
    optimizer: AnyOptimizer = AdamWConfig()
    """The optimizer; docs/optimizers.md compares them."""
    lr_schedule: AnySchedule = CosineScheduleConfig()
    """The learning rate over the steps; transformers' schedules."""
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    preflight: PreflightConfig = PreflightConfig()
    wandb: WandbConfig = WandbConfig()
    tensorboard: TensorBoardConfig = TensorBoardConfig()
    mlflow: MlflowConfig = MlflowConfig()
    profile: ProfileConfig = ProfileConfig()

    @property
    def evaluates(self) -> bool:
        """Whether held-out data are evaluated."""
        return self.eval.every > 0 or self.train.steps == 0

    @property
    def trains_adapter(self) -> bool:
        """Whether adapters are trained, beside a frozen model."""
        return self.lora.rank is not None or self.model.adapter is not None

    @property
    def engine_needs(self) -> EngineNeeds | None:
        """What generates responses between steps; None: nothing does."""
        return self.needs(self).engine

    @property
    def savings(self) -> Mapping[str, Any]:
        """Values of the sections' TOML keys that would save memory without changing results."""
        return self.needs(self).savings
