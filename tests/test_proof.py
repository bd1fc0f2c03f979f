"""The checks of a tree judge by before and after: what a fork had is counted, what is new fails."""

from __future__ import annotations

import shutil

import pytest

from patchset.proof.pins import Subject

GENERATED = "verl/trainer/config/_generated_ppo_megatron_trainer.yaml"
EDITED = "verl/workers/config/engine.py"


@pytest.fixture
def subject(tree, series):
    """A fork of 0.9.0 with faults of its own, patched."""
    fork = tree("0.9.0", into="pristine")
    edited = fork / EDITED
    edited.write_text(edited.read_text().replace("import ", "import sys\nimport ", 1) + "\nODD  =  1\n")
    stale = fork / GENERATED
    text = stale.read_text()
    assert text.count("seed: 42") > 0
    stale.write_text(text.replace("seed: 42", "seed: 43", 1))
    (fork / "verl/broken.py").write_text("def f(:\n")
    made = Subject("fork", None, fork, series, whole=True, thorough=False)
    passed, detail = made.apply()
    assert passed, detail
    return made


def test_what_a_fork_had_before_is_counted_and_no_failure(subject):
    assert subject.ruff()[0], subject.ruff()
    assert "apart from 3 that were there before" in subject.ruff()[1]
    assert subject.yaml() == (True, "4 files in step, apart from 1 that were there before")
    passed, detail = subject.compile()
    assert passed
    assert "apart from 1 that were there before" in detail


def test_what_is_new_fails(subject):
    edited = subject.patched / EDITED
    edited.write_text(edited.read_text() + "import os\n")
    passed, detail = subject.ruff()
    assert not passed
    assert f"{EDITED}: E402" in detail
    shutil.copy(subject.patched / "verl/broken.py", subject.patched / "verl/broken_too.py")
    passed, detail = subject.compile()
    assert (passed, detail.split(":")[0]) == (False, "verl/broken_too.py")
    stale = subject.patched / GENERATED
    stale.write_text(stale.read_text().replace("pad_to_length_bucket: 512", "pad_to_length_bucket: 7", 1))
    passed, detail = subject.yaml()
    assert not passed
    assert "pad_to_length_bucket" in detail
