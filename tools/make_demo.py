"""Make the demo data: python tools/make_demo.py [--out toml/demo]

Writes ``chat.jsonl`` (600 short conversations about small facts), ``heldout.jsonl`` (60 questions of the same facts
in wordings that chat.jsonl does not ask them in) and ``tokenizer/`` (byte-level BPE trained on them). The same
`tokenizers` version writes the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

CONVERSATIONS, TWO_TURN, HELD_OUT = 600, 120, 60
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
    for one, other in pairs(OPPOSITES):
        for word, opposite in ((one, other), (other, one)):
            answer = f"The opposite of {word} is {opposite}."
            yield f"What is the opposite of {word}?", answer
            yield f"Tell me the opposite of {word}.", answer
            yield f"Which word is the opposite of {word}?", answer
            yield f"What is not {word}?", answer
            yield f"I say {word}. What is the opposite?", answer
    for word, plural in pairs(PLURALS):
        answer = f"One {word}, two {plural}."
        yield f"What is the plural of {word}?", answer
        yield f"Tell me the plural of {word}.", answer
        yield f"How do you say more than one {word}?", answer
        yield f"One {word}, two what?", answer
        yield f"I see one {word}. You see two?", answer
    for thing, colour in pairs(COLOURS):
        answer = f"{thing[0].upper()}{thing[1:]} is {colour}."
        yield f"What colour is {thing}?", answer
        yield f"Which colour is {thing}?", answer
        yield f"What colour does {thing} have?", answer
        yield f"Tell me the colour of {thing}.", answer
        yield f"I paint {thing}. Which colour do I need?", answer
    for animal, sound in pairs(SOUNDS):
        answer = f"A {animal} {sound}."
        yield f"What sound does a {animal} make?", answer
        yield f"What does a {animal} sound like?", answer
        yield f"Which sound comes from a {animal}?", answer
        yield f"Tell me the sound of a {animal}.", answer
        yield f"I hear a {animal}. What does it do?", answer
    for names, kind in ((DAYS, "day"), (MONTHS, "month")):
        cycle = names.split(", ")
        for name, following in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
            answer = f"After {name} comes {following}."
            yield f"What comes after {name}?", answer
            yield f"Which {kind} comes after {name}?", answer
            yield f"What is the {kind} after {name}?", answer
            yield f"Tell me the {kind} after {name}.", answer
            yield f"It is {name}. What comes after it?", answer
    for number in range(1, 41):
        answer = f"After {number} comes {number + 1}."
        yield f"What comes after {number}?", answer
        yield f"Which number comes after {number}?", answer
        yield f"What is one more than {number}?", answer
        yield f"Tell me the number after {number}.", answer


def conversations() -> tuple[list[list[dict]], list[list[dict]]]:
    """``(training, held out)``: lists of messages. No question is in both."""
    asked = list(questions())
    random.Random(0).shuffle(asked)
    turns = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}] for question, answer in asked
    ]
    held_out, rest = turns[:HELD_OUT], turns[HELD_OUT : HELD_OUT + CONVERSATIONS + TWO_TURN]
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
    write_tokenizer(out / "tokenizer", [message["content"] for messages in training for message in messages])


if __name__ == "__main__":
    main()
