"""Formats edits as the tree formats its own code, and nothing beside them."""

from __future__ import annotations

import difflib
import json
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..errors import Conflict
from .astgrep import executable

#: What every pin's pyproject.toml sets; used where a tree brings no settings, such as an installed verl.
UPSTREAM_SETTINGS = ("--isolated", "--config", "line-length=120")
UPSTREAM_RULES = ("--select", "E,F,UP,B,I,G", "--ignore", "F405,F403,E731,B007,UP032,G004,UP045,UP035")


@dataclass(frozen=True)
class Style:
    """ruff with one tree's settings."""

    settings: tuple[str, ...]

    @classmethod
    def of(cls, root: Path) -> Style:
        """The settings of a tree's pyproject.toml, or upstream's where it has none.

        Args:
            root: folder that holds verl/.
        """
        project = root / "pyproject.toml"
        try:
            has_ruff = "ruff" in msgspec.toml.decode(project.read_bytes()).get("tool", {})
        except (OSError, msgspec.DecodeError):
            has_ruff = False
        return cls(("--config", str(project.resolve())) if has_ruff else UPSTREAM_SETTINGS)

    def format(self, folder: Path, before: Mapping[str, bytes]) -> None:
        """Formats edited Python files in place.

        A file that was formatted before the edit is formatted whole, which then changes the edits alone; of any
        other file only the edited lines are.

        Args:
            folder: holds the edited files.
            before: content of each edited file before the edit; other files than Python's are left alone.

        Raises:
            Conflict: ruff cannot read an edited file.
        """
        paths = sorted(path for path in before if path.endswith(".py"))
        if not paths:
            return
        drifted = {path for path in paths if self._run(folder, path, before[path]) != before[path]}
        whole = [path for path in paths if path not in drifted]
        if whole:
            self._ruff(folder, [*whole])
        for path in drifted:
            edited = (folder / path).read_text(encoding="utf-8").splitlines()
            old = before[path].decode().splitlines()
            hunks = difflib.SequenceMatcher(a=old, b=edited, autojunk=False).get_opcodes()
            for tag, _, _, start, end in reversed(hunks):
                if tag in ("insert", "replace"):
                    self._ruff(folder, [f"--range={start + 1}-{end + 1}", path])

    def problems(self, folder: Path, files: list[str]) -> Counter[str]:
        """What ruff's linter and formatter say of files, with the tree's settings; `file: what`, without line numbers.

        So two states of a tree can be compared by what each says how often.
        """
        rules = () if self.settings[0] == "--config" else UPSTREAM_RULES
        if not files:
            return Counter()
        linter = ["check", "--no-cache", "--output-format", "json", *self.settings, *rules]
        said = json.loads(self._ask(folder, [*linter, *files]).stdout or "[]")
        root, found = folder.resolve(), Counter[str]()
        for entry in said:
            found[f"{Path(entry['filename']).relative_to(root).as_posix()}: {entry['code']} {entry['message']}"] += 1
        formatter = self._ask(folder, ["format", "--check", "--no-cache", *self.settings, *files])
        for line in formatter.stdout.splitlines():
            if line.startswith("Would reformat: "):
                found[f"{line.removeprefix('Would reformat: ')}: is not formatted"] += 1
        return found

    def _ask(self, folder: Path, arguments: list[str]) -> subprocess.CompletedProcess[str]:
        command = [executable("ruff"), *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            raise Conflict("ruff cannot look at the files", tuple(done.stderr.strip().splitlines()))
        return done

    def _run(self, folder: Path, path: str, data: bytes) -> bytes:
        command = [executable("ruff"), "format", *self.settings, "--no-cache", "--stdin-filename", path, "-"]
        done = subprocess.run(command, cwd=folder, input=data, capture_output=True, check=False)
        return done.stdout if done.returncode == 0 else b""

    def _ruff(self, folder: Path, arguments: list[str]) -> None:
        command = [executable("ruff"), "format", *self.settings, "--no-cache", "--quiet", *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Conflict(
                f"{', '.join(arguments)} cannot be formatted after the edits", tuple(done.stderr.strip().splitlines())
            )
