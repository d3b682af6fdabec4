"""Real template families: decoding what is learnt gives exactly the assistant's texts and ends of turn."""

from __future__ import annotations

import pytest

from fsdp2kit.data.messages import TrainOn
from fsdp2kit.errors import UserError
from tests.data.helpers.families import ANSWER, FAMILIES, MULTI, SECOND, SINGLE, tokenizer_of
from tests.data.helpers.templates import encode_chat, learnt_text, make_tokenizer

# DeepSeek-R1 and its kin open the reasoning in the prompt, and cut it out of every answer that they render.
DEEPSEEK_R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% else %}"
    "{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)


def learnt(tokenizer, messages, train_on: TrainOn) -> str:
    ids, supervised = encode_chat(messages, tokenizer, train_on=train_on)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tokenize=False)
    assert ids.count(tokenizer.bos_token_id) == ("bos_token" in tokenizer.chat_template)
    return learnt_text(tokenizer, ids, supervised)


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_learnt_of_a_conversation(name: str, marked: bool, trim_offsets: bool) -> None:
    family, tokenizer = FAMILIES[name], tokenizer_of(name, marked=marked, trim_offsets=trim_offsets)
    second = family.single.replace(ANSWER, SECOND)
    assert learnt(tokenizer, SINGLE, "assistant") == learnt(tokenizer, SINGLE, "last") == family.single
    assert learnt(tokenizer, MULTI, "last") == second
    assert learnt(tokenizer, MULTI, "all") == tokenizer.apply_chat_template(MULTI, tokenize=False)
    if name == "gpt_oss" and not marked:
        # Earlier answers end in another token than the last one, so their end is not learnt.
        assert learnt(tokenizer, MULTI, "assistant") == family.multi.replace("<|end|>", "")
    elif family.multi and not marked:
        todo = r'set data.train_on = "last" .*, set model.chat_template to a template with {% generation %} markers'
        with pytest.raises(UserError, match=rf"^row 3: .*messages\[1\] differently .*{todo}"):
            encode_chat(MULTI, tokenizer, where="row 3")
    else:
        assert learnt(tokenizer, MULTI, "assistant") == (family.multi or family.single + second)


@pytest.mark.parametrize("train_on", ["assistant", "last"])
def test_reasoning_opened_by_the_prompt_and_cut_from_the_answer_is_refused(train_on: TrainOn) -> None:
    family = FAMILIES["deepseek"]
    with pytest.raises(UserError, match=r"messages\[1\] differently"):
        encode_chat(SINGLE, make_tokenizer(DEEPSEEK_R1, eos=family.eos, special=family.special), train_on=train_on)
