"""Imports between the rooms of the package run one way, from the top down."""

from __future__ import annotations

import ast
from pathlib import Path

from patchset import REPOSITORY

#: Each room may import from those that stand after it; the numerics stand apart.
ORDER = ["__main__", "commands", "bench", "proof", "apply", "series", "target", "errors"]
BELOW = {room: set(ORDER[number + 1 :]) for number, room in enumerate(ORDER)}
#: The command line knows which families the numerics have; it runs them in a process of their own.
BELOW["commands"] |= {"numerics.cli"}
BELOW["numerics"] = set()


def rooms_imported(file: Path) -> set[str]:
    """Rooms of the package that a file of it imports, its own aside; `numerics.MODULE` for modules of the numerics."""
    package = ["patchset", *file.relative_to(REPOSITORY / "patchset").parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            names = [".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for parts in (name.split(".") for name in names):
            if parts[0] == "patchset" and not parts[1].startswith(("REPOSITORY", "__version__")):
                found.add(".".join(parts[1:3]) if parts[1] == "numerics" else parts[1])
    room = package[1] if len(package) > 1 else file.stem
    return {name for name in found if name.split(".")[0] != room}


def test_imports_run_from_the_top_down():
    wrong = []
    for file in sorted((REPOSITORY / "patchset").rglob("*.py")):
        inside = file.relative_to(REPOSITORY / "patchset")
        room = inside.parts[0] if len(inside.parts) > 1 else inside.stem
        if room != "__init__":
            wrong += [f"{inside} imports {name}" for name in rooms_imported(file) if name not in BELOW[room]]
    assert wrong == []


def test_an_import_that_runs_up_is_seen(monkeypatch, tmp_path):
    # The room of pins asks a room above it, absolutely and relatively
    monkeypatch.setattr("tests.test_structure.REPOSITORY", tmp_path)
    file = tmp_path / "patchset/target/pins.py"
    file.parent.mkdir(parents=True)
    file.write_text("from ..apply import Request\nfrom patchset.series.plan import Plan\nfrom . import state\n")
    assert rooms_imported(file) == {"apply", "series"}
