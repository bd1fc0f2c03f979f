"""Applies one patch's rules to file contents, in memory, or says exactly why they do not fit."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..errors import Conflict
from . import astgrep
from .catalogue import CONDITION, Patch, Probe, Rule
from .known import Known
from .style import Style

Read = Callable[[str], bytes | None]

#: A conflict shows so many of the lines that an edit would take away.
MOST_LINES = 8
_OURS = "a line that an earlier patch wrote"


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


def rewrite(patch: Patch, read: Read, on_disk: Read, style: Style, known: Known) -> dict[str, bytes]:
    """Contents of the files that a patch edits, after its rules and in the tree's style.

    Args:
        patch: whose rules to run. Each file is scanned once, so rules of a file see it before any of its edits.
        read: content of a file before the patch, None where the tree lacks it.
        on_disk: content before the series, which conflicts are told in.
        style: formats what the edits touch.
        known: the code that an edit may take away.

    Raises:
        Conflict: a rule has more or fewer matches than it states, or would take away code that is not known; all such
            rules are told, with the lines.
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
            for match in (match for match in matches if match.rule_id == rule.id):
                text = "".join(_lines_that_hold(match.replacement or "", counts))
                text, lost = _recognise(patch, rule, match, text, before[rule.target], known)
                if lost:
                    problems += _explain_lost(patch, rule, lost, before[rule.target], on_disk(rule.target) or b"")
                edits.setdefault(rule.target, []).append(dataclasses.replace(match, replacement=text))
        if problems:
            raise Conflict(f"{patch.name} does not fit this tree", tuple(problems))
        edited = {path: _edit(before[path], found) for path, found in edits.items() if found}
        _lay(folder, edited)
        style.format(folder, {path: before[path] for path in edited})
        after = {path: (folder / path).read_bytes() for path in edited}
    originals = {path: read(path) or b"" for path in after}
    return {path: data.replace(b"\n", b"\r\n") if b"\r\n" in originals[path] else data for path, data in after.items()}


def _lines_that_hold(text: str, counts: Mapping[str, int]) -> Iterator[str]:
    """Lines of a replacement whose condition, where they have one, has a match; without the condition."""
    for line in text.splitlines(keepends=True):
        condition = CONDITION.search(line)
        if condition is None:
            yield line
        elif counts[condition[1]]:
            yield line[: condition.start()] + line[condition.end() :]


def _recognise(
    patch: Patch, rule: Rule, match: astgrep.Match, text: str, data: bytes, known: Known
) -> tuple[str, list[int]]:
    """What an edit writes, with comments of the tree's own above it, and the lines that it would wrongly take away."""
    start = data.rfind(b"\n", 0, match.start) + 1
    margin = re.match(rb"[ \t]*", data[start : match.start])
    indent = margin[0].decode() if margin else ""
    span = data[match.start : match.end].decode(errors="replace")
    first = data.count(b"\n", 0, match.start) + 1
    if _keeps(span, text):
        return text, []
    if not _says_all(rule):
        foreign = known.foreign(f"{patch.name}/{rule.id}", indent + span)
        if foreign is not None:
            return text, [first + line for line in foreign]
    own = [comment for comment in known.own_comments(f"{patch.name}/{rule.id}", indent + span) if comment not in text]
    if own and start + len(indent) != match.start:  # no line of their own to stand on
        return text, [first]
    return "".join(f"{comment}\n{indent}" for comment in own) + text, []


def _keeps(span: str, text: str) -> bool:
    """Whether a replacement holds all that it takes the place of, so that it only inserts."""
    if re.search(rf"(?<!\w){re.escape(span.strip())}(?!\w)", text):
        return True
    lines = iter([line.strip() for line in text.splitlines()])
    return all(line in lines for line in (line.strip() for line in span.splitlines()))


