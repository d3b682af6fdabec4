"""The sections that every training recipe has, as frozen pydantic models; ``sections/`` has a file each.

The string under each field documents it; the JSON schema has it, so editors show it. A recipe's ``Config`` lists the
sections that its TOML may have: these, and its own. For ``[data]`` a recipe chooses one of the classes named here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import NonNegativeFloat as NonNegativeFloat  # these four are for sections of one's own (docs/recipes.md)
from pydantic import NonNegativeInt as NonNegativeInt
from pydantic import PositiveFloat as PositiveFloat
from pydantic import PositiveInt as PositiveInt

from fsdp2kit.config.facts import EngineNeeds
from fsdp2kit.config.section import Section as Section
from fsdp2kit.config.sections.activation_checkpointing import ActivationCheckpointingConfig
from fsdp2kit.config.sections.checkpoint import CheckpointConfig
from fsdp2kit.config.sections.compile import CompileConfig
from fsdp2kit.config.sections.context_parallel import ContextParallelConfig
from fsdp2kit.config.sections.data import ChatDataConfig as ChatDataConfig
from fsdp2kit.config.sections.data import ColumnsConfig as ColumnsConfig
from fsdp2kit.config.sections.data import DataConfig
from fsdp2kit.config.sections.data import PreferenceDataConfig as PreferenceDataConfig
from fsdp2kit.config.sections.data import TextDataConfig as TextDataConfig
from fsdp2kit.config.sections.eval import EvalConfig
from fsdp2kit.config.sections.float8 import Float8Config
from fsdp2kit.config.sections.fsdp import FSDPConfig
from fsdp2kit.config.sections.lora import LoraConfig
from fsdp2kit.config.sections.lr_schedule import AnySchedule, CosineScheduleConfig
from fsdp2kit.config.sections.mesh import MeshConfig
from fsdp2kit.config.sections.mlflow import MlflowConfig
from fsdp2kit.config.sections.model import ModelConfig
from fsdp2kit.config.sections.moe import AnyMoE, UnbalancedConfig
from fsdp2kit.config.sections.optimizer import AdamWConfig, AnyOptimizer
from fsdp2kit.config.sections.preflight import PreflightConfig
from fsdp2kit.config.sections.profile import ProfileConfig
from fsdp2kit.config.sections.run import RunConfig
from fsdp2kit.config.sections.tensorboard import TensorBoardConfig
from fsdp2kit.config.sections.train import TrainConfig
from fsdp2kit.config.sections.wandb import WandbConfig


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
