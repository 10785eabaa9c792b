"""Trials in processes of their own, as `tune.Tuner` starts them."""

import pytest
from ray import tune

from thrust_rllib import JointPPO, JointPPOConfig, RedundancyPenalty, register
from thrust_rllib.envs import register_joint_env
from thrust_rllib.envs.debug import MatchObservation


def tiny(env="debug/match_observation"):
    config = JointPPOConfig().environment(env).env_runners(num_envs_per_env_runner=2).debugging(seed=0)
    return config.training(train_batch_size_per_learner=32, minibatch_size=16, num_epochs=1)


def fit(trainable, space, tmp_path):
    run = tune.RunConfig(stop={"training_iteration": 1}, storage_path=str(tmp_path), verbose=0)
    return tune.Tuner(trainable, param_space=space, run_config=run).fit()


def test_a_grid_over_learning_rate_and_coupling_weight(ray_session, tmp_path):
    space = tiny().training(
        lr=tune.grid_search([1e-3, [[0, 1e-3], [100, 0.0]]]),
        cross_agent_losses={"redundancy": RedundancyPenalty()},
        cross_agent_coeffs={"redundancy": tune.grid_search([0.0, 0.5])},
    )
    results = fit(JointPPO, space, tmp_path)
    assert not results.errors and len(results) == 4
    weights = sorted(r.metrics["learners"]["__all_modules__"]["cross_agent_coeff"]["redundancy"] for r in results)
    assert weights == [0.0, 0.0, 0.5, 0.5]


@pytest.fixture
def only_here():
    register_joint_env("only/in_this_process", MatchObservation)
    return "only/in_this_process"


def test_by_name_on_an_environment_registered_here(ray_session, tmp_path, only_here):
    register()
    (result,) = fit("JointPPO", tiny(only_here).to_dict(), tmp_path)
    assert result.error is None and result.metrics["env_runners"]["num_env_steps_sampled"] == 32
