"""Prompts: how many are asked and when, which are held out, what is too long, and rows of every kind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from fsdp2kit.config.sections.data import PromptDataConfig
from fsdp2kit.data.rows import Row
from fsdp2kit.data.tokens import Prompt, encode_prompts
from fsdp2kit.errors import UserError
from fsdp2kit.rl.prompts import digest_of
from tests.data.helpers.templates import CHATML, make_tokenizer
from tests.rl.helpers.runs import prompts_of, write_toml
from tests.support.models import DEMO


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toml(tmp_path_factory.mktemp("rl"))


def test_an_evaluation_asks_as_many_as_it_is_told(toml: Path, tmp_path: Path) -> None:
    path = tmp_path / "held_out.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Tell {at}.", "level": "7"}) + "\n" for at in range(11)))
    for evaluation, count in (("every=1", 11), ("every=1, steps=2", 8), ("every=0, steps=2", 0)):
        overrides = ["train.global_batch_size=4", f"eval={{path='{path}', {evaluation}}}"]
        found = prompts_of(toml, *overrides)
        assert _asked(found.held_out) == [f"Tell {at}." for at in range(count)]
        assert found.held_out_fingerprint == digest_of(found.held_out)


def _asked(prompts: Sequence[Prompt]) -> list[str]:
    return [str(prompt.messages[0]["content"]) for prompt in prompts]  # pyright: ignore[reportArgumentType]


def test_prompts_that_are_held_out_are_not_trained_on(toml: Path, tmp_path: Path) -> None:
    """Wherever their copies are, and also in a run that does not evaluate."""
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"Say {at % 12}.", "level": str(at)}) + "\n" for at in range(36)))
    for every in (1, 0):
        found = prompts_of(toml, f"data.path='{rows}'", f"eval={{every={every}, split=0.3}}")
        trained, held_out = _asked(found.prompts), _asked(found.held_out)
        assert found.held_out_fingerprint == digest_of(found.held_out)
        assert 0 < len(set(trained)) < 12
        assert [trained.count(one) for one in set(trained)] == [3] * len(set(trained))
        rest = {f"Say {at}." for at in range(12)} - set(trained)
        assert sorted(held_out) == (sorted(3 * [*rest]) if every else [])


def test_an_epoch_asks_every_prompt_once_in_an_order_of_its_own(toml: Path) -> None:
    """Ten prompts, four of them in a step."""
    for epochs, steps in ((2, 5), (3, 8)):
        found = prompts_of(toml, "train.steps=none", f"train.epochs={epochs}")
        assert (found.total_steps, found.steps_per_epoch) == (steps, 2.5)
        order = [index for number in range(steps) for index in found.of_round(number)]
        passes = [order[10 * epoch : 10 * epoch + 10] for epoch in range(epochs)]
        assert all(sorted(one) == list(range(10)) for one in passes)
        assert len({tuple(one) for one in passes}) == epochs
    several = prompts_of(toml, "rollout.updates=2")
    assert [*several.of_round(0), *several.of_round(1)][:10] == passes[0], "as many are asked, twice as many at a time"
    in_turn = prompts_of(toml, "data.shuffle=false")
    assert [in_turn.of_round(number) for number in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]


def test_a_prompt_that_leaves_no_room_is_dropped_and_counted(toml: Path, tmp_path: Path) -> None:
    rows = tmp_path / "prompts.jsonl"
    asked = ["Say it.", "Say it, " * 30 + "now.", "Say that."]
    rows.write_text("".join(json.dumps({"prompt": one, "level": "1"}) + "\n" for one in asked))
    found = prompts_of(toml, f"data.path='{rows}'", "data.overlong=drop")
    assert (_asked(found.prompts), found.dropped) == ([asked[0], asked[2]], 1)
    assert "; 1 prompt dropped: too long" in found.describe()[0]


def test_an_export_of_a_model_that_learns_from_rewards_stops_where_its_turns_end(toml: Path) -> None:
    """That token need not be the tokenizer's end of text."""
    tokenizer = make_tokenizer(CHATML, eos="<|end|>")
    assert prompts_of(toml, tokenizer=tokenizer).endings == {tokenizer.convert_tokens_to_ids("<|im_end|>")}


def test_prompts_of_every_kind() -> None:
    tokenizer, how = AutoTokenizer.from_pretrained(DEMO / "tokenizer"), PromptDataConfig()
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    answered = [*asked, {"role": "assistant", "content": "Hello"}]
    rows: list[dict[str, Any]] = [
        {"messages": asked},
        {"messages": answered, "level": 3},
        {"prompt": asked},
        {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Hi"}]},
        {"prompt": "Hi"},
    ]
    found = encode_prompts([Row(row, f"row {at}") for at, row in enumerate(rows)], how, tokenizer)
    expected = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    for prompt in found[:4]:
        assert prompt.messages == asked
        assert tokenizer.decode(prompt.ids) == expected
    assert found[1].row["level"] == 3
    assert found[4].messages == [{"role": "user", "content": "Hi"}]
    for row, message in (
        ({"text": "Hi"}, "has no 'messages'.* or train on other data with recipe"),
        ({"messages": answered[2:]}, "no prompt before the answer"),
        ({"prompt": 3}, "prompt is of type int, not a text or a list of messages; give one"),
    ):
        with pytest.raises(UserError, match=f"row 0: .*{message}"):
            encode_prompts([Row(row, "row 0")], how, tokenizer)
    plain = make_tokenizer(None)
    [prompt] = encode_prompts([Row({"prompt": "Hi there"}, "row 0")], how, plain)
    assert prompt.messages == "Hi there"
    assert prompt.ids == plain("Hi there")["input_ids"]
