"""Reward functions of toml/grpo_demo.toml; docs/grpo.md says what such functions are given."""


def larger(completions, digit, **columns):
    """The share of each answer's characters that are digits above the one that its prompt names."""
    return [
        share(messages[0]["content"], "0123456789"[named + 1 :])
        for messages, named in zip(completions, digit, strict=True)
    ]


def digits(completions, **columns):
    """The share of them that are digits at all: something to find before the right ones."""
    return [share(messages[0]["content"], "0123456789") for messages in completions]


def share(text, wanted):
    """The share of a text's characters that are wanted; 0 of an empty text."""
    return sum(one in wanted for one in text) / max(1, len(text))
