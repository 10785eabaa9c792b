"""From the options `critic`, `critic_config` and `credit` to a plan, and to the network of the team's critic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from thrust_rllib.envs.names import nearest
from thrust_rllib.joint_batch import AgentID, ModuleID
from thrust_rllib.rl_modules.mlp import ACTIVATIONS, layer_widths
from thrust_rllib.rl_modules.team_critic import POOLINGS, SetCritic, TeamCritic
from thrust_rllib.team_credit import CriticPlan
from thrust_rllib.team_view import TeamView

CRITICS = ("independent", "mean", "central", "set")
CREDITS = ("own", "shared", "agent", "difference")
STATE, OBSERVATIONS, AUTO = "state", "observations", "auto"
NETWORK_KEYS = ("fcnet_hiddens", "fcnet_activation", "cell", "cell_size", "max_seq_len")
SET_KEYS = ("encoder_hiddens", "pooling")
KEYS = {"central": (*NETWORK_KEYS, "input"), "set": (*NETWORK_KEYS, *SET_KEYS, "scalars")}


class _Team(Protocol):
    """What is known of a team once its environment was looked at: see `JointPPOConfig`."""

    critic: str
    credit: str
    critic_config: Mapping[str, Any]


@dataclass(frozen=True)
class DeclaredState:
    """An environment's global state: S numbers, and the space that names their parts, if it has one."""

    size: int
    space: gym.Space | None = None

    def columns(self, name: str) -> tuple[int, ...]:
        """Where a part of a Dict state stands.

        Raises:
            ValueError: there is no such part.
        """
        parts = self.space.spaces if isinstance(self.space, spaces.Dict) else {}
        start = 0
        for part, space in parts.items():
            stop = start + spaces.flatdim(space)
            if part == name:
                return tuple(range(start, stop))
            start = stop
        raise ValueError(
            f"critic_config scalars names {name!r}; the environment's state has the parts {sorted(parts) or 'none'}"
            f"{nearest(name, parts)} Declare state_space as a Dict with such a part, and return it from state()."
        )


def check_critic(config: _Team) -> None:
    """Checks what needs no environment.

    Raises:
        ValueError: what was given, what is needed.
    """
    critic, credit, given = config.critic, config.credit, config.critic_config
    if not isinstance(given, Mapping):
        raise ValueError(f"critic_config={given!r}; needed: a dict such as {{'fcnet_hiddens': [64, 64]}}")
    if critic == "mean" and credit == "own":
        raise ValueError(
            "critic='mean' with credit='own': there is one value of the team, trained on the team's return, and no "
            "return of an agent's own. Set credit='shared', 'agent' or 'difference'."
        )
    if critic == "independent" and credit == "agent":
        raise ValueError(
            "credit='agent' with critic='independent': own rewards on top of own values are credit='own'. Set that, or "
            "a critic of the team: critic='mean', 'central' or 'set'."
        )
    if critic not in KEYS:
        if given:
            raise ValueError(
                f"critic_config={dict(given)} would be ignored: critic={critic!r} has no network of the team's own. "
                "Set critic='central' or 'set', or the policies' networks with .rl_module(model_config=…)."
            )
        return
    for key in given:
        if key not in KEYS[critic]:
            raise ValueError(
                f"critic_config knows no key {key!r} with critic={critic!r}{nearest(str(key), KEYS[critic])} Its keys: "
                f"{', '.join(KEYS[critic])}"
            )
    for key in ("fcnet_hiddens", "encoder_hiddens"):
        layer_widths(f"critic_config {key}", given.get(key, (64,)))
    if given.get("fcnet_activation", "tanh") not in list(ACTIVATIONS):
        raise ValueError(
            f"critic_config fcnet_activation={given['fcnet_activation']!r}; needed: one of {', '.join(ACTIVATIONS)}"
        )
    if given.get("cell") not in (None, "lstm", "gru"):
        raise ValueError(f"critic_config cell={given['cell']!r}; needed: None, 'lstm' or 'gru'")
    if given.get("cell") is None and (idle := [key for key in ("cell_size", "max_seq_len") if key in given]):
        raise ValueError(
            f"critic_config {idle[0]}={given[idle[0]]!r} would be ignored: the critic has no memory. Set cell='lstm' "
            "or 'gru', or leave it out."
        )
    size = given.get("cell_size", 64)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"critic_config cell_size={size!r}; needed: a whole number ≥ 1")
    if given.get("pooling", "mean") not in POOLINGS:
        raise ValueError(
            f"critic_config pooling={given['pooling']!r}; needed: one of {', '.join(POOLINGS)}"
            f"{nearest(str(given['pooling']), POOLINGS)}"
        )
    if not given.get("encoder_hiddens", (64,)):
        raise ValueError(
            f"critic_config encoder_hiddens={given['encoder_hiddens']!r}; needed: one width or more, e.g. [64]: agents "
            "are pooled behind them"
        )
    if given.get("input", AUTO) not in (AUTO, STATE, OBSERVATIONS):
        raise ValueError(f"critic_config input={given['input']!r}; needed: 'auto', 'state' or 'observations'")


