"""Measure fsdp2kit: steps, loading, context parallelism, speeds on one GPU; beside what users would do instead.

torchrun --nproc-per-node 2 tools/bench.py step --model DIR --data chat.jsonl [--dtype bfloat16] [--cp 2]
torchrun --nproc-per-node 2 tools/bench.py load --params 0.5 --files 1 --dtype bfloat16
torchrun --nproc-per-node 2 tools/bench.py context-parallel --model DIR [--seq-len 4096] [--pairs 10] [--layers 6]
torchrun --nproc-per-node 2 tools/bench.py save --params 0.5
python tools/bench.py convert [--params 0.5 1.5]
python tools/bench.py checkpointing [--seq-len 2048] [--layers 4]
python tools/bench.py vocabulary [--vocabulary 128256] [--tokens 16384] [--whole]
python tools/bench.py ring [--device cpu --dry-run]
python tools/bench.py data --model DIR --data chat.jsonl [--chat-template FILE]
python tools/bench.py gpu [--device cpu --dry-run]
python tools/bench.py curves RUN_DIR [RUN_DIR ...] [--reference NAME] [--picture FILE.png]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Set before transformers is imported: a benchmark never waits for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from fsdp2kit.errors import UserError

Result = tuple[dict[str, Any], list[str]]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 where a comparison is void, 2 after a user's mistake."""
    options = _parse(arguments)
    if getattr(options, "device", None) == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks
    from fsdp2kit import distributed

    run: Callable[[argparse.Namespace], Result] = options.run
    try:
        result, lines = run(options)
    except UserError as problem:
        distributed.leave(problem)
    if int(os.environ.get("RANK", "0")) == 0:
        if options.out is not None:
            options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(json.dumps(result) if options.json else "\n".join(lines))
    distributed.stop()
    return 0 if result.get("losses_agree", True) and result.get("values_equal", True) else 1


def _step(options: argparse.Namespace) -> Result:
    from fsdp2kit.bench.step import StepOptions, bench_step, step_lines

    result = bench_step(
        StepOptions(
            model=options.model,
            data=options.data,
            pairs=options.pairs,
            warmup=options.warmup,
            seq_len=options.seq_len,
            global_batch=options.global_batch,
            micro_batch=options.micro_batch,
            dtype=options.dtype,
            cp=options.cp,
        )
    )
    return result, step_lines(result)


def _load(options: argparse.Namespace) -> Result:
    from fsdp2kit.bench.load import bench_load, load_lines

    result = bench_load(params=options.params * 1e9, files=options.files, dtype=options.dtype, repeats=options.repeats)
    return result, load_lines(result)


def _save(options: argparse.Namespace) -> Result:
    from fsdp2kit.bench.save import Options, bench_save, save_lines

    result = bench_save(Options(params=options.params * 1e9, pairs=options.pairs, tokens=options.tokens))
    return result, save_lines(result)


def _convert(options: argparse.Namespace) -> Result:
    from fsdp2kit.bench.convert import Options, bench_convert, convert_lines

    params = [size * 1e9 for size in options.params]
    result = bench_convert(Options(params, shard_bytes=int(options.shard_gb * 1e9), folder=options.folder))
    return result, convert_lines(result)


def _context_parallel(options: argparse.Namespace) -> Result:
    from fsdp2kit.bench.context_parallel import Options, bench_context_parallel, context_parallel_lines

    result = bench_context_parallel(
        Options(
            model=options.model,
            seq_len=options.seq_len,
            pairs=options.pairs,
            warmup=options.warmup,
            layers=options.layers,
            dtype=options.dtype,
        )
    )
    return result, context_parallel_lines(result)


def _checkpointing(options: argparse.Namespace) -> Result:
    from fsdp2kit.bench.checkpointing import Options, bench_checkpointing, checkpointing_lines

    result = bench_checkpointing(Options(seq_len=options.seq_len, layers=options.layers, pairs=options.pairs))
    return result, checkpointing_lines(result)


def _vocabulary(options: argparse.Namespace) -> Result:
    from fsdp2kit.bench.vocabulary import Options, bench_vocabulary, vocabulary_lines

    result = bench_vocabulary(Options(options.vocabulary, options.tokens, options.hidden, options.whole))
    return result, vocabulary_lines(result)


def _ring(options: argparse.Namespace) -> Result:
    from fsdp2kit.bench.ring import Options, bench_ring, ring_lines

    result = bench_ring(Options(dry_run=options.dry_run))
    return result, ring_lines(result)


def _data(options: argparse.Namespace) -> Result:
    from fsdp2kit.bench.data import DataOptions, bench_data, data_lines

    result = bench_data(
        DataOptions(
            model=options.model,
            data=options.data,
            chat_template=options.chat_template,
            seq_len=options.seq_len,
            repeats=options.repeats,
        )
    )
    return result, data_lines(result)


