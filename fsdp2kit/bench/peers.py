"""fsdp2kit beside what users would pick instead: the same model and conversations, as a table and a figure.

This starts processes of its own: every side alone for a few steps, for its memory, then fsdp2kit and each of the
others in turns, in pairs, since all of them together would want the memory of a large machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fsdp2kit.bench.figures import compare, provenance_lines, summary
from fsdp2kit.bench.sides import Workload, missing_packages
from fsdp2kit.errors import RunFailure, UserError

PAIRS: dict[str, tuple[str, str]] = {
    "handwritten": ("fsdp2kit", "handwritten"),
    "trl": ("fsdp2kit", "trl"),
    "trl_without_ac": ("fsdp2kit", "trl_without_ac"),
    "trl_padded": ("fsdp2kit", "trl_padded"),
    "hf_trainer_padded": ("fsdp2kit", "hf_trainer_padded"),
    "hf_trainer_longest": ("fsdp2kit", "hf_trainer_longest"),
    "equal_padding": ("fsdp2kit_padded", "hf_trainer_padded"),
}
"""Comparisons: a side of ours, and the other."""

SAME_BATCHES = {"handwritten", "equal_padding"}
"""Comparisons whose sides see the same batches, so that their losses must agree."""

_LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}
_ALONE_STEPS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench.py peers``."""
    parser.add_argument("--model", required=True, metavar="DIR", help="a Hugging Face directory")
    parser.add_argument("--data", required=True, metavar="FILE", help="conversations (format chat)")
    parser.add_argument("--peers", nargs="+", choices=PAIRS, default=list(PAIRS), help="whom to compare with (all)")
    parser.add_argument("--nproc", type=int, default=2, help="ranks (2)")
    parser.add_argument("--rounds", type=int, default=60, help="rounds that count, a step of each side (60)")
    parser.add_argument("--warmup", type=int, default=3, help="rounds before those (3)")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens a row (512)")
    parser.add_argument("--global-batch", type=int, default=2, help="rows a step, over all ranks (2)")
    parser.add_argument("--micro-batch", type=int, default=1, help="rows a forward pass (1)")
    parser.add_argument("--conversations", type=int, default=3, help="a rank, where padded to the longest (3)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of compute (bfloat16)")
    parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks on fsdp2kit's side (1)")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of fsdp2kit's config")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the Markdown table to a file")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw a PNG (extra: plot)")


