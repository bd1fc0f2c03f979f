"""The upstream states that the patch-set knows, and how to get one onto this disk."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Literal

import msgspec

from .. import REPOSITORY
from ..errors import SourceUnavailable, UsageError
from .state import sha256


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One upstream state.

    Attributes:
        source: a release's sdist from the package index, or a commit of upstream's git.
        sha256: digest of the sdist; None for git.
        commit: git commit; None where the release has no tag that we know.
    """

    source: Literal["sdist", "git"]
    sha256: str | None = None
    commit: str | None = None


class Pins(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`ci/pins.toml`: every pin in upstream's order, and the one to use when none is named."""

    default: str
    pins: dict[str, Pin]

    def get(self, name: str) -> Pin:
        """A pin by name.

        Raises:
            UsageError: there is no such pin.
        """
        if name not in self.pins:
            raise UsageError(f"{name!r} is no pin; there are {', '.join(self.pins)}")
        return self.pins[name]

    @property
    def releases(self) -> list[str]:
        return [name for name, pin in self.pins.items() if pin.source == "sdist"]


def load_pins(path: Path = REPOSITORY / "ci" / "pins.toml") -> Pins:
    """Reads the pins.

    Raises:
        UsageError: the file says something that a pin does not have.
    """
    try:
        pins = msgspec.toml.decode(path.read_bytes(), type=Pins)
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path.name}: {error}") from error
    for name, pin in pins.pins.items():
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", name):
            raise UsageError(f"{path.name}: {name!r} cannot name a folder")
        if (pin.sha256 if pin.source == "sdist" else pin.commit) is None:
            raise UsageError(f"{path.name}: {name} needs {'sha256' if pin.source == 'sdist' else 'commit'}")
    pins.get(pins.default)
    return pins


def cache_folder() -> Path:
    """Where downloads are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verl-patchset"


def unpack(name: str, pin: Pin, target: Path, upstream: Path | None = None) -> None:
    """Lays the files of a pin into a folder that does not exist yet: all of them, or no folder.

    Args:
        target: the folder to make; its parents are made too.
        upstream: clone of upstream's git, for a git pin.

    Raises:
        SourceUnavailable: no network, wrong hash, damaged or hostile archive, no clone, or no such commit in it.
    """
    archive = _sdist(name, pin) if pin.source == "sdist" else _git_archive(name, pin, upstream)
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
        _extract(name, archive, Path(folder), strip=1 if pin.source == "sdist" else 0)
        staged = Path(folder) / "tree"
        if not (staged / "verl" / "__init__.py").is_file():
            raise SourceUnavailable(f"{name}: its archive holds no verl/ package")
        os.replace(staged, target)


def _sdist(name: str, pin: Pin) -> bytes:
    kept = cache_folder() / f"verl-{name}.tar.gz"
    if kept.is_file() and sha256(data := kept.read_bytes()) == pin.sha256:
        return data
    with TemporaryDirectory(prefix="patchset-") as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-binary", ":all:", "--dest", folder, f"verl=={name}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = sorted(Path(folder).glob("*.tar.gz"))
        if done.returncode != 0 or not found:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise SourceUnavailable(
                f"{name}: pip cannot download verl=={name}; check the network, or put its sdist at {kept}",
                tuple(errors),
            )
        data = found[0].read_bytes()
        if sha256(data) != pin.sha256:
            raise SourceUnavailable(
                f"{name}: the download has sha256 {sha256(data)}, ci/pins.toml says {pin.sha256}; do not use it"
            )
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_name(f".{kept.name}.{os.getpid()}")
        partial.write_bytes(data)
        os.replace(partial, kept)
    return data


def _git_archive(name: str, pin: Pin, upstream: Path | None) -> bytes:
    if upstream is None:
        raise SourceUnavailable(f"{name} is a commit of upstream's git: give a clone with --upstream PATH")
    assert pin.commit is not None
    command = ["git", "-C", str(upstream), "archive", "--format=tar", pin.commit]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except OSError as error:
        raise SourceUnavailable(f"{name}: git is not installed") from error
    if done.returncode != 0:
        raise SourceUnavailable(f"{name}: {upstream} is no clone that has {pin.commit[:12]}; fetch it there first")
    return done.stdout


def _extract(name: str, archive: bytes, folder: Path, strip: int) -> None:
    """Unpacks into `folder`/tree, leaving out `strip` leading folders; anything that could leave it is refused."""
    tree = folder / "tree"
    tree.mkdir()
    try:
        with tarfile.open(fileobj=BytesIO(archive)) as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts:
                    raise SourceUnavailable(f"{name}: its archive holds {member.name}, which leads out of the tree")
                inside = Path(*path.parts[strip:])
                if member.isdir():
                    (tree / inside).mkdir(parents=True, exist_ok=True)
                elif member.issym():
                    linked = os.path.normpath(PurePosixPath(*path.parts[strip:]).parent / member.linkname)
                    if member.linkname.startswith("/") or linked.startswith(".."):
                        raise SourceUnavailable(f"{name}: its archive links {member.name} out of the tree")
                    (tree / inside).parent.mkdir(parents=True, exist_ok=True)
                    (tree / inside).symlink_to(member.linkname)
                elif member.isfile():
                    (tree / inside).parent.mkdir(parents=True, exist_ok=True)
                    if not (tree / inside).parent.resolve().is_relative_to(tree.resolve()):
                        raise SourceUnavailable(f"{name}: its archive writes {member.name} through a link")
                    with tar.extractfile(member) as source, (tree / inside).open("wb") as copy:  # type: ignore[union-attr]
                        shutil.copyfileobj(source, copy)
                    (tree / inside).chmod(0o755 if member.mode & 0o100 else 0o644)
                elif member.type != tarfile.XGLTYPE:
                    raise SourceUnavailable(f"{name}: its archive holds {member.name}, which is no plain file")
    except (tarfile.TarError, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise SourceUnavailable(f"{name}: cannot unpack into {folder.parent}: {error.strerror}") from error
        raise SourceUnavailable(f"{name}: its archive is damaged ({error}); remove it from {cache_folder()}") from error
