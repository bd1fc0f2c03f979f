"""Tables for people, and JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .bench import Result
from .comparison import Difference

#: Quantities whose differences are relative.
_RELATIVE = ("gradients", "updates", "loss", "grad norm", "MTP mean")


def print_results(results: list[Result], skipped: list[str], console: Console) -> None:
    """Comparison and topology by bucket, each with its largest differences; then every failure, and the totals."""
    buckets = sorted({result.bucket for result in results}, key=lambda bucket: bucket or 0)
    table = Table(box=None, pad_edge=False, title="largest difference of values · of gradients and sums, relative")
    for name in ("comparison", "topology", *(f"bucket {bucket or 'none'}" for bucket in buckets)):
        table.add_column(name, no_wrap=True)
    cells = {(r.family, r.model, r.topology, r.bucket): _cell(r) for r in results}
    for family, model, topology in dict.fromkeys((r.family, r.model, r.topology) for r in results):
        row = [cells.get((family, model, topology, bucket), "") for bucket in buckets]
        table.add_row(f"{family} {model}", topology, *row)
    console.print(table)
    for result in results:
        if not result.passed:
            console.print(f"[red]FAIL[/] {escape(result.name)}: {escape(why(result))}", highlight=False, soft_wrap=True)
    for line in skipped:
        console.print(f"[yellow]skip[/] {escape(line)}", highlight=False, soft_wrap=True)
    console.print(summary(results), highlight=False)


def why(result: Result) -> str:
    """What went wrong, in one line."""
    if result.error is not None:
        return result.error
    return "; ".join(
        f"{d.where or d.quantity} (largest {d.value:.1e}, allowed {d.limit:.0e})"
        for d in result.differences
        if not d.passed
    )


def summary(results: list[Result]) -> str:
    """Totals, and the largest difference of every quantity where everything is as it should be."""
    failed = sum(not result.passed for result in results)
    largest: dict[str, Difference] = {}
    for difference in (difference for result in results for difference in result.differences):
        if difference.passed and difference.value >= largest.get(difference.quantity, difference).value:
            largest[difference.quantity] = difference
    values = ", ".join(f"{quantity} {difference.value:.1e}" for quantity, difference in largest.items())
    return f"{len(results) - failed} passed, {failed} failed, {sum(r.seconds for r in results):.0f} s; {values}"


def _cell(result: Result) -> str:
    if result.error is not None:
        return "[red]crash[/]" if "did not end" not in result.error else "[red]hang[/]"
    values = [d.value for d in result.differences if d.quantity not in _RELATIVE]
    relative = [d.value for d in result.differences if d.quantity in _RELATIVE]
    text = " · ".join(f"{max(part):.1e}" for part in (values, relative) if part)
    return f"[green]{text}[/]" if result.passed else f"[red]{text}[/]"


def print_mutations(seen: dict[str, list[Result]], console: Console) -> None:
    """Mutation by comparison: what saw it, or that nothing did."""
    families = list(dict.fromkeys(result.family for results in seen.values() for result in results))
    table = Table(box=None, pad_edge=False, title="what sees which fault (2 CP ranks)")
    for name in ("fault", *families):
        table.add_column(name, no_wrap=True)
    for fault, results in seen.items():
        by_family = {result.family: result for result in results}
        row = [_sight(by_family[family]) if family in by_family else "" for family in families]
        blind = all(result.passed for result in results)
        table.add_row(f"[red]{fault}[/]" if blind else fault, *row)
    console.print(table)
    console.print(sights(seen), highlight=False)


def sights(seen: dict[str, list[Result]]) -> str:
    """How many faults were seen, and which were not."""
    unseen = [fault for fault, results in seen.items() if all(result.passed for result in results)]
    missed = f"; nothing saw: {', '.join(unseen)}" if unseen else ""
    return f"{len(seen) - len(unseen)} of {len(seen)} faults seen{missed}"


def _sight(result: Result) -> str:
    if result.passed:
        return "-"
    if result.error is not None:
        return escape(result.error.split(": ", 1)[-1].split(":")[0])[:24]
    worst = max((d for d in result.differences if not d.passed), key=lambda d: d.value / d.limit)
    return f"{worst.quantity} {worst.value:.2g}"


def write_json(path: Path, **parts: Any) -> None:
    """One object with everything."""
    path.write_text(json.dumps(parts, indent=2, default=str) + "\n")


def print_details(results: Iterable[Result], console: Console) -> None:
    """Tracebacks and stacks of what crashed or hung; of each error once."""
    told = set()
    for result in results:
        if result.error is not None and result.error not in told:
            told.add(result.error)
            console.print(f"[red]{escape(result.name)}[/]: {escape(result.error)}", highlight=False)
            for detail in result.details:
                console.print(detail, highlight=False, markup=False, soft_wrap=True)
