"""A tiny model, its training, and what the checkpoint tests do on every rank of a gloo group."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
)

from fsdp2kit.checkpoint import export_directory
from fsdp2kit.checkpoint.checkpoints import Checkpoints
from fsdp2kit.checkpoint.manifest import verify
from fsdp2kit.checkpoint.state import load_weights, model_tensors, optimizer_tensors, persistent_buffers
from fsdp2kit.config import TrainingConfig
from fsdp2kit.config.schema import CheckpointConfig, EvalConfig, RunConfig
from fsdp2kit.errors import RunFailure, StorageFailure, UserError
from fsdp2kit.job.progress import Progress

IDENTITY = {"model": "tiny", "optimizer": "adamw", "run.seed": "0", "data.seq_len": "12"}
VOCAB = 97  # prime, so that no world size divides it


def tiny_llama(*, seed: int = 0, tied: bool = True, hidden: int = 16) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def sharded(model: LlamaForCausalLM, *, replicate: int = 1) -> LlamaForCausalLM:
    size = dist.get_world_size()
    if replicate == 1:
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    else:
        mesh = init_device_mesh("cpu", (replicate, size // replicate), mesh_dim_names=("replicate", "shard"))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def adamw(model: nn.Module, *, lr: float = 1e-2) -> torch.optim.AdamW:
    """AdamW over two groups: matrices with weight decay, the rest without."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """One step for each index, on a batch that depends on the index alone and is the same on every rank."""
    for index in steps:
        ids = torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(index))
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def progress_at(step: int) -> Progress:
    return Progress(step=step, tokens_total=20 * step, input_tokens_total=24 * step, wandb_id="x1")


def write_assets(directory: Path) -> None:
    tiny_llama().config.save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("{{ messages }}")


def disk_is_full(directory: Path) -> None:
    """Assets that cannot be written."""
    raise OSError(28, "No space left on device")


def checkpoints_of(
    run_dir: Path,
    model: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    identity: dict[str, str] | None = None,
    write_assets: Callable[[Path], None] = write_assets,
    keep_best: bool = False,
    **section: Any,
) -> Checkpoints:
    """The checkpoints of a run, by default of an untrained model with AdamW."""
    model = tiny_llama() if model is None else model
    config = TrainingConfig(
        recipe="test",
        run=RunConfig(dir=str(run_dir)),
        eval=EvalConfig(keep_best=keep_best),
        checkpoint=CheckpointConfig(**{"export_dtype": "bfloat16", **section}),
    )
    optimizer = optimizer or adamw(model)
    identity = dict(identity or IDENTITY)  # a copy: a test may change what its checkpoints say
    return Checkpoints(config, model, optimizer, identity=identity, write_assets=write_assets)


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, np.ndarray]:
    """Every tensor of the training state, whole, as it would be on one process."""

    def whole(tensor: Tensor) -> np.ndarray:
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.float()  # numpy has none; float32 holds the same value
        return tensor.numpy(force=True).copy()

    named = model_tensors(model) | persistent_buffers(model) | optimizer_tensors(model, optimizer)
    return {name: whole(tensor) for name, tensor in named.items()}


def exported(directory: Path) -> dict[str, Tensor]:
    """The tensors of a Hugging Face directory, by name."""
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """In names, dtypes and every bit."""
    assert {name: one.dtype for name, one in left.items()} == {name: one.dtype for name, one in right.items()}
    assert not [name for name in left if not torch.equal(left[name], right[name])]


def exported_step(out: Path) -> int | None:
    """The step of the checkpoint that an export was made from; None where there is no export."""
    record = out / ".fsdp2kit-export.json"
    return json.loads(record.read_text())["step"] if record.is_file() else None


def train_and_save(run_dir: Path, *, tied: bool, replicate: int) -> dict[str, np.ndarray]:
    model = sharded(tiny_llama(tied=tied), replicate=replicate)
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    checkpoints_of(run_dir, model, optimizer).save(progress_at(2))
    return full_state(model, optimizer)


def restore(run_dir: Path, *, tied: bool, replicate: int = 1) -> tuple[dict[str, np.ndarray], Progress, float]:
    """A fresh model of another seed, restored; its state, the progress, and the learning rate it trains on with."""
    model = sharded(tiny_llama(seed=1, tied=tied), replicate=replicate)
    optimizer = adamw(model, lr=0.5)
    checkpoints = checkpoints_of(run_dir, model, optimizer)
    path = checkpoints.resolve("auto")
    assert path is not None
    progress = checkpoints.restore(path)
    return full_state(model, optimizer), progress, optimizer.param_groups[0]["lr"]


def load_weights_sharded(path: Path) -> dict[str, np.ndarray]:
    model = sharded(tiny_llama(seed=1))
    load_weights(path, model)
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).numpy(force=True)
        for name, tensor in model_tensors(model).items()
    }


def save_on_full_disk(run_dir: Path, *, is_async: bool) -> tuple[str, str, list[str]]:
    """Save, fill the disk, save again: the second save's error, a check of the first, and what is left."""
    checkpoints = checkpoints_of(run_dir, sharded(tiny_llama()), keep=1, async_save=is_async)
    first = checkpoints.save(progress_at(1))
    checkpoints.finish()
    fill_disk(run_dir)
    with pytest.raises(StorageFailure) as failure, checkpoints:
        checkpoints.save(progress_at(2))
    dist.barrier()  # rank 0 clears up after the failure
    return str(failure.value), verify(first), sorted(path.name for path in first.parent.iterdir())


