"""Plain texts get a tokenizer's special tokens once, and prompts never end in an EOS that it appends."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from fsdp2kit.config.schema import DataConfig
from fsdp2kit.data.findings import Findings
from fsdp2kit.data.rows import Row
from fsdp2kit.data.tokens import encode_documents, encode_prompts, plain_prompt_ids, special_affixes
from fsdp2kit.train.evaluation import prompt_ids
from tests.data.helpers.templates import CHATML, make_tokenizer

BOS, EOS, MASK = "<|begin|>", "<|end|>", "[INST]"


def tokenizer_with(single: str | None, *, template: str | None = None) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that puts special tokens around a text ``$A``."""
    tokenizer = make_tokenizer(template, eos=EOS)
    vocab = tokenizer.get_vocab()
    special: Any = [(name, vocab[name]) for name in (BOS, EOS, MASK)]
    added = [processors.TemplateProcessing(single=single, special_tokens=special)] if single else []
    processor: Any = processors.Sequence([processors.ByteLevel(trim_offsets=False), *added])
    tokenizer.backend_tokenizer.post_processor = processor
    return tokenizer


ADDS = {
    "bos": (f"{BOS} $A", [BOS], []),
    "bos and eos": (f"{BOS} $A {EOS}", [BOS], [EOS]),
    "eos": (f"$A {EOS}", [], [EOS]),
    "two before": (f"{MASK} {BOS} $A", [MASK, BOS], []),
    "none": (None, [], []),
}


@pytest.mark.parametrize("name", ADDS)
def test_what_a_tokenizer_adds(name: str) -> None:
    single, before, after = ADDS[name]
    tokenizer = tokenizer_with(single)
    expected = tuple(tokenizer.convert_tokens_to_ids(list(some)) for some in (before, after))
    assert special_affixes(tokenizer) == expected


def encoded(row: dict, tokenizer: Any, kind: str, **options: Any) -> tuple[list, Findings]:
    findings = Findings()
    how = DataConfig(format=kind, **options)  # pyright: ignore[reportArgumentType]
    [documents] = encode_documents([Row(row, "x.jsonl:1")], how, tokenizer, findings=findings)
    return documents, findings


@pytest.mark.parametrize("name", ADDS)
def test_a_text_keeps_one_bos_and_one_eos(name: str) -> None:
    """Whatever it has itself: the tokens are those of plain transformers without added ones, and the added once."""
    single, before, after = ADDS[name]
    tokenizer = tokenizer_with(single)
    own_before, own_after = "".join(before), "".join(after)
    bare = tokenizer("Is it wet? Yes.", add_special_tokens=False)["input_ids"]
    added: Any = tokenizer.convert_tokens_to_ids(before)
    expected = [*added, *bare, tokenizer.eos_token_id]
    for begins in {"", own_before, 2 * own_before}:
        for ends in {"", own_after, EOS}:
            text = f"{begins}Is it wet? Yes.{ends}"
            [(ids, learnt)], findings = encoded({"text": text}, tokenizer, "text")
            assert ids == expected, text
            assert all(learnt)
            assert findings.own_bos == bool(begins)
            assert findings.own_eos == bool(ends and after)
            cut = len(begins) + len("Is it wet?")
            pair = {"prompt": text[:cut], "completion": text[cut:]}
            [(ids, learnt)], _ = encoded(pair, tokenizer, "prompt_completion")
            assert ids == expected, text
            assert tokenizer.decode([one for one, is_learnt in zip(ids, learnt, strict=True) if is_learnt]) == (
                f" Yes.{EOS}"
            )
            [(ids, learnt)], _ = encoded(pair, tokenizer, "prompt_completion", train_on="all")
            assert (ids, learnt[1:]) == (expected, [True] * (len(ids) - 1))
            answers = {"prompt": pair["prompt"], "chosen": pair["completion"], "rejected": " No."}
            found, _ = encoded(answers, tokenizer, "preference")
            assert found[0][0] == expected
            assert found[1][0].count(tokenizer.bos_token_id) == (BOS in before), "the prompt's BOS is one, too"


def test_a_bos_elsewhere_is_the_texts_own() -> None:
    tokenizer = tokenizer_with(f"{BOS} $A")
    [(ids, _)], findings = encoded({"text": f"a{BOS}b"}, tokenizer, "text")
    assert ids == [*tokenizer(f"a{BOS}b")["input_ids"], tokenizer.eos_token_id]
    assert findings.own_bos == 0
    for text in ("", BOS, EOS, BOS + EOS):
        for name, (single, before, _) in ADDS.items():
            [(ids, _)], _ = encoded({"text": text}, tokenizer_with(single), "text")
            once = dict.fromkeys([*before, *(one for one in (BOS, EOS) if one in text), EOS])
            assert tokenizer.convert_ids_to_tokens(ids) == list(once), (name, text)


@pytest.mark.parametrize("name", ADDS)
def test_a_plain_prompt_does_not_end(name: str) -> None:
    """In rollouts, in the evaluation's prompts and in `generate`: the beginning of the text that is trained on."""
    single, before, _ = ADDS[name]
    tokenizer = tokenizer_with(single)
    text = "Is it wet?"
    expected: Any = tokenizer.convert_tokens_to_ids([*before, *tokenizer.tokenize(text)])
    for given in {text, "".join(before) + text}:
        [prompt] = encode_prompts([Row({"prompt": given}, "x")], DataConfig(format="prompts"), tokenizer)
        assert prompt.ids == prompt_ids(tokenizer, given) == plain_prompt_ids(tokenizer, given) == expected
    [(ids, _)], _ = encoded({"prompt": text, "completion": " Yes."}, tokenizer, "prompt_completion")
    assert ids[: len(expected)] == expected
    own = plain_prompt_ids(tokenizer, text + EOS)
    assert own == [*expected, tokenizer.eos_token_id], "an EOS of the prompt's own stays"


def test_conversations_get_what_their_template_writes() -> None:
    """Whether or not the tokenizer adds special tokens to texts."""
    messages = [{"role": "user", "content": "Wet?"}, {"role": "assistant", "content": "Yes."}]
    for single in (None, f"{BOS} $A", f"{BOS} $A {EOS}"):
        for template in (CHATML, "{{ bos_token }}" + CHATML):
            tokenizer = tokenizer_with(single, template=template)
            [(ids, _)], findings = encoded({"messages": messages}, tokenizer, "chat")
            assert ids == tokenizer.apply_chat_template(messages, return_dict=False)
            assert findings.own_bos == 0
            expected = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
            assert prompt_ids(tokenizer, "Wet?") == expected
