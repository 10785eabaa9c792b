"""Small configurations, runners, learners and hand-made batches.

A learner is built in some milliseconds without an `Algorithm` and without Ray:

    config = tiny_config("debug/random_observations", lr=1e-3)
    runner, learner = make_runner(config), make_learner(config)
    results = update(learner, runner.sample(num_timesteps=64))
"""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import torch
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from thrust_rllib import JointBatch, JointEnv, JointEnvRunner, JointPPOConfig, JointStepResult
from thrust_rllib.joint_batch import ModuleStreams

HIDDEN = (16, 12)


class Declared(JointEnv):
    """Random observations of any declared spaces; pays 1 and is truncated after `length` steps."""

    def __init__(self, observation_spaces, action_spaces, agents=None, length=5):
        count = len(observation_spaces)
        self.possible_agents = list(agents) if agents is not None else [f"a{i}" for i in range(count)]
        self.observation_spaces = dict(zip(self.possible_agents, observation_spaces, strict=True))
        self.action_spaces = dict(zip(self.possible_agents, action_spaces, strict=True))
        self.length, self.t = length, 0
        self.seen_actions = []

    def _see(self):
        return {agent: self.observation_spaces[agent].sample() for agent in self.possible_agents}

    def reset_joint(self, seed=None):
        self.t = 0
        if seed is not None:
            for k, agent in enumerate(self.possible_agents):
                self.observation_spaces[agent].seed(seed + k)
        return self._see()

    def step_joint(self, actions):
        for agent in self.possible_agents:
            assert self.action_spaces[agent].contains(actions[agent]), (agent, actions[agent])
        self.t += 1
        return JointStepResult(dict.fromkeys(self.possible_agents, 1.0), self._see(), False, self.t == self.length)


def declared_config(observation_spaces, action_spaces, agents=None, **options):
    """`tiny_config` for agents with these spaces."""
    env_config = {
        "observation_spaces": list(observation_spaces),
        "action_spaces": list(action_spaces),
        "agents": None if agents is None else list(agents),
    }
    return tiny_config(Declared, env_config, **options)


def tiny_config(
    env="debug/random_observations",
    env_config=None,
    *,
    seed=3,
    seed_recipe=False,
    policies=None,
    overrides=None,
    trained=None,
    num_envs=2,
    runners=None,
    model=None,
    **training,
):
    """Networks of 16 and 12 units, 64 joint rows, minibatches of 16, 2 epochs.

    Args:
        env: as `.environment(env=…)`.
        env_config: as `.environment(env_config=…)`.
        seed: of everything.
        seed_recipe: starts from `.seed_defaults()`.
        policies: as `.multi_agent(policies=…)`.
        overrides: {module: options}, as `algorithm_config_overrides_per_module`.
        trained: as `policies_to_train`.
        num_envs: environments of a runner.
        runners: further options of `.env_runners(…)`.
        model: the module's `model_config`.
        **training: options of `.training(…)`.
    """
    config = JointPPOConfig()
    if seed_recipe:
        config.seed_defaults()
    config.environment(env, env_config=env_config or {})
    config.debugging(seed=seed)
    config.env_runners(num_envs_per_env_runner=num_envs, **(runners or {}))
    options = {"train_batch_size_per_learner": 64, "minibatch_size": 16, "num_epochs": 2}
    config.training(**{**options, **training})
    config.rl_module(model_config=model if model is not None else {"fcnet_hiddens": list(HIDDEN)})
    multi_agent = {}
    if policies is not None:
        multi_agent["policies"] = policies
    if overrides is not None:
        multi_agent["algorithm_config_overrides_per_module"] = overrides
    if trained is not None:
        multi_agent["policies_to_train"] = trained
    return config.multi_agent(**multi_agent) if multi_agent else config


def make_runner(config, worker_index=0, **kwargs):
    """A runner in this process, as an algorithm without remote runners builds it."""
    if not config._is_frozen:
        config.validate()
    return JointEnvRunner(config=config, worker_index=worker_index, **kwargs)


def make_learner(config, spaces=None):
    """A built learner of the configuration, without an algorithm or a group."""
    if not config._is_frozen:
        config.validate()
    if spaces is None:
        spaces = make_runner(config).get_spaces()
    learner = config.learner_class(config=config, module_spec=config.get_multi_rl_module_spec(spaces=spaces))
    learner.build()
    return learner


def update(learner, batches, *, steps=0, **options):
    """One update with the configuration's epochs and minibatch size; results as plain numbers."""
    config = learner.config
    options = {
        "num_epochs": config.num_epochs,
        "minibatch_size": config.minibatch_size,
        "shuffle_batch_per_epoch": config.shuffle_batch_per_epoch,
        **options,
    }
    batches = [batches] if isinstance(batches, JointBatch) else list(batches)
    results = learner.update(episodes=batches, timesteps={"num_env_steps_sampled_lifetime": steps}, **options)
    return MetricsLogger.peek_results(results)


