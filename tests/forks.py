"""Small edits as forks make them, each with what has to come of it, stated by hand."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

UTIL, FORWARD = "verl/models/mcore/util.py", "verl/models/mcore/model_forward.py"
FUSED, MTP = "verl/models/mcore/model_forward_fused.py", "verl/models/mcore/mtp_patch.py"
REGISTRY, ENGINE = "verl/models/mcore/registry.py", "verl/workers/engine/megatron/transformer_impl.py"
CONFIG, YAML = "verl/workers/config/engine.py", "verl/trainer/config/engine/megatron.yaml"
REF = "verl/trainer/config/ref/megatron_ref.yaml"

LANDS, CONFLICT = "lands", "conflict"
OLD = ("0.7.1", "0.8.0")


@dataclass(frozen=True)
class Edit:
    """One edit of a fork.

    Attributes:
        name: of the case.
        file: the edited file.
        change: text of the file -> edited text; the same text where the tree has no such place.
        kept: what has to stand in the file after an apply that lands.
        layout, loop: outcome with everything chosen, and without the layout; a conflict has to name `kept`, or `named`.
        named: what a conflict has to name where the edit itself is no line of its own.
        but: outcomes that differ, by pin: (layout, loop).
    """

    name: str
    file: str
    change: Callable[[str], str]
    kept: str
    layout: str
    loop: str
    named: str = ""
    but: tuple[tuple[str, tuple[str, str]], ...] = ()

    def outcome(self, pin: str, loop: bool) -> str:
        """What has to come of it on a pin."""
        return dict(self.but).get(pin, (self.layout, self.loop))[loop]


def within(start: str, change: Callable[[str], str]) -> Callable[[str], str]:
    """A change of one top-level function, whose `def` line matches `start`."""

    def changed(text: str) -> str:
        found = re.search(
            rf"^(?:def|class) {start}.*?(?=^\S(?!.*->)(?!\)))", text + "\nend\n", re.DOTALL | re.MULTILINE
        )
        assert found is not None, start
        return text[: found.start()] + change(found[0]) + text[found.end() :]

    return changed


def after(pattern: str, line: str) -> Callable[[str], str]:
    """A line of the fork's own below the first line that matches, indented alike."""

    def changed(text: str) -> str:
        found = re.search(rf"^( *){pattern}.*\n", text, re.MULTILINE)
        return text[: found.end()] + f"{found[1]}{line}\n" + text[found.end() :] if found else text

    return changed


def before(pattern: str, line: str) -> Callable[[str], str]:
    """The same above it."""

    def changed(text: str) -> str:
        found = re.search(rf"^( *){pattern}", text, re.MULTILINE)
        return text[: found.start()] + f"{found[1]}{line}\n" + text[found.start() :] if found else text

    return changed


def swap(old: str, new: str, count: int = 1) -> Callable[[str], str]:
    """Plain text for other text."""
    return lambda text: text.replace(old, new, count)


def sub(pattern: str, new: str, count: int = 0) -> Callable[[str], str]:
    """What matches for other text."""
    return lambda text: re.sub(pattern, new, text, count=count, flags=re.MULTILINE)


def _pack(*changes: Callable[[str], str]) -> Callable[[str], str]:
    def changed(text: str) -> str:
        for change in changes:
            text = within("preprocess_thd_", change)(text)
        return text

    return changed


def _unpack(change: Callable[[str], str]) -> Callable[[str], str]:
    return within("postprocess_thd_", change)


def _forward(change: Callable[[str], str]) -> Callable[[str], str]:
    return within("gptmodel_forward_(no_padding|model_engine)", change)


def _fused(change: Callable[[str], str]) -> Callable[[str], str]:
    return within("fused_forward_(no_padding_gen|model_engine)", change)


_CUSTOM = """

def our_forward(model, input_ids, multi_modal_inputs, logits_processor=None, logits_processor_args=None,
                value_model=False, vision_model=False, pad_token_id=None, data_format="thd", mtp_enable_train=False,
                local_cp_size=None, enable_mtp=False{more}):
    return model(input_ids)
"""


def _own_forward(more: str) -> Callable[[str], str]:
    def changed(text: str) -> str:
        getter = re.search(r"def (get_mcore_(?:engine_forward|forward_no_padding)_fn)\(hf_config\)", text)
        assert getter is not None
        at = text.index("return gptmodel_forward_", getter.end())
        indent = " " * (at - text.rindex("\n", 0, at) - 1)
        own = f'if "Ours" in hf_config.architectures:\n{indent}    return our_forward\n{indent}'
        text = text[:at] + own + text[at:]
        return text[: getter.start()] + _CUSTOM.format(more=more).lstrip("\n") + "\n\n" + text[getter.start() :]

    return changed


