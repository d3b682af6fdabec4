"""Responses of the trained model, with its current weights, from an engine that receives them.

Every rank asks for a part of the responses; then all ranks get all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from fsdp2kit.config.rl_schema import RLConfig
from fsdp2kit.job.distributed import agreement
from fsdp2kit.job.stop import Stopped
from fsdp2kit.rl.engines.engine import Response, RolloutEngine
from fsdp2kit.rl.environments.conversations import Conversations
from fsdp2kit.rl.parts import from_all_ranks, my_part
from fsdp2kit.rl.phases import Phases
from fsdp2kit.rl.prompts import Question
from fsdp2kit.rl.sleep import Sleepers
from fsdp2kit.rl.weight_sync import sync_weights
from fsdp2kit.weights.experts import is_mixture

_ROUTED_ANEW = "experts: the trainer does not replay the engine's choices; log_prob_gap shows what this costs"


class Generation:
    """Has the engine answer with the trained model's weights.

    Args:
        model: sharded, with its weights.
        engine: waits for its first weights.
        phases: measures each part.
        sleepers: with ``rollout.sleep``, what leaves the device while the engine generates.
    """

    def __init__(
        self,
        config: RLConfig,
        model: Any,
        engine: RolloutEngine,
        conversations: Conversations,
        phases: Phases,
        *,
        sleepers: Sleepers,
    ) -> None:
        self._config = config
        self._model = model
        self._engine = engine
        self._conversations = conversations
        self._phases = phases
        self._sleepers = sleepers

    def describe(self) -> str:
        """A line for the start of a run."""
        return self._engine.describe()

    def notes(self) -> list[str]:
        """What a person should know of how the model's responses are learnt from."""
        return [_ROUTED_ANEW] if is_mixture(self._model.config) else []

    def respond(self, questions: Sequence[Question], version: int) -> list[Response]:
        """Responses to all questions with the current weights, on every rank. Collective.

        Args:
            version: the weights' version: the number of steps done.

        Raises:
            Stopped: on all ranks, if any is asked to stop.
        """
        self.sync(version)
        with self._asleep() if self._config.rollout.sleep else nullcontext(), self._phases("generate"), agreement():
            mine = self.generate(my_part(questions), version)
        return from_all_ranks(mine)

    def sync(self, version: int) -> None:
        """Send the current weights to the engine, which must not be generating. Collective."""
        with self._phases("sync"):
            if self._config.rollout.sleep:
                with agreement():  # the last step's memory must be free on all ranks' devices
                    self._sleepers.give_back_memory()
                with agreement():
                    self._engine.wake("weights")
            bucket_mib = self._config.weight_sync.bucket_mib
            sync_weights(self._model, self._engine, version=version, dtype=self._engine.dtype, bucket_mib=bucket_mib)

    def generate(self, questions: Sequence[Question], version: int) -> list[Response]:
        """Responses to this rank's questions, with the weights of ``version``."""
        self._engine.require(version)
        return self._conversations.respond(questions, self._engine)

    @contextmanager
    def _asleep(self) -> Iterator[None]:
        """Keep training state on the host inside; at the end, also after `Stopped`, the engine frees its memory.

        Collective.
        """
        with self._phases("sleep"), agreement():
            self._sleepers.sleep()
        left: Stopped | None = None
        try:
            with agreement():  # once all ranks' devices are free: a server may use several
                self._engine.wake("cache")
            try:
                yield
            except Stopped as request:  # on all ranks
                left = request
            with agreement():  # once no rank generates any more
                self._engine.sleep()
        except BaseException:
            with suppress(Exception):  # the first error is the one to report
                self._sleepers.wake_up()
            raise
        with self._phases("wake_up"), agreement():
            self._sleepers.wake_up()
        if left is not None:
            raise left
