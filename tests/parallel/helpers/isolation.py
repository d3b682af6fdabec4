"""How much one document of a pack changes another."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fsdp2kit.job import distributed
from fsdp2kit.parity.engine import Sharded
from fsdp2kit.parity.reference import Rows
from tests.parallel.helpers.segments import positions_of
from tests.support.cases import Case
from tests.support.models import LENGTH, VOCABULARY


def _packing(seed: int) -> tuple[Tensor, int]:
    """Positions ``[1, S]`` of a random packing of at least two documents, and one of their numbers."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 9))
    cuts = sorted(rng.choice(np.arange(1, LENGTH), size=count, replace=False).tolist())
    borders = [0, *cuts, LENGTH]
    positions = positions_of([stop - start for start, stop in itertools.pairwise(borders)])[None]
    return positions, int(rng.integers(0, count + 1))


def leaks(folder: Path, case: Case, seeds: list[int]) -> list[int]:
    """Seeds of packings in which changing one document changed another's logits, or not its own."""
    sharded = Sharded(case.config(folder, steps=1, rows=1), world=distributed.start())
    found = []
    for seed in seeds:
        positions, changed = _packing(seed)
        ids = torch.randint(VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(seed))
        document = (positions == 0).cumsum(1) - 1 == changed
        other_ids = torch.where(document, (ids + 1) % VOCABULARY, ids)
        before, after = (
            sharded.forward(Rows(each, each, positions), document=range(LENGTH))[0] for each in (ids, other_ids)
        )
        same = (before == after).all(axis=1)
        if not same[~document[0].numpy()].all() or same[document[0].numpy()].any():
            found.append(seed)
    return found
