"""`play_episodes` and the recipe: what is learned at once, and episodes counted as they were played."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import tree
from ray.rllib.core.columns import Columns
from scipy import stats

from tests.support import make_runner, tiny_config
from thrust_rllib import JointPPOConfig
from thrust_rllib.baselines import check_baseline, play_baseline
from thrust_rllib.envs import calibrate, make_vector_env
from thrust_rllib.evaluation import TeamPolicy, play_episodes, seeds_for
from thrust_rllib.recipes import recipe
from thrust_rllib.sampling.episode_shares import episodes_per_environment
from thrust_rllib.trained_team import load_team


def trained(env, steps):
    config = recipe(JointPPOConfig().environment(env))
    # Nothing that an agent does changes what comes next (gamma 0), and a deviation of 1 has to shrink in short time.
    config.training(gamma=0.0, lr=[[0, 3e-3], [steps, 0.0]], train_batch_size_per_learner=512, minibatch_size=128)
    algo = config.debugging(seed=0).build_algo()
    for _ in range(steps // 512):
        algo.train()
    return algo


def test_learns_to_match_observations(ray_session):
    algo = trained("debug/match_observation", steps=10_000)
    played = play_episodes(algo, 32)
    algo.stop()
    assert played.lengths.tolist() == [16] * 32
    assert (played.returns.mean(axis=0) > 15.9).all()  # 16 at best, 4 at random


def test_learns_to_match_targets(ray_session):
    algo = trained("debug/match_target", steps=30_000)
    played = play_episodes(algo, 32)
    algo.stop()
    assert (played.returns.mean(axis=0) / 16 > -0.01).all()  # 0 at best; always acting 0 gets -1/3


@pytest.fixture(scope="module")
def untrained(ray_session):
    config = recipe(JointPPOConfig().environment("bucket_brigade", env_config={"scenario": "trivial_cooperation"}))
    algo = config.debugging(seed=0).build_algo()
    yield algo
    algo.stop()


@pytest.mark.parametrize("num_episodes, num_envs", [(1, None), (7, 3), (10, 4), (300, None)])
def test_plays_the_episodes_asked_for(untrained, num_episodes, num_envs):
    played = play_episodes(untrained, num_episodes, num_envs=num_envs)
    assert played.returns.shape == (num_episodes, 4) and played.lengths.shape == (num_episodes,)
    assert played.agents == [f"agent_{i}" for i in range(4)]
    assert (played.lengths >= 13).all()  # 12 nights, ends after the 13th at the earliest
    np.testing.assert_allclose(played.team_returns, played.returns.sum(axis=1))
    np.testing.assert_allclose(played.team_reward_per_step, played.team_returns / played.lengths)


@pytest.mark.parametrize("explore", [False, True])
def test_the_seed_decides_everything(untrained, explore):
    first, second, other = (play_episodes(untrained, 8, seed=seed, explore=explore) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first.returns, second.returns)
    if explore:
        assert (first.returns != other.returns).any()


def test_playing_does_not_change_the_training(ray_session):
    def weights(with_evaluation):
        config = recipe(JointPPOConfig().environment("debug/match_observation"))
        config.training(train_batch_size_per_learner=256, minibatch_size=64, num_epochs=1).debugging(seed=0)
        algo = config.build_algo()
        for _ in range(2):
            algo.train()
            if with_evaluation:
                play_episodes(algo, 5, explore=True)
        state = algo.learner_group.get_weights()
        algo.stop()
        return [v for m in sorted(state) for _, v in sorted(state[m].items())]

    for mine, other in zip(weights(True), weights(False), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(other))


def test_other_settings_of_the_environment(untrained):
    played = play_episodes(untrained, 4, env_config={"scenario": "trivial_cooperation", "min_nights": 3})
    assert (played.lengths < 13).any()


def test_no_episode_is_an_error(untrained):
    with pytest.raises(ValueError, match="num_episodes is 0"):
        play_episodes(untrained, 0)


@pytest.mark.parametrize("num_episodes, num_envs, shares", [(7, 3, [3, 2, 2]), (2, 4, [1, 1, 0, 0]), (0, 2, [0, 0])])
def test_shares_are_equal_and_add_up(num_episodes, num_envs, shares):
    assert episodes_per_environment(num_episodes, num_envs).tolist() == shares


def test_means_have_students_intervals(untrained):
    played = play_episodes(untrained, 12)
    means = played.means()
    for found, values in [
        (means.team_return, played.returns.sum(axis=1)),
        (means.team_reward_per_step, played.returns.sum(axis=1) / played.lengths),
        (means.agent_returns["agent_2"], played.returns[:, 2]),
        (means.length, played.lengths),
    ]:
        assert found.mean == pytest.approx(values.mean())
        half = stats.t.ppf(0.975, 11) * values.std(ddof=1) / np.sqrt(12)
        assert found.half_width == pytest.approx(half)


def team(env, **options):
    """What `play_episodes` needs, without an algorithm; networks of random weights."""
    config = tiny_config(env, **options)
    return SimpleNamespace(config=config, env_runner=make_runner(config))


def scrambled(mine):
    """The same team with other weights: the first ones act nearly uniformly."""
    generator = torch.Generator().manual_seed(0)
    for parameter in (p for _, module in mine.env_runner.module.items() for p in module.parameters()):
        parameter.data += torch.randn(parameter.shape, generator=generator)
    return mine


@pytest.mark.parametrize("policies", ["per_agent", "shared"])
@pytest.mark.parametrize("explore", [False, True])
def test_random_agents_are_uniform_and_the_others_unchanged(policies, explore):
    mine = team("debug/random_observations", policies=policies)
    generator = torch.Generator().manual_seed(0)
    for parameter in (p for _, module in mine.env_runner.module.items() for p in module.parameters()):
        parameter.data += torch.rand(parameter.shape, generator=generator)  # first weights are nearly uniform
    env = make_vector_env("debug/random_observations", {}, 300)
    observations = env.reset_joint(range(300))
    with_random, without, again = (
        TeamPolicy(mine, env, seed=5, explore=explore, random_agents=random)
        for random in (["agent_1"], [], ["agent_1"])
    )
    drawn = []
    for _ in range(10):
        actions, unchanged = with_random(observations), without(observations)
        np.testing.assert_array_equal(actions[[0, 2]], unchanged[[0, 2]])
        assert (actions[1] != unchanged[1]).any()
        np.testing.assert_array_equal(actions, again(observations))
        drawn.append(actions[1])
    counts = np.bincount(np.concatenate(drawn), minlength=env.action_spaces["agent_1"].n)
    assert stats.chisquare(counts).pvalue > 1e-3
    of_policy = np.bincount(np.concatenate([without(observations)[1] for _ in range(10)]), minlength=len(counts))
    assert stats.chisquare(of_policy).pvalue < 1e-6  # the test can fail: the policy is not uniform


def replayed(mine, env_name, num_episodes, num_envs, remembers=True):
    """Returns [K, N] of greedy episodes, each agent's module on its own, one step after the other."""
    env = make_vector_env(env_name, {}, num_envs)
    agents = list(env.possible_agents)
    modules = [mine.env_runner.module[mine.config.policy_mapping_fn.table[agent]].unwrapped() for agent in agents]
    initial = [tree.map_structure(lambda leaf: leaf[None], module.get_initial_state()) for module in modules]
    states = [[initial[k] for k in range(len(agents))] for _ in range(num_envs)]
    running, played = np.zeros((num_envs, len(agents))), [[] for _ in range(num_envs)]
    observations = env.reset_joint(seeds_for(0, num_envs)[:-1])
    while min(map(len, played)) < num_episodes // num_envs:
        actions = np.zeros((len(agents), num_envs), np.int64)
        for e in range(num_envs):
            for k, module in enumerate(modules):
                obs = torch.from_numpy(np.float32(observations[k, e]))[None, None]
                with torch.no_grad():
                    outputs = module.forward_inference({Columns.OBS: obs, Columns.STATE_IN: states[e][k]})
                actions[k, e] = outputs[Columns.ACTION_DIST_INPUTS].argmax()
                states[e][k] = outputs[Columns.STATE_OUT] if remembers else initial[k]
        result = env.step_joint(actions)
        observations, running = result.observations, running + result.rewards.T
        for e in np.flatnonzero(np.broadcast_to(result.terminated | result.truncated, (len(agents), num_envs)).any(0)):
            played[e].append(running[e].copy())
            running[e], states[e] = 0.0, list(initial)
    return np.array([episode for of_one in played for episode in of_one])


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("policies", ["per_agent", "shared"])
def test_memories_are_carried_and_begin_anew_with_an_episode(cell, policies):
    name = "debug/match_observation"
    mine = team(name, policies=policies, model={"cell": cell, "cell_size": 6}, minibatch_size=32)
    scrambled(mine)
    played = play_episodes(mine, 6, num_envs=3)
    np.testing.assert_array_equal(played.returns, replayed(mine, name, 6, 3))
    assert (played.returns != replayed(mine, name, 6, 3, remembers=False)).any()  # the test can fail
    again = play_episodes(mine, 6, num_envs=3)  # nothing is left over from the episodes before
    np.testing.assert_array_equal(again.returns, played.returns)


