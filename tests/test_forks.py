"""Trees that are no pin: between two releases, formatted otherwise, with call sites of their own."""

from __future__ import annotations

import json
import shutil

import pytest

from patchset.series.style import Style
from patchset.target import gitrepo
from tests.conftest import run, snapshot

UTIL, FORWARD = "verl/models/mcore/util.py", "verl/models/mcore/model_forward.py"
GENERATED = "verl/trainer/config/_generated_ppo_megatron_trainer.yaml"


def edit(folder, name, *pairs):
    path = folder / name
    text = path.read_text()
    for old, new in pairs:
        assert text.count(old) == 1, (old, text.count(old))
        text = text.replace(old, new)
    path.write_text(text)


def added(before, after, name):
    return [
        line[1:].strip()
        for line in gitrepo.diff({name: before[name]}, {name: after[name]}).splitlines()
        if line.startswith("+") and not line.startswith("+++")
    ]


def changes(before, after, name):
    diff = gitrepo.diff({name: before[name]}, {name: after[name]}).splitlines()
    return [line for line in diff if line[:1] in "+-" and line[:3] not in ("+++", "---")]


def test_a_fork_gets_the_same_edits_and_is_told_that_no_lock_covers_it(cli, tree):
    fork, release = tree("0.8.0", into="fork"), tree("0.8.0")
    edit(fork, UTIL, ("def preprocess_thd_engine(", "FORK = 1\n\n\ndef preprocess_thd_engine("))
    edit(
        fork,
        FORWARD,
        ("    local_cp_size: Optional[int] = None,\n):", "    local_cp_size: int = None,\n    ours=None,\n):"),
    )
    before = {name: snapshot(folder) for name, folder in (("fork", fork), ("release", release))}
    _, out, _ = cli("apply", "--tree", fork, "--json")
    (target,) = json.loads(out)["targets"]
    assert (target["pin"], target["exact"]) == (None, False)
    assert any("not by ci/pins.lock" in note for note in target["notes"])
    cli("apply", "--tree", release)
    for name in (UTIL, FORWARD):
        ours = added(before["fork"], snapshot(fork), name)
        assert ours == added(before["release"], snapshot(release), name), name


def test_a_fork_between_two_releases_has_one_part_already(cli, tree):
    # A fork of 0.7.1 that took over the one-dimensional position buffer of a later release
    fork = tree("0.7.1")
    buffer = "position_ids_rmpad = torch.zeros({}, dtype=torch.long, device=input_ids.device)"
    edit(fork, UTIL, (buffer.format("shape"), buffer.format("shape[0]")))
    status, _, _ = cli("apply", "--tree", fork, "--until", "0004")
    assert status == 0
    assert (fork / UTIL).read_text().count(buffer.format("shape[0]")) == 1


def test_a_fork_that_renamed_the_anchor_is_a_conflict_and_stays_untouched(cli, tree):
    fork = tree("0.8.0")
    (fork / UTIL).write_text((fork / UTIL).read_text().replace("seqlens_in_batch_padded_cpu", "padded"))
    before = snapshot(fork)
    assert cli("apply", "--tree", fork, "--only", "0002", "0009")[0] == 0  # do not look at that name
    cli("apply", "--tree", fork, "--revert")
    assert snapshot(fork) == before


def test_other_formatting_of_a_fork_is_left_alone(cli, tree):
    fork = tree("0.8.0")
    edit(fork, UTIL, ("logger = logging.getLogger(__file__)\n", "logger = logging.getLogger( __file__ ) # odd\n"))
    before = snapshot(fork)
    assert cli("apply", "--tree", fork)[0] == 0
    after = snapshot(fork)
    assert b"logging.getLogger( __file__ ) # odd\n" in after[UTIL]
    release = tree("0.8.0", into="release")
    start = snapshot(release)
    cli("apply", "--tree", release)
    assert added(before, after, UTIL) == added(start, snapshot(release), UTIL)


def test_windows_line_ends_are_kept(cli, tree):
    fork = tree("0.8.0")
    path = fork / UTIL
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert cli("apply", "--tree", fork)[0] == 0
    data = path.read_bytes()
    assert data.count(b"\r\n") == data.count(b"\n")
    assert b"\r\r" not in data
    assert b"layout = thd_layout(" in data


def test_settings_of_the_tree_format_the_edits(cli, tree):
    fork = tree("0.8.0")
    edit(fork, "pyproject.toml", ("line-length = 120", "line-length = 80"))
    for name in (UTIL, FORWARD):
        run(fork, shutil.which("true"))
        Style.of(fork)._ruff(fork, [name])
    assert cli("apply", "--tree", fork)[0] == 0
    assert not [problem for problem in Style.of(fork).problems(fork, [FORWARD]) if "is not formatted" in problem]


