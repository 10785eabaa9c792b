"""Parameters out of a checkpoint for modules of another run: read, checked, then taken."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ray import cloudpickle
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.core import (
    COMPONENT_ENV_RUNNER,
    COMPONENT_ENV_TO_MODULE_CONNECTOR,
    COMPONENT_LEARNER,
    COMPONENT_LEARNER_GROUP,
    COMPONENT_RL_MODULE,
)
from ray.rllib.core.learner.learner import Learner
from ray.rllib.core.rl_module.rl_module import RLModule

from thrust_rllib.checkpoints import check_is_checkpoint
from thrust_rllib.connectors.observation_normalizer import ObservationNormalizer
from thrust_rllib.envs.names import nearest
from thrust_rllib.joint_batch import ModuleID
from thrust_rllib.learner_state import JOINT_STATE
from thrust_rllib.rl_modules.communicating import CommunicatingModule
from thrust_rllib.team_learner import TeamLearner

logger = logging.getLogger(__name__)

Arrays = dict[str, Any]


@dataclass(frozen=True)
class ModuleParts:
    """What a module takes from a checkpoint.

    Args:
        source: the module's name there.
        parameters: {name: array}, buffers included.
        value_moments: {module there, or its team's critic: state of `RunningMoments`}.
        observation_moments: as `ObservationNormalizer` keeps them, or None.
    """

    source: ModuleID
    parameters: Arrays
    value_moments: Mapping[ModuleID, Arrays]
    observation_moments: Arrays | None


@dataclass(frozen=True)
class Noise:
    """What is added to parameters that are taken: p ← p + scale · s(p) · x, x a standard normal number for each of p's.

    s(p) is the deviation of p's numbers, sqrt(mean (p − mean p)²), or for copies their size, sqrt(mean p²).

    Args:
        scale: ≥ 0.
        of_copies: of the modules that take the same parameters the first one gets none.
        seed: of x.
    """

    scale: float
    of_copies: bool
    seed: int

    @classmethod
    def of(cls, noise: float, group_noise: float, seed: int) -> Noise:
        """The noise that `JointPPO.warm_start` is asked for.

        Raises:
            ValueError: a number below 0 or none, or both kinds at once.
        """
        for name, value, unit in (
            ("noise", noise, "the noise's deviation in those of the parameters"),
            ("group_noise", group_noise, "the noise's deviation in root mean squares of the parameters"),
        ):
            if not isinstance(value, Real) or not np.isfinite(value) or value < 0:
                raise ValueError(f"{name}={value!r}; needed: a number ≥ 0, {unit}")
        if noise and group_noise:
            raise ValueError(
                f"noise={noise} and group_noise={group_noise}; needed: one of them. noise changes every module, "
                "group_noise all but the first of those that start from the same module"
            )
        return cls(noise or group_noise, bool(group_noise), seed)

    def reaches(self, parts: Mapping[ModuleID, ModuleParts]) -> list[ModuleID]:
        """The modules whose parameters it changes, sorted; `parts` as of `read_parts`."""
        if not self.scale:
            return []
        first: dict[ModuleID, ModuleID] = {}
        for module_id, part in parts.items():
            first.setdefault(part.source, module_id)
        return [m for m, part in parts.items() if not self.of_copies or m != first[part.source]]

    def tell_if_useless(self, parts: Mapping[ModuleID, ModuleParts]) -> None:
        """Says where there is no copy to change."""
        if self.scale and not self.reaches(parts):
            logger.warning(
                "group_noise changes nothing: no two modules start from the same one, %s",
                {module_id: part.source for module_id, part in parts.items()},
            )

    def add_to(self, module_id: ModuleID, module: torch.nn.Module) -> None:
        """Changes the parameters of a module, alike in every process."""
        # A module's noise does not depend on which others are in the call: those of two calls differ, too.
        words = np.random.SeedSequence([self.seed, *module_id.encode()]).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(words[0]))
        with torch.no_grad():
            for p in module.parameters():
                size = p.square().mean().sqrt() if self.of_copies else p.std(correction=0)
                p.add_(torch.randn(p.shape, generator=generator).to(p), alpha=float(self.scale * size))


def read_parts(
    path: str | Path,
    modules: Mapping[ModuleID, ModuleID] | None,
    known: Sequence[ModuleID],
    only_named: Sequence[ModuleID] = (),
) -> dict[ModuleID, ModuleParts]:
    """{module of this algorithm: what it takes}, sorted.

    Args:
        path: of a checkpoint; it holds pickles: read only what you trust.
        modules: {module here: module there}, or None for those that both have.
        known: the modules here.
        only_named: further modules here, which take something only where `modules` says so.

    Raises:
        ValueError: see `JointPPO.warm_start`.
    """
    if not isinstance(modules, Mapping | None):
        raise ValueError(f"modules={modules!r}; needed: a dict {{module here: module of the checkpoint}}, or None")
    path = Path(path)
    check_is_checkpoint(path, Algorithm.METADATA_FILE_NAME)
    learner = path / COMPONENT_LEARNER_GROUP / COMPONENT_LEARNER
    folder = learner / COMPONENT_RL_MODULE
    if not folder.is_dir():
        raise ValueError(f"the checkpoint {path} has no {folder.relative_to(path)}; needed: one of an RLlib algorithm")
    saved = sorted(each.name for each in folder.iterdir() if each.is_dir())
    if modules is None:
        modules = {m: m for m in known if m in saved}
    if not modules:
        raise ValueError(
            f"no module to start from {path}: it has {saved}, this algorithm {list(known)}. Name them with "
            "modules={module here: module there}"
        )
    mine = [*known, *only_named]
    for where, names, there in (("this algorithm", modules, mine), ("the checkpoint", modules.values(), saved)):
        for name in names:
            if name not in there:
                raise ValueError(
                    f"{where} has no module {name!r}{nearest(str(name), there)} It has {list(there)}; needed: "
                    "modules={module here: module there}"
                )
    values = _state(learner, Learner.STATE_FILE_NAME).get(JOINT_STATE, {}).get("value_normalizers", {})
    observations = _observation_moments_in(path)
    parameters = {source: _state(folder / source, RLModule.STATE_FILE_NAME) for source in set(modules.values())}
    return {
        m: ModuleParts(source, parameters[source], values, observations.get(source))
        for m, source in sorted(modules.items())
    }


def _state(folder: Path, name: str) -> dict[str, Any]:
    if not (file := folder / f"{name}.pkl").is_file():
        raise ValueError(f"the checkpoint has no {file}; needed: one that was saved without use_msgpack")
    state: dict[str, Any] = cloudpickle.loads(file.read_bytes())
    return state


def _observation_moments_in(path: Path) -> dict[ModuleID, Arrays]:
    """{module: moments}; a run without a local runner keeps them beside the learner."""
    for place in (
        path / COMPONENT_ENV_RUNNER / COMPONENT_ENV_TO_MODULE_CONNECTOR,
        path / COMPONENT_ENV_TO_MODULE_CONNECTOR,
    ):
        folders = place.glob(f"*{ObservationNormalizer.__name__}*") if place.is_dir() else ()
        for folder in folders:
            return _state(folder, ObservationNormalizer.STATE_FILE_NAME)
    return {}


_WHAT_MAY_GROW = (
    " The number of agents that exchange messages may differ, and the size of a grid as well where they see a window "
    "of one size, or where encoder is 'conv'."
)


def check_shapes(learner: TeamLearner, parts: Mapping[ModuleID, ModuleParts]) -> None:
    """Runs in a learner.

    Raises:
        ValueError: a module has other parameters than what it would take.
    """
    for module_id, part in parts.items():
        needed = _shapes(learner.module[module_id].unwrapped().get_state())
        given = _shapes(part.parameters)
        if given == needed:
            continue
        names = [name for name in dict.fromkeys((*needed, *given)) if given.get(name) != needed.get(name)]
        first = names[0]
        raise ValueError(
            f"module {module_id!r} cannot start from module {part.source!r} of the checkpoint: {first} has the shape "
            f"{given.get(first, 'of nothing: it is not there')} in the checkpoint and "
            f"{needed.get(first, 'of nothing: it is not there')} here ({len(names)} of {len({*given, *needed})} "
            "parameters differ). Needed: the same observation and action spaces and the same model_config."
            + (_WHAT_MAY_GROW if isinstance(learner.module[module_id].unwrapped(), CommunicatingModule) else "")
        )
    moments = next((part.value_moments for part in parts.values()), {})
    learner.tell_other_scale(moments, {m: part.source for m, part in parts.items()})


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(np.shape(x)) for name, x in state.items()}


def take_parts(learner: TeamLearner, parts: Mapping[ModuleID, ModuleParts], noise: Noise) -> None:
    """Runs in every learner, each of which draws the same noise.

    Args:
        learner: one of them.
        parts: checked.
        noise: added to them.
    """
    perturbed = noise.reaches(parts)
    for module_id, part in parts.items():
        module = learner.module[module_id].unwrapped()
        module.set_state(part.parameters)
        if module_id in perturbed:
            noise.add_to(module_id, module)
        learner.take_value_moments(module_id, part.value_moments, part.source)


def observation_moments(parts: Mapping[ModuleID, ModuleParts], connectors: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state of the env-to-module pieces with the moments of the checkpoint in it; None where nothing is normalised.

    Args:
        parts: of `read_parts`.
        connectors: state of the pieces now.

    Raises:
        ValueError: moments of observations of another shape.
    """
    names = [name for name in connectors if ObservationNormalizer.__name__ in name]
    if not names:
        raw = [part.source for part in parts.values() if part.observation_moments is not None]
        if raw:
            logger.warning(
                "modules %s of the checkpoint saw normalised observations; here they see them as they are. Set "
                ".env_runners(normalize_observations=True).",
                raw,
            )
        return None
    own = connectors[names[0]]
    taken = {m: part.observation_moments for m, part in parts.items() if part.observation_moments is not None}
    for module_id, moments in taken.items():
        given, needed = (np.shape(x["total"]["mean"]) for x in (moments, own[module_id]))
        if given != needed:
            raise ValueError(
                f"module {module_id!r} sees observations of shape {needed}, module {parts[module_id].source!r} of the "
                f"checkpoint of shape {given} (links are not counted), and moments of observations come along. Needed: "
                "the same shape, such as a window of one size around each agent; or, for a network that reads any "
                "size, both runs without .env_runners(normalize_observations=True)"
            )
    if left := sorted(set(parts) - set(taken)):
        logger.warning("the checkpoint has no moments of observations for modules %s: they keep their own", left)
    return {**connectors, names[0]: {**own, **taken}}
