"""Commits, mailbox patches and overlays: reviewable, reproducible, and the same tree whichever way one goes."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from patchset.target import gitrepo
from tests.conftest import run, snapshot

PINS = ["0.7.1", "0.8.0", "0.9.0", "0.9.1"]
RECORDS = ".verl-patchset"


def patched(cli, tree, pin, into="applied"):
    folder = tree(pin, into=into)
    assert cli("apply", "--tree", folder)[0] == 0
    return {name: data for name, data in snapshot(folder).items() if not name.startswith(RECORDS)}


def use_crlf(folder):
    for path in [*folder.rglob("*.py"), *folder.rglob("*.yaml")]:
        path.write_bytes(path.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))


def statuses(cli, folder, *options):
    (target,) = json.loads(cli("apply", "--tree", folder, "--json", *options)[1])["targets"]
    return {name: patch["status"] for name, patch in target["patches"].items()}


def subjects(folder):
    return run(folder, "git", "log", "--format=%s", "--reverse").splitlines()[1:]


@pytest.mark.parametrize("pin", PINS)
def test_exported_patches_apply_to_a_pristine_checkout_and_give_the_identical_tree(cli, tree, tmp_path, pin):
    checkout = tree(pin, git=True)
    before = snapshot(checkout)
    status, out, _ = cli("apply", "--tree", checkout, "--export", tmp_path / "mail")
    assert status == 0
    assert snapshot(checkout) == before, "an export leaves the tree alone"
    mails = sorted((tmp_path / "mail").iterdir())
    run(checkout, "git", "am", "--quiet", "--keep-non-patch", *mails)
    assert snapshot(checkout) == patched(cli, tree, pin)
    assert all(re.match(r"\[megatron\] (fix|feat|refactor): ", subject) for subject in subjects(checkout))
    assert run(checkout, "git", "status", "--porcelain") == ""


@pytest.mark.parametrize("line_ends", ["lf", "crlf", "autocrlf"])
@pytest.mark.parametrize("inside", ["", "third party/verl"], ids=["plain", "vendored"])
def test_the_git_am_line_that_is_printed_gives_what_an_apply_gives(cli, tree, tmp_path, monkeypatch, inside, line_ends):
    checkout, folder = tmp_path / "checkout", tree("0.8.0", into=f"checkout/{inside}")
    if line_ends == "crlf":
        use_crlf(folder)
    gitrepo.make_repository(checkout)
    settings = {"user.name": "A", "user.email": "a@localhost", "core.autocrlf": str(line_ends == "autocrlf").lower()}
    for key, value in settings.items():
        run(checkout, "git", "config", key, value)
    run(checkout, "git", "rm", "-r", "--quiet", "--cached", ".")
    run(checkout, "git", "reset", "--quiet", "--hard")
    applied = shutil.copytree(folder, tmp_path / "applied", ignore=shutil.ignore_patterns(".git"))
    monkeypatch.chdir(tmp_path)
    _, out, _ = cli("apply", "--tree", folder, "--export", "my mail")
    line = re.search(r"mailbox patches: (git am .*)", out)[1]
    assert ("--directory" in line, "--keep-cr" in line) == (bool(inside), line_ends == "crlf")
    run(folder, "sh", "-c", line)
    cli("apply", "--tree", applied)
    shutil.rmtree(applied / RECORDS)
    if line_ends == "autocrlf":  # git gives new files the line ends of the checkout
        use_crlf(applied), use_crlf(folder)
    assert snapshot(folder) == snapshot(applied)
    assert run(checkout, "git", "status", "--porcelain") == ""


def test_an_export_is_the_same_bytes_every_time_and_from_any_kind_of_tree(cli, tree, tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_AUTHOR_NAME", "somebody else")
    cli("apply", "--tree", tree("0.7.1", git=True), "--export", tmp_path / "a")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    cli("apply", "--pin", "0.7.1", "--export", tmp_path / "b")
    patched_already = tree("0.7.1", into="c-tree")
    cli("apply", "--tree", patched_already)
    cli("apply", "--tree", patched_already, "--export", tmp_path / "c")
    assert snapshot(tmp_path / "a") == snapshot(tmp_path / "b") == snapshot(tmp_path / "c")
    assert len(snapshot(tmp_path / "a")) == 7


@pytest.mark.parametrize("pin", PINS)
def test_an_overlay_copied_over_a_pristine_tree_gives_the_identical_tree(cli, tree, tmp_path, pin):
    status, _, _ = cli("apply", "--pin", pin, "--overlay", tmp_path / "overlay")
    assert status == 0
    target = tree(pin)
    run(tmp_path, "cp", "-r", f"{tmp_path}/overlay/.", target)
    assert snapshot(target) == patched(cli, tree, pin)


def test_an_overlay_of_a_fork_has_to_be_asked_for(cli, tree, tmp_path):
    fork = tree("0.9.1")
    util = fork / "verl/models/mcore/util.py"
    util.write_text(util.read_text() + "\n# ours\n")
    status, _, err = cli("apply", "--tree", fork, "--overlay", tmp_path / "overlay")
    assert status == 2
    assert "--any-tree" in err
    assert not (tmp_path / "overlay").exists()
    assert cli("apply", "--tree", fork, "--overlay", tmp_path / "overlay", "--any-tree")[0] == 0
    assert (tmp_path / "overlay/verl/models/mcore/util.py").read_text().endswith("# ours\n")


@pytest.mark.parametrize("option", ["--overlay", "--export"])
def test_outputs_go_to_new_folders_alone(cli, tmp_path, option):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    status, _, err = cli("apply", option, tmp_path / "full")
    assert status == 2
    assert "is not empty" in err
    assert list((tmp_path / "full").iterdir()) == [tmp_path / "full" / "mine"]


@pytest.mark.parametrize("pin", PINS)
def test_commits_read_like_upstreams_and_give_the_identical_tree(cli, tree, pin):
    checkout = tree(pin, git=True)
    status, _, _ = cli("apply", "--tree", checkout, "--commit")
    assert status == 0
    assert snapshot(checkout) == patched(cli, tree, pin)
    assert run(checkout, "git", "status", "--porcelain") == ""
    number = {"0.7.1": 7, "0.8.0": 7, "0.9.0": 7, "0.9.1": 7}[pin]
    assert len(subjects(checkout)) == number
    message = run(checkout, "git", "log", "-1", "--format=%B")
    assert "Patchset-Version: 0.1.0" in message
    assert run(checkout, "git", "log", "-1", "--format=%an").strip() == "A Maintainer"
    if pin == "0.7.1":
        bucket = run(checkout, "git", "log", "--format=%(trailers:key=Upstream-PR,valueonly)", "-1", "HEAD~4")
        assert bucket.strip() == "https://github.com/verl-project/verl/pull/7358"
        bucket = run(checkout, "git", "log", "--format=%(trailers:key=Upstream-Commit,valueonly)", "-1", "HEAD~4")
        assert bucket.strip() == "5cfb74fa04c7f6e5d98260b8f05157c6a9402695"


def test_a_second_commit_run_adds_nothing_and_names_the_commits(cli, tree):
    checkout = tree("0.8.0", git=True)
    cli("apply", "--tree", checkout, "--commit")
    head = run(checkout, "git", "rev-parse", "HEAD")
    status, out, _ = cli("apply", "--tree", checkout, "--commit")
    assert status == 0
    assert f"already upstream (commit {head[:12]})" in " ".join(out.split())
    assert run(checkout, "git", "rev-parse", "HEAD") == head
    assert "in the history as 7 commit(s)" in cli("apply", "--tree", checkout, "--status")[1]


@pytest.mark.parametrize("pin", ["0.8.0", "0.9.1"])
def test_status_says_the_same_of_files_and_of_commits(cli, tree, pin):
    files, checkout = tree(pin), tree(pin, git=True, into="checkout")
    planned = statuses(cli, files, "--dry-run")
    before = {name: "not applied" if s in ("applied", "superseded") else s for name, s in planned.items()}
    assert {"applied", "superseded", "already upstream"} <= set(planned.values())
    assert ("not needed" in planned.values()) == (pin == "0.8.0")
    assert statuses(cli, files, "--status") == statuses(cli, checkout, "--status") == before
    cli("apply", "--tree", files), cli("apply", "--tree", checkout, "--commit")
    assert statuses(cli, files, "--status") == statuses(cli, checkout, "--status") == planned


def test_status_of_a_part_as_commits(cli, tree):
    checkout = tree("0.8.0", git=True)
    cli("apply", "--tree", checkout, "--commit", "--only", "0009")
    told = statuses(cli, checkout, "--status")
    assert [told[name] for name in sorted(told) if name[:4] in ("0001", "0003", "0005", "0009", "0011")] == [
        "already upstream", "not applied", "not applied", "applied", "not needed"
    ]  # fmt: skip


def test_status_of_a_tree_that_is_too_old(cli, tree):
    folder = tree("0.8.0")
    (folder / "verl/models/mcore/util.py").write_text("def preprocess_thd_engine(batch):\n    return batch, None\n")
    assert set(statuses(cli, folder, "--status").values()) == {"does not fit"}
    assert "too old: " in cli("apply", "--tree", folder, "--status")[1]


def test_commits_are_taken_back_by_git(cli, tree):
    checkout = tree("0.8.0", git=True)
    before = snapshot(checkout)
    cli("apply", "--tree", checkout, "--commit")
    status, _, err = cli("apply", "--tree", checkout, "--revert")
    assert status == 2
    command = err.partition("as commits: ")[2].split()
    run(checkout, *command[:2], "--no-edit", *command[2:])
    assert snapshot(checkout) == before
    assert "not applied" in cli("apply", "--tree", checkout, "--status")[1]
    assert cli("apply", "--tree", checkout, "--revert")[0] == 0


def test_commits_are_cherry_picked_into_another_release_branch(cli, tree):
    checkout = tree("0.8.0", git=True)
    run(checkout, "git", "branch", "release")
    cli("apply", "--tree", checkout, "--commit")
    run(checkout, "git", "checkout", "--quiet", "release")
    (checkout / "verl" / "ours.py").write_text("")
    run(checkout, "git", "add", "verl/ours.py")
    run(checkout, "git", "commit", "--quiet", "-m", "ours")
    run(checkout, "git", "cherry-pick", "main~7..main")
    assert len(subjects(checkout)) == 8


def test_a_dirty_checkout_is_refused_unless_told_otherwise(cli, tree):
    checkout = tree("0.9.1", git=True)
    readme = checkout / "README.md"
    readme.write_text(readme.read_text() + "mine\n")
    status, _, err = cli("apply", "--tree", checkout, "--commit")
    assert status == 1
    assert "README.md" in err
    assert subjects(checkout) == []
    assert cli("apply", "--tree", checkout, "--commit", "--allow-dirty")[0] == 0
    assert len(subjects(checkout)) == 7
    assert run(checkout, "git", "status", "--porcelain").split() == ["M", "README.md"]


def test_changes_to_files_that_the_patch_set_edits_are_never_committed_along(cli, tree):
    checkout = tree("0.9.1", git=True)
    util = checkout / "verl/models/mcore/util.py"
    util.write_text(util.read_text() + "\n# mine\n")
    status, _, err = cli("apply", "--tree", checkout, "--commit", "--allow-dirty")
    assert status == 1
    assert "verl/models/mcore/util.py" in err
    assert subjects(checkout) == []


def test_a_tree_below_the_root_of_a_checkout(cli, tree, tmp_path):
    tree("0.9.1", into="mono/third_party/verl")
    mono = tmp_path / "mono"
    gitrepo.make_repository(mono)
    run(mono, "git", "config", "user.name", "A Maintainer")
    run(mono, "git", "config", "user.email", "maintainer@localhost")
    folder = mono / "third_party" / "verl"
    assert cli("apply", "--tree", folder, "--commit")[0] == 0
    changed = run(mono, "git", "show", "--format=", "--name-only", "HEAD").split()
    assert changed
    assert all(name.startswith("third_party/verl/") for name in changed)
    assert run(mono, "git", "status", "--porcelain") == ""


def test_commit_needs_a_checkout(cli, tree):
    status, _, err = cli("apply", "--tree", tree("0.9.1"), "--commit")
    assert status == 2
    assert "is no git checkout" in err


def test_diff_of_the_bucket_on_080_is_about_as_long_as_upstreams_own(cli, tree):
    # Upstream's own change adds 66 lines, the generated YAML included; ours brings its tests along
    checkout = tree("0.8.0", git=True)
    cli("apply", "--tree", checkout, "--commit", "--only", "0003", "0006")
    added = run(checkout, "git", "show", "--numstat", "--format=", "HEAD", "--", "verl")
    assert sum(int(line.split()[0]) for line in added.splitlines()) <= 1.2 * 66
