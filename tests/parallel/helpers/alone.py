"""The reference of families whose layers let packed documents see each other: each document alone in transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fsdp2kit.parity.reference import Curves, errors, plain_loop
from tests.support.cases import Case
from tests.support.models import make_batches, plain_batches, tiny_model

DELTA_RULE = "torch_chunk_gated_delta_rule"

Reference = Callable[[Case], tuple[Curves, dict[str, float]]]


def documents_alone(folder: Path, *, device: str = "cpu") -> Reference:
    """The plain loop's curves, and their spread over micro-batch sizes and over chunks of the gated delta rule.

    With chunks of 32 tokens instead of 64, transformers' own gradients of its gates are 2e-5 off in float32.

    Args:
        folder: has the tiny models.
        device: where transformers computes.
    """
    known: dict[tuple, tuple[Curves, dict[str, float]]] = {}

    def get(case: Case) -> tuple[Curves, dict[str, float]]:
        key = case.kind, case.pack, case.lr
        if key not in known:
            batches = make_batches() if case.pack else plain_batches()
            loop = partial(plain_loop, folder / case.kind, batches, lr=case.lr, alone=True, device=device)
            plain, others = loop(micro_batch_size=4), [loop(micro_batch_size=1)]
            file: Any = inspect.getmodule(type(tiny_model(case.kind)))
            if rule := getattr(file, DELTA_RULE, None):
                with patch.object(file, DELTA_RULE, partial(rule, chunk_size=32)):
                    others.append(loop(micro_batch_size=4))
            spread = [errors(other, plain) for other in others]
            known[key] = plain, {name: max(each[name] for each in spread) for name in spread[0]}
        return known[key]

    return get
