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
"""What a bucket cannot do is said when the config or the engine is built, not at the first micro-batch."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from hydra import compose, initialize_config_dir

import verl
import verl.workers.engine.megatron.transformer_impl as engine_module
from verl.workers.config import McoreEngineConfig
from verl.workers.engine.megatron.transformer_impl import MegatronEngine

CONFIG = Path(verl.__file__).parent / "trainer" / "config"


@pytest.mark.parametrize("bucket", [0, -5, None, 1.5, "512", True], ids=repr)
def test_bad_bucket_is_refused_when_the_config_is_built(bucket):
    # C118
    with pytest.raises(ValueError, match="pad_to_length_bucket") as refusal:
        McoreEngineConfig(pad_to_length=True, pad_to_length_bucket=bucket)
    assert repr(bucket) in str(refusal.value)


@pytest.mark.skipif(not (CONFIG / "ref" / "mindspeed_ref.yaml").exists(), reason="this verl has no MindSpeed config")
def test_mindspeed_reference_follows_actor():
    with initialize_config_dir(str(CONFIG), version_base=None):
        overrides = ["model_engine=mindspeed", "actor_rollout_ref.actor.mindspeed.pad_to_length=True"]
        config = compose("ppo_trainer", overrides=overrides)
    assert config.actor_rollout_ref.ref.mindspeed.pad_to_length is True


class _Stop(Exception):
    """Ends the building of an engine after its configuration was looked at."""


def test_without_packing_a_warning_says_once_that_the_bucket_has_no_effect():
    def build(**config):
        def stop(self):
            raise _Stop

        with patch.object(MegatronEngine, "_init_device_mesh", stop), pytest.raises(_Stop):
            MegatronEngine(SimpleNamespace(), McoreEngineConfig(**config), None, None)

    said = []
    with patch.object(engine_module.logger, "warning", lambda message, *_, **__: said.append(message)):
        build(pad_to_length=True)
        build(pad_to_length=False, use_remove_padding=False)
        assert said == []
        build(pad_to_length=True, use_remove_padding=False)
        build(pad_to_length=True, use_remove_padding=False)
    assert said == ["pad_to_length has no effect with use_remove_padding=False"]
