"""Batches of rollouts ("rounds") in a checkpoint, and which of them a resumed run may use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fsdp2kit.config.sections.rollout import RolloutConfig
from fsdp2kit.rl.engines.engine import Response
from fsdp2kit.rl.packing import Rollout


@dataclass(frozen=True)
class Round:
    """A batch of rollouts."""

    number: int
    version: int
    """Training steps done when its weights sampled it."""
    rollouts: list[Rollout]


@dataclass(frozen=True)
class Kept:
    """The rounds of a checkpoint that are still good."""

    now: Round | None
    """The round that training learns from."""
    ahead: list[Round]
    """Later rounds, in order."""
    is_scored: bool
    """Whether the rewards of the later rounds are still good, too."""
    dropped: str
    """Why a round of the checkpoint is made again; empty if none is."""


def round_state(now: Round | None, ahead: Sequence[Round]) -> dict[str, Any]:
    """Rounds as JSON; empty without any."""
    found = {} if now is None else _as_json(now)
    return {**found, "ahead": [_as_json(one) for one in ahead]} if ahead else found


def kept_rounds(state: Mapping[str, Any], section: RolloutConfig, *, count: int, made_by: Mapping[str, Any]) -> Kept:
    """The rounds of `round_state` that this run would have made as well.

    Args:
        state: with ``made_by`` of the run that saved it; without, rounds are made again.
        count: rollouts of a round.
        made_by: sampling keys (``rollout.…``) and reward functions, in order, each with its value or digest.
    """
    try:
        now = _from_json(state) if "rollouts" in state else None
        ahead = [_from_json(one) for one in state.get("ahead", ())]
        before = dict(state.get("made_by", {}))
    except (KeyError, TypeError, ValueError, AttributeError):
        return Kept(None, [], False, "the checkpoint has them in another form")
    changed = [name for name in dict.fromkeys([*made_by, *before]) if made_by.get(name) != before.get(name)]
    if not changed and list(before) != list(made_by):
        changed = ["order of the rewards"]

    def why_not(one: Round) -> str:
        if len(one.rollouts) != count:
            return "train.global_batch_size"
        # With fewer rounds ahead it would be too old.
        return "" if one.version >= (one.number - section.ahead) * section.updates else "rollout.ahead"

    # Responses of the rounds ahead can be scored again: nothing was learnt from them yet.
    is_sampled_otherwise = not before or any(name.startswith("rollout.") for name in changed)
    kept_now = now if now is not None and not changed and not why_not(now) else None
    kept_ahead = [] if is_sampled_otherwise else [one for one in ahead if not why_not(one)]
    if kept_now is now and len(kept_ahead) == len(ahead):
        return Kept(now, ahead, not changed, "")
    if not before:
        return Kept(None, [], False, "the checkpoint does not say how they were made")
    causes = changed or list(dict.fromkeys(filter(None, map(why_not, [*([] if now is None else [now]), *ahead]))))
    return Kept(kept_now, kept_ahead, not changed, f"changed since: {', '.join(causes)}")


def _as_json(one: Round) -> dict[str, Any]:
    return {"round": one.number, "version": one.version, "rollouts": [asdict(rollout) for rollout in one.rollouts]}


def _from_json(found: Mapping[str, Any]) -> Round:
    rollouts = [
        Rollout(one["prompt"], Response.from_dict(one["response"]), tuple(one["rewards"])) for one in found["rollouts"]
    ]
    return Round(found["round"], found["version"], rollouts)
