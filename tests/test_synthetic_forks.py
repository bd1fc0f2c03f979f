"""Forks with one edit each: it lands and keeps the edit, or it is a conflict that names it. None lands and loses it."""

from __future__ import annotations

from functools import cache

import pytest

from patchset.errors import Conflict
from patchset.series import generated
from patchset.series.plan import make_plan
from patchset.target.tree import Tree
from tests.conftest import PINS
from tests.forks import CONFLICT, EDITS, LANDS, UTIL, Edit


@pytest.fixture(scope="module", autouse=True)
def one_composition_for_equal_configs():
    """Hydra composes half a second, and most edits leave the configuration as it is."""
    kept = {}

    def compose_once(path, committed, folder):
        key = (path, committed, *((file.name, file.read_bytes()) for file in sorted(folder.rglob("*.yaml"))))
        if key not in kept:
            kept[key] = generated.regenerate(path, committed, folder)
        return kept[key]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("patchset.series.plan.regenerate", compose_once)
        yield


def forked(tree: Tree, edit: Edit):
    """Reads a tree with one edit; None where it has no such place."""
    text = tree.read(edit.file).decode()
    edited = edit.change(text)
    if edited == text:
        return None

    @cache
    def read(name):
        return edited.encode() if name == edit.file else tree.read(name)

    return read


# The layout takes the place of the small edits in one file: in others both come to the same
CASES = [(edit, loop) for edit in EDITS for loop in ((False, True) if edit.file == UTIL else (False,))]
IDS = [f"{edit.name}-{'small-edits' if loop else 'all'}" for edit, loop in CASES]


@pytest.mark.parametrize(("edit", "loop"), CASES, ids=IDS)
@pytest.mark.parametrize("pin", PINS.releases)
def test_an_edit_is_kept_or_named(pristine, series, pin, edit, loop):
    tree = Tree.at(pristine(pin))
    read = forked(tree, edit)
    if read is None:
        pytest.skip(f"{pin} has no such place")
    winner = [patch.name for patch in series.patches if patch.metadata.supersedes]
    try:
        plan = make_plan(tree, read, series, series.select(without=winner if loop else None))
    except Conflict as conflict:
        said = "\n".join([str(conflict), *conflict.details])
        assert edit.outcome(pin, loop) == CONFLICT, said
        assert (edit.named or edit.kept) in said
        return
    assert edit.outcome(pin, loop) == LANDS
    after = plan.after.get(edit.file, read(edit.file)).decode()
    assert edit.kept in after
    assert after.count(edit.kept) >= read(edit.file).decode().count(edit.kept) or edit.name == "crlf"


def test_there_are_forty_edits_and_more():
    assert len(EDITS) == len({edit.name for edit in EDITS}) > 40
