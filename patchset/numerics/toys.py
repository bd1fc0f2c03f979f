"""Small Hugging Face checkpoints, made on the spot from configurations; nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 96

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Large enough for attention and every weight to matter to the log-probs
    "initializer_range": 0.1,
    "use_cache": False,
}

_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3-moe": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
}

KINDS = tuple(_KINDS)


def make(folder: Path, kind: str) -> Path:
    """Writes a float32 checkpoint with its tokenizer and returns its folder.

    Args:
        folder: where to put it.
        kind: one of KINDS: attention with biases, with normalised queries and keys, or with experts as well.
    """
    name, more = _KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**_SHAPE, **more)
    torch.manual_seed(7)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Their initial ones and zeros would hide a norm or bias that is left out
            if "norm" in parameter_name:
                parameter.normal_(1, 0.1)
            elif "bias" in parameter_name:
                parameter.normal_(0, 0.1)
    target = folder / kind
    model.save_pretrained(target)
    _tokenizer().save_pretrained(target)
    return target


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    words = special + [f"t{number}" for number in range(len(special), VOCABULARY)]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
