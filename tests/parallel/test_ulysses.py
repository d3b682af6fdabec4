"""The exchange between sequence shards and heads: who gets which heads, what is sent, and that attention comes out."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fsdp2kit.parallel.context_parallel.attention import ulysses_attention
from fsdp2kit.parallel.context_parallel.exchange import heads_to_sequence, sequence_to_heads, share_heads
from tests.support.traffic import count_traffic
from tests.support.workers import WorkerPool

BATCH, LOCAL, WIDTH, VALUE_WIDTH = 2, 5, 8, 6
# (query heads, key/value heads): even, uneven, one group for all, groups cut by a rank's border
HEADS = ((4, 4), (9, 3), (5, 5), (7, 1), (6, 3), (8, 2), (10, 2), (3, 1))


@settings(deadline=None)
@given(kv_heads=st.integers(1, 8), group=st.integers(1, 8), cp=st.integers(1, 16))
def test_heads_are_divided(kv_heads: int, group: int, cp: int) -> None:
    heads = kv_heads * group
    if heads < cp:
        with pytest.raises(ValueError, match=f"cp = {cp}"):
            share_heads(heads, kv_heads, cp)
        return
    shares = share_heads(heads, kv_heads, cp)
    assert len(shares) == cp
    assert [head for share in shares for head in share.query] == list(range(heads)), "every query head once, in order"
    sizes = [len(share.query) for share in shares]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    for share in shares:
        needed = [head // group for head in share.query]
        assert sorted(set(needed)) == list(share.key), "the needed key/value heads and no others"
        assert [share.key[local] for local in share.key_of_query] == needed
        if share.groups is not None:  # what a grouped attention kernel will assume
            assert [local // share.groups for local in range(len(share.query))] == list(share.key_of_query)


def test_query_heads_that_are_no_multiple_of_key_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="5 query and 2 key/value heads"):
        share_heads(5, 2, 2)


@pytest.mark.parametrize("cp", [2, 3])
def test_attention_equals_one_rank_with_the_whole_sequence(cp: int, pool: WorkerPool) -> None:
    for worst in pool.run(cp, _compare_attention):
        assert worst.keys() == {(*heads, masked) for heads in HEADS if heads[0] >= cp for masked in (False, True)}
        assert max(worst.values()) < 1e-6, worst


@pytest.mark.parametrize("cp", [2, 3])
def test_bytes_sent_are_those_of_the_formula(cp: int, pool: WorkerPool) -> None:
    for rank, counts in enumerate(pool.run(cp, _count_bytes)):
        for (heads, kv_heads), (forward, backward) in counts.items():
            queries = [heads // cp + (r < heads % cp) for r in range(cp)]
            first = [sum(queries[:r]) for r in range(cp)]
            group = heads // kv_heads
            keys = [len({(first[r] + i) // group for i in range(queries[r])}) for r in range(cp)]
            others = [r for r in range(cp) if r != rank]
            tokens = BATCH * LOCAL * 4  # bytes of a float32 for each token of this rank
            qkv = sum(queries[r] * WIDTH + keys[r] * (WIDTH + VALUE_WIDTH) for r in others)
            output = (cp - 1) * queries[rank] * VALUE_WIDTH
            assert forward == tokens * (qkv + output)
            # Backward returns what came: gradients of the own heads for others' tokens, and of the output's heads.
            received = (cp - 1) * (queries[rank] * WIDTH + keys[rank] * (WIDTH + VALUE_WIDTH))
            assert backward == tokens * (received + sum(queries[r] for r in others) * VALUE_WIDTH)


def test_gradients_are_right_to_the_second_digit_of_a_double(pool: WorkerPool) -> None:
    assert all(pool.run(2, _gradcheck_exchange))


def _compare_attention() -> dict[tuple[int, int, bool], float]:
    """Worst absolute difference of output and gradients from SDPA on the whole sequence, by heads and mask."""
    cp, rank = dist.get_world_size(), dist.get_rank()
    attention = partial(ulysses_attention, kernel="sdpa", group=dist.group.WORLD)
    part = slice(rank * LOCAL, (rank + 1) * LOCAL)
    worst = {}
    for heads, kv_heads in HEADS:
        if heads < cp:
            continue
        for masked in (False, True):
            q, k, v, upstream = _whole(heads, kv_heads, cp)
            mask = _block_mask(cp * LOCAL) if masked else None
            leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
            group = heads // kv_heads
            expected = F.scaled_dot_product_attention(
                leaves[0],
                *(tensor.repeat_interleave(group, dim=1) for tensor in leaves[1:]),
                attn_mask=mask,
                is_causal=not masked,
            ).transpose(1, 2)
            expected.backward(upstream)

            local = [tensor[:, :, part].clone().requires_grad_() for tensor in (q, k, v)]
            module = _Layer(group)
            output, weights = attention(module, *local, mask, scaling=WIDTH**-0.5, dropout=0.0)
            assert weights is None
            output.backward(upstream[:, part])
            differences = [(output - expected[:, part]).abs().max().item()]
            differences += [
                (mine.grad - whole.grad[:, :, part]).abs().max().item()
                for mine, whole in zip(local, leaves, strict=True)
            ]
            worst[heads, kv_heads, masked] = max(differences)
    return worst


def _count_bytes() -> dict[tuple[int, int], tuple[int, int]]:
    cp = dist.get_world_size()
    counts = {}
    for heads, kv_heads in HEADS:
        if heads < cp:
            continue
        shares = share_heads(heads, kv_heads, cp)
        q, k, v, _ = (tensor[:, :, :LOCAL].clone().requires_grad_() for tensor in _whole(heads, kv_heads, cp))
        with count_traffic() as forward:
            local = sequence_to_heads(q, k, v, shares=shares, group=dist.group.WORLD)
            groups = torch.tensor(shares[dist.get_rank()].key_of_query)
            output = heads_to_sequence(
                local[2][:, groups].transpose(1, 2), shares=shares, group=dist.group.WORLD
            ).sum() + sum(tensor.sum() for tensor in local)
        with count_traffic() as backward:
            output.backward()
        counts[heads, kv_heads] = (forward.total, backward.total)
    return counts


def _gradcheck_exchange() -> bool:
    """Autograd's numerical check of the way there and back, in float64; every rank moves the same element at once."""
    shares = share_heads(5, 5, dist.get_world_size())
    torch.manual_seed(0)
    inputs = [torch.randn(1, 5, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    weight = torch.randn(5, dtype=torch.float64)

    def there_and_back(*tensors: Tensor) -> Tensor:
        q, k, v = sequence_to_heads(*tensors, shares=shares, group=dist.group.WORLD)
        back = heads_to_sequence((q * k * v).transpose(1, 2), shares=shares, group=dist.group.WORLD)
        return (back * weight[None, None, :, None]).sum()

    return torch.autograd.gradcheck(there_and_back, inputs)


class _Layer(nn.Module):
    """As much of an attention layer as an attention function reads."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups
        self.is_causal = True


def _whole(heads: int, kv_heads: int, cp: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v ``[B, heads, cp · s, D]`` and a gradient for the output, the same on every rank."""
    generator = torch.Generator().manual_seed(heads * 100 + kv_heads)
    length = cp * LOCAL
    shapes = [
        (BATCH, heads, length, WIDTH),
        (BATCH, kv_heads, length, WIDTH),
        (BATCH, kv_heads, length, VALUE_WIDTH),
        (BATCH, length, heads, VALUE_WIDTH),
    ]
    q, k, v, upstream = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v, upstream


def _block_mask(length: int) -> Tensor:
    """Causal within documents of four tokens, ``[B, 1, S, S]``; the first row of the batch is one document."""
    indices = torch.arange(length)
    causal = indices[:, None] >= indices[None]
    documents = (indices[:, None] // 4) == (indices[None] // 4)
    return torch.stack([causal, causal & documents])[:, None]
