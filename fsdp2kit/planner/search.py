"""What to change: the cheapest changes that fit, tables of alternatives, the longest sequence; and advice on memory.

`options` is the one place that knows which keys save what, in order of price. The diagnosis of an out-of-memory error
takes its advice from it, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp2kit.config.checks import MeshSizes, check_config
from fsdp2kit.config.rl_schema import RLConfig
from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.planner.devices import Device
from fsdp2kit.planner.estimate import Estimate, Known, estimate, plan_for

Values = dict[str, Any]
"""Values by ``section.key``."""


@dataclass(frozen=True)
class Option:
    """A change that saves memory."""

    values: Values
    words: str
    """How to say it to a user."""
    saves: str
    """ "activations" or "state"."""


def options(config: TrainingConfig) -> list[Option]:
    """The changes that are left to a config, the cheapest first. Only ``optimizer.name`` changes numbers."""
    fsdp, section, replicated = config.fsdp, config.activation_checkpointing, ("no_shard", "hybrid_shard_zero2")
    whole = {"fsdp.strategy": "full_shard", "mesh.dp_replicate": "auto", "mesh.dp_shard": "auto"}
    of_activations: list[tuple[bool, Values, str]] = [
        (config.train.micro_batch_size > 1, {"train.micro_batch_size": 1}, "train.micro_batch_size = 1"),
        (
            section.mode == "none" and not config.model.liger,  # which is refused beside "selective"
            {"activation_checkpointing.mode": "selective"},
            'activation_checkpointing.mode = "selective", then "full"',
        ),
        (
            section.mode == "selective" or section.every > 1 or (section.mode == "none" and config.model.liger),
            {"activation_checkpointing.mode": "full", "activation_checkpointing.every": 1},
            'activation_checkpointing.mode = "full"',
        ),
        (
            not fsdp.reduce_every_micro_batch,
            {"fsdp.reduce_every_micro_batch": True},
            "fsdp.reduce_every_micro_batch = true, if gradients are accumulated",
        ),
        (fsdp.backward_prefetch > 0, {"fsdp.backward_prefetch": 0}, "fsdp.backward_prefetch = 0"),
        (
            section.mode == "full" and not section.offload,
            {"activation_checkpointing.offload": True},
            "activation_checkpointing.offload = true",
        ),
        (
            True,
            {"mesh.cp": 2 * config.mesh.cp, "mesh.dp_shard": "auto"},
            "mesh.cp, to cut every sequence over more ranks",
        ),
    ]
    of_state: list[tuple[bool, Values, str]] = [
        (fsdp.strategy in replicated, whole, 'fsdp.strategy = "hybrid_shard" or "full_shard"'),
        (fsdp.strategy in ("shard_grad_op", "hybrid_shard"), whole, 'fsdp.strategy = "full_shard"'),
        (fsdp.offload == "none", {"fsdp.offload": "optimizer"}, 'fsdp.offload = "optimizer"'),
        (
            config.optimizer.name == "adamw" and fsdp.offload == "none",
            {"optimizer.name": "adamw_bf16"},
            'optimizer.name = "adamw_bf16"',
        ),
        (fsdp.offload == "optimizer", {"fsdp.offload": "params"}, 'fsdp.offload = "params"'),
    ]
    if isinstance(config, RLConfig) and config.rollout.engine == "transformers":
        could_sleep = not config.rollout.sleep and fsdp.offload != "params"
        of_state.insert(0, (could_sleep, {"rollout.sleep": True}, "rollout.sleep = true"))
    return [
        Option(values, words, saves)
        for saves, found in (("activations", of_activations), ("state", of_state))
        for applies, values, words in found
        if applies
    ]


def advise(config: TrainingConfig, sizes: MeshSizes, *, saves: str, most: int = 2) -> list[str]:
    """The first few changes against what takes the memory, in words; more ranks help where nothing else does.

    Args:
        sizes: of the mesh.
        saves: "activations" or "state".
    """
    left = [option for option in options(config) if option.saves == saves]
    words = [option.words for option in left if _is_taken(config, option, sizes)]
    if saves == "state":
        words.append("more ranks, over which everything is sharded")
    return words[:most]


def _is_taken(config: TrainingConfig, option: Option, sizes: MeshSizes) -> bool:
    """Whether the changed config is one that a run accepts on as many ranks; cutting sequences further takes more."""
    if "mesh.cp" in option.values:
        return True
    ranks = sizes.world_size
    try:
        check_config(changed(config, option.values), world_size=ranks, local_world_size=ranks)
    except UserError:
        return False
    return True


def changed(config: TrainingConfig, values: Values) -> TrainingConfig:
    """A copy of ``config`` with other values, which are checked as those of a TOML are.

    Raises:
        UserError: a value that its field does not take.
    """
    dump = config.model_dump(exclude_unset=True)
    for key, value in values.items():
        section, _, name = key.partition(".")
        dump.setdefault(section, {})[name] = value
    try:
        return type(config).model_validate(dump)
    except ValueError as error:
        raise UserError(", ".join(values), str(error).splitlines()[0], "choose another value") from None


@dataclass(frozen=True)
class Candidate:
    """A change of a config, and what it needs then."""

    values: Values
    world_size: int
    estimate: Estimate


Evaluate = Callable[[TrainingConfig, int], Estimate]
"""What a config needs on so many ranks."""


def evaluator(device: Device | None, *, local_world_size: int) -> Evaluate:
    """An `Evaluate` for one kind of node; a model is built and inspected once."""
    known: Known = {}

    def evaluate(config: TrainingConfig, world_size: int) -> Estimate:
        local = min(local_world_size, world_size)
        model, plan = plan_for(config, world_size=world_size, local_world_size=local, known=known)
        return estimate(config, model, plan, device=device, local_world_size=local)

    return evaluate


def find_fit(config: TrainingConfig, *, world_size: int, evaluate: Evaluate, most: int = 4) -> list[Candidate]:
    """Cheap changes that fit: each option alone where one is enough, else options added up in order of price.

    Options without which it still fits are left out again. More ranks come last: twice as many, up to 64 times, with
    as many times the global batch where it could not be dealt out otherwise. One candidate without changes: it fits
    as it is. None: nothing that was tried fits.
    """
    as_it_is = Candidate({}, world_size, evaluate(config, world_size))
    if as_it_is.estimate.fits:
        return [as_it_is]
    single = [c for option in options(config) if (c := _try(config, option.values, world_size, evaluate))]
    if fitting := [candidate for candidate in single if candidate.estimate.fits]:
        return fitting[:most]
    taken = _add_up(config, world_size, evaluate)
    for factor in (2**power for power in range(7)):
        for changes in ([], taken) if factor > 1 else (taken,):
            found = _on_more_ranks(config, changes, world_size, factor, evaluate)
            if found is None or not found.estimate.fits:
                continue
            for option in changes[::-1]:
                fewer = [other for other in changes if other is not option]
                without = _on_more_ranks(config, fewer, world_size, factor, evaluate)
                if without is not None and without.estimate.fits:
                    changes, found = fewer, without
            return [found]
    return []


def _on_more_ranks(
    config: TrainingConfig, changes: Sequence[Option], world_size: int, factor: int, evaluate: Evaluate
) -> Candidate | None:
    """``changes`` on ``factor`` times the ranks; with as many times the global batch if it is too small for them."""
    values = _merged(changes)
    if factor > 1:
        values["mesh.dp_shard"] = "auto"
    found = _try(config, values, world_size * factor, evaluate)
    if found is None and factor > 1:
        values["train.global_batch_size"] = config.train.global_batch_size * factor
        found = _try(config, values, world_size * factor, evaluate)
    return found


def _add_up(config: TrainingConfig, world_size: int, evaluate: Evaluate) -> list[Option]:
    """Options in order of price, each of which needs less memory than those before it, until it fits."""
    taken: list[Option] = []
    needed = evaluate(config, world_size).needed
    while True:
        for option in options(changed(config, _merged(taken))):
            found = _try(config, _merged([*taken, option]), world_size, evaluate)
            if found is None or found.estimate.needed >= needed:
                continue
            taken, needed = [*taken, option], found.estimate.needed
            if found.estimate.fits:
                return taken
            break
        else:
            return taken


def _merged(changes: Sequence[Option]) -> Values:
    return {key: value for option in changes for key, value in option.values.items()}


def _try(config: TrainingConfig, values: Values, world_size: int, evaluate: Evaluate) -> Candidate | None:
    """None: the change is refused for this model, mesh or batch. What is "auto" already is no change."""
    auto = {f"mesh.{name}" for name, value in config.mesh if value == "auto"}
    values = {key: value for key, value in values.items() if not (key in auto and value == "auto")}
    try:
        return Candidate(values, world_size, evaluate(changed(config, values), world_size))
    except UserError:
        return None


def sweep(config: TrainingConfig, *, world_size: int, evaluate: Evaluate) -> Iterator[Candidate]:
    """dp × cp × checkpointing × micro-batch, as far as they are possible; the global batch stays.

    Sizes and options that the config gives stay where cp and the mode are its own.
    """
    given = config.activation_checkpointing
    cps = sorted({1, 2, 4, 8, 16, config.mesh.cp})
    micros = sorted({1, 2, 4, config.train.micro_batch_size})
    for cp, mode, micro in itertools.product(cps, ("none", "selective", "full"), micros):
        values = {"mesh.cp": cp, "activation_checkpointing.mode": mode, "train.micro_batch_size": micro}
        if cp != config.mesh.cp:
            values |= {"mesh.dp_shard": "auto", "mesh.dp_replicate": "auto"}
        if mode == "none" and given.every > 1:
            values["activation_checkpointing.every"] = 1
        if mode != "full" and given.offload:
            values["activation_checkpointing.offload"] = False
        if (candidate := _try(config, values, world_size, evaluate)) is not None:
            yield candidate


def longest(config: TrainingConfig, *, world_size: int, evaluate: Evaluate) -> Candidate | None:
    """The longest sequence that fits, in steps of 2,048 tokens a context-parallel rank; None: not even that fits.

    It is looked for from the config's own length on. Shorter ones may be refused for another reason than memory, a
    prompt and its answer that must fit into them for one, and say nothing of longer ones.
    """
    step, most = 1024 * max(1, 2 * config.mesh.cp), 2**26

    def at(length: int) -> Candidate | None:
        return _try(config, {"data.seq_len": length * step}, world_size, evaluate)

    low, best = 0, None
    high = max(1, config.data.seq_len // step)
    while (candidate := at(high)) and candidate.estimate.fits and high * step <= most:
        best, low, high = candidate, high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        candidate = at(middle)
        if candidate is not None and candidate.estimate.fits:
            best, low = candidate, middle
        elif candidate is not None or best is not None:
            high = middle
        else:
            low = middle
    return best