def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Run the comparison; returns the result and the lines of the console.

    Raises:
        UserError: a number that cannot be, or matplotlib is missing.
        SystemExit: a process of a contest failed, and said why.
    """
    for name in ("nproc", "rounds", "warmup", "seq_len", "global_batch", "micro_batch", "conversations", "cp"):
        if getattr(options, name) < 1:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(flag, f"{getattr(options, name)} is not a positive number", "use 1 or more")
    if options.figure:
        _pyplot()
    workload = Workload(
        model=options.model,
        data=options.data,
        steps=options.warmup + options.rounds,
        seq_len=options.seq_len,
        global_batch=options.global_batch,
        micro_batch=options.micro_batch,
        conversations=options.conversations,
        dtype=options.dtype,
        cp=options.cp,
        overrides=tuple(options.set),
    )
    needs = {name: missing_packages(PAIRS[name][1]) for name in options.peers}
    left_out = {name: packages for name, packages in needs.items() if packages}
    if len(left_out) == len(options.peers):
        missing = sorted({package for packages in left_out.values() for package in packages})
        raise UserError(
            "--peers", f"none of these can run without {', '.join(missing)}", f"pip install {' '.join(missing)}"
        )
    names = [name for name in options.peers if name not in left_out]
    alone = Workload(**{**asdict(workload), "steps": _ALONE_STEPS})
    peaks = {
        side: _contest([side], alone, warmup=1, nproc=options.nproc)["sides"][side]["peak_bytes"]
        for side in dict.fromkeys(side for name in names for side in PAIRS[name])
    }
    result = {
        "benchmark": "peers",
        "workload": asdict(workload),
        "nproc": options.nproc,
        "pairs": [],
        "left_out": left_out,
        "losses_agree": True,
    }
    for name in names:
        pair = _compare(name, workload, peaks, warmup=options.warmup, nproc=options.nproc)
        result["pairs"].append(pair)
        result["losses_agree"] &= pair["losses_agree"] is not False
        # After every pair: a comparison takes a quarter of an hour, and the next may be killed.
        if options.table:
            options.table.write_text("\n".join(peers_lines(result)) + "\n", encoding="utf-8")
        if options.figure:
            draw(result, options.figure)
        print(_row(pair), file=sys.stderr, flush=True)
    return result, peers_lines(result)


def _compare(pair: str, workload: Workload, peaks: dict[str, int], *, warmup: int, nproc: int) -> dict[str, Any]:
    ours, other = PAIRS[pair]
    contest = _contest([ours, other], workload, warmup=warmup, nproc=nproc)
    sides = contest["sides"]
    for name, side in sides.items():
        side |= {"name": name, "peak_bytes": peaks[name], **summary(side["seconds"])}
        side["supervised_tokens_per_second"] = float(np.mean(side["supervised_tokens"])) / side["median_seconds"]
    tolerance = _LOSS_TOLERANCE[workload.dtype] if pair in SAME_BATCHES else None
    return {
        "name": pair,
        "ours": sides[ours],
        "other": sides[other],
        **against(sides[ours], sides[other]),
        **_losses(sides[ours], sides[other], tolerance=tolerance),
        "provenance": contest["provenance"],
    }


def against(ours: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Ratios of our side to another: supervised tokens a second, the same of CPU time (`compare`), and peak memory."""
    work = other["supervised_tokens"], ours["supervised_tokens"]
    speed = compare(other["seconds"], ours["seconds"], work=work)
    return {
        **{f"speed_{name}": figure for name, figure in speed.items()},
        "cpu_speed_ratio": compare(other["cpu_seconds"], ours["cpu_seconds"], work=work)["ratio"],
        "memory_ratio": ours["peak_bytes"] / other["peak_bytes"],
    }


def _losses(ours: dict[str, Any], other: dict[str, Any], *, tolerance: float | None) -> dict[str, Any]:
    """How far apart the losses are at any step, relatively; None and None where the batches are not the same."""
    if tolerance is None:
        return {"loss_difference": None, "losses_agree": None}
    worst = max(abs(a - b) / abs(b) for a, b in zip(ours["losses"], other["losses"], strict=True))
    return {"loss_difference": worst, "losses_agree": worst <= tolerance}


