"""What the patch-set asks of git: commits without touching the work tree, mailbox patches, dirt, trailers."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from ..errors import UsageError
from .tree import Tree

#: An exported patch is the same bytes on every machine and in every year: identity, date and settings are fixed.
_NEUTRAL = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "verl THD patch-set",
    "GIT_AUTHOR_EMAIL": "patchset@localhost",
    "GIT_AUTHOR_DATE": "2026-01-01T00:00:00+0000",
    "GIT_COMMITTER_NAME": "verl THD patch-set",
    "GIT_COMMITTER_EMAIL": "patchset@localhost",
    "GIT_COMMITTER_DATE": "2026-01-01T00:00:00+0000",
}


@dataclass(frozen=True)
class Commit:
    """One commit to make: its message, and the files that it changes (None: removed)."""

    message: str
    files: Mapping[str, bytes | None]


def head(tree: Tree) -> str:
    """Full hash of HEAD."""
    return _git(tree.root, "rev-parse", "HEAD").decode().strip()


def dirty(tree: Tree) -> list[str]:
    """Tracked files of the checkout that differ from HEAD, relative to its root."""
    out = _git(tree.root, "status", "--porcelain", "-z", "--untracked-files=no", "--no-renames").decode()
    return [entry[3:] for entry in out.split("\0") if entry]


def tracked(tree: Tree) -> list[str]:
    """Files that git tracks below a tree's root, relative to it."""
    return [name for name in _git(tree.root, "ls-files", "-z").decode().split("\0") if name]


def kept_with_lf(tree: Tree, names: list[str]) -> set[str]:
    """Those of some files of a tree that git stores with LF, whatever line ends the work tree has (core.autocrlf)."""
    out = _git(tree.root, "ls-files", "--eol", "-z", "--", *names).decode()
    entries = (entry.partition("\t") for entry in out.split("\0"))
    return {name for how, _, name in entries if how.startswith("i/lf ")}


def reader(tree: Tree, revision: str) -> Callable[[str], bytes | None]:
    """Reads a tree's files as they are in a revision; None for a file that it lacks, or all if there is no such one."""

    def read(name: str) -> bytes | None:
        return _git(tree.root, "cat-file", "blob", f"{revision}:./{name}", codes=(0, 128)) or None

    return read


def make_repository(folder: Path) -> None:
    """Makes a folder a git repository with one commit that holds everything in it."""
    environment = {**os.environ, **_NEUTRAL}
    _git(folder, "init", "--quiet", "--initial-branch=main", env=environment)
    _git(folder, "add", "--all", "--force", env=environment)
    _git(folder, "commit", "--quiet", "--no-verify", "--message=pristine", env=environment)


def trailers(tree: Tree, key: str) -> dict[str, str]:
    """Value of a trailer -> newest commit of HEAD's history that carries it and that no later commit reverts."""
    reverts = _git(tree.root, "log", "--grep=^This reverts commit ", "--format=%B").decode()
    reverted = set(re.findall(r"^This reverts commit ([0-9a-f]{40,64})", reverts, re.MULTILINE))
    placeholder = f"%H%x00%(trailers:key={key},valueonly,separator=%x2C)"
    out = _git(tree.root, "log", f"--grep=^{key}: ", f"--format={placeholder}").decode()
    found: dict[str, str] = {}
    for line in out.splitlines():
        commit, _, values = line.partition("\0")
        for value in values.split(",") if commit not in reverted else ():
            found.setdefault(value.strip(), commit)
    return found


def before(tree: Tree, commits: list[str]) -> Callable[[str], bytes | None]:
    """Reads a tree as it was before the oldest of some commits of one line; None for a file that it lacked."""
    oldest = _git(tree.root, "merge-base", "--octopus", *commits).decode().strip()
    return reader(tree, f"{oldest}^")


def build(tree: Tree, commits: list[Commit]) -> str:
    """Adds commits on top of HEAD to the object database and returns the last one's hash.

    Neither HEAD nor the index nor the work tree is touched. Author and committer are the user's own; hooks and
    signing do not run.

    Raises:
        UsageError: git knows no identity to commit with.
    """
    prefix = tree.root.relative_to(tree.toplevel or tree.root).as_posix()
    return _chain(tree.root, head(tree), commits, "" if prefix == "." else prefix + "/", dict(os.environ))


def move_head(tree: Tree, commit: str, old: str, names: list[str]) -> None:
    """Moves HEAD's branch to a commit whose files the work tree already holds."""
    _git(tree.root, "update-ref", "-m", "patchset: apply", "HEAD", commit, old)
    sync_index(tree, names)


