"""Proves the patch-set on upstream trees: every pin against every check, one table, one exit status."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from .. import REPOSITORY
from ..apply import Request, patch_tree
from ..errors import Conflict, PatchsetError, SourceUnavailable
from ..series.catalogue import Series
from ..series.generated import CONFIG_FOLDER, drift, regenerate
from ..series.lock import check, read_lock
from ..series.plan import Plan, Status, make_plan
from ..series.style import Style
from ..target import gitrepo, pins
from ..target.tree import Tree
from . import numerics_process, suites


@dataclass(frozen=True)
class Result:
    """One check of one tree. `passed` is None for a check that was not made, with the reason in `detail`."""

    subject: str
    check: str
    passed: bool | None
    detail: str
    seconds: float = 0.0


Report = Callable[[Result], None]


class Subject:
    """One upstream tree under proof: its pristine files, its patched copy, and what each check says of it.

    Attributes:
        name: for the table.
        pin: the pin that it is; None for a fork.
        pristine: an untouched copy.
        whole: it comes with upstream's whole test suite, whose failures before patching are measured, not listed.
        thorough: all numerics are compared on it, not a part.
    """

    def __init__(self, name: str, pin: str | None, pristine: Path, series: Series, whole: bool, thorough: bool) -> None:
        self.name, self.pin, self.pristine, self.series = name, pin, pristine, series
        self.whole, self.thorough = whole, thorough
        self.folder = pristine.parent
        self.patched = self.folder / "patched"
        self.plan: Plan | None = None

    def checks(self) -> Iterator[tuple[str, Callable[[], tuple[bool | None, str]]]]:
        """(name, check) in the order to make them; a check returns whether it passed, and what it saw."""
        yield "apply", self.apply
        yield "claims", self.claims
        yield "audit", self.audit
        yield "lock", self.lock
        yield "compile", self.compile
        yield "ruff", self.ruff
        yield "yaml", self.yaml
        yield "sanity", self.sanity
        yield "new tests", self.new_tests
        yield "mutation", self.mutation
        yield "upstream", self.upstream
        yield "numerics", self.numerics
        yield "faults", self.faults

    def run(self, report: Report) -> None:
        """Makes every check, as long as the tree can be patched at all."""
        for name, make in self.checks():
            started = time.perf_counter()
            try:
                passed, detail = make()
            except PatchsetError as error:
                passed, detail = False, "; ".join([str(error), *error.details])
            report(Result(self.name, name, passed, detail, round(time.perf_counter() - started, 2)))
            if name == "apply" and not passed:
                return

    def apply(self) -> tuple[bool, str]:
        _copy(self.pristine, self.patched)
        tree = Tree.at(self.patched)
        outcome = patch_tree(tree, Request(), self.series, pin=self.pin)
        again = patch_tree(tree, Request(), self.series, pin=self.pin)
        if again.changed:
            return False, f"a second apply changed {', '.join(again.changed)}"
        clean = Tree.at(self.pristine)
        self.plan = make_plan(clean, clean.read, self.series, self.series.select())
        # Tests of patches that upstream has already are run as well, though a plain apply does not lay them down
        shutil.copytree(self.series.overlay, self.patched, dirs_exist_ok=True)
        return True, f"{len(outcome.changed)} files, {outcome.seconds:.2f} s"

    def claims(self) -> tuple[bool | None, str]:
        if self.pin is None:
            return None, "no pin"
        wrong = []
        for patch in self.series.patches:
            claimed = self.pin in patch.metadata.upstream.pins
            if claimed != (self._plan.statuses[patch.name] == Status.UPSTREAM.value):
                wrong.append(f"{patch.name} is {'not ' if claimed else ''}present, its patch.yaml says otherwise")
        return not wrong, "; ".join(wrong) or ", ".join(self._plan.statuses.values())

    def audit(self) -> tuple[bool, str]:
        script = self.patched / "tests/special_sanity/check_thd_bucket_calls.py"
        done = subprocess.run(
            [sys.executable, script], cwd=self.patched, capture_output=True, text=True, check=False
        )  # fmt: skip
        return done.returncode == 0, (done.stdout + done.stderr).strip() or "every call passes the bucket"

    def lock(self) -> tuple[bool | None, str]:
        if self.pin is None:
            return None, "no pin"
        check(self._plan, self.pin, read_lock())
        return True, f"{len(self._plan.after)} digests"

    def compile(self) -> tuple[bool, str]:
        names = {path.relative_to(self.patched).as_posix() for path in (self.patched / "verl").rglob("*.py")}
        names.update(self._edited(".py"))
        before, after = (Counter(_uncompilable(root, names)) for root in (self.pristine, self.patched))
        return self._worse(before, after, f"{len(names)} files of verl/ and the tests")

    def ruff(self) -> tuple[bool, str]:
        files = self._edited(".py")
        old = [name for name in files if (self.pristine / name).exists()]
        before = Style.of(self.pristine).problems(self.pristine, old)
        return self._worse(before, Style.of(self.patched).problems(self.patched, files), f"{len(files)} files")

    def yaml(self) -> tuple[bool, str]:
        before, after = (Counter(_stale(root)) for root in (self.pristine, self.patched))
        files = len(list((self.patched / CONFIG_FOLDER).glob("_generated_*.yaml")))
        passed, detail = self._worse(before, after, f"{files} files in step")
        return passed and files > 0, detail

    @staticmethod
    def _worse(before: Counter[str], after: Counter[str], fine: str) -> tuple[bool, str]:
        """Whether nothing is said of the patched tree that was not said of the pristine one as often."""
        new, old = after - before, (after & before).total()
        known = f", apart from {old} that were there before" if old else ""
        few = "; ".join(sorted(new)[:5]) + (f"; and {len(new) - 5} more" if len(new) > 5 else "")
        return not new, f"{few}{known}" if new else f"{fine}{known}"

    def sanity(self) -> tuple[bool | None, str]:
        """Upstream's own sanity scripts, which must not say more about the patched tree than about the pristine one."""
        if not (self.pristine / "tests" / "special_sanity" / "check_license.py").exists():
            return None, "upstream's sdist leaves its sanity scripts out"
        before, after = ({name: _sanity(root, name) for name in _SANITY} for root in (self.pristine, self.patched))
        worse = [f"{name}: {after[name][1]}" for name in _SANITY if after[name][0] and not before[name][0]]
        failed_before = [name for name in _SANITY if before[name][0]]
        known = f", {len(failed_before)} failed before ({', '.join(failed_before)})" if failed_before else ""
        return not worse, "; ".join(worse) or f"{len(_SANITY) - len(failed_before)} scripts{known}"

    def new_tests(self) -> tuple[bool, str]:
        suite = suites.run_suite(self.patched, self._overlay_tests(), self.folder / "new-tests.log")
        return not suite.failed and "passed" in suite.outcomes.values(), self._say(suite, suite.failed)

    def mutation(self) -> tuple[bool, str]:
        """Leaves each patch out, and what needs it; its proofs have to fail then.

        One that is superseded is left out of the series without its superseder, where its own tests pass otherwise.
        """
        said, fine = [], True
        for patch in self.series.patches:
            status, number = self._plan.statuses[patch.name], patch.name.split("-")[0]
            if status not in (Status.APPLIED.value, Status.SUPERSEDED.value):
                continue
            winner = self.series.superseder(patch.name) if status == Status.SUPERSEDED.value else None
            if winner is not None:
                own = self._suite({winner}, [name for name in patch.metadata.overlay if "/test_" in name], number)
                if own.failed or not own.outcomes:
                    fine = False
                    said.append(f"{number} in the place of {winner}: {self._say(own, own.failed)}")
                    continue
            suite = self._suite({patch.name} | ({winner} if winner else set()), patch.metadata.proofs, f"no-{number}")
            blind = [
                proof for proof in patch.metadata.proofs if not any(f.startswith(proof + "::") for f in suite.failed)
            ]
            fine = fine and not blind
            said.append(
                f"{number} out: {', '.join(blind)} saw nothing: {self._say(suite, suite.failed)}"
                if blind
                else f"{number} out: {len(suite.failed)} fail"
            )
        return fine, "; ".join(said) or "no patch applied"

    def _suite(self, out: set[str], tests: list[str], name: str) -> suites.Suite:
        """Runs tests on a tree that lacks some patches and what needs them."""
        mutant = self.folder / name
        _copy(self.pristine, mutant)
        patch_tree(Tree.at(mutant), Request(only=self._without(out)), self.series)
        shutil.copytree(self.series.overlay, mutant, dirs_exist_ok=True)
        suite = suites.run_suite(mutant, tests, self.folder / f"{name}.log")
        shutil.rmtree(mutant)
        return suite

    def numerics(self) -> tuple[bool, str]:
        """The engine's training against references; a part of it on pins that aren't the main one."""
        arguments = [] if self.thorough else ["--short"]
        return numerics_process.check(self.patched, arguments, self.folder / "numerics.log")

    def faults(self) -> tuple[bool | None, str]:
        """Whether those comparisons see faults that are put into the tree."""
        if not self.thorough:
            return None, "made on the main pin and on forks"
        return numerics_process.check(self.patched, ["--mutations"], self.folder / "faults.log")

    def upstream(self) -> tuple[bool, str]:
        tests = suites.upstream_tests(self.patched, self._overlay_tests())
        suite = suites.run_suite(self.patched, tests, self.folder / "upstream.log")
        if self.whole:
            # A fork's own failures are nobody's list: they are what fails in it before patching
            known = suites.run_suite(self.pristine, tests, self.folder / "upstream-before.log").failed
            new = suite.failed - known
            return not new, self._say(suite, new, f"{len(known & suite.failed)} of them fail before patching")
        listed = suites.known_failures(self.pin or "")
        new = suite.failed - listed.keys()
        gone = listed.keys() - suite.failed
        if gone:
            return False, f"listed in ci/known_failures.yaml but not failing: {', '.join(sorted(gone))}"
        return not new, self._say(suite, new, f"{len(listed)} listed")

    @property
    def _plan(self) -> Plan:
        assert self.plan is not None, "apply comes first"
        return self.plan

    def _say(self, suite: suites.Suite, bad: set[str], note: str = "") -> str:
        if bad:
            few = sorted(bad)[:3] + ([f"and {len(bad) - 3} more"] if len(bad) > 3 else [])
            return f"{suite.counts()}; {', '.join(few)}; see {suite.log}"
        if not suite.outcomes:
            return f"no test ran; see {suite.log}"
        return suite.counts() + (f" ({note})" if note and suite.failed else "")

    def _edited(self, suffix: str) -> list[str]:
        laid = [path.relative_to(self.series.overlay).as_posix() for path in self.series.overlay.rglob(f"*{suffix}")]
        return sorted({name for name in [*self._plan.after, *laid] if name.endswith(suffix)})

    def _overlay_tests(self) -> list[str]:
        folder = self.series.overlay
        return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("test_*_on_cpu.py"))

    def _without(self, out: set[str]) -> list[str]:
        """Names of the patches that are left when some go, and with them what needs them."""
        gone = set(out)
        for later in self.series.patches:
            needs = [{need} if isinstance(need, str) else set(need) for need in later.metadata.requires]
            if any(names <= gone for names in needs):
                gone.add(later.name)
        return [other.name for other in self.series.patches if other.name not in gone]


