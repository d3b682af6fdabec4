"""Weights and checkpoints: loading into shards, saving beside training, converting to Hugging Face files.

Memory is the process's private memory above what it had before, also if the shards are on a device.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from fsdp2kit.bench.harness import (
    Task,
    give_back_memory,
    missing_packages,
    run_sides,
    speed,
    spread,
    take_turns,
    task_rows,
)
from fsdp2kit.bench.sides import bench_config
from fsdp2kit.checkpoint.checkpoints import Checkpoints
from fsdp2kit.checkpoint.from_hf import hf_to_dcp
from fsdp2kit.checkpoint.hf import dcp_to_hf
from fsdp2kit.config import TrainingConfig
from fsdp2kit.config.schema import CheckpointConfig, RunConfig
from fsdp2kit.errors import UserError
from fsdp2kit.files.local import sync_tree
from fsdp2kit.job import distributed
from fsdp2kit.job.distributed import World, gather_objects
from fsdp2kit.job.mesh import build_mesh
from fsdp2kit.job.progress import Progress
from fsdp2kit.parity.engine import Sharded


def bench_load(
    world: World,
    *,
    params: float = 0.5,
    files: int = 1,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    rounds: int = 7,
) -> dict[str, Any]:
    """Loading a random model in every way, in turns: memory beside the shards, and time. Every rank calls this.

    fsdp2kit's way leaves float32 shards. Beside it is `from_pretrained` of the whole model on every rank at once: in
    float32; in the files' own dtype; and in float32 followed by `fully_shard`, which ends where ours does. If no dtype
    is converted, the first two only map the files and read nothing: compare with the last.

    Args:
        params: size of the model, in 10^9 parameters.
        files: safetensors files it is stored in.
        dtype: it is stored in.
        rounds: timed loads of each kind.
    """
    if world.local_size != world.size:
        raise UserError("bench load", "the ranks are on several machines", "start it on one")
    with tempfile.TemporaryDirectory(prefix="fsdp2kit-bench-") as own:
        folder = Path(gather_objects(own)[0])
        with distributed.agreement():
            if world.is_main:
                write_random_model(folder, params * 1e9, files=files, dtype=getattr(torch, dtype))
        config = bench_config({"model": {"path": str(folder)}})
        mesh = build_mesh(config.mesh, config.fsdp, world=world)
        whole = partial(AutoModelForCausalLM.from_pretrained, folder)

        def load() -> Any:
            return Sharded(config, world=world, mesh=mesh).model

        def load_and_shard() -> None:
            model = whole(dtype=torch.float32)
            for module in (*model.model.layers, model):
                fully_shard(module, mesh=mesh.shard)

        sharded = load()  # imports the model's code, which is not measured
        tensors, expected = sharded.state_dict(), whole(dtype=torch.float32).state_dict()
        equal = [torch.equal(tensor.full_tensor().cpu(), expected[name]) for name, tensor in tensors.items()]
        shards = max(gather_objects(sum(tensor.to_local().nbytes for tensor in tensors.values())))
        stored = [tensor.numel() * getattr(torch, dtype).itemsize for tensor in tensors.values()]
        parameters, largest = sum(tensor.numel() for tensor in tensors.values()), sorted(stored)[-2:]
        del sharded, tensors, expected
        sides = {
            "fsdp2kit": Task(load),
            "from_pretrained_float32": Task(partial(whole, dtype=torch.float32)),
            "from_pretrained_own_dtype": Task(partial(whole, dtype="auto")),
            "from_pretrained_fully_shard": Task(load_and_shard),
        }
        rows = task_rows(run_sides(sides, rounds=rounds, warmup=1, world=world, memory_of=torch.device("cpu")))
    rows[0] |= {"shard_bytes": shards, "shards_and_two_tensors_bytes": shards + sum(largest)}
    return {"parameters": parameters, "rows": rows, "checks": {"values_equal": all(map(all, gather_objects(equal)))}}


def llama_config(params: float) -> PretrainedConfig:
    """A Llama of about ``params`` parameters: the narrowest with at most 16 layers, untied, vocabulary 32 × width."""
    widths = [64, 128, *range(256, 8192, 256)]
    # Embedding and head 64 · width²; a layer 10.5 · width² with a quarter of the heads for keys and values.
    width = next(w for w in widths if (params / w**2 - 64) / 10.5 <= 16 or w == widths[-1])
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


def write_random_model(folder: Path, params: float, *, files: int, dtype: torch.dtype) -> None:
    """Write a random model of about ``params`` parameters as a Hugging Face directory, in about ``files`` files."""
    model = AutoModelForCausalLM.from_config(llama_config(params), dtype=dtype)
    sizes = [parameter.nbytes for parameter in model.parameters()]
    model.save_pretrained(folder, max_shard_size=sum(sizes) // files + max(sizes))


def bench_save(world: World, *, params: float = 0.5, rounds: int = 3, tokens: int = 256) -> dict[str, Any]:
    """Saving a random model in both ways, in turns, each beside a step: how long training waits. Every rank calls it.

    In an asynchronous save, training waits in `save` for the save before and while tensors are listed. It waits again
    before the optimizer's next step until the copy is complete.

    Args:
        params: size of the model, in 10^9 parameters; AdamW's moments come on top.
        rounds: saves that count, of each kind.
        tokens: of a rank's batch, whose forward and backward hide the copy.
    """
    section = {"weights": "random", "attention": "sdpa", "config": llama_config(params * 1e9).to_diff_dict()}
    model = Sharded(bench_config({"model": section, "fsdp": {"param_dtype": "float32"}}), world=world).model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    positions = torch.arange(tokens, device=world.device)[None]
    inputs = positions % model.config.vocab_size
    waited: dict[str, list[float]] = {"synchronous": [], "asynchronous": []}

    with tempfile.TemporaryDirectory(prefix="fsdp2kit-bench-") as own:
        folder = Path(gather_objects(own)[0])
        kinds = {
            name: Checkpoints(
                TrainingConfig(
                    recipe="bench",
                    run=RunConfig(dir=str(folder / name)),
                    checkpoint=CheckpointConfig(keep=1, async_save=name == "asynchronous", export_hf="never"),
                ),
                model,
                optimizer,
                identity={},
                write_assets=lambda _: None,
                tell=lambda _: None,
            )
            for name in waited
        }

        def save(name: str) -> None:
            give_back_memory()
            gather_objects(None)  # all ranks begin together
            checkpoints, started = kinds[name], time.perf_counter()
            checkpoints.save(Progress(step=len(waited[name]) + 1))
            seconds = time.perf_counter() - started
            model.loss_sum(inputs, inputs.roll(-1), position_ids=positions).backward()
            started = time.perf_counter()
            checkpoints.wait_until_staged()
            waited[name].append(max(gather_objects(seconds + time.perf_counter() - started)))
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.finish()

        # The first of each does not count: buffers and state are made then.
        take_turns(waited, save, rounds + 1)
    rows = [{"training waits for a save": name, "seconds": spread(values[1:])} for name, values in waited.items()]
    rows[1]["shorter_by"] = speed(waited["asynchronous"][1:], waited["synchronous"][1:])
    return {"rows": rows}


def bench_convert(world: World, *, params: float = 0.5, rounds: int = 3) -> dict[str, Any]:
    """Converting a checkpoint to Hugging Face files in every way, in turns, in one process, beside copying its bytes.

    Time is that of the conversion alone, without imports, until everything is synced to the disk. It begins when
    nothing of an earlier one is left to be written.

    Args:
        params: size of the checkpoint, in 10^9 parameters of float32.
        rounds: conversions of each kind.
    """
    with tempfile.TemporaryDirectory(prefix="fsdp2kit-bench-") as folder:
        source, checkpoint, out = (Path(folder) / name for name in ("hf", "dcp", "out"))
        write_random_model(source, params * 1e9, files=4, dtype=torch.float32)
        hf_to_dcp(source, checkpoint)
        shutil.rmtree(source)
        ways: dict[str, Callable[[], object]] = {
            "dcp_to_hf": lambda: dcp_to_hf(checkpoint, out / "hf", dtype="float32", max_shard_bytes=1_000_000_000),
            "copy": lambda: shutil.copytree(checkpoint, out / "copy"),
            "dcp_to_torch_save": lambda: dcp_to_torch_save(checkpoint, out / "all.pt"),
        }
        if not missing_packages("accelerate"):
            from accelerate.utils import merge_fsdp_weights  # pyright: ignore[reportMissingImports]

            ways["merge_fsdp_weights"] = lambda: merge_fsdp_weights(str(checkpoint), str(out / "merged"))

        def synced(way: Callable[[], object]) -> None:
            way()
            sync_tree(out)

        @contextmanager
        def alone() -> Iterator[None]:
            os.sync()
            out.mkdir()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
            shutil.rmtree(out)

        sides = {name: Task(partial(synced, way), alone) for name, way in ways.items()}
        rows = task_rows(run_sides(sides, rounds=rounds, warmup=1, world=world, memory_of=torch.device("cpu")))
        stored = sum(path.stat().st_size for path in checkpoint.glob("*.distcp"))
    return {"rows": rows, "stored_bytes": stored}
