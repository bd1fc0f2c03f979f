"""Upstream trees and repositories for the tests. Pins come from the package index, once, into the shared cache."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from patchset.commands.cli import main
from patchset.series.catalogue import Series, load
from patchset.target import gitrepo, pins

PINS = pins.load_pins()


@pytest.fixture(scope="session")
def series() -> Series:
    return load()


@pytest.fixture(scope="session")
def upstream() -> Path:
    """A clone of upstream, for the pins that are commits."""
    given = os.environ.get("VERL_UPSTREAM")
    if not given:
        pytest.skip("needs a clone of upstream: set VERL_UPSTREAM")
    return Path(given)


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """pristine(pin): an untouched tree of a pin, shared by all tests; never write there."""
    folder = tmp_path_factory.mktemp("pristine")

    def get(name: str) -> Path:
        target = folder / name
        if not target.exists():
            clone = os.environ.get("VERL_UPSTREAM")
            if PINS.get(name).source == "git" and not clone:
                pytest.skip(f"{name} is a commit of upstream's git: set VERL_UPSTREAM to a clone")
            pins.unpack(name, PINS.get(name), target, Path(clone) if clone else None)
        return target

    return get


@pytest.fixture
def tree(tmp_path: Path, pristine: Callable[[str], Path]) -> Callable[..., Path]:
    """tree(pin): a copy of a pin to write to, outside git; with git=True, a checkout with one commit."""

    def copy(name: str, git: bool = False, into: str | None = None) -> Path:
        target = tmp_path / (into or f"verl-{name}")
        shutil.copytree(pristine(name), target)
        if git:
            gitrepo.make_repository(target)
            run(target, "git", "config", "user.name", "A Maintainer")
            run(target, "git", "config", "user.email", "maintainer@localhost")
        return target

    return copy


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """cli("apply", …): exit status, standard output and standard error of a command."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return call


def run(folder: Path, *command: object, data: str | None = None) -> str:
    """Output of a command that has to succeed."""
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, capture_output=True, text=True, input=data, check=False
    )  # fmt: skip
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def snapshot(folder: Path) -> dict[str, bytes]:
    """Relative path -> content of every file below a folder, git's own aside."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".git" not in path.relative_to(folder).parts
    }
