"""What communicating modules need of a team: links in what their agents see, and networks made for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import gymnasium as gym
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from thrust_rllib.envs.spaces import LINKS
from thrust_rllib.joint_batch import ModuleID
from thrust_rllib.rl_modules.communicating import CommunicatingModule

if TYPE_CHECKING:
    from thrust_rllib.config import JointPPOConfig


def speaking_modules(config: JointPPOConfig) -> list[ModuleID]:
    """Modules whose class exchanges messages."""
    return [module_id for module_id in sorted(config.policies) if _speaks(config.module_class(module_id))]


def check_communication(config: JointPPOConfig) -> None:
    """Checks that those who speak are told whom they hear; the team is resolved.

    Raises:
        ValueError: observations without links, links of another number than there are agents, or a learner that is to
            be compiled.
    """
    codecs, team = config.team_codec().modules, config.declared_team
    assert team is not None
    for module_id in speaking_modules(config):
        if config.torch_compile_learner:
            raise ValueError(
                f"torch_compile_learner=True with module {module_id!r}, whose agents exchange messages: the exchange "
                "goes over all modules of a joint row. Set torch_compile_learner=False."
            )
        if (codec := codecs.get(module_id)) is None:
            continue  # it plays nobody yet
        links, agents = codec.encoder.num_links, len(team.possible_agents)
        if links != agents:
            seen = f"{links} links" if links else f"no {LINKS!r}"
            raise ValueError(
                f"module {module_id!r} exchanges messages, and its agents see {seen}: "
                f"{_short(codec.observation_space)}. Needed: a Dict observation with {LINKS!r}, "
                f"Box(0, 1, ({agents},)), one number for each agent of the environment in its order, 0 for "
                "whom the agent does not hear; or leave message_rounds out of the model_config."
            )


def fill_in(config: JointPPOConfig, module_id: ModuleID, spec: RLModuleSpec) -> None:
    """Tells the network of a module that exchanges messages how its agents' observations are laid out."""
    if not _speaks(spec.module_class):
        return
    spec.model_config = {**_plain(spec._get_model_config()), **_layout(config, module_id)}


def num_links(config: JointPPOConfig, module_id: ModuleID) -> int:
    """How many numbers in front of a module's observations are links."""
    codec = config.team_codec().modules.get(module_id)
    if codec is not None:
        return codec.encoder.num_links
    # It plays nobody yet: as the others of its kind.
    return int(_layout(config, module_id)["num_links"]) if _speaks(config.module_class(module_id)) else 0


def _layout(config: JointPPOConfig, module_id: ModuleID) -> dict[str, Any]:
    codecs = config.team_codec().modules
    codec = codecs.get(module_id) or next((c for c in codecs.values() if c.encoder.num_links), None)
    if codec is None:
        raise ValueError(
            f"module {module_id!r} exchanges messages, and no agent of the environment is told whom it hears: there is "
            f"no {LINKS!r} in their observations"
        )
    return {"num_links": codec.encoder.num_links, "input_shape": codec.encoder.shape_beside_links}


def _short(space: gym.Space) -> str:
    """A space without its bounds, which may be arrays of many lines."""
    if isinstance(space, gym.spaces.Dict):
        return f"Dict({', '.join(f'{key}: {_short(inner)}' for key, inner in space.spaces.items())})"
    return f"Box{space.shape}" if isinstance(space, gym.spaces.Box) else str(space)


def _plain(model_config: Any) -> dict[str, Any]:
    return dict(model_config) if isinstance(model_config, Mapping) else dict(vars(model_config))


def _speaks(module_class: Any) -> bool:
    return isinstance(module_class, type) and issubclass(module_class, CommunicatingModule)
