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
from patchset.series.plan import make_plan
from patchset.target.tree import Tree

BATCHES = 2000
COLUMNS = ["right", "crashed", "metadata", "positions", "labels", "rolled positions"]
#: With the layout, and with the small edits to upstream's loop that it supersedes.
LAYOUT, LOOP = 0, 1


@pytest.fixture
def planned(pristine, series, tmp_path):
    """planned(pin, mode): a tree of a pin with what the series writes there."""

    def lay(pin: str, mode: int):
        tree, target = Tree.at(pristine(pin)), tmp_path / "patched"
        shutil.copytree(tree.root / "verl", target / "verl")
        for name, data in make_plan(tree, tree.read, series, series.selections()[mode]).after.items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(data)
        return target

    return lay


def compare(pristine, patched, batches, mode=LAYOUT):
    """What `compare_packers.py` says of two trees."""
    utils = [root / "verl/models/mcore/util.py" for root in (pristine, patched)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", REPOSITORY / "patchset/proof/compare_packers.py", *utils, str(batches)]
        + (["--loop"] if mode == LOOP else []),
        env={**os.environ, "PYTHONPATH": str(patched), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=patched, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("mode", [LAYOUT, LOOP], ids=["layout", "loop"])
@pytest.mark.parametrize("pin", ["0.7.1", "0.8.0", "0.9.0", "0.9.1"])
def test_random_batches(pristine, planned, pin, mode):
    batches = BATCHES if mode == LAYOUT else BATCHES // 10
    said = compare(pristine(pin), planned(pin, mode), batches, mode)
    assert said["broken"] == []
    before = said["pristine"]
    assert before["right"] > 0, "the comparison needs cases in which the pristine packer is right"
    # Rolled positions are wrong on every pin: the comparison sees that
    assert before["rolled positions"] > 0
    if mode == LOOP:
        # What small edits leave as upstream has it is few, and only where there are least rows at all
        assert said["left"] < batches / 10
        return
    assert said["left"] == 0
    assert before.keys() <= set(COLUMNS)
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {pin} |"))
    assert [int(cell) for cell in re.findall(r"[\d]+", row.replace(",", "").partition(pin)[2])] == [
        before.get(column, 0) for column in COLUMNS
    ], f"docs/thd-layout.md: {before}"


SPOILED = """
import functools
_packer = preprocess_thd_engine
@functools.wraps(_packer)
def preprocess_thd_engine(batch, **kwargs):
    kwargs.pop("min_local_rows", None)
    kwargs.pop("cp_layout", None)
    rows, params, positions = _packer(batch, **kwargs)
    if rows.dim() == 3:
        rows[..., 1:] = 0
    if rows.dtype is torch.bool:
        rows = rows.long()
    if kwargs["need_roll"] and mpu.get_context_parallel_world_size() == 1:
        positions = positions - 1
    return rows, params, positions
"""
#: What has to be broken then, and by no other of these faults.
BROKEN = [
    r"^metadata of .* least=\d+, cp_layout='zigzag'",
    r"^positions of .* least=None, cp_layout='contiguous', dims=\(\)",
    r"^tokens of .* least=None, cp_layout='zigzag', dims=\(3,\)",
    r"^mask of .* least=None, cp_layout='zigzag', dims=\(\)",
    r"^rolled positions of .* cp=1, .* least=None, cp_layout='zigzag', dims=\(\)",
]


def test_faults_of_the_patched_packer_are_seen(pristine, planned):
    patched = planned("0.9.1", LAYOUT)
    with (patched / "verl/models/mcore/util.py").open("a") as file:
        file.write(SPOILED)
    broken = compare(pristine("0.9.1"), patched, 100)["broken"]
    assert [what for what in BROKEN if not any(re.search(what, case) for case in broken)] == []


PAGE = (REPOSITORY / "docs/thd-layout.md").read_text() if (REPOSITORY / "docs/thd-layout.md").exists() else ""
