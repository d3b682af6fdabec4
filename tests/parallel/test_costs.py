"""What context parallelism keeps in memory and sends is what its docstrings say."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp2kit.config.schema import FSDPConfig, MeshConfig
from fsdp2kit.job import distributed
from fsdp2kit.job.mesh import build_mesh
from fsdp2kit.model.loss_head import attach_loss
from fsdp2kit.parallel.context_parallel.attention import apply_attention, blockwise_attention
from fsdp2kit.parallel.context_parallel.batch import slice_batch
from fsdp2kit.parallel.context_parallel.exchange import bytes_sent, share_heads
from fsdp2kit.parallel.context_parallel.layout import VARLEN, AttentionPath, Method
from fsdp2kit.parallel.context_parallel.segments import plan_segments
from fsdp2kit.parity.reference import Rows
from tests.support.models import full, slow
from tests.support.traffic import count_traffic
from tests.support.workers import WorkerPool

METHODS: tuple[Method, ...] = ("ulysses", "ring", "allgather")
LAYERS, HEADS, KV_HEADS, WIDTH = 2, 12, 4, 16
LENGTH = 768


def measure_costs(method: Method | None, cp: int) -> tuple[int, int, int]:
    """What a small decoder keeps and sends for one plain causal sequence of `LENGTH` float32 tokens. Collective.

    Returns:
        Distinct memory that autograd keeps for backward, parameters and masks aside, and the bytes that this rank
        sends per layer in forward and in backward.
    """
    world = distributed.start()
    mesh = build_mesh(MeshConfig(cp=cp), FSDPConfig(), world=world)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=HEADS * WIDTH,
        intermediate_size=2 * HEADS * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
    )
    model: Any = LlamaForCausalLM(config)
    attach_loss(model, own_head=False)
    path = AttentionPath(method, VARLEN if method in ("ring", "allgather") else "sdpa")
    apply_attention(model, path, group=mesh.cp_group)
    positions = torch.arange(LENGTH)[None]
    ids = positions % 128
    inputs = slice_batch(
        Rows(ids, ids, positions).as_batch(),
        config=config,
        path=path,
        cp_rank=mesh.cp_rank,
        cp=cp,
        device=torch.device("cpu"),
    )
    kept: dict[int, int] = {}
    masks = [inputs[name] for name in ("attention_mask",) if isinstance(inputs.get(name), Tensor)]
    aside = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers(), *masks)}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in aside:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), count_traffic() as forward:
        loss = model.loss_sum(**inputs)
    with count_traffic() as backward:
        loss.backward()
    dist.all_reduce(torch.ones(1))  # groups work as before
    return sum(kept.values()), forward.total // LAYERS, backward.total // LAYERS


def expected_bytes(method: Method, *, cp: int, rank: int, tokens: int) -> tuple[int, int]:
    """Bytes that a rank with ``tokens`` float32 tokens of one sequence sends per layer: forward, backward.

    As the docstring of `exchange` has it, for `measure_costs`' decoder.
    """
    size = 4
    if method == "ulysses":
        shares = share_heads(HEADS, KV_HEADS, cp)
        others = [share for number, share in enumerate(shares) if number != rank]
        there = sum(len(share.query) + 2 * len(share.key) for share in others)
        back = (cp - 1) * len(shares[rank].query)
        received = (cp - 1) * (len(shares[rank].query) + 2 * len(shares[rank].key))
        returned = sum(len(share.query) for share in others)
        return tokens * WIDTH * size * (there + back), tokens * WIDTH * size * (received + returned)
    numbers = tokens * KV_HEADS * 2 * WIDTH
    gradients = cp * numbers * 4 if method == "ring" else (cp - 1) * numbers * 4
    return (cp - 1) * numbers * size, (cp - 1) * numbers * size + gradients


@pytest.mark.parametrize("cp", [2, full(3), slow(4)])
@pytest.mark.parametrize("method", METHODS)
def test_memory_is_shared_out_and_traffic_is_as_planned(method: Method, cp: int, pool: WorkerPool) -> None:
    ((whole, *_),) = pool.run(1, measure_costs, None, 1)
    for rank, (activations, *sent) in enumerate(pool.run(cp, measure_costs, method, cp)):
        formula = expected_bytes(method, cp=cp, rank=rank, tokens=LENGTH // cp)
        assert tuple(sent) == formula
        shape = {"heads": HEADS, "key_heads": KV_HEADS, "width": WIDTH, "tokens": LENGTH // cp}
        assert bytes_sent(method, cp=cp, item=4, rank=rank, **shape) == formula
        assert activations * cp == pytest.approx(whole, rel=0.15)


def most_blocks_alive(cp: int) -> int:
    """The most received tensors that a ring's forward pass holds at once, two to a block of keys and values."""
    alive: set[int] = set()
    most = 0
    original = torch.empty_like

    def counting(tensor: Tensor, **options: Any) -> Tensor:
        nonlocal most
        made = original(tensor, **options)
        alive.add(id(made))
        weakref.finalize(made, alive.discard, id(made))
        most = max(most, len(alive))
        return made

    group: Any = dist.group.WORLD
    query, key = torch.randn(1, 4, 8, 16), torch.randn(1, 2, 8, 16)
    table = plan_segments([[0, 8 * cp]], method="ring", rank=dist.get_rank(), cp=cp, window=None)
    torch.empty_like = counting
    try:
        blockwise_attention(query, key, key.clone(), table, 1.0, "ring", group.group_name)
    finally:
        torch.empty_like = original
    return most


def test_a_ring_holds_two_blocks_beside_its_own(pool: WorkerPool) -> None:
    assert pool.run(4, most_blocks_alive, 4) == [4] * 4
