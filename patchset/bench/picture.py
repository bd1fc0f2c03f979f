"""Draws `docs/thd-layout.png` with the layout that is laid into verl: rank by row, coloured by sequence."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from .. import REPOSITORY

LENS, CP, BUCKET = [11, 5, 7], 2, 40


def load_layout() -> Any:
    """The overlay's layout module, which needs torch and nothing of verl."""
    spec = importlib.util.spec_from_file_location(
        "thd_layout", REPOSITORY / "verl_overlay/verl/utils/megatron/thd_layout.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def draw(path: Path) -> None:
    """Three settings of the same sequences, one above the other.

    Args:
        path: where to write the PNG.
    """
    import matplotlib
    import torch

    matplotlib.use("Agg")
    from matplotlib import colormaps, patches, pyplot

    settings: dict[str, dict[str, Any]] = {
        "zigzag: two chunks of each sequence a rank": {},
        f"zigzag, bucket {BUCKET}: the last sequence takes the padding": {"pad_to_length_bucket": BUCKET},
        "contiguous: one interval of the block a rank": {"cp_layout": "contiguous"},
    }
    offsets = torch.tensor([0, *LENS]).cumsum(0)
    sequence = torch.arange(len(LENS)).repeat_interleave(torch.tensor(LENS))
    colours = [colormaps["tab10"](number) for number in range(len(LENS))]
    figure, axes = pyplot.subplots(len(settings), figsize=(9, 4.6), layout="constrained")
    for axis, (title, setting) in zip(axes, settings.items(), strict=True):
        for rank in range(CP):
            layout = load_layout().thd_layout(offsets, tp_size=1, cp_size=CP, cp_rank=rank, **setting)
            held = layout.pack(sequence + 1).tolist()
            for row, (number, position) in enumerate(zip(held, layout.position_ids.tolist(), strict=True)):
                colour = colours[number - 1] if number else "0.9"
                axis.add_patch(patches.Rectangle((row, -rank), 1, -0.9, facecolor=colour, edgecolor="white"))
                if number:
                    axis.text(row + 0.5, -rank - 0.45, position, ha="center", va="center", color="white", fontsize=8)
        axis.set(xlim=(0, 20), ylim=(-CP, 0.1), yticks=[-rank - 0.45 for rank in range(CP)], xticks=[])
        axis.set_yticklabels([f"rank {rank}" for rank in range(CP)])
        axis.set_title(title, fontsize=10, loc="left")
        axis.spines[:].set_visible(False)
        axis.tick_params(length=0)
    figure.supxlabel("row of the rank; a number is its position in the sequence, grey is padding", fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    draw(REPOSITORY / "docs" / "thd-layout.png")
