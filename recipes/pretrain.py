"""Pretraining of a Hugging Face causal language model on plain text, from random weights or its own.

Copy this file, change the line that builds what you want different, and name the copy in your TOML's ``recipe``.
"""

from __future__ import annotations

from fsdp2kit.checkpoint.run import build_checkpoints
from fsdp2kit.config.schema import TextDataConfig, TrainingConfig
from fsdp2kit.console import say
from fsdp2kit.data.build import build_data
from fsdp2kit.job.start import start_job
from fsdp2kit.model.build import build_model
from fsdp2kit.model.tokenizer import build_tokenizer
from fsdp2kit.optim.build import build_lr_schedule, build_optimizer
from fsdp2kit.parallel.parallelize import parallelize_model
from fsdp2kit.parallel.plan import plan_parallel
from fsdp2kit.planner.estimate import plan_memory
from fsdp2kit.train.evaluation import build_evaluation
from fsdp2kit.train.loop import Run, train
from fsdp2kit.train.metrics import build_metrics
from fsdp2kit.train.step import cross_entropy


class Config(TrainingConfig):
    """Pretraining: every token is a target."""

    data: TextDataConfig = TextDataConfig()


def main(config: Config) -> None:
    """Train as ``config`` says; every rank calls this."""
    with start_job(config) as job:
        # Nothing is allocated yet. A config that would silently train something else is refused here.
        # Synthetic tokens need no tokenizer, and the export then has none.
        tokenizer = None if config.data.format == "synthetic" else build_tokenizer(config.model)
        model = build_model(config.model, lora=config.lora)
        plan = plan_parallel(model, config, job.mesh.sizes, job.mesh.device.type)
        memory = plan_memory(config, model, plan, world=job.world)  # warns of what cannot fit
        job.open_run_dir(dtypes=plan.ledger)
        say(*plan.describe(), *memory.describe())

        # Text → tokens → packs → global batches → this rank's share.
        data = build_data(config, tokenizer=tokenizer, model=model, mesh=job.mesh)
        say(*data.describe())
        # The sharded model, with weights from a checkpoint, from its source, or random ones.
        parallelize_model(model, plan, mesh=job.mesh)
        optimizer = build_optimizer(config.optimizer, model, state_on_host=config.fsdp.offload == "optimizer")
        checkpoints = build_checkpoints(config, model, optimizer, job=job, data=data, tokenizer=tokenizer)
        progress = checkpoints.start()
        say(*checkpoints.describe())
        schedule = build_lr_schedule(config.lr_schedule, optimizer, total_steps=data.total_steps, step=progress.step)
        evaluate = build_evaluation(config.eval, model, data.held_out, plan=plan, mesh=job.mesh, tokenizer=tokenizer)
        metrics = build_metrics(config, job=job, plan=plan, progress=progress, total_steps=data.total_steps)
        run = Run(config, job.mesh, plan, metrics, progress, checkpoints, total_steps=data.total_steps, memory=memory)
        train(run, model, optimizer, schedule, data.batches(progress), objective=cross_entropy, evaluate=evaluate)