def may_read_state(config: _Team) -> bool:
    """Whether the critic reads the environment's state if it has one; of others `state()` is never called."""
    given = config.critic_config
    if config.critic == "set":
        return bool(given.get("scalars"))
    return config.critic in KEYS and given.get("input", AUTO) != OBSERVATIONS


def critic_plan(
    config: _Team,
    agents: Mapping[AgentID, ModuleID],
    observed: Mapping[ModuleID, gym.Space],
    state: DeclaredState | None,
) -> CriticPlan:
    """Which critic, which credit, and what the team's critic sees.

    Args:
        config: with `critic`, `credit`, `critic_config`.
        agents: {agent: module}.
        observed: {module: the space that it sees}.
        state: of the environment, or None.

    Raises:
        ValueError: a state is asked for that the environment has not.
    """
    if config.critic not in KEYS:
        return CriticPlan(config.critic, config.credit)
    given = config.critic_config
    names = tuple(agents)
    widths = tuple(int(np.prod(observed[module_id].shape or ())) for module_id in agents.values())
    reads_state = given.get("input", AUTO) == STATE or (given.get("input", AUTO) == AUTO and state is not None)
    if config.critic == "set":
        view = TeamView(names, widths, _scalars(given.get("scalars", ()), state))
    elif reads_state:
        if state is None:
            raise ValueError(
                "critic_config input='state', but the environment has no state(). Let the critic read the agents' "
                "joined observations: critic_config={'input': 'observations'}."
            )
        view = TeamView(names, (), tuple(range(state.size)))
    else:
        view = TeamView(names, widths)
    return CriticPlan(config.critic, config.credit, view, given.get("max_seq_len"))


def _scalars(named: Any, state: DeclaredState | None) -> tuple[int, ...]:
    if not named:
        return ()
    if state is None:
        raise ValueError(f"critic_config scalars={named!r} are parts of the environment's state, and it has no state()")
    if named == STATE:
        return tuple(range(state.size))
    if isinstance(named, str) or not isinstance(named, Iterable):
        raise ValueError(f"critic_config scalars={named!r}; needed: 'state' for all of it, or a tuple of names")
    return tuple(column for name in named for column in state.columns(name))


def critic_spec(config: _Team, plan: CriticPlan, agents: Mapping[AgentID, ModuleID]) -> RLModuleSpec:
    """The network of the team's critic, which only the learner builds.

    Args:
        config: see `critic_plan`.
        plan: made of it.
        agents: {agent: module}; agents whose observations have the same size are of one kind to a set critic.
    """
    assert plan.view is not None
    given = config.critic_config
    model = {key: given[key] for key in (*NETWORK_KEYS, *SET_KEYS) if key in given}
    model["num_values"] = 1 if plan.of_team else len(plan.view.agents)
    if plan.critic == "set":
        model["agent_widths"] = list(plan.view.widths)
        model["agent_kinds"] = [f"width_{width}" for width in plan.view.widths]
    return RLModuleSpec(
        module_class=SetCritic if plan.critic == "set" else TeamCritic,
        observation_space=spaces.Box(-np.inf, np.inf, (plan.view.width,), np.float32),
        action_space=spaces.Discrete(1),
        model_config=model,
        learner_only=True,
    )
