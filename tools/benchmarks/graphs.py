"""What torch.compile makes of a decoder layer: graphs, kernels and the memory that these move. Nothing is timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch._inductor.virtualized import V

from fsdp2kit.config import TrainingConfig
from fsdp2kit.job.distributed import World
from fsdp2kit.model.build import build_model
from fsdp2kit.parity.engine import Sharded
from fsdp2kit.torch_compat import TorchDispatchMode
from tools.benchmarks.sides import bench_config, read_data

_HIDDEN = 256
_ROWS = 2
_SEQ_LEN = 512
_COMMON = {"vocab_size": 512, "hidden_size": _HIDDEN, "num_hidden_layers": 4, "max_position_embeddings": 8192}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    },
    "qwen3": {
        "model_type": "qwen3",
        "intermediate_size": 768,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "intermediate_size": 1536,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "moe_intermediate_size": 96,
        "num_experts": 16,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
}
"""Values of a model's config: the proportions of Llama-3.2-1B, Qwen3-0.6B, Gemma-3-1B and Qwen3-30B-A3B."""


def bench_graphs(
    world: World,
    *,
    models: tuple[Literal["llama", "qwen3", "gemma3", "qwen3_moe"], ...] = ("llama", "qwen3", "gemma3", "qwen3_moe"),
    steps: int = 5,
) -> Iterator[dict[str, Any]]:
    """What torch.compile makes of a layer of small models: graphs, kernels, and what these read and write.

    Args:
        models: of which small copies are compiled.
        steps: on packed documents of other lengths each.
    """
    rows: list[dict[str, Any]] = []
    notes = [
        "moved: what Inductor's own kernels read and write a token and layer, in hidden states of 2 bytes a number",
        "final norm: the same of the norm after the last layer, both ways, eager as it runs, and if compiled",
    ]
    checks = {"no_graph_break": True, "no_graph_after_the_first_step": True}
    for name in models:
        config = graph_config(name, steps=steps)
        with compiled_graphs(device=world.device) as graphs:
            after = _graphs_after_steps(config, world=world, steps=steps)
        checks["no_graph_break"] &= not counters["graph_break"]
        checks["no_graph_after_the_first_step"] &= after[0] == after[-1]
        for way in ("forward", "backward"):
            found = next(graph for graph in graphs if graph["graph"] == way)
            rows.append({"model": name, "graphs_of_layers": after[-1], **found})
        rows[-1]["final norm, eager"] = eager_norm(config)
        rows[-1]["final norm, compiled"] = compiled_norm(config, device=world.device)
        yield {"rows": rows, "notes": notes, "checks": checks}


def graph_config(name: str, *, steps: int) -> TrainingConfig:
    """The config of a small copy, compiled, in bfloat16 and packed rows."""
    values = {
        "model": {"config": {**_COMMON, **SHAPES[name]}, "weights": "random"},
        "data": {"format": "synthetic", "seq_len": _SEQ_LEN},
        "train": {"steps": steps, "global_batch_size": _ROWS, "micro_batch_size": _ROWS},
        "checkpoint": {"export_hf": "never"},
        "compile": {"enabled": True},
    }
    return bench_config(values)


def hidden_state_bytes() -> int:
    """The size of all hidden states between two layers, in bfloat16."""
    return _ROWS * _SEQ_LEN * _HIDDEN * 2


def _graphs_after_steps(config: TrainingConfig, *, world: World, steps: int) -> list[int]:
    """How many graphs Dynamo had made after each step."""
    torch.compiler.reset()
    counters.clear()
    batches, _ = read_data(config, dp_rank=0, dp_size=1)
    run = Sharded(config, world=world)
    run.start(steps)
    after = []
    for _ in range(steps):
        run.train(batches, steps=1)
        after.append(counters["stats"]["unique_graphs"])
    return after


@contextmanager
def compiled_graphs(*, device: torch.device) -> Iterator[list[dict[str, Any]]]:
    """A list that gets the figures of each graph that Inductor lowers; torch's caches are not used.

    On a CPU, Inductor by default copies the parts of a `torch.cat` before it reads them. Here it computes them where
    they are read, as on CUDA.
    """
    graphs: list[dict[str, Any]] = []

    def count(nodes: list[Any]) -> list[Any]:
        graphs.append(_figures(nodes, is_backward=V.graph.is_backward))
        return nodes

    options: dict[str, Any] = {"force_disable_caches": True, "_post_fusion_custom_pass": count}
    if device.type == "cpu":
        options["force_pointwise_cat"] = True
    with inductor.patch(options):
        yield graphs


def _figures(nodes: list[Any], *, is_backward: bool) -> dict[str, Any]:
    """Kernels of a lowered graph and what they move, and the calls of other libraries by their kind.

    Args:
        nodes: of Inductor's scheduler, after it has fused them.
        is_backward: whether the graph is a backward.
    """
    kernels = 0
    moved = 0
    calls: Counter[str] = Counter()
    for node in nodes:
        size = node.get_read_write_buffers_sizes()
        if size == 0:  # a view of what another node has made, or a buffer without values
            continue
        if node.is_extern():
            calls[_called(node.node)] += 1
        else:
            kernels += 1
            moved += size
    matmuls = calls.pop("matmul", 0)
    attention = calls.pop("attention", 0)
    return {
        "graph": "backward" if is_backward else "forward",
        "kernels": kernels,
        "moved": round(moved / hidden_state_bytes(), 1),
        "matmuls": matmuls,
        "attention": attention,
        "others": ", ".join(f"{count} {name}" for name, count in sorted(calls.items())) or "—",
    }


def _called(node: Any) -> str:
    """What a call to a library is: "matmul", "attention", or the operator's name."""
    operator = getattr(node, "op_overload", None)
    name = str(operator) if operator is not None else str(getattr(node, "python_kernel_name", None))
    if "attention" in name:
        return "attention"
    return "matmul" if "mm" in name else name


class _Traffic(TorchDispatchMode):
    """Adds up what eager operators read and write; views are free."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, (tuple, list)) else [result]
        if not func.is_view:
            self.bytes += sum(_bytes(value) for value in chain(args, results))
        return result


def _bytes(value: Any) -> int:
    if not isinstance(value, Tensor):
        return 0
    return min(value.nbytes, value.untyped_storage().nbytes())


def eager_norm(config: TrainingConfig) -> float:
    """What the eager final norm reads and writes, forward and backward, in hidden states of bfloat16."""
    norm = _final_norm(config)
    with _Traffic() as traffic:
        _run_norm(norm, torch.device("meta"))
    return round(traffic.bytes / hidden_state_bytes(), 1)


def compiled_norm(config: TrainingConfig, *, device: torch.device) -> float:
    """The same of the final norm if it is compiled."""
    norm = _final_norm(config).to_empty(device=device)
    norm.compile()
    with compiled_graphs(device=device) as graphs:
        _run_norm(norm, device)
    return round(sum(graph["moved"] for graph in graphs), 1)


def _final_norm(config: TrainingConfig) -> nn.Module:
    model: Any = build_model(config.model)
    norm: nn.Module = model.model.norm
    return norm.to(torch.bfloat16)


def _run_norm(norm: nn.Module, device: torch.device) -> None:
    hidden = torch.zeros(_ROWS, _SEQ_LEN, _HIDDEN, dtype=torch.bfloat16, device=device, requires_grad=True)
    out = norm(hidden)
    out.backward(torch.zeros_like(out))
