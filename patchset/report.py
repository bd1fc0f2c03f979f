"""Tables for people and JSON for machines."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from .apply import Outcome
from .errors import PatchsetError

_COLOUR = {"applied": "green", "already upstream": "cyan", "not needed": "cyan", "not selected": "yellow"}


def print_outcomes(outcomes: list[Outcome], console: Console, verb: str) -> None:
    """One table patch × target, then what each target has to say."""
    table = Table(box=None, pad_edge=False)
    table.add_column("patch", no_wrap=True)
    for outcome in outcomes:
        table.add_column(outcome.pin or outcome.target.rsplit("/", 1)[-1])
    for name in dict.fromkeys(name for outcome in outcomes for name in outcome.patches):
        cells = []
        for outcome in outcomes:
            patch = outcome.patches.get(name, {"status": "", "reason": ""})
            colour = _COLOUR.get(patch["status"], "default")
            reason = f" ({patch['reason']})" if patch["reason"] else ""
            cells.append(f"[{colour}]{patch['status']}[/]{reason}")
        table.add_row(name, *cells)
    if table.row_count:
        console.print(table)
    for outcome in outcomes:
        what = f"{len(outcome.changed)} files {verb}" if outcome.changed else "nothing to do"
        console.print(f"{outcome.target}: {what}, {outcome.seconds:.2f} s", highlight=False, soft_wrap=True)
        for note in outcome.notes:
            console.print(f"  {note}", highlight=False, soft_wrap=True, markup=False)


def print_json(value: Any) -> None:
    """JSON on standard output."""
    print(json.dumps(value, indent=2))


def print_error(error: PatchsetError, console: Console) -> None:
    """One line, and below it what it is about."""
    console.print(f"error: {error}", style="red", highlight=False, soft_wrap=True, markup=False)
    for line in error.details:
        console.print(f"  {line}", highlight=False, soft_wrap=True, markup=False)
