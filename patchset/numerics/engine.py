"""verl's whole Megatron engine, from a checkpoint through inference and training to exported weights."""

from __future__ import annotations

import dataclasses
import gc
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from tensordict import TensorDict

from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead, MegatronEngineWithValueHead
from verl.workers.utils.losses import sft_loss

from . import models, reference, toys
from .comparison import (
    GRADIENT_LIMIT,
    LIMIT,
    Case,
    Difference,
    Topology,
    compare_number,
    compare_tokens,
    compare_weights,
)
from .reference import TEMPERATURE, Batch

#: (length, tokens of it that are a response) of every sequence.
SEQUENCES = ((9, 4), (21, 13), (6, 3), (33, 20), (14, 9), (25, 11))
#: Tokens of a micro-batch, over all CP ranks: three micro-batches of different lengths.
MICRO_BATCH = 48
STEPS, LEARNING_RATE, CLIP = 2, 1e-3, 1.0
#: Of what training adds to each weight, relative to it; float32 rounds a norm's weight to 6e-5 of what is added.
UPDATE_LIMIT = 1e-4
#: Large enough that a gradient that is rounding noise moves no weight by a whole step.
ADAM_EPSILON = 1e-4
BUCKETS = (None, 64, 100, 512)
KIND = "qwen3"

_checkpoints: dict[str, Path] = {}
truths: dict[str, Truth] = {}


@dataclass(frozen=True)
class Machine:
    """What engines run on, and how near to the right values they come there.

    Args:
        dtype: of weights and activations.
        transformer: settings of Megatron-Core's model.
        limit, gradient_limit, update_limit: largest differences; no limit for what the dtype is too coarse for.
    """

    dtype: str
    transformer: dict[str, Any]
    limit: float
    gradient_limit: float
    update_limit: float | None


CPU = Machine("float32", models.CPU_CONFIG, LIMIT, GRADIENT_LIMIT, UPDATE_LIMIT)


@dataclass(frozen=True)
class Variant:
    """Ways to train that have the same right values.

    Args:
        distributed_optimizer: the optimizer's state is split over the ranks.
        per_token_loss: Megatron sums gradients over tokens and divides once, instead of averaging over ranks.
    """

    distributed_optimizer: bool = False
    per_token_loss: bool = False


@dataclass(frozen=True)
class Truth:
    """Right values of a training run: outputs before it, loss and gradient norm of every step, what weights gain."""

    outputs: list[torch.Tensor]
    losses: list[float]
    norms: list[float]
    updates: dict[str, torch.Tensor]


def cases(short: bool) -> list[Case]:
    """Actor and critic on every topology and bucket, each with several micro-batches."""
    topologies = (Topology(2), Topology(2, 2, True)) if short else (
        Topology(1), Topology(2), Topology(1, 2, True), Topology(2, 2, True),
    )  # fmt: skip
    found = [
        Case("engine", head, topology.world, topology, bucket, run, (head, Variant()))
        for topology in topologies
        for bucket in ((None, 100) if short else BUCKETS)
        for head in ("actor", "critic")
    ]
    two = Topology(2)
    split = Variant(distributed_optimizer=True)
    found.append(Case("engine", "actor, distributed optimizer", two.world, two, 64, run, ("actor", split)))
    if counts_tokens():
        per_token = Variant(per_token_loss=True)
        for topology in (two,) if short else (Topology(1), two, Topology(2, 2, True)):
            case = Case("engine", "actor, per-token loss", topology.world, topology, 64, run, ("actor", per_token))
            found.append(case)
    return found


def counts_tokens() -> bool:
    """Whether the tree's engine can sum gradients over tokens; 0.9 on can."""
    return hasattr(MegatronEngineWithLMHead, "_routed_num_tokens")


def prepare(checkpoints: dict[str, Path]) -> None:
    """Trains the references."""
    _checkpoints.update(checkpoints)
    for head in ("actor", "critic"):
        truths[head] = truth(checkpoints[KIND], head)


