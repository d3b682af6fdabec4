"""The plain loop, with which everything is compared, is what transformers and torch do with one document at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

from fsdp2kit.parity.reference import Curves, Rows, document_lengths, errors, plain_loop
from tests.support.models import full, make_batches, tiny_model_dir


def document_by_document(path: Path, batches: list[Rows]) -> Curves:
    """Transformers' own loss on every document alone; nothing is packed, and nothing is ours."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0}
    groups = [{"params": decayed, "weight_decay": 0.1}, others]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=1, num_training_steps=len(batches))
    curves = Curves({}, [], [], [])
    for batch in batches:
        items, loss = (batch.labels != -100).sum(), 0.0
        for ids, labels, positions in zip(batch.input_ids, batch.labels, batch.position_ids, strict=True):
            lengths = document_lengths(positions)
            for document, targets in zip(ids.split(lengths), labels.split(lengths), strict=True):
                part = model(
                    input_ids=document[None],
                    labels=document[None],
                    shift_labels=targets[None],
                    num_items_in_batch=items,
                ).loss
                part.backward()
                loss += part.item()
        if not curves.loss:
            curves.gradients.update({name: p.grad.numpy().copy() for name, p in model.named_parameters()})
        curves.loss.append(loss)
        curves.grad_norm.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        curves.lr.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return curves


@pytest.mark.parametrize("kind", ["gemma3", *map(full, ("smollm2", "qwen3_moe", "cohere"))])
def test_the_plain_loop_is_transformers_own_training(kind: str, tmp_path: Path) -> None:
    path, batches = tiny_model_dir(kind, tmp_path), make_batches()
    found = plain_loop(path, batches, micro_batch_size=2, lr=1e-3)
    expected = document_by_document(path, batches)
    assert found.lr == expected.lr
    assert max(errors(found, expected).values()) < 1e-5
