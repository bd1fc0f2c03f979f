"""What the right values are: Hugging Face's models, one sequence at a time, in float64. Nothing of verl or Megatron."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

#: All log-probs are taken at this temperature, so that one that is ignored shows.
TEMPERATURE = 0.7

#: How much the entropy counts in the loss whose gradients are compared.
ENTROPY_WEIGHT = 0.1


@dataclass(frozen=True)
class Batch:
    """Sequences of one micro-batch.

    Args:
        lengths: of every sequence, in tokens.
        ids: tokens of every sequence.
        weights: weight of every token's log-prob in the loss; 0 for the last of a sequence, which has no label.
    """

    lengths: tuple[int, ...]
    ids: tuple[torch.Tensor, ...]
    weights: tuple[torch.Tensor, ...]

    @staticmethod
    def of(lengths: tuple[int, ...], vocabulary: int, seed: int = 0) -> Batch:
        """A batch drawn from a seed."""
        draw = torch.Generator().manual_seed(seed)
        ids = tuple(torch.randint(4, vocabulary, (length,), generator=draw) for length in lengths)
        weights = tuple(torch.randn(length, generator=draw, dtype=torch.float64) for length in lengths)
        for weight in weights:
            weight[-1] = 0
        return Batch(lengths, ids, weights)

    def nested(self) -> torch.Tensor:
        """The tokens as a jagged tensor."""
        return torch.nested.as_nested_tensor(list(self.ids), layout=torch.jagged)

    def temperatures(self) -> torch.Tensor:
        """The temperature of every token as a jagged tensor, float32."""
        rows = [torch.full((length,), TEMPERATURE) for length in self.lengths]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


@dataclass(frozen=True)
class Truth:
    """Right values of one batch: per sequence log-probs and entropies, float64 [length]; gradients by weight name.

    The last log-prob of a sequence, which has no label, is zero.
    """

    log_probs: list[torch.Tensor]
    entropies: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]


def load(checkpoint: Path) -> PreTrainedModel:
    """The model of a checkpoint in float64, without dropout."""
    # The loops, not the kernels: those want float32
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64, **eager).train()


def log_probs_of(logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of the next token and entropy at every position of one sequence.

    Args:
        logits: [S, vocabulary], after the temperature.
        ids: [S].
    """
    all_log_probs = torch.log_softmax(logits, -1)
    following = torch.cat([ids[1:], ids[:1]])
    log_probs = all_log_probs.gather(-1, following.unsqueeze(-1)).squeeze(-1)
    last = torch.arange(len(ids)) == len(ids) - 1
    return log_probs.masked_fill(last, 0), -(all_log_probs.exp() * all_log_probs).sum(-1)


def labelled(log_probs: torch.Tensor) -> list[torch.Tensor]:
    """Log-probs of every sequence of a jagged tensor, with zero for its last token, which has no label."""
    return [torch.cat([values[:-1], values.new_zeros(1)]) for values in log_probs.unbind()]


def truth(model: PreTrainedModel, batch: Batch) -> Truth:
    """Right values of a batch, for the loss of :func:`loss`."""
    model.zero_grad()
    pairs = [log_probs_of(model(input_ids=ids[None]).logits[0] / TEMPERATURE, ids) for ids in batch.ids]
    log_probs, entropies = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    loss(batch, log_probs, entropies).backward()
    return Truth([x.detach() for x in log_probs], [x.detach() for x in entropies], gradients(model))


def loss(batch: Batch, log_probs: list[torch.Tensor], entropies: list[torch.Tensor]) -> torch.Tensor:
    """A weighted mean over the tokens of a batch: every log-prob and entropy has a weight of its own."""
    parts = zip(batch.weights, log_probs, entropies, strict=True)
    weighted = torch.stack([(w * (lp + ENTROPY_WEIGHT * e)).sum() for w, lp, e in parts])
    return -weighted.sum() / sum(batch.lengths)


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Gradients under the names that the checkpoint has, experts one by one."""
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return by_checkpoint_name(found)


def by_checkpoint_name(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Values of parameters under the names that the checkpoint has: Transformers holds all experts in one tensor."""
    found = {}
    for name, value in values.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[name] = value.detach().clone()
            continue
        stem, kind = name.rsplit(".", 1)
        for number, matrix in enumerate(value.detach()):
            parts = {"down_proj": matrix}
            if kind == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
            found |= {f"{stem}.{number}.{part}.weight": part_value.clone() for part, part_value in parts.items()}
    return found
