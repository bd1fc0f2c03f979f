"""What the patch-set did to a tree, and how it writes: all files or none, whatever stops it.

A write first keeps what it is about to replace (`undo/`) and a journal of it, then puts each new file in place with
one rename, then its manifest, and last drops the journal. Whoever finds a journal undoes that write.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from ..errors import Conflict
from . import gitrepo
from .tree import Tree

_Stored = TypeVar("_Stored", bound=msgspec.Struct)
_TEMPORARY = ".verl-patchset~"


def sha256(data: bytes | None) -> str | None:
    """Hex digest of a content, None for an absent file."""
    return None if data is None else hashlib.sha256(data).hexdigest()


class Record(msgspec.Struct, frozen=True):
    """Digests of one file before and after; None where it was or is absent."""

    before: str | None
    after: str | None


class Manifest(msgspec.Struct, frozen=True):
    """What was applied to a tree.

    Attributes:
        version: of the patch-set.
        statuses: patch name -> status.
        files: every touched file.
        folders: folders that were made for new files, deepest last.
    """

    version: str
    statuses: dict[str, str]
    files: dict[str, Record]
    folders: list[str]


class _Journal(msgspec.Struct, frozen=True):
    files: dict[str, Record]
    folders: list[str]
    manifest: Manifest | None
    head: str | None = None


class State:
    """The records of one tree. Opening it undoes a write that was cut short."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.folder = tree.state
        self.manifest: Manifest | None = None
        self.recovered = self._recover()
        self.manifest = self._load(self.folder / "manifest.json", Manifest)
        if self.manifest and all(sha256(tree.read(name)) == r.before for name, r in self.manifest.files.items()):
            # Somebody put the tree back by other means, such as git reset
            self._drop()

    def pristine(self, name: str) -> bytes | None:
        """Content of a file as it was before the patch-set touched it."""
        if self.manifest is not None and name in self.manifest.files:
            kept = self.folder / "before" / name
            return kept.read_bytes() if self.manifest.files[name].before is not None else None
        return self.tree.read(name)

    def edited(self) -> list[str]:
        """Touched files that are no longer as the patch-set left them."""
        if self.manifest is None:
            return []
        return [name for name, record in self.manifest.files.items() if sha256(self.tree.read(name)) != record.after]

    def apply(self, after: Mapping[str, bytes], version: str, statuses: dict[str, str]) -> list[str]:
        """Makes a tree what a plan wants, whatever was applied before; see `write`.

        Args:
            after: content of every file that the plan touches.
            version: of the patch-set.
            statuses: patch name -> status.
        """
        touched = self.manifest.files if self.manifest else {}
        goal: dict[str, bytes | None] = {name: self.pristine(name) for name in touched}
        files = {name: Record(sha256(self.pristine(name)), sha256(data)) for name, data in after.items()}
        manifest = Manifest(version, statuses, files, self.manifest.folders if self.manifest else [])
        if manifest == self.manifest or not (files or touched):
            return []
        return self.write({**goal, **after}, manifest)

    def revert(self) -> list[str]:
        """Gives every touched file its content from before back and drops the records; see `write`."""
        return self.write({name: self.pristine(name) for name in (self.manifest.files if self.manifest else {})}, None)

    def write(self, files: Mapping[str, bytes | None], manifest: Manifest | None, head: str | None = None) -> list[str]:
        """Makes files hold the given contents (None: absent) and keeps a manifest, or changes nothing at all.

        Args:
            files: content of every file that is to be touched; those that hold it already are left alone.
            manifest: the new records, its `folders` aside, which are filled in here; None for none.
            head: git commit whose tree this write lays down; a cut-short write is finished, not undone, once HEAD
                is there.

        Returns:
            Names of the files that changed.

        Raises:
            Conflict: the file system refused; everything is as before.
        """
        current = {name: self.tree.read(name) for name in files}
        changed = [name for name in files if current[name] != files[name]]
        try:
            with self._cleanup():
                known = self.manifest.folders if self.manifest else []
                folders = known + [name for name in self._missing_folders(changed, files) if name not in known]
                journal = _Journal(
                    {name: Record(sha256(current[name]), sha256(files[name])) for name in changed},
                    folders,
                    self.manifest,
                    head,
                )
                for name in changed:
                    self._keep("undo", name, current[name])
                    if manifest is not None and not (self.manifest and name in self.manifest.files):
                        self._keep("before", name, current[name])
                self._store(self.folder / "journal.json", journal)
                for name in changed:
                    self._put(name, files[name])
                if manifest is not None:
                    self._store(self.folder / "manifest.json", msgspec.structs.replace(manifest, folders=folders))
                elif head is None:
                    self._remove_folders(folders)
        except OSError as error:
            self.manifest = self._load(self.folder / "manifest.json", Manifest)
            where = error.filename or self.tree.root
            raise Conflict(f"cannot write {where}: {error.strerror}; every file is as it was") from error
        if manifest is not None:
            self.manifest = self._load(self.folder / "manifest.json", Manifest)
        elif head is None:
            self._drop()
        return changed

    def finish(self) -> None:
        """Ends a write with `head` once HEAD and the index are there."""
        self._drop()

    @contextmanager
    def _cleanup(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            yield
        except BaseException:
            self._recover()
            raise
        journal = self._load(self.folder / "journal.json", _Journal)
        if journal is not None and journal.head is None:
            self._end_journal()

    def _recover(self) -> bool:
        journal = self._load(self.folder / "journal.json", _Journal)
        if journal is None:
            # A write that was cut short before its journal stood has touched no file of the tree
            if not (self.folder / "manifest.json").exists():
                self._drop()
            for litter in self.folder.glob(f"*{_TEMPORARY}"):
                litter.unlink()
            shutil.rmtree(self.folder / "undo", ignore_errors=True)
            return False
        if journal.head is not None and gitrepo.head(self.tree) == journal.head:
            gitrepo.sync_index(self.tree, list(journal.files))
            self._drop()
            return True
        for name, record in journal.files.items():
            path = self.tree.path(name)
            self._temporary(path).unlink(missing_ok=True)
            digest = sha256(self.tree.read(name))
            if digest == record.before:
                continue
            if digest != record.after:
                raise Conflict(
                    f"a write was cut short and {name} was edited since: put back {self.folder / 'undo' / name} by hand"
                )
            if record.before is None:
                path.unlink()
            else:
                self._put_back(name)
        if journal.manifest is None:
            self._remove_folders(journal.folders)
            self._drop()
        else:
            if self._load(self.folder / "manifest.json", Manifest) != journal.manifest:
                self._store(self.folder / "manifest.json", journal.manifest)
            self._end_journal()
        return True

    def _put(self, name: str, data: bytes | None) -> None:
        path = self.tree.path(name)
        if data is None:
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._temporary(path)
        _write_through(temporary, data)
        if path.exists():
            os.chmod(temporary, stat.S_IMODE(path.stat().st_mode))
        os.replace(temporary, path)

    def _put_back(self, name: str) -> None:
        """Undoes by one rename, since the disk may be full."""
        path, kept = self.tree.path(name), self.folder / "undo" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            os.chmod(kept, stat.S_IMODE(path.stat().st_mode))
        try:
            os.replace(kept, path)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            self._put(name, kept.read_bytes())

    def _keep(self, kind: str, name: str, data: bytes | None) -> None:
        if data is not None:
            kept = self.folder / kind / name
            kept.parent.mkdir(parents=True, exist_ok=True)
            _write_through(kept, data)

    def _missing_folders(self, changed: list[str], files: Mapping[str, bytes | None]) -> list[str]:
        missing = set()
        for name in changed:
            if files[name] is not None:
                for parent in Path(name).parents:
                    if parent.parts and not (self.tree.root / parent).exists():
                        missing.add(parent.as_posix())
        return sorted(missing, key=lambda name: (name.count("/"), name))

    def _remove_folders(self, folders: list[str]) -> None:
        for name in reversed(folders):
            shutil.rmtree(self.tree.root / name / "__pycache__", ignore_errors=True)
            try:
                (self.tree.root / name).rmdir()
            except OSError:  # somebody else's files are in it by now, or it was never made
                continue

    def _end_journal(self) -> None:
        (self.folder / "journal.json").unlink(missing_ok=True)
        shutil.rmtree(self.folder / "undo", ignore_errors=True)

    def _drop(self) -> None:
        # The journal goes first: without it whatever else is left is only litter, never a reason to undo
        (self.folder / "journal.json").unlink(missing_ok=True)
        (self.folder / "manifest.json").unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.tree.toplevel is not None:
            with suppress(OSError):  # another tree of the same checkout has records there
                self.folder.parent.rmdir()
        self.manifest = None

    @staticmethod
    def _temporary(path: Path) -> Path:
        return path.with_name(f".{path.name}{_TEMPORARY}")

    @staticmethod
    def _store(path: Path, value: msgspec.Struct) -> None:
        temporary = path.with_name(path.name + _TEMPORARY)
        _write_through(temporary, msgspec.json.format(msgspec.json.encode(value)))
        os.replace(temporary, path)

    @staticmethod
    def _load(path: Path, kind: type[_Stored]) -> _Stored | None:
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise Conflict(f"{path} is damaged: {error}") from error


def _write_through(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
