"""[preflight]: the refusals that a user may waive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fsdp2kit.config.section import Section


@dataclass(frozen=True)
class Waiver:
    """What a name in `preflight.allow` stands for."""

    allows: str
    """What is then trained."""
    reason: str
    """Why it is refused without the name."""
    instead: str
    """What else to do about it."""


# Every refusal that can be waived. Checks, the accepted names and docs/troubleshooting.md read this table.
WAIVERS = {
    "dropout": Waiver(
        allows="dropout, and noise in routing",
        reason="its masks would depend on the mesh",
        instead="set the named keys to 0.0",
    ),
    "router_aux_loss": Waiver(
        allows="`model.config.output_router_logits`, without the loss that it stands for",
        reason="that loss of a micro-batch depends on the mesh, and is no part of the loss here",
        instead='false, and [`moe.balance = "aux"`](moe.md)',
    ),
    "other_tokenizer": Waiver(
        allows="`model.tokenizer`: a model that learns new tokens from scratch",
        reason="it gives tokens other ids than the model's own tokenizer, so the model reads other texts",
        instead="leave it out",
    ),
}

if TYPE_CHECKING:
    WaiverName = str
else:
    WaiverName = Literal[tuple(WAIVERS)]


class PreflightConfig(Section):
    """Waives refusals of combinations that would silently change the mathematics."""

    allow: list[WaiverName] = []
    """Names of the refusals to waive; "other_tokenizer": `model.tokenizer` gives tokens other ids than the model's."""

    def allows(self, name: WaiverName) -> bool:
        """Whether a refusal of `WAIVERS` is waived."""
        assert name in WAIVERS, f"{name} is no refusal that can be waived"
        return name in self.allow


def key_to_allow(name: WaiverName) -> str:
    """What to write in a TOML to waive a refusal of `WAIVERS`."""
    assert name in WAIVERS, f"{name} is no refusal that can be waived"
    return f'preflight.allow = ["{name}"]'