def _gpu(options: argparse.Namespace) -> Result:
    from fsdp2kit.bench.gpu import bench_gpu, gpu_lines

    result = bench_gpu(dry_run=options.dry_run, attention=options.attention, max_minutes=options.max_minutes)
    return result, gpu_lines(result)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__.splitlines()[0])
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print the result as one JSON object")
    common.add_argument("--out", type=Path, metavar="FILE", help="also write that object to a file")
    commands = parser.add_subparsers(
        required=True,
        metavar="step | load | save | convert | context-parallel | checkpointing | vocabulary | ring | data | gpu"
        " | curves",
    )

    step = commands.add_parser("step", parents=[common], help="a step against a hand-written FSDP2 loop")
    step.set_defaults(run=_step)
    step.add_argument("--model", required=True, metavar="DIR", help="a Hugging Face directory")
    step.add_argument("--data", required=True, metavar="FILE", help="conversations (format chat)")
    step.add_argument("--pairs", type=_positive, default=60, help="pairs of steps that count (60)")
    step.add_argument("--warmup", type=_positive, default=3, help="pairs before those (3)")
    step.add_argument("--seq-len", type=_positive, default=512, help="tokens a row (512)")
    step.add_argument("--global-batch", type=_positive, default=2, help="rows a step, over all ranks (2)")
    step.add_argument("--micro-batch", type=_positive, default=1, help="rows a forward pass (1)")
    step.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the computation")
    step.add_argument("--cp", type=_positive, default=1, help="context-parallel ranks on fsdp2kit's side (1)")

    load = commands.add_parser("load", parents=[common], help="loading: memory beside the shards, and time")
    load.set_defaults(run=_load)
    load.add_argument("--params", type=float, default=0.5, help="size of the random model, in 10^9 parameters (0.5)")
    load.add_argument("--files", type=_positive, default=1, help="safetensors files it is stored in (1)")
    load.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="it is stored in")
    load.add_argument("--repeats", type=_positive, default=7, help="timed loads of each kind (7)")

    save = commands.add_parser("save", parents=[common], help="saving: how long training waits, in both ways")
    save.set_defaults(run=_save)
    save.add_argument("--params", type=float, default=0.5, help="size of the random model, in 10^9 parameters (0.5)")
    save.add_argument("--pairs", type=_positive, default=3, help="saves that count, of each kind (3)")
    save.add_argument("--tokens", type=_positive, default=256, help="tokens of a rank's batch (256)")

    convert = commands.add_parser("convert", parents=[common], help="DCP to Hugging Face: memory and time")
    convert.set_defaults(run=_convert)
    convert.add_argument("--params", type=float, nargs="+", default=[0.5, 1.5], help="in 10^9 parameters (0.5 1.5)")
    convert.add_argument("--shard-gb", type=float, default=1.0, help="largest file, in 10^9 bytes (1)")
    convert.add_argument("--folder", type=Path, default=None, help="where to write (the temporary folder)")

    cp = commands.add_parser("context-parallel", parents=[common], help="its memory, its traffic, its time")
    cp.set_defaults(run=_context_parallel)
    cp.add_argument("--model", required=True, metavar="DIR", help="a Hugging Face directory; weights are random")
    cp.add_argument("--seq-len", type=_positive, default=4096, help="tokens a sequence (4096)")
    cp.add_argument("--pairs", type=_positive, default=10, help="rounds that count, each of all four ways (10)")
    cp.add_argument("--warmup", type=_positive, default=1, help="rounds before those (1)")
    cp.add_argument("--layers", type=_positive, default=None, help="of the model's layers, so many (all)")
    cp.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the computation")

    recompute = commands.add_parser("checkpointing", parents=[common], help="what it saves, and costs")
    recompute.set_defaults(run=_checkpointing)
    recompute.add_argument("--seq-len", type=_positive, default=2048, help="tokens of the one sequence (2048)")
    recompute.add_argument("--layers", type=_positive, default=4, help="decoder layers (4)")
    recompute.add_argument("--pairs", type=_positive, default=10, help="steps that count, of each mode (10)")

    words = commands.add_parser("vocabulary", parents=[common], help="memory of the loss at a large vocabulary")
    words.set_defaults(run=_vocabulary)
    words.add_argument("--vocabulary", type=_positive, default=128_256, help="words (128256)")
    words.add_argument("--tokens", type=_positive, default=16_384, help="with a target (16384)")
    words.add_argument("--hidden", type=_positive, default=64, help="size of a hidden state (64)")
    words.add_argument("--whole", action="store_true", help="also cross-entropy on whole logits: 16.8 GB by default")

    ring = commands.add_parser("ring", parents=[common], help="a ring's blocks over the fused kernel, on one device")
    ring.set_defaults(run=_ring)
    ring.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only with --dry-run")
    ring.add_argument("--dry-run", action="store_true", help="tiny shapes: does it run at all?")

    data = commands.add_parser("data", parents=[common], help="tokenise and pack, against datasets.map and trl")
    data.set_defaults(run=_data)
    data.add_argument("--model", required=True, metavar="DIR", help="directory of the tokenizer")
    data.add_argument("--data", required=True, metavar="FILE", help="conversations, JSONL with `messages`")
    data.add_argument("--chat-template", metavar="FILE", help="instead of the tokenizer's own")
    data.add_argument("--seq-len", type=_positive, default=2048, help="tokens a row (2048)")
    data.add_argument("--repeats", type=_positive, default=7, help="timed runs of each side (7)")

    from fsdp2kit.bench import curves

    runs = commands.add_parser("curves", parents=[common], help="finished runs side by side, from their directories")
    runs.set_defaults(run=curves.run)
    curves.add_arguments(runs)

    gpu = commands.add_parser("gpu", parents=[common], help="step time, MFU and memory on one device")
    gpu.set_defaults(run=_gpu)
    gpu.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only with --dry-run")
    gpu.add_argument("--dry-run", action="store_true", help="tiny shapes, 2 steps: does it run at all?")
    gpu.add_argument("--attention", default="sdpa", help="a transformers attention implementation (sdpa)")
    gpu.add_argument("--max-minutes", type=float, default=6.5, help="start no further variant after this long (6.5)")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


if __name__ == "__main__":
    sys.exit(main())
