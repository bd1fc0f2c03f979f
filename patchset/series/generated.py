"""Regenerates upstream's flattened reference YAML, as upstream's own generator does: through Hydra compose.

A fork's copy may be out of step with its sources: then what a patch changes is carried over, and the rest stays.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..errors import Conflict
from ..target import gitrepo

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
    text = committed.decode("utf-8").replace("\r\n", "\n")
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
    data = (text[: body.start()] + flat[start.start() :]).encode("utf-8")
    return data.replace(b"\n", b"\r\n") if b"\r\n" in committed else data


def carry_over(committed: bytes, was: bytes, now: bytes) -> bytes | None:
    """A file that is out of step with its sources, with what changes between two regenerations and nothing else.

    Returns:
        None where the change meets what is out of step, or where the file is no YAML.
    """
    merged = gitrepo.merge(committed, was, now)
    stale, before, after, got = (_values(data) for data in (committed, was, now, merged or b""))
    if stale is None or before is None or after is None:
        return None
    changed = _differing(before, after)
    wanted = {key: value for key, value in stale.items() if key not in changed}
    wanted |= {key: after[key] for key in changed if key in after}
    # Blocks repeat in such a file, so that lines may merge into another one
    return merged if got == wanted else None


def drift(committed: bytes, regenerated: bytes) -> set[str]:
    """What in a generated file is not as its sources say: keys by their path, or what else there is to say."""
    if committed == regenerated:
        return set()
    stale, right = _values(committed), _values(regenerated)
    return {"no YAML"} if stale is None or right is None else _differing(stale, right) or {"its text alone"}


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    return {key for key in one.keys() | other.keys() if key not in one or key not in other or one[key] != other[key]}


def _values(data: bytes) -> dict[str, Any] | None:
    """Path of a key -> value, for what holds no further keys; None for what is no YAML mapping."""
    try:
        loaded = yaml.load(data, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError:
        return None
    found: dict[str, Any] = {}
    stack = [("", loaded)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, dict) and value:
            stack += [(f"{path}.{key}" if path else str(key), inner) for key, inner in value.items()]
        else:
            found[path] = value
    return found if isinstance(loaded, dict) else None


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
