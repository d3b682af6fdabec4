"""Steps of fsdp2kit and of another loop on the same global batches, as one result: durations, ratios, agreement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdp2kit.bench.contest import Course
from fsdp2kit.bench.figures import compare, summary


def pair_result(ours: Course, theirs: Course, other: str, *, skip: int, tolerance: float) -> dict[str, Any]:
    """Durations of the slowest rank, their ratio with its interval, speeds, the losses' agreement. Collective.

    Args:
        other: what to call the other side.
        skip: steps at the start that do not count.
        tolerance: the largest relative difference of losses, over all steps, that is called agreement.
    """
    figures = {"fsdp2kit": ours.figures(skip=skip), other: theirs.figures(skip=skip)}
    first, second = figures["fsdp2kit"], figures[other]
    difference = _worst(first["losses"], second["losses"])
    tokens = sum(first["input_tokens"]) / len(first["seconds"])
    sides = {}
    for name, side in figures.items():
        durations = summary(side["seconds"])
        speed = tokens / durations["median_seconds"]
        sides[name] = {**durations, "tokens_per_second": speed, "seconds": side["seconds"]}
    return {
        **compare(first["seconds"], second["seconds"]),
        "cpu_time": compare(first["cpu_seconds"], second["cpu_seconds"]),
        **sides,
        "tokens_per_step": tokens,
        "loss_first": first["losses"][0],
        "loss_last": first["losses"][-1],
        "loss_max_relative_difference": difference,
        "grad_norm_max_relative_difference": _worst(first["grad_norms"], second["grad_norms"]),
        "losses_agree": difference <= tolerance,
    }


def pairs_lines(result: dict[str, Any], other: str) -> list[str]:
    """`pair_result` for the console."""
    lines = []
    for name in (other, "fsdp2kit"):
        side = result[name]
        lines.append(
            f"  {name:<12} median {side['median_seconds']:.3f} s (quartiles {side['p25_seconds']:.3f} – "
            f"{side['p75_seconds']:.3f}), {side['tokens_per_second']:,.0f} tokens/s"
        )
    cpu = result["cpu_time"]
    agree = "agree" if result["losses_agree"] else "DISAGREE: the comparison is void"
    return [
        *lines,
        f"  fsdp2kit ÷ {other}: {result['ratio']:.3f} (95 % bootstrap interval {result['ratio_low']:.3f} – "
        f"{result['ratio_high']:.3f}); by the processes' CPU time {cpu['ratio']:.3f} ({cpu['ratio_low']:.3f} – "
        f"{cpu['ratio_high']:.3f})",
        f"  losses {agree}: largest relative difference {result['loss_max_relative_difference']:.1e} at any step "
        f"({result['loss_first']:.4f} → {result['loss_last']:.4f}); of the gradient norms "
        f"{result['grad_norm_max_relative_difference']:.1e}",
    ]


def _worst(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
