"""Runs pytest on a tree in a process of its own and holds what it says against what is known."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import yaml

from .. import REPOSITORY
from ..errors import UsageError

#: One suite may take this long, in seconds, and one test of it a part of that.
SUITE_LIMIT, TEST_LIMIT = 1500, 300

#: pytest takes these for a CI service and then explains a failed comparison whole: minutes for a list of thousands.
_CI = ("CI", "BUILD_NUMBER")

#: A test of upstream that names one of these looks at code that the series edits.
_TOUCHED = re.compile(
    r"preprocess_thd_|model_forward|McoreEngineConfig|megatron\.transformer_impl|router_replay_utils|mcore.util"
)

#: What is not named `_on_cpu` and starts Ray wants workers on GPUs, and fills a machine without one.
_WORKERS = re.compile(r"^\s*(import|from) ray\b", re.MULTILINE)


class KnownFailure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A test of upstream that fails before any patch, and why."""

    test: str
    reason: str


@dataclass(frozen=True)
class Suite:
    """Outcome of one run: test id -> passed, failed or skipped; a file that cannot be imported counts as failed."""

    outcomes: dict[str, str]
    log: Path

    @property
    def failed(self) -> set[str]:
        return {test for test, outcome in self.outcomes.items() if outcome == "failed"}

    def counts(self) -> str:
        """For instance `159 passed, 2 skipped`."""
        count = Counter(self.outcomes.values())
        return (
            ", ".join(f"{count[kind]} {kind}" for kind in ("passed", "failed", "skipped") if count[kind]) or "no test"
        )


def known_failures(pin: str) -> dict[str, str]:
    """Test id -> reason, for a pin.

    Raises:
        UsageError: the file does not say both for each test.
    """
    path = REPOSITORY / "ci" / "known_failures.yaml"
    try:
        stated = msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")), dict[str, list[KnownFailure]])
    except msgspec.ValidationError as error:
        raise UsageError(f"{path.name}: {error}") from error
    return {failure.test: failure.reason for failure in stated.get(pin, [])}


def upstream_tests(root: Path, leave_out: Iterable[str]) -> list[str]:
    """Upstream's CPU tests of a tree: those that its own CI runs, and those that look at code that we edit.

    Args:
        root: of the tree.
        leave_out: files that upstream does not have.
    """
    chosen = []
    for path in sorted((root / "tests").rglob("test_*.py")):
        name = path.relative_to(root).as_posix()
        if name in leave_out or name.startswith(("tests/special_e2e", "tests/special_distributed")):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if name.endswith("_on_cpu.py") or (_TOUCHED.search(text) and not _WORKERS.search(text)):
            chosen.append(name)
    return chosen


def run_suite(root: Path, tests: list[str], log: Path) -> Suite:
    """Runs tests of a tree with one torch thread, without network, without a home.

    Args:
        root: of the tree; the run's working folder, so that its verl/ is the one imported.
        tests: files below it.
        log: where to write what pytest prints.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with _empty(log.parent / "home") as home:
        report = home / "report.jsonl"
        environment = {
            **os.environ,
            "HOME": str(home),
            "PYTHONPATH": str(root),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "TORCH_COMPILE_DISABLE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTEST_ADDOPTS": "",
        }
        for name in _CI:
            environment.pop(name, None)
        # Without -c pytest looks for settings above the tree and would find this repository's
        command = [sys.executable, "-m", "pytest", "-c", str(root / "pyproject.toml"), "-q", "-rfE"]
        command += [
            "--tb=short",
            "-W",
            "ignore",
            "-p",
            "no:cacheprovider",
            "--continue-on-collection-errors",
            "--asyncio-mode=auto",
        ]
        # Below the home, so that what tests write goes with it: pytest keeps three runs otherwise, checkpoints and all
        command += [f"--timeout={TEST_LIMIT}", f"--report-log={report}", f"--basetemp={home / 'tmp'}", *tests]
        with log.open("wb") as output:
            try:
                subprocess.run(
                    command, cwd=root, env=environment, stdout=output, stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL, timeout=SUITE_LIMIT, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return Suite({**_read(report)[0], f"suite did not end within {SUITE_LIMIT} s": "failed"}, log)
        outcomes, ended = _read(report)
        if not outcomes and not ended:
            return Suite({"pytest did not start": "failed"}, log)
        return Suite(outcomes if ended else {**outcomes, f"pytest died after {len(outcomes)} tests": "failed"}, log)


@contextmanager
def _empty(folder: Path) -> Iterator[Path]:
    """A folder for as long as it is needed, at the same place in every run: some test ids carry their home."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def _read(report: Path) -> tuple[dict[str, str], bool]:
    """Outcomes that a report tells, and whether the session that wrote it came to its end."""
    outcomes: dict[str, str] = {}
    ended = False
    for line in report.read_text(encoding="utf-8").splitlines() if report.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:  # what a session that was killed was writing
            break
        ended = ended or entry.get("$report_type") == "SessionFinish"
        if entry.get("$report_type") == "CollectReport" and entry["outcome"] == "failed":
            outcomes[entry["nodeid"]] = "failed"
        if entry.get("$report_type") == "TestReport":
            worst = outcomes.get(entry["nodeid"])
            if entry["when"] == "call" or entry["outcome"] != "passed":
                outcomes[entry["nodeid"]] = "failed" if "failed" in (worst, entry["outcome"]) else entry["outcome"]
    return outcomes, ended
