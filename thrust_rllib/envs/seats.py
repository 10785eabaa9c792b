"""Fixed names for the agents of an environment that invents new ones in each episode; imports Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
from ray.rllib.env.env_context import EnvContext
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.rllib.utils.annotations import override

from thrust_rllib.envs.adapt import call
from thrust_rllib.envs.names import nearest
from thrust_rllib.envs.registry import resolve_env
from thrust_rllib.envs.returned import returned_dicts
from thrust_rllib.envs.rllib import ALL, COMMON
from thrust_rllib.envs.wrapped_state import state_of

_SETTINGS = ("env", "seats", "env_config")


class Seats(MultiAgentEnv):
    """The agents of an RLlib `MultiAgentEnv` under the names "seat_0", "seat_1", … for as long as an episode lasts.

    Agents are seated in the order in which an episode names them first; a seat is not given away before the next
    episode. All of them have one observation space and one action space, the `observation_space` and `action_space` of
    the environment. Who sits where is in `seat_of`: {agent: seat}.

    Args:
        config: {"env": a `MultiAgentEnv` class, function or name, "seats": how many agents an episode has at most,
            "env_config": settings of `env`, may be left out}.

    Raises:
        TypeError: `env` is no `MultiAgentEnv`.
        ValueError: another setting, no number of seats, or an environment without a space for all.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        for name in config:
            if name not in _SETTINGS:
                raise ValueError(
                    f"Seats has no setting {name!r}{nearest(name, _SETTINGS)} It takes {list(_SETTINGS)}; settings of "
                    "the environment itself belong into env_config"
                )
        seats = config.get("seats")
        if not isinstance(seats, int) or seats < 1 or "env" not in config:
            raise ValueError(
                f"Seats got {dict(config)}; needed: {{'env': a MultiAgentEnv class, 'seats': how many agents an "
                "episode has at most}"
            )
        spec, settings = resolve_env(config["env"]), dict(config.get("env_config", {}))
        if isinstance(config, EnvContext):
            settings = config.copy_with_overrides(env_config=settings)
        env = call(spec.target, spec.name, settings, num_envs=1, as_rllib=True)
        if not isinstance(env, MultiAgentEnv):
            raise TypeError(f"Seats got the environment {spec.name!r}, a {type(env).__name__}; needed: a MultiAgentEnv")
        self.env: MultiAgentEnv = env
        self.possible_agents = [f"seat_{i}" for i in range(seats)]
        self.observation_spaces = dict.fromkeys(self.possible_agents, self._space("observation_space"))
        self.action_spaces = dict.fromkeys(self.possible_agents, self._space("action_space"))
        self.metadata = env.metadata
        self.render_mode = env.render_mode
        self.seat_of: dict[Any, str] = {}
        super().__init__()

    def _space(self, name: str) -> gym.Space:
        space = getattr(self.env, name)
        if space is None:
            raise ValueError(
                f"{type(self.env).__name__} has no {name} for agents it has not named yet; set self.{name} in its "
                "__init__"
            )
        return space

    @override(MultiAgentEnv)
    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.seat_of = {}
        returned = self.env.reset(seed=seed, options=options)
        observations, infos = self._seated("reset", returned, ("observations", "infos"))
        return observations, infos

    @override(MultiAgentEnv)
    def step(self, action_dict: dict[str, Any]) -> tuple[dict, dict, dict, dict, dict]:
        name_of = {seat: name for name, seat in self.seat_of.items()}
        returned = self.env.step({name_of[seat]: action for seat, action in action_dict.items()})
        names = ("observations", "rewards", "terminateds", "truncateds", "infos")
        observations, rewards, terminateds, truncateds, infos = self._seated("step", returned, names)
        return observations, rewards, terminateds, truncateds, infos

    def _seated(self, method: str, returned: Any, names: tuple[str, ...]) -> list[dict[str, Any]]:
        return [
            {self._seat(name): value for name, value in by_name.items()}
            for by_name in returned_dicts(self.env, method, returned, names)
        ]

    def _seat(self, name: Any) -> str:
        if name in (ALL, COMMON):  # of all agents, and of none
            return str(name)
        if name not in self.seat_of:
            if len(self.seat_of) == len(self.possible_agents):
                raise ValueError(
                    f"{type(self.env).__name__} names {name!r}, agent number {len(self.seat_of) + 1} of this episode; "
                    f"there are {len(self.possible_agents)} seats. Set 'seats' to as many agents as an episode can "
                    "have, those included that have ended"
                )
            self.seat_of[name] = self.possible_agents[len(self.seat_of)]
        return self.seat_of[name]

    def get_state(self) -> dict[str, Any]:
        """The environment's own state, and who sits where."""
        return {"env": state_of(self.env), "seat_of": dict(self.seat_of)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from where `get_state` was called."""
        env: Any = self.env
        env.set_state(state["env"])
        self.seat_of = dict(state["seat_of"])

    @override(MultiAgentEnv)
    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        """Closes the environment."""
        self.env.close()
