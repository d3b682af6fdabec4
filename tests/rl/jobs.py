"""What the workers run: a sharded model, and engines that keep what they are sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fsdp2kit.distributed import local_part
from fsdp2kit.parity.engine import Sharded
from fsdp2kit.rl.bucket import Bucket, VersionedWeights
from fsdp2kit.rl.weight_sync import sync_weights
from tests.parallel.jobs import Case, build


class Engine(VersionedWeights):
    """Keeps copies of the tensors, and the sizes of the buckets they came in.

    Args:
        on_bucket: called with the number of each bucket, before it is kept.
    """

    def __init__(self, on_bucket: Callable[[int], object] = lambda number: None) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.buckets: list[int] = []
        self.on_bucket = on_bucket

    def begin_update(self, version: int) -> None:
        super().begin_update(version)
        self.tensors, self.buckets = {}, []

    def load_weights(self, bucket: Bucket) -> None:
        self.on_bucket(len(self.buckets))
        self.buckets.append(bucket.data.numel())
        for name, tensor in bucket.tensors():
            assert name not in self.tensors, f"{name} was sent twice"
            self.tensors[name] = tensor.clone()
        bucket.data.fill_(255)  # as when its memory is used again

    def arrays(self) -> dict[str, np.ndarray]:
        """Their bits, which every rank must have alike."""
        return {name: bits(tensor) for name, tensor in self.tensors.items()}


def bits(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()


def sharded_model(folder: Path, case: Case) -> Sharded:
    return build(case.config(folder, steps=1, rows=case.dp))


def change(model: nn.Module) -> None:
    """As a step of training does, to what is trained, in a way that any rank and any process can do to its part."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                local_part(parameter).mul_(1.5)


def synced(folder: Path, case: Case, dtype: torch.dtype, buckets: Sequence[float]) -> list[Any]:
    """What an engine has after a sync with each size of buckets, and after one more, when the trained part changed."""
    model = sharded_model(folder, case).model
    found = []
    for mib in buckets:
        engine = Engine()
        sent = sync_weights(model, engine, version=7, dtype=dtype, bucket_mib=mib)
        assert sent == sum(tensor.nbytes for tensor in engine.tensors.values())
        assert engine.version == 7
        found.append((engine.arrays(), engine.buckets))
    change(model)
    sync_weights(model, engine, version=8, dtype=dtype, bucket_mib=buckets[0])
    assert engine.version == 8
    return [*found, (engine.arrays(), engine.buckets)]
