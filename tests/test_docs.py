"""The documentation says what the code does."""

from __future__ import annotations

import re

from patchset import REPOSITORY, __version__
from patchset.proof.suites import known_failures
from patchset.series.plan import make_plan
from patchset.target.tree import Tree
from tests.conftest import PINS

README = (REPOSITORY / "README.md").read_text()


def test_the_readmes_table_is_what_a_plain_apply_does(series, pristine):
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in README.splitlines() if line[:3] == "| 0"]
    pins = [cell.strip() for cell in re.findall(r"^\| patch \|(.*)\|$", README, re.M)[0].split("|")]
    assert pins == PINS.releases
    trees = [Tree.at(pristine(pin)) for pin in pins]
    plans = [make_plan(tree, tree.read, series, series.select()) for tree in trees]
    assert rows == [[patch.name, *(plan.statuses[patch.name] for plan in plans)] for patch in series.patches]


def test_the_readme_fits_on_two_screens():
    assert len(README.splitlines()) <= 100


def test_links_lead_somewhere():
    for page in [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *REPOSITORY.glob("docs/*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_patch_is_explained_and_every_dependency_has_its_reason(series):
    patches = (REPOSITORY / "docs/patches.md").read_text()
    assert re.findall(r"^## (\d{4}-.*)$", patches, re.M) == [p.name for p in series.patches]
    contributing = (REPOSITORY / "CONTRIBUTING.md").read_text().lower()
    block = (REPOSITORY / "pyproject.toml").read_text().partition("\ndependencies = [")[2].partition("]\n")[0]
    for name in re.findall(r'"([a-z-]+)[<>=]', block):
        assert name in contributing, name


def test_every_fault_that_is_put_in_is_told_of():
    # The module itself can't be imported without a verl
    listed = (REPOSITORY / "patchset/numerics/mutations.py").read_text().partition("MUTATIONS: ")[2].partition("}")[0]
    told = (REPOSITORY / "docs/verification.md").read_text().partition("| fault |")[2].partition("\n\n")[0]
    faults = re.findall(r'"(.*)":', listed)
    assert "wrong CP rank" in faults
    assert faults == re.findall(r"^\| ([^|]*) \|", told, re.M)


def test_known_failures_belong_to_pins_and_have_reasons():
    assert any(known_failures(pin) for pin in PINS.releases)
    for pin in PINS.pins:
        assert all(reason.strip() for reason in known_failures(pin).values())


def test_the_changelog_has_a_section_for_what_is_to_come():
    assert "## [Unreleased]" in (REPOSITORY / "CHANGELOG.md").read_text()
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
