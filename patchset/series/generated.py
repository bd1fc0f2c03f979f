"""Regenerates upstream's flattened reference YAML, as upstream's own generator does: through Hydra compose."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from threading import Lock

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..errors import Conflict

CONFIG_FOLDER = "verl/trainer/config"
#: Hydra has one instance a process, and pins are verified in threads.
_ONE_HYDRA = Lock()
_RECIPE = re.compile(r"print_cfg\.py --cfg job *(?P<arguments>[^']*)' to flatten the '[^']*/(?P<name>[^/']+)\.yaml'")
_BODY = re.compile(r"^actor_rollout_ref", re.MULTILINE)


def regenerate(path: str, committed: bytes, config_folder: Path) -> bytes:
    """What a generated file should hold.

    Args:
        path: the file, for messages.
        committed: its content; its header names the configuration and overrides that it is made from.
        config_folder: absolute `verl/trainer/config` to compose from.

    Raises:
        Conflict: the header has no recipe, or the configuration does not compose.
    """
    text = committed.decode("utf-8")
    recipe, body = _RECIPE.search(text), _BODY.search(text)
    if recipe is None or body is None:
        raise Conflict(f"{path}: its header does not say how it was generated")
    name, overrides = recipe["name"], []
    for argument in recipe["arguments"].split():
        if argument.startswith("--config-name="):
            name = argument.partition("=")[2].removesuffix(".yaml")
        else:
            overrides.append(argument)
    try:
        with _ONE_HYDRA, initialize_config_dir(str(config_folder), version_base=None):
            flat = OmegaConf.to_yaml(compose(name, overrides=overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise Conflict(f"{path}: {name} does not compose", tuple(str(error).splitlines()[:5])) from error
    start = _BODY.search(flat)
    if start is None:
        raise Conflict(f"{path}: the composed configuration has no actor_rollout_ref")
    return (text[: body.start()] + flat[start.start() :]).encode("utf-8")


def lay_config(folder: Path, contents: Mapping[str, bytes]) -> Path:
    """Lays configuration files into a folder.

    Args:
        folder: where to lay them.
        contents: tree path -> content; paths outside the configuration are left out.

    Returns:
        The absolute `verl/trainer/config` to compose from.
    """
    target = folder.resolve() / CONFIG_FOLDER
    target.mkdir(parents=True)
    for path, data in contents.items():
        if path.startswith(CONFIG_FOLDER) and path.endswith(".yaml"):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
    return target
