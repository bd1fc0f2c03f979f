"""Runs ast-grep rules over files and reads what they match and would write.

The command-line ast-grep is the engine, so that a rule file does here what `ast-grep scan -r FILE` does alone.
Source of the format: ast-grep's rule reference (YAML documents with `rule`, `transform`, `fix`, `files`).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..errors import UsageError


@dataclass(frozen=True)
class Match:
    """One match of one rule.

    Attributes:
        rule_id: `id` of the rule document.
        path: file, relative to the scanned root.
        line: first line of the match, counted from 1.
        start, end: bytes of the file that `replacement` takes the place of.
        replacement: what the rule's `fix` writes; None for a rule without one.
    """

    rule_id: str
    path: str
    line: int
    start: int
    end: int
    replacement: str | None


def executable(name: str) -> str:
    """Path of a tool that this environment installed; falls back on PATH."""
    beside = Path(sysconfig.get_path("scripts")) / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise UsageError(f"{name} is not installed in this environment: run scripts/apply.sh, which installs it")
    return found


def scan(root: Path, documents: Iterable[Mapping[str, Any]], paths: Iterable[str]) -> list[Match]:
    """All matches of rule documents in files, in file order.

    Args:
        root: folder that `paths` and the rules' `files` are relative to.
        documents: ast-grep rule documents; `id`s tell their matches apart.
        paths: files to scan; missing ones are left out.

    Raises:
        UsageError: ast-grep refuses a rule.
    """
    rules = "\n---\n".join(yaml.safe_dump(dict(document), sort_keys=False) for document in documents)
    present = [path for path in paths if (root / path).is_file()]
    if not rules or not present:
        return []
    command = [executable("ast-grep"), "scan", "--inline-rules", rules, "--json=compact", *present]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, encoding="utf-8", check=False)
    if not done.stdout.startswith("["):
        raise UsageError("ast-grep refuses a rule", tuple(done.stderr.strip().splitlines()))
    matches = []
    for found in json.loads(done.stdout):
        whole = found["range"]["byteOffset"]
        span = found.get("replacementOffsets", whole)
        matches.append(
            Match(
                rule_id=found["ruleId"],
                path=found["file"].replace("\\", "/"),
                line=found["range"]["start"]["line"] + 1,
                start=span["start"],
                end=span["end"],
                replacement=found.get("replacement"),
            )
        )
    return sorted(matches, key=lambda match: (match.path, match.start))