def _uncompilable(root: Path, names: Iterable[str]) -> Iterator[str]:
    """`file: why` of each file that is no Python."""
    for name in sorted(names):
        path = root / name
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            try:
                compile(path.read_bytes() if path.exists() else b"", name, "exec", dont_inherit=True)
            except (SyntaxError, ValueError) as error:
                yield f"{name}: {error.msg if isinstance(error, SyntaxError) else error}"


def _stale(root: Path) -> Iterator[str]:
    """`file: what` of everything in generated files that is not as their sources say."""
    for file in sorted((root / CONFIG_FOLDER).glob("_generated_*.yaml")):
        data = file.read_bytes()
        yield from (f"{file.name}: {what}" for what in drift(data, regenerate(file.name, data, file.parent.resolve())))


_SANITY = {
    "license": ["check_license.py", "--directories", "."],
    "docstrings": ["check_docstrings.py"],
    "device": ["check_device_api_usage.py", "--directory", "./verl"],
    "dataproto": ["check_dataproto_usage.py", "-d", "./verl/workers/engine"],
    "structure": ["validate_structure.py"],
}


def _sanity(root: Path, name: str) -> tuple[int, str]:
    script, *arguments = _SANITY[name]
    command = [sys.executable, f"tests/special_sanity/{script}", *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return done.returncode, (done.stdout + done.stderr).strip()[-200:]


def _copy(source: Path, target: Path) -> None:
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(source, target, symlinks=True)


def own_tests(console: Console, jobs: int) -> Result:
    """Runs this repository's own tests, so many at a time; what pytest prints goes to the console."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-n", str(jobs), str(REPOSITORY / "tests")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    console.print(done.stdout, markup=False, highlight=False, soft_wrap=True)
    lines = [line for line in done.stdout.strip().splitlines() if line]
    seconds = round(time.perf_counter() - started, 2)
    return Result("this repository", "own tests", done.returncode == 0, lines[-1] if lines else "no output", seconds)


def verify(
    series: Series,
    names: list[str],
    tree: Path | None,
    upstream: Path | None,
    workspace: Path,
    report: Report,
    jobs: int,
) -> None:
    """Runs every check on pins and on one tree.

    Args:
        names: pins; a git pin is skipped, with the reason, where no clone is given.
        tree: a fork or checkout; only a copy of its tracked files is touched.
        upstream: clone of upstream for git pins.
        workspace: made anew; holds the copies and the logs.
        report: called with each result as it comes.
        jobs: trees at a time.
    """
    if workspace.exists():
        shutil.rmtree(workspace)
    known = pins.load_pins()

    def one(name: str) -> None:
        pin, pristine = known.get(name), workspace / name / "pristine"
        whole = pin.source == "git"
        if whole and upstream is None:
            report(Result(name, "apply", None, "a commit of upstream's git: give a clone with --upstream PATH"))
            return
        try:
            pins.unpack(name, pin, pristine, upstream)
        except SourceUnavailable as error:
            report(Result(name, "apply", False, str(error)))
            return
        if whole:
            gitrepo.make_repository(pristine)
        Subject(name, name, pristine, series, whole, thorough=name == known.default).run(report)

    def fork(path: Path) -> None:
        pristine = workspace / path.resolve().name / "pristine"
        copy_tracked(Tree.at(path), pristine)
        Subject(path.resolve().name, None, pristine, series, whole=True, thorough=True).run(report)

    with ThreadPoolExecutor(max_workers=jobs) as pool:
        waiting = [pool.submit(one, name) for name in names]
        if tree is not None:
            waiting.append(pool.submit(fork, tree))
        for future in waiting:
            future.result()


def copy_tracked(tree: Tree, target: Path) -> None:
    """Copies a tree's files, tracked ones alone where it is a git checkout, into a repository of their own.

    Raises:
        Conflict: the patch-set is applied to the tree already, so that its state before is not there to compare with.
    """
    if (tree.state / "manifest.json").exists():
        raise Conflict(f"the patch-set is applied to {tree.root}: verify it on the tree as it was (--revert)")
    target.mkdir(parents=True)
    if tree.toplevel is None:
        shutil.copytree(tree.root, target, symlinks=True, dirs_exist_ok=True)
    else:
        for name in gitrepo.tracked(tree):
            if (tree.root / name).is_file():
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(tree.root / name, target / name, follow_symlinks=False)
    gitrepo.make_repository(target)


def workspace_folder() -> Path:
    """Where `scripts/test.sh` keeps its copies and logs."""
    return REPOSITORY / "build" / "test"
