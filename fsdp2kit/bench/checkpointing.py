"""What activation checkpointing saves and costs: bytes kept for backward, operations done twice, and time.

Counted on a small decoder of Llama 3's proportions without FSDP, so that there is nothing but activations to count.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp2kit import distributed
from fsdp2kit.bench.figures import compare, positive, provenance, provenance_lines
from fsdp2kit.config.schema import ActivationCheckpointingConfig
from fsdp2kit.model.build import decoder_layers
from fsdp2kit.model.loss_head import attach_loss
from fsdp2kit.parallel.activation_checkpointing import apply_activation_checkpointing
from fsdp2kit.torch_compat import TorchDispatchMode, tree_leaves

# hidden, intermediate = 3.5 × hidden, and a quarter as many keys as queries, as in Llama 3 8B.
SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1792,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
VARIANTS = {
    "none": ActivationCheckpointingConfig(),
    "selective": ActivationCheckpointingConfig(mode="selective"),
    "full, every 2": ActivationCheckpointingConfig(mode="full", every=2),
    "full": ActivationCheckpointingConfig(mode="full"),
}


@dataclass(frozen=True)
class Options:
    """What is measured; `tools/bench.py checkpointing --help` explains each."""

    seq_len: int = 2048
    layers: int = 4
    pairs: int = 10


def bench_checkpointing(options: Options) -> dict[str, Any]:
    """Each variant's figures, relative to no checkpointing."""
    world = distributed.start()
    models = {name: _model(section, options, world.device) for name, section in VARIANTS.items()}
    tokens = (torch.arange(options.seq_len, device=world.device) % 97)[None]
    counted = {name: count(model, tokens) for name, model in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(options.pairs + 1):
        for name, model in models.items():
            seconds[name].append(_timed(model, tokens))
    rows = {
        name: {
            "kept_bytes_per_token_and_layer": kept / options.seq_len / options.layers,
            "operations": operations / counted["none"][1],
            "seconds": compare(seconds[name][1:], seconds["none"][1:]),
        }
        for name, (kept, operations) in counted.items()
    }
    return {
        "benchmark": "checkpointing",
        "options": asdict(options),
        "shape": SHAPE,
        "variants": rows,
        "provenance": provenance(world),
    }


def checkpointing_lines(result: dict[str, Any]) -> list[str]:
    """The result as a Markdown table."""
    hidden = result["shape"]["hidden_size"]
    lines = [
        "| mode | kept for backward, in hidden states a layer | operations of products | time of a step |",
        "| --- | --- | --- | --- |",
    ]
    for name, row in result["variants"].items():
        kept = row["kept_bytes_per_token_and_layer"] / hidden / 4
        time_ = row["seconds"]
        lines.append(
            f"| {name} | {kept:.1f} | {row['operations']:.2f} × | "
            f"{time_['ratio']:.2f} × ({time_['ratio_low']:.2f}–{time_['ratio_high']:.2f}) |"
        )
    return [*lines, *provenance_lines(result["provenance"])]


def count(model: Any, tokens: Tensor) -> tuple[int, int]:
    """Bytes alive between forward and backward that were not before, and operations of both passes.

    Attention's operations are among them on CUDA only: torch does not count those of its CPU kernel.
    """
    with FlopCounterMode(display=False) as operations:
        with _Alive() as alive:
            loss = model.loss_sum(tokens, tokens)
        kept = alive.bytes
        loss.backward()
    model.zero_grad()
    return kept, operations.get_total_flops()


class _Alive(TorchDispatchMode):
    """Follows the memory that operators allocate while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {_storage_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _storage_of(leaf) not in inputs:
                storage = leaf.untyped_storage()
                self._storages[_storage_of(leaf)] = (StorageWeakRef(storage), storage.nbytes())
        return result

    @property
    def bytes(self) -> int:
        """Of what is still alive."""
        return sum(size for reference, size in self._storages.values() if not reference.expired())


def _storage_of(tensor: Tensor) -> int:
    """The same for all views of one piece of memory."""
    return tensor.untyped_storage()._cdata


def _model(section: ActivationCheckpointingConfig, options: Options, device: torch.device) -> Any:
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_hidden_layers=options.layers, **SHAPE))
    model.to(device)
    attach_loss(model, kernel="chunked")
    apply_activation_checkpointing(section, decoder_layers(model), device_type=device.type)
    return model


def _timed(model: Any, tokens: Tensor) -> float:
    # Nothing waits for anything here, so that on a CPU the process's own time is the step's, whatever else runs.
    clock = time.perf_counter if tokens.is_cuda else time.process_time
    if tokens.is_cuda:
        torch.cuda.synchronize()
    start = clock()
    model.loss_sum(tokens, tokens).backward()
    model.zero_grad()
    if tokens.is_cuda:
        torch.cuda.synchronize()
    return clock() - start


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench.py checkpointing``."""
    parser.add_argument("--seq-len", type=positive, default=2048, help="tokens of the one sequence (2048)")
    parser.add_argument("--layers", type=positive, default=4, help="decoder layers (4)")
    parser.add_argument("--pairs", type=positive, default=10, help="steps that count, of each mode (10)")


def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Measure; returns the result and the lines of the console."""
    result = bench_checkpointing(Options(seq_len=options.seq_len, layers=options.layers, pairs=options.pairs))
    return result, checkpointing_lines(result)
