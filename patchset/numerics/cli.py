"""The command line: which tree, which comparisons, which tables."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from .bench import Bench, Result

#: Families of comparisons; the last two need the whole engine.
FAMILIES = ("forward", "mtp", "vision", "engine", "ray")


def main(arguments: list[str] | None = None) -> int:
    """Runs the bench on one tree; 0 if everything is as it should be, 1 if not, 2 if the tree can't be used."""
    options = _parser().parse_args(arguments)
    errors = Console(stderr=True)
    tree = options.tree.resolve()
    if not (tree / "verl" / "__init__.py").is_file():
        errors.print(f"error: {tree} holds no verl/; name a checkout, or a folder with verl/ in it", style="red")
        return 2
    try:
        return _run(options, tree, errors)
    except ImportError as error:
        errors.print(f"error: the verl in {tree} cannot be imported here: {error}", style="red", markup=False)
        return 2
    except KeyboardInterrupt:
        errors.print("interrupted", style="red")
        return 130


def _run(options: argparse.Namespace, tree: Path, errors: Console) -> int:
    families = options.only or (("forward", "mtp", "engine") if options.mutations else FAMILIES)
    with TemporaryDirectory(prefix="numerics-") as folder:
        with _progress(errors) as progress:
            progress.add_task(f"imports {tree.name} and works out the right values", total=None)
            progress.refresh()
            _make_ready(tree)
            from . import models
            from .bench import Bench, PeakMemory

            models.install()
            bench = Bench(Path(folder), families, options.short, options.limit)
        memory = PeakMemory()
        memory.start()
        try:
            failed = (_mutations if options.mutations else _comparisons)(bench, options, errors, memory)
        finally:
            memory.stop()
            bench.close()
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m patchset.numerics", description=__doc__)
    parser.add_argument("--tree", metavar="PATH", type=Path, required=True, help="a folder that holds verl/")
    parser.add_argument("--short", action="store_true", help="a part of every comparison")
    parser.add_argument("--only", metavar="FAMILY", nargs="+", choices=FAMILIES, help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--mutations", action="store_true", help="put faults into the tree and see them seen")
    parser.add_argument("--limit", metavar="S", type=float, default=240, help="seconds for one comparison (240)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results there")
    return parser


def _make_ready(tree: Path) -> None:
    """Makes `import verl` mean the tree, here and in the processes of Ray, and a CPU a GPU."""
    from . import device

    ours = Path(__file__).resolve().parent.parent.parent
    os.environ.update(device.environment(tree) | {"PYTHONPATH": f"{tree}:{ours}", "PYTHONDONTWRITEBYTECODE": "1"})
    sys.path.insert(0, str(tree))
    sys.dont_write_bytecode = True
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    device.install()
    import verl

    if not Path(verl.__file__).is_relative_to(tree):
        raise RuntimeError(f"verl was imported from {verl.__file__} instead of {tree}")
    # Progress bars of loading weights would break ours
    import transformers

    transformers.utils.logging.disable_progress_bar()


def _progress(errors: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Without a thread that refreshes it: processes are forked meanwhile
    return Progress(*columns, console=errors, transient=True, auto_refresh=False)


def _console() -> Console:
    found = Console()
    return found if found.is_terminal else Console(width=160)


def _comparisons(bench: Bench, options: argparse.Namespace, errors: Console, memory: Any) -> bool:
    from . import report

    results: list[Result] = []
    with _progress(errors) as progress:
        task = progress.add_task("", total=len(bench.cases))
        for case in bench.cases:
            progress.update(task, description=case.name, refresh=True)
            result = bench.run(case)
            results.append(result)
            progress.advance(task)
            if not result.passed:
                progress.console.print(f"FAIL {case.name}: {report.why(result)}", highlight=False, markup=False)
    report.print_details(results, errors)
    report.print_results(results, bench.skipped, _console())
    _console().print(f"at most {memory.bytes / 2**30:.1f} GiB in use", highlight=False)
    if options.json is not None:
        plain = [result.json() for result in results]
        report.write_json(
            options.json, tree=str(options.tree), summary=report.summary(results), results=plain,
            skipped=bench.skipped, memory_bytes=memory.bytes,
        )  # fmt: skip
    return not results or any(not result.passed for result in results)


def _mutations(bench: Bench, options: argparse.Namespace, errors: Console, memory: Any) -> bool:
    from . import mutations, report
    from .bench import mutation_cases

    cases = mutation_cases(bench.cases)
    seen: dict[str, list[Result]] = {}
    with _progress(errors) as progress:
        task = progress.add_task("", total=len(cases) * (len(mutations.names()) + 1))
        for fault in (None, *mutations.names()):
            for case in cases:
                progress.update(task, description=f"{fault or 'no fault'}: {case.name}", refresh=True)
                seen.setdefault(fault or "none", []).append(bench.run(case, fault))
                progress.advance(task)
    sound = seen.pop("none")
    report.print_mutations(seen, _console())
    broken = [result for result in sound if not result.passed]
    for result in broken:
        errors.print(f"without any fault: {result.name}: {report.why(result)}", style="red", markup=False)
    if options.json is not None:
        plain = {fault: [result.json() for result in results] for fault, results in seen.items()}
        report.write_json(
            options.json, tree=str(options.tree), summary=report.sights(seen), faults=plain,
            without=[result.json() for result in sound],
        )  # fmt: skip
    return not cases or bool(broken) or any(all(r.passed for r in results) for results in seen.values())
