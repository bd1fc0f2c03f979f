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
"""`pad_to_length` from the command line to the engine configs: who gets it."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

import verl
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import McoreEngineConfig

CONFIG = Path(verl.__file__).parent / "trainer" / "config"


def composed(*overrides: str):
    # Before verl 0.8 the Megatron configuration was one of its own
    one_trainer = (CONFIG / "model_engine" / "megatron.yaml").is_file()
    name = "ppo_trainer" if one_trainer else "ppo_megatron_trainer"
    with initialize_config_dir(str(CONFIG), version_base=None):
        return compose(name, overrides=[*(["model_engine=megatron"] if one_trainer else []), *overrides])


def seen_by(config) -> dict[str, tuple[bool, int]]:
    nodes = {
        "actor": config.actor_rollout_ref.actor.megatron,
        "ref": config.actor_rollout_ref.ref.megatron,
        "critic": config.critic.megatron,
    }
    return {name: (node.pad_to_length, node.pad_to_length_bucket) for name, node in nodes.items()}


ACTOR, REF = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.ref.megatron"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        pytest.param([], {"actor": (False, 512), "ref": (False, 512), "critic": (False, 512)}, id="defaults"),
        pytest.param(
            [f"{ACTOR}.pad_to_length=True", f"{ACTOR}.pad_to_length_bucket=256"],
            {"actor": (True, 256), "ref": (True, 256), "critic": (False, 512)},
            id="C110-reference-follows-actor",
        ),
        pytest.param(
            [f"{REF}.pad_to_length=True"],
            {"actor": (False, 512), "ref": (True, 512), "critic": (False, 512)},
            id="C111-reference-alone",
        ),
        pytest.param(
            ["critic.megatron.pad_to_length=True", "critic.megatron.pad_to_length_bucket=64"],
            {"actor": (False, 512), "ref": (False, 512), "critic": (True, 64)},
            id="critic-alone",
        ),
    ],
)
def test_overrides_reach_their_nodes(overrides, expected):
    assert seen_by(composed(*overrides)) == expected


def test_overrides_reach_the_engine_config():
    node = composed(f"{ACTOR}.pad_to_length=True", f"{ACTOR}.pad_to_length_bucket=1000").actor_rollout_ref.ref.megatron
    built = omega_conf_to_dataclass(node)
    assert (built.pad_to_length, built.pad_to_length_bucket) == (True, 1000)


def test_misspelt_key_is_refused():
    # C117: FSDP has the key one level up; Megatron must not ignore it there
    with pytest.raises(Exception, match="Could not override"):
        composed("actor_rollout_ref.actor.pad_to_length=True")


def test_defaults_of_the_dataclass():
    config = McoreEngineConfig()
    assert (config.pad_to_length, config.pad_to_length_bucket) == (False, 512)
