"""The clients of vLLM and SGLang against servers that fail in many ways."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fsdp2kit.errors import RunFailure, UserError
from fsdp2kit.rl.engines import server as clients
from fsdp2kit.rl.engines.vllm_server import VLLMServer
from tests.rl.helpers.servers import (
    SGLangStandIn,
    StandIn,
    VLLMStandIn,
    ask,
    check_responses,
    check_weights,
    engine_of,
    hangs,
    server_of,
    serving,
    update,
)
from tests.support.models import full

VLLM = pytest.mark.parametrize("server", [VLLMStandIn], indirect=True)
SGLANG = pytest.mark.parametrize("server", [SGLangStandIn], indirect=True)


@pytest.fixture(params=[VLLMStandIn, SGLangStandIn])
def server(request: pytest.FixtureRequest) -> Iterator[Any]:
    with serving(request.param()) as found:
        yield found


def test_weights_then_responses(server: StandIn) -> None:
    engine = engine_of(server)
    update(engine, 3)
    check_weights(server)
    assert (server.version, server.paused) == ("a1:3", False)
    check_responses(engine)


@VLLM
def test_vllm_is_woken_and_paused_before_an_update(server: VLLMStandIn) -> None:
    update(engine_of(server), 3)
    assert server.calls[1:3] == [
        "wake_up?tags=weights",
        "wake_up?tags=kv_cache",
    ]  # a run may have left it asleep
    assert server.calls[3:6] == ["pause", "init_weight_transfer_engine", "start_weight_update"]


NEWER = {"pause_generation", "continue_generation", "begin_weight_update", "end_weight_update"}


@SGLANG
@pytest.mark.parametrize("without", [set(), {*NEWER, "server_info", "model_info"}], ids=["0.5.23", "older"])
def test_versions_of_sglang(without: set[str], server: SGLangStandIn) -> None:
    server.without = without
    engine = engine_of(server)
    assert engine.describe() == f"rollouts: SGLang at {server.url}, which serves 'policy'"
    update(engine, 3)
    check_weights(server)
    assert (server.version, server.paused, server.is_open) == ("a1:3", False, False)
    assert "flush_cache" in server.calls
    assert ask(engine)[0].is_whole
    server.finish = "length"
    assert not ask(engine)[0].is_whole


def test_only_one_rank_sends(server: StandIn) -> None:
    other = engine_of(server, is_main=False)
    update(other, 3)
    assert (other.version, server.calls) == (3, [server.looks])


def test_asleep_it_has_no_weights_and_is_sent_all(server: StandIn) -> None:
    engine = engine_of(server, sleeps=True)
    update(engine, 1)
    engine.sleep()
    assert server.asleep == {"weights", "kv_cache"}
    engine.wake("weights")
    assert server.asleep == {"kv_cache"}
    with pytest.raises(RunFailure, match="sync the weights"):
        engine.require(1)
    update(engine, 1)
    assert server.asleep == {"kv_cache"}
    engine.wake("cache")
    check_weights(server)
    check_responses(engine)


@pytest.mark.parametrize(
    ("server", "route"),
    [
        (VLLMStandIn, "pause"),
        full(VLLMStandIn, "start_weight_update"),
        (VLLMStandIn, "update_weights"),
        full(VLLMStandIn, "finish_weight_update"),
        (SGLangStandIn, "pause_generation"),
        full(SGLangStandIn, "update_weight_version"),
        full(SGLangStandIn, "begin_weight_update"),
        (SGLangStandIn, "update_weights_from_tensor"),
        full(SGLangStandIn, "end_weight_update"),
        full(SGLangStandIn, "flush_cache"),
        full(SGLangStandIn, "continue_generation"),
    ],
    indirect=["server"],
)
def test_an_update_that_breaks_off_is_not_served_and_is_sent_again(server: StandIn, route: str) -> None:
    engine = engine_of(server)
    update(engine, 1)
    server.faults[route] = lambda: 500
    with pytest.raises(
        RunFailure, match=f"{server.client.kind} server {server.url}: /{route} failed with 500: .*as asked"
    ):
        update(engine, 2)
    assert engine.version is None
    with pytest.raises(RunFailure, match="sync the weights"):
        engine.require(2)
    assert server.paused or route.startswith("pause")
    server.faults.clear()
    update(engine, 2)
    assert (engine.version, server.version, server.paused) == (2, "a1:2", False)
    assert not isinstance(server, SGLangStandIn) or not server.is_open
    assert ask(engine)


def test_a_server_that_restarts_or_is_written_to_is_noticed_and_sent_everything(server: StandIn) -> None:
    engine = engine_of(server)
    update(engine, 1)
    server.version = "default"
    with pytest.raises(RunFailure, match=r"no longer those it was sent .version 'default'.: it was restarted"):
        ask(engine)
    assert server.generates not in server.calls
    update(engine, 1)
    assert ask(engine)

    def written() -> int:
        server.version = "b2:9"
        return 200

    server.faults[server.generates] = written
    with pytest.raises(RunFailure, match="another trainer uses it"):
        ask(engine)


@SGLANG
def test_responses_that_are_aborted_or_make_no_sense_are_not_taken(server: SGLangStandIn) -> None:
    engine = engine_of(server)
    update(engine, 1)
    server.finish = "abort"
    with pytest.raises(RunFailure, match=r"a response ended with \{'type': 'abort'\}"):
        ask(engine)
    client = server_of(server)
    update(client, 1)
    client._ask = lambda *_, **__: {"weight_version": "a1:1", "meta_info": {}}
    with pytest.raises(RunFailure, match=r"gave an answer of another form .KeyError.'finish_reason'"):
        client.respond([11, 12], max_new_tokens=4, seed=0, sampling={"stop_token_ids": [7]})


@SGLANG
@pytest.mark.parametrize("where", ["asleep", full("before the update"), "after the update", full("awake")])
@pytest.mark.parametrize("sleeps", [True, full(False)])
def test_a_run_finds_a_server_as_a_killed_one_left_it(sleeps: bool, where: str, server: SGLangStandIn) -> None:
    killed = engine_of(server, sleeps=True)
    update(killed, 1)
    killed.sleep()
    if where != "asleep":
        killed.wake("weights")
    if where in ("after the update", "awake"):
        update(killed, 2)
    if where == "awake":
        killed.wake("cache")
        assert ask(killed)
    engine = engine_of(server, sleeps=sleeps, run="b2")
    if sleeps:
        engine.sleep()
        engine.wake("weights")
    update(engine, 1)
    if sleeps:
        engine.wake("cache")
    assert ask(engine)


@VLLM
def test_a_server_that_hangs(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(server, timeout=30.0)
    update(engine, 1)
    server.faults[server.generates] = hangs
    monkeypatch.setattr(clients, "_LONG", 0.01)
    with pytest.raises(RunFailure, match=r"/v1/completions took more than 0\.3 seconds"):
        ask(engine)


@VLLM
def test_no_server(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_RETRIES", 1)
    engine = engine_of(server)
    server.shutdown()
    server.server_close()
    with pytest.raises(RunFailure, match=f"vLLM server {server.url}: does not answer"):
        update(engine, 1)
    with pytest.raises(UserError, match=r"rollout\.url: .* does not answer .*; start the server first"):
        server_of("http://127.0.0.1:9", kind=VLLMServer)


def test_a_server_without_the_routes_that_are_needed(server: StandIn) -> None:
    if isinstance(server, SGLangStandIn):
        server.without = {"server_info", "get_server_info"}
        with pytest.raises(UserError, match=r"/get_server_info failed with 404: .*no server of SGLang"):
            engine_of(server)
    else:
        engine = engine_of(server)
        server.faults["pause"] = lambda: 404
        with pytest.raises(RunFailure, match="VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config"):
            update(engine, 1)
