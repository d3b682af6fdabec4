"""The time of a step: which link a group of ranks uses, and what a rank computes, against sums by hand."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp2kit.config.checks import check_config
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import build_model
from fsdp2kit.parallel.plan import plan_parallel
from fsdp2kit.planner.devices import find_device
from fsdp2kit.planner.estimate import Estimate, estimate
from fsdp2kit.planner.memory import ELEMENTS_AT_ONCE
from fsdp2kit.planner.speed import LINK_EFFICIENCY, PUBLISHED, PeakShare
from tests.planner.helpers.models import LLAMA_8B, MIXTRAL, config_of, planned, small

H100 = find_device("h100")
GB = 1e9
PARAMETERS = 8_030_261_248
EMBEDDING = 128256 * 4096
LAYERS = PARAMETERS - 2 * EMBEDDING  # and the final norm's 4,096
ATTENTION = 32 * 3 * 2 * 2 * 4096 / 2  # 2 (keys and values) × 2 FLOPs × width, forward and backward, causal; a pair
HALF = PeakShare(0.5, 0.5, "as tried")
RATE = 989.4e12 * HALF.low


def speed_of(ranks: int = 8, *, local: int = 8, **sections: Any) -> Any:
    """The planned speed with half of the peak reached."""
    config = config_of(LLAMA_8B, ranks=ranks, **sections)
    found: Estimate = planned(config, ranks=ranks, local=local, device=H100, share=HALF)
    assert found.speed is not None
    assert found.speed.low == found.speed.high
    return found.speed


@pytest.mark.parametrize(
    ("ranks", "local", "mesh", "strategy", "places"),
    [
        (16, 8, {"cp": 2}, "full_shard", {"cp": ("node", 2), "shard": ("network", 8)}),
        (12, 6, {"cp": 4}, "full_shard", {"cp": ("network", 2), "shard": ("network", 6)}),
        (32, 8, {}, "hybrid_shard", {"shard": ("node", 8), "replicate": ("network", 1)}),
        (16, 8, {"dp_replicate": 8}, "hybrid_shard", {"shard": ("node", 2), "replicate": ("network", 4)}),
    ],
)
def test_which_link_a_group_uses(
    ranks: int, local: int, mesh: dict[str, int], strategy: str, places: dict[str, tuple[str, int]]
) -> None:
    config = config_of(small(LLAMA_8B), ranks=ranks, mesh=mesh, fsdp={"strategy": strategy}, data={"seq_len": 1024})
    found = planned(config, ranks=ranks, local=local).collectives
    assert {one.dim: (one.link, one.on_node) for one in found if one.dim != "world"} == places


@pytest.mark.full
def test_what_it_costs_that_shards_cross_nodes() -> None:
    """Gathers, and a reduction in float32; hybrid sharding sends each shard's gradients to one other rank instead.

    It has twice the parameters and moments, and the gradients where they are kept, on each rank.
    """
    config = config_of(LLAMA_8B, ranks=16)
    found = planned(config, ranks=16, device=H100, prices_crossings=True)
    sent = 15 / 16 * (2 * PARAMETERS + 2 * LAYERS + 4 * PARAMETERS)
    more = sent / LINK_EFFICIENCY * (1 / (8 * 50 * GB) - 1 / (450 * GB))
    reduced = 4 * PARAMETERS / 8
    (line,) = found.crossings
    assert line.startswith(
        f"shards cross nodes: {sent / GB:.1f} GB a step and rank over the network, about {more:.2g} s more than "
        "within a node, in part beside compute; fsdp.strategy = 'hybrid_shard' with mesh.dp_replicate = 2 and "
        "mesh.dp_shard = 8 keeps them within a node: "
        f"{reduced / GB:.1f} GB, about {reduced / (50 * GB * LINK_EFFICIENCY):.2g} s, with "
    )
    hybrid = config_of(LLAMA_8B, ranks=16, fsdp={"strategy": "hybrid_shard"})
    taken = planned(hybrid, ranks=16).peak.total - found.peak.total
    assert line.endswith(f"with {taken / 2**30:.1f} GiB more")
    small_device = find_device("l4")
    (line,) = planned(config, ranks=16, device=small_device, prices_crossings=True).crossings
    assert "which does not fit (" in line
    (line,) = planned(config, ranks=16, prices_crossings=True).crossings
    assert "about" not in line


@pytest.mark.parametrize(
    ("model", "device", "sections", "low", "high"),
    [
        # Published MFU; where all layers were recomputed, four passes for the three that MFU counts.
        (LLAMA_8B, "h100", {}, 0.237 * 4 / 3, 0.39),
        (LLAMA_8B, "a100", {}, 0.508, 0.517 * 4 / 3),
        (LLAMA_8B, "h200", {"data": {"seq_len": 32768}}, 0.268 * 4 / 3, 0.354 * 4 / 3),
        (small(MIXTRAL), "h100", {}, 0.154 * 4 / 3, 0.28),
        (small(MIXTRAL), "h100", {"data": {"seq_len": 32768}}, 0.154 * 4 / 3, 0.28),
    ],
)
def test_time_lies_between_published_runs(
    model: dict[str, Any], device: str, sections: dict[str, Any], low: float, high: float
) -> None:
    config = config_of({**model, "num_hidden_layers": 2}, **{"data": {"seq_len": 8192}, **sections})
    speed = planned(config, device=find_device(device)).speed
    assert speed is not None
    assert (speed.low.share, speed.high.share) == pytest.approx((low, high))
    assert speed.low.tokens_per_second <= speed.high.tokens_per_second
    runs = [run for runs in PUBLISHED.values() for run in runs]
    assert all(any(f"{run.run} on {run.device}" in text for run in runs) for text in speed.assumptions[:1])
    assert ("on A100" in speed.assumptions[0]) == (device == "a100")


@pytest.mark.full
@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("adapters", [{}, {"lora": {"rank": 8}, "checkpoint": {"export_hf": "never"}}])
def test_ones_own_figure_is_the_mfu_of_that_toml(mode: str, adapters: dict[str, Any]) -> None:
    """With recomputation and over a network, whose communication is in a measured MFU already."""
    sections = {"data": {"seq_len": 8192}, "activation_checkpointing": {"mode": mode}, **adapters}
    config = config_of(LLAMA_8B, rows=64, **sections)
    model = build_model(config.model, lora=config.lora)
    for ranks in (8, 64):
        plan = plan_parallel(model, config, check_config(config, world_size=ranks, local_world_size=8), "cuda")
        found = estimate(config, model, plan, device=H100, mfu=0.4).speed
        assert found is not None
        assert found.low == found.high
        assert found.low.mfu == pytest.approx(0.4, rel=1e-6)
        assert 0.4 < found.share.low < 1


def test_an_mfu_above_what_the_whole_peak_gives_is_refused() -> None:
    """With all layers run again a step's arithmetic is four thirds of what MFU counts, but for the head."""
    config = config_of(LLAMA_8B, rows=64, data={"seq_len": 8192}, activation_checkpointing={"mode": "full"})
    with pytest.raises(UserError, match=r"--mfu: 80% cannot be: at the device's whole peak .* an MFU of 7\d%"):
        planned(config, device=H100, mfu=0.8)
    plain = config_of(LLAMA_8B, rows=64, data={"seq_len": 8192}, activation_checkpointing={"mode": "none"})
    assert planned(plain, device=H100, mfu=0.8).speed is not None


