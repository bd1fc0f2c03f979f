"""The documentation says what the code does."""

from __future__ import annotations

import re

from patchset import REPOSITORY, __version__
from patchset.plan import Status
from patchset.suites import known_failures
from tests.conftest import PINS

README = (REPOSITORY / "README.md").read_text()


def test_the_readmes_table_is_what_the_series_claims(series):
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in README.splitlines() if line[:3] == "| 0"]
    names = [patch.name for patch in series.patches]
    assert [cell.strip() for cell in re.findall(r"^\| pin \|(.*)\|$", README, re.M)[0].split("|")] == names
    claimed = [
        [pin, *(Status.UPSTREAM.value if pin in p.metadata.upstream.pins else "applied" for p in series.patches)]
        for pin in PINS.releases
    ]
    assert rows == claimed


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


def test_known_failures_belong_to_pins_and_have_reasons():
    assert any(known_failures(pin) for pin in PINS.releases)
    for pin in PINS.pins:
        assert all(reason.strip() for reason in known_failures(pin).values())


def test_the_changelog_has_a_section_for_what_is_to_come():
    assert "## [Unreleased]" in (REPOSITORY / "CHANGELOG.md").read_text()
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
