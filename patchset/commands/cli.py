"""The commands. `scripts/apply.sh` is `python -m patchset apply`, `scripts/test.sh` is `python -m patchset test`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from .. import REPOSITORY, __version__
from ..apply import Outcome, Request, build_pin, patch_tree, revert_tree, status_tree
from ..bench import compare as bench
from ..errors import PatchsetError, UsageError
from ..numerics.cli import FAMILIES
from ..proof import history, numerics_process
from ..proof import pins as proof
from ..series.catalogue import load
from ..series.known import Known, Learning
from ..series.lock import read_lock, records, write_lock
from ..series.plan import make_plan
from ..target import pins
from ..target.tree import Tree, installed_tree
from . import report

EXIT_CODES = """exit status:
  0  applied, or nothing to do
  1  conflict: a patch does not fit, files were edited since, or a file cannot be written; nothing was changed
  2  the command line, the series or the target is not usable
  3  an upstream source could not be had
"""


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    errors = Console(stderr=True)
    try:
        command: Callable[[argparse.Namespace, Console], int] = options.run
        return command(options, errors)
    except PatchsetError as error:
        if getattr(options, "json", False):
            report.print_json({"error": str(error), "details": list(error.details), "exit_status": error.exit_code})
        report.print_error(error, errors)
        return error.exit_code
    except KeyboardInterrupt:
        errors.print("interrupted", style="red")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="patchset", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    apply = commands.add_parser(
        "apply",
        help="patch a verl tree",
        prog="scripts/apply.sh",
        description="Applies the patch-set to a verl tree. Without a target: the default pin, into build/.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    target = apply.add_mutually_exclusive_group()
    target.add_argument("--pin", metavar="NAME", help="a pin of ci/pins.toml")
    target.add_argument("--all", action="store_true", help="every release pin")
    target.add_argument("--tree", metavar="PATH", type=Path, help="in place: a checkout, or a folder that holds verl/")
    target.add_argument("--installed", metavar="PYTHON", nargs="?", const="python3", help="the verl of an interpreter")
    apply.add_argument("--out", metavar="DIR", type=Path, help="where to put a pin (default: build/verl-NAME)")
    apply.add_argument("--upstream", metavar="PATH", type=Path, help="clone of upstream, for pins that are commits")
    chosen = apply.add_mutually_exclusive_group()
    chosen.add_argument("--only", metavar="NAME", nargs="+", help="these patches alone")
    chosen.add_argument("--until", metavar="NAME", help="the series up to this patch")
    apply.add_argument("--without", metavar="NAME", nargs="+", help="all chosen patches but these")
    output = apply.add_mutually_exclusive_group()
    output.add_argument("--dry-run", action="store_true", help="unified diff on standard output, nothing written")
    output.add_argument("--commit", action="store_true", help="one git commit a patch")
    output.add_argument("--export", metavar="DIR", type=Path, help="mailbox patches for git am; the tree is left alone")
    output.add_argument("--overlay", metavar="DIR", type=Path, help="touched files, whole; the tree is left alone")
    output.add_argument("--status", action="store_true", help="what is applied, and what was edited since")
    output.add_argument("--revert", action="store_true", help="take the patch-set back, byte for byte")
    apply.add_argument("--allow-dirty", action="store_true", help="--commit beside uncommitted changes of other files")
    apply.add_argument("--any-tree", action="store_true", help="--overlay for a tree that is no pin")
    apply.add_argument("--json", action="store_true", help="JSON on standard output")
    apply.set_defaults(run=_apply)

    lock = commands.add_parser("lock", help="write ci/pins.lock anew", description="Writes ci/pins.lock anew.")
    lock.add_argument("--upstream", metavar="PATH", type=Path, help="clone of upstream; without it its pins stay")
    lock.set_defaults(run=_lock)

    test = commands.add_parser(
        "test",
        help="prove the patch-set",
        prog="scripts/test.sh",
        description="Runs this repository's tests, then every check on every release pin, and prints one table.",
    )
    test.add_argument("--pin", metavar="NAME", nargs="+", help="these pins instead of every release")
    test.add_argument("--tree", metavar="PATH", type=Path, help="a copy of this tree instead, with its whole CPU suite")
    test.add_argument("--upstream", metavar="PATH", type=Path, help="clone of upstream: its commits are pins as well")
    test.add_argument("--history", action="store_true", help="on which commits of --upstream the series lands, instead")
    test.add_argument("--write", action="store_true", help="with --history: write docs/trees.md anew")
    test.add_argument("--jobs", metavar="N", type=int, default=2, help="trees, and own tests, at a time (default: 2)")
    test.add_argument("--json", metavar="FILE", type=Path, help="write the results there")
    test.set_defaults(run=_test)

    bench = commands.add_parser(
        "bench",
        help="compare a pristine and a patched tree",
        prog="scripts/bench.sh",
        description="Measures both trees' packers in turn, and what a bucket saves torch.compile. Not a test.",
    )
    bench.add_argument("--pin", metavar="NAME", default="0.9.1", help="a pin that has the bucket (default: 0.9.1)")
    bench.add_argument("--runs", metavar="N", type=int, default=7, help="counted runs of every call (default: 7)")
    bench.add_argument(
        "--backend", default="eager", help="of torch.compile: eager (default) counts graphs, inductor times"
    )
    bench.add_argument("--skip-recompiles", action="store_true", help="the packers alone")
    bench.add_argument(
        "--out", metavar="DIR", type=Path, default=REPOSITORY / "build", help="for bench.json, bench.png"
    )
    bench.set_defaults(run=_bench)

    numerics = commands.add_parser(
        "numerics",
        help="compare a tree's training with references",
        prog="scripts/verify_numerics.sh",
        description="Runs a tree's Megatron engine on this CPU and compares it with Hugging Face, plain Megatron-Core "
        "and torch's Adam. Without a target: the default pin, patched.",
        epilog="exit status: 0 all as it should be, 1 something differs or crashed, 2 usage, 3 no source",
    )
    place = numerics.add_mutually_exclusive_group()
    place.add_argument("--pin", metavar="NAME", help="a pin of ci/pins.toml, patched")
    place.add_argument("--tree", metavar="PATH", type=Path, help="a tree as it stands; nothing is written to it")
    numerics.add_argument("--unpatched", action="store_true", help="the pin as upstream has it")
    numerics.add_argument("--upstream", metavar="PATH", type=Path, help="clone of upstream, for pins that are commits")
    numerics.add_argument("--short", action="store_true", help="a part of every comparison, within 90 seconds")
    numerics.add_argument("--only", metavar="FAMILY", nargs="+", choices=FAMILIES, help=f"of {', '.join(FAMILIES)}")
    numerics.add_argument("--mutations", action="store_true", help="put faults into the tree and see them seen")
    numerics.add_argument("--limit", metavar="S", type=float, help="seconds for one comparison (240)")
    numerics.add_argument("--json", metavar="FILE", help="write the results there")
    numerics.set_defaults(run=_numerics)

    lint = commands.add_parser("lint", help="check the series", description="Checks the series and its rule files.")
    lint.set_defaults(run=_lint)
    return parser


def _test(options: argparse.Namespace, errors: Console) -> int:
    if options.history:
        return _history(options, errors)
    if options.write:
        raise UsageError("--write goes with --history")
    series, known = load(), pins.load_pins()
    results: list[proof.Result] = []

    def tell(result: proof.Result) -> None:
        results.append(result)
        report.print_result(result, errors)

    everything = options.pin is None and options.tree is None
    if everything:
        tell(proof.own_tests(errors, options.jobs))
    names = options.pin or (list(known.pins) if everything else [])
    upstream = options.upstream or _upstream_from_environment()
    proof.verify(series, names, options.tree, upstream, proof.workspace_folder(), tell, options.jobs)
    report.print_results(results, report.console())
    if options.json is not None:
        options.json.write_text(json.dumps([dataclasses.asdict(result) for result in results], indent=2) + "\n")
    return 1 if any(result.passed is False for result in results) else 0


def _history(options: argparse.Namespace, errors: Console) -> int:
    upstream = options.upstream or _upstream_from_environment()
    if upstream is None:
        raise UsageError("--history needs a clone of upstream: give it with --upstream PATH")
    found = history.trace(load(), upstream, options.jobs, errors)
    history.print_history(found, report.console())
    if options.json is not None:
        options.json.write_text(json.dumps(found.json(), indent=2) + "\n")
    if options.write:
        history.PAGE.write_text(history.page(found))
    return 1 if found.bad else 0


def _upstream_from_environment() -> Path | None:
    return Path(os.environ["VERL_UPSTREAM"]) if os.environ.get("VERL_UPSTREAM") else None


def _bench(options: argparse.Namespace, errors: Console) -> int:
    found = bench.measure(options.pin, load(), options.runs, options.backend, options.skip_recompiles)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "bench.json").write_text(json.dumps(found, indent=2) + "\n")
    bench.print_tables(found, report.console())
    bench.plot(found, options.out / "bench.png")
    errors.print(f"{options.out / 'bench.json'}, {options.out / 'bench.png'}", highlight=False, soft_wrap=True)
    return 0


def _numerics(options: argparse.Namespace, errors: Console) -> int:
    if options.unpatched and options.tree is not None:
        raise UsageError("--unpatched goes with --pin; a tree is taken as it stands")
    passed_on = [f"--{name}" for name in ("short", "mutations") if getattr(options, name)]
    for name in ("limit", "json"):
        passed_on += [f"--{name}", str(getattr(options, name))] if getattr(options, name) is not None else []
    passed_on += ["--only", *options.only] if options.only else []
    if options.tree is not None:
        return numerics_process.run(Tree.at(options.tree).root, passed_on)
    known = pins.load_pins()
    name = options.pin or known.default
    with TemporaryDirectory(prefix="patchset-") as folder:
        root = Path(folder) / f"verl-{name}"
        pins.unpack(name, known.get(name), root, options.upstream or _upstream_from_environment())
        if not options.unpatched:
            patch_tree(Tree.at(root), Request(), load(), pin=name)
        return numerics_process.run(root, passed_on)


def _lint(options: argparse.Namespace, errors: Console) -> int:
    series = load()
    errors.print(f"{len(series.patches)} patches, {sum(len(patch.rules) for patch in series.patches)} rules")
    return 0


def _lock(options: argparse.Namespace, errors: Console) -> int:
    series, known, locked, spans = load(), pins.load_pins(), read_lock(), dict(Known.read().spans)
    everything = series.select()
    with TemporaryDirectory(prefix="patchset-") as folder, errors.status("") as progress:
        for name, pin in known.pins.items():
            if pin.source == "git" and options.upstream is None:
                errors.print(f"{name}: kept as it is, no --upstream given")
                continue
            progress.update(name)
            pins.unpack(name, pin, Path(folder) / name, options.upstream)
            tree = Tree.at(Path(folder) / name)
            learning = Learning(name, spans)
            for selected in series.selections():
                plan = make_plan(tree, tree.read, series, selected, learning)
                if selected == everything:
                    locked[name] = records(plan)
    if options.upstream is not None:
        history.learn(series, options.upstream, spans, errors)
    write_lock({name: files for name, files in locked.items() if name in known.pins})
    Learning("", spans).write()
    return 0


def _apply(options: argparse.Namespace, errors: Console) -> int:
    series = load()
    upstream = options.upstream or _upstream_from_environment()
    if options.out is not None and (options.tree or options.installed or options.all):
        raise UsageError("--out goes with --pin")
    if options.all and (options.export or options.overlay):
        raise UsageError("--export and --overlay take one pin or tree at a time")
    request = Request(
        options.only, options.until, options.without, options.dry_run, options.commit, options.allow_dirty,
        options.export, options.overlay, options.any_tree,
    )  # fmt: skip
    known = pins.load_pins()
    names = known.releases if options.all else [options.pin or known.default]
    tree = Tree.at(options.tree) if options.tree else installed_tree(options.installed) if options.installed else None
    outcomes: list[Outcome] = []
    with errors.status("") as progress:
        if options.status or options.revert:
            trees = (
                [tree] if tree else [Tree.at(options.out or REPOSITORY / "build" / f"verl-{name}") for name in names]
            )
            outcomes = [revert_tree(at) if options.revert else status_tree(at, series) for at in trees]
        elif tree is not None:
            outcomes.append(patch_tree(tree, request, series))
        else:
            for name in names:
                progress.update(f"verl {name}")
                outcomes.append(build_pin(name, options.out, request, series, upstream))
    if options.json:
        report.print_json({"patchset": __version__, "targets": [outcome.json() for outcome in outcomes]})
    elif options.dry_run:
        sys.stdout.write("".join(outcome.diff for outcome in outcomes))
    else:
        verb = "reverted" if options.revert else "patched"
        report.print_outcomes(outcomes, report.console(), verb)
    return 0
