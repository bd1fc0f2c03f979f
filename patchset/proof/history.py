"""Plans the series on every upstream commit that changed what it touches, and tells on which of them it lands."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tarfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .. import REPOSITORY
from ..errors import Conflict, SourceUnavailable
from ..series.audit import audit
from ..series.catalogue import Series
from ..series.known import Learning, Span
from ..series.plan import Plan, make_plan
from ..target.tree import Tree

#: The history begins where this release branched off.
FIRST_RELEASE = "v0.7.0"
#: The file whose packers are compared, and on how many random batches.
PACKER, BATCHES = "verl/models/mcore/util.py", 200
#: One comparison may take this long, in seconds.
COMPARE_LIMIT = 300
COMMAND = "scripts/test.sh --history --upstream CLONE --write"
PAGE = REPOSITORY / "docs" / "trees.md"

LANDS, CONFLICT, TOO_OLD, WRONG = "lands", "conflict", "too old", "wrong"
_COLOUR = {LANDS: "green", CONFLICT: "red", TOO_OLD: "yellow", WRONG: "bold red"}


@dataclass(frozen=True)
class Commit:
    """A commit of upstream; `refs` are the tags and release branches whose tip it is."""

    hash: str
    date: str
    subject: str
    refs: tuple[str, ...] = ()

    @property
    def pull_request(self) -> str | None:
        found = re.search(r"\(#(\d+)\)$", self.subject)
        return found[1] if found else None

    def __str__(self) -> str:
        return f"{self.hash[:9]} {self.date}"


@dataclass(frozen=True)
class Verdict:
    """What comes of the series on a commit: a kind, why, and the status of each patch where it lands."""

    kind: str
    detail: str = ""
    statuses: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.kind != LANDS:
            return f"{self.kind}: {self.detail}" if self.detail else self.kind
        numbers: dict[str, list[str]] = {}
        for name, status in self.statuses.items():
            numbers.setdefault(status, []).append(name.partition("-")[0])
        return "lands: " + ", ".join(f"{status} {' '.join(names)}" for status, names in numbers.items())


@dataclass(frozen=True)
class Range:
    """Consecutive commits of which the same comes."""

    first: Commit
    last: Commit
    commits: int
    verdict: Verdict


@dataclass(frozen=True)
class History:
    """Every commit with its verdict, oldest first: those of main, and apart from them releases off main.

    Attributes:
        compared: number of distinct packers that ran against the reference.
    """

    main: tuple[tuple[Commit, Verdict], ...]
    releases: tuple[tuple[Commit, Verdict], ...]
    compared: int
    seconds: float

    @property
    def ranges(self) -> list[Range]:
        groups = (list(group) for _, group in itertools.groupby(self.main, key=lambda pair: pair[1]))
        return [Range(group[0][0], group[-1][0], len(group), group[0][1]) for group in groups]

    @property
    def landing(self) -> list[tuple[Commit, Verdict]]:
        """Main from the first commit on which the series lands."""
        return list(itertools.dropwhile(lambda pair: pair[1].kind != LANDS, self.main))

    @property
    def bad(self) -> list[tuple[Commit, Verdict]]:
        """Commits that must not be as they are: wrong ones, and conflicts once the series has landed."""
        since = [*self.landing, *self.releases]
        wrong = [pair for pair in self.main if pair[1].kind == WRONG and pair not in since]
        return wrong + [pair for pair in since if pair[1].kind in (WRONG, CONFLICT)]

    def json(self) -> dict[str, Any]:
        """All of it, for `--json`."""

        def told(pairs: Iterable[tuple[Commit, Verdict]]) -> list[dict[str, Any]]:
            return [{**asdict(commit), **asdict(verdict)} for commit, verdict in pairs]

        return {
            "ranges": [asdict(row) for row in self.ranges],
            "main": told(self.main),
            "releases": told(self.releases),
            "compared": self.compared,
            "seconds": self.seconds,
            "bad": len(self.bad),
        }


def touched(series: Series) -> list[str]:
    """Files that the series edits or looks at to tell what a tree has."""
    probes = [probe for patch in series.patches for probe in [*patch.metadata.present, *patch.metadata.needed]]
    targets = {target for patch in series.patches for target in patch.targets}
    return sorted(targets | {probe.file for probe in [*probes, *series.floor]})


def commits_of(upstream: Path, files: list[str]) -> tuple[list[Commit], list[Commit]]:
    """Commits to look at, oldest first.

    Args:
        upstream: clone of upstream.
        files: whose changes count.

    Returns:
        Main's first-parent line from where the first release branched off, as far as the files changed; and releases,
        tags and tips of their branches, that are not among those.

    Raises:
        SourceUnavailable: no git, no clone, or one without main or without the first release.
    """
    newest = _git(
        upstream, "for-each-ref", "--sort=-committerdate", "--format=%(refname)", "refs/heads/main",
        "refs/remotes/origin/main",
    ).decode().split()  # fmt: skip
    if not newest:
        raise SourceUnavailable(f"{upstream} is no clone of upstream: it has no branch main")
    base = _git(upstream, "merge-base", newest[0], f"refs/tags/{FIRST_RELEASE}").decode().strip()
    refs: dict[str, list[str]] = {}
    for ref, short in _release_refs(upstream):
        commit = _git(upstream, "rev-parse", f"{ref}^{{commit}}").decode().strip()
        refs.setdefault(commit, []).extend([short] if short not in refs.get(commit, ()) else [])
    known = {commit: tuple(names) for commit, names in refs.items()}
    main = [
        *_log(upstream, known, "--max-count=1", base),
        *_log(upstream, known, "--first-parent", "--reverse", f"{base}..{newest[0]}", "--", *files),
    ]
    other = [commit for commit in known if commit not in {each.hash for each in main}]
    releases = [entry for commit in other for entry in _log(upstream, known, "--max-count=1", commit)]
    return main, sorted(releases, key=lambda commit: commit.refs)


def _release_refs(upstream: Path) -> Iterator[tuple[str, str]]:
    """(full, short) names of release tags from the first on, and of release branches that have one of them."""
    tags = _git(upstream, "for-each-ref", "--format=%(refname:strip=2)", "refs/tags/v*").decode().split()
    first = _version(FIRST_RELEASE)
    tags = sorted((tag for tag in tags if first <= _version(tag)), key=_version)
    yield from ((f"refs/tags/{tag}", tag) for tag in tags)
    for tag in tags:
        patterns = ("refs/heads/release/*", "refs/remotes/*/release/*")
        contains = f"--contains=refs/tags/{tag}"
        branches = _git(upstream, "for-each-ref", contains, "--format=%(refname)", *patterns).decode().split()
        yield from ((branch, branch[branch.index("release/") :]) for branch in branches)


def _version(tag: str) -> tuple[int, ...]:
    """Numbers of a release tag; before all others for what is none."""
    return tuple(map(int, tag[1:].split("."))) if re.fullmatch(r"v\d+(\.\d+)+", tag) else ()


def _log(upstream: Path, refs: Mapping[str, tuple[str, ...]], *arguments: str) -> list[Commit]:
    out = _git(upstream, "log", "--format=%H%x00%cs%x00%s", *arguments).decode(errors="replace")
    entries = (line.split("\0") for line in out.splitlines())
    return [Commit(commit, date, subject, refs.get(commit, ())) for commit, date, subject in entries]


@contextmanager
def unpacked(upstream: Path, commit: str, series: Series) -> Iterator[Tree]:
    """What a plan reads of a commit, in a passing folder: verl/, its settings, and tests that the series touches."""
    overlaid = [name for patch in series.patches for name in patch.metadata.overlay]
    beside = {name for name in [*touched(series), *overlaid, "pyproject.toml"] if not name.startswith("verl/")}
    there = _git(upstream, "ls-tree", "-r", "--name-only", "-z", commit, "--", *sorted(beside)).decode()
    names = ["verl", *filter(None, there.split("\0"))]
    archive = _git(upstream, "archive", "--format=tar", commit, "--", *names)
    with TemporaryDirectory(prefix="patchset-") as folder, tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        root = Path(folder).resolve() / "verl"
        tar.extractall(root, filter="data")
        yield Tree(root, root / ".verl-patchset")


@dataclass(frozen=True)
class Packers:
    """A pristine packer and what the series makes of it in one selection.

    Attributes:
        key: tells distinct pairs apart.
        after: content of the planned files.
        loop: the selection edits upstream's loop instead of replacing it.
    """

    key: tuple[str, str, bool]
    commit: str
    after: Mapping[str, bytes]
    loop: bool


def examine(upstream: Path, commit: str, series: Series) -> tuple[Verdict, list[Packers]]:
    """What comes of the series on a commit before packers are compared, and the packers to compare.

    The whole series is planned, and then without each patch that supersedes others, so that every rule runs.
    """
    with unpacked(upstream, commit, series) as tree:
        try:
            return _examine(commit, tree, series)
        except Conflict as error:
            said, _, why = str(error).partition(": ")
            if said == TOO_OLD:
                return Verdict(TOO_OLD, why), []
            return Verdict(CONFLICT, _without_lines(error.details[0] if error.details else str(error))), []
        except SyntaxError as error:
            return Verdict(WRONG, f"{error.filename}: {error.msg}"), []
        # A crash on one commit is told with the others
        except (LookupError, ValueError, TypeError, AttributeError, AssertionError) as error:
            return Verdict(WRONG, f"{type(error).__name__}: {error}"), []


def _examine(commit: str, tree: Tree, series: Series) -> tuple[Verdict, list[Packers]]:
    statuses: dict[str, str] = {}
    packers: list[Packers] = []
    for number, selected in enumerate(series.selections()):
        plan: Plan = make_plan(tree, tree.read, series, selected)
        audit(tree, series, plan.after)
        for name, data in plan.after.items():
            if name.endswith(".py"):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", SyntaxWarning)
                    compile(data, name, "exec", dont_inherit=True)
        statuses = statuses or plan.statuses
        if PACKER in plan.after:
            pair = plan.before[PACKER] or b"", plan.after[PACKER]
            first, second = (hashlib.sha256(data).hexdigest() for data in pair)
            packers.append(Packers((first, second, number > 0), commit, plan.after, loop=number > 0))
    return Verdict(LANDS, statuses=statuses), packers


def compare(upstream: Path, packers: Packers, series: Series) -> str:
    """What a patched packer does wrong on random batches; empty where nothing."""
    with unpacked(upstream, packers.commit, series) as tree:
        pristine = tree.root.parent / "pristine_util.py"
        pristine.write_bytes(tree.read(PACKER) or b"")
        for name, data in packers.after.items():
            tree.path(name).parent.mkdir(parents=True, exist_ok=True)
            tree.path(name).write_bytes(data)
        script = Path(__file__).with_name("compare_packers.py")
        command = [sys.executable, "-W", "ignore", str(script), str(pristine), str(tree.root / PACKER), str(BATCHES)]
        environment = {**os.environ, "PYTHONPATH": str(tree.root), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        try:
            done = subprocess.run(
                command + (["--loop"] if packers.loop else []), cwd=tree.root, env=environment, capture_output=True,
                text=True, timeout=COMPARE_LIMIT, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"packers were not compared within {COMPARE_LIMIT} s"
    if done.returncode != 0:
        return f"packers cannot be compared: {(done.stderr.strip().splitlines() or ['no output'])[-1]}"
    broken = json.loads(done.stdout.splitlines()[-1])["broken"]
    return f"{len(broken)} of {BATCHES} batches, first: {broken[0]}" if broken else ""


def trace(series: Series, upstream: Path, jobs: int, errors: Console) -> History:
    """Looks at the whole history of a clone.

    Args:
        jobs: commits at a time, each in a process.
        errors: shows the progress.
    """
    started = time.perf_counter()
    main, releases = commits_of(upstream, touched(series))
    verdicts: dict[str, Verdict] = {}
    used: dict[tuple[str, str, bool], list[str]] = {}
    broken: dict[tuple[str, str, bool], str] = {}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(jobs, context, _begin, (upstream, series)) as pool,
        Progress(*columns, console=errors) as progress,
    ):
        bars = {name: progress.add_task(name, total=total) for name, total in (("commits", None), ("packers", 0))}
        waiting: dict[Future[Any], str | tuple[str, str, bool]] = {
            pool.submit(_examine_there, commit.hash): commit.hash for commit in [*main, *releases]
        }
        progress.update(bars["commits"], total=len(waiting))
        while waiting:
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                about = waiting.pop(future)
                if isinstance(about, tuple):
                    broken |= {about: future.result()} if future.result() else {}
                    progress.advance(bars["packers"])
                    continue
                verdicts[about], found = future.result()
                progress.advance(bars["commits"])
                for packers in found:
                    if packers.key not in used:
                        waiting[pool.submit(_compare_there, packers)] = packers.key
                        progress.update(bars["packers"], total=len(used) + 1)
                    used.setdefault(packers.key, []).append(about)
    for key, why in broken.items():
        for commit in used[key]:
            verdicts[commit] = Verdict(WRONG, why)
    return History(
        tuple((commit, verdicts[commit.hash]) for commit in main),
        tuple((commit, verdicts[commit.hash]) for commit in releases),
        len(used),
        round(time.perf_counter() - started, 1),
    )


def learn(series: Series, upstream: Path, spans: dict[str, Span], errors: Console) -> None:
    """Adds the code that rules replace on every commit of the history to what is known.

    Args:
        spans: what is known already, by `patch/rule`; added to.
        errors: shows the progress.
    """
    main, releases = commits_of(upstream, touched(series))
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=errors, transient=True) as progress:
        for commit in progress.track([*main, *releases], description="commits of upstream"):
            with unpacked(upstream, commit.hash, series) as tree:
                for selected in series.selections():
                    with suppress(Conflict):  # what lands nowhere teaches nothing; the history run tells of it
                        make_plan(tree, tree.read, series, selected, Learning(commit.hash[:9], spans))


def print_history(found: History, console: Console) -> None:
    """The ranges as a table, releases off main below them, and the totals."""
    table = Table("commits", "", "outcome", "since", title="upstream's main", box=None, pad_edge=False)
    for row in found.ranges:
        table.add_row(_span(row), str(row.commits), f"[{_COLOUR[row.verdict.kind]}]{escape(str(row.verdict))}[/]",
                      escape(row.first.subject))  # fmt: skip
    console.print(table)
    for commit, verdict in found.releases:
        said = f"{', '.join(commit.refs)} ({commit}): [{_COLOUR[verdict.kind]}]{escape(str(verdict))}[/]"
        console.print(said, highlight=False, soft_wrap=True)
    console.print(
        f"{len(found.main)} commits of main and {len(found.releases)} releases, {found.compared} distinct packers, "
        f"{found.seconds:.0f} s; {len(found.bad)} must not be as they are",
        highlight=False,
    )


def page(found: History) -> str:
    """The ranges as `docs/trees.md`."""
    newest = found.main[-1][0]
    lines = [
        f"<!-- Generated by {COMMAND}; do not edit. -->",
        "# On which trees does it land?",
        "",
        "On every commit of upstream's main from #5561 (5d73af638, 2026-03-13) on, and on every release from 0.7.1",
        "on. An older tree is told `too old`: its packer makes no position ids yet, which all of this is about. A fork",
        "lands where the commit lands that it was cut from, as far as its own changes leave the replaced lines alone;",
        "otherwise it is a conflict that names them, never a guess.",
        "",
        f"Looked at: every commit up to {newest} that changed a file which the series touches, with everything",
        f"chosen and with the small edits in place of the layout; {found.compared} distinct packers ran against the",
        f"reference on {BATCHES} random batches each.",
        "",
        "| commits of main | | outcome | begins with |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {_span(row)} | {row.commits} | {_cell(str(row.verdict))} | {_cell(row.first.subject)} |"
        for row in found.ranges
    ]
    lines += ["", "| release off main | outcome |", "|---|---|"]
    lines += [f"| {', '.join(commit.refs)} ({commit}) | {_cell(str(verdict))} |" for commit, verdict in found.releases]
    return "\n".join(lines) + "\n"


def _span(row: Range) -> str:
    return str(row.first) if row.commits == 1 else f"{row.first} to {row.last}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _without_lines(text: str) -> str:
    """A conflict without line numbers, so that commits with the same one make a range."""
    return re.sub(r"(?<=\.py):\d+", "", text)


def _git(upstream: Path, *arguments: str) -> bytes:
    try:
        done = subprocess.run(["git", "-C", str(upstream), *arguments], capture_output=True, check=False)
    except OSError as error:
        raise SourceUnavailable("git is not installed") from error
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise SourceUnavailable(f"{upstream} is no clone of upstream that has this: {lines[-1] if lines else ''}")
    return done.stdout


_there: dict[str, Any] = {}


def _begin(upstream: Path, series: Series) -> None:
    _there.update(upstream=upstream, series=series)


def _examine_there(commit: str) -> tuple[Verdict, list[Packers]]:
    return examine(_there["upstream"], commit, _there["series"])


def _compare_there(packers: Packers) -> str:
    return compare(_there["upstream"], packers, _there["series"])
