"""Episodes made by hand, of both classes, and what a joint batch made of them holds.

A *plan* says for each agent what it is shown at the moments 0 (reset), 1, 2, …: o an observation, . nothing,
T its termination with an observation, t without one, X its truncation with an observation.
"""

from __future__ import annotations

import numpy as np
from gymnasium.spaces import Box, Discrete
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner

from thrust_rllib.connectors.episodes_to_joint_batch import EpisodesToJointBatch
from thrust_rllib.connectors.team_codec import TeamCodec
from thrust_rllib.joint_episode import ALL, JointEpisode

BOUND = 1000.0
AGENTS = ("a0", "a1", "a2")


def team(agents=AGENTS, space=None, action_space=None, modules=None):
    """One module per agent, unless said otherwise."""
    space = Box(-BOUND, BOUND, (3,), np.float32) if space is None else space
    action_space = Discrete(5) if action_space is None else action_space
    return TeamCodec.of(
        modules or {agent: f"m_{agent}" for agent in agents},
        dict.fromkeys(agents, space),
        dict.fromkeys(agents, action_space),
        normalize_actions=True,
        clip_actions=False,
    )


def see(number, t, i):
    """(episode, moment, agent)."""
    return np.array([number, t, i], np.float32)


def pay(t, i):
    """For what agent i did at step t."""
    return t + 10.0 * i


def joint(agents=AGENTS, runner=0, env=0, number=0):
    return JointEpisode(env_name="village", runner_index=runner, env_index=env, agents=agents, id_=f"episode{number}")


def play(plan, episode=None, *, number=0, over=None, cuts=(), lookback=0, wait_pay=0.0, observe=see, reward=pay):
    """Fragments of one episode; a fragment begins before each step whose number is in `cuts`.

    Args:
        plan: {agent: moments}, see the module's text.
        episode: that grows; default: a `JointEpisode`.
        number: of the episode, in its observations.
        over: "terminated" or "truncated": how the last step ends the episode.
        cuts: see above.
        lookback: of the fragments.
        wait_pay: what a waiting agent is paid at each step.
        observe: (episode number, moment, agent's index) to its observation.
        reward: (step, agent's index) to what an agent is paid that acts.
    """
    episode = joint(tuple(plan), number=number) if episode is None else episode
    index = {agent: i for i, agent in enumerate(plan)}
    length = len(next(iter(plan.values())))
    shown = lambda t: {a: observe(number, t, index[a]) for a in plan if plan[a][t] in "oTX"}  # noqa: E731
    episode.add_env_reset(observations=shown(0))
    fragments, waiting = [episode], set()
    for t in range(1, length):
        if t - 1 in cuts:
            fragments.append(fragments[-1].cut(len_lookback_buffer=lookback))
        acts = [a for a in plan if plan[a][t - 1] == "o"]
        waiting = (waiting | set(acts)) - {a for a in plan if plan[a][t - 1] in "TtX"}
        rewards = {a: reward(t - 1, index[a]) for a in acts}
        rewards |= {a: wait_pay for a in waiting if a not in acts and wait_pay}
        fragments[-1].add_env_step(
            observations=shown(t),
            actions={a: (t - 1 + index[a]) % 5 for a in acts},
            rewards=rewards,
            terminateds={a: True for a in plan if plan[a][t] in "Tt"} | {ALL: over == "terminated" and t == length - 1},
            truncateds={a: True for a in plan if plan[a][t] == "X"} | {ALL: over == "truncated" and t == length - 1},
            extra_model_outputs={a: {"action_logp": np.float32(-0.25 * t)} for a in acts},
        )
        waiting -= set(shown(t))
    return fragments


def collect(episodes, codec=None, **options):
    """The batch of these episodes, with `origin`."""
    return EpisodesToJointBatch(codec=codec or team(), audit=True, **options).joint_batch(episodes)


def finish(episodes):
    """What RLlib's runner does to episodes that it returns."""
    for episode in episodes:
        MultiAgentEnvRunner._prune_zero_len_sa_episodes(episode)
        episode.to_numpy()
    return episodes


def steps_of(batch, agent):
    """{row t, column e}: (step, reward, terminated, truncated) of the steps an agent has in the batch.

    Observation, action and log-probability are compared with the step on the way.
    """
    s = batch.stream(agent)
    found = {}
    for t, e in np.argwhere(s.present):
        number, moment, i = s.obs[t, e]
        assert i == AGENTS.index(agent)
        assert s.actions[t, e] == (moment + i) % 5
        assert s.action_logp[t, e] == np.float32(-0.25 * (moment + 1))
        found[int(t), int(e)] = (int(moment), float(s.rewards[t, e]), bool(s.terminated[t, e]), bool(s.truncated[t, e]))
    for name in ("obs", "actions", "action_logp", "rewards", "terminated", "truncated"):
        assert not getattr(s, name)[~s.present].any(), f"{name} of an absent agent"
    return found


def following(batch, agent):
    """{row t, column e}: moment of the observation that follows, where it is read: truncated, or last of the column."""
    s, envs = batch.stream(agent), batch.num_envs
    places = [(int(row) // envs, int(row) % envs) for row in batch.bootstrap_rows]
    read = {
        (t, e)
        for t, e in zip(*np.nonzero(s.present & ~s.terminated), strict=True)
        if s.truncated[t, e] or not s.present[t + 1 :, e].any()
    }
    assert read <= set(places)
    return {place: int(s.bootstrap_obs[k, 1]) for k, place in enumerate(places) if place in read}


def assert_same(left, right):
    for name in ("bootstrap_rows", "episode_start", "valid"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name), err_msg=name)
    assert list(left.modules) == list(right.modules)
    for module_id, mine in left.modules.items():
        other = right.modules[module_id]
        assert mine.agents == other.agents
        for name in (
            "obs", "actions", "action_logp", "rewards", "present", "terminated", "truncated", "bootstrap_obs",
            "action_mask", "origin",
        ):  # fmt: skip
            x, y = getattr(mine, name), getattr(other, name)
            assert (x is None) == (y is None), name
            if x is not None:
                assert x.dtype == y.dtype
                np.testing.assert_array_equal(x, y, err_msg=f"{name} of {module_id}")


PLAIN = (False, False)
TERMINATED = (True, False)
TRUNCATED = (False, True)
