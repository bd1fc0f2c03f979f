"""The series lint, one fault at a time, and what the real series promises."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import yaml

from patchset import REPOSITORY
from patchset.errors import Conflict, UsageError
from patchset.series import astgrep
from patchset.series.catalogue import load
from patchset.series.lock import read_lock, records
from patchset.series.plan import Status, make_plan
from patchset.target.tree import Tree
from tests.conftest import PINS

RULE = """
id: one
language: python
severity: hint
message: m
files: [verl/a.py]
metadata: {expect: 1}
rule: {pattern: x = 1}
fix: x = 2
"""
PATCH = {
    "subject": "s",
    "message": "m",
    "why": "w",
    "upstream": {"pull_request": None, "commit": None, "first_release": None, "pins": []},
    "requires": [],
    "present": [{"file": "verl/a.py", "message": "m", "language": "python", "rule": {"pattern": "x = 2"}}],
    "retire": "r",
    "overlay": ["tests/a/test_a_on_cpu.py"],
    "proofs": ["tests/a/test_a_on_cpu.py"],
}


@pytest.fixture
def repository(tmp_path):
    """A repository with a series of one sound patch."""
    folder = tmp_path / "repository"
    (folder / "patches/0001-a/rules/verl").mkdir(parents=True)
    (folder / "patches/0001-a/rules/verl/a.py.yml").write_text(RULE)
    (folder / "patches/series").write_text("# comment\n0001-a\n")
    (folder / "verl_overlay/tests/a").mkdir(parents=True)
    (folder / "verl_overlay/tests/a/test_a_on_cpu.py").write_text("")
    write(folder)
    return folder


def write(repository, name="0001-a", **changes):
    said = {key: value for key, value in {**PATCH, **changes}.items() if value is not ...}
    (repository / "patches" / name / "patch.yaml").write_text(yaml.safe_dump(said))


def problems(repository):
    with pytest.raises(UsageError) as told:
        load(repository)
    return "\n".join(told.value.details)


def test_a_sound_series_loads(repository):
    assert [patch.name for patch in load(repository).patches] == ["0001-a"]


def test_unlisted_missing_and_doubled_patches(repository):
    shutil.copytree(repository / "patches/0001-a", repository / "patches/0002-b")
    (repository / "patches/series").write_text("0001-a\n0001-a\n0003-c\n")
    said = problems(repository)
    assert "0001-a stands 2 times in the series" in said
    assert "0003-c is in the series but has no folder" in said
    assert "0002-b has a folder but is not in the series" in said


@pytest.mark.parametrize("field", [key for key in PATCH if key not in ("overlay", "proofs")])
def test_a_patch_has_to_say_everything(repository, field):
    write(repository, **{field: ...})
    assert f"missing required field `{field}`" in problems(repository)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"why": " "}, "`why` is empty"),
        ({"present": []}, "`present` needs a probe"),
        ({"proofs": []}, "`proofs` needs a test"),
        ({"proofs": ["tests/b.py"]}, "proof tests/b.py is no file of verl_overlay/"),
        ({"overlay": []}, "verl_overlay/tests/a/test_a_on_cpu.py belongs to no patch"),
        ({"overlay": ["tests/a/test_a_on_cpu.py", "b.py"]}, "verl_overlay/b.py is listed by a patch but missing"),
        ({"requires": ["0000-x"]}, "0001-a requires 0000-x, which does not come before it"),
        ({"optional_files": {"verl/b.py": "r"}}, "optional file verl/b.py has no rules"),
        ({"regenerates": ["verl/b.yaml"]}, "verl/b.yaml is no generated YAML"),
        ({"colour": "red"}, "unknown field `colour`"),
    ],
)
def test_what_a_patch_says_has_to_hold(repository, changes, says):
    write(repository, **changes)
    assert says in problems(repository)


def test_a_folder_without_patch_yaml(repository):
    (repository / "patches/0001-a/patch.yaml").unlink()
    assert "0001-a has no patch.yaml" in problems(repository)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("metadata: {expect: 1}", "", "one needs `fix` and `metadata.expect` (a count) together"),
        ("fix: x = 2", "", "one needs `fix` and `metadata.expect` (a count) together"),
        ("expect: 1", "expect: 0", "one needs `fix` and `metadata.expect` (a count) together"),
        ("expect: 1", "expect: 1, unless: two", "one names no witness of its file: two"),
        ("files: [verl/a.py]", "files: [verl/b.py]", "one must have `files: [verl/a.py]`"),
        ("message: m", "", "a rule needs id, language, message and rule"),
        ("rule: {", "rule: {{", "is no YAML"),
        ("fix: x = 2", "fix: x = 2\n---" + RULE, "rule id one stands twice"),
    ],
)
def test_what_a_rule_says_has_to_hold(repository, old, new, says):
    (repository / "patches/0001-a/rules/verl/a.py.yml").write_text(RULE.replace(old, new))
    assert says in problems(repository)


def make_tree(tmp_path, text):
    (tmp_path / "tree/verl").mkdir(parents=True)
    (tmp_path / "tree/verl/__init__.py").write_text("")
    (tmp_path / "tree/verl/a.py").write_text(text)
    return Tree.at(tmp_path / "tree")


def plan(repository, tree):
    series = load(repository)
    return make_plan(tree, tree.read, series, series.select())


def test_a_patch_that_a_tree_has_no_use_for_is_not_needed(repository, tmp_path):
    needed = {"file": "verl/a.py", "message": "it has a y", "language": "python", "rule": {"pattern": "y = 0"}}
    write(repository, needed=[needed])
    step = plan(repository, make_tree(tmp_path, "x = 1\n")).steps[0]
    assert (step.status, step.reason) == (Status.NOT_NEEDED, "it has a y")
    (tmp_path / "tree/verl/a.py").write_text("x = 1\ny = 0\n")
    assert plan(repository, Tree.at(tmp_path / "tree")).steps[0].status is Status.APPLIED


def test_a_witness_spares_an_edit_and_contradicts_a_match(repository, tmp_path):
    witness = RULE.replace("id: one", "id: two").replace("metadata: {expect: 1}", "").replace("fix: x = 2", "")
    witness = witness.replace("x = 1", "y = 0")
    rules = RULE.replace("expect: 1", "expect: 1, unless: two") + "---" + witness
    (repository / "patches/0001-a/rules/verl/a.py.yml").write_text(rules)
    assert "verl/a.py" not in plan(repository, make_tree(tmp_path, "y = 0\n")).after
    (tmp_path / "tree/verl/a.py").write_text("x = 1\ny = 0\n")
    with pytest.raises(Conflict) as told:
        plan(repository, Tree.at(tmp_path / "tree"))
    assert "although its witness two says that it is not needed" in told.value.details[0]


def test_overlapping_edits_are_refused(repository, tmp_path):
    outer = RULE.replace("id: one", "id: outer").replace("fix: x = 2", "fix: 'x = 3'")
    (repository / "patches/0001-a/rules/verl/a.py.yml").write_text(RULE + "---" + outer)
    with pytest.raises(Conflict, match="overlaps another rule's edit"):
        plan(repository, make_tree(tmp_path, "x = 1\n"))


def test_a_rule_that_ast_grep_refuses_is_told(repository, tmp_path):
    (repository / "patches/0001-a/rules/verl/a.py.yml").write_text(RULE.replace("pattern: x = 1", "kind: nonsense"))
    with pytest.raises(UsageError, match="ast-grep refuses a rule"):
        plan(repository, make_tree(tmp_path, "x = 1\n"))


@pytest.mark.parametrize("pin", PINS.pins)
def test_claims_hold_in_both_directions(pristine, series, pin):
    tree = Tree.at(pristine(pin))
    made = make_plan(tree, tree.read, series, series.select())
    for step in made.steps:
        claimed = pin in step.patch.metadata.upstream.pins
        assert claimed == (step.status is Status.UPSTREAM), step.patch.name
    assert records(made) == read_lock()[pin]


def test_a_patch_that_upstream_has_says_where(series):
    for patch in series.patches:
        upstream = patch.metadata.upstream
        assert bool(upstream.pins) == bool(upstream.commit) == bool(upstream.first_release), patch.name
        assert set(upstream.pins) <= set(PINS.pins)


@pytest.mark.parametrize("file", sorted(REPOSITORY.glob("patches/*/rules/**/*.yml")), ids=lambda path: path.name)
def test_every_rule_file_runs_alone_in_ast_grep(pristine, file):
    pin = {"0001": "0.7.1", "0006": "0.8.0"}.get(file.relative_to(REPOSITORY / "patches").parts[0][:4], "0.9.0")
    target = file.as_posix().partition("/rules/")[2].removesuffix(".yml")
    if not (pristine(pin) / target).exists():
        pytest.skip(f"{pin} has no {target}")
    command = [astgrep.executable("ast-grep"), "scan", "-r", file, "--json=compact", target]
    done = subprocess.run(command, cwd=pristine(pin), capture_output=True, text=True, check=True)
    for document in yaml.safe_load_all(file.read_text()):
        expect = document.get("metadata", {}).get("expect")
        if expect and "unless" not in document["metadata"]:
            assert done.stdout.count(f'"ruleId":"{document["id"]}"') == expect


def test_a_patch_brings_along_what_its_tests_import(series):
    for patch in series.patches:
        for path in patch.metadata.overlay:
            helpers = re.findall(r"^from (tests\.\S+) import", series.overlay_bytes(path).decode(), re.M)
            needed = {helper.replace(".", "/") + ".py" for helper in helpers}
            assert needed <= set(patch.metadata.overlay), f"{patch.name}: {path}"
