"""transformers' Trainer on one device and on given batches: what `bench.py gpu` measures fsdp2kit beside."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PrinterCallback,
    TrainingArguments,
    default_data_collator,
)

from fsdp2kit.bench.hf_sides import Pause, recording_trainer
from fsdp2kit.bench.synthetic import SyntheticBatches
from fsdp2kit.bench.turns import Turns
from fsdp2kit.config import TrainingConfig
from fsdp2kit.data.batch import Batch
from fsdp2kit.data.formats import IGNORED


class TrainerLoop:
    """Its own loop with float32 parameters, bfloat16 autocast and fused AdamW, a step at a time.

    Args:
        model_config: of a causal language model, whose weights are random.
        config: fsdp2kit's settings of the same run: compilation, learning rate, clipping.
        batches: what it reads, from the first on; rows of packed documents, which it tells apart by their positions.
    """

    def __init__(
        self,
        model_config: PretrainedConfig,
        config: TrainingConfig,
        batches: SyntheticBatches,
        *,
        device: torch.device,
    ) -> None:
        self._model_config, self._config, self._batches, self._device = model_config, config, batches, device
        self._trainer: Any = None
        self._turns: Turns | None = None

    def build(self) -> None:
        """Build the model on the device, and the Trainer, which makes its optimizer in the first step."""
        with self._device:
            model = AutoModelForCausalLM.from_config(
                self._model_config, dtype=torch.float32, attn_implementation="sdpa"
            )
        workload = self._batches.workload
        arguments = TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            max_steps=workload.steps + 1,  # it is stopped before the last
            per_device_train_batch_size=workload.rows,
            gradient_accumulation_steps=workload.micro_batches,
            learning_rate=self._config.optimizer.lr,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            max_grad_norm=self._config.train.max_grad_norm,
            bf16=self._config.fsdp.param_dtype == "bfloat16",
            torch_compile=self._config.compile.enabled,
            use_cpu=self._device.type == "cpu",
            dataloader_pin_memory=self._device.type == "cuda",
            train_sampling_strategy="sequential",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
        )
        given = {"model": model, "train_dataset": self._dataset(), "data_collator": default_data_collator}
        self._trainer = recording_trainer(arguments, given)
        self._turns = Turns(self._trainer.train)
        self._trainer.add_callback(Pause(self._turns))
        self._trainer.remove_callback(PrinterCallback)

    def step(self, batch: Sequence[Batch], /) -> float:
        """Its next optimizer step, on the batch that it has read itself; returns the loss."""
        assert self._turns is not None, "build it first"
        self._trainer.seen.clear()
        self._turns.advance()
        losses: list[Tensor] = [loss for loss, _, _ in self._trainer.seen]
        return float(torch.stack(losses).sum())

    def stop(self) -> None:
        """Let its loop come to its end."""
        if self._turns is not None:
            self._turns.stop()

    def _dataset(self) -> Dataset:
        """All rows, in order, with labels as transformers wants them: not shifted."""
        columns: dict[str, list[Any]] = {"input_ids": [], "labels": [], "position_ids": []}
        for index in range(self._batches.workload.steps + 1):
            for micro in self._batches.batch(index):
                columns["input_ids"] += micro.input_ids.tolist()
                columns["labels"] += torch.nn.functional.pad(micro.labels[:, :-1], (1, 0), value=IGNORED).tolist()
                columns["position_ids"] += micro.position_ids.tolist()
        return Dataset.from_dict(columns)
