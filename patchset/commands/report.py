"""Tables for people and JSON for machines."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..apply import Outcome
from ..errors import PatchsetError
from ..proof.pins import Result

_COLOUR = {
    "applied": "green",
    "already upstream": "cyan",
    "not needed": "cyan",
    "superseded": "cyan",
    "not selected": "yellow",
}


def console() -> Console:
    """Standard output, wide enough for the tables where it is no terminal."""
    found = Console()
    return found if found.is_terminal else Console(width=max(found.width, 120))


def print_outcomes(outcomes: list[Outcome], console: Console, verb: str) -> None:
    """One table patch by target, then what each target has to say."""
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


_MARK = {True: "[green]pass[/]", False: "[red]FAIL[/]", None: "[yellow]skip[/]"}


def print_result(result: Result, console: Console) -> None:
    """One check as it ends."""
    what = f"{result.subject:16} {result.check:10} {result.seconds:6.1f} s  {escape(result.detail)}"
    console.print(f"{_MARK[result.passed]} {what}", highlight=False, soft_wrap=True)


def print_results(results: list[Result], console: Console) -> None:
    """One table check by subject, what failed or was skipped below it, and the totals."""
    subjects = list(dict.fromkeys(result.subject for result in results))
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for subject in subjects:
        table.add_column(subject, no_wrap=True)
    cells = {(result.subject, result.check): _MARK[result.passed] for result in results}
    for check in dict.fromkeys(result.check for result in results):
        table.add_row(check, *(cells.get((subject, check), "") for subject in subjects))
    console.print(table)
    for result in results:
        if not result.passed:
            line = f"{_MARK[result.passed]} {result.subject}, {result.check}: {escape(result.detail)}"
            console.print(line, highlight=False, soft_wrap=True)
    count = [sum(result.passed is kind for result in results) for kind in (True, False, None)]
    console.print(f"checks: {count[0]} passed, {count[1]} failed, {count[2]} skipped", highlight=False)


def print_json(value: Any) -> None:
    """JSON on standard output."""
    print(json.dumps(value, indent=2))


def print_error(error: PatchsetError, console: Console) -> None:
    """One line, and below it what it is about."""
    console.print(f"error: {error}", style="red", highlight=False, soft_wrap=True, markup=False)
    for line in error.details:
        console.print(f"  {line}", highlight=False, soft_wrap=True, markup=False)
