"""The same environments through both doors, and what it means that two batches are equal.

`Doors` makes a runner of each kind from two configurations that differ in `sampling` alone, with the same weights.
"""

from __future__ import annotations

import copy

import gymnasium as gym
import numpy as np
import torch

from tests.support import Declared, make_learner, scramble, tiny_config
from thrust_rllib import JointBatch, JointEnv, JointEnvRunner, JointPPOConfig, JointStepResult
from thrust_rllib.connectors.episodes_to_joint_batch import EpisodesToJointBatch
from thrust_rllib.episode_runner import JointEpisodeRunner

DOORS = {"arrays": JointEnvRunner, "episodes": JointEpisodeRunner}


class RecordsStates(JointPPOConfig):
    """Records states whatever the critic reads."""

    records_state = True


class Doors:
    """Both runners, and a learner for each.

    Args:
        env: as in `tiny_config`.
        env_config: as in `tiny_config`.
        worker_index: of both runners.
        weights: size of the random weights; large ones leave exploration no choice.
        runners: as in `tiny_config`.
        environment: further options of `.environment(…)`.
        records_state: record the environment's global state.
        **options: of `tiny_config`.
    """

    def __init__(
        self, env, env_config=None, *, worker_index=0, weights=0.3, runners=None, environment=None,
        records_state=False, **options,
    ):  # fmt: skip
        self.runners, self.learners = {}, {}
        for door, runner_class in DOORS.items():
            config = tiny_config(env, env_config, runners={**(runners or {}), "sampling": door}, **options)
            config.environment(**(environment or {})).validate()
            assert config.env_runner_cls is runner_class
            if records_state:
                config.__class__ = RecordsStates
            self.runners[door] = config.env_runner_cls(config=config, worker_index=worker_index)
            self.learners[door] = make_learner(config, self.runners[door].get_spaces())
        self.codec = config.team_codec()
        self.set_weights(0, weights)

    def set_weights(self, seed, size=0.3):
        """Random weights, the same for both learners and both runners."""
        scramble(self.learners["arrays"], seed, size)
        state = self.learners["arrays"].get_state()
        self.learners["episodes"].set_state(state)
        for runner in self.runners.values():
            runner.set_state({"rl_module": self.learners["arrays"].module.get_state(inference_only=True)})

    def nudge(self, size=0.05):
        """Moves the learners' weights, so that they are no longer those that sampled; both alike."""
        for learner in self.learners.values():
            generator = torch.Generator().manual_seed(5)
            for module_id in sorted(learner.module.keys()):
                for p in learner.module[module_id].parameters():
                    with torch.no_grad():
                        p.add_(size * torch.randn(p.shape, generator=generator))

    def sample(self, steps, **options):
        """(batch of the fast door, episodes of the general one) of `steps` steps in every environment."""
        options = {"explore": False, **options}
        fast, general = (r.sample(num_timesteps=steps * r.num_envs, **options) for r in self.runners.values())
        return fast[0], general

    def joint_batch(self, episodes):
        """The general door's batch."""
        return EpisodesToJointBatch(codec=self.codec, audit=True).joint_batch(episodes)

    def column(self, episodes, env):
        """The batch of what one environment played."""
        return self.joint_batch([episode for episode in episodes if episode.env_index == env])


def column(batch: JointBatch, env: int) -> JointBatch:
    """One environment of a batch of the fast door, as a batch."""
    mine = batch.bootstrap_rows % batch.num_envs == env
    modules = {}
    for module_id, streams in batch.modules.items():
        step_fields = {
            name: None if value is None else value[:, :, env : env + 1]
            for name, value in vars(streams).items()
            if name not in ("agents", "bootstrap_obs")
        }
        modules[module_id] = type(streams)(
            agents=streams.agents, bootstrap_obs=streams.bootstrap_obs[:, mine], **step_fields
        )
    return JointBatch(
        modules=modules,
        bootstrap_rows=batch.bootstrap_rows[mine] // batch.num_envs,
        episode_start=batch.episode_start[:, env : env + 1],
        valid=batch.valid[:, env : env + 1],
        global_state=None if batch.global_state is None else batch.global_state[:, env : env + 1],
        bootstrap_state=None if batch.bootstrap_state is None else batch.bootstrap_state[mine],
        extras={name: np.take(x, [env], axis=x.ndim - 1) for name, x in batch.extras.items()},  # the last axis is E
    ).check()


