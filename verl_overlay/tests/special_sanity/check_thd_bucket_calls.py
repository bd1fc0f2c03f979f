# Copyright 2025 Individual Contributor: the verl THD patch-set
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Every call that packs THD sequences passes the bucket, or says why it does not.

A call that forgets ``pad_to_length_bucket`` packs its tensor to another length than the rest of its micro-batch,
and nothing fails until shapes meet on a GPU. Exempt a call below, or with ``# thd-bucket: <reason>`` on its line.
"""

import argparse
import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

PACKERS = {"preprocess_thd_engine", "preprocess_thd_no_padding"}
KEYWORD = "pad_to_length_bucket"

# (file, function): why its calls need no bucket
EXEMPT = {
    ("verl/utils/megatron/router_replay_utils.py", "merge_router_topk_indices"): "pad_to_length refuses router replay",
    ("verl/utils/megatron/router_replay_utils.py", "set_router_replay_data"): "pad_to_length refuses router replay",
    ("verl/trainer/distillation/megatron/losses.py", "compute_forward_kl_topk"): "pad_to_length refuses top-K",
}
_MARK = re.compile(r"#\s*thd-bucket:\s*\S")


class Finding(NamedTuple):
    """One use of the packer without the bucket: where, in which function, and what is wrong with it."""

    file: str
    line: int
    function: str
    problem: str


def check(files: Iterator[str], read: Callable[[str], str]) -> list[Finding]:
    """Find calls of the THD packer that lack the bucket.

    Args:
        files: paths of Python files, relative to the checkout.
        read: text of such a file.

    Returns:
        The findings; none where the packer of this tree takes no bucket.
    """
    sources = {file: text for file in files if any(name in (text := read(file)) for name in PACKERS)}
    trees = {file: ast.parse(text, filename=file) for file, text in sources.items()}
    if not any(_takes_bucket(node) for tree in trees.values() for node in ast.walk(tree)):
        return []
    return [finding for file in sorted(trees) for finding in _check_file(file, trees[file], sources[file])]


def _takes_bucket(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.FunctionDef)
        and node.name in PACKERS
        and KEYWORD in {argument.arg for argument in node.args.args + node.args.kwonlyargs}
    )


def _check_file(file: str, tree: ast.Module, source: str) -> Iterator[Finding]:
    lines = source.splitlines()
    names = set(PACKERS)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname for alias in node.names if alias.name in PACKERS and alias.asname}
    for node, function, called in _uses(tree, names):
        if (file, function) in EXEMPT or any(_MARK.search(line) for line in lines[node.lineno - 1 : node.end_lineno]):
            continue
        if not isinstance(called, ast.Call):
            yield Finding(file, node.lineno, function, "passes the packer on, so that its calls cannot be checked")
        elif KEYWORD not in {keyword.arg for keyword in called.keywords}:
            yield Finding(file, node.lineno, function, f"packs without {KEYWORD}")


def _uses(tree: ast.Module, names: set[str]) -> Iterator[tuple[ast.expr, str, ast.Call | None]]:
    """(expression, enclosing function, call or None) for every use of the packer."""
    stack: list[tuple[ast.AST, str, ast.Call | None]] = [(tree, "<module>", None)]
    while stack:
        node, function, call = stack.pop()
        if isinstance(node, ast.Name | ast.Attribute):
            if (node.id if isinstance(node, ast.Name) else node.attr) in names:
                yield call or node, function, call
        for child in ast.iter_child_nodes(node):
            inner = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
            stack.append((child, inner, node if isinstance(node, ast.Call) and child is node.func else None))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", "-d", default="verl", help="package to check, below the checkout's root")
    root = Path(parser.parse_args().directory)
    findings = check((path.as_posix() for path in root.rglob("*.py")), lambda file: Path(file).read_text("utf-8"))
    for finding in findings:
        print(f"{finding.file}:{finding.line}: {finding.function} {finding.problem}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
