"""A CPU in the place of the GPU that Megatron-Core and verl ask for. Each stand-in names the lines that need it.

What stands here changes where tensors lie and which library sums them up, never what is computed.
"""

from __future__ import annotations

import contextlib
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


def environment(tree: Path) -> dict[str, str]:
    """What has to stand in the environment before the verl of a tree is imported."""
    found = {
        # verl's engine registry (0.9 on) looks for the CUDA engine
        "VERL_ENGINE_DEVICE": "cuda",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        # verl compiles its entropy, 2 s each; what is computed stays the same
        "TORCH_COMPILE_DISABLE": "1",
    }
    if (tree / "verl/plugin/platform").is_dir():
        # 0.9 on asks a platform what 0.8 asked torch
        found |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "patchset.numerics.verl_platform"}
    return found


class _Stream:
    """A CUDA stream on which everything has happened already."""

    def __init__(self, *unused: Any, **also_unused: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *unused, **also_unused: self


class CudaMeansCpu(TorchFunctionMode):
    """Sends to the CPU what names a CUDA device in a call.

    Needed by `device="cuda"` in megatron/core/pipeline_parallel/schedules.py (token count), optimizer/optimizer.py
    (found_inf), optimizer/clip_grads.py (norm), distributed/param_and_grad_buffer.py; `.cuda()` and `.to("cuda")` in
    mbridge's get_model and verl's load and offload.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.to and len(args) > 1 and str(args[1]).startswith("cuda"):
            args = (args[0], "cpu", *args[2:])
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            # optimizer/optimizer.py and optimizer/clip_grads.py compare it with "torch.cuda.FloatTensor"
            return function(*args).replace("torch.", "torch.cuda.", 1)
        return function(*args, **kwargs)


def install() -> None:
    """Puts the stand-ins in place, for this process and those forked from it. Megatron-Core may be imported before."""
    torch.set_num_threads(1)
    _replace_cuda_functions()
    _mend_gloo()
    _leave_random_states_alone()
    _mend_router()


def enter() -> None:
    """Turns CUDA devices into the CPU for the rest of this process; a forked process has to do it for itself."""
    CudaMeansCpu().__enter__()


def _stand_ins() -> dict[str, Any]:
    """Functions of `torch.cuda` that are asked for where there is no CUDA, and what to say."""
    # distributed/distributed_data_parallel.py, verl/utils/device.py
    nothing = ("synchronize", "empty_cache", "set_device", "reset_peak_memory_stats", "manual_seed_all")
    # verl/utils/profiler/performance.py logs them
    zero = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    return {
        # A function each: Dynamo tells functions of torch apart by identity
        **{name: (lambda *unused: None) for name in nothing},
        **{name: (lambda *unused: 0) for name in zero},
        "mem_get_info": lambda *unused: (1 << 34, 1 << 34),
        # models/common/embeddings/rotary_pos_embedding.py, transformer/multi_token_prediction.py, mbridge: as a device
        "current_device": lambda: "cpu",
    }


def _replace_cuda_functions() -> None:
    for name, function in _stand_ins().items():
        setattr(torch.cuda, name, function)
        # verl/utils/device.py of 0.8 takes torch.cpu for the device's module
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, function)
    # distributed/param_and_grad_buffer.py, transformer/moe/token_dispatcher.py: streams and events
    streams = {
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": lambda *unused: _Stream(),
        "default_stream": lambda *unused: _Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
    }
    for name, stand_in in streams.items():
        setattr(torch.cuda, name, stand_in)


def _mend_gloo() -> None:
    all_reduce, scatter = dist.all_reduce, dist.scatter

    def averaging(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        # transformer/multi_token_prediction.py and DDP average; gloo can only sum
        if op != dist.ReduceOp.AVG:
            return all_reduce(tensor, op=op, group=group, async_op=async_op)
        work = all_reduce(tensor, group=group)
        tensor.div_(dist.get_world_size(group))
        return work

    def contiguous(tensor: Any, scatter_list: Any = None, *args: Any, **kwargs: Any) -> Any:
        # mbridge scatters slices of weights; gloo sends the memory below a slice that is not contiguous
        return scatter(tensor, [part.contiguous() for part in scatter_list] if scatter_list else None, *args, **kwargs)

    dist.all_reduce = averaging
    dist.scatter = contiguous


def _leave_random_states_alone() -> None:
    # tensor_parallel/layers.py forks CUDA's random state; nothing here draws after the weights are loaded
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel import random

    random.CudaRNGStatesTracker.fork = lambda *unused, **also_unused: contextlib.nullcontext()
    for module in (random, tensor_parallel):
        module.model_parallel_cuda_manual_seed = lambda *unused, **also_unused: None


def _mend_router() -> None:
    # transformer/moe/moe_utils.py asks whether it is None, and defines it where Transformer Engine is installed only
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)


def cuda_like_module() -> types.SimpleNamespace:
    """What verl's platform asks of `torch.cuda`, for a CPU."""
    random_state = {
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
        "get_rng_state": torch.get_rng_state,
        "set_rng_state": torch.set_rng_state,
    }
    return types.SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 0, **{**_stand_ins(), **random_state}
    )  # fmt: skip
