"""scripts/apply.sh as its users call it: what it changes, says, refuses and takes back."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from patchset.series.style import Style
from tests.conftest import PINS, run, snapshot

APPLIED, UPSTREAM, UNNEEDED, SUPERSEDED = "applied", "already upstream", "not needed", "superseded"
#: Statuses by number of the patch
OLDEST = [SUPERSEDED, APPLIED, SUPERSEDED, SUPERSEDED, *[APPLIED] * 6, UNNEEDED]
EXPECTED = {"0.7.1": dict(zip(range(1, 12), OLDEST, strict=True))}
EXPECTED["before-6267"] = EXPECTED["0.7.1"]
EXPECTED["0.8.0"] = {**EXPECTED["0.7.1"], 1: UPSTREAM}
EXPECTED["before-7358"] = {**EXPECTED["0.8.0"], 11: APPLIED}
for newer in ("0.9.0", "main-2026-08-22", "0.9.1"):
    EXPECTED[newer] = {**EXPECTED["before-7358"], 6: UPSTREAM}


@pytest.mark.parametrize("pin", EXPECTED)
def test_statuses_of_every_pin(cli, tree, pin):
    folder = tree(pin)
    status, out, _ = cli("apply", "--tree", folder, "--json")
    (target,) = json.loads(out)["targets"]
    assert status == 0
    touched = [name for name in target["changed"] if name.endswith(".py")]
    assert Style.of(folder).problems(folder, touched) == {}, "what lands is content with upstream's own linter"
    assert {int(name[:4]): patch["status"] for name, patch in target["patches"].items()} == EXPECTED[pin]
    assert (target["pin"], target["exact"]) == (pin, True)


def test_all_pins_into_build(cli, tmp_path, monkeypatch):
    monkeypatch.setattr("patchset.apply.REPOSITORY", tmp_path)
    status, out, _ = cli("apply", "--all", "--json")
    targets = json.loads(out)["targets"]
    assert status == 0
    assert [target["pin"] for target in targets] == PINS.releases == ["0.7.1", "0.8.0", "0.9.0", "0.9.1"]
    assert all((tmp_path / "build" / f"verl-{pin}" / "verl" / "__init__.py").exists() for pin in PINS.releases)
    status, out, _ = cli("apply", "--all")
    assert status == 0
    assert out.count("nothing to do") == 4


def test_default_pin_goes_to_out(cli, tmp_path):
    status, out, _ = cli("apply", "--out", tmp_path / "here")
    assert status == 0
    assert "0005-thd-layout" in out
    assert "layout = thd_layout(" in (tmp_path / "here/verl/models/mcore/util.py").read_text()


def test_out_that_holds_another_pin_is_refused(cli, tree):
    folder = tree("0.9.0")
    before = snapshot(folder)
    status, _, err = cli("apply", "--pin", "0.9.1", "--out", folder)
    assert status == 1
    assert "is not verl 0.9.1" in err
    assert snapshot(folder) == before


@pytest.mark.parametrize("pin", ["0.7.1", "0.9.1"])
def test_second_apply_changes_no_byte_and_no_mtime(cli, tree, pin):
    folder = tree(pin)
    assert cli("apply", "--tree", folder)[0] == 0
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    status, out, _ = cli("apply", "--tree", folder)
    assert status == 0
    assert "nothing to do" in out
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.parametrize("git", [False, True], ids=["folder", "checkout"])
@pytest.mark.parametrize("pin", ["0.7.1", "0.8.0", "0.9.1"])
def test_revert_gives_every_byte_back_and_leaves_nothing(cli, tree, pin, git):
    folder = tree(pin, git=git)
    before = {path: (path.read_bytes(), path.stat().st_mode) for path in folder.rglob("*") if path.is_file()}
    folders = {path for path in folder.rglob("*") if path.is_dir()}
    assert cli("apply", "--tree", folder)[0] == 0
    assert cli("apply", "--tree", folder, "--revert")[0] == 0
    assert {path: (path.read_bytes(), path.stat().st_mode) for path in folder.rglob("*") if path.is_file()} == before
    assert {path for path in folder.rglob("*") if path.is_dir()} == folders
    assert cli("apply", "--tree", folder, "--revert")[1].strip().endswith("nothing to do, 0.00 s")


def test_file_modes_are_kept(cli, tree):
    folder = tree("0.9.1")
    touched = folder / "verl/workers/config/engine.py"
    touched.chmod(0o750)
    cli("apply", "--tree", folder)
    assert touched.stat().st_mode & 0o777 == 0o750
    cli("apply", "--tree", folder, "--revert")
    assert touched.stat().st_mode & 0o777 == 0o750


def test_changing_the_selection_goes_there_from_any_state(cli, tree):
    folder, other = tree("0.7.1"), tree("0.7.1", into="other")
    assert cli("apply", "--tree", folder)[0] == 0
    assert cli("apply", "--tree", folder, "--only", "0001")[0] == 0
    assert cli("apply", "--tree", other, "--until", "0001")[0] == 0
    ours, theirs = snapshot(folder), snapshot(other)
    for name in [name for name in (*ours, *theirs) if name.startswith(".verl-patchset")]:
        ours.pop(name, None), theirs.pop(name, None)
    assert ours == theirs
    assert cli("apply", "--tree", folder, "--revert")[0] == 0


def test_only_takes_several_names(cli, tree):
    _, out, _ = cli("apply", "--tree", tree("0.7.1"), "--json", "--only", "0001", "0003-padded-data")
    patches = json.loads(out)["targets"][0]["patches"]
    chosen = [name for name, patch in patches.items() if patch["status"] == APPLIED]
    assert chosen == ["0001-cp-position-ids", "0003-padded-data"]


def test_without_leaves_patches_out(cli, tree):
    _, out, _ = cli("apply", "--tree", tree("0.7.1"), "--json", "--without", "0005", "0010-mtp-loss-mask")
    statuses = {int(name[:4]): patch["status"] for name, patch in json.loads(out)["targets"][0]["patches"].items()}
    wanted = dict.fromkeys((1, 2, 3, 4, 6, 7, 8, 9), APPLIED)
    assert statuses == {**wanted, 5: "not selected", 10: "not selected", 11: UNNEEDED}


def test_small_edits_and_the_layout_chosen_together_say_which_wins(cli, tree):
    folder = tree("0.7.1")
    _, out, _ = cli("apply", "--tree", folder)
    assert "superseded (by 0005-thd-layout)" in out
    assert "remain_start" not in (folder / "verl/models/mcore/util.py").read_text().partition("def preprocess_thd_")[2]


def test_a_patch_without_what_it_requires_is_refused(cli, tree):
    folder = tree("0.8.0")
    before = snapshot(folder)
    status, _, err = cli("apply", "--tree", folder, "--only", "0006")
    assert status == 1
    assert "0006-pad-to-length requires 0003-padded-data or 0005-thd-layout" in err
    assert snapshot(folder) == before


def test_status_tells_version_patches_and_edits(cli, tree):
    folder = tree("0.8.0")
    assert "not applied" in cli("apply", "--tree", folder, "--status")[1]
    cli("apply", "--tree", folder)
    _, out, _ = cli("apply", "--tree", folder, "--status")
    assert "applied by patch-set 0.1.0 to 28 files" in out
    assert "edited since" not in out
    (folder / "verl/models/mcore/util.py").write_text("# mine\n")
    _, out, _ = cli("apply", "--tree", folder, "--status")
    assert "edited since: verl/models/mcore/util.py" in out


@pytest.mark.parametrize("option", [[], ["--revert"]], ids=["apply", "revert"])
def test_edits_made_since_are_never_lost(cli, tree, option):
    folder = tree("0.8.0")
    cli("apply", "--tree", folder)
    edited = folder / "verl/models/mcore/util.py"
    edited.write_text(edited.read_text() + "\n# mine\n")
    before = snapshot(folder)
    status, _, err = cli("apply", "--tree", folder, *option)
    assert status == 1
    assert "edited after the patch-set was applied" in err
    assert "verl/models/mcore/util.py" in err
    assert snapshot(folder) == before


def test_a_tree_that_was_reset_by_git_is_patched_again(cli, tree):
    folder = tree("0.9.1", git=True)
    cli("apply", "--tree", folder)
    run(folder, "git", "reset", "--quiet", "--hard")
    run(folder, "git", "clean", "-fdq")
    assert "not applied" in cli("apply", "--tree", folder, "--status")[1]
    status, out, _ = cli("apply", "--tree", folder)
    assert status == 0
    assert "24 files patched" in out


def test_dry_run_prints_a_diff_that_git_applies(cli, tree):
    folder, other = tree("0.7.1", git=True), tree("0.7.1", git=True, into="other")
    before = snapshot(folder)
    status, out, _ = cli("apply", "--tree", folder, "--dry-run")
    assert status == 0
    assert snapshot(folder) == before
    run(folder, "git", "apply", "--index", data=out)
    cli("apply", "--tree", other)
    assert snapshot(folder) == snapshot(other)


def conflict(folder, old, new, file="verl/models/mcore/util.py"):
    path = folder / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_conflict_names_patch_file_rule_counts_and_nearest_lines(cli, tree):
    folder = tree("0.8.0")
    conflict(folder, "if d.numel() < align_size:", "if len(d) < align_size:")
    line = 1 + (folder / "verl/models/mcore/util.py").read_text().splitlines().index(
        "            if len(d) < align_size:"
    )
    before = snapshot(folder)
    status, _, err = cli("apply", "--tree", folder, "--without", "0005")
    assert status == 1
    assert (
        "0003-padded-data: verl/models/mcore/util.py: rule full-length-data expected 1 match(es) in function "
        "preprocess_thd_, found 0" in err
    )
    assert f"near: line {line}: if len(d) < align_size:" in err
    assert snapshot(folder) == before
    status, _, err = cli("apply", "--tree", folder)
    assert status == 1
    assert "rule pack-by-layout would take away code that is not upstream's:" in err
    assert f"yours: line {line}: if len(d) < align_size:" in err
    assert err.count("yours:") == 1
    assert "--without 0005-thd-layout" in err
    assert snapshot(folder) == before


def test_more_matches_than_stated_are_a_conflict_too(cli, tree):
    folder = tree("0.8.0")
    file = folder / "verl/models/mcore/model_forward.py"
    extra = "        extra = preprocess_thd_engine(input_ids, pre_process=True)\n"
    marker = "        input_ids_rmpad = input_ids_rmpad.contiguous()\n\n        args = {}"
    conflict(folder, marker, extra + marker, file.relative_to(folder))
    status, _, err = cli("apply", "--tree", folder)
    assert status == 1
    assert (
        "rule pack-with-bucket expected 3 match(es) in function gptmodel_forward_(no_padding|model_engine), found 4"
        in err
    )
    assert err.count("match: line") == 4


def test_missing_file_is_a_conflict(cli, tree):
    folder = tree("0.9.1")
    (folder / "verl/workers/config/engine.py").unlink()
    status, _, err = cli("apply", "--tree", folder)
    assert status == 1
    assert "verl/workers/config/engine.py is not in this tree" in err


def test_a_file_of_the_same_name_is_not_overwritten(cli, tree):
    folder = tree("0.9.1")
    mine = folder / "tests/special_sanity/check_thd_bucket_calls.py"
    mine.parent.mkdir(parents=True)
    mine.write_text("print('mine')\n")
    status, _, err = cli("apply", "--tree", folder)
    assert status == 1
    assert "another file of that name" in err
    assert mine.read_text() == "print('mine')\n"


def test_a_link_out_of_the_tree_is_not_followed(cli, tree, tmp_path):
    folder = tree("0.9.1")
    inside, outside = folder / "verl/workers/config/engine.py", tmp_path / "engine.py"
    shutil.move(inside, outside)
    inside.symlink_to(outside)
    text = outside.read_text()
    status, _, err = cli("apply", "--tree", folder)
    assert status == 1
    assert "leads out of" in err
    assert outside.read_text() == text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tree", "/nonexistent"], "holds no verl/ package"),
        (["--pin", "0.1.0"], "'0.1.0' is no pin"),
        (["--only", "0099"], "'0099' is no patch of the series"),
        (["--only", "00"], "'00' fits several patches"),
        (["--installed", "/nonexistent/python"], "does not run"),
        (["--all", "--export", "x"], "one pin or tree at a time"),
        (["--tree", ".", "--out", "x"], "--out goes with --pin"),
    ],
)
def test_unusable_commands_exit_with_2_and_one_line(cli, arguments, says):
    status, _, err = cli("apply", *arguments)
    assert status == 2
    assert says in err
    assert err.startswith("error: ")


def test_unusable_options_exit_with_2(cli):
    with pytest.raises(SystemExit) as ended:
        cli("apply", "--frobnicate")
    assert ended.value.code == 2


def test_errors_are_json_too(cli):
    status, out, _ = cli("apply", "--tree", "/nonexistent", "--json")
    assert status == 2
    assert json.loads(out)["exit_status"] == 2


def test_installed_verl_is_patched_without_tests_and_reverted(cli, tree, tmp_path):
    folder = tree("0.8.0")
    run(tmp_path, sys.executable, "-m", "venv", "--without-pip", "venv")
    python = tmp_path / "venv/bin/python"
    site = run(tmp_path, python, "-c", "import site; print(site.getsitepackages()[0])").strip()
    package = shutil.copytree(folder / "verl", Path(site) / "verl")
    before = snapshot(tmp_path / "venv")
    status, out, _ = cli("apply", "--installed", python, "--json")
    assert status == 0
    (target,) = json.loads(out)["targets"]
    assert all(name.startswith("verl/") for name in target["changed"])
    assert "pad_to_length_bucket" in (package / "models/mcore/model_forward_fused.py").read_text()
    assert cli("apply", "--installed", python, "--revert")[0] == 0
    assert snapshot(tmp_path / "venv") == before


def test_interpreter_without_verl(cli, tmp_path):
    run(tmp_path, sys.executable, "-m", "venv", "--without-pip", "venv")
    status, _, err = cli("apply", "--installed", tmp_path / "venv/bin/python")
    assert status == 2
    assert "has no verl installed" in err


def test_help_documents_the_exit_statuses():
    done = subprocess.run(
        [sys.executable, "-m", "patchset", "apply", "--help"], capture_output=True, text=True, check=True
    )  # fmt: skip
    for status in "0123":
        assert f"\n  {status}  " in done.stdout
