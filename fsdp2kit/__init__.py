"""fsdp2kit trains a Hugging Face model with FSDP2 (`fully_shard`) and writes a Hugging Face directory.

``import fsdp2kit as fk`` takes no time: each name below is imported when it is first used.

Runs
    load_config         a TOML, or a dict, and overrides → a checked config
    run                 train as a config says, in this process → `Finished`
    Finished            its directory and its records, the lines of ``metrics.jsonl``
    UserError           a mistake of yours, in one line: where, what, what to do
Parts, in the order in which a recipe (``recipes/sft.py``) builds them
    start_job           process group, device mesh, locked run directory, as a context
    start, build_mesh   the first two alone, for a loop of your own
    build_tokenizer     the tokenizer, with its chat template
    build_model         the model on meta: no memory yet
    plan_parallel       decides attention, units and dtypes; refuses what would be wrong
    plan_memory         what the run will take of each device
    build_data          rows → tokens → packs → this rank's batches
    parallelize_model   carries the plan out: the model is sharded, with memory but without values
    initialize, load_pretrained   random values; those of a Hugging Face directory
    build_optimizer, build_lr_schedule
    build_checkpoints   what saves, resumes and exports a run
    build_evaluation    held-out loss, answers to prompts
    build_metrics       metrics to the console, ``metrics.jsonl`` and wandb
    Run, train_loop     what a run has besides model and data; the training loop
    cross_entropy       the loss; pass `train_loop` another one
    build_mean_loss     a global batch → its mean loss on any mesh, for a loop of your own
    clip_gradients      the norm of all gradients, which it limits
    build_slice_batch   a batch of the loader → this rank's inputs of ``model.loss_sum``
    export_model        the sharded model → a Hugging Face directory
    say                 print on rank 0
Sections of a config, for recipes of your own and for builders that are called alone
    Section, TrainingConfig, RunConfig, ModelConfig, LoraConfig, MeshConfig, FSDPConfig, ContextParallelConfig,
    ActivationCheckpointingConfig, CompileConfig, Float8Config, ChatDataConfig, TextDataConfig, PreferenceDataConfig,
    TrainConfig, AdamWConfig, CosineScheduleConfig, EvalConfig, CheckpointConfig, WandbConfig, ProfileConfig

``help(fk.build_data)`` describes one, docs/api.md all of them, docs/keys.md the keys.

A run. A row of ``chats.jsonl`` is ``{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", …}]}``::

    import fsdp2kit as fk

    settings = {
        "recipe": "sft",  # or pretrain (rows of {"text": …}), dpo, distill, grpo
        "model": {"path": "HuggingFaceTB/SmolLM2-135M-Instruct"},  # a hub id, or a directory
        "data": {"path": "chats.jsonl", "seq_len": 1024},
        "train": {"epochs": 1, "global_batch_size": 8},
        "optimizer": {"lr": 2e-5},
        "run": {"dir": "runs/first"},  # started again, it resumes from its last checkpoint
        "wandb": {"mode": "disabled"},
    }
    finished = fk.run(fk.load_config(settings))
    print([record["loss"] for record in finished.records])  # and finished.directory / "hf" is the model

The same from its parts, without checkpoints, saved at the end. ``python x.py`` runs either script on one rank,
``torchrun --nproc-per-node 8 x.py`` eight, with the same losses and gradients. `build_mean_loss` is for a loop that
does without `train_loop`, too; README has one::

    config = fk.load_config(settings, "run.dir=runs/parts")
    with fk.start_job(config) as job:
        tokenizer = fk.build_tokenizer(config.model)
        model = fk.build_model(config.model)
        plan = fk.plan_parallel(model, config, job.mesh.sizes, job.mesh.device.type)
        job.open_run_dir(dtypes=plan.ledger)
        data = fk.build_data(config, tokenizer=tokenizer, model=model, mesh=job.mesh)
        fk.parallelize_model(model, plan, mesh=job.mesh)
        fk.load_pretrained(model)
        optimizer = fk.build_optimizer(config.optimizer, model)  # or torch.optim.AdamW(model.parameters())
        schedule = fk.build_lr_schedule(config.lr_schedule, optimizer, total_steps=data.total_steps)
        metrics = fk.build_metrics(config, job=job, plan=plan, total_steps=data.total_steps)
        run = fk.Run(config, job.mesh, plan, metrics, total_steps=data.total_steps)
        fk.train_loop(run, model, optimizer, schedule, data.batches(), objective=fk.cross_entropy)
        fk.export_model(model, "my_model", tokenizer=tokenizer)
"""

