"""Runs the numerics bench on a tree, in a process of its own: it imports the tree's verl."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .. import REPOSITORY
from ..errors import PatchsetError

#: The whole of it may take this long, in seconds, before it is ended; the bench ends its own hangs much sooner.
LIMIT = 1200


def run(tree: Path, arguments: list[str]) -> int:
    """Exit status of `python -m patchset.numerics` on a tree; what it prints goes where ours goes.

    Args:
        tree: holds verl/; nothing is written to it.
        arguments: further ones of its command line.
    """
    try:
        return subprocess.run(_command(tree, arguments), env=_environment(), timeout=LIMIT, check=False).returncode
    except subprocess.TimeoutExpired as error:
        raise PatchsetError(f"the numerics of {tree} did not end within {LIMIT} s") from error


def check(tree: Path, arguments: list[str], log: Path) -> tuple[bool, str]:
    """Whether the bench passes on a tree, and what it says at its end.

    Args:
        tree, arguments: as for `run`.
        log: where to write what it prints.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="patchset-") as folder, log.open("wb") as output:
        file = Path(folder) / "numerics.json"
        try:
            done = subprocess.run(
                _command(tree, [*arguments, "--json", str(file)]), env=_environment(), stdout=output,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, timeout=LIMIT, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False, f"did not end within {LIMIT} s; see {log}"
        if not file.exists():
            return False, f"ended with status {done.returncode} before it compared anything; see {log}"
        said = json.loads(file.read_text())
    summary = said["summary"] + (f"; skipped: {'; '.join(said['skipped'])}" if said.get("skipped") else "")
    return done.returncode == 0, summary if done.returncode == 0 else f"{summary}; see {log}"


def _command(tree: Path, arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "patchset.numerics", "--tree", str(tree), *arguments]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY)}
