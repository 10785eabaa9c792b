"""What communicating modules need of a team: links in what their agents see, and networks made for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import gymnasium as gym
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from thrust_rllib.connectors.team_codec import ModuleCodec
from thrust_rllib.envs.spaces import LINKS, check_links
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
        ValueError: observations without links, links of another kind or number than there are agents, or a learner that
            is to be compiled.
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
        _check_seen(module_id, codec, len(team.possible_agents))


def _check_seen(module_id: ModuleID, codec: ModuleCodec, agents: int) -> None:
    check_links(codec.observation_space)
    links = codec.encoder.num_links
    if links != agents:
        seen = f"{links} links" if links else f"no {LINKS!r}"
        raise ValueError(
            f"module {module_id!r} exchanges messages, and its agents see {seen}: "
            f"{_short(codec.observation_space)}. Needed: a Dict observation with {LINKS!r}, "
            f"Box(0, 1, ({agents},)), one number for each agent of the environment in its order, 0 for "
            "whom the agent does not hear; or leave message_rounds out of the model_config."
        )


def fill_in(
    config: JointPPOConfig,
    module_id: ModuleID,
    spec: RLModuleSpec,
    codecs: Mapping[ModuleID, ModuleCodec] | None = None,
) -> None:
    """Tells the network of a module that exchanges messages how its agents' observations are laid out.

    Args:
        config: validated.
        module_id: of the module.
        spec: of the module; gets another `model_config`.
        codecs: {module: what its agents see} of a team that is going to be; None: as the configuration has it.

    Raises:
        ValueError: its agents are not told whom they hear.
    """
    if not _speaks(spec.module_class):
        return
    given = _plain(spec._get_model_config())
    own_shape = {} if given.get("input_shape") is None else {"input_shape": given["input_shape"]}
    spec.model_config = {**given, **_layout(config, module_id, codecs), **own_shape}


def num_links(config: JointPPOConfig, module_id: ModuleID) -> int:
    """How many numbers in front of a module's observations are links."""
    codec = config.team_codec().modules.get(module_id)
    if codec is not None:
        return codec.encoder.num_links
    if _speaks(config.module_class(module_id)):
        return int(_layout(config, module_id)["num_links"])
    # It plays nobody yet: as those who see the same.
    spec = config.policies[module_id]
    encoders = [other.encoder for other in config.team_codec().modules.values()]
    return next((e.num_links for e in encoders if spec and e.encoded_space == spec.observation_space), 0)


def _layout(
    config: JointPPOConfig, module_id: ModuleID, codecs: Mapping[ModuleID, ModuleCodec] | None = None
) -> dict[str, Any]:
    codecs = config.team_codec().modules if codecs is None else codecs
    codec = codecs.get(module_id) or next((c for c in codecs.values() if c.encoder.num_links), None)
    if codec is None:
        raise ValueError(
            f"module {module_id!r} exchanges messages, and no agent of the environment is told whom it hears: there is "
            f"no {LINKS!r} in their observations"
        )
    assert config.declared_team is not None
    _check_seen(module_id, codec, len(config.declared_team.possible_agents))
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
