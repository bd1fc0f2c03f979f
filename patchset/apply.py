"""Does to a tree what was asked: apply, show, commit, export, tell or take back."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from . import REPOSITORY, __version__
from .errors import Conflict, UsageError
from .series.audit import audit
from .series.catalogue import Patch, Series
from .series.lock import check, read_lock, recognise
from .series.plan import Plan, Status, Step, make_plan, probe
from .target import gitrepo, pins
from .target.state import State, sha256
from .target.tree import Tree


@dataclass(frozen=True)
class Request:
    """What to do with a tree. At most one of the outputs is set; without one the tree itself is patched."""

    only: list[str] | None = None
    until: str | None = None
    without: list[str] | None = None
    dry_run: bool = False
    commit: bool = False
    allow_dirty: bool = False
    export: Path | None = None
    overlay: Path | None = None
    any_tree: bool = False


@dataclass
class Outcome:
    """What happened to one tree, for the table and for `--json`."""

    target: str
    pin: str | None
    exact: bool = False
    patches: dict[str, dict[str, Any]] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    diff: str = ""

    def json(self) -> dict[str, Any]:
        """The outcome without its diff."""
        shown = ("target", "pin", "exact", "patches", "changed", "notes", "seconds")
        return {name: getattr(self, name) for name in shown}


def build_pin(name: str, out: Path | None, request: Request, series: Series, upstream: Path | None) -> Outcome:
    """Patches a pin in a folder of its own, or in a passing one where only an output is asked for."""
    known = pins.load_pins()
    pin = known.get(name)
    if request.dry_run or request.export or request.overlay:
        with TemporaryDirectory(prefix="patchset-") as folder:
            pins.unpack(name, pin, Path(folder) / "verl", upstream)
            # Part of no checkout, wherever passing folders lie
            tree = replace(Tree.at(Path(folder) / "verl"), toplevel=None)
            outcome = patch_tree(tree, request, series, pin=name)
            outcome.target = f"verl {name}"
            return outcome
    target = out or REPOSITORY / "build" / f"verl-{name}"
    if not target.exists():
        pins.unpack(name, pin, target, upstream)
    elif not (target / "verl" / "__init__.py").is_file():
        raise UsageError(f"{target} exists and is no verl tree: give another --out, or remove it")
    return patch_tree(Tree.at(target), request, series, pin=name)


def patch_tree(tree: Tree, request: Request, series: Series, pin: str | None = None) -> Outcome:
    """Plans the series for a tree, proves the plan, and writes it where the request wants it.

    Args:
        pin: the pin that the tree has to be, byte for byte; None to find out.

    Raises:
        Conflict: a patch does not fit, somebody edited the files since, a call lacks the bucket, or an exact pin comes
            out differently than locked. Nothing is written.
    """
    started = time.perf_counter()
    state = State(tree)
    if edited := state.edited():
        raise Conflict(
            f"{len(edited)} file(s) were edited after the patch-set was applied; commit or undo that, or remove "
            f"{state.folder} to start from the tree as it is",
            tuple(edited),
        )
    selected = series.select(request.only, request.until, request.without)
    plan = make_plan(tree, state.pristine, series, selected)
    locked = read_lock()
    exact = recognise(state.pristine, locked)
    if pin is not None and exact != pin:
        _refuse_foreign(tree, pin, state)
    whole = selected == {patch.name for patch in series.patches} and not tree.installed
    if exact is not None and whole:
        check(plan, exact, locked)
    audit(tree, series, plan.after)

    outcome = Outcome(str(tree.root), exact, exact is not None, notes=list(plan.notes))
    if state.recovered:
        outcome.notes.append("a write that was cut short before is undone")
    if exact is None:
        outcome.notes.append("no pin's files: the result is checked by rules and audit, not by ci/pins.lock")
    _deliver(tree, state, plan, request, outcome)
    commits = _commits_here(tree)
    for step in plan.steps:
        outcome.patches[step.patch.name] = {
            "status": step.status.value,
            "files": sorted(step.files),
            "reason": _reason(step, commits),
        }
    outcome.seconds = round(time.perf_counter() - started, 3)
    return outcome


def revert_tree(tree: Tree) -> Outcome:
    """Takes back what was applied to a tree.

    Raises:
        Conflict: files were edited since, so that taking the patch-set back would lose the edits.
        UsageError: the patch-set is there as commits, which git takes back.
    """
    state = State(tree)
    if state.manifest is None and (commits := _commits_here(tree)):
        newest_first = " ".join(commit[:12] for commit in commits.values())
        raise UsageError(f"the patch-set is in {tree.root} as commits: git revert {newest_first}")
    if edited := state.edited():
        raise Conflict(
            f"{len(edited)} file(s) were edited after the patch-set was applied, and taking it back would lose that; "
            f"undo the edits, or take the originals from {state.folder / 'before'}",
            tuple(edited),
        )
    outcome = Outcome(str(tree.root), None)
    outcome.changed = state.revert() if state.manifest else []
    return outcome


def status_tree(tree: Tree, series: Series) -> Outcome:
    """Tells what is applied to a tree, by which version, and whether its files were edited since."""
    state = State(tree)
    outcome = Outcome(str(tree.root), recognise(state.pristine, read_lock()))
    outcome.exact = outcome.pin is not None
    commits = _commits_here(tree)
    if state.manifest is not None:
        outcome.notes.append(f"applied by patch-set {state.manifest.version} to {len(state.manifest.files)} files")
        outcome.notes += [f"edited since: {name}" for name in state.edited()]
    elif commits:
        outcome.notes.append(f"in the history as {len(commits)} commit(s)")
    else:
        outcome.notes.append("not applied")
    try:
        probed = _probed(tree, state, series, commits)
    except Conflict as error:
        outcome.notes.append(str(error))
        probed = dict.fromkeys((patch.name for patch in series.patches), ("does not fit", ""))
    known = state.manifest.statuses if state.manifest else {}
    for patch in series.patches:
        commit, (stated, why) = commits.get(patch.name), probed[patch.name]
        if patch.name in known:
            stated, why = known[patch.name], ""
        elif commit:
            stated, why = Status.APPLIED.value, f"commit {commit[:12]}"
        outcome.patches[patch.name] = {"status": stated, "files": [], "reason": why}
    return outcome


def _probed(tree: Tree, state: State, series: Series, commits: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Status and reason of each patch, as far as a tree without records tells.

    What came as a commit looks like upstream's own by now, and so does what it supersedes: the tree before it is asked.
    """
    before = probe(series, gitrepo.before(tree, list(commits.values())) if commits else state.pristine)
    found: dict[str, tuple[str, str]] = {}
    for patch in series.patches:
        status, reason = before[patch.name]
        winner = series.superseder(patch.name)
        if status is None and winner in commits:
            status, reason = Status.SUPERSEDED, f"by {winner}"
        found[patch.name] = (status.value if status else "not applied", reason)
    return found


