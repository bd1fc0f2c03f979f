"""Regenerated YAML: several threads at once, and headers that say nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from patchset.errors import Conflict
from patchset.series.generated import CONFIG_FOLDER, regenerate


def test_threads_do_not_meet_in_hydra(pristine):
    config = pristine("0.9.1") / CONFIG_FOLDER
    files = sorted(config.glob("_generated_*.yaml")) * 4
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda file: regenerate(file.name, file.read_bytes(), config), files))
    assert len(files) == 16
    assert made == [file.read_bytes() for file in files]


@pytest.mark.parametrize("text", [b"a: 1\n", b"# print_cfg.py --cfg job' to flatten the 'x/ppo_trainer.yaml'\nb: 2\n"])
def test_a_header_without_a_recipe_is_a_conflict(pristine, text):
    with pytest.raises(Conflict, match="header does not say how it was generated"):
        regenerate("a.yaml", text, pristine("0.9.1") / CONFIG_FOLDER)
