"""transformers' Trainer and TRL's SFTTrainer as sides of a comparison: their own loops, run a step at a time.

They are configured for FSDP2 as their documentation says. What they really run is read from the objects when training
has begun: on a CPU, for example, accelerate wraps in DistributedDataParallel instead.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from fsdp2kit.bench.harness import Side
from fsdp2kit.bench.sides import Work, read_data
from fsdp2kit.config import TrainingConfig
from fsdp2kit.job.distributed import World, gather_objects, work_on_this_device
from fsdp2kit.model.adapters import adapter_of
from fsdp2kit.model.build import build_model
from fsdp2kit.model.hf_config import load_hf_config
from fsdp2kit.model.loss_head import IGNORE


class HFSide(Side):
    """One of their trainers, whose loop runs in a thread and stands still after every optimizer step.

    ``hf_trainer`` gets fsdp2kit's packs, whose positions tell the documents; ``hf_trainer_padded`` documents, each
    padded to ``seq_len``; ``hf_trainer_longest`` documents padded to the longest. ``trl`` packs and checkpoints
    activations, its defaults; ``trl_without_ac`` does not checkpoint, ``trl_padded`` does not pack. With ``lora.rank``
    all train peft's adapters of the same layers, in float32, over a model in the dtype of compute.

    Args:
        config: fsdp2kit's of the same run. Except for ``hf_trainer`` it has one document a row; they take its order.
        conversations: documents that a rank takes at once where they are padded to the longest.
    """

    def __init__(self, name: str, config: TrainingConfig, *, conversations: int = 1, world: World) -> None:
        logging.getLogger("accelerate").setLevel(logging.ERROR)
        loader, tokenizer = read_data(config, dp_rank=world.rank, dp_size=world.size)
        self._config, self._device = config, world.device
        self._turns = Turns(lambda: self._trainer.train())
        self._seen: list[tuple[Tensor, Tensor, Tensor | None]] = []
        train, seq_len, steps = config.train, config.data.seq_len, (config.train.steps or 0) + 1
        accumulation = train.global_batch_size // (world.size * train.micro_batch_size)
        rows, self._batches = train.micro_batch_size, f"{train.micro_batch_size} a rank, in rows of {seq_len}"
        if name in ("hf_trainer_longest", "trl_padded"):
            rows, self._batches = conversations, f"{conversations} conversations a rank, padded to the longest"
        self._classes, self._given = (Trainer, TrainingArguments), {"processing_class": tokenizer}
        self._folder = tempfile.TemporaryDirectory()
        self._arguments = _arguments(config, steps=steps, rows=rows, accumulation=accumulation, world=world)
        self._arguments["output_dir"] = self._folder.name
        if name.startswith("trl"):
            from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports]

            packs, recomputes = name != "trl_padded", name != "trl_without_ac"
            self._classes, dataset = (SFTTrainer, SFTConfig), _documents(loader, loader.packs_per_epoch)
            self._arguments |= {"packing": packs, "packing_strategy": "bfd", "max_length": seq_len}
            # In random order: packing puts the longest documents first.
            self._arguments |= {"train_sampling_strategy": "random", "gradient_checkpointing": recomputes}
            if packs:
                self._batches = f"rows of {seq_len} packed by TRL, no attention_mask but position_ids"
            self._batches += f", activation checkpointing {'on' if recomputes else 'off'}"
        elif name == "hf_trainer":
            dataset, self._given["data_collator"] = _rows(loader, steps), default_data_collator
        else:
            dataset = _documents(loader, steps * world.size * rows * accumulation)
            padding = {"padding": "max_length", "max_length": seq_len} if name == "hf_trainer_padded" else {}
            self._given["data_collator"] = DataCollatorForSeq2Seq(tokenizer, **padding)
        self._given["train_dataset"] = dataset

    def build(self) -> None:
        """Build the model and the trainer, which makes its optimizer in the first step."""
        section, lora = self._config.model, self._config.lora
        # A frozen model needs no float32 values; our side stores it in the dtype of compute, too.
        dtype = getattr(torch, self._config.fsdp.param_dtype) if self._config.trains_adapter else torch.float32
        how: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa"}
        if section.weights == "random":
            with self._device:
                model = AutoModelForCausalLM.from_config(load_hf_config(section), **how)
        else:
            model = AutoModelForCausalLM.from_pretrained(str(section.path), **how)
        if adapter := adapter_of(build_model(section, lora=lora)):
            from peft import get_peft_model

            model = get_peft_model(model, adapter.config)
        trainer, arguments = self._classes
        self._trainer: Any = trainer(model=model, args=arguments(**self._arguments), **self._given)
        training_step = self._trainer.training_step

        def recorded(model: Any, inputs: dict[str, Any], *rest: Any, **named: Any) -> Tensor:
            given = inputs["labels"], inputs.get("attention_mask")
            loss = training_step(model, inputs, *rest, **named)
            self._seen.append((loss, *given))  # counted later: counting waits for the device
            return loss

        self._trainer.training_step = recorded
        self._trainer.add_callback(self._turns)
        self._trainer.remove_callback(PrinterCallback)

    def step(self) -> None:
        """From the end of one optimizer step to the end of the next."""
        self._seen.clear()
        self._turns.advance()

    def outcome(self) -> Work:
        """Losses and counts of their `training_step`, over all ranks.

        A rank's loss is its sum ÷ the tokens of the global batch × the ranks, since gradients are averaged over ranks.
        """
        mine = [
            # A row's first token is not a target.
            (float(loss), int((labels[:, 1:] != IGNORE).sum()), labels.numel() if mask is None else int(mask.sum()))
            for loss, labels, mask in self._seen
        ]
        ranks = gather_objects(mine)
        losses, supervised, tokens = zip(*(seen for rank in ranks for seen in rank), strict=True)
        return Work(sum(losses) / len(ranks), sum(supervised), sum(tokens))

    def describe(self) -> str:
        wrapped, accelerator = self._trainer.model_wrapped, self._trainer.accelerator
        parameter, trained = next(wrapped.parameters()), next(p for p in wrapped.parameters() if p.requires_grad)
        where = "sharded" if isinstance(parameter, DTensor) else "whole on every rank"
        dtype, attention = str(parameter.dtype).removeprefix("torch."), self._trainer.model.config._attn_implementation
        if self._config.trains_adapter:
            dtype += f" (adapters in {str(trained.dtype).removeprefix('torch.')})"
        return (
            f"{type(wrapped).__name__} ({accelerator.distributed_type.name}), parameters {where} in {dtype}, "
            f"mixed precision {accelerator.mixed_precision}, {self._batches}, attention {attention}"
        )

    def stop(self) -> None:
        self._turns.stop()
        self._folder.cleanup()


class Turns(TrainerCallback):
    """Runs ``work`` in a thread of its own, which stands still wherever it calls `wait`.

    One of the two threads runs at any time: the caller's outside `advance`, the other inside it. A trainer with this
    callback stands still after every optimizer step, and ends when the comparison is over.

    Args:
        work: calls `wait` on this object after each step, and ends soon after `wait` has returned False.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._go, self._done, self._stopping = threading.Semaphore(0), threading.Semaphore(0), False
        self._work, self._thread = work, ThreadPoolExecutor(1, initializer=work_on_this_device())
        self._future: Future[object] | None = None

    def advance(self) -> None:
        """Let ``work`` run to its next `wait`, and raise what it raises; if it ends instead, that is an error."""
        if self._future is None:
            self._future = self._thread.submit(self._work)
            self._future.add_done_callback(lambda _: self._done.release())
        else:
            self._go.release()
        self._done.acquire()
        if self._future.done():
            self._future.result()
            if not self._stopping:
                raise RuntimeError("the loop came to its end")

    def wait(self) -> bool:
        """``work`` calls this between two steps; it returns whether to go on."""
        self._done.release()
        self._go.acquire()
        return not self._stopping

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= not self.wait()

    def stop(self) -> None:
        """Let ``work`` come to its end."""
        self._stopping = True
        if self._future is not None and not self._future.done():
            self.advance()
        self._thread.shutdown()