def _says_all(rule: Rule) -> bool:
    """Whether the rule itself states all that it takes away: patterns whose variables all come back in the fix."""
    found, fix = rule.document["rule"], rule.document["fix"]
    patterns = [part.get("pattern") for part in found["any"]] if "any" in found else [found.get("pattern")]
    if isinstance(fix, dict) or not all(isinstance(pattern, str) for pattern in patterns):
        return False
    variables = {variable for pattern in patterns for variable in re.findall(r"\$+\w*", pattern)}
    return variables <= set(re.findall(r"\$+\w*", fix))


def _explain_lost(patch: Patch, rule: Rule, lost: list[int], data: bytes, on_disk: bytes) -> list[str]:
    source, seen = data.decode(errors="replace").splitlines(), _seen_lines(data, on_disk)
    said = [f"{patch.name}: {rule.target}: rule {rule.id} would take away code that is not upstream's:"]
    for number in lost[:MOST_LINES]:
        said.append(
            f"    yours: {seen.get(number, 'a line that an earlier patch wrote')}: {source[number - 1].strip()}"
        )
    if len(lost) > MOST_LINES:
        said.append(f"    and {len(lost) - MOST_LINES} more")
    said.append(f"    move it out of what is replaced, or leave the patch out: --without {patch.name}")
    return said


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
    source, place = data.decode(errors="replace").splitlines(), _place(rule.document["rule"])
    inside = f" in {place[0]} {place[1]}" if place else ""
    said = [f"{where} expected {rule.expect} match(es){inside}, found {found}"]
    if found:
        kind, numbers = "match", [match.line for match in matches if match.rule_id == rule.id]
    else:
        within = _lines_within(place, data) if place else set(range(1, len(source) + 1))
        if not within and place:
            said.append(f"    this file has no {place[0]} {place[1]}")
        kind, numbers = "near", _nearest(rule.document["rule"], source, within)
    seen = _seen_lines(data, on_disk)
    for number in numbers:
        said.append(
            f"    {kind}: {seen.get(number, 'a line that an earlier patch wrote')}: {source[number - 1].strip()}"
        )
    return said


def _seen_lines(data: bytes, on_disk: bytes) -> dict[int, str]:
    """`line N` of the tree on disk for every line that no earlier patch wrote."""
    now, then = data.decode(errors="replace").splitlines(), on_disk.decode(errors="replace").splitlines()
    blocks = difflib.SequenceMatcher(a=now, b=then, autojunk=False).get_matching_blocks()
    return {block.a + n + 1: f"line {block.b + n + 1}" for block in blocks for n in range(block.size)}


def _place(rule: Any) -> tuple[str, str] | None:
    """(kind, regex of the name) of the function or class that a rule's match has to stand in, the outermost stated."""
    found = None
    if isinstance(rule, dict):
        for key in ("inside", "all", "any"):
            for part in rule[key] if isinstance(rule.get(key), list) else [rule.get(key)]:
                found = _place(part) or found
        kind = _PLACES.get(str(rule.get("kind")))
        if kind is not None and found is None:
            conditions = [rule.get("has"), *(part.get("has") for part in rule.get("all", ()))]
            names = [has["regex"] for has in conditions if has and has.get("field") == "name" and "regex" in has]
            found = (kind, names[0].strip("^$")) if names else None
    return found


_PLACES = {"function_definition": "function", "class_definition": "class"}


def _lines_within(place: tuple[str, str], data: bytes) -> set[int]:
    try:
        module = ast.parse(data)
    except (SyntaxError, ValueError):
        return set()
    kinds = (ast.ClassDef,) if place[0] == "class" else (ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        line
        for node in ast.walk(module)
        if isinstance(node, kinds) and re.match(place[1], node.name)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def _nearest(rule: Any, source: list[str], within: set[int], most: int = 3) -> list[int]:
    """Numbers of the lines, among those that it may stand on, that look most like what a rule searches, best first."""
    needles = [re.sub(r"\\(.)|[$^()]", r"\1", text) for text in _searched(rule)]
    scored = []
    for number, line in enumerate(source, 1):
        stripped = line.strip()
        if stripped and number in within:
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
