"""Joint episodes made step by step, and how they are read."""

from __future__ import annotations

import numpy as np
from ray.rllib.utils.error import MultiAgentEnvError

from thrust_rllib.joint_episode import ALL, JointEpisode

AGENTS = ("a0", "a1", "a2")
REFUSALS = (IndexError, KeyError, ValueError, AssertionError, TypeError, AttributeError, MultiAgentEnvError)


def joint(agents=AGENTS, **kwargs):
    return JointEpisode(env_name="village", runner_index=2, env_index=5, agents=agents, **kwargs)


def step(observations=(), actions=(), rewards=(), ended=(), cut=(), over=None, t=0):
    """Arguments of `add_env_step`; agents' observations and actions are their own names and the step."""
    terminateds, truncateds = dict.fromkeys(ended, True), dict.fromkeys(cut, True)
    terminateds[ALL], truncateds[ALL] = over == "terminated", over == "truncated"
    return {
        "observations": {a: np.array([float(t), 0.5]) for a in observations},
        "actions": {a: 10 * t for a in actions},
        "rewards": dict(rewards),
        "infos": {a: {"t": t} for a in observations},
        "terminateds": terminateds,
        "truncateds": truncateds,
        "extra_model_outputs": {a: {"action_logp": -float(t)} for a in actions},
    }


def start(observations, agents=AGENTS):
    episode = joint(agents)
    episode.add_env_reset(observations={a: np.array([0.0, 0.5]) for a in observations})
    return episode


def read(episode, what, index, **options):
    """What the reading method returns, or the class of its refusal."""
    if what == "extra_model_outputs":
        options["key"] = "logp"
    try:
        return getattr(episode, f"get_{what}")(indices=index, **options)
    except REFUSALS as error:
        return type(error)


def one_step(episode, what, t, agents):
    """{agent: value} at one environment step, as RLlib's list form reads it (its other form loses values, see
    `test_rllib_contract`)."""
    found = read(episode, what, [t], neg_index_as_lookback=True, return_list=True)
    return {a: v for a, v in found[0].items() if a in agents} if isinstance(found, list) and found else {}


def index_of(episode):
    return {agent: (list(index.data), index.lookback) for agent, index in episode.env_t_to_agent_t.items()}
