"""Nets behind the rules: what a patch leaves has to hold as code, whatever tree it met.

Each compares the planned files with those before, and tells what is new: an undefined name, an import that binds
nothing, a parameter that is no longer read, a local that some path no longer binds, a call that its function refuses.
"""

from __future__ import annotations

import ast
import json
import subprocess
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from . import scopes
from .astgrep import executable
from .calls import Follower, refusal
from .rewrite import Read


def check(
    before: Mapping[str, bytes | None], after: Mapping[str, bytes], read: Read, unread: Collection[str] = ()
) -> list[str]:
    """What does not hold any more, a line each; empty where everything does.

    Args:
        before: content of the files of `after` before the patch; None where the tree lacked it.
        after: content after it; other files than Python's are left alone.
        read: content of any file of the tree, after the patch.
        unread: parameters that the patch says it no longer reads.
    """
    changed = {name: data for name, data in after.items() if name.endswith(".py") and before.get(name) != data}
    old = {name: before.get(name) or b"" for name in changed}
    wrong = []
    for when, files in (("was no Python before", old), ("is no Python any more", changed)):
        for name, data in files.items():
            try:
                scopes.parse(data)
            except SyntaxError as error:
                wrong.append(f"{name}:{error.lineno}: {when}: {error.msg}")
    if wrong or not changed:
        return wrong
    wrong += _undefined(old, changed)
    follower = Follower(read)
    for name, data in changed.items():
        wrong += _imports(name, old[name], data, follower)
        if before.get(name) is None:
            continue  # of the overlay, as a whole ours
        wrong += _parameters(name, old[name], data, unread)
        wrong += _locals(name, old[name], data)
        wrong += _calls(name, old[name], data, follower)
    return wrong


def _undefined(old: Mapping[str, bytes], new: Mapping[str, bytes]) -> Iterator[str]:
    """Names that nothing binds and that were not unbound before."""
    said = {"old": old, "new": new}
    with TemporaryDirectory(prefix="patchset-") as folder:
        for kind, files in said.items():
            for name, data in files.items():
                path = Path(folder, kind, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
        command = [executable("ruff"), "check", "--isolated", "--no-cache", "--select", "F821", "--ignore-noqa"]
        done = subprocess.run(
            [*command, "--output-format", "json", "old", "new"], cwd=folder, capture_output=True, text=True, check=False
        )  # fmt: skip
        found = [
            (*Path(entry["filename"]).relative_to(Path(folder).resolve()).as_posix().split("/", 1), entry)
            for entry in json.loads(done.stdout)
        ]
    known = Counter((name, entry["message"]) for kind, name, entry in found if kind == "old")
    for kind, name, entry in found:
        if kind == "new":
            known[name, entry["message"]] -= 1
            if known[name, entry["message"]] < 0:
                yield f"{name}:{entry['location']['row']}: {entry['message'][0].lower()}{entry['message'][1:]}"


def _imports(name: str, old: bytes, new: bytes, follower: Follower) -> Iterator[str]:
    """Imports from the tree itself that it cannot serve."""

    def imported(data: bytes) -> Iterator[tuple[str, str, int]]:
        for node in ast.walk(scopes.parse(data)):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                yield from ((node.module, alias.name, node.lineno) for alias in node.names)

    known = {(module, what) for module, what, _ in imported(old)}
    for module, what, line in imported(new):
        if (module, what) not in known and follower.binds(module, what) is False:
            yield f"{name}:{line}: imports {what} from {module}, which this tree lacks"


def _changed(old: bytes, new: bytes) -> Iterator[tuple[str, scopes.Function | None, scopes.Function]]:
    """(qualified name, definition before, definition after) of the functions whose text changed."""
    then, now = scopes.functions(old), scopes.functions(new)
    old_lines, new_lines = old.splitlines(), new.splitlines()
    for where, function in now.items():
        before = then.get(where)
        if before is None or (
            old_lines[before.lineno - 1 : before.end_lineno] != new_lines[function.lineno - 1 : function.end_lineno]
        ):
            yield where, before, function


def _parameters(name: str, old: bytes, new: bytes, unread: Collection[str]) -> Iterator[str]:
    """Parameters that were read and are not any more, and functions that are gone."""
    for where in scopes.functions(old).keys() - scopes.functions(new).keys():
        yield f"{name}: function {where} is gone"
    for where, before, function in _changed(old, new):
        lost = (scopes.read_parameters(before) if before else set()) - scopes.read_parameters(function)
        for parameter in sorted(lost.difference(unread)):
            yield f"{name}:{function.lineno}: {where} no longer reads its parameter {parameter}"


def _locals(name: str, old: bytes, new: bytes) -> Iterator[str]:
    """Locals that some path reads without having bound them, and that every path had bound before."""
    for where, before, function in _changed(old, new):
        loose = scopes.maybe_unbound(function)
        known = scopes.maybe_unbound(before) if before else {}
        for local in sorted(loose.keys() - known.keys()):
            yield f"{name}:{loose[local]}: {where} reads {local}, which not every path binds any more"


def _calls(name: str, old: bytes, new: bytes, follower: Follower) -> Iterator[str]:
    """Calls that are new and that a function of the tree would refuse, or whose new keyword nobody can follow."""
    now = scopes.functions(new)
    for where, before, function in _changed(old, new):
        known = Counter(text for text, _ in scopes.calls(before)) if before else Counter[str]()
        parts = where.split(".")
        around = [now[".".join(parts[:n])] for n in range(1, len(parts) + 1) if ".".join(parts[:n]) in now]
        for text, call in scopes.calls(function):
            known[text] -= 1
            if known[text] >= 0:
                continue
            called = ast.unparse(call.func)
            for reached in follower.reach(name, around, call.func):
                if reached.function is None:
                    if before is not None and _gained_keyword(call, before):
                        yield f"{name}:{call.lineno}: {where} hands a new keyword to {called}, which cannot be followed"
                elif why := _refused(reached.function, call, before):
                    at = f"{reached.file}:{reached.function.lineno}"
                    yield f"{name}:{call.lineno}: {where} calls {called}, and {reached.function.name} ({at}) {why}"


def _refused(function: scopes.Function, call: ast.Call, before: scopes.Function | None) -> str | None:
    """Why a function refuses a call, unless it refused what stood there before for the same reason."""
    why = refusal(function, call)
    others = scopes.calls(before) if why is not None and before is not None else ()
    same = (other for _, other in others if ast.dump(other.func) == ast.dump(call.func))
    return None if why in {refusal(function, other) for other in same} else why


def _gained_keyword(call: ast.Call, before: scopes.Function) -> bool:
    """Whether the function called the same thing before, never with these keywords."""
    handed = [
        {keyword.arg for keyword in other.keywords}
        for _, other in scopes.calls(before)
        if ast.dump(other.func) == ast.dump(call.func)
    ]
    return bool(handed) and {keyword.arg for keyword in call.keywords} not in handed
