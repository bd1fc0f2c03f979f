"""Audits a patched tree: no call of the THD packer lacks the bucket.

The check itself is `check_thd_bucket_calls.py` of the overlay, which a fork's own CI runs as well; here it sees the
planned contents before any of them is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import Conflict
from ..target.tree import Tree
from .catalogue import Series

_CHECK = "tests/special_sanity/check_thd_bucket_calls.py"


def audit(tree: Tree, series: Series, planned: Mapping[str, bytes]) -> None:
    """Checks every Python file of a tree's verl/ package, with planned contents in the place of those on disk.

    Raises:
        Conflict: naming file, line and function of each call that lacks the bucket.
    """

    def read(name: str) -> str:
        data = planned[name] if name in planned else (tree.root / name).read_bytes()
        return data.decode("utf-8", errors="replace")

    on_disk = {path.relative_to(tree.root).as_posix() for path in (tree.root / "verl").rglob("*.py")}
    names = on_disk | {name for name in planned if name.startswith("verl/") and name.endswith(".py")}
    try:
        findings = _check(series)(iter(sorted(names)), read)
    except SyntaxError as error:
        raise Conflict(f"{error.filename}:{error.lineno} is no Python: {error.msg}") from error
    if findings:
        lines = tuple(f"{finding.file}:{finding.line}: {finding.function} {finding.problem}" for finding in findings)
        raise Conflict(
            f"{len(findings)} call(s) would pack without the bucket: pass it, or mark the line # thd-bucket: REASON",
            lines,
        )


def _check(series: Series) -> Any:
    """The overlay's check, without leaving byte code beside it."""
    namespace: dict[str, Any] = {"__name__": "check_thd_bucket_calls"}
    exec(compile(series.overlay_bytes(_CHECK), _CHECK, "exec"), namespace)
    return namespace["check"]
