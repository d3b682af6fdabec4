"""Reinforcement learning of a Hugging Face causal language model from rewards: GRPO, Dr. GRPO, DAPO.

Copy this file, change the line that builds what you want different, and name the copy in your TOML's ``recipe``.
"""

from __future__ import annotations

from typing import Any

from fsdp2kit.checkpoint.run import build_checkpoints
from fsdp2kit.config.rl_schema import RLConfig
from fsdp2kit.console import say
from fsdp2kit.job.start import start_job
from fsdp2kit.model.build import build_model
from fsdp2kit.model.tokenizer import build_tokenizer
from fsdp2kit.objectives.policy import build_policy_loss
from fsdp2kit.optim.build import build_lr_schedule, build_optimizer
from fsdp2kit.parallel.parallelize import parallelize_model
from fsdp2kit.parallel.plan import plan_parallel
from fsdp2kit.planner.estimate import plan_memory
from fsdp2kit.rl.conversations import Conversations, check_environment
from fsdp2kit.rl.generation import build_engine, rest_until_asked
from fsdp2kit.rl.prompts import build_prompts, check_rewards
from fsdp2kit.rl.rewards import Rewards
from fsdp2kit.rl.rollouts import Rollouts
from fsdp2kit.train.loop import Run, train
from fsdp2kit.train.metrics import build_metrics


class Config(RLConfig):
    """Reinforcement learning from rewards."""

    def offline(self, config: Any, *, model: Any, plan: Any, missing: Any) -> dict[str, str | None]:
        """What ``--check`` says of the reward functions and the environment."""
        found = super().offline(config, model=model, plan=plan, missing=missing)
        found |= check_environment(self, missing=missing)
        return {**found, **check_rewards(self, missing=missing)}


def main(config: Config) -> None:
    """Train as ``config`` says; every rank calls this."""
    with start_job(config) as job:
        # A config that would silently train something else is refused here, as is a reward or a server that is absent.
        tokenizer = build_tokenizer(config.model)
        model = build_model(config.model, lora=config.lora)
        plan = plan_parallel(model, config, job.mesh.sizes, job.mesh.device.type)
        memory = plan_memory(config, model, plan, world=job.world)  # warns of what cannot fit
        prompts = build_prompts(config, tokenizer=tokenizer)
        rewards = job.closing.enter_context(Rewards(config.reward, columns=prompts.columns))
        conversations = job.closing.enter_context(Conversations(config, tokenizer))
        engine = build_engine(config, model, tokenizer=tokenizer, device=job.mesh.device)
        job.open_run_dir(dtypes=plan.ledger)
        rest_until_asked(engine, config)
        say(*plan.describe(), *memory.describe(), *prompts.describe())

        # The sharded model with its weights, and where the loss compares with it, the model as the run began.
        parallelize_model(model, plan, mesh=job.mesh)
        optimizer = build_optimizer(config.optimizer, model, state_on_host=config.fsdp.offload == "optimizer")
        read = {"data": prompts, "contents": {**rewards.contents, **conversations.contents}, "tokenizer": tokenizer}
        checkpoints = build_checkpoints(config, model, optimizer, job=job, **read)
        progress = checkpoints.start()
        objective = build_policy_loss(config, model, plan=plan, mesh=job.mesh)
        metrics = build_metrics(config, job=job, plan=plan, progress=progress, total_steps=prompts.total_steps)
        # Prompts → responses of the engine → rewards → advantages → packs → this rank's share.
        made = {"engine": engine, "conversations": conversations, "rewards": rewards, "tokenizer": tokenizer}
        built = {"objective": objective, "mesh": job.mesh, "metrics": metrics, "progress": progress}
        rollouts = Rollouts(config, model, optimizer, prompts, **made, **built)
        say(*checkpoints.describe(), *objective.describe(), *rollouts.describe())
        steps = prompts.total_steps
        schedule = build_lr_schedule(config.lr_schedule, optimizer, total_steps=steps, step=progress.step)
        run = Run(config, job.mesh, plan, metrics, progress, checkpoints, total_steps=steps, memory=memory)
        evaluate = rollouts if prompts.held_out else None
        train(run, model, optimizer, schedule, rollouts, objective=objective, evaluate=evaluate)
