"""The history of upstream: how commits come together in ranges, which of them must not be as they are, and the page."""

from __future__ import annotations

import re

import pytest

from patchset.proof import history
from patchset.proof.history import CONFLICT, LANDS, TOO_OLD, WRONG, Commit, History, Verdict

OLD, NEW = Verdict(TOO_OLD, "no positions"), Verdict(LANDS, statuses={"0001-cp": "applied", "0002-ids": "applied"})
LATER = Verdict(LANDS, statuses={"0001-cp": "already upstream", "0002-ids": "applied"})


def commit(number, *refs):
    return Commit(f"{number:x}" * 40, f"2026-01-0{number}", f"[x] fix: {number} | more (#{number}00)", refs)


def made(*verdicts, releases=()):
    return History(tuple((commit(number), verdict) for number, verdict in enumerate(verdicts, 1)), releases, 3, 1.0)


def test_equal_neighbours_are_a_range():
    ranges = made(OLD, OLD, NEW, LATER, LATER, NEW).ranges
    assert [(row.first.hash[0], row.last.hash[0], row.commits) for row in ranges] == [
        ("1", "2", 2), ("3", "3", 1), ("4", "5", 2), ("6", "6", 1),
    ]  # fmt: skip


def test_a_range_says_which_patches_it_gets():
    assert str(NEW) == "lands: applied 0001 0002"
    assert str(LATER) == "lands: already upstream 0001, applied 0002"
    assert str(OLD) == "too old: no positions"


@pytest.mark.parametrize(
    ("verdicts", "bad"),
    [
        ([OLD, OLD, NEW, LATER], ""),
        ([Verdict(CONFLICT), OLD, NEW], ""),  # before it lands for the first time
        ([OLD, NEW, Verdict(CONFLICT), NEW], "3"),
        ([OLD, NEW, Verdict(WRONG)], "3"),
        ([Verdict(WRONG), OLD, NEW], "1"),  # wrong is wrong anywhere
        ([OLD, Verdict(WRONG), OLD], "2"),
    ],
)
def test_conflicts_after_the_first_landing_and_wrong_commits_are_bad(verdicts, bad):
    assert "".join(commit.hash[0] for commit, _ in made(*verdicts).bad) == bad


def test_releases_off_main_may_be_too_old_and_no_more():
    releases = ((commit(7, "v1"), OLD), (commit(8, "v2"), Verdict(CONFLICT)), (commit(9, "v3"), NEW))
    found = made(OLD, NEW, releases=releases)
    assert [commit.refs for commit, _ in found.bad] == [("v2",)]
    assert found.json()["bad"] == 1


def test_the_page_has_a_row_for_each_range_and_release():
    text = history.page(made(OLD, OLD, NEW, releases=((commit(7, "v1", "release/v1"), NEW),)))
    rows = [line for line in text.splitlines() if re.match(r"\| \S+ ", line) and not line.startswith("| commits")]
    assert rows == [
        "| 111111111 2026-01-01 to 222222222 2026-01-02 | 2 | too old: no positions | [x] fix: 1 \\| more (#100) |",
        "| 333333333 2026-01-03 | 1 | lands: applied 0001 0002 | [x] fix: 3 \\| more (#300) |",
        "| release off main | outcome |",
        "| v1, release/v1 (777777777 2026-01-07) | lands: applied 0001 0002 |",
    ]


def test_conflicts_that_differ_in_line_numbers_alone_are_one_range():
    said = [history._without_lines(f"verl/models/mcore/util.py:{line}: foreign code") for line in (7, 90)]
    assert said == ["verl/models/mcore/util.py: foreign code"] * 2


def page_rows():
    rows = re.findall(r"^\| ([0-9a-f]{9}) \S+(?: to ([0-9a-f]{9}) \S+)? \| \d+ \| (.*?) \| ", history.PAGE.read_text(),
                      re.MULTILINE)  # fmt: skip
    assert len(rows) > 3
    return [(commit, said) for first, last, said in rows for commit in sorted({first, last} - {""})]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("short", "said"), page_rows())
def test_commits_at_the_ends_of_ranges_come_out_as_the_page_says(upstream, series, short, said):
    verdict, packers = history.examine(upstream, short, series)
    assert str(verdict) == said
    assert bool(packers) == (verdict.kind == LANDS)
