"""What `fsdp2kit` has, in the order of docs/api.md; `__init__.py` imports each name when it is first used."""

# ruff: noqa: I001

from .run import load_config as load_config
from .run import run as run
from .run import Finished as Finished
from .errors import UserError as UserError
from .job.start import start_job as start_job
from .job.distributed import start as start
from .job.mesh import build_mesh as build_mesh
from .model.tokenizer import build_tokenizer as build_tokenizer
from .model.build import build_model as build_model
from .parallel.plan import plan_parallel as plan_parallel
from .planner.estimate import plan_memory as plan_memory
from .data.build import build_data as build_data
from .parallel.parallelize import parallelize_model as parallelize_model
from .weights.initialize import initialize as initialize
from .weights.load import load_pretrained as load_pretrained
from .optim.build import build_optimizer as build_optimizer
from .optim.build import build_lr_schedule as build_lr_schedule
from .checkpoint.run import build_checkpoints as build_checkpoints
from .train.evaluation import build_evaluation as build_evaluation
from .train.metrics import build_metrics as build_metrics
from .train.run import Run as Run
from .train.loop import train_loop as train_loop
from .train.step import cross_entropy as cross_entropy
from .train.mean_loss import build_mean_loss as build_mean_loss
from .train.step import clip_gradients as clip_gradients
from .parallel.context_parallel.batch import build_slice_batch as build_slice_batch
from .checkpoint.export_model import export_model as export_model
from .console import say as say
from .config.section import Section as Section
from .config.schema import TrainingConfig as TrainingConfig
from .config.sections.run import RunConfig as RunConfig
from .config.sections.model import ModelConfig as ModelConfig
from .config.sections.lora import LoraConfig as LoraConfig
from .config.sections.mesh import MeshConfig as MeshConfig
from .config.sections.fsdp import FSDPConfig as FSDPConfig
from .config.sections.context_parallel import ContextParallelConfig as ContextParallelConfig
from .config.sections.activation_checkpointing import ActivationCheckpointingConfig as ActivationCheckpointingConfig
from .config.sections.compile import CompileConfig as CompileConfig
from .config.sections.float8 import Float8Config as Float8Config
from .config.sections.data import ChatDataConfig as ChatDataConfig
from .config.sections.data import TextDataConfig as TextDataConfig
from .config.sections.data import PreferenceDataConfig as PreferenceDataConfig
from .config.sections.train import TrainConfig as TrainConfig
from .config.sections.optimizer import AdamWConfig as AdamWConfig
from .config.sections.lr_schedule import CosineScheduleConfig as CosineScheduleConfig
from .config.sections.eval import EvalConfig as EvalConfig
from .config.sections.checkpoint import CheckpointConfig as CheckpointConfig
from .config.sections.wandb import WandbConfig as WandbConfig
from .config.sections.profile import ProfileConfig as ProfileConfig

PARENT: int
"""The parent process at start-up."""

__version__: str
