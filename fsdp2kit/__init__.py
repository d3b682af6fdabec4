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

import logging
import os

try:
    import lazy_loader
except ModuleNotFoundError:  # in a server's environment, where the package is without its dependencies
    lazy_loader = None

__version__ = "0.1.0"

PARENT = os.getppid()
"""The parent process at start-up. Read here, because it may end during the seconds in which torch is imported."""

# `__init__.pyi` has the names, for this, for type checkers and for tools/api.py.
if lazy_loader is not None:
    __getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

# transformers imports torchao if it is installed, and torchao logs which of its kernels this machine cannot load.
# Nothing here uses those kernels, and a user's mistake must stay one line.
for _logger in map(logging.getLogger, ("torchao", "torch.utils._pytree")):
    if _logger.level == logging.NOTSET:
        _logger.setLevel(logging.ERROR)