def test_random_agents_take_only_what_is_allowed():
    mine = team("debug/masked_actions")
    env = make_vector_env("debug/masked_actions", {}, 50)
    observations = env.reset_joint(range(50))
    agents = list(env.possible_agents)
    policy = TeamPolicy(mine, env, random_agents=agents)
    seen = {agent: np.zeros(env.action_spaces[agent].n, bool) for agent in agents}
    for _ in range(20):
        actions = policy(observations)
        for agent in agents:
            assert observations[agent]["action_mask"][np.arange(50), actions[agent]].all()
            seen[agent][actions[agent]] = True
        observations = env.step_joint(actions).observations
    assert any(taken.all() for taken in seen.values())


def test_a_random_partner_costs_what_the_matrix_says():
    mine = team("climbing")
    env = make_vector_env("climbing", {}, 1)
    row = int(TeamPolicy(mine, env)(env.reset_joint([0]))[0, 0])
    payoffs = np.array([[11, -30, 0], [-30, 7, 0], [0, 6, 5]])
    for random, expected in [(["agent_1"], payoffs[row].mean()), (env.possible_agents, payoffs.mean())]:
        played = play_episodes(mine, 400, random_agents=random)
        per_step = played.returns[:, 0] / played.lengths
        assert abs(per_step.mean() - expected) < 4 * per_step.std() / 20, random
        assert per_step.std() > 0
    assert play_episodes(mine, 4).returns.std() == 0


