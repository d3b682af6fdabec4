"""Batches of rollouts ("rounds") in a checkpoint, and which of them a resumed run may use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any

from fsdp2kit.config.rl_schema import RolloutConfig
from fsdp2kit.rl.engine import Response
from fsdp2kit.rl.packing import Rollout


@dataclass(frozen=True)
class Round:
    """A batch of rollouts."""

    number: int
    version: int
    """Training steps done when its weights sampled it."""
    rollouts: list[Rollout]


@dataclass
class Asked:
    """A round whose responses may still be under way."""

    number: int
    version: int
    responses: Future[list[Response]] = field(default_factory=Future)
    """Those that this rank asked for."""
    seconds: float | None = None
    """Seconds of generation. None until it is done, and for responses from a checkpoint."""


@dataclass(frozen=True)
class Kept:
    """The rounds of a checkpoint that are still good."""

    now: Round | None
    """The round that training learns from."""
    ahead: tuple[Asked, list[Response]] | None
    """The next round, and all ranks' responses."""
    dropped: str
    """Why a round of the checkpoint is made again; empty if none is."""


def round_state(now: Round | None, ahead: tuple[Asked, Sequence[Response]] | None) -> dict[str, Any]:
    """Rounds as JSON; empty without any."""
    found: dict[str, Any] = {}
    if now is not None:
        rollouts = [asdict(rollout) for rollout in now.rollouts]
        found |= {"round": now.number, "version": now.version, "rollouts": rollouts}
    if ahead is not None:
        asked, responses = ahead
        answers = [asdict(response) for response in responses]
        found["ahead"] = {"round": asked.number, "version": asked.version, "responses": answers}
    return found


def kept_rounds(state: Mapping[str, Any], section: RolloutConfig, *, count: int, made_by: Mapping[str, Any]) -> Kept:
    """The rounds of `round_state` that this run would have made as well.

    Args:
        state: with ``made_by`` of the run that saved it; without, rounds are made again.
        count: rollouts of a round.
        made_by: sampling keys (``rollout.…``) and reward functions, in order, each with its value or digest.
    """
    before = state.get("made_by", {})
    changed = [name for name in dict.fromkeys([*made_by, *before]) if made_by.get(name) != before.get(name)]
    if not changed and list(before) != list(made_by):
        changed = ["order of the rewards"]
    made = [
        Rollout(one["prompt"], Response.from_dict(one["response"]), tuple(one["rewards"]))
        for one in state.get("rollouts", ())
    ]
    now = ahead = None
    first = state.get("round", 0) * section.updates
    version = state.get("version", first)
    if not changed and len(made) == count and version >= first - section.ahead * section.updates:
        now = Round(state["round"], version, made)
    asked = state.get("ahead", {})
    responses = [Response.from_dict(one) for one in asked.get("responses", ())]
    # They have no rewards yet.
    is_sampled_otherwise = any(name.startswith("rollout.") for name in changed)
    if not is_sampled_otherwise and len(responses) == count and section.ahead:
        ahead = Asked(asked["round"], asked["version"]), responses
    if (now is not None or not made) and (ahead is not None or not responses):
        return Kept(now, ahead, "")
    if not before:
        return Kept(now, ahead, "the checkpoint does not say how they were made")
    return Kept(now, ahead, f"changed since: {', '.join(changed) or 'rollout.ahead'}")
