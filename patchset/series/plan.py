"""Works out, in memory, what the series does to one tree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory

from ..errors import Conflict
from ..target.tree import Tree
from .catalogue import Patch, Series
from .generated import CONFIG_FOLDER, lay_config, regenerate
from .rewrite import Read, probe_all, rewrite
from .style import Style


class Status(str, Enum):
    """What happens to a patch on a tree."""

    APPLIED = "applied"
    UPSTREAM = "already upstream"
    NOT_NEEDED = "not needed"
    NOT_SELECTED = "not selected"


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


def make_plan(tree: Tree, pristine: Read, series: Series, selected: set[str]) -> Plan:
    """Plans a series for a tree.

    Args:
        tree: gives the style and the configuration folder.
        pristine: content of the tree's files without the patch-set.
        selected: names of the patches to apply where they are not there yet.

    Raises:
        Conflict: a patch does not fit, or lacks a patch that it requires.
    """
    probes = [probe for patch in series.patches for probe in (*patch.metadata.present, *patch.metadata.needed)]
    answers = iter(probe_all(probes, pristine))
    current: dict[str, bytes] = {}
    steps: list[Step] = []
    notes: list[str] = []

    def read(name: str) -> bytes | None:
        return current[name] if name in current else pristine(name)

    style = Style.of(tree.root)
    for patch in series.patches:
        present = [next(answers) for _ in patch.metadata.present]
        needed = [next(answers) for _ in patch.metadata.needed]
        if all(present):
            steps.append(Step(patch, Status.UPSTREAM))
            continue
        if not all(needed):
            steps.append(Step(patch, Status.NOT_NEEDED, reason=patch.metadata.needed[needed.index(False)].message))
            continue
        if patch.name not in selected:
            steps.append(Step(patch, Status.NOT_SELECTED))
            continue
        there = {step.patch.name for step in steps if step.status in (Status.APPLIED, Status.UPSTREAM)}
        missing = [need for need in patch.metadata.requires if need not in there]
        if missing:
            raise Conflict(
                f"{patch.name} requires {', '.join(missing)}, which this tree lacks and which is not selected"
            )
        files = rewrite(patch, read, pristine, style)
        files |= _regenerate(patch, tree, read, files, notes)
        files |= _overlay(patch, tree, series, read)
        current |= files
        steps.append(Step(patch, Status.APPLIED, files))
    before = {name: pristine(name) for name in current}
    return Plan(tuple(steps), before, current, tuple(notes))


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
            out[name] = regenerate(name, committed, lay_config(Path(folder) / "after", {**before, **files}))
        if was != committed:
            notes.append(f"{name} was out of step with its sources before; it is regenerated whole")
    return out


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
