"""Statements of the edited functions dropped, doubled or swapped: what lands keeps that, or it is a conflict."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patchset import REPOSITORY
from patchset.errors import Conflict
from patchset.series.plan import make_plan
from patchset.target.tree import Tree
from tests.conftest import PINS
from tests.forks import UTIL

EXAMPLES = 10


def statements(text: str) -> list[tuple[ast.stmt, ast.stmt | None]]:
    """Every statement of the packer and the unpacker with the one that follows it in its block."""
    found = []
    for function in ast.parse(text).body:
        if isinstance(function, ast.FunctionDef) and "process_thd_" in function.name:
            for node in ast.walk(function):
                for block in (getattr(node, name, []) for name in ("body", "orelse")):
                    if isinstance(block, list) and block:
                        found += list(zip(block, [*block[1:], None], strict=True))
    return sorted((pair for pair in found if isinstance(pair[0], ast.stmt)), key=lambda pair: pair[0].lineno)


def mutate(text: str, number: int, how: str) -> str:
    """The text with one statement dropped, doubled, or swapped with the next."""
    lines, (node, after) = text.splitlines(keepends=True), statements(text)[number]
    start, end = node.lineno - 1, node.end_lineno
    own = lines[start:end]
    if how == "drop":
        new = [" " * node.col_offset + "pass\n"]
    elif how == "double":
        new = own + own
    elif after is None:
        return text
    else:
        between, end = lines[end : after.lineno - 1], after.end_lineno
        new = lines[after.lineno - 1 : end] + between + own
    return "".join(lines[:start] + new + lines[end:])


@pytest.fixture(scope="module")
def judge(pristine, series, tmp_path_factory):
    """judge(pin, mode, fork, patched fork): disagreements; one process a pin and mode, since each has its own verl."""
    running = {}

    def ask(pin, mode, fork, patched):
        if (pin, mode) not in running:
            folder, tree = tmp_path_factory.mktemp("judge"), Tree.at(pristine(pin))
            plan = make_plan(tree, tree.read, series, series.selections()[mode])
            root = folder / "patched"
            subprocess.run(["cp", "-r", tree.root / "verl", folder / "verl"], check=True)
            root.mkdir()
            (folder / "verl").rename(root / "verl")
            for name, data in plan.after.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_bytes(data)
            environment = {
                **os.environ,
                "PYTHONPATH": f"{root}:{REPOSITORY}",
                "OMP_NUM_THREADS": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
            }
            command = [
                sys.executable,
                "-W",
                "ignore",
                REPOSITORY / "tests/fork_judge.py",
                tree.root / UTIL,
                root / UTIL,
            ]
            process = subprocess.Popen(
                command, env=environment, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip
            running[pin, mode] = process, folder
        process, folder = running[pin, mode]
        for name, data in (("fork.py", fork), ("patched_fork.py", patched)):
            (folder / name).write_bytes(data)
        process.stdin.write(f"{folder / 'fork.py'} {folder / 'patched_fork.py'}\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield ask
    for process, _ in running.values():
        process.stdin.close()
        process.wait(timeout=60)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", [0, 1], ids=["layout", "small-edits"])
@pytest.mark.parametrize("pin", PINS.releases)
def test_what_lands_keeps_what_the_fork_does(pristine, series, judge, pin, mode):
    tree = Tree.at(pristine(pin))
    text, selected = tree.read(UTIL).decode(), series.selections()[mode]
    outcomes = Counter()

    # Configurations stay as they are, so their composition is left out
    bare = [patch.name for patch in series.patches if UTIL in patch.targets]
    selected = selected.intersection(bare)

    @settings(
        max_examples=EXAMPLES, derandomize=True, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.integers(0, len(statements(text)) - 1), st.sampled_from(["drop", "double", "swap"]))
    def holds(number, how):
        fork = mutate(text, number, how)
        if fork == text:
            return

        def read(name):
            return fork.encode() if name == UTIL else tree.read(name)

        try:
            after = make_plan(tree, read, series, selected).after.get(UTIL, fork.encode())
        except Conflict:
            outcomes["conflict"] += 1
            return
        outcomes["lands"] += 1
        assert judge(pin, mode, fork.encode(), after) == []

    holds()
    # Small edits stand beside most code; the layout knows every statement that it takes away
    assert outcomes["conflict"] > 0 or mode == 1
    assert outcomes["lands"] > 0
