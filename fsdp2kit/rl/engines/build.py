"""The engine of a run."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fsdp2kit.config.rl_schema import RLConfig
from fsdp2kit.job.distributed import agreement, gather_objects, rank
from fsdp2kit.model.assets import generation_config
from fsdp2kit.model.build import build_model, materialize
from fsdp2kit.model.tokenizer import turn_ends
from fsdp2kit.parallel.tensor_parallel import apply_tensor_parallel
from fsdp2kit.rl.engines.engine import RolloutEngine
from fsdp2kit.rl.engines.server import RolloutServer
from fsdp2kit.rl.engines.server_engine import ServerEngine
from fsdp2kit.rl.engines.sglang_server import SGLangServer
from fsdp2kit.rl.engines.transformers_engine import TransformersEngine
from fsdp2kit.rl.engines.vllm_server import VLLMServer
from fsdp2kit.weights.modules import cast_model
from fsdp2kit.weights.record import source_of

_SERVERS: dict[str, type[RolloutServer]] = {"vllm": VLLMServer, "sglang": SGLangServer}


def build_engine(
    config: RLConfig, model: PreTrainedModel, *, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> RolloutEngine:
    """The engine of ``[rollout]``, which waits for its first weights. Collective.

    Args:
        model: the trained model; the engine's has the same config and no adapters.
        device: where an embedded engine keeps its weights.
    """
    dtype = getattr(torch, config.engine_dtype)
    stops = _stops(model, tokenizer)
    if config.rollout.embedded:
        return _embedded(config, dtype=dtype, stops=stops, pad_id=tokenizer.pad_token_id, device=device)
    return _servers(config, dtype=dtype, stops=stops)


def _stops(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end a response: those of the model's generation config, and what ends a turn."""
    source = source_of(model)
    found, _ = generation_config(
        source.config, tokenizer=tokenizer, source=source.directory, stops=turn_ends(tokenizer)
    )
    ends = [] if found.eos_token_id is None else found.eos_token_id
    return [ends] if isinstance(ends, int) else list(ends)


def _servers(config: RLConfig, *, dtype: torch.dtype, stops: Sequence[int]) -> ServerEngine:
    section = config.rollout
    run = gather_objects(secrets.token_hex(4))[0]
    with agreement():
        servers = [
            _SERVERS[section.engine](
                section,
                url,
                run=run,
                is_main=rank() == 0,
                stops=stops,
                timeout=60 * config.run.timeout_minutes,
                weight_sync=config.weight_sync,
            )
            for url in section.urls
        ]
        first = rank() % len(servers)  # where a rank begins: a few requests of each do not meet at one server
        servers = servers[first:] + servers[:first]
        return ServerEngine(servers, dtype=dtype, stops=stops, at_once=section.batch_size)


def _embedded(
    config: RLConfig, *, dtype: torch.dtype, stops: Sequence[int], pad_id: Any, device: torch.device
) -> TransformersEngine:
    section = config.rollout
    copy: Any = build_model(config.model.model_copy(update={"adapter": None, "freeze": []}))
    with agreement():
        cast_model(copy.eval().requires_grad_(False), dtype)
        group = apply_tensor_parallel(copy, section.tp, device=device).get_group() if section.tp > 1 else None
        materialize(copy, device=device)
        return TransformersEngine(section, copy, stops=stops, pad_id=pad_id, group=group)


def rest_until_asked(engine: RolloutEngine, config: RLConfig) -> None:
    """With ``rollout.sleep``, leave the devices to the trainer. Collective.

    Call it once the run directory is open: until then another run with this directory may be using the server.
    """
    if config.rollout.sleep:
        with agreement():
            engine.sleep()
