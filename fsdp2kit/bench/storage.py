"""Weights and checkpoints: loading into shards, saving beside training, converting to Hugging Face files.

Memory is private memory above what the process had before (`fsdp2kit.bench.memory`).
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from fsdp2kit import distributed
from fsdp2kit.bench.harness import (
    Command,
    Cost,
    barrier,
    cost_rows,
    option,
    provenance,
    shared_folder,
    slowest_rank,
    speed,
    spread,
    take_turns,
    time_in_turns,
)
from fsdp2kit.bench.memory import PrivateMemory, give_back_memory
from fsdp2kit.bench.ours import load_ours
from fsdp2kit.checkpoint.from_hf import hf_to_dcp
from fsdp2kit.checkpoint.hf import dcp_to_hf
from fsdp2kit.checkpoint.manager import CheckpointManager
from fsdp2kit.config import TrainingConfig
from fsdp2kit.config.schema import CheckpointConfig
from fsdp2kit.distributed import gather_objects
from fsdp2kit.errors import UserError
from fsdp2kit.files import CHUNK_BYTES, sync, sync_tree
from fsdp2kit.model.weights import INDEX_NAME
from fsdp2kit.parallel.mesh import build_mesh
from fsdp2kit.progress import Progress
from fsdp2kit.torch_compat import local_slices

_MAX_LAYERS = 16
_CONVERT_OVERHEAD_BYTES = 500_000_000


@dataclass(frozen=True)
class Load:
    """A random model, and how it is stored."""

    params: float = option(0.5, "size of the random model, in 10^9 parameters")
    files: int = option(1, "safetensors files it is stored in")
    dtype: str = option("bfloat16", "it is stored in (bfloat16)", choices=("float32", "bfloat16"))
    rounds: int = option(7, "timed loads of each kind")


def bench_load(options: Load) -> dict[str, Any]:
    """Write a random Llama-like model to a temporary folder and load it in turns in every way. Every rank calls this.

    fsdp2kit's way leaves float32 shards. Beside it stands `from_pretrained` of the whole model on every rank at once:
    in float32; in the files' own dtype; and in float32 followed by `fully_shard`, which ends where ours does. Where no
    conversion is needed, the first two only map the files and read nothing: compare with the last.

    Raises:
        UserError: the ranks are on several machines, or the system tells no private memory.
    """
    world = distributed.start()
    if world.local_size != world.size:
        raise UserError("bench load", "the ranks are on several machines", "start it on one")
    if not sys.platform.startswith("linux"):
        raise UserError("bench load", "private memory is read from Linux's /proc", "run it on Linux")
    source, dtype = provenance(world), getattr(torch, options.dtype)
    with shared_folder(world) as folder:
        with distributed.agreement():
            if world.is_main:
                write_random_model(folder, config=llama_config(options.params * 1e9), files=options.files, dtype=dtype)
        config = TrainingConfig.model_validate({"recipe": "bench", "model": {"path": str(folder)}})
        mesh = build_mesh(config.mesh, config.fsdp, world=world)
        whole = partial(AutoModelForCausalLM.from_pretrained, folder)
        ways: dict[str, Callable[[], PreTrainedModel]] = {
            "fsdp2kit": partial(load_ours, config, mesh=mesh),
            "from_pretrained_float32": partial(whole, dtype=torch.float32),
            "from_pretrained_own_dtype": partial(whole, dtype="auto"),
            "from_pretrained_fully_shard": lambda: _shard(whole(dtype=torch.float32), mesh=mesh.shard),
        }
        ways["fsdp2kit"]()  # imports the model's code, which is no part of what is measured
        peaks = {name: _peak_of(load) for name, load in ways.items()}
        sharded = ways["fsdp2kit"]()
        equal = _same_values(sharded, ways["from_pretrained_float32"]())
        costs = time_in_turns(ways, options.rounds, device=world.device, before=give_back_memory)
    # Only the costs are kept: a model that is still there would be counted in the next one's memory.
    rows = cost_rows(costs)
    ranks = gather_objects(peaks)
    for row in rows:
        row["peak_bytes"] = max(peak[row["name"]] for peak in ranks)
    tensors = sharded.state_dict(keep_vars=True).values()
    shards = max(gather_objects(sum(_local(tensor).numel() * tensor.dtype.itemsize for tensor in tensors)))
    largest = sorted((tensor.numel() * dtype.itemsize for tensor in tensors), reverse=True)[:2]
    bound = shards + sum(largest)
    return {
        "benchmark": "load",
        "options": asdict(options),
        "parameters": sum(parameter.numel() for parameter in sharded.parameters()),
        "rows": rows,
        "memory": {"shard_bytes": shards, "largest_tensor_bytes": largest, "bound_bytes": bound},
        "notes": [
            f"shards {shards / 2**20:,.0f} MiB; allowed with two tensors {bound / 2**20:,.0f} MiB: "
            f"{'kept' if rows[0]['peak_bytes'] <= bound else 'EXCEEDED'}"
        ],
        "checks": {"values_equal": all(gather_objects(equal))},
        "provenance": source,
    }


def llama_config(params: float) -> PretrainedConfig:
    """A Llama of about ``params`` parameters: the narrowest with at most 16 layers, untied, vocabulary 32 × width."""
    widths = [64, 128, *range(256, 8192, 256)]
    # Embedding and head 64 · width²; a layer 10.5 · width² with a quarter of the heads for keys and values.
    width = next(w for w in widths if (params / w**2 - 64) / 10.5 <= _MAX_LAYERS or w == widths[-1])
    return AutoConfig.for_model(
        "llama",
        hidden_size=width,
        intermediate_size=-(-8 * width // (3 * 32)) * 32,
        num_hidden_layers=max(1, round((params / width**2 - 64) / 10.5)),
        num_attention_heads=max(1, width // 64),
        num_key_value_heads=max(1, width // 256),
        vocab_size=32 * width,
        tie_word_embeddings=False,
    )


def write_random_model(folder: Path, *, config: PretrainedConfig, files: int, dtype: torch.dtype) -> None:
    """Write a Hugging Face directory with random weights, one file at a time, so that its writer stays small."""
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in AutoModelForCausalLM.from_config(config).state_dict().items()}
    config.architectures, config.dtype = ["LlamaForCausalLM"], dtype
    config.save_pretrained(folder)
    names, generator = list(shapes), torch.Generator().manual_seed(0)
    index: dict[str, str] = {}
    for number in range(files):
        file = "model.safetensors" if files == 1 else f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = names[number * len(names) // files : (number + 1) * len(names) // files]
        tensors = {name: torch.empty(shapes[name], dtype=dtype).normal_(0, 0.02, generator=generator) for name in part}
        save_file(tensors, str(folder / file), metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    if files > 1:
        total = sum(shape.numel() * dtype.itemsize for shape in shapes.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
        (folder / INDEX_NAME).write_text(text, encoding="utf-8")


def _shard(model: Any, *, mesh: Any) -> PreTrainedModel:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _peak_of(work: Callable[[], object]) -> int:
    with PrivateMemory() as memory:
        result = work()
    del result
    return memory.peak


def _same_values(sharded: PreTrainedModel, whole: PreTrainedModel) -> bool:
    expected = whole.state_dict()
    return all(
        torch.equal(_local(tensor).cpu(), expected[name][local_slices(tensor)])
        for name, tensor in sharded.state_dict(keep_vars=True).items()
        if _local(tensor).numel()
    )


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@dataclass(frozen=True)
class Save:
    """What is saved, and how often."""

    params: float = option(0.5, "size of the random model, in 10^9 parameters; AdamW's moments come on top")
    rounds: int = option(3, "saves that count, of each kind")
    tokens: int = option(256, "of a rank's batch: how long the forward and backward are that hide the copy")


def bench_save(options: Save) -> dict[str, Any]:
    """Save in turns in both ways, between steps of a random model. Every rank calls this.

    Asynchronously, training waits (``blocked``) in `save`, for the one before and while tensors are listed, and again
    before the optimizer's next step, for what of the copy is not yet made. The writer also competes for cores, which
    on a CPU shows in the step that runs beside it (``beside``, and ``quiet`` without).
    """
    world = distributed.start()
    source = provenance(world)
    hf_config = llama_config(options.params * 1e9)
    model: dict[str, Any] = {"weights": "random", "attention": "sdpa", "config": hf_config.to_diff_dict()}
    config = TrainingConfig.model_validate({"recipe": "bench", "model": model, "fsdp": {"param_dtype": "float32"}})
    trained: Any = load_ours(config, mesh=build_mesh(config.mesh, config.fsdp, world=world))
    trainer = _Trainer(trained, torch.arange(options.tokens, device=world.device)[None] % hf_config.vocab_size)
    taken: dict[str, list[float]] = {name: [] for name in ("sync", "blocked", "until_written", "quiet", "beside")}

    def save(name: str, work: Callable[[], Mapping[str, float]]) -> None:
        gc.collect()
        barrier(world.device)
        for part, seconds in work().items():
            taken[part].append(seconds)

    with shared_folder(world) as folder:
        managers = {name: _manager(folder / name, is_async=name == "async") for name in ("sync", "async")}
        works = {
            "quiet": trainer.quiet_step,
            "sync": partial(trainer.save_and_wait, managers["sync"]),
            "async": partial(trainer.save_beside_step, managers["async"]),
        }
        # The first of each does not count: buffers and state are made then.
        take_turns({name: partial(save, name, work) for name, work in works.items()}, options.rounds + 1)
    seconds = {name: slowest_rank(values[1:]) for name, values in taken.items()}
    ratio = speed(seconds["blocked"], seconds["sync"])
    share = 1 / ratio["ratio"]
    return {
        "benchmark": "save",
        "options": asdict(options),
        "parameters": sum(parameter.numel() for parameter in trained.parameters()),
        "rows": [{"name": name, "seconds": spread(values)} for name, values in seconds.items()],
        "sync_over_blocked": ratio,
        "notes": [
            f"asynchronously, training waits for {share:.1%} of a synchronous save ({1 / ratio['high']:.1%} – "
            f"{1 / ratio['low']:.1%}), allowed are 5 %: {'kept' if share <= 0.05 else 'EXCEEDED'}"
        ],
        "provenance": source,
    }


class _Trainer:
    """A model, AdamW, and one step apart into what comes before and after the optimizer may change anything."""

    def __init__(self, model: Any, tokens: Tensor) -> None:
        self.model, self._tokens, self._step = model, tokens, 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def quiet_step(self) -> dict[str, float]:
        started = time.perf_counter()
        self._backward()
        self._update()
        return {"quiet": time.perf_counter() - started}

    def save_and_wait(self, manager: CheckpointManager) -> dict[str, float]:
        started = time.perf_counter()
        self._save(manager)
        seconds = time.perf_counter() - started
        manager.finish()
        return {"sync": seconds}

    def save_beside_step(self, manager: CheckpointManager) -> dict[str, float]:
        started = time.perf_counter()
        self._save(manager)
        blocked = time.perf_counter() - started
        self._backward()
        waiting = time.perf_counter()
        manager.wait_until_staged()
        blocked += time.perf_counter() - waiting
        self._update()
        beside = time.perf_counter() - started - blocked
        manager.finish()
        return {"blocked": blocked, "until_written": time.perf_counter() - started, "beside": beside}

    def _save(self, manager: CheckpointManager) -> None:
        self._step += 1
        manager.save(self.model, self.optimizer, Progress(step=self._step))

    def _backward(self) -> None:
        positions = torch.arange(self._tokens.shape[1], device=self._tokens.device)[None]
        self.model.loss_sum(self._tokens, self._tokens.roll(-1), position_ids=positions).backward()

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def _manager(folder: Path, *, is_async: bool) -> CheckpointManager:
    section = CheckpointConfig(keep=1, async_save=is_async, export_hf="never")
    return CheckpointManager(section, run_dir=folder, identity={}, write_assets=lambda _: None)


@dataclass(frozen=True)
class Convert:
    """Which checkpoints are converted, into files of which size."""

    params: tuple[float, ...] = option((0.5, 1.5), "in 10^9 parameters, in float32 (0.5 1.5)", type=float, nargs="+")
    shard_gb: float = option(1.0, "largest file, in 10^9 bytes")
    rounds: int = option(3, "conversions of each kind")
    folder: str | None = option(None, "where to write three times the largest checkpoint (the temporary folder)")


def bench_convert(options: Convert) -> dict[str, Any]:
    """Convert each checkpoint in every way, in turns, on one process, beside copying its bytes.

    Time is of the conversion alone, imports aside, with everything it wrote synced to the disk, and nothing of an
    earlier one left to be written.
    """
    world = distributed.start()
    source, rows, notes = provenance(world), [], []
    allowed = int(options.shard_gb * 1e9) + _CONVERT_OVERHEAD_BYTES
    for params in options.params:
        with shared_folder(world, Path(options.folder) if options.folder else None) as folder:
            found = _convert_one(params * 1e9, folder, options)
        ours, copy = found[0], found[1]
        rows += found
        kept = ours["peak_bytes"] <= allowed and ours["seconds"]["median"] <= 2 * copy["seconds"]["median"]
        notes.append(
            f"{params:g}e9: allowed are one file and 500 MB ({allowed / 2**20:,.0f} MiB), and twice the copy's time: "
            f"{'kept' if kept else 'EXCEEDED'}"
        )
    return {"benchmark": "convert", "options": asdict(options), "rows": rows, "notes": notes, "provenance": source}


def _convert_one(params: float, folder: Path, options: Convert) -> list[dict[str, Any]]:
    write_random_model(folder / "hf", config=llama_config(params), files=4, dtype=torch.float32)
    checkpoint, out = folder / "dcp", folder / "out"
    hf_to_dcp(folder / "hf", checkpoint)
    shutil.rmtree(folder / "hf")
    shard_bytes = int(options.shard_gb * 1e9)
    ways: dict[str, Callable[[], object]] = {
        "fsdp2kit": lambda: dcp_to_hf(checkpoint, out, dtype="float32", max_shard_bytes=shard_bytes),
        "copy": lambda: _copy(checkpoint, out),
        "dcp_to_torch_save": lambda: _torch_save(checkpoint, out),
    }
    if importlib.util.find_spec("accelerate"):
        ways["merge_fsdp_weights"] = lambda: _merge(checkpoint, out)
    _copy(checkpoint, out)  # so that each finds the files in the cache as the next does
    shutil.rmtree(out)
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    peaks: dict[str, int] = dict.fromkeys(ways, 0)

    def convert(name: str) -> None:
        os.sync()
        with PrivateMemory() as memory, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            started, cpu_started = time.perf_counter(), time.process_time()
            ways[name]()
            costs[name].append(Cost(time.perf_counter() - started, time.process_time() - cpu_started))
        peaks[name] = max(peaks[name], memory.peak)
        shutil.rmtree(out)

    take_turns({name: partial(convert, name) for name in ways}, options.rounds)
    stored = sum(path.stat().st_size for path in checkpoint.glob("*.distcp"))
    return [{**row, "stored_bytes": stored, "peak_bytes": peaks[row["name"]]} for row in cost_rows(costs)]


def _copy(checkpoint: Path, out: Path) -> None:
    out.mkdir()
    for path in checkpoint.glob("*.distcp"):
        with path.open("rb") as source, (out / path.name).open("wb") as target:
            shutil.copyfileobj(source, target, CHUNK_BYTES)
        sync(out / path.name)


def _torch_save(checkpoint: Path, out: Path) -> None:
    out.mkdir()
    dcp_to_torch_save(checkpoint, out / "all.pt")
    sync_tree(out)


def _merge(checkpoint: Path, out: Path) -> None:
    from accelerate.utils import merge_fsdp_weights  # pyright: ignore[reportMissingImports]

    out.mkdir()
    merge_fsdp_weights(str(checkpoint), str(out))
    sync_tree(out)


COMMANDS = {
    "load": Command(Load, bench_load),
    "save": Command(Save, bench_save),
    "convert": Command(Convert, bench_convert),
}
