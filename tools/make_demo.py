"""Make the demo data: python tools/make_demo.py [--out toml/demo]

Writes ``chat.jsonl`` (600 short conversations about small facts), ``heldout.jsonl`` (60 questions of the same facts
in wordings that chat.jsonl does not ask them in), ``tokenizer/`` (byte-level BPE trained on them) and ``digits.jsonl``
(prompts that ask for a digit). The same `tokenizers` version writes the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

CONVERSATIONS = 600
TWO_TURN = 120
HELD_OUT = 60
VOCABULARY = 1024
SPECIAL_TOKENS = ["<|pad|>", "<|im_start|>", "<|im_end|>"]

OPPOSITES = """
hot cold, big small, fast slow, up down, open closed, wet dry, light dark, happy sad, new old, full empty, hard soft,
early late, high low, loud quiet, long short, near far, rich poor, strong weak, thick thin, young aged, clean dirty,
left right, day night, sweet sour
"""
PLURALS = """
cat cats, dog dogs, book books, tree trees, house houses, bird birds, boat boats, apple apples, chair chairs,
star stars, box boxes, fox foxes, bus buses, dish dishes, glass glasses, peach peaches, city cities, baby babies,
berry berries, story stories, leaf leaves, wolf wolves, knife knives, child children, foot feet, tooth teeth,
goose geese, mouse mice, man men, woman women, sheep sheep, fish fish
"""
COLOURS = """
grass green, snow white, coal black, blood red, the sky blue, a lemon yellow, a carrot orange, chocolate brown,
a flamingo pink, a plum purple, milk white, a strawberry red, a banana yellow, a frog green, a crow black
"""
SOUNDS = """
dog barks, cat meows, cow moos, duck quacks, sheep bleats, lion roars, pig oinks, frog croaks, bee buzzes, owl hoots,
horse neighs, snake hisses, wolf howls, mouse squeaks
"""
DAYS = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday"
MONTHS = "January, February, March, April, May, June, July, August, September, October, November, December"

# For each kind of fact: its answer and the questions for it; {0} and {1} are the fact's two halves.
WORDINGS = {
    "opposite": """The opposite of {0} is {1}. | What is the opposite of {0}? | Tell me the opposite of {0}. |
        Which word is the opposite of {0}? | What is not {0}? | I say {0}. What is the opposite?""",
    "plural": """One {0}, two {1}. | What is the plural of {0}? | Tell me the plural of {0}. |
        How do you say more than one {0}? | One {0}, two what? | I see one {0}. You see two?""",
    "colour": """{0} is {1}. | What colour is {0}? | Which colour is {0}? | What colour does {0} have? |
        Tell me the colour of {0}. | I paint {0}. Which colour do I need?""",
    "sound": """A {0} {1}. | What sound does a {0} make? | What does a {0} sound like? |
        Which sound comes from a {0}? | Tell me the sound of a {0}. | I hear a {0}. What does it do?""",
    "day": """After {0} comes {1}. | What comes after {0}? | Which day comes after {0}? |
        What is the day after {0}? | Tell me the day after {0}. | It is {0}. What comes after it?""",
    "month": """After {0} comes {1}. | What comes after {0}? | Which month comes after {0}? |
        What is the month after {0}? | Tell me the month after {0}. | It is {0}. What comes after it?""",
    "number": """After {0} comes {1}. | What comes after {0}? | Which number comes after {0}? |
        What is one more than {0}? | Tell me the number after {0}.""",
}

# What toml/grpo_demo.toml asks, of every digit but 9.
DIGIT_WORDINGS = (
    "Name a digit above {0}.",
    "Which digit is more than {0}?",
    "Give me a larger digit than {0}.",
    "What is after {0}?",
)

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- message['content'] + '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message['content'] + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def pairs(text: str) -> list[tuple[str, str]]:
    """``[("hot", "cold"), …]`` of a comma-separated list; the last word of an item is its second half."""
    items = (" ".join(item.split()) for item in text.split(","))
    return [(item.rpartition(" ")[0], item.rpartition(" ")[2]) for item in items]


def questions() -> Iterator[tuple[str, str]]:
    """Every fact in each of its wordings, as (question, answer)."""
    opposites = pairs(OPPOSITES)
    days = DAYS.split(", ")
    months = MONTHS.split(", ")
    facts: dict[str, Iterable[tuple[Any, Any]]] = {
        "opposite": [each for one, other in opposites for each in ((one, other), (other, one))],
        "plural": pairs(PLURALS),
        "colour": pairs(COLOURS),
        "sound": pairs(SOUNDS),
        "day": zip(days, [*days[1:], days[0]], strict=True),
        "month": zip(months, [*months[1:], months[0]], strict=True),
        "number": zip(range(1, 41), range(2, 42), strict=True),
    }
    for kind, halves in facts.items():
        answer, *asked = (" ".join(wording.split()) for wording in WORDINGS[kind].split("|"))
        for fact in halves:
            told = answer.format(*fact)
            for question in asked:
                yield question.format(*fact), told[0].upper() + told[1:]


def conversations() -> tuple[list[list[dict]], list[list[dict]]]:
    """``(training, held out)``: lists of messages. No question is in both."""
    asked = list(questions())
    random.Random(0).shuffle(asked)
    turns = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}] for question, answer in asked
    ]
    held_out = turns[:HELD_OUT]
    rest = turns[HELD_OUT : HELD_OUT + CONVERSATIONS + TWO_TURN]
    double = [rest[2 * at] + rest[2 * at + 1] for at in range(TWO_TURN)]
    training = double + rest[2 * TWO_TURN :]
    random.Random(1).shuffle(training)
    return training, held_out


def write_tokenizer(folder: Path, texts: list[str]) -> None:
    """A byte-level BPE tokenizer that `AutoTokenizer.from_pretrained` loads without a hub."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "tokenizer.json", tokenizer.to_str() + "\n")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    write(folder / "tokenizer_config.json", json.dumps(settings, indent=2) + "\n")
    write(folder / "chat_template.jinja", CHAT_TEMPLATE)


def write(path: Path, text: str) -> None:
    """UTF-8 with Unix line ends, on any system."""
    path.write_bytes(text.encode("utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the demo data.")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent.parent / "toml" / "demo")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    training, held_out = conversations()
    for name, rows in (("chat.jsonl", training), ("heldout.jsonl", held_out)):
        write(out / name, "".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    asked = [{"prompt": wording.format(digit), "digit": digit} for digit in range(9) for wording in DIGIT_WORDINGS]
    write(out / "digits.jsonl", "".join(json.dumps(row) + "\n" for row in asked))
    write_tokenizer(out / "tokenizer", [message["content"] for messages in training for message in messages])


if __name__ == "__main__":
    main()
