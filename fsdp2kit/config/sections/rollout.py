"""[rollout]: how responses are sampled."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from fsdp2kit.config.checks import check_seq_len, multiples_near, resolve_accumulation
from fsdp2kit.config.facts import EngineNeeds, MeshSizes, Needs
from fsdp2kit.config.section import FunctionPath, Section, TrainingDType
from fsdp2kit.errors import UserError


class RolloutConfig(Section):
    """How responses are sampled."""

    engine: Literal["transformers", "vllm", "sglang"] = "transformers"
    """"transformers": a whole copy of the model on every rank (see `tp`), in padded batches with a cache. "vllm",
    "sglang": a server, started with the same model and tokenizer; see docs/grpo.md."""
    url: str | Annotated[list[str], Field(min_length=1)] = "http://127.0.0.1:8000"
    """Where the server listens, or a list of servers, which share the prompts. One that fails is left out, and the
    others are asked, until it has taken weights again."""
    tp: PositiveInt = 1
    """engine = "transformers" only: so many neighbouring ranks share a copy of the model and its cache, split by
    heads, and generate together (docs/grpo.md). A server has its own option for this."""
    n: Annotated[int, Field(ge=2)] = 8
    """Responses to each prompt, a group. `train.global_batch_size` counts responses."""
    max_new_tokens: PositiveInt = 256
    """Most tokens of a response; one that has no end by then is cut there (`grpo.truncated`)."""
    temperature: PositiveFloat = 1.0
    """Temperature of sampling and of the trained log-probabilities."""
    environment: FunctionPath | None = None
    """Conversations instead of single answers: `module:Class` or `path.py:Class` of what answers the model, and gives
    a reward (docs/environments.md)."""
    max_turns: PositiveInt = 16
    """`environment` only: most turns of the model; a conversation that has no end by then is cut."""
    environment_seconds: PositiveFloat = 60.0
    """`environment` only: most seconds of one of its calls; after that the run stops."""
    dtype: TrainingDType | None = None
    """Dtype of the engine's copy; a server has to be started with the same. Default: `fsdp.param_dtype`."""
    batch_size: PositiveInt = 64
    """Responses that a rank generates (or `tp` ranks together), or asks a server for, at once."""
    updates: PositiveInt = 1
    """Optimizer steps on each batch of rollouts, which is so many times as large. From 2 on the ratio of the clipped
    loss is that to the engine's log-probabilities; with 1 it is 1 throughout, and nothing is clipped."""
    ahead: NonNegativeInt = 0
    """A server only: so many later batches of rollouts are sampled and scored while the trainer learns from this one.
    Their weights are so many batches old; `grpo.importance_cap` corrects for that. docs/grpo.md says when."""
    sleep: bool = False
    """Take turns with the device's memory: parameters, optimizer state and a reference are on the host while responses
    are generated, and the engine sleeps while the trainer trains (docs/grpo.md)."""
    samples_every: NonNegativeInt = 10
    """Write the best and the worst response to one prompt every n steps, to `samples.jsonl` and wandb; 0: never."""

    @property
    def urls(self) -> list[str]:
        """Where each server listens."""
        return [self.url] if isinstance(self.url, str) else self.url

    @property
    def sampling(self) -> dict[str, Any]:
        """The keys that change responses. A resumed run samples rollouts again that were made with other values.

        The environment's code matters, too (`fsdp2kit.rl.environments.conversations`). The other keys do not: `n` and
        `updates` may not change; `ahead` limits the age of rollouts; `engine`, `url`, `tp`, `dtype`, `batch_size` and
        `sleep` say where and how fast responses are made. A response keeps the log-probabilities of the engine that
        sampled it, so it stays valid beside another engine.
        """
        found: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature}
        return found if self.environment is None else {**found, "max_turns": self.max_turns}

    @property
    def embedded(self) -> bool:
        """Whether the engine runs on the trainer's devices; a server has its own."""
        return self.engine == "transformers"

    def check(self, config: Any, sizes: MeshSizes) -> None:
        size = config.train.global_batch_size
        micro = config.train.micro_batch_size
        seq_len = config.data.seq_len
        resolve_accumulation(size, micro, dp=sizes.dp, group=self.n)
        if size % self.n:
            near = multiples_near(size, math.lcm(sizes.dp * micro, self.n))
            what = f"{size} responses are not whole groups of rollout.n = {self.n}"
            raise UserError("train.global_batch_size", what, f"use {near}, or another rollout.n")
        check_seq_len(seq_len, sizes.cp, above=self.max_new_tokens)
        if self.max_new_tokens >= seq_len:
            what = f"{self.max_new_tokens} leaves no room for a prompt in data.seq_len = {seq_len}"
            raise UserError("rollout.max_new_tokens", what, "use fewer, or a larger data.seq_len")
        if self.tp > 1 and not self.embedded:
            what = f"{self.tp} with rollout.engine = {self.engine!r}, which is split as it was started"
            raise UserError("rollout.tp", what, "leave it out")
        if sizes.world_size % self.tp:
            what = f"{self.tp} does not divide the job's ranks ({sizes.world_size})"
            raise UserError("rollout.tp", what, "use a divisor of them")
        if config.lora.quantize == "nf4":
            what = "'nf4' with rollouts: weights in 4 bits are not sent to an engine"
            raise UserError("lora.quantize", what, "leave it out")
        if self.sleep and config.fsdp.offload == "params":
            what = '"params" with rollout.sleep: it keeps all that could sleep on the host already'
            raise UserError("fsdp.offload", what, 'set it to "none", or rollout.sleep = false')
        if self.sleep and config.checkpoint.async_save:
            what = "true with rollout.sleep, which takes away what is still being copied"
            raise UserError("checkpoint.async_save", what, "leave one of them out")
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            raise UserError("rollout.url", "names a server twice", "name each once")
        if self.ahead:
            self._check_ahead(config)
        self._check_environment(config)

    def _check_environment(self, config: Any) -> None:
        name = config.data.format
        if self.environment is None:
            if name == "rows":
                what = '"rows" without rollout.environment, which would make prompts of them'
                raise UserError("data.format", what, "leave it out, or name an environment")
            if not config.reward:
                raise UserError("reward", "there is none", "write [[reward]] with a function (`fsdp2kit docs grpo`)")
            for key in ("max_turns", "environment_seconds"):
                if key in self.model_fields_set:
                    raise UserError(f"rollout.{key}", "without rollout.environment", "leave it out")
        elif name != "rows":
            what = f"{name!r} with rollout.environment, which makes its own prompts of the rows"
            raise UserError("data.format", what, "leave it out")

    def _check_ahead(self, config: Any) -> None:
        if self.embedded:
            what = f"{self.ahead} with rollout.engine = 'transformers', which generates where the trainer trains"
            raise UserError("rollout.ahead", what, "leave it out, or use a server on devices of its own")
        if self.sleep:
            what = f"with rollout.ahead = {self.ahead}: what trains while a server generates cannot sleep"
            raise UserError("rollout.sleep", what, "leave one of them out")
        if self.updates == 1 and not config.grpo.importance_cap:
            what = f"0 with rollout.ahead = {self.ahead}: nothing would correct for the older weights that sampled"
            raise UserError("grpo.importance_cap", what, "leave it out")

    def identity(self) -> dict[str, str]:
        return {"rollout.n": str(self.n), "rollout.updates": str(self.updates)}

    def needs(self, config: Any) -> Needs:
        engine = EngineNeeds(
            embedded=self.embedded,
            dtype=config.engine_dtype,
            tp=self.tp,
            batch_size=self.batch_size,
            updates=self.updates,
            longest_prompt=config.data.seq_len - (self.max_new_tokens if self.environment is None else 1),
            sleeps=self.sleep,
            bucket_bytes=config.weight_sync.bucket_mib * 2**20,
        )
        may_sleep = self.embedded and not self.sleep and config.fsdp.offload != "params"
        return Needs(engine=engine, savings={"rollout.sleep": True} if may_sleep else {})
