"""Works out, in memory, what the series does to one tree."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory

from ..errors import Conflict
from ..target.tree import Tree
from . import nets
from .catalogue import Patch, Series
from .generated import CONFIG_FOLDER, carry_over, lay_config, regenerate
from .known import Known
from .rewrite import Read, probe_all, rewrite
from .style import Style


class Status(str, Enum):
    """What happens to a patch on a tree."""

    APPLIED = "applied"
    UPSTREAM = "already upstream"
    NOT_NEEDED = "not needed"
    NOT_SELECTED = "not selected"
    SUPERSEDED = "superseded"


@dataclass(frozen=True)
class Step:
    """One patch on one tree: its status, and the content that each file has after it (changed files alone)."""

    patch: Patch
    status: Status
    files: Mapping[str, bytes] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True)
class Plan:
    """All patches of the series on one tree.

    Attributes:
        before: content before the series of every file in `after`; None where the tree lacked it.
        after: content after the series.
        notes: what a user should know that no status says.
    """

    steps: tuple[Step, ...]
    before: Mapping[str, bytes | None]
    after: Mapping[str, bytes]
    notes: tuple[str, ...]

    @property
    def statuses(self) -> dict[str, str]:
        return {step.patch.name: step.status.value for step in self.steps}


def make_plan(tree: Tree, pristine: Read, series: Series, selected: set[str], known: Known | None = None) -> Plan:
    """Plans a series for a tree.

    Args:
        tree: gives the style and the configuration folder.
        pristine: content of the tree's files without the patch-set.
        selected: names of the patches to apply where they are not there yet.
        known: the code that edits may take away; that of `ci/known.lock` where None.

    Raises:
        Conflict: the tree is too old, a patch does not fit, lacks a patch that it requires, or leaves code that does
            not hold.
    """
    probed = probe(series, pristine)
    current: dict[str, bytes] = {}
    steps: list[Step] = []
    notes: list[str] = []

    def read(name: str) -> bytes | None:
        return current[name] if name in current else pristine(name)

    style, known = Style.of(tree.root), known or Known.read()
    there_already = {name for name, (status, _) in probed.items() if status is Status.UPSTREAM}
    for patch in series.patches:
        status, reason = probed[patch.name]
        winner = series.superseder(patch.name)
        if status is None and patch.name not in selected:
            status = Status.NOT_SELECTED
        elif status is None and winner is not None and winner in selected | there_already:
            status, reason = Status.SUPERSEDED, f"by {winner}"
        if status is not None:
            steps.append(Step(patch, status, reason=reason))
            continue
        there = {step.patch.name for step in steps if step.status in (Status.APPLIED, Status.UPSTREAM)}
        alternatives = [{need} if isinstance(need, str) else set(need) for need in patch.metadata.requires]
        missing = [" or ".join(sorted(names)) for names in alternatives if not names & there]
        if missing:
            raise Conflict(
                f"{patch.name} requires {', '.join(missing)}, which this tree lacks and which is not selected"
            )
        files = rewrite(patch, read, pristine, style, known)
        files |= _regenerate(patch, tree, read, files, notes)
        files |= _overlay(patch, tree, series, read)
        before_it = {name: read(name) for name in files}
        current |= files
        if wrong := nets.check(before_it, files, read, patch.metadata.unread):
            raise Conflict(f"{patch.name} would leave code in this tree that does not hold", tuple(wrong))
        steps.append(Step(patch, Status.APPLIED, files))
    before = {name: pristine(name) for name in current}
    return Plan(tuple(steps), before, current, tuple(notes))


def probe(series: Series, read: Read) -> dict[str, tuple[Status | None, str]]:
    """What each patch is to a tree before any is applied: there already, not needed, or None; and why.

    Raises:
        Conflict: the tree is too old for any patch.
    """
    probes = [*series.floor]
    for patch in series.patches:
        probes += [*patch.metadata.present, *patch.metadata.needed]
    answers = iter(probe_all(probes, read))
    too_old = [floor.message for floor in series.floor if not next(answers)]
    if too_old:
        raise Conflict(f"too old: {too_old[0]}")
    found: dict[str, tuple[Status | None, str]] = {}
    for patch in series.patches:
        present = [next(answers) for _ in patch.metadata.present]
        needed = [next(answers) for _ in patch.metadata.needed]
        if all(present):
            found[patch.name] = Status.UPSTREAM, ""
        elif not all(needed):
            found[patch.name] = Status.NOT_NEEDED, patch.metadata.needed[needed.index(False)].message
        else:
            found[patch.name] = None, ""
    return found


def _regenerate(patch: Patch, tree: Tree, read: Read, files: Mapping[str, bytes], notes: list[str]) -> dict[str, bytes]:
    out: dict[str, bytes] = {}
    for name in patch.metadata.regenerates:
        committed = read(name)
        if committed is None:
            continue
        on_disk = (path.relative_to(tree.root).as_posix() for path in (tree.root / CONFIG_FOLDER).rglob("*.yaml"))
        before = {path: data for path in on_disk if (data := read(path)) is not None}
        with TemporaryDirectory(prefix="patchset-") as folder:
            was = regenerate(name, committed, lay_config(Path(folder) / "before", before))
            now = regenerate(name, committed, lay_config(Path(folder) / "after", {**before, **files}))
        out[name] = now
        if was != committed:
            merged = carry_over(committed, was, now)
            stale = f"{name} was out of step with its sources before"
            if merged is not None:
                out[name], note = merged, f"{stale}, and still is, apart from this patch-set's keys"
            else:
                note = f"{stale}; it is regenerated whole, with {_line_changes(committed, was)} unrelated lines"
            notes += [note] if note not in notes else []
    return out


def _line_changes(old: bytes, new: bytes) -> int:
    """Lines that a diff would remove and add."""
    matcher = difflib.SequenceMatcher(a=old.splitlines(), b=new.splitlines(), autojunk=False)
    return sum(i2 - i1 + j2 - j1 for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal")


def _overlay(patch: Patch, tree: Tree, series: Series, read: Read) -> dict[str, bytes]:
    files = {}
    for name in patch.metadata.overlay:
        if tree.installed and not name.startswith("verl/"):
            continue
        data = series.overlay_bytes(name)
        there = read(name)
        if there is not None and there != data:
            raise Conflict(f"{patch.name} lays down {name}, but this tree has another file of that name")
        if there is None:
            files[name] = data
    return files
