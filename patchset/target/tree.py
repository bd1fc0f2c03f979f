"""An upstream tree on disk: a git checkout, a folder that holds verl/, or an installed verl."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from ..errors import Conflict, UsageError


@dataclass(frozen=True)
class Tree:
    """Where a tree is and where the patch-set may keep its own records of it.

    Attributes:
        root: folder that holds verl/.
        state: folder of the records: inside .git for a checkout, beside verl/ otherwise.
        installed: an installed verl, which gets no tests.
        toplevel: root of the git checkout that holds `root`; None outside git.
    """

    root: Path
    state: Path
    installed: bool = False
    toplevel: Path | None = None

    @classmethod
    def at(cls, path: Path, installed: bool = False) -> Tree:
        """The tree at a path.

        Raises:
            UsageError: the path holds no verl/ package.
        """
        root = path.resolve()
        if not (root / "verl" / "__init__.py").is_file():
            raise UsageError(
                f"{path} holds no verl/ package: give the root of a checkout, or a folder that holds verl/"
            )
        toplevel = _git_toplevel(root) if not installed else None
        if toplevel is None:
            return cls(root, root / ".verl-patchset", installed)
        relative = _git(root, "rev-parse", "--git-path", "verl-patchset")
        state = (root / (relative or ".git/verl-patchset")).resolve()
        return cls(root, state / _slug(root.relative_to(toplevel)), installed, toplevel)

    def path(self, name: str) -> Path:
        """Absolute path of a file of the tree.

        Raises:
            Conflict: the file is a link out of the tree, so that writing it would reach past it.
        """
        path = self.root / name
        if not path.resolve().is_relative_to(self.root):
            raise Conflict(f"{name} leads out of {self.root}: the patch-set writes inside the tree alone")
        return path

    def read(self, name: str) -> bytes | None:
        """Content of a file, None where the tree lacks it."""
        path = self.path(name)
        return path.read_bytes() if path.is_file() else None


def installed_tree(python: str) -> Tree:
    """The tree of the verl that an interpreter imports.

    Raises:
        UsageError: the interpreter does not run or has no verl.
    """
    find = "import importlib.util as u; s = u.find_spec('verl'); print(s.origin if s and s.origin else '')"
    try:
        # -P would need Python 3.11; from the root folder no verl/ nearby is mistaken for the installed one
        done = subprocess.run([python, "-c", find], capture_output=True, text=True, cwd="/", check=False)
    except OSError as error:
        raise UsageError(f"{python} does not run: {error.strerror}") from error
    origin = done.stdout.strip()
    if done.returncode != 0 or not origin:
        raise UsageError(f"{python} has no verl installed")
    return Tree.at(Path(origin).parent.parent, installed=True)


def _git_toplevel(root: Path) -> Path | None:
    # A pin below build/ lies inside this repository but is no part of it
    if _git(root, "check-ignore", "--quiet", ".") is not None:
        return None
    found = _git(root, "rev-parse", "--show-toplevel")
    return Path(found).resolve() if found else None


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _slug(relative: Path) -> str:
    return "_".join(relative.parts) or "root"
