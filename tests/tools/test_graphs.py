"""The bench of compiled layers counts what Inductor makes, and layers of each model keep their graphs and kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.workers import WorkerPool
from tests.tools.helpers import last_result
from tools.benchmarks.graphs import bench_graphs, compiled_graphs, eager_norm, graph_config, hidden_state_bytes


def figures(models: tuple[str, ...]) -> dict[str, Any]:
    return last_result(bench_graphs, models=models, steps=3)


@pytest.mark.slow
def test_one_graph_a_layer_kind_and_no_copy_around_attention(pool: WorkerPool) -> None:
    (result,) = pool.run(1, figures, ("llama",))
    assert result["checks"] == {"no_graph_break": True, "no_graph_after_the_first_step": True}
    forward, backward = result["rows"]
    # Seen: torch 2.11 makes two in the first step, and none later.
    assert forward["graphs_of_layers"] == (2 if torch.__version__.startswith("2.11.") else 1)
    assert (forward["attention"], backward["attention"]) == (1, 1)
    # RMSNorm; RoPE of queries and of keys; residual and RMSNorm; SwiGLU; residual. A copy would be a seventh.
    assert (forward["kernels"], forward["others"]) == (6, "—")
    # Reads and writes of these, in hidden states: 2 + 2 + 0.5 + 3 + 12 + 4, and cosines and sines.
    assert 23.5 <= forward["moved"] <= 24.5
    assert (backward["kernels"], backward["others"]) == (6, "—")


@pytest.mark.slow
def test_mixtures_and_windows_keep_their_graphs(pool: WorkerPool) -> None:
    (result,) = pool.run(1, figures, ("qwen3", "gemma3", "qwen3_moe"))
    assert result["checks"] == {"no_graph_break": True, "no_graph_after_the_first_step": True}
    assert {row["model"]: row["graphs_of_layers"] for row in result["rows"]} == {
        "qwen3": 1,
        "gemma3": 2,
        "qwen3_moe": 1,
    }


def traffic() -> tuple[list[dict[str, Any]], float]:
    """The graphs of a compiled function, and what an eager final norm moves."""
    values = torch.zeros(hidden_state_bytes() // 4)
    with compiled_graphs(device=torch.device("cpu")) as graphs:
        torch.compile(lambda x: (x.exp() + 1).sin())(values)
    return graphs, eager_norm(graph_config("llama", steps=1))


@pytest.mark.full
def test_kernels_and_their_traffic_are_counted(pool: WorkerPool) -> None:
    ((graphs, norm),) = pool.run(1, traffic)
    (graph,) = graphs
    assert (graph["kernels"], graph["matmuls"], graph["moved"]) == (1, 0, 2.0)
    assert 40 < norm < 80  # at least twelve operators forward and backward, most of them in float32
