"""transformers' Trainer and TRL's SFTTrainer as sides of a comparison: their own loops, run a step at a time.

They are configured as their documentation says for FSDP2. What they then really run (accelerate on a CPU wraps in
DistributedDataParallel instead, for example) is asked of the objects themselves when training has begun.
"""

from __future__ import annotations

import logging
import tempfile
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from fsdp2kit.bench.sides import Work, Workload
from fsdp2kit.bench.turns import Turns
from fsdp2kit.config import TrainingConfig
from fsdp2kit.data.formats import IGNORED
from fsdp2kit.data.loader import Loader
from fsdp2kit.distributed import World, gather_objects

Seen = tuple[Tensor, Tensor, Tensor | None]
"""Loss, labels ``[B, S]`` and attention mask ``[B, S]`` of a training step; counted later, for counting waits."""


def build_hf_side(
    name: str,
    config: TrainingConfig,
    loader: Loader,
    *,
    tokenizer: PreTrainedTokenizerBase,
    workload: Workload,
    world: World,
) -> HFSide:
    """``hf_trainer_padded`` (rows padded to ``seq_len``), ``hf_trainer_longest``, or one of TRL's.

    ``trl`` packs, and is otherwise as it comes, with activation checkpointing; ``trl_without_ac`` is without that,
    ``trl_padded`` without packing.

    Args:
        loader: of one conversation a row, whose order they take.
    """
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    arguments = _arguments(config, workload, world=world)
    given: dict[str, Any] = {
        "model": AutoModelForCausalLM.from_pretrained(workload.model, dtype=torch.float32, attn_implementation="sdpa"),
        "processing_class": tokenizer,
    }
    if name.startswith("trl"):
        # Everything, for TRL packs all of it before the first step; in random order, as it packs the longest first.
        given["train_dataset"] = _documents(loader, loader.rows_per_epoch)
        packs, batches = name != "trl_padded", f"rows of {workload.seq_len} packed by TRL"
        arguments |= {"train_sampling_strategy": "random", "gradient_checkpointing": name != "trl_without_ac"}
        if not packs:
            arguments["per_device_train_batch_size"] = workload.conversations
            batches = f"{workload.conversations} conversations a rank, padded to the longest"
        return HFSide(_trl_trainer(arguments, workload, given, packs=packs), batches=batches)
    if name == "hf_trainer_padded":
        rows = workload.micro_batch
        collator = DataCollatorForSeq2Seq(tokenizer, padding="max_length", max_length=workload.seq_len)
        batches = f"{rows} a rank, in rows of {workload.seq_len}"
        arguments["gradient_accumulation_steps"] = workload.global_batch // (world.size * rows)
    else:
        rows, collator = workload.conversations, DataCollatorForSeq2Seq(tokenizer)
        batches = f"{rows} conversations a rank, padded to the longest"
    arguments["per_device_train_batch_size"] = rows
    taken = workload.steps * world.size * rows * arguments["gradient_accumulation_steps"]
    given["train_dataset"] = _documents(loader, taken)
    given["data_collator"] = collator
    return HFSide(recording_trainer(TrainingArguments(**arguments), given), batches=batches)


class HFSide:
    """One of their trainers, whose loop runs in a thread and stands still after every optimizer step."""

    def __init__(self, trainer: Any, *, batches: str) -> None:
        self._trainer, self._batches = trainer, batches
        self._turns = Turns(trainer.train)
        trainer.add_callback(Pause(self._turns))
        trainer.remove_callback(PrinterCallback)

    def prepare(self) -> None:
        """Nothing: their loops read their batches."""

    def step(self) -> None:
        """From the end of one optimizer step to the end of the next."""
        self._trainer.seen.clear()
        self._turns.advance()

    def outcome(self) -> Work:
        """Losses and counts as their `training_step` had them, over all ranks.

        Each rank's loss is its sum over the tokens of the global batch, times the ranks, over which gradients are then
        averaged.
        """
        mine = [(float(loss), *_count(labels, mask)) for loss, labels, mask in self._trainer.seen]
        ranks = gather_objects(mine)
        loss = sum(loss for rank in ranks for loss, _, _ in rank) / len(ranks)
        counts = [seen for rank in ranks for seen in rank]
        return Work(loss, sum(seen[1] for seen in counts), sum(seen[2] for seen in counts))

    def describe(self) -> str:
        """What wraps the model, where its parameters are, in which dtypes."""
        wrapped = self._trainer.model_wrapped
        parameter = next(wrapped.parameters())
        where = "sharded" if isinstance(parameter, DTensor) else "whole on every rank"
        model = self._trainer.model
        autocast = self._trainer.accelerator.mixed_precision
        return (
            f"{type(wrapped).__name__} ({self._trainer.accelerator.distributed_type.name}), parameters {where} in "
            f"{str(parameter.dtype).removeprefix('torch.')}, mixed precision {autocast}, {self._batches}, attention "
            f"{model.config._attn_implementation}{self._trainer.extra}"
        )

    def stop(self) -> None:
        """Let its loop come to its end."""
        self._turns.stop()


