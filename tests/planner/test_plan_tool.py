"""tools/plan.py: what it prints, what it proposes, and what it refuses in one line."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fsdp2kit.config.schema import ModelConfig
from fsdp2kit.model.build import build_model
from fsdp2kit.planner import estimate as module
from fsdp2kit.planner import report
from fsdp2kit.planner.devices import DEVICES, find_device
from fsdp2kit.planner.memory import step_moments
from fsdp2kit.planner.rollouts import kv_cache_bytes
from fsdp2kit.planner.search import Candidate, Search, changed, options
from fsdp2kit.run import main as fsdp2kit_run
from tests.planner.helpers.models import LLAMA_8B, LLAMA_70B, QWEN3_30B, config_of, planned
from tools import plan as tool

TOML = """
recipe = "pretrain"
[model]
weights = "random"
config = {{ {fields} }}
[data]
format = "synthetic"
seq_len = 8192
[train]
steps = 1
global_batch_size = 1024
"""


@pytest.fixture
def toml(tmp_path: Path) -> Any:
    def write(model: dict[str, Any]) -> str:
        fields = ", ".join(f"{name} = {json.dumps(value)}" for name, value in model.items())
        path = tmp_path / "x.toml"
        path.write_text(TOML.format(fields=fields))
        return str(path)

    return write


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = tool.main(list(arguments))
    return code, capsys.readouterr().out


@pytest.mark.parametrize("ranks", ["64", "1024"])
def test_70b_is_planned_in_seconds(ranks: str, toml: Any, capsys: pytest.CaptureFixture[str]) -> None:
    started = time.process_time()  # of this process: other tests share the machine
    code, text = run(capsys, toml(LLAMA_70B), "--world-size", ranks, "--device", "h100", "--json")
    assert time.process_time() - started < 5
    found = json.loads(text)
    assert found["mesh"] == {"dp_replicate": 1, "dp_shard": int(ranks), "cp": 1, "ep": 1}
    assert code == (0 if found["fits"] else 1)
    for pace in (found["speed"]["low"], found["speed"]["high"]):
        assert pace["overlapped"] <= pace["serial"]
    assert found["speed"]["high"]["overlapped"] <= found["speed"]["low"]["overlapped"]


def test_the_attention_of_a_run_on_gpus_is_said(toml: Any, capsys: pytest.CaptureFixture[str]) -> None:
    line = "attention: varlen (auto: packed documents need no mask), computed by FlashAttention-"
    assert f"{line}2 (auto)" in run(capsys, toml(LLAMA_8B), "--world-size", "8")[1]
    _, text = run(capsys, toml(LLAMA_8B), "--world-size", "8", "--json", "model.kernel=flash3")
    assert json.loads(text)["attention"] == f"{line}3 (as asked for)"


HEAVY = {"accelerate", "datasets", "matplotlib", "pandas", "peft", "torchao", "torchvision", "wandb"}


@pytest.mark.full
def test_a_plan_imports_little_beside_torch_and_transformers(toml: Any) -> None:
    """Most of the command's time is imports."""
    code = "import sys; from tools import plan; plan.main(sys.argv[1:]); print(*sys.modules)"
    arguments = [toml({**LLAMA_8B, "num_hidden_layers": 2}), "--json"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    imported = HEAVY.intersection(done.stdout.splitlines()[-1].split())
    assert imported <= {"accelerate", "torchao"}  # which transformers imports itself


def test_fit_proposes_the_cheapest_change(toml: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = toml(LLAMA_8B)
    given = (path, "--world-size", "8", "--device-memory", "70", "--json", "train.micro_batch_size=4")
    code, text = run(capsys, *given, "--fit")
    found = json.loads(text)
    assert code == 1
    assert found["fits"] is False
    assert found["blame"] == "activations"
    proposed = found["fit"]
    assert all(one["fits"] for one in proposed)
    # One is not enough, and the two cheapest are.
    assert proposed[0]["values"] == {"train.micro_batch_size": 1, "activation_checkpointing.mode": "selective"}


@pytest.mark.full
def test_experts_are_partitioned_where_that_fits(toml: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = toml({**QWEN3_30B, "num_hidden_layers": 3, "vocab_size": 32000})
    given = (path, "--world-size", "8", "--fit", "data.seq_len=4096", "activation_checkpointing.mode=full")
    alone = json.loads(run(capsys, *given, "--device-memory", "70", "--json", "mesh.ep=8")[1])
    gathered = json.loads(run(capsys, *given, "--device-memory", "70", "--json")[1])
    assert gathered["dispatch"] is None
    assert alone["dispatch"]["rows"] == 4096 * 8
    middle = (alone["needed"] + gathered["needed"]) / 2 / 2**30
    found = json.loads(run(capsys, *given, "--device-memory", str(middle), "--json")[1])
    assert {"mesh.ep": 8} in [one["values"] for one in found["fit"]]


@pytest.mark.full
def test_more_ranks_are_proposed_last(toml: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Muon's updates stay on the device, and so must parameters and gradients: 8 bytes a parameter."""
    arguments = ("--world-size", "1", "--device", "h100", "--fit", "--json", "optimizer.name=muon")
    path = toml({**LLAMA_70B, "num_hidden_layers": 20})
    _, text = run(capsys, path, *arguments)
    (proposed,) = json.loads(text)["fit"]
    assert proposed["fits"]
    assert proposed["world_size"] > 1
    assert "train.global_batch_size" not in proposed["values"]  # 1,024 rows are enough for them all

    # One row is not, and what the config gives a number stays no longer than it can.
    given = ("train.global_batch_size=1", "mesh.dp_shard=1")
    _, text = run(capsys, path, *arguments, *given)
    (proposed,) = json.loads(text)["fit"]
    assert proposed["values"]["train.global_batch_size"] == proposed["world_size"] > 1
    assert proposed["values"]["mesh.dp_shard"] == "auto"


@pytest.mark.full
def test_what_is_proposed_can_be_pasted_as_overrides(toml: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = toml(LLAMA_8B)
    given = ["--world-size", "8", "--device-memory", "32", "mesh.dp_shard=8", "train.micro_batch_size=2"]
    given += ["activation_checkpointing.mode=selective", "activation_checkpointing.every=2"]
    _, text = run(capsys, path, *given, "--json", "--fit")
    first, *others = json.loads(text)["fit"]
    assert not others
    _, text = run(capsys, path, *given, "--fit")
    words = text.splitlines()[0].removeprefix("fit: ").partition(":")[0].split()
    assert len(words) == len(first["values"]) > 1
    code, text = run(capsys, path, *given, "--json", *words)
    assert (code, json.loads(text)["peak"]) == (0, first["peak"])


@pytest.mark.full
def test_each_question_is_answered_in_its_first_line(toml: Any, capsys: pytest.CaptureFixture[str]) -> None:
    given = (toml({**LLAMA_8B, "num_hidden_layers": 2}), "--world-size", "2", "--device", "h100")
    _, text = run(capsys, *given, "--sweep")
    assert text.startswith("sweep: fastest of what fits, ")
    first, *others = text.splitlines()
    assert "tokens/s: mesh.cp=1 activation_checkpointing.mode=" in first
    assert [line.startswith("  or mesh.cp=") for line in others[:4]] == [True, True, True, False]
    assert "needed GiB" not in text
    _, text = run(capsys, *given, "--sweep", "--verbose")
    assert "needed GiB" in text
    _, text = run(capsys, *given, "--longest")
    assert text.startswith("longest: ")
    assert "peak of each phase" not in text
    code, text = run(capsys, *given, "--fit")
    assert code == 0
    assert text.startswith("fit: it fits as it is; ")
    _, text = run(capsys, *given)
    assert "peak of each phase" in text


@pytest.mark.full
def test_fit_names_the_next_best_in_a_line_each(toml: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = toml({**LLAMA_8B, "num_hidden_layers": 8})
    given = (path, "--world-size", "8", "--device-memory", "48", "train.micro_batch_size=4", "--fit")
    _, text = run(capsys, *given, "--json")
    found = json.loads(text)["fit"]
    _, text = run(capsys, *given)
    first, *others = text.splitlines()
    needed = found[0]["needed"] / 2**30
    assert first == f"fit: train.micro_batch_size=1: {needed:,.2f} GiB needed of 48.00"
    assert len(found) > 1
    assert [line.split(":")[0].split()[1] for line in others[: len(found) - 1]] == [
        next(f"{key}={value}" for key, value in one["values"].items()) for one in found[1:]
    ]
    assert "needed GiB" not in text


def test_a_config_fits_on_more_ranks_as_it_is_or_nowhere() -> None:
    more = Candidate({}, 16, planned(config_of({**LLAMA_8B, "num_hidden_layers": 1}), device=find_device("h100")))
    (said,) = report.answers("fit", [more], world_size=8)
    assert said.startswith(f"fit: as it is on 16 ranks: {more.estimate.needed / 2**30:,.2f} GiB needed of 79.10, ")
    answer = "fit: nothing that was tried fits; use a larger device, more ranks, or shorter sequences"
    assert report.answers("fit", [], world_size=8) == [answer]


def test_what_fit_proposes_is_new() -> None:
    """ "full" is proposed with ``every = 1``, for configs that recompute every second layer; others have that."""
    for every, proposed in ((1, {}), (2, {"activation_checkpointing.every": 1})):
        section = {"mode": "selective", "every": every}
        config = config_of({**LLAMA_8B, "num_hidden_layers": 2}, activation_checkpointing=section)
        whole = changed(config, {"activation_checkpointing.mode": "full", "activation_checkpointing.every": 1})
        room = (planned(whole).needed + planned(config).needed) / 2 / 2**30
        found = Search(config, 8, find_device(None, memory_gib=room), 8).fit()
        assert {"activation_checkpointing.mode": "full", **proposed} in [one.values for one in found]


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        ([], {}, "on 2 ranks (the fewest ranks that [mesh] allows; --world-size N plans another number)"),
        (["--world-size", "8"], {}, "on 8 ranks"),
        (["--world-size", "8"], {"WORLD_SIZE": "2"}, "on 8 ranks"),
        ([], {"WORLD_SIZE": "4"}, "on 4 ranks (WORLD_SIZE)"),
    ],
)
def test_a_plan_and_a_check_take_the_same_ranks(
    arguments: list[str], environment: dict[str, str], said: str, toml: Any, monkeypatch: Any, capsys: Any
) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    path = toml({**LLAMA_8B, "num_hidden_layers": 1})
    code, text = run(capsys, path, "mesh.cp=2", *arguments)
    assert code == 0
    assert text.splitlines()[0] == f"{path} {said}"
    assert fsdp2kit_run([path, "--check", "mesh.cp=2", *arguments]) == 0
    assert said.replace("plans", "checks") in capsys.readouterr().out


def test_the_bandwidth_between_nodes_is_given(toml: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Seconds over the network are bytes ÷ bandwidth: a tenth of it takes ten times as long there."""
    path = toml({**LLAMA_8B, "num_hidden_layers": 1})
    seconds = []
    for between in ("50", "5"):
        given = ("--world-size", "2", "--local-world-size", "1", "--device", "h100", "--inter-node-bandwidth", between)
        _, text = run(capsys, path, *given, "--json")
        seconds.append(json.loads(text)["speed"]["communication"])
    assert seconds[1] == pytest.approx(10 * seconds[0])
    default = find_device("h100")
    assert default is not None
    assert default.network_bandwidth == 50e9


def test_nothing_stays_frozen(toml: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """triton reports what the interpreter's end cannot free: 27 lines after each plan."""
    gc.unfreeze()
    run(capsys, toml({**LLAMA_8B, "num_hidden_layers": 1}))
    assert gc.get_freeze_count() == 0


@pytest.mark.full
def test_other_prices_than_the_main_plans_are_not_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(module, "step_moments", lambda step: (calls.append(step), step_moments(step))[1])
    search = Search(config_of({**LLAMA_8B, "num_hidden_layers": 2}, rows=64), 8, find_device("h100"), 8)
    assert len(list(search.sweep())) == len(calls) > 10


@pytest.mark.full
def test_a_length_below_2048_tokens_is_found(toml: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The model's loss alone takes more than what is left for 2,048 tokens."""
    path, model = toml({**LLAMA_8B, "num_hidden_layers": 4}), {**LLAMA_8B, "num_hidden_layers": 4}

    def peak(length: int) -> int:
        return planned(config_of(model, data={"seq_len": length}, rows=1024)).needed

    between = (peak(1024) + peak(2048)) / 2 / 2**30
    given = (path, "--world-size", "8", "--device-memory", str(between), "--longest", "--json")
    for own in (1024, 1000, 96):
        _, text = run(capsys, *given, f"data.seq_len={own}")
        (best,) = json.loads(text)["longest"]
        length = best["values"]["data.seq_len"]
        assert max(own, 1024) <= length < 2048
        assert best["fits"]
        assert peak(length + 64) > between * 2**30


@pytest.mark.full
def test_the_price_of_either_way_to_reduce_is_said(toml: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """8B on 8 ranks: whole gradients in float32 are 29.9 GiB, shards 3.7; a reduction sends 7/8 of the former."""
    given = (toml(LLAMA_8B), "--world-size", "8", "--device", "h100", "activation_checkpointing.mode=full")
    found = {}
    for value in ("true", "false"):
        _, text = run(capsys, *given, f"fsdp.reduce_every_micro_batch={value}", "--json")
        found[value] = json.loads(text)
    whole = 4 * 8_030_261_248
    more = found["false"]["phases"]["backward"]["bytes"]
    assert more["unsharded gradients"] >= whole
    each, other = found["true"]["reduction"], found["false"]["reduction"]
    assert (each["every_micro_batch"], other["every_micro_batch"]) == (True, False)
    assert each["other_peak"] == -other["other_peak"] > 0.8 * whole * 7 / 8
    assert each["other_sent"] == -other["other_sent"] == pytest.approx(-127 * whole * 7 / 8, rel=1e-3)
    _, text = run(capsys, *given)
    text = " ".join(text.split())
    assert "gradients are reduced after each of 128 micro-batches; fsdp.reduce_every_micro_batch = false takes" in text
    _, text = run(capsys, *given, "fsdp.strategy=no_shard", "--json")
    assert json.loads(text)["reduction"] is None


@pytest.mark.full
def test_ones_own_mfu(toml: Any, capsys: pytest.CaptureFixture[str]) -> None:
    given = (toml(LLAMA_8B), "--world-size", "8", "--device", "h100", "--mfu", "0.4")
    _, text = run(capsys, *given, "--json")
    speed = json.loads(text)["speed"]
    assert speed["low"] == speed["high"]
    assert speed["low"]["mfu"] == pytest.approx(0.4)
    _, text = run(capsys, *given, "--sweep", "--json")
    by_mode = {one["values"]["activation_checkpointing.mode"]: one for one in json.loads(text)["sweep"]}
    assert by_mode["full"]["speed"]["low"]["mfu"] < 0.33  # recomputed


@pytest.mark.full
def test_the_longest_sequence_fits_and_the_next_one_does_not(toml: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--world-size", "8", "--device", "h100", "--longest", "--json", "activation_checkpointing.mode=full")
    _, text = run(capsys, toml(LLAMA_8B), *arguments)
    (best,) = json.loads(text)["longest"]
    assert best["fits"]
    config = config_of(LLAMA_8B, data={"seq_len": best["values"]["data.seq_len"] + 2048}, rows=1024)
    longer = changed(config, {"activation_checkpointing.mode": "full"})
    assert planned(longer, device=find_device("h100")).fits is False


@pytest.mark.full
def test_the_longest_sequence_is_looked_for_from_the_given_one_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Shorter ones are refused: an answer of 3,000 tokens does not fit into 2,048."""
    arguments = ["--world-size", "2", "--device", "h100", "--longest", "--json"]
    settings = ["data.seq_len=4096", "rollout.max_new_tokens=3000"]
    _, text = run(capsys, "toml/grpo_demo.toml", *arguments, *settings)
    (best,) = json.loads(text)["longest"]
    assert best["fits"]
    assert best["values"]["data.seq_len"] > 4096


@pytest.mark.full
def test_a_sweep_keeps_what_is_given_where_it_can(toml: Any, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("mesh.dp_shard=2", "train.micro_batch_size=3", "train.global_batch_size=24")
    given = (*given, "activation_checkpointing.mode=full", "activation_checkpointing.every=2")
    arguments = ("--world-size", "2", "--sweep", "--json", "activation_checkpointing.offload=true")
    _, text = run(capsys, toml({**LLAMA_8B, "num_hidden_layers": 2}), *arguments, *given)
    found = [one["values"] for one in json.loads(text)["sweep"]]
    assert {one["train.micro_batch_size"] for one in found} == {1, 2, 3, 4}
    assert {one["activation_checkpointing.mode"] for one in found} == {"none", "selective", "full"}
    assert len(found) == 2 * 3 * 4
    assert {one.get("mesh.dp_shard") for one in found if one["mesh.cp"] == 1} == {None}
    assert {one.get("mesh.dp_shard") for one in found if one["mesh.cp"] == 2} == {"auto"}


def test_a_sweep_has_every_combination_that_is_possible(toml: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, text = run(capsys, toml({**LLAMA_8B, "num_hidden_layers": 2}), "--world-size", "2", "--sweep", "--json")
    found = json.loads(text)["sweep"]
    assert len(found) == 2 * 3 * 3
    peaks = {tuple(one["values"].values())[:3]: one["peak"]["bytes"] for one in found}
    assert peaks[1, "full", 1] < peaks[1, "selective", 1] < peaks[1, "none", 1] < peaks[1, "none", 2]
    assert peaks[2, "none", 1] < peaks[1, "none", 1]


@pytest.mark.full
def test_pictures_and_text(toml: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    png, page = tmp_path / "x.png", tmp_path / "x.html"
    arguments = ("--device", "h100", "--png", str(png), "--html", str(page), "--kv-cache", "32", "4096")
    _, text = run(capsys, toml({**LLAMA_8B, "num_hidden_layers": 2}), "--world-size", "8", *arguments)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "data:image/png;base64," in page.read_text()
    for words in ("peak of each phase", "unsharded parameters", "reduce_scatter", "allowance", "tokens/s", "KV cache"):
        assert words in text
    assert "arithmetic reaches 32% to 39% of 989" in " ".join(text.split())


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--device", "h1000"], "--device: 'h1000' is not a device that the planner knows; did you mean h100?"),
        (["--world-size", "0"], "--world-size: 0 is no number of ranks"),
        (["--tp", "0"], "--tp: 0 is no number of ranks"),
        (["--tp", "2"], "--tp: is for the cache of rollouts; give --kv-cache"),
        (["--device-memory", "-3"], "--device-memory: -3.0 is no number of GiB"),
        (["--device-memory", "inf"], "--device-memory: inf is no number of GiB"),
        (["--device-memory", "1e300"], "--device-memory: 1e+300 is no number of GiB"),
        (["--device", ""], "--device: '' is not a device that the planner knows"),
        (["--kv-cache", "0", "100"], "--kv-cache: [0, 100] are no rows and length"),
        (["--png", "/nowhere/x.png"], "--png: /nowhere/x.png cannot be written"),
        (["--png", "/proc/x.png"], "--png: /proc/x.png cannot be written: "),
        (["--png", "Makefile"], "--png Makefile: is there, and is no PNG; choose another"),
        (["--html", "README.md"], "--html README.md: is there, and is no HTML page; choose another"),
        (["--html", "/dev/null"], "--html /dev/null: is there, and is no file; choose another"),
        (["--mfu", "40"], "--mfu: 40.0 is no share of a device's peak; give one between 0 and 1"),
        (["--inter-node-bandwidth", "0"], "--inter-node-bandwidth: 0.0 is no number of GB/s; give e.g. 50"),
        (["--inter-node-bandwidth", "9"], "--inter-node-bandwidth: is a device's; give --device"),
        (["--trace"], "--trace: is no option any more: the tests compare the plan with a trace"),
        (["--fit"], "--fit: needs to know what must fit into"),
        (["--world-size", "6", "mesh.cp=4"], "mesh.cp: 4 does not divide the world size 6"),
        (["model.path=toml"], "is not a model directory (no config.json)"),
        (["model.config={}"], "neither model.path nor model.config.model_type is given"),
    ],
)
def test_bad_input_gets_one_line(
    arguments: list[str], what: str, toml: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main([toml({**LLAMA_8B, "num_hidden_layers": 2}), *arguments]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.strip().splitlines()
    assert line.startswith("error: ")
    assert what in line
    assert not captured.out


def test_what_is_not_planned_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--world-size", "1", "mesh.cp=1", f"model.path={tmp_path}"]
    assert tool.main(["toml/distill_smollm2.toml", *settings]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "the memory of distill.teacher, a model beside the trained one, is not planned" in line


@pytest.mark.full
def test_rewards_have_phases_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["toml/grpo_demo.toml", "--world-size", "2", "--device", "h100"]
    assert tool.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    phases = ["load", "forward", "backward", "optimizer", "sync", "generate", "save", "export"]
    assert list(found["phases"]) == phases
    assert (found["collectives"], found["speed"]) == ([], None)
    assert tool.main(command) == 0
    assert "time and communication are planned for cross-entropy alone" in capsys.readouterr().out


def test_devices() -> None:
    assert all(device.peak_flops for device in DEVICES.values())
    given = find_device("a100", memory_gib=40)
    assert given is not None
    assert given.memory == 40 * 2**30
    assert find_device(None, memory_gib=80).peak_flops is None  # pyright: ignore[reportOptionalMemberAccess]


def test_kv_cache() -> None:
    """2 × layers × heads × width × bytes × tokens; a window bounds the tokens of its layers."""
    model = build_model(ModelConfig(weights="random", config={**LLAMA_8B, "num_hidden_layers": 4}))
    whole = kv_cache_bytes(model, rows=3, length=1000)
    assert whole == 2 * 4 * 8 * 128 * 2 * 3 * 1000
    assert kv_cache_bytes(model, rows=3, length=1000, tp=2) == whole / 2
    assert kv_cache_bytes(model, rows=3, length=1000, tp=16) == whole / 8  # no rank has less than a head
    assert kv_cache_bytes(model, rows=3, length=1000, dtype="float32") == 2 * whole
    sliding = {"model_type": "mistral", "sliding_window": 100, "head_dim": 128}
    shape = {name: LLAMA_8B[name] for name in LLAMA_8B if name != "model_type"}
    windowed = build_model(ModelConfig(weights="random", config={**shape, **sliding, "num_hidden_layers": 4}))
    assert kv_cache_bytes(windowed, rows=3, length=1000) == whole / 10


NARROW = {"vocab_size": 100, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("fields", "a_token"),
    [
        # Latent attention: keys of 12 + 4, values of 8.
        (
            {
                "model_type": "deepseek_v3",
                "num_hidden_layers": 3,
                "qk_nope_head_dim": 12,
                "qk_rope_head_dim": 4,
                "v_head_dim": 8,
                **NARROW,
            },
            3 * 4 * (16 + 8),
        ),
        # Every fourth layer attends; the others keep a state of a fixed size.
        (
            {"model_type": "qwen3_next", "num_hidden_layers": 8, "head_dim": 16, **NARROW},
            2 * 4 * 2 * 16,
        ),
        ({"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 100}, 0),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_kv_cache_of_other_architectures(fields: dict[str, Any], a_token: int) -> None:
    model = build_model(ModelConfig(weights="random", config=fields))
    assert kv_cache_bytes(model, rows=3, length=10) == 2 * 3 * 10 * a_token


@pytest.mark.full
def test_what_takes_too_long_to_count_is_refused(
    toml: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer without a kernel that goes through its tokens one by one."""
    monkeypatch.setattr("fsdp2kit.planner.count._MOST_CALLS", 1000)
    mamba = {"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 100}
    assert tool.main([toml(mamba), "data.pack=false"]) == 2
    assert "the memory of MambaBlock is not planned: it goes through its tokens" in capsys.readouterr().err


def test_every_option_is_a_change_that_its_config_takes() -> None:
    config = config_of(LLAMA_8B, train={"micro_batch_size": 2}, fsdp={"strategy": "hybrid_shard_zero2"})
    for option in options(config):
        assert changed(config, option.values) != config, option


@pytest.mark.full
def test_ranks_of_a_node_are_those_of_the_environment(
    toml: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for value, nodes in (("4", "2 nodes"), ("8", "1 node")):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
        _, said = run(capsys, toml(LLAMA_8B), "--world-size", "8")
        assert f"mesh on {nodes}" in said