def runner_metrics(runner):
    """The runner's metrics as plain numbers."""
    return MetricsLogger.peek_results(runner.get_metrics())


def parameters(learner):
    """{module: {name: array}}, copies."""
    return {
        m: {name: p.detach().cpu().numpy().copy() for name, p in learner.module[m].named_parameters()}
        for m in sorted(learner.module.keys())
    }


def optimizer_states(learner):
    """{optimizer: [arrays]}, copies."""
    return {
        name: [
            value.detach().numpy().copy()
            for entry in optimizer.state_dict()["state"].values()
            for value in entry.values()
        ]
        for name, optimizer in learner._named_optimizers.items()
    }


def largest_difference(left, right):
    """The largest difference of two nested dicts of arrays."""
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        return max((largest_difference(left[key], right[key]) for key in left), default=0.0)
    if isinstance(left, list):
        assert len(left) == len(right)
        return max((largest_difference(x, y) for x, y in zip(left, right, strict=True)), default=0.0)
    return float(np.abs(np.asarray(left, np.float64) - np.asarray(right, np.float64)).max(initial=0.0))


def scramble(learner, seed=0, size=0.3):
    """Replaces all parameters by random ones: the initial policy is nearly uniform, which hides mistakes."""
    generator = torch.Generator().manual_seed(seed)
    for module_id in sorted(learner.module.keys()):
        for name, p in learner.module[module_id].named_parameters():
            scale = size if "head" in name or "bias" in name or name == "log_std" else 2 * size
            with torch.no_grad():
                p.copy_(scale * torch.randn(p.shape, generator=generator))


def hand_streams(agents, obs, *, actions=None, rewards=None, logp=None, num_actions=2, bootstrap_obs=None, **flags):
    """`ModuleStreams` from obs [T, n, E, …]; whatever is left out is zero, and everyone acts.

    Args:
        agents: ids.
        obs: [T, n, E, …].
        actions: [T, n, E, …]; default: zeros.
        rewards: [T, n, E].
        logp: [T, n, E]; default: of a uniform policy over `num_actions`.
        num_actions: see `logp`.
        bootstrap_obs: [n, K, …].
        **flags: present, terminated, truncated, action_mask, origin (default: episode e, step t).
    """
    obs = np.asarray(obs, np.float32)
    shape = obs.shape[:3]
    zeros = np.zeros(shape, np.float32)
    logp = np.full(shape, -np.log(num_actions), np.float32) if logp is None else np.asarray(logp, np.float32)
    return ModuleStreams(
        agents=tuple(agents),
        obs=obs,
        actions=np.zeros(shape, np.int64) if actions is None else np.asarray(actions),
        action_logp=logp,
        rewards=zeros if rewards is None else np.asarray(rewards, np.float32),
        present=np.asarray(flags.get("present", np.ones(shape, bool))),
        terminated=np.asarray(flags.get("terminated", np.zeros(shape, bool))),
        truncated=np.asarray(flags.get("truncated", np.zeros(shape, bool))),
        bootstrap_obs=(
            np.zeros((shape[1], 0, *obs.shape[3:]), np.float32)
            if bootstrap_obs is None
            else np.asarray(bootstrap_obs, np.float32)
        ),
        action_mask=flags.get("action_mask"),
        origin=flags.get("origin", default_origin(*shape)),
    )


def default_origin(steps, agents, envs):
    """[T, n, E, 2]: environment e is in episode e, row t is its step t."""
    origin = np.empty((steps, agents, envs, 2), np.int64)
    origin[..., 0] = np.arange(envs)
    origin[..., 1] = np.arange(steps)[:, None, None]
    return origin


def hand_batch(modules, bootstrap_rows=(), **fields):
    """A checked `JointBatch` of {module: ModuleStreams}."""
    steps, _, envs = next(iter(modules.values())).rewards.shape
    return JointBatch(
        modules=dict(sorted(modules.items())),
        bootstrap_rows=np.asarray(bootstrap_rows, np.int64),
        episode_start=fields.pop("episode_start", np.zeros((steps, envs), bool)),
        valid=fields.pop("valid", np.ones((steps, envs), bool)),
        **fields,
    ).check()


def discrete(n=2):
    """Discrete(n)."""
    return gym.spaces.Discrete(n)


def box(size=3, bound=10.0):
    """Box of one axis."""
    return gym.spaces.Box(-bound, bound, (size,))