@pytest.mark.full
def test_a_group_over_nodes_uses_the_adapters_of_all_its_ranks() -> None:
    """Gathers in forward and in backward and a reduction in float32: 8 bytes a parameter, by 8 adapters of 50 GB/s."""
    sent = 15 / 16 * (2 * PARAMETERS + 2 * LAYERS + 4 * PARAMETERS)
    expected = sent / (8 * 50 * GB * LINK_EFFICIENCY)
    assert speed_of(16).communication == pytest.approx(expected, rel=1e-3)

    # In one node NVLink sends them; with one rank a node, one adapter.
    sent *= 14 / 15
    assert speed_of(8).communication == pytest.approx(sent / (450 * GB * LINK_EFFICIENCY), rel=1e-3)
    assert speed_of(8, local=1).communication == pytest.approx(sent / (50 * GB * LINK_EFFICIENCY), rel=1e-3)


def test_what_is_resharded_to_a_node_is_gathered_there() -> None:
    over_network = 15 / 16 * 6 * PARAMETERS / (8 * 50 * GB)
    within_node = 7 / 8 * 2 * LAYERS / (450 * GB)
    found = speed_of(16, fsdp={"reshard_after_forward": 8})
    assert found.communication == pytest.approx((over_network + within_node) / LINK_EFFICIENCY, rel=1e-3)


def test_what_is_computed() -> None:
    """6 FLOPs a parameter and token; full checkpointing runs the layers' forward once more."""
    data = {"seq_len": 4096}
    update = 7 * 4 * PARAMETERS / 8 / 3.35e12
    plain = speed_of(data=data, activation_checkpointing={"mode": "none"})
    each = (6 * (LAYERS + EMBEDDING) + ATTENTION * 4096) * 4096
    assert plain.low.compute == pytest.approx(each / RATE + update, rel=1e-3)
    full = speed_of(data=data, activation_checkpointing={"mode": "full"})
    again = (2 * LAYERS + ATTENTION / 3 * 4096) * 4096
    assert full.low.compute - plain.low.compute == pytest.approx(again / RATE, rel=1e-3)


