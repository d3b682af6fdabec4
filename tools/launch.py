"""Write a launch file for several nodes (Slurm, Kubernetes, SkyPilot, ssh), and plan the run. Submits nothing.

fsdp2kit launch slurm toml/x.toml --nodes 4 --gpus-per-node 8 [--time 24:00:00] [section.key=value ...]
    [--device h100] [--out FILE [--overwrite]]

Without --out the file goes to stdout; everything else goes to stderr. The files are those in tools/launch/, filled in.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import sys
from pathlib import Path

from fsdp2kit.console import in_one_line, positive, show, user_path
from fsdp2kit.errors import UserError, did_you_mean
from fsdp2kit.files.redaction import holds_secret

FOLDER = Path(__file__).resolve().parent / "launch"
_SUBMIT = {
    "slurm": ("slurm.sbatch", "sbatch"),
    "trainjob": ("trainjob.yaml", "kubectl apply -f"),
    "pytorchjob": ("pytorchjob.yaml", "kubectl apply -f"),
    "skypilot": ("skypilot.yaml", "sky jobs launch"),
    "ssh": ("ssh.sh", "bash"),
}
# What is filled in, by file: text that is there exactly once, and what replaces it.
_BASH = {"ranks_per_node=8\n": "ranks_per_node={ranks}\n", "run=(toml/x.toml)\n": "run=({words})\n"}
_NAME = {"name: fsdp2kit\n": "name: {name}\n"}
_ARGS = {'args: ["toml/x.toml"]\n': "args: {items}\n"}
_VALUES = {
    "slurm": {
        "--job-name=fsdp2kit\n": "--job-name={name}\n",
        "#SBATCH --nodes=4\n": "#SBATCH --nodes={nodes}\n",
        "#SBATCH --gpus-per-node=8\n": "#SBATCH --gpus-per-node={ranks}\n",
        "#SBATCH --time=24:00:00\n": "#SBATCH --time={time}\n",
        **_BASH,
    },
    "trainjob": {
        "numNodes: 4\n": "numNodes: {nodes}\n",
        "numProcPerNode: 8\n": "numProcPerNode: {ranks}\n",
        "    resourcesPerNode:\n      limits:\n        nvidia.com/gpu: 8\n": (
            "    resourcesPerNode:\n      limits:\n        nvidia.com/gpu: {ranks}\n"
        ),
        **_NAME,
        **_ARGS,
    },
    "pytorchjob": {
        'nprocPerNode: "8"\n': 'nprocPerNode: "{ranks}"\n',
        "minReplicas: 4 ": "minReplicas: {nodes} ",
        "maxReplicas: 4\n": "maxReplicas: {nodes}\n",
        "      replicas: 4\n": "      replicas: {nodes}\n",
        "              resources:\n                limits:\n                  nvidia.com/gpu: 8\n": (
            "              resources:\n                limits:\n                  nvidia.com/gpu: {ranks}\n"
        ),
        **_NAME,
        **_ARGS,
    },
    "skypilot": {
        "num_nodes: 4\n": "num_nodes: {nodes}\n",
        "  accelerators: H100:8\n": "  accelerators: {device}:{ranks}\n",
        **_NAME,
        **_BASH,
    },
    "ssh": {"hosts=(host1 host2 host3 host4)\n": "hosts=({hosts})\n", **_BASH},
}


@in_one_line
def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, or 2 after a user's mistake."""
    options = _parse(arguments)
    if options.time is not None and (options.kind != "slurm" or not re.fullmatch(r"[\d:-]+", options.time)):
        what = f"{options.time!r} is no time limit of a {options.kind} file"
        raise UserError("--time", what, "give one as 24:00:00 or 2-00:00:00 for slurm, and none for others")
    if broken := next((each for each in options.overrides if "\n" in each), None):
        raise UserError(broken.partition("=")[0], "has a line break", "write it in the TOML")
    if secret := next((each for each in options.overrides if holds_secret(each)), None):
        what = "holds a secret, which a launch file would keep for all who read it"
        raise UserError(secret.partition("=")[0], what, "write it in the TOML")
    _check_out(options.out, options.overwrite)
    if not _checked(options):
        return 2
    text, command = fill(options), _SUBMIT[options.kind][1]
    if options.out is None:
        show(text, end="", is_data=True)
        return 0
    try:
        options.out.write_text(text, encoding="utf-8")
    except OSError as error:
        what = f"{options.out} cannot be written: {error.strerror}"
        raise UserError("--out", what, "name a file in a folder that may be written to") from None
    show(
        f"wrote {options.out}; look at its two edits, then: {command} {shlex.quote(str(options.out))}", file=sys.stderr
    )
    return 0


