"""2,000 random batches a pin: the patched packer is right on all, and unchanged where the pristine one was right."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from patchset import REPOSITORY

BATCHES = 2000
COLUMNS = ["right", "crashed", "metadata", "positions", "labels", "rolled positions"]


@pytest.mark.parametrize("until", ["0003", "0004"])
@pytest.mark.parametrize("pin", ["0.7.1", "0.8.0", "0.9.0", "0.9.1"])
def test_random_batches(cli, tree, pristine, pin, until):
    patched = tree(pin)
    assert cli("apply", "--tree", patched, "--until", until)[0] == 0
    shutil.copytree(REPOSITORY / "verl_overlay/tests", patched / "tests", dirs_exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(pristine(pin)), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if until == "0004":
        # The layout is a module of its own, which the pristine package on the path does not have
        with_layout = shutil.copytree(pristine(pin), patched.parent / "with-layout")
        shutil.copytree(REPOSITORY / "verl_overlay/verl", with_layout / "verl", dirs_exist_ok=True)
        environment["PYTHONPATH"] = str(with_layout)
    batches = BATCHES if until == "0004" else BATCHES // 10
    done = subprocess.run(
        [sys.executable, "-W", "ignore", REPOSITORY / "tests/compare_packers.py", patched, str(batches)],
        cwd=patched.parent, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["broken"] == []
    before = said["pristine"]
    assert before["right"] > 0, "the comparison needs cases in which the pristine packer is right"
    # Rolled positions are wrong on every pin: the comparison sees that
    assert before["rolled positions"] > 0
    if until == "0004":
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| {pin} |"))
        assert [int(cell) for cell in re.findall(r"[\d]+", row.replace(",", "").partition(pin)[2])] == [
            before.get(column, 0) for column in COLUMNS
        ], f"docs/thd-layout.md: {before}"


PAGE = (REPOSITORY / "docs/thd-layout.md").read_text() if (REPOSITORY / "docs/thd-layout.md").exists() else ""