def read_bootstraps(batch: JointBatch, steps: int) -> dict:
    """{(t, environment, agent): observation} of what advantages read behind rows, up to row `steps`.

    An agent's stream goes on behind a row in which it is truncated, and behind the last row of its environment.
    """
    found = {}
    heights = batch.valid.sum(axis=0)
    for k, row in enumerate(batch.bootstrap_rows):
        t, env = divmod(int(row), batch.num_envs)
        for streams in batch.modules.values():
            for j, agent in enumerate(streams.agents):
                ends = streams.truncated[t, j, env] or (t == heights[env] - 1 and t < steps)
                goes_on = streams.present[t, j, env] and not streams.terminated[t, j, env]
                if t < steps and ends and goes_on:
                    found[t, env, agent] = streams.bootstrap_obs[j, k]
    return found


def needed_bootstraps(batch: JointBatch, steps: int) -> set:
    """The keys that `read_bootstraps` must have."""
    found = set()
    for env, height in enumerate(batch.valid.sum(axis=0)):
        for streams in batch.modules.values():
            for j, agent in enumerate(streams.agents):
                goes_on = streams.present[:, j, env] & ~streams.terminated[:, j, env]
                ends = streams.truncated[:, j, env].copy()
                ends[height - 1] = True
                found |= {(int(t), env, agent) for t in np.flatnonzero(goes_on & ends) if t < steps}
    return found


def assert_same_batches(fast: JointBatch, general: JointBatch, atol: float = 0.0) -> None:
    """Equal in every field, wherever it is read.

    Where episodes of several environments differ in length, RLlib's loop gives columns of different heights; compare
    these one by one (`column`, `Doors.column`): then the rows that both have are compared.

    Args:
        fast: of the fast door.
        general: of the general one.
        atol: of observations, actions and rewards; log-probabilities may differ by 2e-6 more: the fast door acts in
            numpy.
    """
    assert fast.agents == general.agents and list(fast.modules) == list(general.modules)
    assert fast.num_envs == general.num_envs
    heights = [batch.valid.sum(axis=0) for batch in (fast, general)]
    assert fast.num_envs == 1 or (heights[0] == heights[1]).all()
    steps = int(np.minimum(*heights).min())
    assert steps
    np.testing.assert_array_equal(fast.valid[:steps], general.valid[:steps])
    np.testing.assert_array_equal(fast.episode_start[:steps], general.episode_start[:steps])
    for module_id, left in fast.modules.items():
        right = general.modules[module_id]
        assert left.agents == right.agents
        for name in ("present", "terminated", "truncated"):
            mine, other = (getattr(s, name)[:steps] for s in (left, right))
            assert mine.dtype == other.dtype == bool
            if name == "truncated" and heights[0][0] != heights[1][0]:
                mine, other = mine[: steps - 1], other[: steps - 1]  # the shorter one may be cut in its last row
            np.testing.assert_array_equal(mine, other, err_msg=f"{name} of {module_id}")
        acted = left.present[:steps]
        for name, tolerance in {"obs": atol, "actions": atol, "rewards": atol, "action_logp": atol + 2e-6}.items():
            mine, other = (getattr(s, name)[:steps][acted] for s in (left, right))
            assert mine.dtype == other.dtype and getattr(left, name).shape[1:] == getattr(right, name).shape[1:]
            np.testing.assert_allclose(mine, other, rtol=0, atol=tolerance, err_msg=f"{name} of {module_id}")
        assert (left.action_mask is None) == (right.action_mask is None)
        if left.action_mask is not None:
            for streams in (left, right):
                assert streams.action_mask[~streams.present].all()
            np.testing.assert_array_equal(left.action_mask[:steps], right.action_mask[:steps])
        _assert_same_origins(left.origin[:steps], right.origin[:steps], acted)
    common = steps if (heights[0] == heights[1]).all() else steps - 1
    reads = [read_bootstraps(batch, common) for batch in (fast, general)]
    assert set(reads[0]) == set(reads[1]) == needed_bootstraps(fast, common)
    for key, observation in reads[0].items():
        np.testing.assert_allclose(observation, reads[1][key], rtol=0, atol=atol, err_msg=f"what follows {key}")
    if (heights[0] == heights[1]).all():
        np.testing.assert_array_equal(fast.bootstrap_rows, general.bootstrap_rows)
    assert (fast.global_state is None) == (general.global_state is None)
    if fast.global_state is not None:
        states = [batch.global_state[:steps] for batch in (fast, general)]
        assert states[0].dtype == states[1].dtype == np.float32
        np.testing.assert_allclose(*states, rtol=0, atol=atol, err_msg="global_state")
        following = [dict(zip(b.bootstrap_rows.tolist(), b.bootstrap_state, strict=True)) for b in (fast, general)]
        rows = {t * fast.num_envs + env for t, env, _ in needed_bootstraps(fast, common)}
        for row in rows:
            np.testing.assert_allclose(
                following[0][row], following[1][row], rtol=0, atol=atol, err_msg=f"state behind row {row}"
            )
    assert set(fast.extras) == set(general.extras)
    for name, values in fast.extras.items():
        mine, other = (np.asarray(x)[:steps] for x in (values, general.extras[name]))
        assert mine.shape == other.shape
        np.testing.assert_allclose(mine, other, rtol=0, atol=atol, err_msg=name)


