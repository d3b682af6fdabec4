"""Eight real template families: decoding what is learnt gives exactly the assistant's texts and ends of turn."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from fsdp2kit.data.chat import TrainOn
from fsdp2kit.errors import UserError
from tests.data import families
from tests.data.families import ANSWER, FAMILIES, MULTI, SECOND, SINGLE, TOOLS, WITH_TOOLS, Family
from tests.data.templates import encode_chat, make_tokenizer


def tokenizer_of(family: Family, *, marked: bool = False) -> PreTrainedTokenizerFast:
    return make_tokenizer(family.source(marked=marked), eos=family.eos, special=family.special)


def learnt(tokenizer, messages, *, train_on: TrainOn = "assistant", tools=None) -> str:
    ids, supervised = encode_chat(messages, tokenizer, train_on=train_on, tools=tools)
    whole = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    assert tokenizer.decode(ids) == whole, "the row itself is what the template makes of it"
    return tokenizer.decode([token for token, learn in zip(ids, supervised, strict=True) if learn])


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
@pytest.mark.parametrize("name", FAMILIES)
def test_one_answer(name: str, marked: bool) -> None:
    family = FAMILIES[name]
    tokenizer = tokenizer_of(family, marked=marked)
    for train_on in ("assistant", "last"):
        assert learnt(tokenizer, SINGLE, train_on=train_on) == family.single


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
@pytest.mark.parametrize("name", FAMILIES)
def test_several_answers(name: str, marked: bool) -> None:
    family = FAMILIES[name]
    tokenizer = tokenizer_of(family, marked=marked)
    if family.rewrites_history and not marked:
        todo = r'set data.train_on = "last" .*, set model.chat_template to a template with {% generation %} markers'
        with pytest.raises(UserError, match=rf"^row 3: .*messages\[1\] differently .*{todo}"):
            encode_chat(MULTI, tokenizer, where="row 3")
        return
    assert learnt(tokenizer, MULTI) == family.multi


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_last_answer_or_everything(name: str, marked: bool) -> None:
    family = FAMILIES[name]
    tokenizer = tokenizer_of(family, marked=marked)
    last = learnt(tokenizer, MULTI, train_on="last")
    assert last == family.single.replace(ANSWER, SECOND)
    assert learnt(tokenizer, MULTI, train_on="all") == tokenizer.apply_chat_template(MULTI, tokenize=False)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gemma"])
def test_a_system_message_is_read_but_not_learnt(name: str) -> None:
    family = FAMILIES[name]
    system = [{"role": "system", "content": "Be brief."}]
    assert learnt(tokenizer_of(family), system + SINGLE) == family.single


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
def test_calls_are_learnt_and_results_are_not(marked: bool) -> None:
    tokenizer = tokenizer_of(families.TOOL_CALLING, marked=marked)
    call = '<tool_call>\n{"name": "touch", "arguments": {"what": "water"}}\n</tool_call><|im_end|>'
    assert learnt(tokenizer, WITH_TOOLS, tools=TOOLS) == f"{call}{SECOND}<|im_end|>"
    assert learnt(tokenizer, WITH_TOOLS, tools=TOOLS, train_on="last") == f"{SECOND}<|im_end|>"


def test_reasoning_is_learnt_where_it_is_rendered() -> None:
    tokenizer = tokenizer_of(families.QWEN3)
    thinking = [
        *MULTI[:1],
        {**MULTI[1], "reasoning_content": "Hm."},
        MULTI[2],
        {**MULTI[3], "reasoning_content": "So."},
    ]
    assert learnt(tokenizer, thinking[:2]) == f"<think>\nHm.\n</think>\n\n{ANSWER}<|im_end|>"
    assert learnt(tokenizer, thinking, train_on="last") == f"<think>\nSo.\n</think>\n\n{SECOND}<|im_end|>"
    in_content = [MULTI[0], {"role": "assistant", "content": f"<think>\nHm.\n</think>\n\n{ANSWER}"}]
    assert learnt(tokenizer, in_content) == f"<think>\nHm.\n</think>\n\n{ANSWER}<|im_end|>"


@pytest.mark.parametrize("train_on", ["assistant", "last"])
def test_reasoning_opened_by_the_prompt_and_cut_from_the_answer_is_refused(train_on: TrainOn) -> None:
    tokenizer = make_tokenizer(families.DEEPSEEK_R1, eos=families.DEEPSEEK.eos, special=families.DEEPSEEK.special)
    with pytest.raises(UserError, match=r"messages\[1\] differently"):
        encode_chat(SINGLE, tokenizer, train_on=train_on)
