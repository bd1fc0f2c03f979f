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
"""The audit that a fork's own CI runs: no call of the packer lacks the bucket."""

import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]


def audit(*arguments, cwd=CHECKOUT):
    script = CHECKOUT / "tests" / "special_sanity" / "check_thd_bucket_calls.py"
    return subprocess.run([sys.executable, script, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


def test_no_call_of_the_packer_lacks_the_bucket():
    done = audit()
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


PACKER = """
def preprocess_thd_engine(batch, pad_to_length_bucket=None): ...
from util import preprocess_thd_engine as pack
"""


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("def f(x): return preprocess_thd_engine(x)", "verl/a.py:4: f packs without pad_to_length_bucket"),
        ("def f(x): return pack(x)", "verl/a.py:4: f packs without pad_to_length_bucket"),
        ("x = util.preprocess_thd_engine(y, **z)", "verl/a.py:4: <module> packs without pad_to_length_bucket"),
        ("g = partial(pack, 1)", "verl/a.py:4: <module> passes the packer on, so that its calls cannot be checked"),
        ("def f(x): return pack(x)  # thd-bucket: bshd only", ""),
        ("def f(x): return pack(x)  # thd-bucket:", "verl/a.py:4: f packs without pad_to_length_bucket"),
        ("def f(x): return pack(x, pad_to_length_bucket=None)", ""),
    ],
)
def test_audit_names_file_line_and_function(tmp_path, line, found):
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "a.py").write_text(PACKER + line + "\n")
    done = audit(cwd=tmp_path)
    assert done.stdout.strip() == found, done.stdout + done.stderr
    assert done.returncode == (1 if found else 0)
