"""What an edit may take away: digests of syntax, the same on every Python, blind to formatting, awake to code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from patchset import REPOSITORY
from patchset.series.known import Known, Learning, syntax

SPAN = """    size = tp * cp  # upstream's comment
    for i in range(n):
        if i > 0:
            out[i] = x[i : i + size]
        else:
            out[i] = f(x, 'a')
"""


@pytest.fixture
def known():
    learnt = Learning("here", {})
    assert learnt.foreign("p/r", SPAN) is None
    assert learnt.own_comments("p/r", SPAN) == []
    return Known(learnt.spans)


@pytest.mark.parametrize(
    "other",
    [
        SPAN,
        SPAN.replace("    ", "        "),
        SPAN.replace("# upstream's comment", ""),
        SPAN.replace("'a'", '"a"'),
        SPAN.replace("tp * cp", "(\n        tp\n        * cp\n    )"),
        SPAN.replace("f(x, 'a')", "f(\n                x,\n                'a',\n            )"),
        SPAN.replace("\n", "\r\n"),
    ],
    ids=["same", "deeper", "no-comment", "quotes", "brackets", "wrapped", "crlf"],
)
def test_form_makes_no_difference(known, other):
    assert known.foreign("p/r", other) is None


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        ("tp * cp", "tp * cp * 64", [0]),
        ("if i > 0", "if i >= 0", [2]),
        ("            out[i] = f(x, 'a')\n", "            out[i] = f(x, 'a')\n            log(i)\n", [6]),
        ("out[i] = f(x, 'a')", "out[i] = f(x, 'b')", [5]),
        # One is missing: told by its neighbour
        ("            out[i] = x[i : i + size]\n", "            pass\n", [3]),
        # Moved out of its branch, though every statement is there
        ("        else:\n            out[i] = f(x, 'a')\n", "        out[i] = f(x, 'a')\n", [4]),
    ],
)
def test_code_of_the_users_own_is_told_by_its_lines(known, old, new, lines):
    assert old in SPAN
    assert known.foreign("p/r", SPAN.replace(old, new)) == lines


def test_another_rule_knows_nothing(known):
    assert known.foreign("p/other", SPAN) == [0, 1, 2, 3, 5]


def test_a_comment_of_the_users_own_is_told(known):
    assert known.own_comments("p/r", SPAN) == []
    assert known.own_comments("p/r", SPAN.replace("        if", "        # mine\n        if")) == ["# mine"]


@pytest.mark.parametrize("text", ["a=1", "x: int = 3", "a if b else c", "a\n    if b\n    else c"])
def test_pieces_of_statements_have_one_digest_however_they_are_wrapped(text):
    assert len(syntax(text)) == 1
    assert syntax(text)[0].digest == syntax(text.replace(" ", "  "))[0].digest


VERSIONS = sorted(Path.home().glob(".pyenv/versions/3.1[0-3]*/bin/python"))


@pytest.mark.parametrize("python", VERSIONS, ids=lambda path: path.parts[-3])
def test_digests_are_those_of_every_python(python):
    # The module alone: msgspec need not be installed there
    program = (
        "import sys, types; stub = types.ModuleType('msgspec'); stub.Struct = type('S', (), {'__init_subclass__': "
        "classmethod(lambda c, **k: None)}); sys.modules['msgspec'] = stub; "
        f"sys.path.insert(0, {str(REPOSITORY)!r}); "
        "from patchset.series.known import syntax; "
        "print([s.digest for s in syntax(open(sys.argv[1]).read())])"
    )
    file = REPOSITORY / "patchset/series/rewrite.py"
    said = subprocess.run([python, "-c", program, file], capture_output=True, text=True, check=True).stdout
    assert said.strip() == str([statement.digest for statement in syntax(file.read_text())])
