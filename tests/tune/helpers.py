"""Tiny sweeps: two agents, 32 steps and two episodes per iteration, some milliseconds each."""

import dataclasses

from thrust_rllib import JointPPOConfig, RedundancyPenalty
from thrust_rllib.search_space import Parameter
from thrust_rllib.sweeps import Sweep

ENV = "debug/match_observation"
LR = Parameter("lr", ("lr",), choices=(1e-9, 1e-2))
RANGE = Parameter("lr", ("lr",), low=1e-4, high=1e-2, log=True)
COUPLING = Parameter("redundancy", ("cross_agent_coeffs", "redundancy"), choices=(0.0, 0.5, 2.0))


def tiny(**training):
    config = JointPPOConfig().environment(ENV).env_runners(num_envs_per_env_runner=2).debugging(seed=0)
    config.training(train_batch_size_per_learner=32, minibatch_size=16, num_epochs=1)
    config.training(cross_agent_losses={"redundancy": RedundancyPenalty()}, cross_agent_coeffs={"redundancy": 0.0})
    config.rl_module(model_config={"fcnet_hiddens": [16, 12]})
    return config.training(**training)


SWEEP = Sweep(tiny(), (RANGE, COUPLING), steps=128, trials=2, concurrent=2, checkpoint_every=2)


def sweep(**changes):
    return dataclasses.replace(SWEEP, **changes)
