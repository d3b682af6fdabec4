"""The classic baseline: any Hugging Face causal language model on synthetic tokens, alone or beside FSDP1.

``--compare fsdp1`` trains the same with `FullyShardedDataParallel` in turns, on the same batches, and prints step
time, peak memory and loss side by side. Otherwise this is the pretraining recipe on synthetic tokens; the export keeps
the model's tokenizer all the same.

Copy this file, change the line that builds what you want different, and name the copy in your TOML's ``recipe``.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from fsdp2kit import distributed
from fsdp2kit.bench.compare_fsdp1 import check_comparison, compare_fsdp1
from fsdp2kit.checkpoint.manager import build_checkpoint_manager
from fsdp2kit.checkpoint.saver import build_saver
from fsdp2kit.checkpoint.start import describe_resume, fill_weights, run_identity
from fsdp2kit.config import TrainingConfig, dump_toml
from fsdp2kit.config.checks import check_config
from fsdp2kit.config.schema import PositiveInt, Section, TextDataConfig
from fsdp2kit.data.build import build_data
from fsdp2kit.data.check import check_first_rows
from fsdp2kit.environment import world_size_from_environment
from fsdp2kit.model.assets import save_assets, source_dtype
from fsdp2kit.model.build import build_model, load_hf_config
from fsdp2kit.model.choose_loss import choose_loss
from fsdp2kit.model.tokenizer import build_tokenizer
from fsdp2kit.model.weights import find_model_dir
from fsdp2kit.parallel.context_parallel.batch import build_shard_batch
from fsdp2kit.parallel.context_parallel.choose import choose_path
from fsdp2kit.parallel.float8 import describe_float8
from fsdp2kit.parallel.fsdp import describe_fsdp
from fsdp2kit.parallel.ledger import checked, dtype_ledger
from fsdp2kit.parallel.mesh import build_mesh
from fsdp2kit.parallel.parallelize import parallelize_model
from fsdp2kit.parallel.preflight import check_model, check_offline
from fsdp2kit.progress import Progress
from fsdp2kit.train.claim import claim_run_dir
from fsdp2kit.train.evaluation import evaluate
from fsdp2kit.train.flops import count_model_flops
from fsdp2kit.train.loop import Hooks, train
from fsdp2kit.train.metrics import build_metrics
from fsdp2kit.train.optim import build_lr_schedule, build_optimizer
from fsdp2kit.train.out_of_memory import explained
from fsdp2kit.train.plan import build_plan
from fsdp2kit.train.profiling import build_profiler
from fsdp2kit.train.rundir import describe_environment, prepare_run_dir
from fsdp2kit.train.samples import build_sampler
from fsdp2kit.train.saving import Saving
from fsdp2kit.train.throughput import Throughput
from fsdp2kit.train.wandb_run import check_wandb


class BaselineConfig(Section):
    """What the baseline is compared with."""

    compare: Literal["none", "fsdp1"] = "none"
    """"fsdp1": train with FSDP1 in turns and print both; nothing is evaluated, saved or exported. On the command line
    `--compare fsdp1`."""
    warmup: PositiveInt = 3
    """compare only: steps at the start that are not timed. Peak memory is taken in them, of each side alone."""


class BaselineDataConfig(TextDataConfig):
    """What the model is trained on: synthetic tokens, or plain text."""

    format: Literal["text", "tokens", "synthetic"] = "synthetic"
    """"synthetic": random tokens, no `path` needed; "text": rows with `text`; "tokens": rows with `input_ids`."""


class Config(TrainingConfig):
    """The baseline."""

    data: BaselineDataConfig = BaselineDataConfig()
    baseline: BaselineConfig = BaselineConfig()


def check(config: Config) -> list[str]:
    """What can be said of a config without weights, network or process group; returns what could not be checked."""
    check_wandb(config.wandb)
    if config.baseline.compare == "fsdp1":
        world_size, local_world_size = world_size_from_environment()
        warmup = config.baseline.warmup
        check_comparison(config, world_size=world_size, local_world_size=local_world_size, warmup=warmup)
    return [*check_offline(config), *check_first_rows(config)]


def tokenizer_of(config: Config) -> Any:
    """The model's tokenizer. Synthetic tokens need none; then it is read only where the export keeps one."""
    exports = config.baseline.compare == "none" and config.checkpoint.export_hf != "never"
    is_kept = exports and (config.model.tokenizer or config.model.path) is not None
    return build_tokenizer(config.model) if is_kept or config.data.format != "synthetic" else None


