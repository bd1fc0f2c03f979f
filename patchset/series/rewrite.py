"""Applies one patch's rules to file contents, in memory, or says exactly why they do not fit."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..errors import Conflict
from . import astgrep
from .catalogue import Patch, Probe, Rule
from .style import Style

Read = Callable[[str], bytes | None]


def probe_all(probes: list[Probe], read: Read) -> list[bool]:
    """For each probe, whether its rule matches in its file. A missing file does not match."""
    contents = {probe.file: read(probe.file) for probe in probes}
    documents = [
        {
            "id": f"probe-{number}",
            "language": probe.language,
            "severity": "hint",
            "message": probe.message,
            "files": [probe.file],
            "rule": probe.rule,
        }
        for number, probe in enumerate(probes)
    ]
    with TemporaryDirectory(prefix="patchset-") as folder:
        _lay(Path(folder), {path: data for path, data in contents.items() if data is not None})
        found = {match.rule_id for match in astgrep.scan(Path(folder), documents, sorted(contents))}
    return [f"probe-{number}" in found for number in range(len(probes))]


def rewrite(patch: Patch, read: Read, on_disk: Read, style: Style) -> dict[str, bytes]:
    """Contents of the files that a patch edits, after its rules and in the tree's style.

    Args:
        patch: whose rules to run. Each file is scanned once, so rules of a file see it before any of its edits.
        read: content of a file before the patch, None where the tree lacks it.
        on_disk: content before the series, which conflicts are told in.
        style: formats what the edits touch.

    Raises:
        Conflict: a rule has more or fewer matches than it states; all such rules are told, with the nearest lines.
    """
    before: dict[str, bytes] = {}
    problems: list[str] = []
    for target in patch.targets:
        data = read(target)
        if data is not None:
            before[target] = data.replace(b"\r\n", b"\n")
        elif target not in patch.metadata.optional_files:
            problems.append(f"{patch.name}: {target} is not in this tree")

    rules = [rule for rule in patch.rules if rule.target in before]
    with TemporaryDirectory(prefix="patchset-") as name:
        folder = Path(name)
        _lay(folder, before)
        matches = astgrep.scan(folder, [rule.document for rule in rules], sorted(before))
        counts = {rule.id: sum(match.rule_id == rule.id for match in matches) for rule in rules}
        edits: dict[str, list[astgrep.Match]] = {}
        for rule in rules:
            if rule.expect is None:
                continue
            found, spared = counts[rule.id], rule.unless is not None and counts[rule.unless] > 0
            if found != (0 if spared else rule.expect):
                shown = on_disk(rule.target) or b""
                problems += _explain(patch, rule, found, spared, matches, before[rule.target], shown)
            edits.setdefault(rule.target, []).extend(match for match in matches if match.rule_id == rule.id)
        if problems:
            raise Conflict(f"{patch.name} does not fit this tree", tuple(problems))
        edited = {path: _edit(before[path], found) for path, found in edits.items() if found}
        _lay(folder, edited)
        style.format(folder, {path: before[path] for path in edited})
        after = {path: (folder / path).read_bytes() for path in edited}
    originals = {path: read(path) or b"" for path in after}
    return {path: data.replace(b"\n", b"\r\n") if b"\r\n" in originals[path] else data for path, data in after.items()}


def _lay(folder: Path, contents: Mapping[str, bytes]) -> None:
    for path, data in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)


def _edit(data: bytes, matches: list[astgrep.Match]) -> bytes:
    """Puts every replacement in its place. Overlapping replacements are a fault of the rules."""
    parts, position = [], 0
    for match in sorted(matches, key=lambda match: match.start):
        if match.start < position:
            raise Conflict(f"{match.path}:{match.line}: rule {match.rule_id} overlaps another rule's edit")
        parts += [data[position : match.start], (match.replacement or "").encode()]
        position = match.end
    return b"".join([*parts, data[position:]])


def _explain(
    patch: Patch, rule: Rule, found: int, spared: bool, matches: list[astgrep.Match], data: bytes, on_disk: bytes
) -> list[str]:
    where = f"{patch.name}: {rule.target}: rule {rule.id}"
    if spared:
        return [f"{where} has {found} match(es), although its witness {rule.unless} says that it is not needed"]
    source = data.decode(errors="replace").splitlines()
    if found:
        kind, numbers = "match", [match.line for match in matches if match.rule_id == rule.id]
    else:
        kind, numbers = "near", _nearest(rule.document["rule"], source)
    # Patches before this one moved the lines that the user sees
    seen = on_disk.decode(errors="replace").splitlines()
    blocks = difflib.SequenceMatcher(a=source, b=seen, autojunk=False).get_matching_blocks()
    lines = {block.a + n + 1: block.b + n + 1 for block in blocks for n in range(block.size)}
    said = [f"{where} expected {rule.expect} match(es), found {found}"]
    for number in numbers:
        line = f"line {lines[number]}" if number in lines else "a line that an earlier patch wrote"
        said.append(f"    {kind}: {line}: {source[number - 1].strip()}")
    return said


def _nearest(rule: Any, source: list[str], most: int = 3) -> list[int]:
    """Numbers of the lines that look most like what a rule searches, best first."""
    needles = [re.sub(r"\\(.)|[$^()]", r"\1", text) for text in _searched(rule)]
    scored = []
    for number, line in enumerate(source, 1):
        stripped = line.strip()
        if stripped:
            scored.append((max((_likeness(needle, stripped) for needle in needles), default=0.0), number))
    best = sorted(scored, key=lambda pair: (-pair[0], pair[1]))[:most]
    return [number for score, number in best if score >= 0.5]


def _likeness(needle: str, line: str) -> float:
    matcher = difflib.SequenceMatcher(a=line[: 2 * len(needle)], b=needle, autojunk=False)
    return matcher.ratio() if matcher.real_quick_ratio() >= 0.5 and matcher.quick_ratio() >= 0.5 else 0.0


def _searched(rule: Any) -> list[str]:
    """Texts of a rule's own `pattern` and `regex`; where it stands (`inside`, …) does not tell it apart."""
    if isinstance(rule, list):
        return [text for part in rule for text in _searched(part)]
    if not isinstance(rule, dict):
        return []
    texts: list[str] = []
    for key, value in rule.items():
        if key in ("pattern", "regex") and isinstance(value, str) and not re.fullmatch(r"\$+[A-Z]+", value):
            texts.append(value)
        elif key in ("all", "any", "has"):
            texts += _searched(value)
    return texts or [text for key in ("inside",) for text in _searched(rule.get(key))]
