"""The fast door: what a rollout holds, how evaluation plays, what is reported."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from tests.support import (
    box,
    declared_config,
    discrete,
    make_learner,
    make_runner,
    runner_metrics,
    scramble,
    tiny_config,
    update,
)
from thrust_rllib import JointBatch, JointEnv, JointStepResult, VectorJointEnv
from thrust_rllib.connectors.observation_encoding import ObservationEncoder
from thrust_rllib.env_runner import JointEnvRunner, SampledSteps
from thrust_rllib.envs.spaces import batch_row


def rollout(env, env_config=None, *, steps=10, num_envs=2, **options):
    runner = make_runner(tiny_config(env, env_config, num_envs=num_envs, **options))
    (batch,) = runner.sample(num_timesteps=steps * num_envs)
    assert isinstance(batch, JointBatch)
    return runner, batch


# --------------------------------------------------------------------------------------- rows and bootstraps


@pytest.mark.parametrize("policies", ["per_agent", "shared", {"x": ["agent_0", "agent_2"], "y": ["agent_1"]}])
def test_rows_are_the_environments_steps(policies):
    _, batch = rollout("debug/alignment", {"episode_length": 7}, policies=policies, steps=10, num_envs=3)
    assert sorted(batch.agents) == ["agent_0", "agent_1", "agent_2"]
    for t in range(10):
        for e in range(3):
            for i in range(3):
                stream = batch.stream(f"agent_{i}")
                assert stream.obs[t, e].tolist() == [t // 7, t % 7, i]
                assert stream.rewards[t, e] == t % 7
                assert bool(stream.truncated[t, e]) == (t == 6)
                assert not stream.terminated[t, e] and stream.present[t, e]
    assert batch.valid.all() and batch.valid.shape == (10, 3)


def test_what_follows_truncated_and_last_rows_is_the_observation_before_the_reset():
    runner, batch = rollout("debug/alignment", {"episode_length": 7}, steps=10, num_envs=2)
    assert batch.bootstrap_rows.tolist() == [12, 13, 18, 19]
    for i in range(3):
        seen = batch.stream(f"agent_{i}").bootstrap_obs.tolist()
        assert seen == [[0, 7, i], [0, 7, i], [1, 3, i], [1, 3, i]]
    # The episodes go on in the next rollout.
    (after,) = runner.sample(num_timesteps=20)
    assert after.stream("agent_1").obs[:, 0].tolist() == [[(10 + t) // 7, (10 + t) % 7, 1] for t in range(10)]
    assert after.bootstrap_rows.tolist() == [2 * 3, 2 * 3 + 1, 2 * 9, 2 * 9 + 1]


@pytest.mark.parametrize("ends, last", [("truncated", [0, 7, 0]), ("terminated", None)])
def test_an_episode_that_ends_with_the_rollout(ends, last):
    runner, batch = rollout("debug/alignment", {"episode_length": 7, "ends": ends}, steps=7, num_envs=1)
    stream = batch.stream("agent_0")
    assert getattr(stream, ends)[-1, 0] and not getattr(stream, ends)[:-1].any()
    if last is None:
        assert batch.bootstrap_rows.size == 0 and stream.bootstrap_obs.shape == (0, 3)
    else:
        assert batch.bootstrap_rows.tolist() == [6]
        assert stream.bootstrap_obs.tolist() == [last]
    (after,) = runner.sample(num_timesteps=3)
    assert after.episode_start[:, 0].tolist() == [True, False, False]
    assert after.stream("agent_0").obs[0, 0].tolist() == [1, 0, 0]


def test_terminated_rows_in_the_middle_have_no_bootstrap():
    _, batch = rollout("debug/alignment", {"episode_length": 4, "ends": "terminated"}, steps=10, num_envs=2)
    assert batch.bootstrap_rows.tolist() == [18, 19]
    assert batch.stream("agent_2").terminated[:, 1].tolist() == [t % 4 == 3 for t in range(10)]
    assert not batch.stream("agent_2").truncated.any()


def test_one_agent_terminates_and_another_is_truncated_in_the_same_step():
    ends = ["terminated", "truncated", "terminated"]
    _, batch = rollout("debug/alignment", {"episode_length": 4, "ends": ends}, steps=5, num_envs=1)
    assert batch.bootstrap_rows.tolist() == [3, 4]
    assert [bool(batch.stream(f"agent_{i}").terminated[3, 0]) for i in range(3)] == [True, False, True]
    assert [bool(batch.stream(f"agent_{i}").truncated[3, 0]) for i in range(3)] == [False, True, False]
    assert batch.stream("agent_1").bootstrap_obs[0].tolist() == [0, 4, 1]


class Counting(JointEnv):
    """Observations say how many steps were played, in spaces that do not hold zeros; episodes of different lengths.

    Args:
        kinds: {agent: one of `SPACES`}.
        terminates: agents that terminate where the others are truncated, and then see nothing any more.
        fault: agents whose last observation is not in their space.
    """

    SPACES = {
        "Discrete": gym.spaces.Discrete(9, start=1),
        "MultiDiscrete": gym.spaces.MultiDiscrete([9, 2], start=[1, 3]),
        "Box": gym.spaces.Box(1, 9, (2,)),
        "Dict": gym.spaces.Dict({"x": gym.spaces.Discrete(9, start=1), "y": gym.spaces.Box(1, 9, (1,))}),
        "Tuple": gym.spaces.Tuple((gym.spaces.Box(1, 9, (1,)), gym.spaces.Discrete(9, start=1))),
    }

    def __init__(self, kinds, terminates=(), fault=()):
        self.kinds, self.terminates, self.fault = dict(kinds), terminates, fault
        self.possible_agents = list(self.kinds)
        self.observation_spaces = {agent: self.SPACES[kind] for agent, kind in self.kinds.items()}
        self.action_spaces = dict.fromkeys(self.possible_agents, discrete())
        self.rng = np.random.default_rng()

    @staticmethod
    def seen(kind, t):
        """The observation after t steps, with a leading axis of 1."""
        count, number = np.array([t + 1]), np.array([[t + 1]], np.float32)
        return {
            "Discrete": count,
            "MultiDiscrete": np.array([[t + 1, 4]]),
            "Box": np.full((1, 2), t + 1, np.float32),
            "Dict": {"x": count, "y": number},
            "Tuple": (number, count),
        }[kind]

    def _see(self):
        return {a: batch_row(self.observation_spaces[a], self.seen(kind, self.t), 0) for a, kind in self.kinds.items()}

    def reset_joint(self, seed=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.t, self.length = 0, int(self.rng.integers(2, 8))
        return self._see()

    def step_joint(self, actions):
        self.t += 1
        over = self.t == self.length
        terminated = {agent: over and agent in self.terminates for agent in self.possible_agents}
        truncated = {agent: over and agent not in self.terminates for agent in self.possible_agents}
        observations = self._see()
        if over:
            for agent in self.terminates:
                del observations[agent]
            for agent in self.fault:
                observations[agent] = np.full(2, np.nan, np.float32)
        return JointStepResult(dict.fromkeys(self.possible_agents, 1.0), observations, terminated, truncated)


def check_bootstraps(batch, kinds):
    """Compares what follows every row that is bootstrapped with the steps played since the reset."""
    steps, envs = batch.valid.shape
    played = np.zeros((steps, envs), int)
    for t in range(steps):
        played[t] = np.where(batch.episode_start[t], 1, played[t - 1] + 1)
    compared = 0
    for agent, kind in kinds.items():
        stream, encoder = batch.stream(agent), ObservationEncoder(Counting.SPACES[kind])
        for row, seen in zip(batch.bootstrap_rows.tolist(), stream.bootstrap_obs, strict=True):
            t, e = divmod(row, envs)
            if stream.terminated[t, e]:
                np.testing.assert_array_equal(seen, stream.obs[t, e])  # never read; the last one it saw
            else:
                np.testing.assert_array_equal(seen, encoder.encode(Counting.seen(kind, played[t, e]))[0])
                compared += t < steps - 1
    assert compared > 4


@pytest.mark.parametrize("policies", ["per_agent", "shared"])
@pytest.mark.parametrize("kind", Counting.SPACES)
def test_last_observations_of_environments_that_go_on_are_not_looked_at(kind, policies):
    # They are zeros, which are in none of these spaces.
    kinds = {"a": kind, "b": kind}
    runner, batch = rollout(Counting, {"kinds": kinds}, policies=policies, steps=30, num_envs=3)
    assert runner.env.stacked == (kind not in ("Dict", "Tuple"))
    check_bootstraps(batch, kinds)


def test_last_observations_of_environments_that_go_on_where_every_agent_sees_something_else():
    kinds = dict(zip("abcde", Counting.SPACES, strict=True))
    runner, batch = rollout(Counting, {"kinds": kinds}, steps=30, num_envs=3)
    assert not runner.env.stacked
    check_bootstraps(batch, kinds)


@pytest.mark.parametrize("policies", ["per_agent", "shared", {"x": ["c", "a"], "y": ["b"]}])
@pytest.mark.parametrize("kind", Counting.SPACES)
def test_a_terminated_agent_needs_no_last_observation(kind, policies):
    kinds = dict.fromkeys("abc", kind)
    settings = {"kinds": kinds, "terminates": ["a"]}
    _, batch = rollout(Counting, settings, policies=policies, steps=30, num_envs=3)
    assert batch.stream("a").terminated.sum() == batch.stream("b").truncated.sum() > 4
    check_bootstraps(batch, kinds)
    learner = make_learner(tiny_config(Counting, settings, policies=policies, num_envs=3))
    result = update(learner, batch)
    assert all(np.isfinite(v) for module_id in batch.modules for v in result[module_id].values())


def test_what_a_terminated_agent_saw_last_is_normalised_once():
    settings = {"kinds": {"a": "Box", "b": "Box"}, "terminates": ["a"]}
    runner = make_runner(tiny_config(Counting, settings, runners={"normalize_observations": True}))
    runner.sample(num_timesteps=40)
    (batch,) = runner.sample(num_timesteps=40)
    stream, rows = batch.stream("a"), batch.bootstrap_rows
    ended = stream.terminated.ravel()[rows]
    seen = stream.obs.reshape(-1, 2)[rows]
    assert ended.sum() > 2 and abs(seen).max() < 4
    np.testing.assert_array_equal(stream.bootstrap_obs[ended], seen[ended])


def test_a_bad_last_observation_is_found_among_those_that_are_read():
    settings = {"kinds": dict.fromkeys("abc", "Box"), "terminates": ["a"], "fault": ["c"]}
    with pytest.raises(ValueError, match="agent 'c'.* step .*element .0,. is nan") as caught:
        rollout(Counting, settings, policies="shared", steps=30, num_envs=3)
    runner, batch = rollout(Counting, {**settings, "fault": []}, policies="shared", steps=30, num_envs=3)
    t, e = np.argwhere(batch.stream("c").truncated)[0]
    assert f"environment index {e}, step {t + 1} of" in str(caught.value)


def test_episode_start_marks_the_first_step_of_every_episode():
    runner, batch = rollout("debug/alignment", {"episode_length": 4}, steps=6, num_envs=2)
    assert batch.episode_start[:, 0].tolist() == [True, False, False, False, True, False]
    (after,) = runner.sample(num_timesteps=12)
    assert after.episode_start[:, 1].tolist() == [False, False, True, False, False, False]


def test_scripted_rewards_arrive_in_their_step():
    _, batch = rollout("debug/scripted_rewards", steps=7, num_envs=2)
    for stream in batch.streams():
        assert stream.rewards[:, 1].tolist() == [1, 2, 3, 1, 2, 3, 1]
        assert stream.terminated[:, 0].tolist() == [False, False, True, False, False, True, False]


class Leaving(VectorJointEnv):
    """Episodes of 6 steps, in which "b" acts from step 1 to 3. Observation: the step. Extra: the step, squared.

    Args:
        num_envs: E.
        fault: "waits" (b is absent in step 2), "paid" (b is paid in step 5), "no end" (b just stays away).
    """

    def __init__(self, num_envs=1, fault=None):
        self.num_envs, self.possible_agents, self.fault = num_envs, ["a", "b"], fault
        self.observation_spaces = {agent: box(1) for agent in "ab"}
        self.action_spaces = {agent: discrete() for agent in "ab"}
        self.t = 0

    def _see(self):
        return {agent: np.full((self.num_envs, 1), self.t, np.float32) for agent in "ab"}

    def reset_joint(self, seeds=None):
        self.t = 0
        return self._see()

    def step_joint(self, actions):
        t, fault = self.t, self.fault
        present = np.ones((2, self.num_envs), bool)
        present[1] = 1 <= t <= 3 and not (fault == "waits" and t == 2)
        rewards = np.ones((2, self.num_envs), np.float32) * present
        if fault == "paid" and t == 5:
            rewards[1, 0] = 1.0
        terminated = np.zeros((2, self.num_envs), bool)
        terminated[1] = t == 3 and fault != "no end"
        truncated = np.zeros_like(terminated)
        truncated[0] = t == 5
        squares = np.full((self.num_envs,), t**2)
        self.t += 1
        final = self._see()
        observations = self.reset_joint() if t == 5 else final
        return JointStepResult(
            rewards,
            observations,
            terminated,
            truncated,
            final_observations=final,
            present=present,
            extras={"square": squares},
        )


def test_agents_that_join_late_and_leave_early_and_extras_are_recorded():
    runner, batch = rollout(Leaving, steps=8, num_envs=2)
    assert batch.stream("a").present.all()
    assert batch.stream("b").present[:, 0].tolist() == [False, True, True, True, False, False, False, True]
    assert batch.stream("b").terminated[:, 1].tolist() == [t == 3 for t in range(8)]
    assert batch.extras["square"][:, 1].tolist() == [0, 1, 4, 9, 16, 25, 0, 1]
    assert batch.agent_steps() == 16 + 8 and batch.env_steps() == 16
    assert batch.bootstrap_rows.tolist() == [10, 11, 14, 15]
    assert batch.stream("a").bootstrap_obs[:, 0].tolist() == [6, 6, 2, 2]
    metrics = runner_metrics(runner)
    assert metrics["num_agent_steps_sampled"] == {"a": 16, "b": 8}
    assert metrics["agent_steps"] == {"a": 6, "b": 3}
    # The absent rows train nothing and spoil nothing.
    learner = make_learner(tiny_config(Leaving, num_envs=2, minibatch_size=4))
    result = update(learner, batch)
    assert result["b"]["num_module_steps_trained"] < result["a"]["num_module_steps_trained"] == 8
    assert all(np.isfinite(v) for v in result["b"].values())


def test_what_follows_for_an_agent_that_is_not_there_is_not_looked_at():
    class Gone(Leaving):
        def step_joint(self, actions):
            result = super().step_joint(actions)
            if self.t == 0:  # the episode is over, "b" has left before
                result.final_observations["b"][:] = np.nan
            return result

    _, batch = rollout(Gone, steps=8, num_envs=2)
    assert batch.stream("a").bootstrap_obs[:, 0].tolist() == [6, 6, 2, 2]
    assert np.isfinite(batch.stream("b").bootstrap_obs).all()


@pytest.mark.parametrize(
    "fault, message",
    [
        ("waits", "agent 'b' did not act in environment index 0, step 2"),
        ("paid", "agent 'b' was paid without acting in environment index 0, step 5"),
        ("no end", "agent 'b' did not act in environment index 0, step 4"),
    ],
)
def test_agents_that_wait_need_episodes(fault, message):
    runner = make_runner(tiny_config(Leaving, {"fault": fault}))
    with pytest.raises(ValueError, match=f"{message}.*need RLlib's episodes"):
        runner.sample(num_timesteps=20)
    # Across two rollouts, too.
    runner = make_runner(tiny_config(Leaving, {"fault": fault}))
    runner.sample(num_timesteps=4)
    with pytest.raises(ValueError, match=message.split(",")[0]):
        for _ in range(2):
            runner.sample(num_timesteps=4)


def test_agents_of_different_modules_interleaved_keep_their_places():
    class See(Leaving):
        def _see(self):
            return {a: np.full((self.num_envs, 1), ord(a), np.float32) for a in self.possible_agents}

        def __init__(self, num_envs=1):
            super().__init__(num_envs)
            self.possible_agents = ["a", "b", "c", "d"]
            self.observation_spaces = {agent: box(1, 200.0) for agent in "abcd"}
            self.action_spaces = {agent: discrete() for agent in "abcd"}

        def step_joint(self, actions):
            self.taken = {agent: actions[agent].copy() for agent in actions}
            rewards = np.arange(4, dtype=np.float32)[:, None] + np.zeros((4, self.num_envs), np.float32)
            return JointStepResult(rewards, self._see(), np.zeros((4, self.num_envs), bool))

    runner, batch = rollout(See, policies={"m": ["d", "a"], "k": ["c", "b"]}, steps=4)
    assert list(batch.modules) == ["k", "m"] and batch.agents == ("b", "c", "a", "d")
    for i, agent in enumerate("abcd"):
        stream = batch.stream(agent)
        assert (stream.obs == ord(agent)).all() and (stream.rewards == i).all()
        assert (stream.actions[-1] == runner.env.taken[agent]).all()


# ------------------------------------------------------------------------------------------- the policy


def runs_of_equal_spaces():
    masked = gym.spaces.Dict({"observation": box(), "action_mask": gym.spaces.Box(1, 1, (3,), np.int8)})
    actions = [discrete(3)] * 2 + [gym.spaces.MultiDiscrete([3, 2])] * 2 + [box(2)] * 2 + [discrete(3)] * 2
    observations = [box(), box(4), box(), box(2), box(), box(), masked, box()]
    return declared_config(observations, actions, num_envs=3)


@pytest.mark.parametrize(
    "env",
    [
        "debug/random_observations",
        "debug/multi_discrete",
        "debug/mixed_spaces",
        "debug/masked_actions",
        runs_of_equal_spaces,
    ],
)
@pytest.mark.parametrize("explore", [True, False])
def test_log_probs_are_those_of_the_module(env, explore):
    config = env() if callable(env) else tiny_config(env, num_envs=3)
    runner, learner = make_runner(config), make_learner(config)
    scramble(learner)
    runner.set_state({"rl_module": learner.module.get_state(inference_only=True)})
    (batch,) = runner.sample(num_timesteps=30, explore=explore)
    for stream in batch.streams():
        module = learner.module[stream.module_id]
        logits = module.forward_train({"obs": torch.from_numpy(stream.obs.reshape(-1, *stream.obs.shape[2:]))})[
            "action_dist_inputs"
        ]
        if stream.action_mask is not None:
            logits = logits.masked_fill(~torch.from_numpy(stream.action_mask.reshape(len(logits), -1)), -1e30)
        distribution = module.get_train_action_dist_cls().from_logits(logits)
        actions = torch.from_numpy(stream.actions.reshape(len(logits), *stream.actions.shape[2:]))
        expected = distribution.logp(actions).detach().numpy()
        np.testing.assert_allclose(stream.action_logp.ravel(), expected, atol=1e-5)
        if not explore:
            greedy = distribution.to_deterministic().sample().detach().numpy().reshape(stream.actions.shape)
            np.testing.assert_allclose(stream.actions, greedy, atol=1e-5)


def test_exploring_samples_and_greedy_repeats():
    config = tiny_config("debug/identity", num_envs=4)
    runner = make_runner(config)
    (greedy,) = runner.sample(num_timesteps=40, explore=False)
    (exploring,) = runner.sample(num_timesteps=400, explore=True)
    for stream in greedy.streams():  # the same observation in every row, hence one action
        assert len(np.unique(stream.actions)) == 1
    for stream in exploring.streams():
        assert len(np.unique(stream.actions)) == 4


def test_explore_of_the_configuration_is_followed():
    config = tiny_config("debug/identity", num_envs=4, runners={"explore": False})
    (batch,) = make_runner(config).sample(num_timesteps=80)
    assert all(len(np.unique(stream.actions)) == 1 for stream in batch.streams())


def test_random_actions_are_uniform_over_what_is_allowed():
    config = tiny_config("debug/mixed_spaces", num_envs=20)
    runner, learner = make_runner(config), make_learner(config)
    scramble(learner, size=2.0)
    runner.set_state({"rl_module": learner.module.get_state(inference_only=True)})
    (batch,) = runner.sample(num_timesteps=2000, random_actions=True)
    counts = np.bincount(batch.stream("agent_0").actions.ravel(), minlength=2)
    assert np.abs(counts / counts.sum() - 0.5).max() < 0.05
    counts = np.bincount(batch.stream("agent_1").actions.ravel(), minlength=3)
    assert np.abs(counts / counts.sum() - 1 / 3).max() < 0.05
    continuous = batch.stream("agent_3").actions
    assert continuous.min() >= -1 and continuous.max() <= 1 and abs(continuous.mean()) < 0.05
    assert continuous.std() == pytest.approx(1 / np.sqrt(3), abs=0.03)
    (batch,) = make_runner(tiny_config("debug/masked_actions")).sample(num_timesteps=50, random_actions=True)
    for stream in batch.streams():
        assert np.take_along_axis(stream.action_mask, stream.actions[..., None], -1).all()


def test_every_action_that_reaches_the_environment_lies_in_its_space():
    # The environment asserts it.
    spaces = [
        discrete(2),
        gym.spaces.Discrete(3, start=1),
        gym.spaces.MultiDiscrete([2, 3], start=[5, -1]),
        gym.spaces.Box(np.array([0.0, -3.0], np.float32), np.array([0.1, 7.0], np.float32)),
        gym.spaces.Box(-np.inf, np.inf, (2,)),
        gym.spaces.Box(0, np.inf, (1,)),
        gym.spaces.Box(0, 10, (1,), np.int64),
    ]
    config = declared_config([box()] * len(spaces), spaces, model={"fcnet_hiddens": [8], "log_std_init": 2.0})
    for options in ({"num_timesteps": 200}, {"num_timesteps": 20, "explore": False}, {"num_timesteps": 20}):
        (batch,) = make_runner(config).sample(**options, random_actions=options == {"num_timesteps": 20})
        assert batch.env_steps() >= options["num_timesteps"]


def test_actions_come_from_the_runners_own_generator():
    config = tiny_config("debug/mixed_spaces")
    runner = make_runner(config)
    torch.manual_seed(12)
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
    (first,) = runner.sample(num_timesteps=20)
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert (np.random.get_state()[1] == numpy_before[1]).all()  # noqa: NPY002
    # And nobody else's draws change what the runner samples.
    other = make_runner(config)
    torch.manual_seed(99)
    torch.rand(5)
    np.random.seed(4)  # noqa: NPY002
    (second,) = other.sample(num_timesteps=20)
    assert_same_batch(first, second)


def test_different_workers_and_seeds_give_different_rollouts():
    config = tiny_config("debug/random_observations")
    (first,) = make_runner(config, worker_index=1).sample(num_timesteps=20)
    (second,) = make_runner(config, worker_index=2).sample(num_timesteps=20)
    assert (first.stream("agent_0").obs != second.stream("agent_0").obs).any()
    (third,) = make_runner(tiny_config("debug/random_observations", seed=7)).sample(num_timesteps=20)
    assert (first.stream("agent_0").obs != third.stream("agent_0").obs).any()


class OneFlagForAll(VectorJointEnv):
    """Ends given once per environment, [E], as the contract allows."""

    possible_agents = ["a", "b"]
    observation_spaces = dict.fromkeys("ab", gym.spaces.Box(0.0, 9.0, (1,)))
    action_spaces = dict.fromkeys("ab", gym.spaces.Discrete(2))

    def __init__(self, num_envs):
        self.num_envs, self.t = num_envs, 0

    def _see(self):
        return {agent: np.full((self.num_envs, 1), self.t, np.float32) for agent in "ab"}

    def reset_joint(self, seeds=None):
        self.t = 0
        return self._see()

    def step_joint(self, actions):
        self.t += 1
        over, final = np.full(self.num_envs, self.t == 3), self._see()
        self.t %= 3
        rewards = np.ones((2, self.num_envs), np.float32)
        return JointStepResult(rewards, self._see(), ~over & over, over, final_observations=final)


def test_ends_given_once_per_environment_train_and_evaluate():
    runner = make_runner(tiny_config(OneFlagForAll))
    (batch,) = runner.sample(num_timesteps=6 * runner.num_envs)
    assert batch.stream("a").truncated.sum() == 2 * runner.num_envs
    (played,) = runner.sample(num_episodes=3)
    assert played.env_steps() == 9 and played.agent_steps() == 18


def test_worker_2_of_one_seed_is_not_worker_1_of_the_next():
    def sample(seed, worker_index):
        config = tiny_config("debug/random_observations", seed=seed)
        (batch,) = make_runner(config, worker_index=worker_index).sample(num_timesteps=20)
        return batch.stream("agent_0").obs, batch.stream("agent_0").actions

    streams = [sample(seed, worker) for seed in (0, 1) for worker in (0, 1, 2)]
    for i, (obs, actions) in enumerate(streams):
        for other_obs, other_actions in streams[:i]:
            assert (obs[0] != other_obs[0]).all() and (actions != other_actions).any()


def test_an_evaluation_by_timesteps_reports_its_own_episodes():
    config = tiny_config("debug/constant_reward", {"episode_length": 8})
    config.validate()
    config.in_evaluation = True
    runner = make_runner(config)
    for _ in range(2):
        runner.sample(num_timesteps=16 * runner.num_envs, explore=False)
        assert len(runner._statistics._finished) == 2 * runner.num_envs
        runner.get_metrics()


@pytest.mark.parametrize("explore", [True, False])
def test_moments_of_observations_move_whether_or_not_it_explores(explore):
    config = tiny_config("debug/random_observations").env_runners(normalize_observations=True, explore=explore)
    runner = make_runner(config)
    runner.sample(num_timesteps=20)
    assert all(moments.count > 0 for moments in runner._actor.normalizer.moments.values())


def test_without_a_seed_two_runners_differ():
    config = tiny_config("debug/random_observations", seed=None)
    (first,) = make_runner(config).sample(num_timesteps=20)
    (second,) = make_runner(config).sample(num_timesteps=20)
    assert (first.stream("agent_0").obs != second.stream("agent_0").obs).any()


def assert_same_batch(left, right, logp_tolerance=0.0):
    assert list(left.modules) == list(right.modules)
    np.testing.assert_array_equal(left.bootstrap_rows, right.bootstrap_rows)
    np.testing.assert_array_equal(left.episode_start, right.episode_start)
    for module_id, mine in left.modules.items():
        theirs = right.modules[module_id]
        assert mine.agents == theirs.agents
        for name in ("obs", "actions", "rewards", "present", "terminated", "truncated", "bootstrap_obs"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name), err_msg=name)
        np.testing.assert_allclose(mine.action_logp, theirs.action_logp, atol=logp_tolerance)


# ------------------------------------------------------------------------------------------- evaluation


class Unequal(VectorJointEnv):
    """Environment e plays episodes of 1 + 4 e steps, one agent, paid 1 a step."""

    def __init__(self, num_envs=1):
        self.num_envs, self.possible_agents = num_envs, ["a"]
        self.observation_spaces, self.action_spaces = {"a": box(1)}, {"a": discrete()}
        self.lengths = 1 + 4 * np.arange(num_envs)
        self.t = np.zeros(num_envs, int)
        self.seeds_given = []

    def _see(self):
        return {"a": self.t[:, None].astype(np.float32)}

    def reset_joint(self, seeds=None):
        self.seeds_given.append(seeds)
        self.t[:] = 0
        return self._see()

    def step_joint(self, actions):
        self.t += 1
        final, over = self._see(), self.t == self.lengths
        self.t[over] = 0
        return JointStepResult(np.ones((1, self.num_envs)), self._see(), over[None], final_observations=final)


@pytest.mark.parametrize("episodes, mean_length", [(6, (2 * 1 + 2 * 5 + 2 * 9) / 6), (4, (2 * 1 + 5 + 9) / 4), (1, 1)])
def test_evaluation_plays_exactly_n_episodes_with_equal_shares(episodes, mean_length):
    runner = make_runner(tiny_config(Unequal, num_envs=3))
    (sampled,) = runner.sample(num_episodes=episodes)
    assert isinstance(sampled, SampledSteps)
    metrics = runner_metrics(runner)
    assert metrics["num_episodes"] == episodes
    assert metrics["episode_len_mean"] == pytest.approx(mean_length)
    assert metrics["episode_return_mean"] == pytest.approx(mean_length)
    assert metrics["num_env_steps_sampled"] == round(mean_length * episodes) == len(sampled) == sampled.agent_steps()


def test_evaluation_reports_all_its_episodes_whatever_the_window():
    config = tiny_config(Unequal, num_envs=3)
    config.reporting(metrics_num_episodes_for_smoothing=2)
    runner = make_runner(config)
    runner.sample(num_episodes=30)
    metrics = runner_metrics(runner)
    assert metrics["num_episodes"] == 30 and metrics["episode_len_mean"] == 5.0
    assert (metrics["episode_len_min"], metrics["episode_len_max"]) == (1, 9)


def test_a_second_evaluation_reports_its_own_episodes_only():
    runner = make_runner(tiny_config(Unequal, num_envs=3))
    runner.sample(num_episodes=30)
    runner_metrics(runner)
    runner.sample(num_episodes=1)
    metrics = runner_metrics(runner)
    assert metrics["num_episodes"] == 1 and metrics["episode_len_mean"] == 1.0
    assert metrics["episode_len_max"] == 1


def test_evaluation_between_two_rollouts_leaves_no_trace_in_the_training_metrics():
    # RLlib evaluates on the training runner where there is no other.
    runner = make_runner(tiny_config("debug/alignment", {"episode_length": 50}, num_envs=1))
    runner.sample(num_timesteps=60)
    trained = runner_metrics(runner)
    assert trained["episode_return_mean"] == 3 * sum(range(50))
    runner.env.episode_length = 10
    runner.sample(num_episodes=3)
    assert runner_metrics(runner)["episode_return_mean"] == 3 * sum(range(10))
    runner.env.episode_length = 50
    (batch,) = runner.sample(num_timesteps=20)
    assert batch.episode_start[0, 0]  # training starts afresh
    again = runner_metrics(runner)
    assert again["episode_return_mean"] == 3 * sum(range(50))
    assert again["num_episodes"] == 0


def test_each_environment_gets_a_seed_of_its_own_and_only_once():
    runner = make_runner(tiny_config(Unequal, num_envs=3))
    runner.sample(num_timesteps=6)
    runner.sample(num_timesteps=6, force_reset=True)
    first, second = runner.env.seeds_given
    assert len(set(first)) == 3 and second is None


# ------------------------------------------------------------------------------------------- metrics


def test_returns_and_lengths_under_rllibs_names():
    runner, _ = rollout("debug/constant_reward", {"episode_length": 5, "agents": 3}, steps=12, num_envs=2)
    metrics = runner_metrics(runner)
    assert metrics["episode_return_mean"] == metrics["episode_return_min"] == metrics["episode_return_max"] == 15.0
    assert metrics["episode_len_mean"] == metrics["episode_len_min"] == metrics["episode_len_max"] == 5
    assert metrics["agent_episode_returns_mean"] == {"agent_0": 5.0, "agent_1": 5.0, "agent_2": 5.0}
    assert metrics["module_episode_returns_mean"] == {"agent_0": 5.0, "agent_1": 5.0, "agent_2": 5.0}
    assert metrics["num_episodes"] == metrics["num_episodes_lifetime"] == 4
    assert metrics["num_env_steps_sampled"] == metrics["num_env_steps_sampled_lifetime"] == 24
    assert metrics["num_agent_steps_sampled"] == {"agent_0": 24, "agent_1": 24, "agent_2": 24}
    assert metrics["episode_duration_sec_mean"] > 0
    assert metrics["env_step_timer"] > 0


def test_a_shared_modules_return_is_that_of_its_agents_together():
    runner, _ = rollout("debug/constant_reward", {"episode_length": 5, "agents": 3}, policies="shared", steps=5)
    metrics = runner_metrics(runner)
    assert metrics["module_episode_returns_mean"] == {"shared": 15.0}
    assert metrics["num_module_steps_sampled"] == {"shared": 30}


def test_an_iteration_without_an_ended_episode_reports_the_last_known_means():
    runner, _ = rollout("debug/constant_reward", {"episode_length": 10, "agents": 1}, steps=4, num_envs=1)
    first = runner_metrics(runner)
    assert not [name for name in first if name.startswith("episode_")]  # nothing is known, and no NaN
    assert all(np.isfinite(v) for v in first.values() if isinstance(v, (int, float)))
    runner.sample(num_timesteps=7)
    assert runner_metrics(runner)["episode_return_mean"] == 10.0
    runner.sample(num_timesteps=2)
    third = runner_metrics(runner)
    assert third["episode_return_mean"] == 10.0 and third["num_episodes"] == 0


def test_the_window_forgets_old_episodes():
    config = tiny_config("debug/alignment", {"episode_length": 2}, num_envs=1)
    config.reporting(metrics_num_episodes_for_smoothing=3)
    runner = make_runner(config)
    runner.sample(num_timesteps=20)
    assert runner_metrics(runner)["episode_len_mean"] == 2.0
    runner.env.episode_length = 4
    runner.sample(num_timesteps=8)
    assert runner_metrics(runner)["episode_len_mean"] == pytest.approx((2 + 4 + 4) / 3)
    runner.sample(num_timesteps=4)
    assert runner_metrics(runner)["episode_len_mean"] == 4.0


# ------------------------------------------------------------------------------------------- remote, callbacks


def test_a_callback_sees_the_environment():
    seen = []
    config = tiny_config("debug/alignment")
    config.callbacks(on_environment_created=lambda *, env_runner, env, env_context, **kw: seen.append((env, kw)))
    config.validate()
    runner = JointEnvRunner(config=config, worker_index=2)
    assert seen[0][0] is runner.env


def test_a_remote_runner_samples_what_a_local_one_does(ray_session):
    config = tiny_config("debug/mixed_spaces")
    config.env_runners(num_env_runners=1)
    algo = config.copy(copy_frozen=False).build_algo()
    try:
        (sampled,) = algo.env_runner_group.foreach_env_runner(
            lambda r: r.sample(num_timesteps=20), local_env_runner=False
        )
        runner = make_runner(config.copy(copy_frozen=False), worker_index=1)
        runner.set_state({"rl_module": algo.learner_group.get_weights()})
        (mine,) = runner.sample(num_timesteps=20)
        assert_same_batch(mine, sampled[0], logp_tolerance=1e-6)
        result = algo.train()
        assert result["env_runners"]["num_env_steps_sampled"] == 64 + 20  # those above are counted, too
        assert np.isfinite(result["learners"]["__all_modules__"]["total_loss"])
        # The runners act with the trained weights, all of them.
        trained = algo.learner_group.get_weights()
        for runner in algo.env_runner_group.foreach_env_runner(
            lambda r: {m: {k: np.asarray(v) for k, v in s.items()} for m, s in r.module.get_state().items()},
            local_env_runner=False,
        ):
            for module_id, state in runner.items():
                for name, value in state.items():
                    np.testing.assert_array_equal(value, trained[module_id][name])
    finally:
        algo.stop()