#: The packer's body below its sizes is replaced by the layout; small edits leave all of it.
EDITS = [
    # Lines of the fork's own inside the packer
    Edit(
        "alignment-times-64",
        UTIL,
        _pack(after("align_size = tp_size", "align_size = align_size * 64")),
        "align_size = align_size * 64",
        CONFLICT,
        LANDS,
    ),
    Edit(
        "clamped-lengths",
        UTIL,
        _pack(
            after(
                "seqlens_in_batch_padded = seqlens_in_batch \\+",
                "seqlens_in_batch_padded = seqlens_in_batch_padded.clamp(min=16)",
            )
        ),
        "seqlens_in_batch_padded = seqlens_in_batch_padded.clamp(min=16)",
        CONFLICT,
        LANDS,
    ),
    Edit(
        "clamped-ids",
        UTIL,
        _pack(swap("+ seqlen] = input_ids[i]\n", "+ seqlen] = input_ids[i].clamp(min=0)\n")),
        "input_ids[i].clamp(min=0)",
        CONFLICT,
        LANDS,
    ),
    Edit(
        "offset-positions",
        UTIL,
        _pack(
            sub(
                r"^( +)seqlen, dtype=torch.long, device=input_ids.device$",
                r"\g<1>2, seqlen + 2, dtype=torch.long, device=input_ids.device",
            )
        ),
        "2, seqlen + 2, dtype=torch.long",
        CONFLICT,
        LANDS,
        "position_ids_rmpad[start_idx : start_idx + seqlen]",
    ),
    Edit(
        "print-in-loop",
        UTIL,
        _pack(after("d = input_ids\\[i\\]$", "print(d.shape)")),
        "print(d.shape)",
        CONFLICT,
        LANDS,
    ),
    Edit(
        "fp8-condition",
        UTIL,
        _pack(sub(r"^    if use_fp8_padding:$", "    if use_fp8_padding and cp_size > 1:", 1)),
        "if use_fp8_padding and cp_size > 1:",
        CONFLICT,
        LANDS,
    ),
    Edit(
        "statement-at-the-end-of-packing",
        UTIL,
        _pack(
            before("packed_seq_params = PackedSeqParams", "    input_ids_rmpad = input_ids_rmpad.contiguous()  # ours")
        ),
        "input_ids_rmpad = input_ids_rmpad.contiguous()",
        CONFLICT,
        LANDS,
        but=(("0.9.0", (LANDS, LANDS)), ("0.9.1", (LANDS, LANDS))),
    ),
    Edit(
        "wrapped-zeros",
        UTIL,
        _pack(swap("input_ids_rmpad = torch.zeros(shape,", "input_ids_rmpad = torch.zeros(list(shape),")),
        "torch.zeros(list(shape)",
        CONFLICT,
        LANDS,
    ),
    Edit(
        "extra-keyword-inside",
        UTIL,
        _pack(
            swap(
                "cu_seqlens = torch.zeros(batch_size + 1, dtype=torch.int32,",
                "cu_seqlens = torch.zeros(batch_size + 1, pin_memory=False, dtype=torch.int32,",
            )
        ),
        "pin_memory=False",
        CONFLICT,
        LANDS,
    ),
    Edit(
        "no-type-hint",
        UTIL,
        _pack(swap("seqlens_in_batch_cpu: list[int] =", "seqlens_in_batch_cpu =")),
        "seqlens_in_batch_cpu =",
        CONFLICT,
        LANDS,
    ),
    Edit(
        "other-type-hint",
        UTIL,
        _pack(swap("seqlens_in_batch_cpu: list[int] =", "seqlens_in_batch_cpu: list =")),
        "seqlens_in_batch_cpu: list =",
        CONFLICT,
        LANDS,
    ),
    Edit(
        "moved-statement",
        UTIL,
        _pack(sub(r"^(    max_seqlen_in_batch = .*\n)\n(    shape = .*\n)", r"\2\n\1")),
        "max_seqlen_in_batch = max",
        CONFLICT,
        LANDS,
        named="shape = list(",
    ),
    Edit(
        "renamed-local",
        UTIL,
        _pack(sub(r"\bhalf_seqlen\b", "half")),
        "half = seqlen // 2",
        CONFLICT,
        CONFLICT,
        named=UTIL,
    ),
    Edit(
        "renamed-everywhere",
        UTIL,
        _pack(sub(r"\balign_size\b", "alignment")),
        "alignment = ",
        CONFLICT,
        CONFLICT,
        named=UTIL,
    ),
    Edit(
        "dropped-statement",
        UTIL,
        _pack(sub(r"^    cu_seqlens\[1:\] = .*\n", "")),
        "cu_seqlens_padded[1:]",
        CONFLICT,
        LANDS,
        named="cu_seqlens_padded = torch.zeros",
    ),
    # What comes after the packer's body reads of it
    Edit(
        "total-after-the-loop",
        UTIL,
        _pack(before("packed_seq_params = PackedSeqParams", "total_tokens = sum(seqlens_in_batch_cpu)")),
        "total_tokens = sum(seqlens_in_batch_cpu)",
        CONFLICT,
        LANDS,
        named="seqlens_in_batch_cpu",
    ),
    Edit(
        "boundaries-after-the-loop",
        UTIL,
        _pack(before("packed_seq_params = PackedSeqParams", "last = cu_seqlens_padded_cpu[-1]")),
        "last = cu_seqlens_padded_cpu[-1]",
        CONFLICT,
        LANDS,
        named="cu_seqlens_padded_cpu",
    ),
    Edit(
        "real-boundaries",
        UTIL,
        _pack(swap("cu_seqlens_q=cu_seqlens_padded", "cu_seqlens_q=cu_seqlens")),
        "cu_seqlens_q=cu_seqlens,",
        CONFLICT,
        LANDS,
        named="cu_seqlens",
    ),
    Edit(
        "padded-boundaries-after-the-loop",
        UTIL,
        _pack(before("packed_seq_params = PackedSeqParams", "total = cu_seqlens_padded[-1]")),
        "total = cu_seqlens_padded[-1]",
        LANDS,
        LANDS,
    ),
    # Around it
    Edit("print-before", UTIL, _pack(after("tp_size = mpu", "print(tp_size)")), "print(tp_size)", LANDS, LANDS),
    Edit(
        "early-return",
        UTIL,
        _pack(before("batch_size = input_ids.shape", "if input_ids.numel() == 0:\n        raise ValueError('empty')")),
        "raise ValueError('empty')",
        LANDS,
        LANDS,
    ),
    Edit(
        "more-metadata",
        UTIL,
        _pack(swap('qkv_format="thd",', 'qkv_format="thd",\n        pad_between_seqs=True,')),
        "pad_between_seqs=True",
        LANDS,
        LANDS,
    ),
    Edit("docstring", UTIL, _pack(swap('"""', '"""Ours.\n\n    ', 1)), "Ours.", LANDS, LANDS),
    Edit(
        "parameter-with-type",
        UTIL,
        _pack(sub(r",?\n?\) -> tuple", ",\n    ours: bool = False,\n) -> tuple", 1)),
        "ours: bool = False",
        LANDS,
        LANDS,
    ),
    Edit(
        "parameter-without-type",
        UTIL,
        _pack(sub(r",?\n?\) -> tuple", ",\n    ours=None,\n) -> tuple", 1)),
        "ours=None",
        LANDS,
        LANDS,
    ),
    Edit(
        "function-beside",
        UTIL,
        before("def preprocess_thd_", "def ours():\n    return 1\n\n"),
        "def ours():",
        LANDS,
        LANDS,
    ),
    Edit("decorator", UTIL, before("def preprocess_thd_", "@torch.no_grad()"), "@torch.no_grad()", LANDS, LANDS),
    Edit(
        "comment-inside",
        UTIL,
        _pack(before("seqlens_in_batch_padded = seqlens", "# OURS-1234: mind the ring buffer")),
        "# OURS-1234: mind the ring buffer",
        LANDS,
        LANDS,
    ),
    Edit("comment-beside", UTIL, _pack(sub(r"^(    pad_size = .*)$", r"\1  # OURS-77", 1)), "# OURS-77", LANDS, LANDS),
    # The unpacker
    Edit(
        "unpacked-contiguous",
        UTIL,
        _unpack(swap("output_new.append(tmp[:s_len])", "output_new.append(tmp[:s_len].contiguous())")),
        "tmp[:s_len].contiguous()",
        CONFLICT,
        LANDS,
    ),
    Edit(
        "unpacker-counts",
        UTIL,
        _unpack(after("output_list = \\[output\\]", "assert len(output_list) == 1")),
        "assert len(output_list) == 1",
        CONFLICT,
        LANDS,
    ),
    Edit(
        "unpacker-early",
        UTIL,
        _unpack(before("if not post_process", "assert output is not None")),
        "assert output is not None",
        LANDS,
        LANDS,
    ),
    # Forward functions
    Edit(
        "model-keyword",
        FORWARD,
        _forward(
            swap(
                "packed_seq_params=packed_seq_params,\n            **model_kwargs",
                "packed_seq_params=packed_seq_params,\n            ours=1,\n            **model_kwargs",
            )
        ),
        "ours=1,",
        LANDS,
        LANDS,
    ),
    Edit("forward-parameter", FORWARD, _forward(sub(r"^\):", "    ours=None,\n):", 1)), "ours=None,", LANDS, LANDS),
    Edit(
        "wrapped-argument",
        FORWARD,
        _forward(swap("use_fp8_padding=use_fp8_padding", "use_fp8_padding=bool(use_fp8_padding)")),
        "use_fp8_padding=bool(use_fp8_padding)",
        LANDS,
        LANDS,
    ),
    Edit(
        "statement-in-mtp-loop",
        FORWARD,
        _forward(after("v = logits_processor_args\\[k\\]", "print(k)")),
        "print(k)",
        LANDS,
        LANDS,
    ),
    Edit(
        "renamed-loop-variable",
        FORWARD,
        _forward(swap('for k in ["label", "loss_mask"]:', 'for key in ["label", "loss_mask"]:')),
        "for key in",
        CONFLICT,
        CONFLICT,
        named="mask-does-not-wrap",
    ),
    Edit(
        "own-positions",
        FORWARD,
        _forward(
            sub(
                r"position_ids=position_ids_rmpad if [^#\n]* else None",
                "position_ids=position_ids_rmpad if our_models(model) else None",
            )
        ),
        "our_models(model)",
        CONFLICT,
        CONFLICT,
    ),
    Edit(
        "comment-on-positions",
        FORWARD,
        _forward(sub(r"(position_ids=position_ids_rmpad if .* else None,).*$", r"\1  # OURS-9: see the wiki")),
        "# OURS-9: see the wiki",
        CONFLICT,
        CONFLICT,
    ),
    Edit(
        "another-packing-call",
        FORWARD,
        _forward(before("args = \\{\\}$", "ours = preprocess_thd_engine(input_ids, pre_process=True)")),
        "preprocess_thd_engine(input_ids, pre_process=True)",
        CONFLICT,
        CONFLICT,
        but=(("0.7.1", (LANDS, LANDS)),),
    ),
    Edit(
        "fused-parameter",
        FUSED,
        _fused(sub(r"^    \):", "        ours: int = 1,\n    ):", 1)),
        "ours: int = 1,",
        LANDS,
        LANDS,
    ),
    Edit(
        "fused-statement",
        FUSED,
        _fused(after("input_ids_rmpad = input_ids_rmpad.contiguous", "print(input_ids_rmpad.shape)")),
        "print(input_ids_rmpad.shape)",
        LANDS,
        LANDS,
    ),
    # MTP
    Edit(
        "mtp-statement",
        MTP,
        after("mtp_loss = loss_mask \\* mtp_loss", "print(mtp_loss)"),
        "print(mtp_loss)",
        LANDS,
        LANDS,
    ),
    Edit(
        "mtp-own-scale",
        MTP,
        sub(r"mtp_loss / safe_num_tokens|/ num_tokens_safe", lambda m: m[0] + " * 2"),
        "* 2",
        CONFLICT,
        CONFLICT,
        named="mtp_patch",
        but=(("0.7.1", (LANDS, LANDS)), ("0.8.0", (LANDS, LANDS))),
    ),
    # Registry, engine, configs
    Edit(
        "own-forward",
        REGISTRY,
        _own_forward(""),
        "return our_forward",
        CONFLICT,
        CONFLICT,
        named="our_forward",
        but=(("0.9.0", (LANDS, LANDS)), ("0.9.1", (LANDS, LANDS))),
    ),
    Edit("own-forward-that-takes-all", REGISTRY, _own_forward(", **kwargs"), "return our_forward", LANDS, LANDS),
    Edit(
        "engine-keyword",
        ENGINE,
        swap("logits_processor=logits_processor,", "logits_processor=logits_processor,\n                **self.ours,"),
        "**self.ours",
        LANDS,
        LANDS,
    ),
    Edit(
        "engine-statement",
        ENGINE,
        before("use_fused_kernels = tu\\.", "print(batch)"),
        "print(batch)",
        LANDS,
        LANDS,
    ),
    Edit(
        "config-field", CONFIG, after("use_distributed_optimizer: bool", "ours: int = 3"), "ours: int = 3", LANDS, LANDS
    ),
    Edit(
        "config-own-check",
        CONFIG,
        after("assert self.dtype in", "assert self.seed >= 0"),
        "assert self.seed >= 0",
        LANDS,
        LANDS,
    ),
    Edit("yaml-key", YAML, lambda text: text + "\nours: 5\n", "ours: 5", LANDS, LANDS),
    Edit("yaml-comment", YAML, lambda text: "# ours\n" + text, "# ours", LANDS, LANDS),
    # Form alone
    Edit("crlf", UTIL, lambda text: text.replace("\n", "\r\n"), "\r\n", LANDS, LANDS),
]
