"""One step of training, with its ledger of dtypes."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fsdp2kit.config.schema import CompileConfig
from fsdp2kit.errors import RunFailure
from fsdp2kit.job import distributed
from fsdp2kit.optim.build import build_optimizer
from fsdp2kit.parallel.ledger import assert_ledger
from fsdp2kit.parity.engine import Sharded
from tests.support.cases import Case, accumulate
from tests.support.models import make_batches


def one_step(folder: Path, case: Case, **claimed: Any) -> str:
    """What the ledger says of a step, with ``claimed`` in place of what is true."""
    config = case.config(folder, steps=1, rows=4)
    sharded = Sharded(config, world=distributed.start())
    optimizer = build_optimizer(config.optimizer, sharded.model)
    ledger = replace(sharded.plan.ledger, **claimed)
    batch = make_batches(1)[0]
    try:
        with assert_ledger(ledger, sharded.model, optimizer):
            accumulate(sharded, batch, [batch, batch])
            optimizer.step()
    except RunFailure as failure:
        return str(failure)
    return "ok"


def compiled_step(folder: Path, case: Case, is_watched: bool) -> dict[str, Any]:
    """What the compiler did in a step, with or without the ledger that watches it."""
    from torch._dynamo.utils import counters

    original = torch.nn.Module.compile
    torch.compiler.reset()
    counters.clear()
    torch.nn.Module.compile = lambda self: original(self, backend="aot_eager")
    try:
        config = case.config(folder, steps=1, rows=4)
        config = config.model_copy(update={"compile": CompileConfig(enabled=True)})
        sharded = Sharded(config, world=distributed.start())
        optimizer = build_optimizer(config.optimizer, sharded.model)
        batch = make_batches(1)[0]
        ledger = assert_ledger(sharded.plan.ledger, sharded.model, optimizer)
        with ledger if is_watched else nullcontext():
            accumulate(sharded, batch)
            optimizer.step()
    finally:
        torch.nn.Module.compile = original
    found = {"graphs": counters["stats"]["unique_graphs"], "breaks": dict(counters["graph_break"])}
    return {**found, "traced": counters["frames"]["total"]}