def _deliver(tree: Tree, state: State, plan: Plan, request: Request, outcome: Outcome) -> None:
    if request.dry_run:
        outcome.diff = gitrepo.diff(plan.before, plan.after)
    elif request.export is not None:
        lf = gitrepo.kept_with_lf(tree, list(plan.after)) if tree.toplevel else set()
        base = _with_lf({name: data for name, data in plan.before.items() if data is not None}, lf)
        written = gitrepo.export(base, _commits(plan, lf), _fresh(request.export))
        outcome.notes.append(f"{len(written)} mailbox patches" + (f": {_git_am(tree, written)}" if written else ""))
    elif request.overlay is not None:
        if outcome.pin is None and not request.any_tree:
            raise UsageError("an overlay fits no other tree than its own, and this one is no pin: add --any-tree")
        _write_overlay(plan.after, _fresh(request.overlay))
        outcome.notes.append(f"{len(plan.after)} files in {request.overlay}")
    elif request.commit:
        outcome.changed = _commit(tree, state, plan, request.allow_dirty)
    else:
        outcome.changed = state.apply(plan.after, __version__, plan.statuses)


def _with_lf(files: Mapping[str, bytes], lf: Container[str]) -> dict[str, bytes]:
    return {name: data.replace(b"\r\n", b"\n") if name in lf else data for name, data in files.items()}


