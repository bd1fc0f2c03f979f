"""Each net behind the rules, on a tree that it has to stop."""

from __future__ import annotations

import pytest

from patchset.series.nets import check

BEFORE = {
    "verl/a.py": """from verl.b import pack


def run(model, x, flag=None):
    size = 1
    if flag is not None:
        size = 2
    total = size + x
    return model(pack(x, size=size), total)
""",
    "verl/b.py": """def pack(x, size=1):
    return x


def own(x, size=1):
    return x


def pick(name):
    return own if name else pack


TABLE = {"a": pack, "b": own}
""",
}


def said(old, new, file="verl/a.py", more=(), unread=()):
    """What the nets say when text of a file changes."""
    files = {name: text.encode() for name, text in {**BEFORE, **dict(more)}.items()}
    text = files[file].decode()
    assert old in text
    after = {file: text.replace(old, new).encode()}
    return check({file: files[file]}, after, lambda name: after.get(name, files.get(name)), unread)


def test_what_holds_passes():
    assert said("total = size + x", "total = x + size") == []


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("total = size + x", "total = size + y", "verl/a.py:8: undefined name `y`"),
        ("    size = 1\n", "", "run reads size, which not every path binds any more"),
        ("    if flag is not None:\n        size = 2\n", "", "run no longer reads its parameter flag"),
        ("def run(", "def walk(", "function run is gone"),
        ("from verl.b import pack", "from verl.b import pack, unpack", "imports unpack from verl.b"),
        ("from verl.b import pack", "from verl.c import pack", "imports pack from verl.c, which this tree lacks"),
        ("pack(x, size=size)", "pack(x, size=size, bucket=1)", "pack (verl/b.py:1) takes no bucket"),
        ("pack(x, size=size)", "pack(x, 1, 2)", "takes 2 arguments by position, not 3"),
        ("pack(x, size=size)", "pack(size=size)", "lacks x"),
        ("pack(x, size=size)", "pack(x, 1, size=2)", "gets size twice"),
        ("total = size + x", "total = = x", "is no Python any more"),
    ],
)
def test_what_does_not_hold_is_told(old, new, says):
    told = said(old, new)
    assert len(told) == 1, told
    assert says in told[0]


def test_what_was_wrong_before_is_no_news():
    broken = BEFORE["verl/a.py"].replace("total = size + x", "total = size + nowhere")
    assert said("x, size=size", "x, size=0 + size", more={"verl/a.py": broken}) == []


def test_a_parameter_that_the_patch_gives_up_may_go_unread():
    old = "    if flag is not None:\n        size = 2\n"
    assert said(old, "", unread={"flag"}) == []


CALLS = """from verl.b import TABLE, pick


def step(name, x):
    forward = {how}
    return forward(x, size=1)
"""


@pytest.mark.parametrize("how", ["pick(name)", "TABLE[name]", "own_one if x else pick(1)"])
def test_a_new_keyword_is_followed_to_every_function_that_may_get_it(how):
    # A4: the engine hands a keyword to whatever the registry returns
    text = CALLS.format(how=how) + "\n\ndef own_one(x, size=1):\n    return x\n"
    more = {
        "verl/s.py": text,
        "verl/b.py": BEFORE["verl/b.py"].replace("def pack(x, size=1)", "def pack(x, size=1, bucket=0)"),
    }
    told = said("x, size=1)\n\n", "x, size=1, bucket=3)\n\n", "verl/s.py", more)
    assert any("takes no bucket" in line and "own" in line for line in told)
    assert not any("pack (" in line for line in told)


def test_a_new_keyword_for_what_cannot_be_followed_is_told():
    told = said("model(pack(x, size=size), total)", "model(pack(x, size=size), total, bucket=1)")
    assert told == ["verl/a.py:9: run hands a new keyword to model, which cannot be followed"]


def test_a_function_that_takes_everything_takes_it():
    more = {"verl/b.py": BEFORE["verl/b.py"].replace("def pack(x, size=1)", "def pack(x, **rest)")}
    assert said("pack(x, size=size)", "pack(x, size=size, bucket=1)", more=more) == []
