"""The checks of a tree judge by before and after: what a fork had is counted, what is new fails."""

from __future__ import annotations

import shutil

import pytest

from patchset.proof import suites
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


@pytest.fixture
def suite(tmp_path):
    """suite(source): outcome of a tree whose only test file is that."""

    def run(source: str) -> suites.Suite:
        (tmp_path / "tree").mkdir()
        (tmp_path / "tree/pyproject.toml").write_text("")
        (tmp_path / "tree/test_it.py").write_text(source)
        return suites.run_suite(tmp_path / "tree", ["test_it.py"], tmp_path / "suite.log")

    return run


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_a_suite_that_dies_has_failed_whatever_passed_before(suite, end):
    died = suite(f"import os\n\ndef test_a():\n    pass\n\ndef test_b():\n    {end}\n")
    assert died.outcomes["test_it.py::test_a"] == "passed"
    assert died.failed == {"pytest died after 1 tests"}


def test_a_suite_does_not_see_the_ci_service_that_it_runs_on(suite, monkeypatch):
    # With these set pytest explains a failed comparison whole: minutes, for lists of some thousand numbers
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("BUILD_NUMBER", "7")
    seen = suite("import os\n\ndef test_a():\n    assert not {'CI', 'BUILD_NUMBER'} & set(os.environ)\n")
    assert seen.outcomes == {"test_it.py::test_a": "passed"}