def test_unknown_random_agents_are_errors(untrained):
    with pytest.raises(ValueError, match="'agent_9', which the environment does not have; did you mean 'agent_"):
        play_episodes(untrained, 1, random_agents=["agent_9"])


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"num_agents": 3}, "the team was trained as"),
        ({"num_houses": 6}, "Choose settings of the environment that keep the spaces"),
        ({"raw_observations": True}, "Choose settings of the environment that keep the spaces"),
    ],
)
def test_an_environment_that_does_not_fit_the_networks_is_an_early_error(untrained, settings, message):
    with pytest.raises(ValueError, match=message):
        play_episodes(untrained, 1, env_config=settings)


def test_baselines_are_those_of_the_calibration():
    mine = team("bucket_brigade", env_config={"scenario": "minimal_specialization"})
    scores = {}
    for name in ("random", "specialist"):
        played = play_baseline(mine, name, 600, seed=1)
        reference = calibrate("minimal_specialization", name, episodes=1000)
        error = np.hypot(reference.standard_error, played.means().team_reward_per_step.standard_error)
        scores[name] = played.team_reward_per_step.mean()
        assert abs(scores[name] - reference.mean) < 4 * error
    assert scores["specialist"] > scores["random"] + 30


def test_baselines_that_do_not_exist_are_errors():
    with pytest.raises(ValueError, match="no specialist is known for the environment 'climbing'; there is one for"):
        play_baseline(team("climbing"), "specialist", 1)
    with pytest.raises(ValueError, match="baseline 'best' is unknown"):
        check_baseline(team("climbing"), "best", {})


@pytest.mark.parametrize("policies", ["per_agent", "shared"])
def test_a_team_from_a_checkpoint_plays_as_the_algorithm(ray_session, tmp_path, policies):
    config = recipe(JointPPOConfig().environment("bucket_brigade"))
    config.training(train_batch_size_per_learner=256, minibatch_size=64, num_epochs=1)
    algo = config.multi_agent(policies=policies).debugging(seed=0).build_algo()
    for _ in range(2):
        algo.train()
    played = play_episodes(algo, 6, explore=True)
    algo.save_to_path(str(tmp_path))
    for _ in range(6):
        algo.train()
    later = play_episodes(algo, 6, explore=True)
    algo.stop()
    loaded = load_team(tmp_path)
    assert loaded.iteration == 2 and loaded.config.normalize_observations
    np.testing.assert_array_equal(play_episodes(loaded, 6, explore=True).returns, played.returns)
    assert (later.returns != played.returns).any()


def test_what_is_no_checkpoint_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="is no checkpoint of an algorithm"):
        load_team(tmp_path)
    (tmp_path / "rllib_checkpoint.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read: FileNotFoundError"):
        load_team(tmp_path)
