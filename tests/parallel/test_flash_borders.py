"""Flash attention gets the documents' borders: in transformers it finds them only in a batch of one row."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.job import distributed
from fsdp2kit.job.mesh import build_mesh
from fsdp2kit.model.build import build_model
from fsdp2kit.parallel.context_parallel.batch import document_borders, slice_batch
from fsdp2kit.parallel.context_parallel.layout import AttentionPath
from fsdp2kit.parallel.parallelize import parallelize_model
from fsdp2kit.parallel.plan import plan_parallel
from fsdp2kit.parity.reference import Rows
from fsdp2kit.weights.load import load_pretrained
from tests.support.workers import WorkerPool

POSITIONS = torch.stack(
    [torch.cat([torch.arange(n) for n in lengths]) for lengths in ([13, 20, 15], [48], [1, 46, 1], [24, 24])]
)


def varlen_reference(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    cu_seq_lens_q: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """What a flash kernel computes from the borders alone: each document by itself, causally."""
    assert attention_mask is None
    batch, heads, length, _width = query.shape
    groups = heads // key.shape[1]
    rows = [t.repeat_interleave(heads // t.shape[1], 1) if groups > 1 else t for t in (query, key, value)]
    flat = [t.transpose(1, 2).reshape(batch * length, heads, -1) for t in rows]
    borders = cu_seq_lens_q.tolist()
    outputs = []
    for start, stop in itertools.pairwise(borders):
        q, k, v = (t[start:stop].transpose(0, 1) for t in flat)
        outputs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1))
    return torch.cat(outputs).view(batch, length, heads, -1), None


def loss_and_reference(path: str, cp: int) -> tuple[float, float]:
    AttentionInterface.register("varlen_reference", varlen_reference)
    world = distributed.start()
    values = {"model": {"path": path, "attention": "varlen_reference"}, "mesh": {"cp": cp}}
    config = TrainingConfig(recipe="x", fsdp={"param_dtype": "float32"}, **values)  # pyright: ignore
    mesh = build_mesh(config.mesh, config.fsdp, world=world)
    model: Any = build_model(config.model)
    way = AttentionPath("ulysses" if cp > 1 else None, "varlen_reference")
    plan = replace(plan_parallel(model, config, mesh.sizes, "cpu"), attention=way)
    parallelize_model(model, plan, mesh=mesh)
    load_pretrained(model, Path(path))
    generator = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(100, POSITIONS.shape, generator=generator) for _ in range(2))
    inputs = slice_batch(
        Rows(ids, labels, POSITIONS).as_batch(),
        config=model.config,
        path=replace(way, kernel="flash_attention_2"),
        cp_rank=mesh.cp_rank,
        cp=cp,
        device=world.device,
    )
    with torch.no_grad():
        loss = model.loss_sum(**inputs)
        dist.all_reduce(loss)
        plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        logits = plain(input_ids=ids, position_ids=POSITIONS, use_cache=False).logits
        return loss.item(), F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()


@pytest.mark.parametrize("cp", [1, 2])
def test_documents_of_a_batch_of_rows_do_not_see_each_other(cp: int, pool: WorkerPool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=36,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    for loss, expected in pool.run(cp, loss_and_reference, str(tmp_path), cp):
        assert loss == pytest.approx(expected, rel=1e-6)


def test_borders_are_those_of_the_rows() -> None:
    borders = document_borders(POSITIONS, device=torch.device("cpu"))
    assert borders["cu_seq_lens_q"].tolist() == [0, 13, 33, 48, 96, 97, 143, 144, 168, 192]
    assert borders["cu_seq_lens_q"].dtype == torch.int32
    assert borders["max_length_k"] == 48
