"""Reads the series: which patches there are, what each one says of itself, which rules it has; and lints it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml

from .. import REPOSITORY
from ..errors import UsageError

#: The end of a line of a fix that is written only where a witness matches.
CONDITION = re.compile(r" *# where: ([\w-]+)$", re.MULTILINE)
GENERATED_PREFIX = "verl/trainer/config/_generated_"


class Upstream(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where upstream has the same change. All None and no pins for a change that upstream lacks."""

    pull_request: int | None
    commit: str | None
    first_release: str | None
    pins: list[str]


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One structural question to a tree: does `rule` match in `file`?"""

    file: str
    message: str
    language: str
    rule: dict[str, Any]


class Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """What `patch.yaml` says of its patch.

    Attributes:
        requires: what has to be in a tree before: names of earlier patches; a list is of which one is enough.
        present: the patch is already in a tree in which every probe matches.
        needed: where given, a tree in which a probe does not match has no use for the patch; its message tells why.
        supersedes: earlier patches that edit the code which this one replaces; chosen together, this one wins.
        unread: parameters that functions no longer read after the patch, with the reason.
        optional_files: files with rules that a tree may lack, with the reason.
        regenerates: generated reference YAML that follows from the patch's configuration edits.
        overlay: files of `verl_overlay/` that come with the patch.
        proofs: tests of the overlay that fail on a tree which needs the patch and lacks it.
    """

    subject: str
    message: str
    why: str
    upstream: Upstream
    requires: list[str | list[str]]
    present: list[Probe]
    retire: str
    needed: list[Probe] = []
    supersedes: list[str] = []
    unread: dict[str, str] = {}
    optional_files: dict[str, str] = msgspec.field(default_factory=dict, name="optional_files")
    regenerates: list[str] = []
    overlay: list[str] = []
    proofs: list[str] = []


@dataclass(frozen=True)
class Rule:
    """One rule document of a patch.

    Attributes:
        target: upstream file that the rule reads and edits.
        document: the ast-grep document as it stands in the rule file.
        expect: number of matches the rule has to have; None for a witness, which edits nothing.
        unless: id of the witness whose match says that the edit is not needed.
    """

    target: str
    document: dict[str, Any]
    expect: int | None
    unless: str | None

    @property
    def id(self) -> str:
        return str(self.document["id"])

    @property
    def conditions(self) -> set[str]:
        """Witnesses that lines of the fix name by a comment at their end; without a match such a line is left out."""
        fix = self.document.get("fix", "")
        return set(CONDITION.findall(fix["template"] if isinstance(fix, dict) else fix))


@dataclass(frozen=True)
class Patch:
    """A patch of the series: its folder's name, metadata, and rules in the order of its rule files."""

    name: str
    metadata: Metadata
    rules: tuple[Rule, ...]

    @property
    def targets(self) -> list[str]:
        return sorted({rule.target for rule in self.rules})


@dataclass(frozen=True)
class Series:
    """The patches in their order, the folder of the files that they lay over a tree, and the oldest tree they fit.

    Attributes:
        floor: a tree in which a probe does not match is too old for any patch; its message tells why.
    """

    patches: tuple[Patch, ...]
    overlay: Path
    floor: tuple[Probe, ...] = ()

    def superseder(self, name: str) -> str | None:
        """The patch that makes another one needless; None where there is none."""
        return next((patch.name for patch in self.patches if name in patch.metadata.supersedes), None)

    def selections(self) -> list[set[str]]:
        """The whole series, and for every patch that supersedes others the series without it."""
        winners = [patch.name for patch in self.patches if patch.metadata.supersedes]
        return [self.select(), *(self.select(without=[name]) for name in winners)]

    def select(
        self, only: list[str] | None = None, until: str | None = None, without: list[str] | None = None
    ) -> set[str]:
        """Names of the chosen patches; a name may be shortened to what tells it apart.

        Args:
            only: these alone.
            until: the series up to this one.
            without: all chosen ones but these.

        Raises:
            UsageError: a name fits no patch, or several.
        """
        names = [patch.name for patch in self.patches]

        def full(short: str) -> str:
            fits = [name for name in names if name == short] or [name for name in names if name.startswith(short)]
            if len(fits) != 1:
                what = "fits several patches" if fits else "is no patch of the series"
                raise UsageError(f"{short!r} {what}: {', '.join(fits or names)}")
            return fits[0]

        if until is not None:
            chosen = set(names[: names.index(full(until)) + 1])
        else:
            chosen = {full(short) for short in only} if only is not None else set(names)
        return chosen.difference(map(full, without or ()))

    def overlay_bytes(self, path: str) -> bytes:
        return (self.overlay / path).read_bytes()