def _assert_same_origins(left, right, acted):
    """The same steps, in episodes that are numbered otherwise."""
    np.testing.assert_array_equal(left[acted][:, 1], right[acted][:, 1])
    pairs = set(zip(left[acted][:, 0].tolist(), right[acted][:, 0].tolist(), strict=True))
    assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})


class Typed(Declared):
    """`Declared`, with spaces (and their generators) of its own, paid by the sum of the action."""

    def __init__(self, observation_spaces, action_spaces, agents=None, length=5):
        super().__init__(copy.deepcopy(observation_spaces), copy.deepcopy(action_spaces), agents, length)

    def step_joint(self, actions):
        result = super().step_joint(actions)
        result.rewards = {agent: float(np.sum(actions[agent])) for agent in self.possible_agents}
        return result


class Comers(JointEnv):
    """Three agents with lives drawn anew in each episode; one of them lives through all of it.

    Agents are born late, end early (terminated with or without a last observation, or truncated), or are not in the
    episode at all. They see their index, the step and a random number, moved by the last actions; a cost for all and a
    share for each are extras.
    """

    LENGTH = 9

    def __init__(self):
        self.possible_agents = ["cat", "ant", "bee"]
        self.observation_spaces = {a: gym.spaces.Box(-20, 20, (3,)) for a in self.possible_agents}
        self.action_spaces = {a: gym.spaces.Discrete(3) for a in self.possible_agents}
        self.rng = np.random.default_rng()

    def reset_joint(self, seed=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.t, self.moved = 0, 0
        length = int(self.rng.integers(3, self.LENGTH + 1))
        whole = self.possible_agents[self.rng.integers(3)]
        self.lives = {}
        for agent in self.possible_agents:
            first = 0 if agent == whole else int(self.rng.integers(length))
            last = length - 1 if agent == whole else int(self.rng.integers(first, length))
            end = ("terminated", "truncated", "silent")[self.rng.integers(3)]
            if agent == whole or self.rng.random() < 0.8:
                self.lives[agent] = (first, last, end)
        self.length = length
        return self._see(self._acting())

    def _acting(self):
        return [a for a, (first, last, _) in self.lives.items() if first <= self.t <= last]

    def _see(self, agents):
        return {
            a: np.array([self.possible_agents.index(a), self.t, self.rng.normal() + self.moved], np.float32)
            for a in agents
        }

    def step_joint(self, actions):
        acted = self._acting()
        assert set(actions) == set(acted)
        self.moved = sum(int(a) for a in actions.values())
        rewards = {a: float(actions[a]) + self.t for a in acted}
        ended = {a: self.lives[a][2] for a in acted if self.lives[a][1] == self.t}
        self.t += 1
        seen = self._see([*self._acting(), *(a for a, end in ended.items() if end != "silent")])
        terminated = {a: ended.get(a) in ("terminated", "silent") for a in acted}
        truncated = {a: ended.get(a) == "truncated" for a in acted}
        extras = {"cost": np.float32(self.moved), "share": {a: np.float32(rewards[a] / 2) for a in acted}}
        return JointStepResult(rewards, seen, terminated, truncated, extras, over=self.t == self.length)
