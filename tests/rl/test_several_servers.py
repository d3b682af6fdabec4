"""Several servers: shared prompts, and one that is lost, restarted or late in each moment of a cycle."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fsdp2kit.errors import RunFailure
from fsdp2kit.rl.engines import server as clients
from fsdp2kit.rl.engines.engine import Request, Response
from tests.rl.helpers.runs import run_recipe, write_toml
from tests.rl.helpers.servers import (
    VLLMStandIn,
    ask,
    check_responses,
    check_weights,
    engine_of,
    hangs,
    serving,
    update,
)
from tests.support.models import full
from tests.support.workers import WorkerPool


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[VLLMStandIn]]:
    monkeypatch.setattr(clients, "_RETRIES", 0)
    with ExitStack() as stack:
        yield [stack.enter_context(serving(VLLMStandIn())) for _ in range(3)]


def asked(server: VLLMStandIn) -> int:
    return server.calls.count("v1/completions")


def test_all_have_the_weights_and_share_the_prompts_by_load(servers: list[VLLMStandIn]) -> None:
    engine = engine_of(*servers, at_once=2)
    assert engine.describe().count("vLLM at http://127.0.0.1") == 3
    update(engine, 4)
    for server in servers:
        check_weights(server)
        assert (server.version, server.paused) == ("a1:4", False)
    servers[2].faults["v1/completions"] = lambda: time.sleep(0.5) or 200
    check_responses(engine)  # 20 prompts
    counts = [asked(server) for server in servers]
    assert sum(counts) == 20
    assert counts[2] < min(counts[:2]), "the slow one has as many under way, and answers fewer"


def breaks() -> int:
    return 500


@pytest.mark.parametrize(
    "route", ["v1/completions", *map(full, ("weight_info", "pause", "update_weights", "finish_weight_update"))]
)
def test_one_that_fails_is_left_out_until_it_has_weights_again(
    route: str, servers: list[VLLMStandIn], capsys: pytest.CaptureFixture[str]
) -> None:
    engine, other_rank = engine_of(*servers), engine_of(*servers, is_main=False)
    for each in (engine, other_rank):
        update(each, 1)
    servers[1].faults[route] = breaks
    for each in (engine, other_rank):
        update(each, 2)
        check_responses(each)
    said = capsys.readouterr().out
    assert said.count("left out until it takes weights again; its requests go to 2 others") == 2, "each rank says it"
    assert f"vLLM server {servers[1].url}: /{route} failed with 500" in said
    before = asked(servers[1])
    assert ask(engine)[0].is_whole
    assert asked(servers[1]) == before
    servers[1].faults.clear()
    servers[1].weights = {}
    update(engine, 3)
    check_weights(servers[1])
    check_responses(engine)
    assert asked(servers[1]) > before
    assert f"rollouts: vLLM server {servers[1].url} takes part again" in capsys.readouterr().out


def test_what_a_restarted_server_says_is_not_taken(servers: list[VLLMStandIn]) -> None:
    engine = engine_of(*servers)
    update(engine, 1)
    right = servers[0].respond

    def restarts(route: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        status, found = right(route, body)
        if route == "v1/completions":
            servers[0].version = "default"
            found["choices"][0]["token_ids"][0] = 99
        return status, found

    servers[0].respond = restarts
    check_responses(engine)
    assert asked(servers[0]) >= 1


def test_a_dead_one_delays_no_update_and_comes_back_where_it_was(servers: list[VLLMStandIn]) -> None:
    engine = engine_of(*servers)
    update(engine, 1)
    servers[2].shutdown()
    servers[2].server_close()
    check_responses(engine)
    for version in (2, 3):
        update(engine, version)
        check_responses(engine)
    again = VLLMStandIn(servers[2].server_address[1])
    with serving(again):
        assert ask(engine)
        assert not again.calls, "it has no weights yet"
        update(engine, 4)
        check_weights(again)
        check_responses(engine)
        assert asked(again)


def test_without_any_the_last_ones_fault_ends_the_run(servers: list[VLLMStandIn]) -> None:
    engine = engine_of(*servers)
    update(engine, 1)
    for server in servers:
        server.faults |= {"v1/completions": breaks, "start_weight_update": breaks}
    with pytest.raises(RunFailure, match="v1/completions failed with 500"):
        check_responses(engine)
    with pytest.raises(RunFailure, match="no weights of the trainer"):
        engine.require(1)
    with pytest.raises(RunFailure, match="failed with 500"):
        update(engine, 2)


def test_a_conversation_stays_with_its_server_and_moves_on_when_that_is_lost(servers: list[VLLMStandIn]) -> None:
    engine = engine_of(*servers[:2], at_once=4)
    update(engine, 1)
    turns: dict[int, int] = dict.fromkeys(range(6), 0)

    def go_on(at: int, turn: Response) -> Request | None:
        assert turn.ids == [20 + at, turns[at], 7]
        turns[at] += 1
        if at == 3 and turns[at] == 2:
            servers[0].faults["v1/completions"] = breaks
        return Request([20 + at, turns[at]], (at, turns[at])) if turns[at] < 5 else None

    requests = [Request([20 + at, 0], (at,)) for at in turns]
    engine.converse(requests, go_on, max_new_tokens=4, temperature=1.0, at_once=4)
    assert set(turns.values()) == {5}
    assert asked(servers[1]) > 10


def test_servers_sleep_and_wake_together(servers: list[VLLMStandIn]) -> None:
    engine = engine_of(*servers, sleeps=True)
    update(engine, 1)
    servers[0].faults["sleep?level=2"] = breaks
    engine.sleep()
    assert [server.asleep for server in servers] == [set(), *2 * [{"weights", "kv_cache"}]]
    servers[0].faults.clear()
    engine.wake("weights")
    update(engine, 1)
    engine.wake("cache")
    for server in servers:
        check_weights(server)
    check_responses(engine)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("[]", r"rollout\.url: .*at least 1"),
        ("['http://127.0.0.1:9', 'http://127.0.0.1:9/']", r"rollout\.url: names a server twice; name each once"),
    ],
)
def test_lists_that_are_refused(value: str, said: str, tmp_path: Path, pool: WorkerPool) -> None:
    overrides = ["rollout.engine=vllm", f"rollout.url={value}", f"run.dir='{tmp_path}/run'"]
    [found] = pool.run(1, run_recipe, str(write_toml(tmp_path)), overrides)
    assert re.search(said, found), found


@pytest.mark.full
def test_one_that_fails_as_it_comes_back_is_left_alone_longer_each_time(servers: list[VLLMStandIn]) -> None:
    engine = engine_of(*servers)
    servers[0].faults["start_weight_update"] = breaks
    tried = []
    for version in range(1, 9):
        servers[0].calls.clear()
        update(engine, version)
        tried.append("start_weight_update" in servers[0].calls)
        assert ask(engine)
    assert tried == [True, True, False, True, False, False, False, True]
    servers[0].faults.clear()
    for version in range(9, 17):
        update(engine, version)
    check_weights(servers[0])


@pytest.mark.full
def test_one_that_hangs_costs_an_update_little(servers: list[VLLMStandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(*servers, timeout=60.0)
    update(engine, 1)
    servers[0].faults |= dict.fromkeys(("v1/models", "v1/completions"), hangs)
    with monkeypatch.context() as patch:
        patch.setattr(clients, "_LONG", 0.02)
        check_responses(engine)
    monkeypatch.setattr(clients, "_QUICKLY", 0.2)
    begun = time.monotonic()
    update(engine, 2)
    assert time.monotonic() - begun < 15, "another request may take 18 seconds"
    check_responses(engine)


def test_responses_to_one_prompt_come_from_one_server(servers: list[VLLMStandIn]) -> None:
    engine, by_prompt = engine_of(*servers), dict[int, set[str]]()
    update(engine, 1)
    for server in servers:
        respond = server.respond

        def notes(route: str, body: Any, server: Any = server, respond: Any = respond) -> Any:
            if route == "v1/completions":
                by_prompt.setdefault(body["prompt"][0], set()).add(server.url)
            return respond(route, body)

        server.respond = notes
    requests = [Request([20 + at // 4, 5], (at,)) for at in range(24)]
    engine.generate(requests, max_new_tokens=4, temperature=1.0)
    assert len(by_prompt) == 6
    assert {len(found) for found in by_prompt.values()} == {1}
    assert len(set().union(*by_prompt.values())) == 3