def _contest(names: Sequence[str], workload: Workload, *, warmup: int, nproc: int) -> dict[str, Any]:
    """`run_contest` in ``nproc`` processes that this one starts."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "contest.json"
        order = {"names": list(names), "workload": asdict(workload), "warmup": warmup}
        file.write_text(json.dumps(order), encoding="utf-8")
        _start([sys.executable, "-m", "fsdp2kit.bench.contest", str(file)], nproc=nproc)
        result = json.loads(file.read_text(encoding="utf-8"))
    result["provenance"]["command"] = shlex.join(["python", *sys.argv])
    return result


def _start(command: list[str], *, nproc: int) -> None:
    """Run a command as ``nproc`` ranks of one job on this machine; where one fails, the others are ended.

    torchrun would do, but puts a page of its own around a user's mistake.

    Raises:
        SystemExit: with the exit code of one that failed, which has said why.
        RunFailure: a rank was killed.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    job = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    job |= {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc)}
    ranks = [
        subprocess.Popen(command, env={**job, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(nproc)
    ]
    try:
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            time.sleep(0.1)
        failed = [rank.returncode for rank in ranks if rank.poll()]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.terminate()
            rank.wait()
    if failed and failed[0] < 0:
        raise RunFailure(f"a rank was ended by signal {-failed[0]} (memory?) in: {' '.join(command)}")
    if failed:
        raise SystemExit(failed[0])


def peers_lines(result: dict[str, Any]) -> list[str]:
    """The result as Markdown: a table, what each side really ran, and where it comes from."""
    workload = result["workload"]
    lines = [
        f"{workload['dtype']}, {result['nproc']} ranks, rows of {workload['seq_len']} tokens, "
        f"{workload['global_batch']} a step. In each cell: fsdp2kit, the other; a step is the median (quartiles).",
        "",
        "| beside | fsdp2kit's speed ÷ its (95 %) | by CPU time | supervised tokens/s | a step | peak memory a rank | "
        "fsdp2kit's ÷ its | losses agree |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [_row(pair) for pair in result["pairs"]]
    sides = {side["name"]: side["ran"] for pair in result["pairs"] for side in (pair["ours"], pair["other"])}
    lines += ["", *(f"- {name} ran {ran}" for name, ran in sides.items())]
    lines += [f"- left out: {name} needs {', '.join(needs)}" for name, needs in result["left_out"].items()]
    if result["pairs"]:
        lines += ["", *provenance_lines(result["pairs"][0]["provenance"])]
    return lines


def _row(pair: dict[str, Any]) -> str:
    sides = pair["ours"], pair["other"]
    cells = [
        _named(pair),
        f"**{pair['speed_ratio']:.2f}** ({pair['speed_ratio_low']:.2f} – {pair['speed_ratio_high']:.2f})",
        f"{pair['cpu_speed_ratio']:.2f}",
        ", ".join(f"{side['supervised_tokens_per_second']:,.0f}" for side in sides),
        ", ".join(
            f"{side['median_seconds']:.2f} s ({side['p25_seconds']:.2f} – {side['p75_seconds']:.2f})" for side in sides
        ),
        ", ".join(f"{side['peak_bytes'] / 2**20:,.0f}" for side in sides) + " MiB",
        f"{pair['memory_ratio']:.2f}",
        _agreement(pair),
    ]
    return f"| {' | '.join(cells)} |"


def _named(pair: dict[str, Any]) -> str:
    """The comparison's name, and its sides where that does not tell them."""
    sides = pair["ours"]["name"], pair["other"]["name"]
    return pair["name"] if sides == ("fsdp2kit", pair["name"]) else f"{pair['name']} ({', '.join(sides)})"


def _agreement(pair: dict[str, Any]) -> str:
    if pair["losses_agree"] is None:
        return "other batches"
    return f"{'yes' if pair['losses_agree'] else 'NO, void'}: differ by {pair['loss_difference']:.1e} at most"


def draw(result: dict[str, Any], file: Path) -> None:
    """Bars of speed and peak memory of each pair, as a PNG."""
    names = [pair["name"] for pair in result["pairs"]]
    places = np.arange(len(names))
    figure, (left, right) = _pyplot().subplots(1, 2, figsize=(9, 1 + 0.7 * len(names)), sharey=True)
    for key, color, offset, label in (("ours", "tab:blue", -0.2, "fsdp2kit"), ("other", "tab:gray", 0.2, "the other")):
        sides = [pair[key] for pair in result["pairs"]]
        speeds = [side["supervised_tokens_per_second"] for side in sides]
        left.barh(places + offset, speeds, height=0.38, color=color, label=label)
        right.barh(places + offset, [side["peak_bytes"] / 2**30 for side in sides], height=0.38, color=color)
    left.set_yticks(places, names)
    left.set_xlabel("supervised tokens/s")
    right.set_xlabel("peak memory a rank (GiB)")
    left.invert_yaxis()
    left.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    _pyplot().close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise UserError("--figure", "needs matplotlib", "install it: pip install 'fsdp2kit[plot]'") from None
    return pyplot