@pytest.mark.full
def test_a_frozen_model_computes_no_gradients_of_its_weights() -> None:
    """4 FLOPs a parameter and token instead of 6, of which forward is a half: run again, 6."""
    lora = {"data": {"seq_len": 512}, "lora": {"rank": 1}, "checkpoint": {"export_hf": "never"}}
    plain = speed_of(**lora, activation_checkpointing={"mode": "none"})
    frozen = (4 * (LAYERS + EMBEDDING) + ATTENTION * 512) * 512 / RATE
    assert plain.low.compute == pytest.approx(frozen, rel=5e-3)
    full = speed_of(**lora, activation_checkpointing={"mode": "full"})
    again = (2 * LAYERS + ATTENTION / 3 * 512) * 512 / RATE
    assert full.low.compute - plain.low.compute == pytest.approx(again, rel=5e-3)


@pytest.mark.full
def test_offloads_take_the_time_of_their_copies() -> None:
    to_host = 64 * GB * LINK_EFFICIENCY
    plain = speed_of(activation_checkpointing={"mode": "full"})
    offloaded = speed_of(activation_checkpointing={"mode": "full"}, fsdp={"offload": "optimizer"})
    assert offloaded.low.compute - plain.low.compute == pytest.approx(2 * 8 * PARAMETERS / 8 / to_host, rel=1e-3)
    inputs = speed_of(activation_checkpointing={"mode": "full", "offload": True})
    copies = 2 * 32 * 2 * 4096 * config_of(LLAMA_8B).data.seq_len
    assert inputs.low.compute - plain.low.compute == pytest.approx(copies / to_host, rel=1e-3)


@pytest.mark.full
@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"fsdp": {"offload": "params"}}, "the host's processors update the parameters"),
        ({"fsdp": {"param_dtype": "float32"}}, "the peaks are of bfloat16"),
    ],
)
def test_why_no_time_is_planned(sections: dict[str, Any], words: str) -> None:
    found = planned(config_of(LLAMA_8B, **sections), device=H100)
    assert found.speed is None
    assert words in str(found.untimed)
    assert words not in str(planned(config_of(LLAMA_8B, **sections)).untimed)


def test_moments_come_whole_parameters_at_a_time() -> None:
    """An embedding of 2 × 10⁹ elements over 8 ranks is more than what is brought at once otherwise."""
    found = planned(config_of({**LLAMA_8B, "vocab_size": 512_000}, fsdp={"offload": "optimizer"}))
    assert ELEMENTS_AT_ONCE < 512_000 * 4096 // 8
    assert found.peaks["optimizer"].bytes["optimizer"] == pytest.approx(8 * 512_000 * 4096 / 8, rel=1e-3)


def test_host_memory_that_is_pinned_is_rounded_up() -> None:
    """To powers of two, tensor by tensor: torch's allocator for pinned memory."""
    found = planned(config_of(LLAMA_8B, fsdp={"offload": "optimizer"})).host["offloaded optimizer state"]
    shards = {128256 * 4096: 2, 4096 * 4096: 64, 1024 * 4096: 64, 14336 * 4096: 96, 4096: 65}
    sizes = {4 * elements // 8: count for elements, count in shards.items()}
    assert sum(size * count for size, count in sizes.items()) == 4 * PARAMETERS // 8
    rounded = sum(2 ** (size - 1).bit_length() * count for size, count in sizes.items())
    assert found == 2 * rounded


@pytest.mark.parametrize(
    ("sections", "most"),
    [
        ({}, 3),  # the newest two, and the one being written
        ({"checkpoint": {"keep": 4}}, 5),
        ({"checkpoint": {"keep_every": 100}, "train": {"steps": 1000}}, 13),
        ({"checkpoint": {"every": 400}, "train": {"steps": 500}}, 2),
        ({"eval": {"keep_best": True, "every": 10, "path": "x.jsonl"}, "train": {"steps": 1000}}, 4),
    ],
)
def test_checkpoints_on_disk(sections: dict[str, Any], most: int) -> None:
    disk = planned(config_of({**LLAMA_8B, "num_hidden_layers": 1}, **sections)).disk
    assert disk["checkpoints kept, and one being written"] == most * disk["checkpoint"]


@pytest.mark.parametrize("ranks", [8, 64])
def test_a_checkpoint_is_as_large_from_any_number_of_ranks(ranks: int) -> None:
    """Shards are padded where there are fewer experts than ranks; a file holds none of that."""
    plan = planned(config_of(small(MIXTRAL), ranks=ranks), ranks=ranks)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**small(MIXTRAL)))
    assert plan.disk["checkpoint"] == 3 * 4 * sum(parameter.numel() for parameter in model.parameters())
