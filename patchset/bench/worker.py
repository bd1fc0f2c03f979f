"""Measures the packers of two trees of one pin in one process, and what a bucket saves a compiler. Prints JSON.

Run by `bench`, with the patched tree on PYTHONPATH; both trees' `util.py` are loaded from their files, side by side.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import sys
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch._inductor.config
from torch.utils._python_dispatch import TorchDispatchMode

TP, CP, RANK, BUCKET = 2, 4, 1, 512
#: A run of a call lasts about this long, in seconds.
SAMPLE = 0.02
SHAPES = [(16, 2048), (64, 1024), (256, 256), (1024, 64)]
FIXED_TOKENS = [(16, 1024), (64, 256), (256, 64), (1024, 16)]
FIXED_BATCH = [(64, 64), (64, 256), (64, 1024), (64, 4096)]


def load(name: str, file: Path) -> ModuleType:
    """A tree's packers, under a name of their own, as rank 1 of CP 4 and TP 2 sees them."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.mpu.get_tensor_model_parallel_world_size = lambda: TP
    module.mpu.get_context_parallel_world_size = lambda: CP
    module.mpu.get_context_parallel_rank = lambda: RANK
    module.mpu.get_context_parallel_group = lambda: None
    return module


def fake_all_gather(outputs: list[torch.Tensor], own: torch.Tensor, group: Any = None) -> None:
    """Stands for the communication, which both trees do alike, by the copies that it ends with."""
    for output in outputs:
        output.copy_(own)