def batch() -> tuple[Batch, list[torch.Tensor], list[torch.Tensor]]:
    """The batch, its loss masks over whole sequences, and the values that a critic is to learn."""
    made = Batch.of(tuple(length for length, _ in SEQUENCES), toys.VOCABULARY, seed=5)
    masks = [torch.arange(length) >= length - response for length, response in SEQUENCES]
    return made, masks, [weight.float() for weight in made.weights]


def value_head() -> torch.Tensor:
    """Weights of the critic's head, [1, hidden]: no checkpoint has them."""
    return torch.randn(1, 64, generator=torch.Generator().manual_seed(11)) / 8


def truth(checkpoint: Path, head: str) -> Truth:
    """The same training with Hugging Face's model and torch's Adam, in float64, a sequence at a time."""
    model = reference.load(checkpoint)
    if head == "critic":
        model.lm_head = torch.nn.Linear(64, 1, bias=False, dtype=torch.float64)
        model.lm_head.weight.data = value_head().double()
    before = _named(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=ADAM_EPSILON, weight_decay=0)
    made, masks, targets = batch()
    count = sum(mask.sum() for mask in masks)
    first, losses, norms = [], [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for ids, mask, target in zip(made.ids, masks, targets, strict=True):
            logits = model(input_ids=ids[None]).logits[0]
            if head == "critic":
                output = logits[:, 0]
                total = total + ((output - target) ** 2 * mask).sum() / count
            else:
                output, _ = reference.log_probs_of(logits / TEMPERATURE, ids)
                # A log-prob belongs to the token that it predicts
                total = total - (output[:-1] * mask[1:]).sum() / count
            if step == 0:
                first.append(output.detach())
        total.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        losses.append(total.item())
        optimizer.step()
    return Truth(first, losses, norms, _gained(_named(model), before))


def _named(model: Any) -> dict[str, torch.Tensor]:
    return reference.by_checkpoint_name(dict(model.named_parameters()))


def _exported(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in engine.bridge.export_weights(engine.module)}


def _gained(after: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: after[name] - before[name] for name in before}


def value_loss(model_output: Any, data: TensorDict, dp_group: Any = None) -> tuple[torch.Tensor, dict[str, Any]]:
    """Squared error of the values, as a mean over the loss tokens of the whole batch."""
    apart = (model_output["values"].values() - data["targets"].values()) ** 2
    loss = (apart * data["loss_mask"].values()).sum() / data["batch_num_tokens"] * data["dp_size"]
    return loss, {}


def data(micro_batch: int) -> TensorDict:
    """The batch as verl hands it to an engine, with dynamic batch sizes.

    Args:
        micro_batch: most tokens of a micro-batch on one rank.
    """
    made, masks, targets = batch()
    fields = {
        "input_ids": made.nested(),
        "loss_mask": torch.nested.as_nested_tensor(masks, layout=torch.jagged),
        "targets": torch.nested.as_nested_tensor(targets, layout=torch.jagged),
        "temperature": torch.full((len(SEQUENCES),), TEMPERATURE),
    }
    found = TensorDict(fields, batch_size=[len(SEQUENCES)])
    tensordict_utils.assign_non_tensor(
        found, use_dynamic_bsz=True, max_token_len_per_gpu=micro_batch, use_fused_kernels=False,
        global_batch_size=len(SEQUENCES), calculate_entropy=False,
    )  # fmt: skip
    return found


def engine_config(
    topology: Topology, bucket: int | None, micro_batch: int, machine: Machine = CPU, **more: Any
) -> McoreEngineConfig:
    """An engine's configuration for a machine."""
    padding = {"pad_to_length": True, "pad_to_length_bucket": bucket} if bucket else {}
    found = McoreEngineConfig(
        tensor_model_parallel_size=topology.tp, context_parallel_size=topology.cp, sequence_parallel=topology.sp,
        use_remove_padding=True, use_dynamic_bsz=True, max_token_len_per_gpu=micro_batch,
        infer_max_token_len_per_gpu=micro_batch, vanilla_mbridge=True, param_offload=False, optimizer_offload=False,
        override_transformer_config=dict(machine.transformer), **padding, **more,
    )  # fmt: skip
    # The configuration admits bfloat16 and float16 alone, in which a CPU could compare nothing
    object.__setattr__(found, "dtype", machine.dtype)
    return found


def optimizer_config() -> McoreOptimizerConfig:
    """Adam as the reference has it."""
    return McoreOptimizerConfig(
        lr=LEARNING_RATE, clip_grad=CLIP, weight_decay=0.0, lr_warmup_steps=0, lr_decay_steps=10,
        total_training_steps=10, override_optimizer_config={"adam_eps": ADAM_EPSILON},
    )  # fmt: skip


def model_config(checkpoint: Path, head: str) -> HFModelConfig:
    """The checkpoint as verl's model configuration."""
    found = HFModelConfig(path=str(checkpoint), override_config={"attn_implementation": "eager"})
    if head == "critic":
        object.__setattr__(found, "model_type", "value_model")
    return found


def run(case: Case) -> list[Difference]:
    """Trains on this CPU, as one rank of the case's topology."""
    head, variant = case.options
    assert isinstance(case.topology, Topology)
    return train(CPU, _checkpoints[KIND], head, case.topology, case.bucket, truths[head], variant)


def train(
    machine: Machine, checkpoint: Path, head: str, topology: Topology, bucket: int | None, right: Truth,
    variant: Variant,
) -> list[Difference]:  # fmt: skip
    """Builds an engine, infers, trains, exports, and holds all of it against the reference.

    Args:
        head: "actor" or "critic".
    """
    micro_batch = MICRO_BATCH // topology.cp
    if variant.per_token_loss:
        transformer = {**machine.transformer, "calculate_per_token_loss": True}
        machine = dataclasses.replace(machine, transformer=transformer)
    kind = MegatronEngineWithValueHead if head == "critic" else MegatronEngineWithLMHead
    engine = kind(
        model_config(checkpoint, head),
        engine_config(topology, bucket, micro_batch, machine, use_distributed_optimizer=variant.distributed_optimizer),
        optimizer_config(),
        CheckpointConfig(),
    )
    engine.initialize()
    if head == "critic":
        unwrap_model(engine.module[0]).output_layer.weight.data.copy_(value_head())
    before = _exported(engine)
    found = _infer_and_step(engine, head, micro_batch, machine, right)
    if machine.update_limit is not None:
        gained = _gained(_exported(engine), before)
        found.append(compare_weights("updates", gained, right.updates, machine.update_limit))
    # What an engine holds refers to itself
    del engine
    gc.collect()
    return found


def _infer_and_step(engine: Any, head: str, micro_batch: int, machine: Machine, right: Truth) -> list[Difference]:
    key, loss = ("values", value_loss) if head == "critic" else ("log_probs", partial(sft_loss, None))
    with engine.eval_mode():
        output = engine.infer_batch(data(micro_batch))["model_output"][key]
    outputs = list(output.unbind()) if head == "critic" else reference.labelled(output)
    name = "values" if head == "critic" else "log-probs"
    found = [compare_tokens(name, outputs, right.outputs, machine.limit)]
    with engine.train_mode():
        for step in range(STEPS):
            told = engine.train_batch(data(micro_batch), loss)
            if len(told["loss"]) < 2:
                raise RuntimeError("the batch was to be split into micro-batches of different lengths, and was not")
            found.append(compare_number("loss", sum(told["loss"]), right.losses[step], machine.limit))
            if engine.is_mp_src_rank_with_outputs():
                norm = float(told["metrics"]["grad_norm"])
                found.append(compare_number("grad norm", norm, right.norms[step], machine.gradient_limit))
    return found
