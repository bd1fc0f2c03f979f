"""Finds text that a repository shares with upstream trees.

A file's lines are folded and thinned to those that carry meaning; any `RUN` of them in a row that also stand in a row
in an upstream file counts as copied. Comments, imports, decorators, licence headers and lone brackets say nothing
about who wrote a file, so they are left out on both sides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

RUN = 4
SHORTEST = 12
KINDS = {".py", ".yaml", ".yml", ".sh", ".toml"}
_EMPTY = re.compile(r"(#|//|@|import |from |\"\"\"|'''|[][(){},:]+$)")
_LICENCE = re.compile(r"licen[sc]e|copyright|warrant|apache", re.IGNORECASE)


def lines_that_count(text: str) -> list[tuple[int, str]]:
    """(line number, line with its white space folded) of every line that counts."""
    folded = ((number, " ".join(line.split())) for number, line in enumerate(text.splitlines(), 1))
    return [
        (number, line)
        for number, line in folded
        if len(line) >= SHORTEST and not _EMPTY.match(line) and not _LICENCE.search(line)
    ]


def runs(text: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(first line number, run) for every run of lines that count."""
    kept = lines_that_count(text)
    for start in range(len(kept) - RUN + 1):
        yield kept[start][0], tuple(line for _, line in kept[start : start + RUN])


def index(trees: Iterable[Path]) -> set[tuple[str, ...]]:
    """Every run of every source file of upstream trees."""
    found: set[tuple[str, ...]] = set()
    for tree in trees:
        for path in tree.rglob("*"):
            if path.suffix in KINDS and path.is_file() and ".git" not in path.parts:
                found.update(run for _, run in runs(path.read_text(encoding="utf-8", errors="replace")))
    return found


def shared(files: Iterable[Path], upstream: set[tuple[str, ...]]) -> list[str]:
    """`file:line` of every run of ours that upstream has too."""
    return [
        f"{path}:{number}"
        for path in files
        for number, run in runs(path.read_text(encoding="utf-8", errors="replace"))
        if run in upstream
    ]
