"""`ci/pins.lock`: the digest of every touched file before and after the whole series, pin by pin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from .. import REPOSITORY
from ..errors import Conflict
from ..target.state import Record, sha256
from .plan import Plan

LOCK = REPOSITORY / "ci" / "pins.lock"


def read_lock(path: Path = LOCK) -> dict[str, dict[str, Record]]:
    """Pin -> file -> digests. Empty where there is no lock yet."""
    return msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, Record]]) if path.exists() else {}


def write_lock(locked: Mapping[str, Mapping[str, Record]], path: Path = LOCK) -> None:
    """Writes the lock, sorted, so that its diff shows what changed."""
    ordered = {pin: dict(sorted(locked[pin].items())) for pin in sorted(locked)}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(ordered)) + b"\n")


def records(plan: Plan) -> dict[str, Record]:
    """A plan's digests, as the lock keeps them."""
    return {name: Record(sha256(plan.before[name]), sha256(data)) for name, data in plan.after.items()}


def recognise(read: Callable[[str], bytes | None], locked: Mapping[str, Mapping[str, Record]]) -> str | None:
    """The pin whose touched files a tree has, byte for byte; None for a fork."""
    for pin, files in locked.items():
        if files and all(sha256(read(name)) == record.before for name, record in files.items()):
            return pin
    return None


def check(plan: Plan, pin: str, locked: Mapping[str, Mapping[str, Record]]) -> None:
    """Compares a plan of the whole series with the lock.

    Raises:
        Conflict: a file comes out differently than locked, or the pin is not locked.
    """
    if pin not in locked:
        raise Conflict(f"{pin} is not in ci/pins.lock: run `python -m patchset lock`")
    now, then = records(plan), locked[pin]
    # A checkout of a release has optional files, upstream's own tests, that its sdist leaves out
    now = {name: record for name, record in now.items() if name in then or record.before is None}
    wrong = sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))
    if wrong:
        raise Conflict(
            f"{pin} comes out differently than ci/pins.lock says, which means another tool version or a changed rule",
            tuple(wrong),
        )