def sync_index(tree: Tree, names: list[str]) -> None:
    """Makes the index agree with HEAD for some files."""
    _git(tree.root, "reset", "--quiet", "HEAD", "--", *names, codes=(0, 1))


def export(base: Mapping[str, bytes], commits: list[Commit], folder: Path) -> list[Path]:
    """Writes commits as mailbox patches, the same bytes at every export.

    Args:
        base: content, before the first commit, of every file that a commit changes or removes.
        folder: where to write; made if missing.
    """
    settings = ["--zero-commit", "--full-index", "--no-signature", "--no-renames", "--no-color", "--no-ext-diff"]
    folder.mkdir(parents=True, exist_ok=True)
    with _passing_repository(base, commits) as (root, span, environment):
        out = _git(
            root, "format-patch", *settings, "--output-directory", str(folder.resolve()), span, env=environment
        )  # fmt: skip
    return [Path(line) for line in out.decode().splitlines()]


def diff(before: Mapping[str, bytes | None], after: Mapping[str, bytes | None]) -> str:
    """Unified diff between two states of files, which `git apply` and `patch -p1` take."""
    base = {name: data for name, data in before.items() if data is not None}
    with _passing_repository(base, [Commit("after", after)]) as (root, span, environment):
        settings = ["--no-color", "--no-ext-diff", "--no-renames"]
        return _git(root, "diff", *settings, span, env=environment).decode(errors="replace")


def merge(ours: bytes, base: bytes, theirs: bytes) -> bytes | None:
    """Three-way merge of a file's contents, outside of any repository; None where the sides change the same lines."""
    with TemporaryDirectory(prefix="patchset-") as name:
        for side, data in (("ours", ours), ("base", base), ("theirs", theirs)):
            (Path(name) / side).write_bytes(data)
        command = ["git", "merge-file", "-p", "--quiet", "ours", "base", "theirs"]
        try:
            done = subprocess.run(command, cwd=name, capture_output=True, check=False)
        except OSError:
            return None
    return done.stdout if done.returncode == 0 else None


@contextmanager
def _passing_repository(base: Mapping[str, bytes], commits: list[Commit]) -> Iterator[tuple[Path, str, dict[str, str]]]:
    with TemporaryDirectory(prefix="patchset-") as name:
        root, environment = Path(name), {**os.environ, **_NEUTRAL}
        for key in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
            environment.pop(key, None)
        _git(root, "init", "--quiet", "--initial-branch=main", env=environment)
        start = _chain(root, None, [Commit("base", base)], "", environment)
        yield root, f"{start}..{_chain(root, start, commits, '', environment)}", environment


def _chain(root: Path, parent: str | None, commits: list[Commit], prefix: str, environment: dict[str, str]) -> str:
    with TemporaryDirectory(prefix="patchset-") as name:
        environment = {**environment, "GIT_INDEX_FILE": str(Path(name) / "index")}
        if parent is not None:
            _git(root, "read-tree", parent, env=environment)
        for commit in commits:
            entries = []
            for path, data in commit.files.items():
                full = prefix + path
                if data is None:
                    entries.append(f"0 {'0' * 40}\t{full}")
                    continue
                hashed = _git(root, "hash-object", "-w", "--stdin", f"--path={path}", env=environment, data=data)
                blob = hashed.decode().strip()
                entries.append(f"{_mode(root, full, environment)} {blob}\t{full}")
            _git(root, "update-index", "--add", "--index-info", env=environment, data="\n".join(entries).encode())
            content = _git(root, "write-tree", env=environment).decode().strip()
            ancestor = ["-p", parent] if parent is not None else []
            message = commit.message.encode()
            parent = _git(root, "commit-tree", content, *ancestor, env=environment, data=message).decode().strip()
    assert parent is not None
    return parent


def _mode(root: Path, path: str, environment: dict[str, str]) -> str:
    entry = _git(root, "ls-files", "--stage", "--full-name", "--", f":/{path}", env=environment).decode()
    return entry.split(" ", 1)[0] if entry else "100644"


def _git(
    root: Path, *arguments: str, env: dict[str, str] | None = None, data: bytes = b"", codes: tuple[int, ...] = (0,)
) -> bytes:
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, input=data, capture_output=True, env=env, check=False)
    except OSError as error:
        raise UsageError("git is not installed, which this option needs") from error
    if done.returncode not in codes:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise UsageError(
            f"git {arguments[0]} failed in {root}: {lines[-1] if lines else done.returncode}", tuple(lines)
        )
    return done.stdout
