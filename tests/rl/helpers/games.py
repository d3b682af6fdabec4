"""Two environments, a tokenizer of few words, and conversations of a player that knows the rules alone."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ENVIRONMENTS = '''
TOOL = {"type": "function", "function": {"name": "call", "description": "adds", "parameters": {}}}


class Guess:
    """A number from 1 to 3 in two guesses. A player who guesses 2 first, and then goes by the answer, wins."""

    def reset(self, row):
        self.secret, self.left = row["secret"], 2
        return [{"role": "user", "content": "guess"}]

    def step(self, messages):
        said = messages[-1]["content"].strip()
        self.left -= 1
        if said == str(self.secret):
            return 1.0
        if not self.left or not said.isdigit():
            return 0.0
        return [{"role": "user", "content": "higher" if int(said) < self.secret else "lower"}]


class Calculator:
    """A sum of two digits, which only the tool can add."""

    async def reset(self, row):
        self.sum, self.result = row["a"] + row["b"], None
        return [{"role": "user", "content": f"{row['a']} + {row['b']}"}], [TOOL]

    async def step(self, messages):
        match messages[-1]["content"].split():
            case ["call", a, "+", b] if self.result is None and (a + b).isdigit():
                self.result = str(int(a) + int(b))
                return [{"role": "tool", "content": self.result}]
            case [answer] if self.result is not None:
                return float(answer == str(self.sum))
        return 0.0
'''
TOOL = {"type": "function", "function": {"name": "call", "description": "adds", "parameters": {}}}
WORDS = ["<pad>", "<|im_start|>", "<|im_end|>", "<unk>", "system", "user", "assistant", "tool"]
WORDS += ["guess", "higher", "lower", "call", "+", *map(str, range(19))]
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|> system tool call <|im_end|> ' }}{% endif %}{% for m in messages %}"
    "{{ '<|im_start|> ' + m.role + ' ' + m.content + ' <|im_end|> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|> assistant ' }}{% endif %}"
)


def write_tokenizer(folder: Path) -> Path:
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special: Any = {"pad_token": "<pad>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, extra_special_tokens=["<|im_start|>"], **special)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


MODEL = """
    [model]
    weights = "random"
    tokenizer = "tokenizer"
    [model.config]
    model_type = "llama"
    vocab_size = 64
    hidden_size = 64
    intermediate_size = 192
    num_hidden_layers = 2
    num_attention_heads = 4
    num_key_value_heads = 2
    max_position_embeddings = 128
    tie_word_embeddings = false
"""


def write_game(folder: Path, name: str, *, model: str = MODEL) -> Path:
    """The TOML of a game, "Guess" or "Calculator", with its rows and environment."""
    write_tokenizer(folder / "tokenizer")
    (folder / "games.py").write_text(ENVIRONMENTS)
    secrets, sums = [{"secret": one} for one in (1, 2, 3)], [{"a": a, "b": b} for a in range(5) for b in range(5)]
    rows = secrets if name == "Guess" else sums
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    toml = folder / f"{name}.toml"
    toml.write_text(f"""
    recipe = "grpo"
    fsdp.param_dtype = "float32"
    data = {{ path = "{name}.jsonl", seq_len = 64 }}
    rollout = {{ environment = "games.py:{name}", n = 4, max_new_tokens = 6, samples_every = 0 }}
    train = {{ steps = 4, global_batch_size = 16 }}
    optimizer.lr = 2e-3
    checkpoint.export_hf = "never"
    wandb.mode = "disabled"
    {model}
""")
    return toml


def random_plays(rows: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Conversations of both games, whose player knows the rules and not how to win."""
    chance = random.Random(seed)
    for number in range(rows):
        if number % 3 == 0:
            yield {"messages": _guesses(chance), "tools": None}
            continue
        asked = [chance.randint(0, 4), chance.randint(0, 4)]
        called = [one if chance.random() < 0.6 else chance.randint(0, 4) for one in asked]
        answer = sum(called) if chance.random() < 0.5 else chance.randint(0, 8)
        yield {
            "messages": [
                {"role": "user", "content": "{} + {}".format(*asked)},
                {"role": "assistant", "content": "call {} + {}".format(*called)},
                {"role": "tool", "content": str(sum(called))},
                {"role": "assistant", "content": str(answer)},
            ],
            "tools": [TOOL],
        }


def _guesses(chance: random.Random) -> list[dict[str, str]]:
    secret, messages = chance.randint(1, 3), [{"role": "user", "content": "guess"}]
    for left in (1, 0):
        guess = chance.randint(1, 3)
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == secret or not left:
            break
        messages.append({"role": "user", "content": "higher" if guess < secret else "lower"})
    return messages
