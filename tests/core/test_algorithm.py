"""JointPPO as an RLlib algorithm: training, evaluation, checkpoints, learner and runners in other processes."""

from __future__ import annotations

import numpy as np
import pytest
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from tests.support import largest_difference, make_learner, make_runner, parameters, tiny_config, update
from thrust_rllib import JointPPO, JointPPOConfig, MLPModule, RedundancyPenalty
from thrust_rllib.connectors.observation_normalizer import ObservationNormalizer
from thrust_rllib.envs import register_joint_env
from thrust_rllib.envs.debug import Alignment

pytestmark = pytest.mark.usefixtures("ray_session")

COUPLED = {"cross_agent_losses": {"redundancy": RedundancyPenalty()}, "cross_agent_coeffs": {"redundancy": 0.5}}


def weights(algo):
    return {
        m: {name: np.asarray(value) for name, value in state.items()}
        for m, state in algo.learner_group.get_state(components="learner")["learner"]["rl_module"].items()
    }


def test_what_an_iteration_reports(build):
    algo = build(tiny_config("debug/constant_reward", {"episode_length": 8}, **COUPLED))
    result = algo.train()
    runners, learners = result["env_runners"], result["learners"]
    assert runners["episode_return_mean"] == 16.0 and runners["num_env_steps_sampled"] == 64
    assert runners["agent_episode_returns_mean"] == {"agent_0": 8.0, "agent_1": 8.0}
    assert learners["__all_modules__"]["num_minibatch_steps"] == 2
    assert learners["__all_modules__"]["cross_agent_loss"]["total"] == pytest.approx(
        0.5 * learners["__all_modules__"]["cross_agent_loss"]["redundancy"]
    )
    assert set(learners) == {"__all_modules__", "agent_0", "agent_1"}
    assert result["num_env_steps_sampled_lifetime"] == 64
    assert_finite({"learners": learners, "env_runners": runners})


