"""The mask of a conversation: exactly the assistant's text and its end-of-turn token, under every kind of template."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp2kit.config.schema import DataConfig
from fsdp2kit.data.rows import Row
from fsdp2kit.data.tokens import Encoded, encode_rows
from fsdp2kit.errors import UserError
from tests.data.helpers import templates
from tests.data.helpers.families import tokenizer_of
from tests.data.helpers.templates import encode_chat, learnt_text, make_tokenizer


def turns(*contents: str) -> list[dict]:
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": content} for at, content in enumerate(contents)]


def learnt(tokenizer, messages, **options) -> str:
    return learnt_text(tokenizer, *encode_chat(messages, tokenizer, **options))


def encode_together(rows: list[list[dict]], tokenizer, **options) -> list[Encoded]:
    named = [Row({"messages": messages}, f"row {number}") for number, messages in enumerate(rows)]
    return encode_rows(named, DataConfig(format="chat", **options), tokenizer)


QUESTIONS = turns("Is water wet?", "Yes, wet.\nüber-wet 🌊!", "Sure?", "Yes  ")
CASES = {
    "chatml": (templates.CHATML, "<|im_end|>", "Yes, wet.\nüber-wet 🌊!<|im_end|>Yes  <|im_end|>"),
    "marked": (templates.MARKED, "<|end|>", "Yes, wet.\nüber-wet 🌊!<|im_end|>Yes  <|im_end|>"),
    "marked_wide": (templates.MARKED_WIDE, "<|im_end|>", "Yes, wet.\nüber-wet 🌊!<|im_end|>Yes  <|im_end|>"),
}


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_exactly_the_assistant_and_its_end_of_turn(name: str, trim_offsets: bool) -> None:
    template, eos, expected = CASES[name]
    tokenizer = make_tokenizer(template, eos=eos, trim_offsets=trim_offsets)
    assert learnt(tokenizer, QUESTIONS) == expected
    ids, _ = encode_chat(QUESTIONS, tokenizer)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(QUESTIONS, tokenize=False)
    assert ids.count(tokenizer.bos_token_id) == ("bos_token" in template)


def test_markers_agree_with_transformers_own_mask_where_that_is_right() -> None:
    tokenizer = make_tokenizer(templates.MARKED_WIDE.replace("'<|im_end|>\n' }}{%- endg", "'<|im_end|>' }}{%- endg"))
    theirs = tokenizer.apply_chat_template(
        QUESTIONS, return_assistant_tokens_mask=True, return_dict=True, tokenize=True
    )
    ids, supervised = encode_chat(QUESTIONS, tokenizer)
    assert ids == theirs["input_ids"]
    assert [int(one) for one in supervised] == theirs["assistant_masks"]


def test_the_last_turn_is_all_its_spans() -> None:
    tokenizer = make_tokenizer(templates.IN_PIECES, eos="<|im_end|>")
    assert learnt(tokenizer, QUESTIONS, train_on="last") == "Yes  <|im_end|>"
    assert learnt(tokenizer, QUESTIONS) == "Yes, wet.\nüber-wet 🌊!<|im_end|>Yes  <|im_end|>"


def test_a_span_that_ends_in_a_space_outside_all_offsets() -> None:
    # transformers' own mask runs on into the user's next turn here.
    tokenizer = make_tokenizer(templates.MARKED, trim_offsets=True)
    assert learnt(tokenizer, turns("a", "Yes ", "b", " No")) == "Yes <|im_end|> No<|im_end|>"


def test_the_mask_begins_after_a_generation_prompt_that_ends_in_a_space() -> None:
    template = templates.CHATML.replace("['role'] + '\n'", "['role'] + ' '").replace("assistant\n", "assistant ")
    # " water" is one token that straddles the border: it is the assistant's, or the word would never be learnt.
    assert learnt(make_tokenizer(template), turns("Is it?", "water is")) == " water is<|im_end|>"


def test_a_template_without_generation_prompt_does_not_teach_its_header() -> None:
    template = templates.CHATML.partition("{% if add_generation_prompt %}")[0]
    with pytest.raises(UserError, match="ignores add_generation_prompt"):
        encode_chat(QUESTIONS, make_tokenizer(template))


def test_an_answer_that_ends_in_no_special_token_keeps_its_newline_and_gets_the_eos() -> None:
    template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    assert learnt(make_tokenizer(template), turns("Wet?", "Yes.")) == " Yes.\n<|im_end|>"


def test_many_at_once_equal_one_by_one() -> None:
    tokenizer = make_tokenizer(templates.LLAMA3)
    rows = [QUESTIONS, turns("a", "b"), turns("only a question")]
    assert encode_together(rows, tokenizer) == [encode_chat(row, tokenizer) for row in rows]
    assert not any(encode_chat(rows[2], tokenizer)[1])


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        (None, "'messages' is null; fill it in"),
        ("hello", "messages is of type str"),
        ([], "messages is empty"),
        (["hello"], r"messages\[0\] is of type str"),
        ([{"content": "x"}], r"messages\[0\] has no role"),
        ([{"role": "user", "content": None}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content is of type int"),
        (turns("x", "y")[::-1], "begins with the assistant"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"messages\[0\].content\[0\] is of type image"),
        ([{"role": "user", "content": [{"type": "document"}]}], r"messages\[0\].content\[0\] is of type document"),
    ],
)
def test_malformed_messages_name_the_row(messages, what: str) -> None:
    with pytest.raises(UserError, match=f"^chat.jsonl:7: .*{what}"):
        encode_chat(messages, make_tokenizer(templates.CHATML), where="chat.jsonl:7")


@pytest.mark.parametrize("weight", [0.5, 2, "0.5"])
def test_an_answer_with_a_weight_of_its_own_is_refused(weight: Any) -> None:
    question, answer = QUESTIONS[0], {"role": "assistant", "content": "yes"}
    with pytest.raises(UserError, match=r"^chat.jsonl:7: messages\[1\]\.weight is .*wholly or not at all"):
        encode_chat([question, {**answer, "weight": weight}], make_tokenizer(templates.CHATML), where="chat.jsonl:7")
    for whole in (1, 1.0, True):
        encode_chat([question, {**answer, "weight": whole}], make_tokenizer(templates.CHATML))


def test_a_template_that_is_no_jinja_is_named_itself() -> None:
    with pytest.raises(UserError, match=r"^model\.chat_template: is no Jinja template: line 2: .*; mend that line"):
        encode_chat(QUESTIONS, make_tokenizer("{{ bos_token }}\n{% for m in messages %}{{ m.content }"))


def test_what_a_template_raises_is_the_users_to_mend() -> None:
    system = {"role": "system", "content": "Be brief."}
    with pytest.raises(UserError, match="System role not supported"):
        encode_chat([system, *QUESTIONS], tokenizer_of("gemma"))


def test_no_template_at_all() -> None:
    with pytest.raises(UserError, match=r"model.chat_template: the tokenizer has no chat template"):
        encode_chat(QUESTIONS, make_tokenizer(None))


def test_markers_under_a_filter_are_refused() -> None:
    template = "{% filter upper %}" + templates.MARKED_WIDE + "{% endfilter %}"
    assert learnt(make_tokenizer(template), turns("a", "b")).startswith("B")
    template = "{% filter replace('\ufdd0', '') %}" + templates.MARKED_WIDE + "{% endfilter %}"
    with pytest.raises(UserError, match="cannot be located"):
        encode_chat(turns("a", "b\ufdd1"), make_tokenizer(template))


def test_a_row_that_the_template_refuses_among_others_is_named() -> None:
    refuse = "{% if messages[0]['content'] == 'no' %}{{ raise_exception('never') }}{% endif %}"
    tokenizer = make_tokenizer(refuse + templates.CHATML)
    rows = [turns(text, "yes") for text in ("yes", "no", "maybe")]
    with pytest.raises(UserError, match=r"row 1.*never"):
        encode_together(rows, tokenizer, train_on="all")


def test_what_a_template_leaves_out_does_not_depend_on_the_rows_before() -> None:
    template = (
        "{% if not tools %}{{ messages[0].content }}{% else %}{{ tools }}{% endif %}"
        "{% for message in messages[1:] %}[INST]{{ message.content }}{% generation %}{% endgeneration %}{% endfor %}"
    )
    talk = [{"role": "system", "content": "Be brief."}, *turns("a", "b")]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    tokenizer = make_tokenizer(template, eos="<|im_end|>")
    encode_chat(talk, tokenizer)
    with pytest.raises(UserError, match="leaves out"):
        encode_chat(talk, tokenizer, tools=[tool])
