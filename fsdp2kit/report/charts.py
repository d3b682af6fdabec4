"""Which charts a page has: the metrics that belong together, in sections; any other metric gets a chart of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Chart:
    """A chart of one or several metrics."""

    title: str
    lines: tuple[tuple[str, str], ...]
    """Each metric's key and its label. A key that ends in "/*" is all metrics that begin so, labelled by the rest."""
    unit: str = ""
    form: str = ""
    """How its values are written: "share" as percent, "" with four digits."""
    note: str = ""
    """A line below the title."""

    def as_json(self) -> dict[str, Any]:
        """For the page's script."""
        lines = [{"key": key, "label": label} for key, label in self.lines]
        return {"title": self.title, "unit": self.unit, "form": self.form, "note": self.note, "lines": lines}


def _pair(title: str, key: str, label: str = "training", **options: str) -> Chart:
    """A metric with the same of held-out data."""
    return Chart(title, ((key, label), (f"eval_{key}", "held-out")), **options)


SECTIONS: tuple[tuple[str, tuple[Chart, ...]], ...] = (
    (
        "Learning",
        (
            _pair("Reward", "reward"),
            _pair("Loss", "loss"),
            Chart("Learning rate", (("lr", "lr"),)),
            Chart("Gradient norm", (("grad_norm", "before clipping"),)),
            _pair("KL to the reference", "kl"),
            Chart("Held-out perplexity", (("eval_perplexity", "held-out"), ("eval_perplexity/*", ""))),
            Chart("Held-out loss by set", (("eval_loss/*", ""),)),
            Chart("Loss by source", (("loss/*", ""),)),
        ),
    ),
    (
        "Preferences",
        (
            _pair("Accuracy", "accuracy", form="share"),
            _pair("Margin", "margin"),
            Chart("Rewards of answers", (("rewards/*", ""),)),
            Chart("Held-out rewards of answers", (("eval_rewards/*", ""),)),
            Chart("Log-probabilities of answers", (("logps/*", ""),)),
            Chart("Held-out log-probabilities of answers", (("eval_logps/*", ""),)),
        ),
    ),
    (
        "Rewards and rollouts",
        (
            Chart("Reward by function", (("reward/*", ""),)),
            Chart("Held-out reward by function", (("eval_reward/*", ""),)),
            _pair("Response length", "response_length", unit="tokens"),
            Chart(
                "Trainer's and engine's log-probabilities",
                (("log_prob_gap", "mean gap"), ("log_prob_gap_max", "largest gap")),
            ),
            Chart("Entropy", (("entropy", "of responses"),)),
            Chart("Clipped tokens", (("clip_fraction", "share"),), form="share"),
            Chart("Importance weights", (("importance_weight", "mean"), ("importance_capped", "share at the cap"))),
            Chart("Age of the weights that sampled", (("rollout/staleness", "steps"),), unit="steps"),
            Chart(
                "Responses and groups",
                (("rollout/truncated", "without an end"), ("rollout/without_signal", "groups without signal")),
                form="share",
            ),
            Chart("Phases of the cycle", (("seconds/*", ""),), unit="s", note="the largest of any rank"),
        ),
    ),
    (
        "Speed",
        (
            Chart(
                "Tokens per second",
                (("tokens_per_second", "input"), ("supervised_tokens_per_second", "supervised")),
                note="the whole job",
            ),
            Chart("MFU", (("mfu", "of the device's peak"),), form="share"),
            Chart("TFLOPS per device", (("tflops_per_device", "of the model"),)),
            Chart(
                "Time of a step",
                (
                    ("step_seconds", "step"),
                    ("split/data", "waiting for data"),
                    ("split/compute", "compute, slowest rank"),
                    ("split/exchange", "its collectives"),
                    ("split/others_wait", "others wait for it"),
                ),
                unit="s",
            ),
            Chart("Slowest rank", (("straggler_ratio", "its work ÷ the others' median"),)),
        ),
    ),
    (
        "Memory",
        (
            Chart(
                "Memory by phase",
                (("memory_gib/*", ""), ("plan:memory_gib/*", "planned")),
                unit="GiB",
                note="the rank with the most; dotted: planned",
            ),
            Chart("Peak memory", (("memory_gib", "peak"), ("plan:memory_gib", "planned")), unit="GiB"),
        ),
    ),
    (
        "Data",
        (
            Chart("Packing", (("packing_efficiency", "tokens that are no padding"),), form="share"),
            Chart("Tokens of a step", (("input_tokens", "input"), ("tokens", "supervised"))),
            Chart("Tokens by source", (("tokens/*", ""),)),
        ),
    ),
)
_SHOWN_OTHERWISE = ("slowest_rank/", "data_seconds", "epoch", "seconds_to_first_step", "compile_seconds")
"""Beginnings of metrics that "Time of a step" has in seconds, or the table of runs as one number."""


def sections_for(keys: Iterable[str], planned: Iterable[str] = (), *, splits: bool = False) -> list[dict[str, Any]]:
    """The sections that have something to show, as JSON for the page.

    Args:
        keys: metrics of all runs.
        planned: metrics that were planned.
        splits: a chart of more than two metrics becomes one for each: for several runs over each other.
    """
    left = dict.fromkeys(sorted(key for key in keys if not key.startswith(_SHOWN_OTHERWISE)))
    known = [*left, *(f"plan:{key}" for key in sorted(planned) if key in left)]
    found = []
    for title, charts in SECTIONS:
        filled = [_filled(chart, known) for chart in charts]
        shown = [chart for chart in filled if any(not key.startswith("plan:") for key, _ in chart.lines)]
        for key in (key for chart in shown for key, _ in chart.lines):
            left.pop(key, None)
        found.append((title, shown))
    found.append(("Other metrics", [Chart(key, ((key, key),)) for key in left]))
    if splits:
        found = [(title, [part for chart in charts for part in _split(chart)]) for title, charts in found]
    return [{"title": title, "charts": [chart.as_json() for chart in charts]} for title, charts in found if charts]


def _filled(chart: Chart, known: Sequence[str]) -> Chart:
    """The chart with the lines that there are."""
    lines: list[tuple[str, str]] = []
    for key, label in chart.lines:
        begin = key.removesuffix("*")
        if begin == key:
            lines += [(key, label)] * (key in known)
        else:
            names = [one for one in known if one.startswith(begin)]
            lines += [(one, f"{label} {one.removeprefix(begin)}".strip()) for one in names]
    return replace(chart, lines=tuple(lines))


def _split(chart: Chart) -> list[Chart]:
    """One chart for each metric, with its plan if it has one."""
    measured = [(key, label) for key, label in chart.lines if not key.startswith("plan:")]
    if len(measured) <= 2:
        return [chart]
    parts = []
    for key, label in measured:
        planned = [line for line in chart.lines if line[0] == f"plan:{key}"]
        parts.append(replace(chart, title=f"{chart.title}: {label}", lines=((key, label), *planned)))
    return parts