def assert_finite(tree, path=()):
    """No NaN in any number of a result."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            assert_finite(value, (*path, key))
    elif isinstance(tree, (int, float, np.number)) and not isinstance(tree, bool):
        assert np.isfinite(tree), path


def test_no_iteration_reports_a_nan(build):
    # Episodes are longer than an iteration: most iterations see none end.
    algo = build(tiny_config("debug/constant_reward", {"episode_length": 100}, num_envs=1))
    returns = []
    for iteration in range(4):
        result = algo.train()
        assert_finite({"learners": result["learners"], "env_runners": result["env_runners"]})
        returns.append(result["env_runners"].get("episode_return_mean"))
        assert result["learners"]["__all_modules__"]["num_env_steps_trained_lifetime"] == 32 * (iteration + 1)
    assert returns == [None, 200.0, 200.0, 200.0]


def test_the_batch_is_sampled_in_several_rollouts_where_one_is_too_short(build):
    algo = build(tiny_config(runners={"rollout_fragment_length": 8}))
    result = algo.train()
    assert result["env_runners"]["num_env_steps_sampled"] == 64  # four rollouts of 2 · 8 steps
    assert result["learners"]["__all_modules__"]["num_env_steps_trained"] == 32


def test_agent_steps_can_be_counted(build):
    config = tiny_config()
    config.multi_agent(count_steps_by="agent_steps")
    config.env_runners(rollout_fragment_length=4)
    result = build(config).train()
    assert result["env_runners"]["num_env_steps_sampled"] == 24  # three agents: 72 agent steps


def test_evaluation_plays_the_asked_episodes_greedily(build):
    config = tiny_config("debug/identity", {"episode_length": 5})
    config.evaluation(evaluation_interval=1, evaluation_duration=7, evaluation_config={"explore": False})
    algo = build(config)
    result = algo.train()["evaluation"]["env_runners"]
    assert result["num_episodes"] == 7 and result["episode_len_mean"] == 5.0
    # Greedy: each agent always sees the same, so it takes one action, and is paid in each step or in none.
    assert set(result["agent_episode_returns_mean"].values()) <= {0.0, 5.0}


def test_evaluation_by_timesteps(build):
    config = tiny_config("debug/constant_reward", {"episode_length": 5})
    config.evaluation(evaluation_interval=1, evaluation_duration=40, evaluation_duration_unit="timesteps")
    result = build(config).train()["evaluation"]["env_runners"]
    assert result["num_env_steps_sampled"] == 40 and result["episode_return_mean"] == 10.0


def test_evaluation_normalises_with_the_moments_of_training(build):
    config = tiny_config("debug/alignment", {"episode_length": 7}, runners={"normalize_observations": True})
    config.evaluation(evaluation_interval=1, evaluation_duration=2)
    algo = build(config)
    algo.train()
    training, evaluating = (
        runner._env_to_module[ObservationNormalizer][0].moments["agent_0"]
        for runner in (algo.env_runner, algo.eval_env_runner)
    )
    assert training.count == evaluating.count == 64
    np.testing.assert_array_equal(training.mean, evaluating.mean)


def test_the_same_seed_gives_the_same_run(build):
    first, second = build(tiny_config(**COUPLED)), build(tiny_config(**COUPLED))
    for _ in range(2):
        results = [algo.train() for algo in (first, second)]
        assert results[0]["env_runners"].get("episode_return_mean") == results[1]["env_runners"].get(
            "episode_return_mean"
        )
    assert largest_difference(weights(first), weights(second)) == 0.0
    assert largest_difference(weights(first), weights(build(tiny_config(seed=4, **COUPLED)))) > 0.0


def test_a_checkpoint_keeps_everything(build, tmp_path):
    config = tiny_config(
        critic_lr=1e-2,
        lr=[[0, 1e-3], [1000, 1e-4]],
        cross_agent_losses={"redundancy": RedundancyPenalty()},
        cross_agent_coeffs={"redundancy": [[0, 0.1], [640, 1.0]]},
        runners={"normalize_observations": True},
    )
    algo = build(config)
    for _ in range(2):
        algo.train()
    algo.save_to_path(tmp_path)
    restored = JointPPO.from_checkpoint(tmp_path)
    try:
        assert isinstance(restored, JointPPO) and isinstance(restored.config, JointPPOConfig)
        assert largest_difference(weights(algo), weights(restored)) == 0.0
        (batch,) = make_runner(config.copy(copy_frozen=False)).sample(num_timesteps=64)
        results = [update(each.learner_group._learner, batch, steps=192) for each in (algo, restored)]
        assert largest_difference(weights(algo), weights(restored)) == 0.0
        for name in ("cross_agent_coeff", "total_loss"):
            assert results[0]["__all_modules__"][name] == results[1]["__all_modules__"][name]
        assert results[0]["agent_0"]["value_target_mean"] == results[1]["agent_0"]["value_target_mean"]
        rate = results[0]["agent_0"]["default_optimizer_learning_rate"]
        assert rate == results[1]["agent_0"]["default_optimizer_learning_rate"] < 1e-3
        # The runner's moments came along, too.
        old, new = (_moments(each.env_runner)["agent_0"]["total"] for each in (algo, restored))
        assert old["count"] == 128 and largest_difference(old, new) == 0.0
        assert restored.train()["num_env_steps_sampled_lifetime"] == 192
    finally:
        restored.stop()


class CannotBeBuilt(MLPModule):
    def setup(self):
        raise KeyError("depth")


@pytest.mark.parametrize("runners", [0, 1])
def test_a_module_that_cannot_be_built_is_told_wherever_it_is_needed_first(build, runners):
    config = tiny_config(runners={"num_env_runners": runners})
    config.rl_module(rl_module_spec=RLModuleSpec(CannotBeBuilt))
    with pytest.raises((ValueError, KeyError), match="depth"):
        build(config)


def test_one_remote_learner_gives_the_weights_of_a_local_one(build, ray_session):
    config = tiny_config(iterate_all_minibatches=True, critic_lr=1e-3, **COUPLED)
    runner, local = make_runner(config.copy(copy_frozen=False)), make_learner(config.copy(copy_frozen=False))
    config.learners(num_learners=1)
    algo = build(config)
    assert largest_difference(weights(algo), parameters(local)) == 0.0
    options = {"num_epochs": 2, "minibatch_size": 16, "shuffle_batch_per_epoch": True}
    for as_references in (False, True):
        batches = runner.sample(num_timesteps=64)
        mine = update(local, batches, steps=64)
        rollouts = [ray_session.put(batches) if as_references else batches]
        (theirs,) = algo.learner_group.update_from_rollouts(
            rollouts, timesteps={"num_env_steps_sampled_lifetime": 64}, **options
        )
        theirs = MetricsLogger.peek_results(theirs)
        assert largest_difference(weights(algo), parameters(local)) < 1e-7
        for name in ("total_loss", "num_minibatch_steps", "num_env_steps_trained"):
            assert mine["__all_modules__"][name] == pytest.approx(theirs["__all_modules__"][name], rel=1e-5)
    assert np.isfinite(algo.train()["learners"]["__all_modules__"]["total_loss"])


def test_batches_in_rays_store_are_read_only_and_train_all_the_same(ray_session):
    config = tiny_config(**COUPLED)
    (batch,) = make_runner(config).sample(num_timesteps=64)
    shipped = ray_session.get(ray_session.put(batch))
    assert not shipped.modules["agent_0"].obs.flags.writeable
    learners = [make_learner(config) for _ in range(2)]
    update(learners[0], batch)
    update(learners[1], shipped)
    assert largest_difference(parameters(learners[0]), parameters(learners[1])) == 0.0


def test_remote_runners_share_their_moments_and_evaluation_uses_them(build):
    # The environment is known by name in this process only.
    register_joint_env("only/here", Alignment)
    config = tiny_config("only/here", runners={"normalize_observations": True, "num_env_runners": 2})
    config.evaluation(evaluation_interval=2, evaluation_duration=6, evaluation_num_env_runners=1)
    algo = build(config)
    for iteration in range(2):
        result = algo.train()
        assert result["env_runners"]["num_env_steps_sampled"] == 64
        counts = algo.env_runner_group.foreach_env_runner(
            lambda r: {m: x["total"]["count"] for m, x in _moments(r).items()}, local_env_runner=False
        )
        assert [count["agent_0"] for count in counts] == [64 * (iteration + 1)] * 2
    evaluated = result["evaluation"]["env_runners"]
    assert evaluated["num_episodes"] == 6 and evaluated["episode_return_mean"] == 3 * sum(range(7))
    (count,) = algo.eval_env_runner_group.foreach_env_runner(
        lambda r: _moments(r)["agent_0"]["total"]["count"], local_env_runner=False
    )
    assert count == 64  # what the weights were trained with: the second rollout joins after the evaluation


def _moments(runner):
    state = runner.get_state(components="env_to_module_connector")["env_to_module_connector"]
    (name,) = [key for key in state if "ObservationNormalizer" in key]
    return state[name]


def runner_weights(algo):
    return {m: state for m, state in algo.env_runner.get_state()["rl_module"].items()}


def test_going_back_to_an_older_checkpoint_takes_the_runner_along(build, tmp_path):
    algo = build(tiny_config(**COUPLED))
    algo.train()
    old = weights(algo)
    path = algo.save_to_path(str(tmp_path / "old"))
    algo.train()
    algo.train()
    algo.restore_from_path(path)
    assert largest_difference(weights(algo), old) == 0.0
    for module_id, state in runner_weights(algo).items():
        for name, value in state.items():
            np.testing.assert_array_equal(value, old[module_id][name])


def test_what_is_frozen_now_counts_whatever_the_checkpoint_trained(build, tmp_path):
    path = build(tiny_config()).save_to_path(str(tmp_path / "all"))
    algo = build(tiny_config(trained=["agent_0"]))
    algo.restore_from_path(path)
    before = weights(algo)
    algo.train()
    after = weights(algo)
    assert largest_difference({"m": after["agent_1"]}, {"m": before["agent_1"]}) == 0.0
    assert largest_difference({"m": after["agent_0"]}, {"m": before["agent_0"]}) > 0.0


def test_nobody_answering_is_told_and_ends_the_run(build, caplog, monkeypatch):
    algo = build(tiny_config())
    monkeypatch.setattr(algo, "_sample", lambda: [])
    with caplog.at_level("WARNING", logger="thrust_rllib"):
        algo.training_step()
        algo.training_step()
    assert sum("sample_timeout_s" in record.getMessage() for record in caplog.records) == 2
    with pytest.raises(RuntimeError, match=r"sample_timeout_s=.*3 iterations running"):
        algo.training_step()