def _rules(folder: Path, problems: list[str]) -> list[Rule]:
    rules: list[Rule] = []
    for file in sorted(folder.rglob("*.yml")):
        target = file.relative_to(folder).as_posix().removesuffix(".yml")
        where = f"{folder.parent.name}/rules/{target}.yml"
        try:
            documents = list(yaml.safe_load_all(file.read_text(encoding="utf-8")))
        except yaml.YAMLError as error:
            problems.append(f"{where} is no YAML: {' '.join(str(error).split())}")
            continue
        for document in documents:
            if not isinstance(document, dict) or not {"id", "language", "rule", "message"} <= document.keys():
                problems.append(f"{where}: a rule needs id, language, message and rule")
                continue
            if document.get("files") != [target]:
                problems.append(f"{where}: {document['id']} must have `files: [{target}]`, so that it runs alone")
            stated = document.get("metadata", {})
            expect, unless = stated.get("expect"), stated.get("unless")
            if ("fix" in document) != (isinstance(expect, int) and expect > 0):
                problems.append(f"{where}: {document['id']} needs `fix` and `metadata.expect` (a count) together")
            rules.append(Rule(target, document, expect, unless))
            if expect and target.endswith((".yaml", ".yml")) and not _inserts(document):
                problems.append(f"{where}: {document['id']} may only insert: what YAML it removes nobody can check")
    ids = [rule.id for rule in rules]
    for rule in rules:
        if ids.count(rule.id) > 1:
            problems.append(f"{folder.parent.name}: rule id {rule.id} stands twice")
        witness = [other for other in rules if other.id == rule.unless and other.target == rule.target]
        if rule.unless is not None and not (witness and witness[0].expect is None):
            problems.append(f"{folder.parent.name}: {rule.id} names no witness of its file: {rule.unless}")
        for name in rule.conditions:
            if not any(other.id == name and other.target == rule.target and other.expect is None for other in rules):
                problems.append(f"{folder.parent.name}: {rule.id} has a line where {name}, no witness of its file")
    return rules


def _inserts(document: dict[str, Any]) -> bool:
    """Whether a rule writes back all that it matched: its pattern is one variable, which its fix repeats."""
    pattern, fix = document["rule"].get("pattern"), document["fix"]
    return isinstance(pattern, str) and re.fullmatch(r"\$[A-Z_]+", pattern) is not None and pattern in str(fix)


def load(repository: Path = REPOSITORY) -> Series:
    """The series of a repository, linted.

    Raises:
        UsageError: with every problem of the series in its details.
    """
    folder, overlay, problems = repository / "patches", repository / "verl_overlay", list[str]()
    patches: list[Patch] = []
    for name in _listed(folder, problems):
        patch = _patch(folder / name, problems)
        if patch is not None:
            earlier = {before.name for before in patches}
            needs = {name for need in patch.metadata.requires for name in ([need] if isinstance(need, str) else need)}
            missing = sorted(needs - earlier)
            problems += [f"{name} requires {need}, which does not come before it" for need in missing]
            missing = [other for other in patch.metadata.supersedes if other not in earlier]
            problems += [f"{name} supersedes {other}, which does not come before it" for other in missing]
            patches.append(patch)
    _check_overlay(patches, overlay, problems)
    floor = _floor(folder / "floor.yaml", problems)
    if problems:
        raise UsageError(f"the series has {len(problems)} problem(s)", tuple(problems))
    return Series(tuple(patches), overlay, floor)


def _floor(path: Path, problems: list[str]) -> tuple[Probe, ...]:
    """Probes that every tree has to match; none where the file is missing."""
    if not path.exists():
        return ()
    try:
        return tuple(msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")), list[Probe]))
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        problems.append(f"{path.name}: {' '.join(str(error).split())}")
        return ()


def _listed(folder: Path, problems: list[str]) -> list[str]:
    """Names in the series that have a folder, each once."""
    lines = (line.strip() for line in (folder / "series").read_text(encoding="utf-8").splitlines())
    listed = [line for line in lines if line and not line.startswith("#")]
    on_disk = {entry.name for entry in folder.iterdir() if entry.is_dir()}
    names = list(dict.fromkeys(listed))
    problems += [f"{name} stands {listed.count(name)} times in the series" for name in names if listed.count(name) > 1]
    problems += [f"{name} is in the series but has no folder" for name in names if name not in on_disk]
    problems += [f"{name} has a folder but is not in the series" for name in sorted(on_disk.difference(names))]
    return [name for name in names if name in on_disk]


def _patch(folder: Path, problems: list[str]) -> Patch | None:
    name = folder.name
    try:
        metadata = msgspec.convert(yaml.safe_load((folder / "patch.yaml").read_text(encoding="utf-8")), Metadata)
    except FileNotFoundError:
        problems.append(f"{name} has no patch.yaml")
        return None
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        problems.append(f"{name}/patch.yaml: {' '.join(str(error).split())}")
        return None
    rules = _rules(folder / "rules", problems)
    targets = {rule.target for rule in rules}
    said = {
        "`present` needs a probe": not metadata.present,
        "`proofs` needs a test of the overlay": not metadata.proofs,
        **{f"`{key}` is empty": not getattr(metadata, key).strip() for key in ("subject", "message", "why", "retire")},
        **{f"optional file {file} has no rules": file not in targets for file in metadata.optional_files},
        **{f"{file} is no generated YAML": not file.startswith(GENERATED_PREFIX) for file in metadata.regenerates},
    }
    problems += [f"{name}/patch.yaml: {problem}" for problem, holds in said.items() if holds]
    return Patch(name, metadata, tuple(rules))


def _check_overlay(patches: list[Patch], overlay: Path, problems: list[str]) -> None:
    claimed = {file for patch in patches for file in patch.metadata.overlay}
    present = {
        path.relative_to(overlay).as_posix()
        for path in overlay.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    problems += [
        f"verl_overlay/{file} belongs to no patch: list it under `overlay`" for file in sorted(present - claimed)
    ]
    problems += [f"verl_overlay/{file} is listed by a patch but missing" for file in sorted(claimed - present)]
    for patch in patches:
        strange = [file for file in patch.metadata.proofs if file not in present]
        problems += [f"{patch.name}/patch.yaml: proof {file} is no file of verl_overlay/" for file in strange]
