"""Runs comparisons in groups of processes, and remembers what each one saw."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from . import forward, mtp, mutations, toys, upstream, vision
from .comparison import Case, Difference, Topology
from .processes import Group, GroupFailed

#: Longest time of one comparison, in seconds.
LIMIT = 240.0


@dataclass(frozen=True)
class Result:
    """One comparison: the largest difference of every quantity over all batches and ranks, or what went wrong.

    Attributes:
        name: the case's, for people.
        error: first line of what was raised; None where everything ran.
        details: tracebacks or stacks of the ranks.
    """

    name: str
    family: str
    model: str
    topology: str
    bucket: int | None
    differences: list[Difference]
    error: str | None
    seconds: float
    details: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return self.error is None and all(difference.passed for difference in self.differences)

    def json(self) -> dict[str, Any]:
        """As plain values."""
        differences = {
            d.quantity: {"largest": d.value, "limit": d.limit, "passed": d.passed, "where": d.where}
            for d in self.differences
        }
        kept = {key: value for key, value in asdict(self).items() if key not in ("differences", "details")}
        return {**kept, "passed": self.passed, "differences": differences}


class Bench:
    """Comparisons of one tree, and the groups of processes that they run in; to be closed."""

    def __init__(self, folder: Path, families: Iterable[str], short: bool, limit: float = LIMIT) -> None:
        """
        Args:
            folder: for the checkpoints.
            families: names of families of comparisons, as in `cli`.
            short: a part of every family instead of the whole.
            limit: longest time of one comparison, in seconds.
        """
        self.limit, self.skipped = limit, list[str]()
        self._group: Group | None = None
        self._group_of: tuple[object, ...] = ()
        checkpoints = {kind: toys.make(folder, kind) for kind in toys.KINDS}
        self.cases = self._usable(self._prepared(set(families), short, checkpoints))

    def _prepared(self, families: set[str], short: bool, checkpoints: dict[str, Path]) -> list[Case]:
        found: list[Case] = []
        if "forward" in families:
            cases = forward.cases(short)
            forward.prepare(checkpoints, cases)
            found += cases
        if "mtp" in families:
            mtp.prepare()
            found += mtp.cases(short)
        if "vision" in families:
            found += vision.cases(short)
        if families & {"engine", "ray"} and not upstream.runs_engine():
            self.skipped.append(
                "engine, ray: the engine of verl 0.7 does not run (its critic's forward raises TypeError)"
            )
            return found
        if "engine" in families:
            from . import engine

            engine.prepare(checkpoints)
            found += engine.cases(short)
        if "ray" in families:
            from . import workers

            workers.prepare(checkpoints)
            found += workers.cases(short)
        return found

    def _usable(self, cases: list[Case]) -> list[Case]:
        if upstream.has_bucket():
            return cases
        kept = [case for case in cases if case.bucket is None]
        self.skipped.append(
            f"{len(cases) - len(kept)} comparisons with a bucket: this tree has no pad_to_length_bucket"
        )
        return kept

    def run(self, case: Case, mutation: str | None = None) -> Result:
        """One comparison, with a fault in the tree or without."""
        started = time.perf_counter()
        function, arguments = (case.run, (case,)) if mutation is None else (mutations.run, (case, mutation))
        found: list[list[Difference]] = []
        error, details = None, list[str]()
        try:
            found = self._group_for(case).run(function, *arguments)
        except GroupFailed as failure:
            error, details = str(failure), failure.details
            self._group = None
        seconds = round(time.perf_counter() - started, 2)
        told = (case.name, case.family, case.model, str(case.topology), case.bucket)
        return Result(*told, _largest(found), error, seconds, details)

    def _group_for(self, case: Case) -> Group:
        """The processes of the last case if they fit. Megatron leaves the groups of a topology behind when it makes
        others, with the threads of each, so that new processes are cheaper."""
        sizes = (case.topology.cp, case.topology.tp) if isinstance(case.topology, Topology) else ()
        wanted = (case.world, sizes, "forward" if case.family == "fused" else case.family)
        if self._group is None or self._group_of != wanted:
            self.close()
            self._group, self._group_of = Group(case.world, self.limit), wanted
        return self._group

    def close(self) -> None:
        """Ends all processes."""
        if self._group is not None:
            self._group.close()
            self._group = None


def mutation_cases(cases: list[Case]) -> list[Case]:
    """One case of every family that can see faults of packing, with two CP ranks and a bucket."""
    wanted = {("forward", "qwen3", 100), ("fused", "qwen3", 100), ("mtp", "mtp", 64), ("engine", "actor", 100)}
    return [c for c in cases if c.topology == Topology(2) and (c.family, c.model, c.bucket) in wanted]


def _largest(found: list[list[Difference]]) -> list[Difference]:
    """The worst of every quantity, in the order in which they came."""
    worst: dict[str, Difference] = {}
    for difference in (difference for rank in found for difference in rank):
        known = worst.get(difference.quantity)
        if known is None or difference.value > known.value:
            worst[difference.quantity] = difference
    return list(worst.values())


class PeakMemory:
    """Largest sum of the memory of this process and all below it, shared pages counted once; sampled."""

    def __init__(self, every: float = 1.0) -> None:
        self.bytes, self._every, self._done = 0, every, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        """Starts to sample."""
        self._thread.start()

    def stop(self) -> None:
        """Ends it."""
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        own = psutil.Process()
        while not self._done.wait(self._every):
            total = 0
            for process in (own, *own.children(recursive=True)):
                try:
                    total += process.memory_full_info().pss
                except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                    # It ended between being listed and being asked
                    continue
            self.bytes = max(self.bytes, total)
