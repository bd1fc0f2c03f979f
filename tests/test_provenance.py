"""No upstream code stands in this repository."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

from patchset import REPOSITORY
from tests import provenance
from tests.conftest import PINS

OURS = """
def one(first_argument):
    # a comment
    value_of_it = first_argument + 1

    another_value = value_of_it * 2
    return another_value, value_of_it
"""


def test_a_copied_block_is_found_whatever_its_indentation_and_comments(tmp_path):
    (tmp_path / "upstream").mkdir()
    (tmp_path / "upstream/a.py").write_text("\n".join("    " + line for line in OURS.splitlines() if "#" not in line))
    known = provenance.index([tmp_path / "upstream"])
    (tmp_path / "ours.py").write_text("something = 'of our own'\n" + OURS)
    assert provenance.shared([tmp_path / "ours.py"], known) == [f"{tmp_path}/ours.py:3"]
    (tmp_path / "ours.py").write_text(OURS.replace("another_value = value_of_it * 2", "another_value = 2 * value"))
    assert provenance.shared([tmp_path / "ours.py"], known) == []


def test_nothing_is_shared_with_any_pin(pristine):
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    files = [REPOSITORY / name for name in listed if (REPOSITORY / name).suffix in provenance.KINDS]
    assert len(files) > 30
    names = [name for name, pin in PINS.pins.items() if pin.source == "sdist" or os.environ.get("VERL_UPSTREAM")]
    # Nor with what the numerics are built on
    packages = [Path(importlib.util.find_spec(name).submodule_search_locations[0]) for name in ("megatron", "mbridge")]
    known = provenance.index([*(pristine(name) for name in names), *packages])
    assert len(known) > 50_000
    assert provenance.shared([path for path in files if path.is_file()], known) == []
