"""One tiny model under FSDP1, under `apply_fsdp` and plain, and what a forward and backward of it send, in order."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fsdp2kit.config.schema import FSDPConfig
from fsdp2kit.migrate.draft import Draft
from fsdp2kit.migrate.translate import translate
from fsdp2kit.parallel.fsdp import apply_fsdp

# Tied, so that FSDP1 and ours have the same units: four layers, and the root with all the rest.
LAYERS = 4
TOKENS = torch.arange(96).reshape(4, 24) * 7 % 64


def plain() -> Any:
    """The model, the same on every rank."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return LlamaForCausalLM(config).float()


def fsdp1(model: nn.Module, **arguments: Any) -> FullyShardedDataParallel:
    """``model`` in FSDP1, each decoder layer a unit."""
    arguments = {"use_orig_params": True, **arguments}
    with quiet():
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy([LlamaDecoderLayer]),
            device_id=torch.device("cpu"),
            **arguments,
        )


def fsdp2(model: Any, *, replicate: int = 1, **section: Any) -> Any:
    """The same under `apply_fsdp`."""
    shape = (replicate, dist.get_world_size() // replicate) if replicate > 1 else (dist.get_world_size(),)
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    apply_fsdp(FSDPConfig(**{"param_dtype": "float32", **section}), model, mesh=mesh)
    return model


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """FSDP1 is deprecated, and says so at almost every call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def loss(model: Any, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of the next token, of which each rank has an equal share under `apply_fsdp`.

    There gradients add up over ranks. FSDP1 averages those of the ranks' means.
    """
    logits = model(input_ids=tokens, use_cache=False).logits.float()
    mean = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    return mean / dist.get_world_size() if isinstance(model, FSDPModule) else mean


def own(tokens: Tensor = TOKENS) -> Tensor:
    """This rank's rows."""
    return tokens.chunk(dist.get_world_size())[dist.get_rank()]


def whole(tensor: Tensor | None) -> Tensor:
    """A tensor, or the whole of a sharded one."""
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by name; of FSDP1 too."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return {
                name.replace("_fsdp_wrapped_module.", ""): whole(parameter.grad).clone()
                for name, parameter in model.named_parameters()
            }
    return {name: whole(parameter.grad) for name, parameter in model.named_parameters()}


def reference_gradients(tokens: Tensor = TOKENS) -> dict[str, Tensor]:
    """The plain model's, of all rows."""
    model = plain()
    loss(model, tokens).backward()
    return gradients(model)


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of any tensor, relative to its largest value."""
    assert found.keys() == expected.keys()
    return max(((found[key] - expected[key]).abs().max() / expected[key].abs().max()).item() for key in expected)


class Schedule(TorchDispatchMode):
    """What happens, in order: g(ather), r(educe-scatter), a(ll-reduce), and a layer's number when it computes.

    In forward a layer's number stands for its forward, in backward for the beginning of its backward.
    """

    _LETTERS = (("reduce_scatter", "r"), ("allgather", "g"), ("allreduce", "a"))

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.events: list[str] = []
        self._hooks = []
        layers = [module for module in model.modules() if isinstance(module, LlamaDecoderLayer)]
        for number, layer in enumerate(layers):
            self._hooks.append(layer.mlp.register_forward_pre_hook(self._hook(number)))
            self._hooks.append(layer.mlp.register_full_backward_pre_hook(self._hook(number)))

    def _hook(self, number: int) -> Any:
        def happened(*_: Any) -> None:
            self.events.append(str(number))

        return happened

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith("c10d."):
            letter = next((letter for name, letter in self._LETTERS if name in str(func)), None)
            self.events += [letter] if letter else []
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()


def schedule(model: nn.Module) -> tuple[str, str]:
    """Events of a forward, and of the backward after it; the second step's, when FSDP knows the order."""
    loss(model, own()).backward()
    with Schedule(model) as seen:
        value = loss(model, own())
        forward = len(seen.events)
        value.backward()
    return "".join(seen.events[:forward]), "".join(seen.events[forward:])


def translated(values: dict[str, Any], folder: Path, **options: Any) -> tuple[dict[str, Any], Draft]:
    path = folder / "fsdp.json"
    path.write_text(json.dumps(values))
    found = translate(path, toml=str(folder / "x.toml"), **options)
    return tomli.loads(found.toml), found
