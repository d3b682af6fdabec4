"""Answers given while training are those of plain transformers' greedy generation, on every mesh and method."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp2kit.config.load import dump_toml
from fsdp2kit.config.schema import EvalConfig
from fsdp2kit.errors import UserError
from fsdp2kit.job import distributed
from fsdp2kit.parity.engine import Sharded
from fsdp2kit.parity.reference import load_plain
from fsdp2kit.run import load
from fsdp2kit.train.evaluation import Evaluation, build_evaluation, generate, prompt_ids
from tests.data.helpers.templates import CHATML, LLAMA3, make_tokenizer
from tests.support.cases import Case
from tests.support.models import full, tiny_model_dir
from tests.support.workers import WorkerPool

PROMPT, NEW = [5, 17, 99, 3, 42], 70  # answers longer than the block of 64 by which rows grow
CASES = [
    Case("llama3"),
    pytest.param(Case("llama3", 2, 1), marks=pytest.mark.slow),
    pytest.param(Case("llama3", 1, 2, method="ulysses"), marks=pytest.mark.slow),
    full(Case("llama3", 2, 2, method="ring")),
    full(Case("llama3", 1, 3, method="allgather")),
]


def answer(folder: Path, case: Case) -> list[int]:
    sharded = Sharded(case.config(folder, steps=1, rows=4), world=distributed.start())
    return generate(
        sharded.model,
        PROMPT,
        max_new_tokens=NEW,
        stops=(),
        plan=sharded.plan,
        mesh=sharded.mesh,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir("llama3", tmp_path_factory.mktemp("model")).parent


@pytest.mark.parametrize("case", CASES, ids=str)
def test_answers_are_those_of_plain_generation(case: Case, folder: Path, pool: WorkerPool) -> None:
    plain = load_plain(folder / "llama3").eval()
    tokens = plain.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False)[0, len(PROMPT) :].tolist()
    assert len(set(tokens)) > 5, "an answer of a few tokens over and over would prove little"
    assert pool.run(case.world, answer, folder, case) == [tokens] * case.world


def answers(folder: Path, case: Case, stop: int) -> list[str]:
    """Answers to a prompt, of a tokenizer that writes ids, with one token that may end a turn."""
    sharded = Sharded(case.config(folder, steps=1, rows=4), world=distributed.start())
    tokenizer = SimpleNamespace(
        added_tokens_decoder={stop: SimpleNamespace(special=True), PROMPT[0]: SimpleNamespace(special=False)},
        eos_token_id=None,
        decode=lambda ids, skip_special_tokens: " ".join(str(one) for one in ids),
    )
    section = EvalConfig(max_new_tokens=12)
    asked = [("prompt", PROMPT)]
    evaluation = Evaluation(section, sharded.model, {}, asked, sharded.plan, sharded.mesh, tokenizer)
    return [answer["answer"] for answer in evaluation.answers()]


def test_an_answer_ends_with_the_first_token_that_ends_a_turn(folder: Path, pool: WorkerPool) -> None:
    plain = load_plain(folder / "llama3").eval()
    for at, case in ((3, Case("llama3", 1, 2)), (5, Case("llama3", 2, 1))):
        ids = plain.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)[0, len(PROMPT) :].tolist()
        found = pool.run(2, answers, folder, case, ids[at])
        assert found == [[" ".join(str(one) for one in ids[: ids.index(ids[at]) + 1])]] * 2


@pytest.mark.parametrize("template", [CHATML, LLAMA3, None])
def test_a_prompt_begins_once(template: str | None) -> None:
    """As transformers has it: with the template's own beginning, or for a text the tokenizer's."""
    tokenizer: Any = make_tokenizer(template)
    if template is None:
        expected = [tokenizer.bos_token_id, *tokenizer("Is water wet?", add_special_tokens=False)["input_ids"]]
    else:
        messages = [{"role": "user", "content": "Is water wet?"}]
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert prompt_ids(tokenizer, "Is water wet?") == expected


@pytest.mark.parametrize("template", [CHATML, LLAMA3])
def test_a_prompt_of_messages(template: str) -> None:
    """As transformers has it, with the history and the system message."""
    tokenizer: Any = make_tokenizer(template)
    roles = ["system", "user", "assistant", "user"]
    messages = [{"role": role, "content": f"Say {at}."} for at, role in enumerate(roles)]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    [prompt] = EvalConfig.model_validate({"prompts": [messages]}).prompts
    assert prompt_ids(tokenizer, prompt) == expected
    mistakes = {
        "eval.prompts.1: ends in the assistant's message": (tokenizer, messages[:3]),
        "eval.prompts.1: messages[0] has the unknown role 'usr'; did you mean 'user'?":
            (tokenizer, [{"role": "usr", "content": "Hi"}]),
        "model.chat_template: the tokenizer has no chat template to use": (make_tokenizer(None), messages),
    }  # fmt: skip
    for says, (words, asked) in mistakes.items():
        with pytest.raises(UserError, match=f"^{re.escape(says)}"):
            prompt_ids(words, asked, where="eval.prompts.1")


def test_prompts_in_a_toml(tmp_path: Path) -> None:
    told = '[{ role = "system", content = "Be brief." }, { role = "user", content = "Hi" }]'
    base = 'recipe = "sft"\n[model]\npath = "x/y"\n[data]\npath = "a.jsonl"\n[train]\nsteps = 1\n[eval]\nevery = 1\n'
    (tmp_path / "a.toml").write_text(f'{base}prompts = ["Hi", {told}]\n')
    _, config = load(str(tmp_path / "a.toml"), [])
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
    assert config.eval.prompts == ["Hi", [system, user]]
    (tmp_path / "again.toml").write_text(dump_toml(config))
    assert load(str(tmp_path / "again.toml"), [])[1].eval.prompts == config.eval.prompts
    assert load(str(tmp_path / "a.toml"), [f"eval.prompts=[{told}]"])[1].eval.prompts == [[system, user]]
    for wrong in ("[[]]", "[{role='user', content='Hi'}]", "[[{role='user'}]]", "[[{role='user', contnt='Hi'}]]"):
        with pytest.raises(UserError, match=r"override eval\.prompts\.0: .* a list of messages like"):
            load(str(tmp_path / "a.toml"), [f"eval.prompts={wrong}"])


def test_prompts_without_a_tokenizer_are_refused() -> None:
    none: Any = None
    with pytest.raises(UserError, match=r"^eval\.prompts: need a tokenizer; set model\.tokenizer or model\.path"):
        build_evaluation(EvalConfig(prompts=["Hi"]), none, {}, plan=none, mesh=none)