from __future__ import annotations

import importlib
import logging
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors, type checkers and tools/api.py; `__getattr__` imports these when they are used
    from fsdp2kit.checkpoint.export_model import export_model as export_model
    from fsdp2kit.checkpoint.run import build_checkpoints as build_checkpoints
    from fsdp2kit.config.optimization import AdamWConfig as AdamWConfig
    from fsdp2kit.config.optimization import CosineScheduleConfig as CosineScheduleConfig
    from fsdp2kit.config.optimization import LoraConfig as LoraConfig
    from fsdp2kit.config.parallel_schema import ActivationCheckpointingConfig as ActivationCheckpointingConfig
    from fsdp2kit.config.parallel_schema import CompileConfig as CompileConfig
    from fsdp2kit.config.parallel_schema import ContextParallelConfig as ContextParallelConfig
    from fsdp2kit.config.parallel_schema import Float8Config as Float8Config
    from fsdp2kit.config.parallel_schema import FSDPConfig as FSDPConfig
    from fsdp2kit.config.parallel_schema import MeshConfig as MeshConfig
    from fsdp2kit.config.schema import ChatDataConfig as ChatDataConfig
    from fsdp2kit.config.schema import CheckpointConfig as CheckpointConfig
    from fsdp2kit.config.schema import EvalConfig as EvalConfig
    from fsdp2kit.config.schema import ModelConfig as ModelConfig
    from fsdp2kit.config.schema import PreferenceDataConfig as PreferenceDataConfig
    from fsdp2kit.config.schema import ProfileConfig as ProfileConfig
    from fsdp2kit.config.schema import RunConfig as RunConfig
    from fsdp2kit.config.schema import Section as Section
    from fsdp2kit.config.schema import TextDataConfig as TextDataConfig
    from fsdp2kit.config.schema import TrainConfig as TrainConfig
    from fsdp2kit.config.schema import TrainingConfig as TrainingConfig
    from fsdp2kit.config.schema import WandbConfig as WandbConfig
    from fsdp2kit.console import say as say
    from fsdp2kit.data.build import build_data as build_data
    from fsdp2kit.errors import UserError as UserError
    from fsdp2kit.job.distributed import start as start
    from fsdp2kit.job.mesh import build_mesh as build_mesh
    from fsdp2kit.job.start import start_job as start_job
    from fsdp2kit.model.build import build_model as build_model
    from fsdp2kit.model.tokenizer import build_tokenizer as build_tokenizer
    from fsdp2kit.model.weights import initialize as initialize
    from fsdp2kit.model.weights import load_pretrained as load_pretrained
    from fsdp2kit.optim.build import build_lr_schedule as build_lr_schedule
    from fsdp2kit.optim.build import build_optimizer as build_optimizer
    from fsdp2kit.parallel.context_parallel.batch import build_slice_batch as build_slice_batch
    from fsdp2kit.parallel.parallelize import parallelize_model as parallelize_model
    from fsdp2kit.parallel.plan import plan_parallel as plan_parallel
    from fsdp2kit.planner.estimate import plan_memory as plan_memory
    from fsdp2kit.run import Finished as Finished
    from fsdp2kit.run import load_config as load_config
    from fsdp2kit.run import run as run
    from fsdp2kit.train.evaluation import build_evaluation as build_evaluation
    from fsdp2kit.train.loop import Run as Run
    from fsdp2kit.train.loop import train as train_loop
    from fsdp2kit.train.mean_loss import build_mean_loss as build_mean_loss
    from fsdp2kit.train.metrics import build_metrics as build_metrics
    from fsdp2kit.train.step import clip_gradients as clip_gradients
    from fsdp2kit.train.step import cross_entropy as cross_entropy

__version__ = "0.1.0"

