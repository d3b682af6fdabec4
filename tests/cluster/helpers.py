"""Two hosts on one machine: namespaces of network, mounts and host name, joined by a virtual cable.

A host lives as long as its first process, which ends with this one. Nothing is left on the machine after that, since
devices, mounts and names are in the namespaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.workers import FORKS, _be_command

ROOT = Path(__file__).resolve().parents[2]
NAMESPACES = ("net", "uts", "mnt")
SPACES = ("--net", "--uts", "--mount")
DEVICE = "cable"
PORT = "29511"


def why_not() -> str | None:
    """Why this machine does not permit namespaces; None if it does."""
    missing = [name for name in ("unshare", "nsenter", "ip", "mount") if shutil.which(name) is None]
    if missing:
        return f"two hosts need {', '.join(missing)}"
    tried = subprocess.run(["unshare", *SPACES, "ip", "link", "set", "lo", "up"], capture_output=True, text=True)
    return f"two hosts need namespaces: {tried.stderr.strip()}" if tried.returncode else None


@dataclass(frozen=True)
class Hold:
    """A place where a rank waits: its n-th call of a function.

    The rank makes the file ``mark`` when it is there, and goes on when that file is gone.
    """

    rank: int
    function: str
    """E.g. ``"fsdp2kit.train.loop:clip_gradients"``, or ``"module:Class.method"``."""
    occurrence: int
    mark: Path

    def install(self) -> None:
        """Wrap the function in this process."""
        module, _, names = self.function.partition(":")
        *owners, name = names.split(".")
        owner: Any = importlib.import_module(module)
        for part in owners:
            owner = getattr(owner, part)
        original, calls = getattr(owner, name), [0]

        def held(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == self.occurrence:
                self.mark.touch()
                while self.mark.exists():
                    time.sleep(0.02)
            return original(*args, **kwargs)

        setattr(owner, name, held)


@dataclass
class Host:
    """One of two hosts; `index` is also its node rank."""

    index: int
    process: subprocess.Popen
    ranks: list[Any] = field(default_factory=list)
    agents: list[subprocess.Popen] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"host-{'ab'[self.index]}"

    @property
    def address(self) -> str:
        return f"10.99.0.{self.index + 1}"

    def command(self, *arguments: str) -> list[str]:
        """A command that runs here."""
        return ["nsenter", "--target", str(self.process.pid), *SPACES, f"--wd={Path.cwd()}", *arguments]

    def run(self, *arguments: str) -> None:
        subprocess.run(self.command(*arguments), check=True, capture_output=True)

    def mount_small(self, path: Path, *, size: str) -> None:
        """Put an empty disk of that size (``"64k"``) over a directory, on this host alone."""
        self.run("mount", "-t", "tmpfs", "-o", f"size={size}", "small", str(path))

    def pids(self) -> list[int]:
        """All processes here but the first."""
        own = Path(f"/proc/{self.process.pid}/ns/net").readlink()
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if (path / "ns" / "net").readlink() == own and int(path.name) != self.process.pid:
                    found.append(int(path.name))
        return found

    def end(self) -> None:
        """End all processes here but the first."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Hosts:
    """Two hosts, whose disks are shared but for what is mounted on one of them. A context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts: list[Host] = []
        self._starts = 0

    def __enter__(self) -> Hosts:
        try:
            for index in range(2):
                first = ["unshare", *SPACES, "sh", "-c", "echo ready; exec cat"]  # it ends with the pipe
                process = subprocess.Popen(first, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                self.hosts.append(Host(index, process))
                assert process.stdout is not None
                assert process.stdout.readline() == b"ready\n"
            peer = str(self[1].process.pid)
            self[0].run("ip", "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", peer)
            names = self.folder / "hosts"
            names.write_text(
                "".join(f"{host.address} {host.name}\n" for host in self.hosts)
                + "127.0.0.1 localhost\n::1 localhost\n"
            )
            for host in self.hosts:
                host.run("hostname", host.name)
                host.run("mount", "--bind", str(names), "/etc/hosts")
                host.run("ip", "address", "add", f"{host.address}/30", "dev", DEVICE)
                host.run("ip", "link", "set", "lo", "up")
                host.run("ip", "link", "set", DEVICE, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            host.end()
            for rank in host.ranks:
                rank.join()
            for agent in host.agents:
                agent.wait()
            host.process.kill()
            host.process.communicate()

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    def cut_link(self) -> None:
        """What was sent and not received is gone; connections stay, and carry nothing."""
        self[0].run("ip", "link", "set", DEVICE, "down")

    def mend_link(self) -> None:
        self[0].run("ip", "link", "set", DEVICE, "up")

    def kill_host(self, index: int) -> None:
        """As a power cut does: nothing says goodbye."""
        self.cut_link()
        self[index].end()

    def environment(self) -> dict[str, str]:
        return {"GLOO_SOCKET_IFNAME": DEVICE, "MASTER_ADDR": self[0].address, "MASTER_PORT": PORT}

    def start(
        self,
        *arguments: str,
        per_host: int = 2,
        hold: Hold | None = None,
        prepare: Callable[[int], object] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Job:
        """Start ``python -m fsdp2kit.run ARGUMENT …`` on every rank, as forks: none has to import anything.

        Args:
            prepare: a top-level function, called in every rank with the index of its host before it starts.
        """
        self._starts += 1
        size, logs, ranks = 2 * per_host, [], []
        for rank in range(size):
            host, local = self[rank // per_host], rank % per_host
            log = self.folder / f"start-{self._starts}-rank-{rank}.log"
            variables = {**self.environment(), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(per_host)}
            variables |= {
                **(environment or {}),
                "RANK": str(rank),
                "LOCAL_RANK": str(local),
                "GROUP_RANK": str(host.index),
            }
            held = hold if hold is not None and hold.rank == rank else None
            arguments_ = (host.process.pid, held, prepare, host.index, arguments, variables, str(log))
            process = FORKS.Process(target=_be_rank, args=arguments_)
            process.start()
            host.ranks.append(process)
            ranks.append(process)
            logs.append(log)
        return Job(ranks, logs)

    def start_torchrun(self, index: int, launch: Sequence[str], *arguments: str, **variables: str) -> subprocess.Popen:
        """Start torchrun on a host; what it and its ranks say is in ``folder/host-….log``."""
        host = self[index]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": DEVICE}
        environment |= variables
        torchrun = [sys.executable, "-m", "torch.distributed.run", *launch, "-m", "fsdp2kit.run", *arguments]
        with (self.folder / f"{host.name}.log").open("a") as log:
            agent = subprocess.Popen(host.command(*torchrun), env=environment, stdout=log, stderr=log)
        host.agents.append(agent)
        return agent

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(self.folder.glob("host-*.log")))


@dataclass
class Job:
    """The ranks of one start, and the paths of their output."""

    ranks: list[Any]
    logs: list[Path]

    def said(self, rank: int | None = None) -> str:
        """What a rank said, or all of them."""
        logs = self.logs if rank is None else [self.logs[rank]]
        return "".join(path.read_text() for path in logs)

    def codes(self, *, seconds: float) -> list[int | None]:
        """Exit codes of all ranks; None for one that has not ended by then."""
        deadline = time.monotonic() + seconds
        for rank in self.ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
        return [rank.exitcode for rank in self.ranks]


def _be_rank(
    host: int,
    hold: Hold | None,
    prepare: Callable[[int], object] | None,
    index: int,
    arguments: tuple[str, ...],
    variables: dict[str, str],
    log: str,
) -> None:
    here = Path.cwd()
    libc = ctypes.CDLL(None, use_errno=True)
    opened = [os.open(f"/proc/{host}/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
    for number in opened:
        if libc.setns(number, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(number)
    os.chdir(here)
    platform._uname_cache = None  # it has this machine's name
    if hold is not None:
        hold.install()
    if prepare is not None:
        prepare(index)
    _be_command("fsdp2kit.run", arguments, variables, log, log)


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    """Two hosts for a test, which is skipped where they are not permitted."""
    import pytest

    if (why := why_not()) is not None:
        pytest.skip(why)
    with Hosts(folder) as hosts:
        yield hosts