class Micro:
    """One micro-batch, made anew for every call, so that nothing of it is remembered."""

    def __init__(self, batch: int, mean: int, device: str) -> None:
        draw = torch.Generator().manual_seed(0)
        lens = torch.randint(max(1, mean // 2), mean + mean // 2 + 1, (batch,), generator=draw)
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.long), lens.cumsum(0)]).to(device)
        self.ids = torch.randint(0, 100_000, (int(lens.sum()),), generator=draw).to(device)
        self.others = [self.ids.float(), self.ids % 2, self.ids.float(), self.ids.double()]

    def fresh(self, values: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nested.nested_tensor_from_jagged(values, self.offsets.clone() if offsets is None else offsets)


def calls(util: ModuleType, micro: Micro) -> dict[str, Callable[[], Any]]:
    """What is measured: one tensor, one rolled tensor, five tensors of one micro-batch, and unpacking with backward."""
    pack = getattr(util, "preprocess_thd_engine", None) or util.preprocess_thd_no_padding
    unpack = getattr(util, "postprocess_thd_engine", None) or util.postprocess_thd_no_padding
    bucket = {"pad_to_length_bucket": BUCKET}
    batch = micro.offsets.shape[0] - 1

    def whole() -> None:
        first = micro.fresh(micro.ids)
        pack(first, **bucket)
        for number, values in enumerate(micro.others):
            pack(micro.fresh(values, first.offsets()), need_roll=number < 2, **bucket)

    packed, params, _ = pack(micro.fresh(micro.ids), **bucket)
    rows = packed.float().requires_grad_()

    def there_and_back() -> None:
        back = unpack(rows, params, micro.fresh(micro.ids), batch)
        back.values().sum().backward()

    return {
        "pack": lambda: pack(micro.fresh(micro.ids), **bucket),
        "pack_next": lambda: pack(micro.fresh(micro.ids), need_roll=True, **bucket),
        "micro-batch": whole,
        "unpack + backward": there_and_back,
    }


class Count(TorchDispatchMode):
    """Dispatched operations."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return function(*args, **(kwargs or {}))


def cost(call: Callable[[], Any]) -> tuple[int, int]:
    """Operations and waits for the device of one call."""
    waits = 0
    real = {name: getattr(torch.Tensor, name) for name in ("tolist", "item", "__int__", "__bool__", "__index__")}

    def counted(name: str) -> Callable[..., Any]:
        def method(self: torch.Tensor, *arguments: Any) -> Any:
            nonlocal waits
            waits += 1
            return real[name](self, *arguments)

        return method

    for name in real:
        setattr(torch.Tensor, name, counted(name))
    try:
        with Count() as count:
            call()
    finally:
        for name, method in real.items():
            setattr(torch.Tensor, name, method)
    return count.ops, waits


def seconds(call: Callable[[], Any], device: str, times: int = 1) -> float:
    """Time of one of several calls in a row, by events on a GPU."""
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            call()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1000 / times
    return timeit.timeit(call, number=times) / times


def interleaved(pair: list[Callable[[], Any]], runs: int, device: str) -> list[float]:
    """Median time of each call, measured in turn so that a drift of the machine meets all.

    A run is as many calls as take SAMPLE: one alone would start with the caches that the other tree has left.
    """
    counts = []
    for call in pair:
        call()
        counts.append(max(1, int(SAMPLE / seconds(call, device))))
    times: list[list[float]] = [[] for _ in pair]
    for _ in range(runs):
        for call, count, into in zip(pair, counts, times, strict=True):
            into.append(seconds(call, device, count))
    return [statistics.median(into) for into in times]


def exponent(points: list[tuple[int, float]]) -> float:
    """Slope of log(time) over log(size): 0 flat, 1 linear, 2 quadratic."""
    xs, ys = zip(*((math.log(size), math.log(value)) for size, value in points), strict=True)
    x, y = statistics.mean(xs), statistics.mean(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def packers(pristine: ModuleType, patched: ModuleType, runs: int, device: str, say: Callable[[str], None]) -> Any:
    rows = []
    torch.distributed.all_gather = fake_all_gather
    for threads in dict.fromkeys([1, torch.get_num_threads()]) if device == "cpu" else [torch.get_num_threads()]:
        torch.set_num_threads(threads)
        for batch, mean in SHAPES:
            micro = Micro(batch, mean, device)
            old, new = calls(pristine, micro), calls(patched, micro)
            for name in old:
                say(f"{device}, {threads} thread(s), {batch} x {mean}, {name}")
                before, after = interleaved([old[name], new[name]], runs, device)
                costs = cost(old[name]), cost(new[name])
                rows.append(
                    {
                        "device": device, "threads": threads, "batch": batch, "mean": mean, "call": name,
                        "tokens": micro.ids.shape[0], "pristine_s": before, "patched_s": after,
                        "pristine_ops": costs[0][0], "patched_ops": costs[1][0],
                        "pristine_waits": costs[0][1], "patched_waits": costs[1][1],
                    }
                )  # fmt: skip
    torch.set_num_threads(1)
    say("scaling and floor")
    shape = {}
    for name, sizes, axis in (("batch at fixed tokens", FIXED_TOKENS, 0), ("tokens at fixed batch", FIXED_BATCH, 1)):
        points = []
        for size in sizes:
            (taken,) = interleaved([calls(patched, Micro(*size, device))["pack_next"]], 3 * runs, device)
            points.append((size[axis], taken))
        shape[name] = exponent(points)
    return {"rows": rows, "exponents": shape, "floor": floor(device, runs)}


def floor(device: str, runs: int) -> Any:
    """A pack by a made layout of a million tokens against index_select of the same rows."""
    from verl.utils.megatron.thd_layout import thd_layout  # type: ignore[import-not-found]

    micro = Micro(256, 4096, device)
    layout = thd_layout(micro.offsets, tp_size=TP, cp_size=1, cp_rank=0, pad_to_length_bucket=BUCKET)
    index = layout._source
    pair = [lambda: layout.pack(micro.ids), lambda: micro.ids.index_select(0, index)]
    pack, select = interleaved(pair, max(runs, 15), device)
    tokens = micro.ids.shape[0]
    return {"tokens": tokens, "pack_tokens_per_s": tokens / pack, "index_select_tokens_per_s": tokens / select}


class Block(torch.nn.Module):
    """A transformer block over one packed sequence, small enough for a CPU."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(x.shape[0], 3, 4, -1).permute(1, 2, 0, 3).unbind(0)
        heads = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.permute(1, 0, 2).reshape(x.shape))
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def recompiles(bucket: int | None, backend: str, batches: int) -> Any:
    """Streams packed micro-batches with a long tail of lengths through a block compiled for each shape."""
    from torch._dynamo.utils import compilation_time_metrics, counters

    from verl.utils.megatron.thd_layout import thd_layout

    # A bucket must not live off what the one before it compiled
    torch._inductor.config.force_disable_caches = True
    torch._dynamo.reset()
    counters.clear()
    compilation_time_metrics.clear()
    torch._dynamo.config.cache_size_limit = 4 * batches
    torch._dynamo.config.accumulated_cache_size_limit = 8 * batches
    torch.manual_seed(0)
    block = torch.compile(Block(), dynamic=False, backend=backend)
    draw = torch.Generator().manual_seed(0)
    real = padded = 0
    started = time.perf_counter()
    for _ in range(batches):
        lens = torch.empty(8).log_normal_(5.3, 0.9, generator=draw).clamp(8, 2000).long()
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), lens.cumsum(0)])
        layout = thd_layout(offsets, tp_size=1, cp_size=1, cp_rank=0, pad_to_length_bucket=bucket)
        x = layout.pack(torch.randn(layout.tokens, 64)).requires_grad_()
        block(x).sum().backward()
        real, padded = real + layout.tokens, padded + layout.local_rows
    return {
        "bucket": bucket, "backend": backend, "batches": batches, "graphs": counters["stats"]["unique_graphs"],
        "compile_s": sum(compilation_time_metrics.get("compile_inner", [])) or sum(
            compilation_time_metrics.get("_compile.compile_inner", [])
        ),
        "wall_s": time.perf_counter() - started, "padding": padded / real - 1,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pristine", type=Path, required=True)
    parser.add_argument("--patched", type=Path, required=True)
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--batches", type=int, default=64)
    parser.add_argument("--skip-recompiles", action="store_true")
    options = parser.parse_args()

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    util = Path("verl/models/mcore/util.py")
    pristine, patched = load("pristine", options.pristine / util), load("patched", options.patched / util)
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    found: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    found["packers"] = [packers(pristine, patched, options.runs, device, say) for device in devices]
    found["recompiles"] = []
    torch.set_num_threads(found["threads"])
    for bucket in () if options.skip_recompiles else (None, 256, 512, 1024, 2048):
        say(f"recompiles, bucket {bucket}")
        found["recompiles"].append(recompiles(bucket, options.backend, options.batches))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
