"""Groups of processes that are forked from this one, joined by gloo, and used for one call after another."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from . import device

#: After the first rank that fails, the others get this long, in seconds, to tell what happened to them.
GRACE = 1.0


class GroupFailed(Exception):
    """A call that raised, died or took too long on some rank; the group is gone.

    Attributes:
        details: what every rank that told anything told: its traceback, or its stack when time was up.
    """

    def __init__(self, message: str, details: list[str]) -> None:
        super().__init__(message)
        self.details = details


class Group:
    """As many processes as a world has ranks. Everything imported before is there without being imported again."""

    def __init__(self, world: int, limit: float) -> None:
        """
        Args:
            world: number of ranks.
            limit: longest time of one call, in seconds.
        """
        self.limit, self._folder = limit, tempfile.TemporaryDirectory(prefix="numerics-")
        context = multiprocessing.get_context("fork")
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, theirs, Path(self._folder.name), limit))
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What a function of a module returns on every rank.

        Raises:
            GroupFailed: it did not return on every rank in time; the group can't be used any more.
        """
        for connection in self._connections:
            connection.send((function, arguments))
        answers: dict[int, Any] = {}
        failures: dict[int, tuple[str, str]] = {}
        deadline = time.monotonic() + self.limit + 2 * GRACE
        while len(answers) + len(failures) < len(self._connections):
            pending = {c: r for r, c in enumerate(self._connections) if r not in answers and r not in failures}
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = pending[connection]
                try:
                    kind, value = connection.recv()
                except EOFError:
                    kind, value = "failed", self._told_at_death(rank)
                if kind == "returned":
                    answers[rank] = value
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE)
        if len(answers) == len(self._connections):
            return [answers[rank] for rank in sorted(answers)]
        self.close()
        # A rank that waits in vain for one that has failed tells of its connection; the cause is elsewhere
        first = min(failures, key=lambda rank: ("gloo" in failures[rank][0], rank), default=None)
        message = failures[first][0] if first is not None else f"did not end within {self.limit:.0f} s"
        where = f"rank {first}: " if first is not None and len(self._connections) > 1 else ""
        raise GroupFailed(where + message, [f"rank {rank}: {text}" for rank, (_, text) in sorted(failures.items())])

    def _told_at_death(self, rank: int) -> tuple[str, str]:
        self._processes[rank].join(GRACE)
        files = [Path(self._folder.name) / f"{kind}-{rank}" for kind in ("stacks", "log")]
        stacks, log = (file.read_text(errors="replace") if file.exists() else "" for file in files)
        if "Timeout" in stacks:
            return f"did not end within {self.limit:.0f} s", stacks
        return f"process ended with status {self._processes[rank].exitcode}", stacks + log[-2000:]

    def close(self) -> None:
        """Ends the processes and what they have started, whatever they are doing."""
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                for started in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        started.kill()
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._folder.cleanup()


def _serve(rank: int, world: int, connection: Connection, folder: Path, limit: float) -> None:
    # What libraries print would break the table
    log = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # What libraries leave behind goes with the group
    tempfile.tempdir = str(folder)
    torch.set_num_threads(1)
    device.enter()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world,
        timeout=datetime.timedelta(seconds=limit),
    )  # fmt: skip
    with (folder / f"stacks-{rank}").open("w") as stacks:
        faulthandler.enable(stacks)
        while True:
            try:
                function, arguments = connection.recv()
            except EOFError:
                os._exit(0)
            faulthandler.dump_traceback_later(limit, exit=True, file=stacks)
            try:
                answer = ("returned", function(*arguments))
            except Exception as error:
                answer = ("failed", (_in_one_line(error), traceback.format_exc()))
            faulthandler.cancel_dump_traceback_later()
            connection.send(answer)


def _in_one_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    if type(error).__module__.startswith("ray."):
        # Ray puts the actor's traceback into the message, and the actor's error at its end
        return lines[-1]
    return f"{type(error).__name__}: {lines[0] if lines else 'without a message'}"
