"""Whole runs through the general door: runners, evaluation, metrics, checkpoints, errors, the command line."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from ray import tune
from ray.rllib.algorithms.ppo.ppo import PPO
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

from tests.cli.helpers import read_json, rows, thrust_rllib
from tests.general.random_envs import Episode, Journal, Kind, Life, Script, ScriptedMultiAgentEnv
from tests.support import largest_difference, make_learner, parameters, runner_metrics, tiny_config, update
from thrust_rllib import JointEnvRunner, JointPPO, register
from thrust_rllib.connectors.observation_normalizer import ObservationNormalizer
from thrust_rllib.episode_runner import JointEpisodeRunner
from thrust_rllib.evaluation import play_episodes
from thrust_rllib.trained_team import load_team

EPISODES = {"sampling": "episodes"}


@pytest.fixture
def build(ray_session):
    """Builds algorithms and stops them after the test."""
    built = []

    def make(config):
        built.append(config.copy(copy_frozen=False).build_algo())
        return built[-1]

    yield make
    for algo in built:
        algo.stop()


def episodes_config(env="debug/random_observations", env_config=None, *, runners=None, **options):
    """`tiny_config` that samples episodes."""
    return tiny_config(env, env_config, runners={**EPISODES, **(runners or {})}, **options)


def episode_runner(config, **options):
    config.validate()
    return config.env_runner_cls(config=config, worker_index=0, **options)


def batch_of(config, runner, episodes):
    (batch,) = make_learner(config, runner.get_spaces())._batches(episodes)
    return batch


def weights(algo):
    return {
        m: {name: np.asarray(value) for name, value in state.items()}
        for m, state in algo.learner_group.get_weights().items()
    }


def assert_acts_with(acting, trained):
    """A runner's modules (without value heads) have the learner's weights."""
    assert acting.keys() == trained.keys()
    for module_id, state in acting.items():
        assert state
        for name, value in state.items():
            np.testing.assert_array_equal(np.asarray(value), trained[module_id][name])


class Lives(MultiAgentEnv):
    """Three agents: "early" acts in steps 0 and 1, "late" from step 2 on, "whole" always; 6 steps; each step pays 1."""

    def __init__(self, config=None):
        super().__init__()
        self.possible_agents = ["whole", "early", "late"]
        self.agents = list(self.possible_agents)
        self.observation_spaces = {a: gym.spaces.Box(0.0, 10.0, (2,)) for a in self.agents}
        self.action_spaces = {a: gym.spaces.Discrete(2) for a in self.agents}

    def _see(self, *agents):
        return {a: np.full(2, self.t, np.float32) for a in agents}

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self._see("whole", "early"), {}

    def step(self, actions):
        self.t += 1
        seen = self._see("whole", "late") if self.t >= 2 else self._see("whole", "early")
        flags = {"early": True} if self.t == 2 else {}
        return seen, dict.fromkeys(actions, 1.0), {**flags, "__all__": self.t == 6}, {"__all__": False}, {}


# --- runner classes ---------------------------------------------------------------------------------------------------


class OwnJoint(JointEpisodeRunner):
    """Counts its samples."""

    def sample(self, **kwargs):
        self.samples = getattr(self, "samples", 0) + 1
        return super().sample(**kwargs)


class OwnStock(MultiAgentEnvRunner):
    """RLlib's own, with RLlib's episodes."""

    def sample(self, **kwargs):
        self.samples = getattr(self, "samples", 0) + 1
        return super().sample(**kwargs)


class Team(MultiAgentEnv):
    """Two agents that see noise and earn 1 in each of 5 steps."""

    def __init__(self, config=None):
        super().__init__()
        self.agents = self.possible_agents = ["a", "b"]
        self.observation_spaces = {a: gym.spaces.Box(-1.0, 1.0, (3,)) for a in self.agents}
        self.action_spaces = {a: gym.spaces.Discrete(2) for a in self.agents}
        self.random = np.random.default_rng(0)

    def _see(self):
        return {a: self.random.uniform(-1, 1, 3).astype(np.float32) for a in self.agents}

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self._see(), {}

    def step(self, actions):
        self.t += 1
        return self._see(), dict.fromkeys(actions, 1.0), {"__all__": False}, {"__all__": self.t == 5}, {}


@pytest.mark.parametrize("own", [OwnJoint, OwnStock])
def test_a_runner_class_of_ones_own_trains(build, own):
    algo = build(tiny_config(Team, runners={"env_runner_cls": own}))
    before = weights(algo)
    result = algo.train()
    assert type(algo.env_runner) is own and algo.env_runner.samples == 1
    assert largest_difference(before, weights(algo)) > 1e-5
    assert result["env_runners"]["episode_return_mean"] == 10.0
    assert result["env_runners"]["num_env_steps_sampled"] == 64
    assert result["learners"]["__all_modules__"]["num_env_steps_trained"] == 32  # joint rows of two minibatches
    assert_acts_with(algo.env_runner.module.get_state(), weights(algo))


@pytest.mark.parametrize("own", [SingleAgentEnvRunner, dict])
def test_a_runner_class_that_is_no_multi_agent_runner_is_an_early_error(own):
    with pytest.raises(
        ValueError, match=f"env_runner_cls={own.__name__} is no MultiAgentEnvRunner; derive it from Joint"
    ):
        tiny_config(Team, runners={"env_runner_cls": own}).validate()


def test_a_runner_of_arrays_cannot_serve_what_needs_episodes():
    own = type("OwnArrays", (JointEnvRunner,), {})
    config = tiny_config(runners={"env_runner_cls": own, "batch_mode": "complete_episodes"})
    with pytest.raises(
        ValueError, match="OwnArrays samples arrays, but this needs episodes: batch_mode.*JointEpisodeR"
    ):
        config.validate()


# --- what is sampled --------------------------------------------------------------------------------------------------


def test_complete_episodes(build):
    config = tiny_config("debug/constant_reward", {"episode_length": 7}, runners={"batch_mode": "complete_episodes"})
    runner = episode_runner(config)
    for _ in range(2):
        episodes = runner.sample()
        assert len(episodes) == runner.num_envs and all(e.is_done and len(e) == 7 for e in episodes)
        batch = batch_of(config, runner, episodes)
        assert batch.env_steps() == 14 and batch.episode_start[0].all()
    result = build(config).train()
    assert result["env_runners"]["num_env_steps_sampled"] == 70  # five times 2 episodes of 7, until 64 are there
    assert result["env_runners"]["num_episodes"] == 10 and result["env_runners"]["episode_return_mean"] == 14.0


def test_episodes_of_lists_train_the_same():
    trained = []
    for to_numpy in (True, False):
        config = episodes_config(Lives, runners={"episodes_to_numpy": to_numpy})
        runner, learner = episode_runner(config), make_learner(config)
        for _ in range(2):
            episodes = runner.sample()
            assert all(episode.is_numpy == to_numpy for episode in episodes)
            update(learner, episodes)
        trained.append(parameters(learner))
    assert largest_difference(*trained) == 0.0


@pytest.mark.parametrize("horizon", [0, 1, 3])
def test_fragments_look_back_as_far_as_asked(horizon):
    config = episodes_config("debug/constant_reward", {"episode_length": 20}, num_envs=1)
    config.env_runners(episode_lookback_horizon=horizon)
    runner = episode_runner(config)
    runner.sample(num_timesteps=5)
    (fragment,) = runner.sample(num_timesteps=5)
    single = fragment.agent_episodes["agent_0"]
    assert single.observations.lookback == single.rewards.lookback == horizon and len(single) == 5
    assert batch_of(config, runner, [fragment]).env_steps() == 5


def test_agent_steps_are_counted_where_agents_come_and_go(build):
    config = episodes_config(Lives, num_envs=1)
    config.multi_agent(count_steps_by="agent_steps").env_runners(rollout_fragment_length=6)
    config.training(train_batch_size_per_learner=40)
    runners = build(config).train()["env_runners"]
    taken = runners["num_agent_steps_sampled"]
    # An episode has 6 + 2 + 4 agent steps.
    assert sum(taken.values()) >= 40 and sum(taken.values()) - 2 * runners["num_env_steps_sampled"] in (-1, 0)
    assert taken["whole"] == runners["num_env_steps_sampled"]


def test_metrics_of_agents_that_come_and_go():
    runner = episode_runner(episodes_config(Lives, num_envs=1, policies={"p": ["whole"], "q": ["early", "late"]}))
    for _ in range(4):
        runner.sample(num_timesteps=3)  # two episodes in four fragments
    found = runner_metrics(runner)
    assert (found["num_episodes"], found["num_env_steps_sampled"]) == (2, 12)
    assert found["num_agent_steps_sampled"] == {"whole": 12, "early": 4, "late": 8}
    assert found["num_module_steps_sampled"] == {"p": 12, "q": 12}
    assert (found["episode_return_mean"], found["episode_len_mean"]) == (12.0, 6.0)
    assert found["agent_episode_returns_mean"] == {"whole": 6.0, "early": 2.0, "late": 4.0}
    assert found["module_episode_returns_mean"] == {"p": 6.0, "q": 6.0}
    assert found["agent_steps"] == {"whole": 6.0, "early": 2.0, "late": 4.0}
    runner.sample(num_timesteps=3)
    found = runner_metrics(runner)  # none has ended: the last known means
    assert found["num_episodes"] == 0 and found["episode_return_mean"] == 12.0 and found["agent_steps"]["late"] == 4.0


def test_global_random_state_stays_and_the_seed_decides():
    trained = []
    for seed in (1, 1, 2):
        config = episodes_config(Lives, seed=seed)
        runner, learner = episode_runner(config), make_learner(config)
        torch.manual_seed(len(trained))
        before = torch.get_rng_state()
        rollouts = [runner.sample() for _ in range(2)]
        assert torch.equal(before, torch.get_rng_state())
        for episodes in rollouts:
            update(learner, episodes)
        trained.append(parameters(learner))
    assert largest_difference(trained[0], trained[1]) == 0.0 < largest_difference(trained[0], trained[2])


# --- both doors -------------------------------------------------------------------------------------------------------

COMPARED = (
    "num_env_steps_sampled", "num_env_steps_sampled_lifetime", "num_agent_steps_sampled", "num_module_steps_sampled",
    "num_agent_steps_sampled_lifetime", "num_module_steps_sampled_lifetime", "num_episodes", "num_episodes_lifetime",
    "episode_return_mean", "episode_return_min", "episode_return_max", "episode_len_mean", "agent_episode_returns_mean",
    "module_episode_returns_mean", "agent_steps",
)  # fmt: skip


def run_of(config, iterations):
    """Results, final weights, each remote runner's weights and moments."""
    algo = config.build_algo()
    try:
        results = [algo.train() for _ in range(iterations)]
        state = algo.env_runner_group.foreach_env_runner(
            lambda runner: (
                runner.module.get_state(),
                {m: (x.count, x.mean, x.std) for m, x in runner.normalizer.moments.items()},
            ),
            local_env_runner=False,
        )
        assert algo.config.samples_episodes == (config.sampling == "episodes")
        return results, weights(algo), state
    finally:
        algo.stop()


