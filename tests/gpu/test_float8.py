"""Float8 kernels on one CUDA device, compiled and not, stay close to bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fsdp2kit.config.schema import CompileConfig
from fsdp2kit.job.distributed import World
from fsdp2kit.parity.engine import Sharded
from tests.parallel.helpers import float8 as jobs
from tests.support.cases import Case
from tests.support.models import make_batches

pytestmark = pytest.mark.gpu
pytest.importorskip("torchao.float8")

SECTIONS: list[dict[str, Any]] = [
    {"recipe": "tensorwise"},
    {"recipe": "rowwise"},
    {"recipe": "rowwise_with_gw_hp"},
]


@pytest.fixture(autouse=True)
def _has_float8() -> None:
    if torch.version.hip is None and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: "-".join(map(str, section.values())))
def test_losses_stay_close_to_those_of_bfloat16(
    section: dict[str, Any], compiled: bool, tmp_path: Path, world: World
) -> None:
    jobs.write_model(tmp_path)
    batches = [batch for _ in range(4) for batch in make_batches()]
    case = Case(jobs.KIND, micro=4, lr=3e-3, fsdp=(("param_dtype", "bfloat16"),))

    def losses(float8: dict[str, Any]) -> list[float]:
        config = jobs.config_of(tmp_path, case, float8, steps=len(batches))
        config = config.model_copy(update={"compile": CompileConfig(enabled=compiled)})
        return Sharded(config, world=world).curves(batches).loss

    found, plain = losses(section), losses({"recipe": "none"})

    assert found != plain
    np.testing.assert_allclose(found, plain, rtol=0.08)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_kernels_multiply_as_the_emulation_does(recipe: str, tmp_path: Path, world: World) -> None:
    jobs.write_model(tmp_path)
    batches = make_batches(1)
    case = Case(jobs.KIND, micro=4, fsdp=(("param_dtype", "bfloat16"),))

    def loss(*, emulate: bool) -> float:
        config = jobs.config_of(tmp_path, case, {"recipe": recipe, "emulate": emulate}, steps=1)
        return Sharded(config, world=world).curves(batches).loss[0]

    assert loss(emulate=False) == pytest.approx(loss(emulate=True), rel=5e-3)
