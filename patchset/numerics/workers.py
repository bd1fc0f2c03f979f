"""verl's TrainingWorker in its own RayWorkerGroup, on CPU actors, against the same references."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import ray
from tensordict import TensorDict

from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
from verl.workers.utils.losses import sft_loss

from . import device, engine, models, reference
from .comparison import GRADIENT_LIMIT, LIMIT, Case, Difference, Topology, compare_number, compare_tokens

#: More than there are: a group of workers asks for whole ones, and the next one starts before the last has gone.
SLOTS = 32

_checkpoints: dict[str, Path] = {}


class CpuTrainingWorker(TrainingWorker):
    """A TrainingWorker whose process is made ready for a CPU first."""

    def __init__(self, config: Any) -> None:
        device.install()
        device.enter()
        models.install()
        # verl 0.8 looks for an engine of the device that torch has; 0.9 reads VERL_ENGINE_DEVICE
        for backends in EngineRegistry._engines.values():
            if "megatron" in backends:
                backends["megatron"].setdefault("cpu", backends["megatron"].get("cuda"))
        # verl would ask for gloo twice, once for the CPU and once for its platform
        initialize_global_process_group_ray(backend="gloo")
        # The configuration's own check has refused it on the way here
        object.__setattr__(config.engine_config, "dtype", "float32")
        super().__init__(config)


def cases(short: bool) -> list[Case]:
    """Two and four actors; the references hold for every way to split the work."""
    layouts = (
        (2, Topology(1), None, "actor"),
        (2, Topology(2), None, "actor"),
        (2, Topology(2), 64, "actor"),
        (2, Topology(2), 64, "reference"),
        (2, Topology(1, 2, True), 64, "actor"),
        (4, Topology(2), 100, "actor"),
        (4, Topology(2, 2, True), 64, "actor"),
    )
    found = []
    for actors, topology, bucket, role in layouts[2:3] if short else layouts:
        where = f"dp{actors // topology.world} {topology}"
        found.append(Case("ray", f"{role}, {actors} workers", 1, where, bucket, run, (actors, topology, role)))
    return found


def prepare(checkpoints: dict[str, Path]) -> None:
    """Remembers the checkpoints; the right values are those of the engine."""
    _checkpoints.update(checkpoints)
    if "actor" not in engine.truths:
        engine.prepare(checkpoints)


def run(case: Case) -> list[Difference]:
    """Infers, and trains one step, through a worker group."""
    actors, topology, role = case.options
    _start_ray()
    group = _group(actors, topology, case.bucket, forward_only=role == "reference")
    right = engine.truths["actor"]
    batch = engine.data(engine.MICRO_BATCH // topology.cp)
    log_probs = reference.labelled(tensordict_utils.get(_wait(group.infer_batch(batch)), "log_probs"))
    found = [compare_tokens("log-probs", log_probs, right.outputs, LIMIT)]
    if role == "actor":
        group.set_loss_fn(partial(sft_loss, None))
        told = _wait(group.train_batch(engine.data(engine.MICRO_BATCH // topology.cp)))
        metrics = tensordict_utils.get(told, "metrics")
        found.append(compare_number("loss", float(metrics["loss"]), right.losses[0], LIMIT))
        found.append(compare_number("grad norm", float(metrics["grad_norm"]), right.norms[0], GRADIENT_LIMIT))
    for worker in group.workers:
        ray.kill(worker)
    return found


def _start_ray() -> None:
    """Ray, once in a process; it ends with it."""
    if not ray.is_initialized():
        environment = device.environment(_tree()) | {"PYTHONPATH": os.environ["PYTHONPATH"]}
        ray.init(
            num_cpus=SLOTS, include_dashboard=False, log_to_driver=False, configure_logging=False,
            _temp_dir=tempfile.gettempdir(), runtime_env={"env_vars": environment},
        )  # fmt: skip


def _tree() -> Path:
    import verl

    return Path(verl.__file__).parent.parent


def _group(actors: int, topology: Topology, bucket: int | None, forward_only: bool) -> RayWorkerGroup:
    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=engine.model_config(_checkpoints[engine.KIND], "actor"),
        engine_config=engine.engine_config(
            topology, bucket, engine.MICRO_BATCH // topology.cp, forward_only=forward_only
        ),
        optimizer_config=engine.optimizer_config(),
        checkpoint_config=CheckpointConfig(),
    )
    group = RayWorkerGroup(
        resource_pool=RayResourcePool(process_on_nodes=[actors], use_gpu=False, max_colocate_count=1),
        ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(CpuTrainingWorker), config=config),
        device_name="cpu",
    )
    group.reset()
    return group


def _wait(answer: Any) -> TensorDict:
    return answer if isinstance(answer, TensorDict) else answer.get()