def fill(options: argparse.Namespace) -> str:
    """The launch file of ``options.kind``, filled in."""
    text = (FOLDER / _SUBMIT[options.kind][0]).read_text(encoding="utf-8")
    run = [options.toml, *options.overrides]
    ranks = options.ranks_per_node or options.gpus_per_node
    stem = re.sub(r"[^a-z0-9]+", "-", Path(options.toml).stem.lower()).strip("-")
    values = {
        "name": f"fsdp2kit-{stem}"[:50].rstrip("-"),
        "nodes": options.nodes,
        "ranks": ranks,
        "time": options.time or "24:00:00",
        "device": (options.device or "h100").upper(),
        "words": shlex.join(run),
        "items": json.dumps(run, ensure_ascii=False).replace("$(", "$$("),  # Kubernetes would expand $(NAME)
        "hosts": " ".join(f"host{number + 1}" for number in range(options.nodes)),
    }
    for old, new in _VALUES[options.kind].items():
        assert text.count(old) == 1, f"{old!r} is not once in the {options.kind} file"
        is_for_gpus = any(word in old for word in ("gpus-per-node", "nvidia.com", "accelerators"))
        text = text.replace(old, "" if is_for_gpus and options.ranks_per_node else new.format(**values))
    return text


def _check_out(path: Path | None, overwrite: bool) -> None:
    if path is None:
        return
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError("--out", f"{path} cannot be written", "name a file in a folder that exists")
    if path.exists() and not overwrite:
        raise UserError("--out", f"{path} exists", "name another file, or add --overwrite")


def _checked(options: argparse.Namespace) -> bool:
    """Check and plan the run on that many ranks, on stderr; False after an error, which has been printed."""
    ranks = options.ranks_per_node or options.gpus_per_node
    world_size = options.nodes * ranks
    os.environ["HF_HUB_OFFLINE"] = "1"  # before the hub client is imported: nothing here waits for a network
    with _environment(LOCAL_WORLD_SIZE=str(ranks)), contextlib.redirect_stdout(sys.stderr):
        from fsdp2kit import run
        from fsdp2kit.planner.devices import find_device
        from fsdp2kit.planner.estimate import estimate, plan_for
        from fsdp2kit.planner.report import figures

        device = find_device(options.device)
        if run.main([options.toml, *options.overrides, "--check", "--world-size", str(world_size)]):
            return False
        _, config = run.load(options.toml, options.overrides)
        try:
            model, plan = plan_for(config, world_size=world_size, local_world_size=ranks)
            found = estimate(config, model, plan, device=device, local_world_size=ranks)
        except UserError as problem:  # no mistake: the check has passed
            show(f"not planned: {problem}")
        else:
            show(*figures(found), sep="\n")
    return True


@contextlib.contextmanager
def _environment(**values: str):
    """Set environment variables for a while."""
    former = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in former.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fsdp2kit launch", description=__doc__.splitlines()[0])
    parser.add_argument(
        "kind", type=_kind, help=f"{', '.join(_SUBMIT)}; trainjob is Kubeflow Trainer v2, pytorchjob its v1"
    )
    parser.add_argument("toml", help="path of a TOML, or the name of one that comes with fsdp2kit")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="as for a run")
    parser.add_argument("--nodes", type=positive, required=True, metavar="N")
    ranks = parser.add_mutually_exclusive_group(required=True)
    ranks.add_argument("--gpus-per-node", type=positive, metavar="N", help="each gets a rank")
    ranks.add_argument("--ranks-per-node", type=positive, metavar="N", help="of nodes without GPUs")
    parser.add_argument("--time", help="time limit under Slurm (24:00:00)")
    parser.add_argument("--device", metavar="NAME", help="for the plan, and of SkyPilot's nodes: h100, a100, …")
    parser.add_argument("--out", type=user_path, metavar="FILE", help="write the file here, not to stdout")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")
    return parser.parse_intermixed_args(arguments)


def _kind(text: str) -> str:
    if text not in _SUBMIT:
        known = f"name one of {', '.join(_SUBMIT)}"
        raise UserError("launch", f"{text!r} is no kind of launch file", did_you_mean(text, _SUBMIT, otherwise=known))
    return text


if __name__ == "__main__":
    sys.exit(main())
