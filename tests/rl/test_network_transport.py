"""Weights that travel by network: a real gloo group with a stand-in, each side lost in turn, and what is compared."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from fsdp2kit.config.sections.rollout import RolloutConfig
from fsdp2kit.config.sections.weight_sync import WeightSyncConfig
from fsdp2kit.errors import RunFailure, UserError
from fsdp2kit.rl import network_transport
from fsdp2kit.rl.checksums import checksum, differing, is_chosen
from fsdp2kit.rl.engines.server_engine import ServerEngine
from fsdp2kit.rl.engines.sglang_server import SGLangServer
from fsdp2kit.rl.engines.vllm_server import VLLMServer
from fsdp2kit.rl.network_transport import LinkError, Meeting, NetworkReceiver, in_background, is_here, own_address
from tests.rl.helpers.servers import (
    OPTIONS,
    WEIGHTS,
    SGLangStandIn,
    StandIn,
    VLLMStandIn,
    ask,
    bucket,
    check_weights,
    engine_of,
    hangs,
    server_of,
    serving,
    update,
)

NETWORK = WeightSyncConfig(transport="network")
VLLM_ROUTES = ("init_weight_transfer_engine", "update_weights", "finish_weight_update")
SGLANG_ROUTES = ("init_weights_update_group", "update_weights_from_distributed")


@pytest.fixture
def server() -> Iterator[VLLMStandIn]:
    with serving(VLLMStandIn()) as found:
        yield found


def engine_by_network(server: VLLMStandIn, **options: Any) -> ServerEngine:
    return engine_of(server, weight_sync=NETWORK, **options)


def test_buckets_come_by_broadcast_and_each_update_has_its_own_group(server: VLLMStandIn) -> None:
    engine = engine_by_network(server)
    for version in (1, 2):
        update(engine, version)
        check_weights(server)
        assert (engine.version, server.version, server.paused) == (version, f"a1:{version}", False)
        assert not server.is_linked
        assert server.sums.keys() == WEIGHTS.keys()
        assert ask(engine)
    assert server.received == 2 * [tensor.nbytes for tensor in WEIGHTS.values()]
    assert server.calls.count("init_weight_transfer_engine") == 2


@pytest.mark.parametrize(
    ("kind", "route", "kept"),
    [
        *((VLLMStandIn, route, "a1:1") for route in VLLM_ROUTES),
        *((partial(SGLangStandIn, tp=1), route, "a1:None") for route in SGLANG_ROUTES),
    ],
)
def test_a_server_that_fails_ends_the_update_at_once_and_takes_the_next(
    kind: Callable[[], StandIn], route: str, kept: str
) -> None:
    with serving(kind()) as server:
        engine = engine_of(server, weight_sync=NETWORK)
        update(engine, 1)
        server.faults[route] = lambda: 500
        begun = time.monotonic()
        name = server.client.kind
        with pytest.raises(RunFailure, match=f"{name} server {server.url}: /{route} failed with 500: .*as asked"):
            update(engine, 2)
        assert time.monotonic() - begun < 5
        assert (engine.version, server.version, server.paused) == (None, kept, True)
        server.faults.clear()
        server.weights = {}
        update(engine, 2)
        check_weights(server)
        assert (engine.version, server.version) == (2, "a1:2")
        assert not server.is_linked, "nor by the group of the update that failed"


@pytest.mark.full
def test_a_side_that_is_gone_is_noticed_by_the_other(server: VLLMStandIn) -> None:
    engine = engine_by_network(server)
    data = bucket(a=torch.zeros(2**24))
    engine.begin_update(1)
    engine.load_weights(data)
    server.leave()  # as when its process ends, but for the answers

    server.faults["update_weights"] = lambda: time.sleep(1) or 500
    with pytest.raises(RunFailure, match=r"update_weights failed|the way of the weights to it broke") as raised:
        engine.load_weights(data)
    assert "gloo" not in str(raised.value), "a run would take it for the loss of a rank of its own"
    server.faults.clear()
    engine.begin_update(1)
    engine.load_weights(data)
    [client] = engine._present
    assert isinstance(client, VLLMServer)
    assert client._sender is not None
    client._sender.settle()
    client._leave()  # the trainer's end
    with pytest.raises(LinkError):
        server.receive({"entries": [], "nbytes": 100})
    update(engine, 1)
    assert ask(engine)


@pytest.mark.full
def test_a_server_that_does_not_receive_in_time(server: VLLMStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_transport, "_REASON", 0.2)  # the answer is waited for twice as long as the broadcast
    engine = engine_by_network(server, timeout=10.0)
    engine.begin_update(1)
    engine.load_weights(bucket(**WEIGHTS))
    server.faults["update_weights"] = hangs
    begun = time.monotonic()
    with pytest.raises(RunFailure, match=r"the way of the weights to it broke \(Timed out waiting 3000ms"):
        engine.load_weights(bucket(a=torch.zeros(2**24)))
    assert time.monotonic() - begun < 10
    assert engine.version is None


def test_no_worker_comes() -> None:
    with pytest.raises(LinkError, match=r"worker 0 did not come within 0\.2 seconds"):
        Meeting("127.0.0.1", 0.2).join(torch.device("cpu"), lambda: None)


def test_all_workers_of_a_server_receive() -> None:
    meeting = Meeting("127.0.0.1", 20)
    others = [
        in_background(lambda at=at: NetworkReceiver(meeting.place, number=at, count=3, device=torch.device("cpu")))
        for at in (2, 0, 1)
    ]
    link = meeting.join(torch.device("cpu"), lambda: None)
    sent = torch.arange(12.0).view(3, 4)
    got = [
        in_background(lambda one=one: dict(one.result().receive([["a", [3, 4], "float32", 0]], 48))) for one in others
    ]
    link.broadcast(sent.view(-1).view(torch.uint8))
    assert all(torch.equal(one.result()["a"], sent) for one in got)
    for one in (link, *(one.result() for one in others)):
        one.close()


def test_which_way_is_chosen(server: VLLMStandIn) -> None:
    assert is_here("127.0.0.1")
    assert is_here("localhost")
    assert is_here(socket.gethostname()) or not own_address("192.0.2.1").startswith("192.0.2.")
    assert not is_here("192.0.2.1"), "an address that is nobody's"
    assert not is_here("nowhere.invalid")
    assert not server_of(server)._by_network
    assert not server_of(server, weight_sync=NETWORK, is_main=False)._by_network
    assert OPTIONS["is_main"]


@pytest.mark.parametrize(
    ("engine", "values", "said"),
    [
        (
            "transformers",
            {"transport": "memory"},
            "weight_sync.transport: 'memory' with rollout.engine = 'transformers'",
        ),
        ("transformers", {"transport": "network"}, "weight_sync.transport: 'network' with rollout.engine"),
        ("sglang", {"transport": "network"}, None),
        ("sglang", {"verify": False}, "weight_sync.verify: false with rollout.engine = 'sglang', where nothing"),
        ("vllm", {"verify": False, "transport": "network"}, None),
        ("sglang", {"transport": "memory"}, None),
    ],
)
def test_values_without_an_effect_are_refused(engine: Any, values: dict[str, Any], said: str | None) -> None:
    config: Any = SimpleNamespace(rollout=RolloutConfig(engine=engine))
    with nullcontext() if said is None else pytest.raises(UserError, match=said):
        WeightSyncConfig(**values).check(config, cast(Any, None))


def test_weights_that_the_server_spoils_are_not_served(server: VLLMStandIn) -> None:
    for engine in (engine_by_network(server), engine_of(server)):
        update(engine, 1)

        def swaps() -> None:
            server.weights["a"] = server.weights["a"][[1, 0, 2]]

        server.spoils = swaps
        with pytest.raises(RunFailure, match=f"vLLM server {server.url}: .*fsdp2kit: a does not hold what was sent"):
            update(engine, 2)
        assert (engine.version, server.version, server.paused) == (None, "a1:1", True)
        server.spoils = lambda: None
    engine = engine_of(server, weight_sync=WeightSyncConfig(verify=False))
    server.sums, server.spoils = {}, swaps
    update(engine, 3)
    assert engine.version == 3


@pytest.fixture
def sglang() -> Iterator[SGLangStandIn]:
    with serving(SGLangStandIn(tp=1)) as found:
        yield found


def test_sglangs_workers_receive_by_a_group_that_they_make_themselves(sglang: SGLangStandIn) -> None:
    engine = engine_of(sglang, weight_sync=NETWORK)
    for version in (1, 2):
        sglang.weights = {}
        update(engine, version)
        check_weights(sglang)
        assert (engine.version, sglang.version, sglang.paused) == (version, f"a1:{version}", False)
        assert not sglang.is_linked
        assert ask(engine)
    both = bucket(**WEIGHTS)
    engine.begin_update(3)
    sglang.weights = {}
    engine.load_weights(both)
    engine.finish_update(3)
    check_weights(sglang)
    assert "update_weights_from_tensor" not in sglang.calls


def test_a_trainer_that_is_gone_is_noticed_by_sglangs_workers(sglang: SGLangStandIn) -> None:
    engine = engine_of(sglang, weight_sync=NETWORK)
    engine.begin_update(1)
    engine.load_weights(bucket(**WEIGHTS))
    [client] = engine._present
    assert isinstance(client, SGLangServer)
    assert client._sender is not None
    client._sender.settle()
    client._leave()
    [name] = sglang.groups
    told = {"names": ["a"], "dtypes": ["float32"], "shapes": [[4]], "group_name": name}
    begun = time.monotonic()
    assert sglang.respond("update_weights_from_distributed", told)[0] == 400
    assert time.monotonic() - begun < 10
    update(engine, 1)
    assert ask(engine)


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (7, 129), (64, 1000)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_checksum_depends_on_bits_and_places(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randn(shape).to(dtype)
    sent = checksum(tensor)
    misaligned = torch.cat([torch.zeros(1, dtype=dtype), tensor.flatten()])[1:].view(shape)
    assert checksum(misaligned) == sent
    changed = tensor.clone()
    changed.view(-1)[-1] += 1
    assert checksum(changed) != sent
    if tensor.ndim == 2:
        assert checksum(tensor.t().contiguous().view(shape)) != sent
        assert checksum(tensor.flip(0)) != sent
        assert checksum(tensor.flip(1)) != sent
        rows = torch.arange(len(tensor))
        rows[[0, -1]] = rows[[-1, 0]]
        assert checksum(tensor[rows]) != sent


def test_over_four_updates_all_layers_are_compared() -> None:
    names = [f"model.layers.{number}.norm.weight" for number in range(10)]
    chosen = [{name for name in names if is_chosen(name, version)} for version in range(7, 11)]
    assert set().union(*chosen) == set(names)
    assert all(names[0] in found and len(found) <= 4 for found in chosen)
    assert is_chosen("model.embed_tokens.weight", 3)


class UnquantizedLinearMethod:
    """vLLM's is recognised by its name."""


