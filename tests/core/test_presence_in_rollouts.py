"""The fast door where agents join late and end early: rows, bootstraps, targets, training, episodes."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from ray.tune.utils import flatten_dict

from tests.core.lives_reference import rows_of, targets_of
from tests.envs.lives import FORMS, JointLives
from tests.envs.test_presence import Turns
from tests.support import make_learner, make_runner, parameters, runner_metrics, tiny_config, update
from thrust_rllib import JointEnv, JointStepResult, RedundancyPenalty
from thrust_rllib.envs import make_vector_env
from thrust_rllib.evaluation import play_policy
from thrust_rllib.joint_rows import joint_rows

# "a" is truncated in step 1 of 5, "b" comes in step 1 and is terminated in step 3, "c" stays.
LIVES = {"a": (0, 1, "truncated"), "b": (1, 3, "terminated"), "c": (0, 4, "truncated")}
GAMMA, LAMBDA = {"a": 0.9, "b": 0.8, "c": 0.95}, {"a": 0.7, "b": 0.95, "c": 1.0}


def settings(**options):
    return {"lives": LIVES, "length": 5, **options}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("policies", ["per_agent", "shared"])
def test_rows_of_the_same_step_are_joined(form, policies):
    runner = make_runner(tiny_config(FORMS[form], settings(), num_envs=3, policies=policies))
    (batch,) = runner.sample(num_timesteps=3 * 12)
    for i, (agent, (first, last, end)) in enumerate(LIVES.items()):
        stream = batch.stream(agent)
        for t in range(12):
            episode, step = divmod(t, 5)
            here = first <= step <= last
            assert stream.present[t].tolist() == [here] * 3
            assert stream.rewards[t].tolist() == [10.0 * i + step + 1 if here else 0.0] * 3
            assert getattr(stream, end)[t].tolist() == [step == last] * 3
            assert stream.obs[t].tolist() == [[episode, step, i] if here else [0, 0, 0]] * 3
            assert here or not (stream.actions[t].any() or stream.action_logp[t].any())
    # What follows the truncated steps 1 and 4 of each episode, and the last row.
    assert batch.bootstrap_rows.tolist() == [3 * t + e for t in (1, 4, 6, 9, 11) for e in range(3)]
    of_a, of_c = batch.stream("a").bootstrap_obs[::3].tolist(), batch.stream("c").bootstrap_obs[::3].tolist()
    assert of_a[0] == [0, 2, 0] and of_a[2] == [1, 2, 0]  # the last observation before it disappears
    assert of_c == [[0, 2, 2], [0, 5, 2], [1, 2, 2], [1, 5, 2], [2, 2, 2]]


def value(obs):
    """A fixed value function of (episode, step, agent), float64."""
    return 0.3 + 0.2 * obs[..., 0] - 0.15 * obs[..., 1] ** 2 + 0.7 * obs[..., 2]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 7, 13])
def test_targets_equal_those_of_each_agents_own_stream(form, steps):
    runner = make_runner(tiny_config(FORMS[form], settings(), num_envs=2))
    for start in (0, steps):  # the second rollout goes on where the first one was cut
        (batch,) = runner.sample(num_timesteps=2 * steps)
        rows = joint_rows(
            [batch],
            values_of=lambda module_id, obs, sequences: value(obs.double()).float(),
            memories={},
            normalizers={},
            gamma=GAMMA,
            lambda_=LAMBDA,
            bootstrap=True,
            standardize_rollout=False,
            device="cpu",
        )
        for i, agent in enumerate(batch.agents):
            expected = rows_of(LIVES, 5, agent, start, start + steps)
            targets = targets_of(expected, value, GAMMA[agent], LAMBDA[agent])
            present = rows.present[i].view(steps, 2)
            assert present[:, 0].tolist() == present[:, 1].tolist() == [row is not None for row in expected]
            for e in range(2):
                mine = rows.value_targets[i].view(steps, 2)[:, e].numpy().astype(np.float64)
                advantages = rows.advantages[i].view(steps, 2)[:, e].numpy().astype(np.float64)
                for t, row in enumerate(expected):
                    if row is None:
                        assert mine[t] == advantages[t] == 0.0
                    else:
                        assert mine[t] == pytest.approx(targets[t], abs=2e-5), (agent, t)
                        assert advantages[t] == pytest.approx(targets[t] - value(row.obs), abs=2e-5), (agent, t)


def test_the_reference_tells_the_ends_apart():
    """A truncated end taken for a termination, or the other way round, would be found."""
    for agent, other in (("a", "terminated"), ("b", "truncated")):
        changed = {**LIVES, agent: (*LIVES[agent][:2], other)}
        right = targets_of(rows_of(LIVES, 5, agent, 0, 5), value, 0.9, 0.9)
        wrong = targets_of(rows_of(changed, 5, agent, 0, 5), value, 0.9, 0.9)
        assert abs(right[LIVES[agent][1]] - wrong[LIVES[agent][1]]) > 0.1


class Dies(JointEnv):
    """a1 dies after its second step."""

    def __init__(self):
        self.possible_agents = ["a0", "a1"]
        self.observation_spaces = dict.fromkeys(self.possible_agents, gym.spaces.Box(-9, 9, (3,)))
        self.action_spaces = dict.fromkeys(self.possible_agents, gym.spaces.Discrete(2))

    def reset_joint(self, seed=None):
        self.t = 0
        return dict.fromkeys(self.possible_agents, np.ones(3, np.float32))

    def step_joint(self, actions):
        self.t += 1
        seen = {"a0": np.full(3, self.t, np.float32)} | ({"a1": np.ones(3, np.float32)} if self.t < 2 else {})
        ends = {"a0": self.t == 6, "a1": self.t == 2}
        return JointStepResult({a: float(actions[a]) for a in actions}, seen, {a: ends[a] for a in actions})


@pytest.mark.parametrize("scope", ["rollout", "minibatch", "team"])
def test_an_agent_that_dies_learns(scope):
    config = tiny_config(
        Dies,
        num_envs=4,
        lr=0.02,
        standardize_advantages=scope,
        iterate_all_minibatches=True,
        cross_agent_losses={"redundancy": RedundancyPenalty()},
        cross_agent_coeffs={"redundancy": 0.01},
    )
    runner, learner = make_runner(config), make_learner(config)
    for _ in range(25):
        (batch,) = runner.sample(num_timesteps=64)
        assert all(np.isfinite(s.obs).all() and np.isfinite(s.bootstrap_obs).all() for s in batch.streams())
        result = update(learner, batch)
        assert all(np.isfinite(v) for a in ("a0", "a1") for v in flatten_dict(result[a]).values())
        runner.set_state({"rl_module": learner.module.get_state(inference_only=True)})
    (batch,) = runner.sample(num_timesteps=400)
    acted = batch.stream("a1").present
    assert acted.sum() < 0.4 * acted.size
    for agent in ("a0", "a1"):
        stream = batch.stream(agent)
        assert stream.rewards[stream.present].mean() > 0.8, agent  # a policy that knows nothing earns 0.5


def test_episodes_of_agents_that_come_and_go_are_reported():
    runner = make_runner(tiny_config(JointLives, settings(), num_envs=2))
    runner.sample(num_timesteps=2 * 12)
    expected = {"a": 1 + 2, "b": 12 + 13 + 14, "c": 21 + 22 + 23 + 24 + 25}
    metrics = runner_metrics(runner)
    assert metrics["agent_episode_returns_mean"] == expected
    assert metrics["agent_steps"] == {"a": 2, "b": 3, "c": 5}
    assert metrics["episode_len_mean"] == 5 and metrics["episode_return_mean"] == sum(expected.values())
    assert metrics["num_agent_steps_sampled"] == {"a": 2 * 6, "b": 2 * 7, "c": 2 * 12}
    (sampled,) = runner.sample(num_episodes=3)
    assert sampled.env_steps() == 15 and sampled.agent_steps() == 3 * 10
    played = play_policy(make_vector_env(JointLives, settings(), 2), lambda _: np.zeros((3, 2), int), 5)
    assert played.lengths.tolist() == [5] * 5 and played.returns.tolist() == [list(map(float, expected.values()))] * 5


def test_agents_that_wait_can_be_played():
    runner = make_runner(tiny_config(Turns, num_envs=2))
    (sampled,) = runner.sample(num_episodes=3)
    assert sampled.env_steps() == sampled.agent_steps() == 3 * 19
    assert runner_metrics(runner)["agent_episode_returns_mean"] == {"a0": 10, "a1": 9}


@pytest.mark.parametrize("steps", [1, 4, 5])
def test_an_agent_that_waits_is_found_at_the_end_of_a_rollout(steps):
    """Its last row has no successor to take a value of."""

    class Pauses(JointLives):
        def step_joint(self, actions):
            result = super().step_joint(actions)
            if self.plan.t == steps:
                del result.observations["c"]
            return result

    lives = {"c": (0, 9, "truncated"), "d": (0, 9, "truncated")}
    runner = make_runner(tiny_config(Pauses, {"lives": lives, "length": 10}, num_envs=1))
    with pytest.raises(ValueError, match=f"agent 'c' does not act in environment index 0, step {steps} .*episodes"):
        runner.sample(num_timesteps=steps)


@pytest.mark.parametrize("stuck", [False, True])
def test_masks_of_agents_that_come_and_go(stuck):
    """All is allowed where an agent is absent; a truncated agent's last mask may forbid everything."""

    class Masked(JointLives):
        def __init__(self):
            super().__init__(**settings())
            mask = gym.spaces.Box(0, 1, (2,), np.int8)
            space = gym.spaces.Dict({"observation": gym.spaces.Box(-1, 1000, (3,)), "action_mask": mask})
            self.observation_spaces = dict.fromkeys(self.possible_agents, space)

        def reset_joint(self, seed=None):
            return self._masked(super().reset_joint(seed))

        def step_joint(self, actions):
            assert stuck or set(actions.values()) == {1}
            result = super().step_joint(actions)
            result.observations = self._masked(result.observations)
            return result

        def _masked(self, seen):
            alive = self.plan.alive()
            return {
                a: {"observation": x, "action_mask": np.array([0, a in alive and not (stuck and a == "b")], np.int8)}
                for a, x in seen.items()
            }

    runner = make_runner(tiny_config(Masked, num_envs=2))
    if stuck:
        with pytest.raises(ValueError, match="agent 'b'.*allows no action.*environment index 0, step 1 "):
            runner.sample(num_timesteps=2 * 12)
        return
    (batch,) = runner.sample(num_timesteps=2 * 12)
    for stream in batch.streams():
        assert (stream.actions[stream.present] == 1).all()
        assert stream.action_mask[~stream.present].all() and not stream.action_mask[stream.present][:, 0].any()
    result = update(make_learner(tiny_config(Masked, num_envs=2)), batch)
    assert all(np.isfinite(v) for a in "abc" for v in flatten_dict(result[a]).values())


def test_observations_are_normalised_by_the_rows_in_which_the_agent_acted():
    runner = make_runner(tiny_config(JointLives, settings(), num_envs=2, runners={"normalize_observations": True}))
    runner.sample(num_timesteps=2 * 10)
    moments = runner.normalizer.moments
    assert {m: float(x.count) for m, x in moments.items()} == {"a": 8, "b": 12, "c": 20}
    assert float(np.ravel(moments["b"].mean)[1]) == 2.0  # steps 1, 2, 3: no zeros of its absence
    (batch,) = runner.sample(num_timesteps=2 * 10)
    learner = make_learner(tiny_config(JointLives, settings(), num_envs=2))
    before = parameters(learner)
    update(learner, batch)
    after = parameters(learner)
    assert all(np.isfinite(p).all() and (p != before[m][name]).any() for m in after for name, p in after[m].items())
    assert torch.isfinite(learner._joint_rows([batch]).values).all()