@pytest.fixture(scope="module")
def both(ray_session):
    """The same greedy run by arrays and by episodes, two remote runners, episodes longer than a fragment."""
    runs = {}
    for sampling in ("arrays", "episodes"):
        config = tiny_config(
            "debug/alignment",
            {"episode_length": 24},
            policies={"p": ["agent_0"], "q": ["agent_1", "agent_2"]},
            trained=["p"],
            runners={
                "sampling": sampling, "num_env_runners": 2, "explore": False, "normalize_observations": True,
                "rollout_fragment_length": 16,
            },
            minibatch_size=64,  # all: rows come in another order
        )  # fmt: skip
        runs[sampling] = run_of(config, 3)
    return runs


def test_metrics_of_both_doors_are_the_same(both):
    (fast, *_), (general, *_) = both["arrays"], both["episodes"]
    for iteration, (a, b) in enumerate(zip(fast, general, strict=True)):
        for name in COMPARED:
            told = iteration > 0 or not name.startswith(("episode_", "agent_", "module_"))  # none ended at first
            assert (name in a["env_runners"]) == (name in b["env_runners"]) == told, name
            if name in a["env_runners"]:
                assert a["env_runners"][name] == pytest.approx(b["env_runners"][name], rel=1e-6), (iteration, name)
    assert fast[0]["env_runners"]["num_env_steps_sampled"] == 64
    assert [r["env_runners"]["num_episodes"] for r in general] == [0, 4, 4]
    assert general[1]["env_runners"]["episode_len_mean"] == 24.0