class PackedMethod:
    """Another one, which keeps weights in its own form."""


def linear(rows: int, method: object) -> nn.Module:
    found = nn.Linear(8, rows, dtype=torch.bfloat16)
    found.quant_method = method  # pyright: ignore[reportArgumentType]
    return found


class Served(nn.Module):
    """A model as vLLM keeps it: fused projections, a padded vocabulary, and one layer that it packs."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = linear(16, UnquantizedLinearMethod()), linear(8, UnquantizedLinearMethod())
        self.down_proj, self.norm = linear(8, PackedMethod()), nn.LayerNorm(8, dtype=torch.bfloat16)
        self.embed = nn.Embedding(64, 8, dtype=torch.bfloat16)
        self.embed.org_vocab_size = 60  # pyright: ignore[reportArgumentType]

    def sent(self) -> dict[str, torch.Tensor]:
        found = dict(self.named_parameters())
        for leaf in ("weight", "bias"):
            parts = found.pop(f"qkv_proj.{leaf}").split([8, 4, 4])
            found |= {f"layer.{name}_proj.{leaf}": part for name, part in zip("qkv", parts, strict=True)}
        found = {name if name.startswith("layer.") else f"layer.{name}": one for name, one in found.items()}
        return found | {"layer.embed.weight": self.embed.weight[:60]}


def test_what_is_compared_of_vllms_model() -> None:
    model = nn.Module()
    model.layer = served = Served()
    model.packed_modules_mapping = Served.packed_modules_mapping  # pyright: ignore[reportArgumentType]
    sums = {name: checksum(one) for name, one in served.sent().items()}
    assert len(sums) == 13
    assert differing(model, sums) == ([], 11), "all but what is packed"
    with torch.no_grad():
        served.qkv_proj.weight[[8, 9]] = served.qkv_proj.weight[[9, 8]]
        served.norm.bias[3] += 1
        served.down_proj.weight.zero_()
    assert differing(model, sums) == (["layer.norm.bias", "layer.k_proj.weight"], 11)
    wide = {**sums, "layer.q_proj.weight": checksum(torch.zeros(16, 8, dtype=torch.bfloat16))}
    assert differing(model, wide)[1] == 8, "a worker holds a part of the rows"
    other = {name: ["float32", *one[1:]] for name, one in sums.items()}
    assert differing(model, other) == ([], 0)
