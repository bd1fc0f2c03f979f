"""Compares the packers of a pristine and of a patched tree of one pin, and what a bucket saves a compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from .. import REPOSITORY
from ..apply import Request, patch_tree
from ..errors import PatchsetError
from ..series.catalogue import Series
from ..target import pins
from ..target.tree import Tree


def measure(name: str, series: Series, runs: int, backend: str, skip_recompiles: bool) -> dict[str, Any]:
    """Runs the worker on a pin.

    Args:
        name: pin that has the bucket, before or after the series.
        runs: counted runs of every call.
        backend: what torch.compile compiles with.

    Raises:
        PatchsetError: the worker failed.
    """
    with TemporaryDirectory(prefix="patchset-") as folder:
        pristine, patched = Path(folder) / "pristine", Path(folder) / "patched"
        for target in (pristine, patched):
            pins.unpack(name, pins.load_pins().get(name), target)
        patch_tree(Tree.at(patched), Request(), series, pin=name)
        worker = str(REPOSITORY / "patchset" / "bench" / "worker.py")
        command = [sys.executable, "-W", "ignore", worker, "--pristine", str(pristine), "--patched", str(patched)]
        command += ["--runs", str(runs), "--backend", backend]
        command += ["--skip-recompiles"] if skip_recompiles else []
        environment = {**os.environ, "PYTHONPATH": str(patched), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            raise PatchsetError(f"the benchmark of {name} ended with status {done.returncode}; see above")
        return {"pin": name, "runs": runs, **json.loads(done.stdout.splitlines()[-1])}


def print_tables(found: dict[str, Any], console: Console) -> None:
    """One table of the packers, one line each of scaling and floor, one table of the recompiles."""
    for part in found["packers"]:
        table = Table(title=f"verl {found['pin']}, tp=2 cp=4 bucket 512, median of {found['runs']}", box=None)
        for column in (
            "device",
            "threads",
            "sequences x tokens",
            "call",
            "pristine",
            "patched",
            "ratio",
            "ops",
            "waits",
        ):
            table.add_column(column, justify="left" if column in ("device", "call") else "right", no_wrap=True)
        for row in part["rows"]:
            table.add_row(
                row["device"], str(row["threads"]), f"{row['batch']} x {row['mean']}", row["call"],
                f"{row['pristine_s'] * 1e3:,.2f} ms", f"{row['patched_s'] * 1e3:.2f} ms",
                f"{row['pristine_s'] / row['patched_s']:,.1f}x",
                f"{row['pristine_ops']:,} -> {row['patched_ops']}",
                f"{row['pristine_waits']:,} -> {row['patched_waits']}",
            )  # fmt: skip
        console.print(table)
        for axis, slope in part["exponents"].items():
            console.print(f"time over {axis}: exponent {slope:.2f}", highlight=False)
        rates = part["floor"]["pack_tokens_per_s"] / 1e6, part["floor"]["index_select_tokens_per_s"] / 1e6
        said = f"pack {rates[0]:,.0f} M/s, index_select of the same rows {rates[1]:,.0f} M/s"
        console.print(f"{part['floor']['tokens']:,} tokens: {said}, {rates[1] / rates[0]:.1f}x", highlight=False)
    if found["recompiles"]:
        first = found["recompiles"][0]
        table = Table(
            title=f"{first['batches']} micro-batches, torch.compile(dynamic=False), {first['backend']}", box=None
        )
        for column in ("bucket", "graphs", "compile", "wall", "padding"):
            table.add_column(column, justify="right")
        for row in found["recompiles"]:
            bucket = "off" if row["bucket"] is None else str(row["bucket"])
            seconds = (f"{row['compile_s']:.1f} s", f"{row['wall_s']:.1f} s")
            table.add_row(bucket, str(row["graphs"]), *seconds, f"{row['padding']:.1%}")
        console.print(table)


def plot(found: dict[str, Any], path: Path) -> None:
    """Time over batch size for both trees, log axes, and graphs and wall time by bucket."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    rows = [row for row in found["packers"][0]["rows"] if row["threads"] == 1]
    for call, colour in (("pack_next", "tab:blue"), ("micro-batch", "tab:orange"), ("unpack + backward", "tab:green")):
        chosen = [row for row in rows if row["call"] == call]
        batches = [row["batch"] for row in chosen]
        left.plot(batches, [row["pristine_s"] * 1e3 for row in chosen], "--o", color=colour, label=f"{call}, pristine")
        left.plot(batches, [row["patched_s"] * 1e3 for row in chosen], "-o", color=colour, label=f"{call}, patched")
    left.set(xscale="log", yscale="log", xlabel="sequences in the micro-batch", ylabel="ms, one thread")
    left.set_title(f"verl {found['pin']}: tp=2 cp=4 bucket 512")
    left.legend(fontsize=8, handlelength=4)
    if found["recompiles"]:
        names = ["off" if row["bucket"] is None else str(row["bucket"]) for row in found["recompiles"]]
        bars = right.bar(names, [row["graphs"] for row in found["recompiles"]], color="tab:blue")
        right.bar_label(bars, [f"{row['graphs']}\n{row['wall_s']:.0f} s" for row in found["recompiles"]], fontsize=8)
        first = found["recompiles"][0]
        right.set(xlabel="bucket", ylabel="graphs compiled (and wall time)")
        right.margins(y=0.2)
        right.set_title(f"{first['batches']} micro-batches, {first['backend']}, forward and backward")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