def test_a_call_site_of_a_fork_that_forgets_the_bucket_is_found_before_anything_is_written(cli, tree):
    fork = tree("0.9.1")
    (fork / "verl/ours.py").write_text(
        "from verl.models.mcore.util import preprocess_thd_engine\n\n\n"
        "def pack(batch):\n    return preprocess_thd_engine(batch)\n"
    )
    before = snapshot(fork)
    status, _, err = cli("apply", "--tree", fork)
    assert status == 1
    assert "verl/ours.py:5: pack packs without pad_to_length_bucket" in err
    assert snapshot(fork) == before
    text = (fork / "verl/ours.py").read_text()
    (fork / "verl/ours.py").write_text(text.replace("engine(batch)\n", "engine(batch)  # thd-bucket: no training\n"))
    assert cli("apply", "--tree", fork)[0] == 0


def test_generated_yaml_that_was_out_of_step_gets_the_patchs_own_lines_alone(cli, tree):
    fork, release = tree("0.8.0", into="fork"), tree("0.8.0")
    edit(fork, GENERATED, ("      seed: 42\n      override_ddp_config", "      seed: 43\n      override_ddp_config"))
    edit(fork, GENERATED, ("\n  timeline_json_file: null\n", "\n"))
    before = {name: snapshot(folder) for name, folder in (("fork", fork), ("release", release))}
    _, out, _ = cli("apply", "--tree", fork, "--json")
    note = f"{GENERATED} was out of step with its sources before, and still is, apart from this patch-set's keys"
    assert note in json.loads(out)["targets"][0]["notes"]
    cli("apply", "--tree", release)
    ours = changes(before["fork"], snapshot(fork), GENERATED)
    assert ours == changes(before["release"], snapshot(release), GENERATED)
    assert len(ours) == 6


def test_generated_yaml_that_is_out_of_step_where_keys_come_is_regenerated_whole(cli, tree):
    fork, release = tree("0.8.0", into="fork"), tree("0.8.0")
    text = (fork / GENERATED).read_text()
    assert text.count("use_remove_padding: true\n      use_megatron_fsdp: false\n") == 1
    edit(fork, GENERATED, ("padding: true\n      use_megatron_fsdp: false\n", "padding: 1\n      ours: 2\n"))
    _, out, _ = cli("apply", "--tree", fork, "--json")
    note = f"{GENERATED} was out of step with its sources before; it is regenerated whole, with 4 unrelated lines"
    assert note in json.loads(out)["targets"][0]["notes"]
    cli("apply", "--tree", release)
    assert (fork / GENERATED).read_bytes() == (release / GENERATED).read_bytes()


def test_generated_yaml_that_is_no_yaml_is_regenerated_whole(cli, tree):
    fork, release = tree("0.8.0", into="fork"), tree("0.8.0")
    edit(fork, GENERATED, ("      seed: 42\n      override_ddp_config", "<<<<<<< ours\n      override_ddp_config"))
    _, out, _ = cli("apply", "--tree", fork, "--json")
    assert any("with 2 unrelated lines" in note for note in json.loads(out)["targets"][0]["notes"])
    cli("apply", "--tree", release)
    assert (fork / GENERATED).read_bytes() == (release / GENERATED).read_bytes()


def test_generated_yaml_with_windows_line_ends_keeps_them_and_is_not_out_of_step(cli, tree):
    fork, release = tree("0.8.0", into="fork"), tree("0.8.0")
    (fork / GENERATED).write_bytes((fork / GENERATED).read_bytes().replace(b"\n", b"\r\n"))
    _, out, _ = cli("apply", "--tree", fork, "--json")
    assert not any("out of step" in note for note in json.loads(out)["targets"][0]["notes"])
    cli("apply", "--tree", release)
    assert (fork / GENERATED).read_bytes() == (release / GENERATED).read_bytes().replace(b"\n", b"\r\n")


def test_a_config_that_does_not_compose_is_a_conflict(cli, tree):
    fork = tree("0.8.0")
    (fork / "verl/trainer/config/actor/actor.yaml").write_text("defaults:\n  - nowhere\n")
    before = snapshot(fork)
    status, _, err = cli("apply", "--tree", fork)
    assert status == 1
    assert "does not compose" in err
    assert snapshot(fork) == before


def test_a_checkout_of_a_release_has_files_that_its_sdist_leaves_out(cli, tree):
    folder = tree("0.8.0")
    file = folder / "tests/models/test_model_forward_fused.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text('WANTED = [{"pre_process": 1, "min_local_rows": 64}, {"pre_process": 2, "min_local_rows": 64}]\n')
    status, out, _ = cli("apply", "--tree", folder, "--json")
    assert status == 0
    assert json.loads(out)["targets"][0]["pin"] == "0.8.0"
    assert file.read_text().count('"pad_to_length_bucket": None') == 2


@pytest.mark.parametrize("pin", ["0.9.0", "0.9.1"])
def test_an_exact_pin_that_comes_out_differently_is_an_error(cli, tree, monkeypatch, pin):
    from patchset.series import lock

    locked = lock.read_lock()
    name = UTIL
    locked[pin][name] = lock.Record(locked[pin][name].before, "0" * 64)
    monkeypatch.setattr("patchset.apply.read_lock", lambda: locked)
    folder = tree(pin)
    before = snapshot(folder)
    status, _, err = cli("apply", "--tree", folder)
    assert status == 1
    assert "comes out differently than ci/pins.lock says" in err
    assert name in err
    assert snapshot(folder) == before