PARENT = os.getppid()
"""The parent process at start-up. Read here, because it may end during the seconds in which torch is imported."""

# The names of `fsdp2kit`, each with the module that has it, in the order of the table above and of docs/api.md.
_HOMES = {
    "load_config": "run",
    "run": "run",
    "Finished": "run",
    "UserError": "errors",
    "start_job": "job.start",
    "start": "job.distributed",
    "build_mesh": "job.mesh",
    "build_tokenizer": "model.tokenizer",
    "build_model": "model.build",
    "plan_parallel": "parallel.plan",
    "plan_memory": "planner.estimate",
    "build_data": "data.build",
    "parallelize_model": "parallel.parallelize",
    "initialize": "model.weights",
    "load_pretrained": "model.weights",
    "build_optimizer": "optim.build",
    "build_lr_schedule": "optim.build",
    "build_checkpoints": "checkpoint.run",
    "build_evaluation": "train.evaluation",
    "build_metrics": "train.metrics",
    "Run": "train.loop",
    "train_loop": "train.loop",
    "cross_entropy": "train.step",
    "build_mean_loss": "train.mean_loss",
    "clip_gradients": "train.step",
    "build_slice_batch": "parallel.context_parallel.batch",
    "export_model": "checkpoint.export_model",
    "say": "console",
    "Section": "config.schema",
    "TrainingConfig": "config.schema",
    "RunConfig": "config.schema",
    "ModelConfig": "config.schema",
    "LoraConfig": "config.optimization",
    "MeshConfig": "config.parallel_schema",
    "FSDPConfig": "config.parallel_schema",
    "ContextParallelConfig": "config.parallel_schema",
    "ActivationCheckpointingConfig": "config.parallel_schema",
    "CompileConfig": "config.parallel_schema",
    "Float8Config": "config.parallel_schema",
    "ChatDataConfig": "config.schema",
    "TextDataConfig": "config.schema",
    "PreferenceDataConfig": "config.schema",
    "TrainConfig": "config.schema",
    "AdamWConfig": "config.optimization",
    "CosineScheduleConfig": "config.optimization",
    "EvalConfig": "config.schema",
    "CheckpointConfig": "config.schema",
    "WandbConfig": "config.schema",
    "ProfileConfig": "config.schema",
}
# The loop's own name is that of its folder.
_NAMES_AT_HOME = {"train_loop": "train"}

__all__ = [
    "ActivationCheckpointingConfig",
    "AdamWConfig",
    "ChatDataConfig",
    "CheckpointConfig",
    "CompileConfig",
    "ContextParallelConfig",
    "CosineScheduleConfig",
    "EvalConfig",
    "FSDPConfig",
    "Finished",
    "Float8Config",
    "LoraConfig",
    "MeshConfig",
    "ModelConfig",
    "PreferenceDataConfig",
    "ProfileConfig",
    "Run",
    "RunConfig",
    "Section",
    "TextDataConfig",
    "TrainConfig",
    "TrainingConfig",
    "UserError",
    "WandbConfig",
    "build_checkpoints",
    "build_data",
    "build_evaluation",
    "build_lr_schedule",
    "build_mean_loss",
    "build_mesh",
    "build_metrics",
    "build_model",
    "build_optimizer",
    "build_slice_batch",
    "build_tokenizer",
    "clip_gradients",
    "cross_entropy",
    "export_model",
    "initialize",
    "load_config",
    "load_pretrained",
    "parallelize_model",
    "plan_memory",
    "plan_parallel",
    "run",
    "say",
    "start",
    "start_job",
    "train_loop",
]

# transformers imports torchao if it is installed, and torchao logs which of its kernels this machine cannot load.
# Nothing here uses those kernels, and a user's mistake must stay one line.
for _logger in map(logging.getLogger, ("torchao", "torch.utils._pytree")):
    if _logger.level == logging.NOTSET:
        _logger.setLevel(logging.ERROR)


def __getattr__(name: str) -> Any:
    """Import a name of `__all__` when it is first used (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    # The module `run` can be called, and has this name in any case once it is imported.
    found = home if name == _HOMES[name] else getattr(home, _NAMES_AT_HOME.get(name, name))
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
