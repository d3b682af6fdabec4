"""Losses and gradients of TRL's trainers on given token ids, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer

from fsdp2kit.data.documents import Document
from fsdp2kit.parity.reference import gradient_of, load_plain

ROWS = [{"prompt": "A", "chosen": " b", "rejected": " c"}] * 2  # the trainers want some to begin with


@dataclass(frozen=True)
class Outcome:
    """One batch's results; the loss is the mean over pairs."""

    loss: float
    gradients: dict[str, np.ndarray]
    metrics: dict[str, float]


def trl_outcome(
    policy: Path, reference: Path, documents: Sequence[Document], options: dict[str, Any], scratch: Path
) -> Outcome:
    """TRL's results for pairs of documents, chosen and rejected in turn.

    Args:
        options: ours, of ``[dpo]``, all of them given.
    """
    pytest.importorskip("trl")
    model: Any = load_plain(policy)
    common = {"output_dir": str(scratch), "use_cpu": True, "report_to": "none", "bf16": False, "beta": options["beta"]}
    given = {"model": model, "train_dataset": Dataset.from_list(ROWS)}
    given["processing_class"] = AutoTokenizer.from_pretrained(policy)
    pairs = [documents[at : at + 2] for at in range(0, len(documents), 2)]
    batches, batch_of, call = [pairs], _pairs_of_labels, "get_batch_loss_metrics"
    if options["loss"] == "simpo":
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        gamma = {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": options["gamma"]}
        trainer: Any = CPOTrainer(args=CPOConfig(**common, **gamma), **given)
    elif options["loss"] == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        trainer = ORPOTrainer(args=ORPOConfig(**common), **given)
        batches = [[pair] for pair in pairs]  # its likelihood is a mean over the tokens of all pairs of a batch
    else:
        from trl import DPOConfig, DPOTrainer

        smoothing, kind = options.get("label_smoothing", 0.0), {"dpo": "sigmoid"}.get(options["loss"], options["loss"])
        if smoothing:
            # With one pair there is nothing to sort: this is conservative DPO. TRL's other losses ignore the key.
            kind, batches = "aot", [[pair] for pair in pairs]
        arguments = DPOConfig(**common, loss_type=[kind], label_smoothing=smoothing, gradient_checkpointing=False)
        trainer = DPOTrainer(args=arguments, ref_model=load_plain(reference), **given)
        batch_of, call = _stacked_pairs, "compute_loss"
    loss, metrics = 0.0, {}
    for batch in batches:
        found = getattr(trainer, call)(trainer.model, batch_of(batch))
        part, measured = found if isinstance(found, tuple) else (found, trainer._metrics["train"])
        (part / len(batches)).backward()
        loss += part.item() / len(batches)
        for name, value in measured.items():
            value = value[-1] if isinstance(value, list) else value
            metrics[name] = metrics.get(name, 0.0) + float(value) / len(batches)
    gradients = {name: gradient_of(p).numpy() for name, p in model.named_parameters()}
    return Outcome(loss, gradients, metrics)


def _stacked_pairs(pairs: Sequence[Sequence[Document]]) -> dict[str, Tensor]:
    """As `DPOTrainer` takes them: the better answers, then the worse ones."""
    documents = [pair[side] for side in (0, 1) for pair in pairs]
    ids, present = _padded([torch.from_numpy(ids) for ids, _ in documents])
    mask, _ = _padded([torch.from_numpy(supervised).long() for _, supervised in documents])
    return {"input_ids": ids, "attention_mask": present, "completion_mask": mask}


def _pairs_of_labels(pairs: Sequence[Sequence[Document]]) -> dict[str, Tensor]:
    """As the trainers of CPO and ORPO take them."""
    batch = {}
    for side, name in enumerate(("chosen", "rejected")):
        documents = [pair[side] for pair in pairs]
        ids, present = _padded([torch.from_numpy(ids) for ids, _ in documents])
        labels, _ = _padded([torch.from_numpy(np.where(mask, ids, -100)) for ids, mask in documents], fill=-100)
        batch |= {f"{name}_input_ids": ids, f"{name}_attention_mask": present, f"{name}_labels": labels}
    return batch


def _padded(rows: list[Tensor], *, fill: int = 0) -> tuple[Tensor, Tensor]:
    """The rows in one tensor, and where it is not padding."""
    present = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return pad_sequence(rows, batch_first=True, padding_value=fill), present
