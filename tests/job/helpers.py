"""Stand-ins for srun, scontrol, ssh and torchrun (with one rank). They note in a file how they were called."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# srun starts its command on a node. It sends each signal that it gets to every process of that command.
_SRUN = """
import contextlib, os, signal, subprocess, sys
command = sys.argv[next(at for at, word in enumerate(sys.argv) if at and not word.startswith("-")):]
def forward(*_):
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.killpg(task.pid, signal.SIGUSR1)
signal.signal(signal.SIGUSR1, forward)
task = subprocess.Popen(command, start_new_session=True)
code = task.wait()
signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Python forgets its handlers before it ends
sys.exit(code % 256)
"""
# torchrun leaves SIGUSR1 as it finds it; a rank handles it only when it trains, here after half a second.
_TORCHRUN = """
import json, os, subprocess, sys
with open(os.environ["SAID"], "a") as said:
    print("torchrun", json.dumps(sys.argv[1:]), file=said)
rank = subprocess.run([sys.executable, "-c", os.environ["RANK_CODE"], *sys.argv[sys.argv.index("-m") + 1:]])
sys.exit(int(rank.returncode != 0))
"""
_SCONTROL = 'echo "scontrol $*" >> "$SAID"'
_SSH = 'echo "ssh $2" >> "$SAID"; shift 2; exec setsid bash -c "$*"'  # ssh -n HOST COMMAND, in a session of its own

ENDS = "raise SystemExit({code})"
"""A rank that ends by itself with an exit code."""
TRAINS = """
import os, signal, sys, time
def stop(*_):
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as it was before
    sys.exit({code})
time.sleep(0.5)
signal.signal(signal.SIGUSR1, stop)
with open(os.environ["SAID"], "a") as said:
    print("trains", file=said)
time.sleep(60)
"""
"""A rank that trains until SIGUSR1, then ends with an exit code."""


def install(folder: Path, *, rank: str, job: dict[str, str]) -> dict[str, str]:
    """Write the commands into ``folder``.

    Args:
        rank: Python code of a rank.
        job: environment variables of the job.

    Returns:
        The environment in which they are found; ``SAID`` is the file they write to.
    """
    python = f"#!{sys.executable}\n"
    scripts = {"srun": python + _SRUN, "torchrun": python + _TORCHRUN}
    # `sleep` is shorter here: the Slurm file repeats its signal every five seconds.
    shells = {"scontrol": _SCONTROL, "ssh": _SSH, "sleep": "exec /bin/sleep 0.1"}
    scripts |= {name: f"#!/bin/bash\n{text}\n" for name, text in shells.items()}
    folder.mkdir()
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    path = f"{folder}:{os.environ['PATH']}"
    return {**kept, "PATH": path, "SAID": str(folder / "said"), "RANK_CODE": rank, **job}


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in found.read_text().split()] if found.exists() else []


def steps_done(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