def export_on_full_disk(run_dir: Path) -> tuple[str, list[str]]:
    """Save, fill the disk, export: the error, and what is left beside the checkpoints."""
    checkpoints = checkpoints_of(run_dir, sharded(tiny_llama()), export_dtype="float32")
    path = checkpoints.save(progress_at(1))
    fill_disk(run_dir)
    with pytest.raises(StorageFailure) as failure:
        checkpoints.run_export.export_due(progress_at(1), path, resumed=None, is_over=True, must_replace=True)
    dist.barrier()
    return str(failure.value), sorted(path.name for path in run_dir.iterdir())


def export_of_unreadable_manifest(run_dir: Path) -> list[str]:
    """Rank 0 cannot tell whether the export is there already: the error on this rank, and that of what comes next."""
    checkpoints = checkpoints_of(run_dir, sharded(tiny_llama()))
    path = checkpoints.save(progress_at(1))

    def fail(checkpoint: Path) -> str:
        raise OSError(5, "Input/output error")

    digest, lines = export_directory.manifest_digest, []
    for read in (fail, digest):
        export_directory.manifest_digest = read
        try:
            checkpoints.run_export.export_due(progress_at(1), path, resumed=None, is_over=True, must_replace=True)
            lines.append("exported")
        except RunFailure as failure:
            lines.append(str(failure))
    return lines


def fill_disk(folder: Path) -> None:
    """Write until the disk is full, on rank 0. Collective."""
    if dist.get_rank() == 0:
        with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as stream:
            while True:
                stream.write(bytes(4096))
    dist.barrier()


def resolve(run_dir: Path, resume: str) -> str:
    """What `run.resume` means, or the error on this rank."""
    try:
        return str(checkpoints_of(run_dir).resolve(resume))
    except UserError as error:
        return str(error)


def save_without_assets(run_dir: Path) -> str:
    """Assets cannot be written on rank 0: the error on this rank."""
    with pytest.raises(RunFailure) as failure:
        checkpoints_of(run_dir, sharded(tiny_llama()), write_assets=disk_is_full).save(progress_at(1))
    return str(failure.value)


def tool(name: str) -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_tool", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    different = [name for name in left if not np.array_equal(left[name], right[name])]
    assert not different


def saved_alone(run_dir: Path, *steps: int, keep: int = 2, **section: Any) -> tuple[Checkpoints, Path]:
    """Checkpoints of an untrained model, written without a process group, and the newest one's path."""
    checkpoints, path = checkpoints_of(run_dir, keep=keep, **section), run_dir
    for step in steps:
        path = checkpoints.save(progress_at(step))
    checkpoints.finish()
    return checkpoints, path


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def truncate(path: Path) -> None:
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])


def flip(path: Path) -> None:
    file = path / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
