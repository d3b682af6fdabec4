"""A byte-level tokenizer, a few chat templates for it, and the texts of encoded conversations."""

from __future__ import annotations

import itertools
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from fsdp2kit.config.schema import DataConfig
from fsdp2kit.data.messages import TrainOn
from fsdp2kit.data.rows import Row
from fsdp2kit.data.tokens import Encoded, encode_rows

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Markers that leave the end-of-turn token out, as some published templates do; block tags on lines of their own.
MARKED = """\

{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\n' }}
{%- if message['role'] == 'assistant' %}
    {% generation %}
{{ message['content'] }}{% endgeneration %}<|im_end|>
{% else %}
{{ message['content'] }}<|im_end|>
{% endif %}
{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# Markers around the end-of-turn token and the newline after it.
MARKED_WIDE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{%- generation -%}{{ message['content'] + '<|im_end|>\n' }}"
    "{%- endgeneration -%}{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Every text ends with a token, a conversation's and a prompt's alone.
ENDED = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{% generation %}{{ ' ' + message['content'] }}"
    "{% endgeneration %}{% endif %}{% endfor %}{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
)
# An answer's end-of-turn token is a span of its own, and a user's turn has an empty one.
IN_PIECES = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
    "{% endgeneration %} | {% generation %}<|im_end|>{% endgeneration %}{% else %}{% generation %}{% endgeneration %}"
    "{{ '<|im_start|>' + message['content'] + '[/INST]' }}{% endif %}{% endfor %}"
)

SPECIAL = ["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>"]
SPECIAL += ["<|eot_id|>", "[INST]", "[/INST]", "</s>", "<start_of_turn>", "<end_of_turn>"]
CORPUS = ["Is water wet? Yes, water is wet.", "the user and the assistant think, then the assistant says hello there"]


def encode_chat(
    messages: Any,
    tokenizer: PreTrainedTokenizerFast,
    *,
    tools: Any = None,
    train_on: TrainOn = "assistant",
    where: str = "messages",
) -> Encoded:
    """Token ids and mask of one conversation."""
    rows = [Row({"messages": messages, "tools": tools}, where)]
    return encode_rows(rows, DataConfig(format="chat", train_on=train_on), tokenizer)[0]


def spoken(tokenizer: Any, ids: list[int], supervised: list[bool]) -> str:
    """The text with « and » around each run of supervised tokens."""
    runs = itertools.groupby(zip(ids, supervised, strict=True), key=lambda token: token[1])
    texts = [(learn, tokenizer.decode([token for token, _ in run])) for learn, run in runs]
    return "".join(f"«{text}»" if learn else text for learn, text in texts)


def learnt_text(tokenizer: Any, ids: list[int], supervised: list[bool]) -> str:
    """The text of the supervised tokens."""
    return tokenizer.decode([token for token, learn in zip(ids, supervised, strict=True) if learn])


def make_tokenizer(
    template: str | None, *, eos: str = "<|im_end|>", trim_offsets: bool = False, special: tuple[str, ...] = ()
) -> PreTrainedTokenizerFast:
    """Byte-level BPE that adds a BOS to plain text, as Llama's does; ``<think>`` is a token, but not a special one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*SPECIAL, *(token for token in special if token not in SPECIAL)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    bos = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=trim_offsets), bos])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token=eos)
    fast.chat_template = template
    return fast
