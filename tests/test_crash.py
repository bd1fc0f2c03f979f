"""Writes that are cut short: by a full disk, an interrupt or a kill -9 at every single step."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import tempfile

import pytest

from patchset.commands.cli import main
from patchset.series.plan import make_plan
from patchset.target import state
from patchset.target.state import State
from patchset.target.tree import Tree
from tests.conftest import snapshot


@pytest.fixture(autouse=True)
def planned_once(monkeypatch):
    """One plan a tree: what is killed here is the writing, and planning anew takes most of each kill's time."""
    plans = {}

    def plan(tree, *arguments):
        if tree.root not in plans:
            plans[tree.root] = make_plan(tree, *arguments)
        return plans[tree.root]

    monkeypatch.setattr("patchset.apply.make_plan", plan)


def killed(folder, step, *arguments):
    """Runs a command in a process that is killed at a step, if it gets there; its exit status, negative for a signal.

    What it leaves of its own lies beside the tree.
    """
    temporary = folder.parent / "temporary"
    temporary.mkdir(exist_ok=True)
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left = step

    def counted(real):
        def stepped(*positional, **named):
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return real(*positional, **named)

        return stepped

    try:
        tempfile.tempdir = os.environ["TMPDIR"] = str(temporary)
        state._write_through, os.replace, os.unlink = (
            counted(call) for call in (state._write_through, os.replace, os.unlink)
        )
        os._exit(main([str(argument) for argument in arguments]))
    finally:
        os._exit(99)


def steps_until_done(folder, *arguments):
    """Kills a command at its 1st, 2nd, 3rd … step until one run gets through; yields after each kill."""
    for step in range(400):
        status = killed(folder, step, *arguments)
        if status != -signal.SIGKILL:
            assert status == 0
            return
        yield step
    raise AssertionError("never got through")


def without_records(files):
    return {name: data for name, data in files.items() if not name.startswith(".verl-patchset")}


@pytest.mark.parametrize("command", ["apply", "revert"])
def test_kill_at_every_step_leaves_all_or_nothing(cli, tree, command):
    folder = tree("0.9.1")
    before = snapshot(folder)
    cli("apply", "--tree", folder)
    after = without_records(snapshot(folder))
    if command == "apply":
        cli("apply", "--tree", folder, "--revert")
    arguments = ["apply", "--tree", str(folder), *(["--revert"] if command == "revert" else [])]
    kills = 0
    for step in steps_until_done(folder, *arguments):
        kills += 1
        # Whoever comes next finds the write undone (or, at its very last steps, done)
        State(Tree.at(folder))
        now = snapshot(folder)
        assert without_records(now) in (before, after), f"torn at step {step}"
        assert not [name for name in now if name.endswith("~")], f"litter at step {step}"
        if without_records(now) != (before if command == "apply" else after):
            break
    assert kills > 15
    final = before if command == "revert" else after
    cli(*arguments)
    assert without_records(snapshot(folder)) == final


def test_kill_while_committing(cli, tree):
    folder = tree("0.9.1", git=True)
    cli("apply", "--tree", folder, "--dry-run")
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=folder, text=True)
    before = snapshot(folder)
    kills = 0
    for step in steps_until_done(folder, "apply", "--tree", folder, "--commit"):
        kills += 1
        State(Tree.at(folder))
        dirty = subprocess.check_output(["git", "status", "--porcelain"], cwd=folder, text=True)
        assert dirty == "", f"step {step}: {dirty}"
        if subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=folder, text=True) != head:
            break
        assert snapshot(folder) == before
    assert kills > 10


@pytest.mark.parametrize("after", [0, 3, 8, 12, 15])
@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_full_disk_or_interrupt_changes_nothing(cli, tree, monkeypatch, failure, after):
    folder = tree("0.9.1")
    before = snapshot(folder)
    real, calls = state._write_through, [0]

    def write(path, data):
        calls[0] += 1
        if calls[0] > after:
            if isinstance(failure, OSError):
                path.write_bytes(data[: len(data) // 2])
            raise failure
        real(path, data)

    monkeypatch.setattr(state, "_write_through", write)
    status, _, err = cli("apply", "--tree", folder)
    monkeypatch.undo()
    assert calls[0] > after
    assert status == (1 if isinstance(failure, OSError) else 130)
    if isinstance(failure, OSError):
        assert "No space left on device; every file is as it was" in err
    assert snapshot(folder) == before
    assert cli("apply", "--tree", folder)[0] == 0


def test_a_tree_that_is_read_only(cli, tree):
    if os.geteuid() == 0:
        pytest.skip("root writes anywhere")
    folder = tree("0.9.1")
    (folder / "verl/workers/config").chmod(0o555)
    assert cli("apply", "--tree", folder)[0] == 1
    (folder / "verl/workers/config").chmod(0o755)


def test_somebody_edits_between_the_crash_and_the_next_call(cli, tree):
    folder = tree("0.9.1")
    edited = folder / "verl/models/mcore/util.py"
    before = edited.read_bytes()
    cli("apply", "--tree", folder, "--dry-run")
    next(step for step in steps_until_done(folder, "apply", "--tree", folder) if edited.read_bytes() != before)
    edited.write_text("# mine\n")
    status, _, err = cli("apply", "--tree", folder)
    assert status == 1
    assert "was cut short and verl/models/mcore/util.py was edited since" in err
    assert edited.read_text() == "# mine\n"
