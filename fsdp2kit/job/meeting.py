"""How ranks meet, also after torchrun restarts them, and how they notice that torchrun has died.

torchrun keeps one store for all attempts of ``--max-restarts``. On a restart, gloo would read the addresses of the
previous attempt's ranks there. So rank 0 opens a store for its own attempt; torchrun's store only holds its address.

A killed torchrun does not end its ranks, so each rank polls its parent process. A signal at the parent's death exists
on Linux only, which sends it when the thread that forked ends. Polling works everywhere, and a rank can save first.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import uuid
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

import fsdp2kit
from fsdp2kit.console import show
from fsdp2kit.errors import RunFailure
from fsdp2kit.job.stop import launcher, launcher_is_gone

_ADDRESS = "fsdp2kit/store"
_CONNECT_SECONDS = 10.0
_POLL_SECONDS = 0.2
_WATCH_SECONDS = 0.5

_trains = threading.Event()


def watch() -> None:
    """End this process with exit code 1 as soon as torchrun is gone, until training begins (`stop_watching`)."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_watch, daemon=True, name="fsdp2kit-watch").start()


def stop_watching() -> None:
    """Leave it to the training loop to check that: it saves a checkpoint first."""
    _trains.set()


def _watch() -> None:
    while not _trains.wait(_WATCH_SECONDS):
        if launcher_is_gone():
            if os.environ.get("LOCAL_RANK", "0") == "0":
                what = f"process {fsdp2kit.PARENT} has ended before training began"
                show(f"error: {launcher()}: {what}; start the run again", file=sys.stderr, flush=True)
            os._exit(1)


def meet(backend: str, *, rank: int, size: int, timeout: timedelta) -> dist.TCPStore:
    """Start the default process group of the ranks that meet at ``MASTER_ADDR`` and ``MASTER_PORT``. Collective.

    If they have not met within ``timeout``, the error names that address. Returns the job's store, which rank 0 keeps.
    """
    place = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT', '')}"
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = _store_of_attempt(rank, timeout)
        else:
            store = next(dist.rendezvous("env://", timeout=timeout))[0]
        assert isinstance(store, dist.TCPStore), "env:// makes one"
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)
        return store
    except (RuntimeError, OSError) as error:
        minutes, why = timeout.total_seconds() / 60, str(error).partition("\n")[0]
        raise RunFailure(
            f"rank {rank} of {size} did not meet the others at {place} (run.timeout_minutes = {minutes:g}): {why}; "
            "see that every host runs the same command and can reach that port"
        ) from error


def _store_of_attempt(rank: int, timeout: timedelta) -> dist.TCPStore:
    """The store of this attempt alone: rank 0 opens it on a free port of its host."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    deadline = time.monotonic() + timeout.total_seconds()
    socket.create_connection((host, port), timeout=timeout.total_seconds()).close()  # fails at once; torch waits
    of_torchrun = dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    if rank == 0:
        attempt = uuid.uuid4().hex
        store = dist.TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        store.set(attempt, "")
        of_torchrun.set(_ADDRESS, f"{store.port} {attempt}")
        return store
    while time.monotonic() < deadline:
        if of_torchrun.check([_ADDRESS]):
            found, attempt = of_torchrun.get(_ADDRESS).decode().split()
            # The address may be that of an earlier attempt, whose rank 0 may end during any of these calls.
            with suppress(OSError, dist.DistError):
                store = _connect(host, int(found), timeout)
                # An earlier attempt's store has counted this rank already; another job's store has no such attempt.
                if store.check([attempt]) and store.add(f"{attempt}/{rank}", 1) == 1:
                    return store
        time.sleep(_POLL_SECONDS)
    raise TimeoutError(f"rank 0 named no store at {host}:{port}")


def _connect(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """A store's client.

    Raises:
        OSError | dist.DistError: nothing listens there.
    """
    socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    short = timedelta(seconds=_CONNECT_SECONDS)
    store = dist.TCPStore(host, port, is_master=False, timeout=short, wait_for_workers=False)
    store.set_timeout(timeout)
    return store