def main(config: Config) -> None:
    """Train, or compare, as ``config`` says; every rank calls this."""
    if config.baseline.compare == "fsdp1":
        compare_fsdp1(config, build_tokenizer=partial(tokenizer_of, config), warmup=config.baseline.warmup)
        return
    world = distributed.start(timeout_minutes=config.run.timeout_minutes, deterministic=config.run.deterministic)
    sizes = check_config(config, world_size=world.size, local_world_size=world.local_size)
    mesh = build_mesh(config.mesh, config.fsdp, world=world)
    run_dir = Path(config.run.dir)

    # The model, still without memory. What it would silently do wrong is refused here.
    source = distributed.one_per_machine_first(partial(find_model_dir, config.model))
    with distributed.agreement():
        check_wandb(config.wandb)
        tokenizer = tokenizer_of(config)
        hf_config = load_hf_config(config.model)
        model = build_model(config.model, hf_config=hf_config)
        path = choose_path(config, model, cp=sizes.cp, device_type=world.device.type)
        loss = choose_loss(config, model, device=world.device)
        check_model(model, config, path=path, device=world.device)
        sharding = describe_fsdp(config, model, sizes=sizes, device_type=world.device.type)
        sharding += describe_float8(config, model, device=world.device)
        export_dtype = config.checkpoint.export_dtype or source_dtype(hf_config, source)
        ledger = dtype_ledger(config.fsdp, export=export_dtype, optimizer=config.optimizer.name, float8=config.float8)
        environment = describe_environment(world_size=world.size, mesh=asdict(sizes), dtype_ledger=asdict(ledger))
        claim = claim_run_dir(run_dir, is_main=world.is_main)
        prepare_run_dir(run_dir, config_text=dump_toml(config), environment=environment, is_main=world.is_main)
    write_assets = partial(
        save_assets, config=hf_config, architecture=type(model).__name__, tokenizer=tokenizer, source=source
    )
    throughput = Throughput(count_model_flops(model), device=world.device, world_size=world.size, memory_by_phase=True)

    # Text → tokens → packs → global batches → this rank's share → its part of each sequence, on the device.
    vocab_size = hf_config.get_text_config().vocab_size
    data = build_data(config, tokenizer=tokenizer, vocab_size=vocab_size, dp_rank=mesh.dp_rank, dp_size=sizes.dp)
    to_device = build_shard_batch(model.config, path=path, mesh=mesh, device=world.device)

    # The model over the mesh, with the values of a checkpoint, of its source, or random ones.
    parallelize_model(model, config, path=path, loss=loss, mesh=mesh, device=world.device)
    optimizer = build_optimizer(config.optimizer, model, state_on_host=config.fsdp.offload == "optimizer")
    identity = run_identity(config, hf_config, source=source, data=data.fingerprint)
    checkpoints = build_checkpoint_manager(
        config.checkpoint,
        run_dir=run_dir,
        identity=identity,
        write_assets=write_assets,
        export_dtype=export_dtype,
        environment=environment,
    )
    progress, resumed = Progress(), []
    if resume := checkpoints.resolve(config.run.resume):
        progress = checkpoints.restore(resume, model, optimizer)
        resumed = [describe_resume(resume, config, environment=environment)]
    else:
        fill_weights(config.model, model, source=source, seed=config.run.seed)
    loader = data.loader
    plan = build_plan(config, steps_per_epoch=loader.steps_per_epoch, mesh=mesh, source_names=loader.source_names)
    with distributed.agreement():
        batches = data.batches(first=progress.step, stop=plan.total_steps, state=progress.data)
    schedule = build_lr_schedule(config.lr_schedule, optimizer, total_steps=plan.total_steps, step=progress.step)

    saver = build_saver(
        checkpoints,
        model,
        optimizer,
        is_over=plan.is_over,
        complete=lambda now: replace(now, wandb_id=metrics.wandb_id, data=batches.state(now.step)),
    )
    profiler = build_profiler(
        config.profile,
        trace_dir=run_dir / "trace",
        rank=world.rank,
        device_type=world.device.type,
        steps=plan.total_steps - progress.step,
        first_step=progress.step + 1,
    )
    with distributed.agreement():
        metrics = build_metrics(
            config.wandb,
            run_dir=run_dir,
            is_main=world.is_main,
            config=config.model_dump(mode="json"),
            total_steps=plan.total_steps,
            resume_step=progress.step,
            wandb_id=progress.wandb_id,
        )
    diagnosed = explained(config, model, optimizer, trace_dir=run_dir / "trace", rank=world.rank)
    with claim, metrics, profiler, checkpoints, diagnosed:
        for line in (str(sizes), str(path), str(loss), *sharding, str(ledger), *data.describe(), *resumed):
            metrics.message(line)
        sampler = build_sampler(
            config.eval,
            model,
            tokenizer=tokenizer,
            to_device=to_device,
            mesh=mesh,
            method=path.method,
            log=metrics.log_samples,
        )
        hooks = Hooks(
            log=metrics.log,
            message=metrics.message,
            save=saver.save,
            saving=Saving(checkpoints.wait_until_staged, checkpoints.has_failed, checkpoints.finish_save),
            evaluate=partial(evaluate, model, data.held_out, to_device, plan=plan) if data.held_out else None,
            sample=sampler,
            profile=profiler.step,
            first_step=partial(checked, ledger, model, optimizer),
        )
        if resume:
            saver.export_resumed(resume, progress)
        train(
            model,
            optimizer,
            schedule,
            batches,
            to_device,
            plan=plan,
            progress=progress,
            throughput=throughput,
            hooks=hooks,
        )
