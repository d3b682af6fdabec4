"""What to change: the cheapest changes that fit, alternatives, the longest sequence; and advice on memory.

`options` is the one place that knows which keys save memory, in order of price. The diagnosis of an out-of-memory
error takes its advice from it, too.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp2kit.config.checks import MeshSizes, check_config
from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.planner.devices import Device
from fsdp2kit.planner.estimate import Estimate, Known, estimate, plan_for
from fsdp2kit.planner.speed import PeakShare

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
    of_mixtures: bool = False
    """Whether only mixtures of experts take it."""


def options(config: TrainingConfig) -> list[Option]:
    """The changes that a config has not made yet, the cheapest first. Only ``optimizer.name`` changes numbers."""
    fsdp = config.fsdp
    section = config.activation_checkpointing
    found: list[Option] = []

    def add(saves: str, values: Values, words: str = "", note: str = "", of_mixtures: bool = False) -> None:
        key, value = next(iter(values.items()))
        found.append(Option(values, words or f"{key} = {json.dumps(value)}{note}", saves, of_mixtures))

    if config.train.micro_batch_size > 1:
        add("activations", {"train.micro_batch_size": 1})
    for ep in (8, 4, 2):
        if ep > config.mesh.ep:
            add("activations", {"mesh.ep": ep}, of_mixtures=True)
    if section.mode == "none" and not config.model.liger:  # which is refused beside "selective"
        add("activations", {"activation_checkpointing.mode": "selective"}, note=', then "full"')
    if section.mode == "selective" or section.every > 1 or (section.mode == "none" and config.model.liger):
        add("activations", {"activation_checkpointing.mode": "full", "activation_checkpointing.every": 1})
    if not fsdp.accumulates_shards and fsdp.strategy != "no_shard":
        add("activations", {"fsdp.reduce_every_micro_batch": True}, note=", if gradients are accumulated")
    if fsdp.backward_prefetch > 0:
        add("activations", {"fsdp.backward_prefetch": 0})
    if section.mode == "full" and not section.offload:
        add("activations", {"activation_checkpointing.offload": True})
    over_more = {"mesh.cp": 2 * config.mesh.cp, "mesh.dp_shard": "auto"}
    add("activations", over_more, "mesh.cp, to cut every sequence over more ranks")

    for key, value in config.savings.items():
        add("state", {key: value})
    whole = {"fsdp.strategy": "full_shard", "mesh.dp_replicate": "auto", "mesh.dp_shard": "auto"}
    if fsdp.strategy in ("no_shard", "hybrid_shard_zero2"):
        add("state", whole, 'fsdp.strategy = "hybrid_shard" or "full_shard"')
    if fsdp.strategy in ("shard_grad_op", "hybrid_shard"):
        add("state", whole)
    if fsdp.offload == "none":
        add("state", {"fsdp.offload": "optimizer"})
    if config.optimizer.name == "adamw" and fsdp.offload == "none":
        add("state", {"optimizer.name": "adamw_bf16"})
    if fsdp.offload == "optimizer":
        add("state", {"fsdp.offload": "params"})
    return found


def advise(config: TrainingConfig, sizes: MeshSizes, *, saves: str, most: int = 2) -> list[str]:
    """The cheapest changes that save what takes the memory, in words. The last resort is more ranks.

    Args:
        sizes: of the mesh.
        saves: "activations" or "state".
    """

    def is_taken(values: Values) -> bool:
        """Whether a run accepts the changed config on as many ranks; a larger cp may need more."""
        try:
            ranks = sizes.world_size
            check_config(changed(config, values), world_size=ranks, local_world_size=ranks)
        except UserError:
            return "mesh.cp" in values
        return True

    known = [option for option in options(config) if option.saves == saves and not option.of_mixtures]
    words = [option.words for option in known if is_taken(option.values)]
    if saves == "state":
        words.append("more ranks, over which everything is sharded")
    return words[:most]


def changed(config: TrainingConfig, values: Values) -> TrainingConfig:
    """A copy of ``config`` with other values, checked as those of a TOML are."""
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
    """A change of a config, and what the run needs then."""

    values: Values
    world_size: int
    estimate: Estimate


@dataclass(frozen=True)
class Search:
    """Looks for changes of a config, for one kind of device and of node. Each model is built and inspected once."""

    config: TrainingConfig
    world_size: int
    device: Device | None
    local_world_size: int
    share: PeakShare | None = None
    """The share of the device's peak that is reached; by default that of published runs."""
    _known: Known = field(default_factory=dict, init=False)

    def fit(self, *, most: int = 4) -> list[Candidate]:
        """Cheap changes that fit: single options where one is enough, else options added up in order of price.

        An option without which it still fits is left out again. More ranks come last: twice as many, up to 64 times,
        with as many times the global batch where the given one cannot be divided.

        Returns:
            If the config fits as it is, first one without changes, then with experts partitioned where that is faster;
            none if nothing that was tried fits.
        """
        as_it_is = Candidate({}, self.world_size, self._evaluate(self.config, self.world_size))
        if as_it_is.estimate.fits:
            return [as_it_is, *self._faster_mixtures(as_it_is.estimate)]
        single = [
            candidate for option in options(self.config) if (candidate := self.attempt(self._new(option.values)))
        ]
        if fitting := [candidate for candidate in single if candidate.estimate.fits]:
            return fitting[:most]
        taken = self._add_up(as_it_is.estimate.needed)
        for factor in (2**power for power in range(7)):
            for changes in ([], taken) if factor > 1 else (taken,):
                found = self._on_more_ranks(changes, factor)
                if found is None or not found.estimate.fits:
                    continue
                for option in changes[::-1]:
                    fewer = [other for other in changes if other is not option]
                    without = self._on_more_ranks(fewer, factor)
                    if without is not None and without.estimate.fits:
                        changes = fewer
                        found = without
                return [found]
        return []

    def _faster_mixtures(self, given: Estimate) -> list[Candidate]:
        """Other values of ``mesh.ep`` that fit and take less time than ``given``, the fastest first."""
        found: list[tuple[float, Candidate]] = []
        for option in options(self.config):
            one = self.attempt(option.values) if option.of_mixtures else None
            if one is not None and one.estimate.fits and one.estimate.speed is not None and given.speed is not None:
                found.append((one.estimate.speed.low.overlapped, one))
        faster = [pair for pair in found if given.speed is not None and pair[0] < given.speed.low.overlapped]
        return [one for _, one in sorted(faster, key=lambda pair: pair[0])]

    def sweep(self) -> Iterator[Candidate]:
        """dp × cp × checkpointing × micro-batch, as far as they are possible; the global batch stays.

        The config's mesh sizes stay at its own cp, its options of checkpointing in modes that take them.
        """
        given = self.config.activation_checkpointing
        own_cp = self.config.mesh.cp
        micros = sorted({1, 2, 4, self.config.train.micro_batch_size})
        modes = ("none", "selective", "full")
        for cp, mode, micro in itertools.product(sorted({1, 2, 4, 8, 16, own_cp}), modes, micros):
            values = {"mesh.cp": cp, "activation_checkpointing.mode": mode, "train.micro_batch_size": micro}
            if cp != own_cp:
                values |= {"mesh.dp_shard": "auto", "mesh.dp_replicate": "auto"}
            if mode == "none" and given.every > 1:
                values["activation_checkpointing.every"] = 1
            if mode != "full" and given.offload:
                values["activation_checkpointing.offload"] = False
            if (candidate := self.attempt(values)) is not None:
                yield candidate

    def longest(self) -> Candidate | None:
        """The longest sequence that fits; None if none that was tried does.

        In steps of 2,048 tokens a context-parallel rank; of 64 where not even 2,048 fit. The config's own length is
        always tried.
        """
        found = self._longest(step=2048 * self.config.mesh.cp) or self._longest(step=64 * self.config.mesh.cp)
        own = self.attempt({"data.seq_len": self.config.data.seq_len})
        fitting = [one for one in (found, own) if one is not None and one.estimate.fits]
        return max(fitting, key=lambda one: one.values["data.seq_len"], default=None)

    def _longest(self, *, step: int) -> Candidate | None:
        """The longest multiple of ``step`` that fits, searched from the config's own length.

        A shorter one may be refused for another reason than memory, as when a prompt and its answer do not fit into
        it. That says nothing of longer ones.
        """
        most = 2**26

        def at(length: int) -> Candidate | None:
            return self.attempt({"data.seq_len": length * step})

        low = 0
        best = None
        high = max(1, self.config.data.seq_len // step)
        while (candidate := at(high)) and candidate.estimate.fits and high * step <= most:
            best = candidate
            low = high
            high = 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            candidate = at(middle)
            if candidate is not None and candidate.estimate.fits:
                best = candidate
                low = middle
            elif candidate is not None or best is not None:
                high = middle
            else:
                low = middle
        return best

    def _on_more_ranks(self, changes: Sequence[Option], factor: int) -> Candidate | None:
        """``changes`` on ``factor`` times the ranks, if need be with as many times the global batch."""
        values = self._new(_merged(changes))
        ranks = self.world_size * factor
        if factor == 1:
            return self.attempt(values)
        values["mesh.dp_shard"] = "auto"
        larger = {"train.global_batch_size": self.config.train.global_batch_size * factor}
        return self.attempt(values, ranks) or self.attempt({**values, **larger}, ranks)

    def _add_up(self, needed: int) -> list[Option]:
        """Options in order of price, each needing less memory than those before it, until the config fits."""
        taken: list[Option] = []
        while True:
            for option in options(changed(self.config, _merged(taken))):
                found = self.attempt(_merged([*taken, option]))
                if found is None or found.estimate.needed >= needed:
                    continue
                taken = [*taken, option]
                needed = found.estimate.needed
                if found.estimate.fits:
                    return taken
                break
            else:
                return taken

    def attempt(self, values: Values, world_size: int | None = None) -> Candidate | None:
        """The candidate; None if the change is refused for this model, mesh or batch.

        Setting "auto" where the config has it already is no change.
        """
        auto = {f"mesh.{name}" for name, value in self.config.mesh if value == "auto"}
        values = {key: value for key, value in values.items() if not (key in auto and value == "auto")}
        ranks = world_size or self.world_size
        try:
            return Candidate(values, ranks, self._evaluate(changed(self.config, values), ranks))
        except UserError:
            return None

    def _new(self, values: Values) -> Values:
        """The values that the config does not have, set or by default: what a user would type."""
        found: Values = {}
        for key, value in values.items():
            section, _, name = key.partition(".")
            own = dict(getattr(self.config, section)).get(name)
            if type(own) is not type(value) or own != value:
                found[key] = value
        return found

    def _evaluate(self, config: TrainingConfig, ranks: int) -> Estimate:
        local = min(self.local_world_size, ranks)
        model, plan = plan_for(config, world_size=ranks, local_world_size=local, known=self._known)
        return estimate(config, model, plan, device=self.device, local_world_size=local, share=self.share)


def _merged(changes: Sequence[Option]) -> Values:
    return {key: value for option in changes for key, value in option.values.items()}
