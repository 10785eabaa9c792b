"""Whole runs through the general door: runner classes, what is sampled, metrics, checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ray import tune
from ray.rllib.algorithms.ppo.ppo import PPO
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

from tests.general.runs import Lives, Team, assert_acts_with, batch_of, episode_runner, episodes_config, weights
from tests.support import largest_difference, make_learner, parameters, runner_metrics, tiny_config, update
from thrust_rllib import JointEnvRunner, JointPPO, register
from thrust_rllib.episode_runner import JointEpisodeRunner

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


# --- ends and turns ---------------------------------------------------------------------------------------------------


class NoAll(Team):
    """Never says "__all__": its agents' own flags end the episode."""

    def step(self, actions):
        observations, rewards, _, _, infos = super().step(actions)
        return observations, rewards, dict.fromkeys(self.agents, self.t == 5), {}, infos


def test_an_episode_ends_without_the_key_all():
    runner = episode_runner(episodes_config(NoAll))
    episodes = runner.sample(num_timesteps=20)
    assert [(len(e), e.is_terminated) for e in episodes if e.is_done] == [(5, True)] * 4


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
