"""What a step on one rank copies: bytes that are read and written, with FSDP2's own reductions and with ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fsdp2kit.config import TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.job.distributed import World
from fsdp2kit.parity.engine import Sharded
from fsdp2kit.torch_compat import TorchDispatchMode
from tools.benchmarks.sides import bench_config, read_data

_HIDDEN = 512
_SEQ_LEN = 16
_INTERMEDIATE = 1024
_MODEL = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": _HIDDEN,
    "intermediate_size": _INTERMEDIATE,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
# More elements than any activation of a micro-batch of one row has, and fewer than any matrix.
_LARGE = 2 * _SEQ_LEN * _INTERMEDIATE

# Operators that only copy or cast. `chunk_cat` is FSDP2's, for gradients.
_OPERATORS = ("_to_copy", "copy_", "clone", "chunk_cat", "_chunk_cat")

# The section [fsdp], and micro-batches a step, by name.
_CASES: dict[str, tuple[dict[str, Any], int]] = {
    "full_shard": ({}, 1),
    "full_shard, reshard_after_forward = false": ({"reshard_after_forward": False}, 1),
    "full_shard, 4 micro-batches": ({}, 4),
    "no_shard, 4 micro-batches": ({"strategy": "no_shard"}, 4),
}


def bench_copies(world: World) -> dict[str, Any]:
    """What a step on one rank copies, in bytes read and written a parameter; nothing is timed.

    A small Llama trains in bfloat16 with float32 reductions. Copies and casts of matrices and of their gradients
    count, from the gathering of parameters to the optimizer's step.
    """
    if world.size > 1:
        raise UserError("bench.py copies", f"{world.size} ranks were started", "start it with python, on one rank")
    rows = []
    for name, (fsdp, micro_batches) in _CASES.items():
        config = _config(fsdp, micro_batches)
        ours = _copied(config, world=world)
        with mock.patch.object(FSDPModule, "set_custom_reduce_scatter"):
            its = _copied(config, world=world)
        rows.append({"step": name, "fsdp2kit": ours, "FSDP2's own": its})
    return {"rows": rows, "notes": ["bytes that copies and casts read and write a parameter and step"]}


def _config(fsdp: dict[str, Any], micro_batches: int) -> TrainingConfig:
    values = {
        "model": {"config": _MODEL, "weights": "random"},
        "data": {"format": "synthetic", "seq_len": _SEQ_LEN},
        "fsdp": fsdp,
        "train": {"steps": 2, "global_batch_size": micro_batches, "micro_batch_size": 1},
        "checkpoint": {"export_hf": "never"},
    }
    return bench_config(values)


def _copied(config: TrainingConfig, *, world: World) -> float:
    """Bytes that the second step copies, a parameter."""
    batches, _ = read_data(config, dp_rank=0, dp_size=1)
    run = Sharded(config, world=world)
    run.start(2)
    run.train(batches, steps=1)
    with _Copies() as copies:
        run.train(batches, steps=1)
    elements = sum(parameter.numel() for parameter in run.model.parameters())
    return round(copies.bytes / elements, 2)


class _Copies(TorchDispatchMode):
    """Adds up what copies and casts of large tensors read and write. A copy of a tensor into itself does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name().partition("::")[2].partition(".")[0] in _OPERATORS:
            tensors = {tensor.data_ptr(): tensor for tensor in _tensors([args, kwargs, result])}
            if len(tensors) > 1 and sum(tensor.numel() for tensor in tensors.values()) > 2 * _LARGE:
                self.bytes += sum(tensor.nbytes for tensor in tensors.values())
        return result


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested sequences and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