def _git_am(tree: Tree, mails: list[Path]) -> str:
    """The command that applies exported patches, from any folder of the tree's checkout."""
    command = ["git", "am", "--keep-non-patch"]
    if tree.toplevel is not None and tree.toplevel != tree.root:
        command.append(f"--directory={tree.root.relative_to(tree.toplevel).as_posix()}")
    if any(b"\r\n" in mail.read_bytes() for mail in mails):
        command.append("--keep-cr")  # git takes line ends of Windows for the mail's own otherwise
    return f"{shlex.join([*command, str(mails[0].parent)])}/*.patch"


def _commits(plan: Plan, lf: Container[str] = ()) -> list[gitrepo.Commit]:
    return [gitrepo.Commit(_message(step.patch), _with_lf(step.files, lf)) for step in plan.steps if step.files]


def _message(patch: Patch) -> str:
    upstream = patch.metadata.upstream
    trailers = []
    if upstream.pull_request is not None:
        trailers.append(f"Upstream-PR: https://github.com/verl-project/verl/pull/{upstream.pull_request}")
    if upstream.commit is not None:
        trailers.append(f"Upstream-Commit: {upstream.commit}")
    trailers += [f"Patchset-Patch: {patch.name}", f"Patchset-Version: {__version__}"]
    return f"{patch.metadata.subject}\n\n{patch.metadata.message.strip()}\n\n" + "\n".join(trailers) + "\n"


def _commit(tree: Tree, state: State, plan: Plan, allow_dirty: bool) -> list[str]:
    if tree.toplevel is None:
        raise UsageError(f"{tree.root} is no git checkout, which --commit needs")
    if state.manifest is not None:
        raise UsageError("the patch-set is applied here without commits: take it back with --revert first")
    prefix = tree.root.relative_to(tree.toplevel)
    touched = {(prefix / name).as_posix() for name in plan.after}
    dirty = gitrepo.dirty(tree)
    if mixed := sorted(touched.intersection(dirty)):
        raise Conflict("files that the patch-set edits have changes of their own: commit or stash them", tuple(mixed))
    if dirty and not allow_dirty:
        raise Conflict("the checkout has uncommitted changes: commit or stash them, or add --allow-dirty", tuple(dirty))
    commits = _commits(plan)
    if not commits:
        return []
    old = gitrepo.head(tree)
    new = gitrepo.build(tree, commits)
    changed = state.write(plan.after, None, head=new)
    gitrepo.move_head(tree, new, old, list(plan.after))
    state.finish()
    return changed


def _commits_here(tree: Tree) -> dict[str, str]:
    return gitrepo.trailers(tree, "Patchset-Patch") if tree.toplevel else {}


def _reason(step: Step, commits: Mapping[str, str]) -> str:
    if step.status is Status.UPSTREAM and step.patch.name in commits:
        return f"commit {commits[step.patch.name][:12]}"
    return step.reason


def _refuse_foreign(tree: Tree, pin: str, state: State) -> None:
    locked = read_lock().get(pin, {})
    foreign = [name for name, record in locked.items() if sha256(state.pristine(name)) != record.before]
    if foreign:
        raise Conflict(f"{tree.root} is not verl {pin}: remove it, or give another --out", tuple(sorted(foreign)))


def _fresh(folder: Path) -> Path:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not empty: give a new folder")
    return folder


def _write_overlay(files: Mapping[str, bytes], folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as staging:
            staged = Path(staging) / "overlay"
            for name, data in files.items():
                (staged / name).parent.mkdir(parents=True, exist_ok=True)
                (staged / name).write_bytes(data)
            if folder.exists():
                folder.rmdir()
            os.replace(staged, folder)
    except OSError as error:
        raise Conflict(f"cannot write {folder}: {error.strerror}") from error
