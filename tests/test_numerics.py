"""The bench that compares training: its references, what it says of a difference, and that failures end."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
import torch

from patchset import REPOSITORY
from patchset.numerics import comparison, layout, reference, toys


def part(name: str):
    command = [sys.executable, "-W", "ignore", "-m", "tests.numerics_parts", name]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=200)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("cp", "rows"),
    [
        (1, [list(range(12))]),
        (2, [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]),
        (3, [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]),
        (6, [[0, 11], [1, 10], [2, 9], [3, 8], [4, 7], [5, 6]]),
    ],
)
def test_zigzag_of_twelve_rows(cp, rows):
    assert [layout.rows([0, 12], cp, rank)[1].tolist() for rank in range(cp)] == rows


def test_rows_of_two_sequences_and_who_holds_one():
    sequences, positions = layout.rows([0, 4, 12], 2, 1)
    assert (sequences.tolist(), positions.tolist()) == ([0, 0, 1, 1, 1, 1], [1, 2, 2, 3, 4, 5])
    assert layout.holder([0, 4, 12], 2, 1, 4) == (1, 4)
    assert layout.holder([0, 4, 12], 2, 1, 7) == (0, 5)
    with pytest.raises(ValueError, match="padded sequence 0 of 6 rows does not cut into 4 chunks"):
        layout.rows([0, 6], 2, 0)
    with pytest.raises(ValueError, match="no rank holds position 9 of sequence 1"):
        layout.holder([0, 4, 12], 2, 1, 9)


def test_attention_is_that_of_a_loop_over_rows_on_one_and_on_two_ranks():
    assert max(max(ranks) for ranks in part("attention")) < 1e-12


def test_what_raises_dies_or_hangs_ends_and_says_where():
    told = part("failures")
    assert told["raised"]["message"] == "rank 1: ValueError: this one"
    assert any("fail_on_the_last" in detail for detail in told["raised"]["details"])
    assert told["died"]["message"] == "rank 1: process ended with status 7"
    assert told["hung"]["message"] == "did not end within 2 s"
    assert "sleep_too_long" in told["hung"]["details"][0]
    assert all(failure["seconds"] < 15 for failure in told.values())


def test_a_difference_is_named_by_sequence_position_row_and_rank(monkeypatch):
    monkeypatch.setattr(comparison.mpu, "get_context_parallel_world_size", lambda: 2)
    want = [torch.zeros(3), torch.zeros(7)]
    got = [torch.zeros(3), torch.tensor([0, 0, 0, 0, 0.5, 2, 0])]
    found = comparison.compare_tokens("log-probs", got, want, 0.1, cu_seqlens=[0, 4, 12])
    assert (found.value, found.passed) == (2.0, False)
    assert found.where == "log-probs, sequence 1, position 4 (row 4 of CP rank 1): 0.5 for 0"
    assert comparison.compare_tokens("log-probs", got, want, 2.0).passed
    assert comparison.compare_tokens("x", [torch.tensor([math.nan])], [torch.zeros(1)], 1.0).value == math.inf
    assert comparison.compare_tokens("x", [torch.zeros(2)], [torch.zeros(3)], 1.0).value == math.inf


def test_weights_are_held_against_their_norm_and_the_first_is_named():
    want = {"a": torch.tensor([[3.0, 0], [0, 4]]), "tiny": torch.tensor([1e-9]), "b": torch.ones(4)}
    got = {"a": want["a"] + torch.tensor([[0, 0], [0.5, 0]]), "tiny": torch.tensor([2e-9]), "b": torch.zeros(4)}
    found = comparison.compare_weights("gradients", got, want, 0.01)
    assert found.value == 1.0
    assert found.where == "gradients of a, row 1: off by 0.1 of its norm"
    # 1e-9 off is nothing beside the largest norm of 5: a hundredth of that is what tiny ones are held against
    only = comparison.compare_weights("gradients", {**want, "tiny": got["tiny"]}, want, 1e-7)
    assert only.passed
    assert only.value == pytest.approx(1e-9 / 0.05)
    assert comparison.compare_weights("gradients", {"a": want["a"]}, want, 1.0).where == "gradients of b, tiny"
    broken = comparison.compare_weights("gradients", {**want, "b": want["b"] * math.nan}, want, 1.0)
    assert broken.value == math.inf


def test_numbers_are_relative_and_nan_never_passes():
    assert comparison.compare_number("loss", 101.0, 100.0, 0.02).value == pytest.approx(0.01)
    assert not comparison.compare_number("loss", math.nan, 1.0, 0.02).passed


@pytest.mark.parametrize("kind", toys.KINDS)
def test_references_have_the_checkpoints_names_and_weights(tmp_path, kind):
    from safetensors.torch import load_file

    checkpoint = toys.make(tmp_path, kind)
    written = load_file(checkpoint / "model.safetensors")
    named = reference.by_checkpoint_name(dict(reference.load(checkpoint).named_parameters()))
    assert named.keys() == written.keys()
    assert all(torch.equal(named[name].float(), written[name]) for name in written)


def test_log_probs_by_hand():
    # Two tokens, three words: log softmax of (0, log 2, log 5) is log(1/8, 2/8, 5/8)
    logits = torch.tensor([[0.0, math.log(2), math.log(5)]] * 2, dtype=torch.float64)
    log_probs, entropies = reference.log_probs_of(logits, torch.tensor([0, 2]))
    assert log_probs.tolist() == pytest.approx([math.log(5 / 8), 0])
    by_hand = -sum(p * math.log(p) for p in (1 / 8, 2 / 8, 5 / 8))
    assert entropies.tolist() == pytest.approx([by_hand] * 2)


@pytest.mark.timeout(600)
def test_an_unpatched_tree_is_red_where_it_should_be(pristine, tmp_path):
    file, tree = tmp_path / "found.json", str(pristine("0.9.0"))
    command = [sys.executable, "-m", "patchset", "numerics", "--tree", tree, "--short", "--only", "forward"]
    done = subprocess.run([*command, "--json", str(file)], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    results = json.loads(file.read_text())["results"]
    red = {(result["topology"], result["bucket"]) for result in results if not result["passed"]}
    assert red == {("cp2 tp1", 100), ("cp2 tp2 sp", 100)}
    assert "FAIL forward qwen3, cp2 tp1, bucket 100: rank " in done.stdout
    assert "RuntimeError" in done.stdout


def test_trees_and_options_that_cannot_be_used_are_told_in_one_line(cli, tmp_path):
    status, _, err = cli("numerics", "--tree", tmp_path)
    assert (status, err.count("\n")) == (2, 1)
    assert "holds no verl/" in err
    status, _, err = cli("numerics", "--tree", tmp_path, "--unpatched")
    assert (status, err.count("\n")) == (2, 1)
    assert "--unpatched goes with --pin" in err