def _arguments(config: TrainingConfig, *, steps: int, rows: int, accumulation: int, world: World) -> dict[str, Any]:
    """Their arguments that match fsdp2kit's config."""
    optimizer = config.optimizer
    return {
        "max_steps": steps,  # it is stopped before the last
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": accumulation,
        "learning_rate": optimizer.lr,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": config.train.max_grad_norm,
        "bf16": config.fsdp.param_dtype == "bfloat16",
        "torch_compile": config.compile.enabled,
        "gradient_checkpointing": config.activation_checkpointing.mode == "full",
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


def _rows(loader: Any, steps: int) -> Dataset:
    """The rows of the first global batches; labels are not shifted, as transformers wants them."""
    micros = [micro for index in range(steps) for micro in loader.batch(index)]
    return Dataset.from_dict(
        {
            "input_ids": [row for micro in micros for row in micro.input_ids.tolist()],
            "labels": [[IGNORE, *row[:-1]] for micro in micros for row in micro.labels.tolist()],
            "position_ids": [row for micro in micros for row in micro.position_ids.tolist()],
        }
    )


def _documents(loader: Any, count: int) -> Dataset:
    """The first ``count`` documents, in the order of fsdp2kit's padded packs and with the same tokens supervised."""
    rows = (loader.pack(*divmod(number, loader.packs_per_epoch)) for number in range(count))
    documents = [document for row in rows for document in row.documents]
    labels = [np.where(supervised, ids, IGNORE).tolist() for ids, supervised in documents]
    return Dataset.from_dict({"input_ids": [ids.tolist() for ids, _ in documents], "labels": labels})
