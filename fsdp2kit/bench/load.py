"""Loading a model into shards: private memory beside the shards, and time against `from_pretrained` on every rank."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from fsdp2kit import distributed
from fsdp2kit.bench.figures import barrier, compare, positive, provenance, provenance_lines, slowest_rank, summary
from fsdp2kit.bench.memory import PrivateMemory, give_back_memory
from fsdp2kit.config import TrainingConfig
from fsdp2kit.distributed import World, gather_objects
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import build_model
from fsdp2kit.model.folder import INDEX_NAME
from fsdp2kit.model.weights import load_pretrained
from fsdp2kit.parallel.mesh import Mesh, build_mesh
from fsdp2kit.parallel.parallelize import parallelize_model
from fsdp2kit.torch_compat import local_slices

_MAX_LAYERS = 16


def bench_load(*, params: float, files: int, dtype: str, repeats: int) -> dict[str, Any]:
    """Write a random Llama-like model to a temporary folder and load it in both ways. Every rank calls this.

    fsdp2kit's way is all of build_model → parallelize_model → load_pretrained, which leaves float32 shards. Beside it
    stands `AutoModelForCausalLM.from_pretrained` of the whole model on every rank at once: in float32, the values that
    the shards hold; in the files' own dtype; and in float32 followed by `fully_shard`, which ends where ours does.
    Where no conversion is needed, the first two only map the files and read nothing: compare with the last.

    Args:
        params: parameters of the model, roughly.
        files: safetensors files.
        dtype: of the files.
        repeats: timed loads of each kind, interleaved, after one of each that is not timed.

    Raises:
        UserError: the ranks are on several machines, or the system tells no private memory.
    """
    world = distributed.start()
    if world.local_size != world.size:
        raise UserError("bench load", "the ranks are on several machines", "start it on one")
    if not sys.platform.startswith("linux"):
        raise UserError("bench load", "private memory is read from Linux's /proc", "run it on Linux")
    source = provenance(world)
    config = TrainingConfig(recipe="bench")
    mesh = build_mesh(config.mesh, config.fsdp, world=world)
    with _shared_folder(world) as folder:
        with distributed.agreement():
            if world.is_main:
                write_random_model(folder, config=llama_config(params), files=files, dtype=getattr(torch, dtype))
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})
        ways: dict[str, Callable[[], PreTrainedModel]] = {
            "fsdp2kit": lambda: _load_sharded(config, folder, mesh=mesh, world=world),
            "from_pretrained_float32": lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            "from_pretrained_own_dtype": lambda: AutoModelForCausalLM.from_pretrained(folder, dtype="auto"),
            "from_pretrained_fully_shard": lambda: _load_then_shard(folder, mesh=mesh.shard),
        }
        build_model(config.model)  # imports the model's code, which is no part of what is measured
        memory = {name: _peak_of(load) for name, load in ways.items()}
        equal = _same_values(ways["fsdp2kit"](), ways["from_pretrained_float32"]())
        seconds = _interleave(ways, repeats=repeats, device=world.device)
        model = ways["fsdp2kit"]()
    shards = sum(_local_bytes(tensor) for tensor in model.state_dict(keep_vars=True).values())
    return {
        "benchmark": "load",
        "options": {"params": params, "files": files, "dtype": dtype, "repeats": repeats},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "memory": _memory_result(memory, shards=shards, tensors=model, dtype=getattr(torch, dtype)),
        "time": {name: {**summary(values), "seconds": values} for name, values in seconds.items()},
        "compared_with": {
            name: compare(seconds["fsdp2kit"], values) for name, values in seconds.items() if name != "fsdp2kit"
        },
        "values_equal": all(gather_objects(equal)),
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


def _load_sharded(config: TrainingConfig, folder: Path, *, mesh: Mesh, world: World) -> PreTrainedModel:
    model = build_model(config.model)
    parallelize_model(model, config, mesh=mesh, device=world.device)
    load_pretrained(model, folder)
    return model


def _load_then_shard(folder: Path, *, mesh: DeviceMesh) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _peak_of(load: Callable[[], PreTrainedModel]) -> int:
    with PrivateMemory() as memory:
        model = load()
    del model
    return memory.peak


def _interleave(
    ways: dict[str, Callable[[], PreTrainedModel]], *, repeats: int, device: torch.device
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(repeats):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            give_back_memory()
            barrier(device)
            started = time.perf_counter()
            model = ways[name]()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds[name].append(time.perf_counter() - started)
            del model
    return {name: slowest_rank(values) for name, values in seconds.items()}


def _memory_result(
    peaks: dict[str, int], *, shards: int, tensors: PreTrainedModel, dtype: torch.dtype
) -> dict[str, Any]:
    largest = sorted((tensor.numel() for tensor in tensors.state_dict().values()), reverse=True)[:2]
    ranks = gather_objects((peaks, shards))
    bound = max(own for _, own in ranks) + sum(largest) * dtype.itemsize
    worst = {name: max(each[name] for each, _ in ranks) for name in peaks}
    return {
        "shard_bytes": max(own for _, own in ranks),
        "largest_tensor_bytes": [count * dtype.itemsize for count in largest],
        "bound_bytes": bound,
        "peak_private_bytes": worst,
        "peak_private_bytes_by_rank": [each["fsdp2kit"] for each, _ in ranks],
        "within_bound": worst["fsdp2kit"] <= bound,
    }


def _same_values(sharded: PreTrainedModel, whole: PreTrainedModel) -> bool:
    expected = whole.state_dict()
    return all(
        torch.equal(_local(tensor).cpu(), expected[name][local_slices(tensor)])
        for name, tensor in sharded.state_dict(keep_vars=True).items()
        if _local(tensor).numel()
    )


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _local_bytes(tensor: Any) -> int:
    return _local(tensor).numel() * tensor.dtype.itemsize


@contextmanager
def _shared_folder(world: World) -> Iterator[Path]:
    """A temporary folder of the main rank that all ranks of this machine know; gone afterwards."""
    owned = tempfile.TemporaryDirectory(prefix="fsdp2kit-bench-") if world.is_main else None
    try:
        yield Path(gather_objects(owned.name if owned else "")[0])
        barrier(world.device)
    finally:
        if owned:
            owned.cleanup()


def load_lines(result: dict[str, Any]) -> list[str]:
    """`bench_load`'s result for the console."""
    memory, options = result["memory"], result["options"]
    lines = [
        f"load: {result['parameters'] / 1e6:,.0f} M parameters, {options['files']} file(s) of {options['dtype']}",
        f"  private memory beside the start: peak {_mib(memory['peak_private_bytes']['fsdp2kit'])}, of which shards "
        f"{_mib(memory['shard_bytes'])}; allowed with two tensors: {_mib(memory['bound_bytes'])} "
        f"({'kept' if memory['within_bound'] else 'EXCEEDED'})",
    ]
    for name, figures in result["time"].items():
        lines.append(
            f"  {name:<28} median {figures['median_seconds']:.2f} s (quartiles {figures['p25_seconds']:.2f} – "
            f"{figures['p75_seconds']:.2f}), peak {_mib(memory['peak_private_bytes'][name])} a rank"
        )
    for name, figures in result["compared_with"].items():
        lines.append(
            f"  fsdp2kit ÷ {name}: {figures['ratio']:.2f} (95 % bootstrap interval {figures['ratio_low']:.2f} – "
            f"{figures['ratio_high']:.2f})"
        )
    return [
        *lines,
        f"  values {'equal' if result['values_equal'] else 'DIFFER'}",
        *provenance_lines(result["provenance"]),
    ]


def _mib(count: float) -> str:
    return f"{count / 2**20:,.0f} MiB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench.py load``."""
    parser.add_argument("--params", type=float, default=0.5, help="size of the random model, in 10^9 parameters (0.5)")
    parser.add_argument("--files", type=positive, default=1, help="safetensors files it is stored in (1)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="it is stored in")
    parser.add_argument("--repeats", type=positive, default=7, help="timed loads of each kind (7)")


def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Measure; returns the result and the lines of the console."""
    result = bench_load(params=options.params * 1e9, files=options.files, dtype=options.dtype, repeats=options.repeats)
    return result, load_lines(result)