def test_both_doors_train_the_same(both):
    difference = largest_difference(both["arrays"][1], both["episodes"][1])
    assert difference < 1e-4
    for name in ("policy_loss", "vf_loss", "entropy"):
        losses = [[r["learners"]["p"][name] for r in both[door][0]] for door in both]
        assert losses[0] == pytest.approx(losses[1], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("door", ["arrays", "episodes"])
def test_remote_runners_have_weights_and_moments_of_the_whole_run(both, door):
    results, trained, states = both[door]
    assert len(states) == 2
    for acting, moments in states:
        assert_acts_with(acting, trained)
        assert moments["p"][0] == 3 * 64 and moments["q"][0] == 0  # q is not trained
        np.testing.assert_array_equal(moments["p"][1], states[0][1]["p"][1])
    np.testing.assert_allclose(states[0][1]["p"][1], both["arrays"][2][0][1]["p"][1], rtol=1e-6)
    assert set(results[0]["learners"]) == {"__all_modules__", "p", "q"}


# --- evaluation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("remote", [0, pytest.param(1, marks=pytest.mark.slow_general)])
def test_evaluation_plays_the_asked_episodes_greedily(build, remote):
    config = episodes_config("debug/identity", {"episode_length": 5}, runners={"normalize_observations": True})
    config.reporting(metrics_num_episodes_for_smoothing=2)
    config.evaluation(
        evaluation_interval=1, evaluation_duration=7, evaluation_num_env_runners=remote,
        evaluation_config={"explore": False},
    )  # fmt: skip
    algo = build(config)
    result = algo.train()
    evaluated = result["evaluation"]["env_runners"]
    assert evaluated["num_episodes"] == 7 and evaluated["episode_len_mean"] == 5.0
    # Greedy: each agent always sees the same, so it takes one action, and is paid in each step or in none.
    assert set(evaluated["agent_episode_returns_mean"].values()) <= {0.0, 5.0}
    assert result["env_runners"]["num_env_steps_sampled"] == 64
    group = algo.eval_env_runner_group
    (count,) = group.foreach_env_runner(lambda r: r.normalizer.moments["agent_0"].count, local_env_runner=remote == 0)
    assert count == algo.env_runner._env_to_module[ObservationNormalizer][0].moments["agent_0"].count == 64


def test_an_evaluation_reports_the_mean_of_all_its_episodes():
    """Not of the last `metrics_num_episodes_for_smoothing`; and the training's own mean comes back afterwards."""
    script = Script((Kind(),), tuple(Episode((Life("A" * n),)) for n in (1, 2, 3, 4, 5, 6)))
    config = episodes_config(ScriptedMultiAgentEnv, {"script": script, "journal": Journal()}, num_envs=1)
    config.reporting(metrics_num_episodes_for_smoothing=2)
    runner = episode_runner(config)
    runner.sample(num_timesteps=3)
    assert runner_metrics(runner)["episode_len_mean"] == 1.5
    runner.sample(num_episodes=6)
    found = runner_metrics(runner)
    assert found["num_episodes"] == 6 and found["episode_len_mean"] == 3.5
    runner.sample(num_timesteps=1)
    assert runner_metrics(runner)["episode_len_mean"] != 3.5


@pytest.mark.parametrize("afresh, episodes", [(True, [0, 0]), (False, [0, 1])])
def test_evaluation_by_timesteps(build, afresh, episodes):
    config = episodes_config("debug/constant_reward", {"episode_length": 50}, num_envs=1)
    config.evaluation(
        evaluation_interval=1,
        evaluation_duration=30,
        evaluation_duration_unit="timesteps",
        evaluation_force_reset_envs_before_iteration=afresh,
    )
    algo = build(config)
    evaluated = [algo.train()["evaluation"]["env_runners"] for _ in range(2)]
    assert [found["num_episodes"] for found in evaluated] == episodes
    assert [found["num_env_steps_sampled"] for found in evaluated] == [30, 30]


# --- state ------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_goes_on_as_the_run_would_have(build, tmp_path):
    config = episodes_config(Lives, runners={"normalize_observations": True}, trained=["whole", "late"])
    algo = build(config)
    before = weights(algo)
    algo.train()
    algo.save_to_path(tmp_path)
    restored = JointPPO.from_checkpoint(tmp_path)
    try:
        assert largest_difference(weights(algo), weights(restored)) == 0.0
        assert largest_difference(before["early"], weights(algo)["early"]) == 0.0  # frozen
        assert largest_difference(before["late"], weights(algo)["late"]) > 0.0
        assert type(restored.env_runner) is JointEpisodeRunner
        moments = [each.env_runner.normalizer.moments["whole"] for each in (algo, restored)]
        assert moments[0].count == moments[1].count == 64
        np.testing.assert_array_equal(moments[0].mean, moments[1].mean)
        assert restored.train()["num_env_steps_sampled_lifetime"] == 128
    finally:
        restored.stop()


@pytest.mark.slow_general
def test_by_name_in_a_trial(ray_session, tmp_path):
    register()
    config = episodes_config(Lives)
    run = tune.RunConfig(stop={"training_iteration": 1}, storage_path=str(tmp_path), verbose=0)
    (result,) = tune.Tuner("JointPPO", param_space=config.to_dict(), run_config=run).fit()
    assert result.error is None and result.metrics["env_runners"]["num_env_steps_sampled"] == 64


# --- mistakes of environments -----------------------------------------------------------------------------------------


class Faulty(Team):
    """Makes one mistake in the third step."""

    def __init__(self, config):
        super().__init__(config)
        self.fault = config["fault"]

    def reset(self, *, seed=None, options=None):
        result = super().reset(seed=seed, options=options)
        if self.fault == "reset":
            raise OSError("no connection")
        return result[0] if self.fault == "reset alone" else result

    def step(self, actions):
        observations, rewards, terminated, truncated, infos = super().step(actions)
        if self.t == 3 and self.fault == "raises":
            raise ZeroDivisionError("by hand")
        if self.t == 3 and self.fault == "list":
            return list(observations.values()), rewards, terminated, truncated, infos
        if self.t == 3 and self.fault == "four":
            return observations, rewards, terminated, infos
        if self.t == 3 and self.fault == "agent":
            observations["ghost"] = observations["a"]
        if self.t == 3 and self.fault == "unpaid":
            del rewards["b"]
        return observations, rewards, terminated, truncated, infos


FAULTS = [
    ("raises", r"environment '.*Faulty' failed in a step \(runner 0\): .*ZeroDivisionError: by hand"),
    ("reset", r"environment '.*Faulty' failed in its reset \(runner 0\): .*OSError: no connection"),
    ("list", "environment '.*Faulty', environment index 0, step 3 of its episode: .*returned observations as a list"),
    ("four", "environment '.*Faulty', environment index 0, step 3.*step returned 4 values; return .observations, rew"),
    ("reset alone", "environment '.*Faulty', environment index 0, step 0.*reset returned a dict; return .obs.*, infos"),
    ("agent", "environment '.*Faulty', environment index 0, step 3.*agent 'ghost' is not in possible_agents"),
    ("unpaid", "environment '.*Faulty', environment index 0, step .*agent 'b' acted but got no reward"),
]


@pytest.mark.parametrize("fault, message", FAULTS)
def test_a_mistake_of_an_environment_is_told(fault, message):
    with pytest.raises((RuntimeError, TypeError, ValueError), match=message):
        episode_runner(episodes_config(Faulty, {"fault": fault})).sample()


def test_a_mistake_in_a_remote_runner_is_told(build):
    algo = build(episodes_config(Faulty, {"fault": "raises"}, runners={"num_env_runners": 1}))
    with pytest.raises(RuntimeError, match=r"Faulty' failed in a step \(runner 1\): .*ZeroDivisionError: by hand"):
        algo.train()


class NoBase:
    def __init__(self, config):
        pass

    def reset(self, *, seed=None, options=None):
        return {}, {}


def test_a_forgotten_base_class_is_an_early_error():
    with pytest.raises((TypeError, ValueError), match="NoBase"):
        episodes_config(NoBase).validate()


class NoAll(Team):
    """Never says "__all__": its agents' own flags end the episode."""

    def step(self, actions):
        observations, rewards, _, _, infos = super().step(actions)
        return observations, rewards, dict.fromkeys(self.agents, self.t == 5), {}, infos


def test_an_episode_ends_without_the_key_all():
    runner = episode_runner(episodes_config(NoAll))
    episodes = runner.sample(num_timesteps=20)
    assert [(len(e), e.is_terminated) for e in episodes if e.is_done] == [(5, True)] * 4


# --- turns ------------------------------------------------------------------------------------------------------------


def test_an_environment_with_turns_trains_from_python(build):
    algo = build(tiny_config("pettingzoo:tictactoe_v3"))
    assert isinstance(algo, PPO) and type(algo.env_runner) is JointEpisodeRunner
    before = weights(algo)
    result = algo.train()
    assert all(largest_difference(before[m], weights(algo)[m]) > 1e-6 for m in ("player_1", "player_2"))
    runners = result["env_runners"]
    assert 5.0 <= runners["episode_len_mean"] <= 9.0 and abs(runners["episode_return_mean"]) < 1e-6 + 2.0
    steps = runners["num_agent_steps_sampled"]
    assert sum(steps.values()) == runners["num_env_steps_sampled"] == 64


@pytest.fixture(scope="module")
def turns(ray_session, tmp_path_factory):
    """A run folder of a game with turns."""
    folder = tmp_path_factory.mktemp("turns") / "run"
    code, out, err = thrust_rllib(
        "train", "pettingzoo:tictactoe_v3", "--batch", 64, "--minibatch", 32, "--envs-per-runner", 2, "--seed", 1,
        "--iterations", 2, "--eval-episodes", 4, "--output", folder,
    )  # fmt: skip
    assert code == 0, out + err
    return folder


def test_the_command_line_trains_games_with_turns(turns):
    table = rows(turns)
    assert len(table) == 2 and all(5.0 <= float(row["env_runners/episode_len_mean"]) <= 9.0 for row in table)


def test_the_command_line_evaluates_games_with_turns(turns, tmp_path):
    record = tmp_path / "x.json"
    code, _, err = thrust_rllib("evaluate", turns, "--episodes", 6, "--seed", 4, "--output", record)
    assert code == 0, err
    found = read_json(record)
    assert set(found["policy"]["agent_returns"]) == {"player_1", "player_2"}
    (checkpoint, *_) = sorted((turns / "checkpoints").iterdir(), reverse=True)
    played = play_episodes(load_team(checkpoint), 6, seed=4)
    assert played.lengths.tolist() == found["policy"]["played"]["lengths"]
    assert (played.lengths >= 5).all() and (played.lengths <= 9).all()