class Pause(TrainerCallback):
    """Stands still after every optimizer step, and ends training when the comparison is over."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not self._turns.wait():
            control.should_training_stop = True


def recording_trainer(arguments: TrainingArguments, given: dict[str, Any]) -> Any:
    """A `Trainer` whose list ``seen`` gets the loss, labels and attention mask of each of its training steps."""
    return _recording(Trainer)(args=arguments, **given)


def _trl_trainer(arguments: dict[str, Any], workload: Workload, given: dict[str, Any], *, packs: bool) -> Any:
    from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports]

    config = SFTConfig(**arguments, packing=packs, packing_strategy="bfd", max_length=workload.seq_len)
    trainer = _recording(SFTTrainer)(args=config, **given)
    recomputes = "on" if arguments["gradient_checkpointing"] else "off"
    mask = ", no attention_mask but position_ids" if packs else ""
    trainer.extra = f"{mask}, activation checkpointing {recomputes}"
    return trainer


def _recording(base: Any) -> Any:
    """A class of trainers that note what each of their training steps was given, and its loss."""

    class Recording(base):
        extra = ""

        def __init__(self, **arguments: Any) -> None:
            self.seen: list[Seen] = []
            super().__init__(**arguments)

        def training_step(self, model: Any, inputs: dict[str, Any], *rest: Any, **named: Any) -> Tensor:
            given = inputs["labels"], inputs.get("attention_mask")
            loss = super().training_step(model, inputs, *rest, **named)
            self.seen.append((loss, *given))
            return loss

    return Recording


def _arguments(config: TrainingConfig, workload: Workload, *, world: World) -> dict[str, Any]:
    """Their arguments that say what fsdp2kit's config does."""
    return {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": workload.steps + 1,
        "per_device_train_batch_size": workload.micro_batch,
        "gradient_accumulation_steps": workload.global_batch // (world.size * workload.micro_batch),
        "learning_rate": config.optimizer.lr,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "adam_beta1": config.optimizer.betas[0],
        "adam_beta2": config.optimizer.betas[1],
        "adam_epsilon": config.optimizer.eps,
        "weight_decay": config.optimizer.weight_decay,
        "max_grad_norm": config.train.max_grad_norm,
        "bf16": workload.dtype == "bfloat16",
        "fsdp": world.size > 1 or None,
        "fsdp_config": {"version": 2, "reshard_after_forward": True} if world.size > 1 else None,
        "use_cpu": world.device.type == "cpu",
        "dataloader_pin_memory": world.device.type == "cuda",
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
    }


def _documents(loader: Loader, count: int) -> Dataset:
    """The first ``count`` conversations in the order of fsdp2kit's padded rows, with the same tokens supervised."""
    rows: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    for number in range(count):
        epoch, place = divmod(number, loader.rows_per_epoch)
        for ids, supervised in loader.row(epoch, place).documents:
            rows["input_ids"].append(ids.tolist())
            rows["labels"].append([token if on else IGNORED for token, on in zip(ids, supervised, strict=True)])
    return Dataset.from_dict(rows)


def _count(labels: Tensor, mask: Tensor | None) -> tuple[int, int]:
    """Supervised tokens and tokens without padding; a row's first token is nobody's target."""
    supervised = int((labels[:, 1:] != IGNORED).sum())
    return supervised, int(mask.sum()) if mask is not None else labels.numel()
