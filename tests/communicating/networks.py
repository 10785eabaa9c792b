"""Communicating modules and observations for tests, in float64."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import torch

from thrust_rllib.rl_modules.module_choice import module_class_for

N, WIDTH, D, GRID = 5, 4, 6, (2, 4, 5)


def network(seed=0, num_links=N, width=WIDTH, space=None, **model):
    """A module of width D, with weights and biases that are all away from their first values."""
    torch.manual_seed(seed)
    if (shape := model.get("input_shape")) is not None:
        width = int(np.prod(shape))
    config = {"message_rounds": 2, "message_size": D, "encoder_hiddens": [7], "num_links": num_links} | model
    module = module_class_for(config)(
        observation_space=gym.spaces.Box(-np.inf, np.inf, (num_links + width,), np.float32),
        action_space=space or gym.spaces.Discrete(3),
        model_config=config,
    ).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return module


def observations(*leading, num_links=N, width=WIDTH, seed=0, density=0.5):
    """[leading…, N, N + O]: the first N agents of rows, links before the rest; nobody hears itself."""
    rng = np.random.default_rng(seed)
    shape = (*leading, num_links)
    links = rng.uniform(0.1, 1.0, (*shape, num_links)) * (rng.random((*shape, num_links)) < density)
    links[..., np.arange(num_links), np.arange(num_links)] = 0.0
    return np.concatenate([links, rng.normal(size=(*shape, width))], axis=-1)


def by_agent(obs):
    """[B, N, …] as the exchange takes it, [N, B, …]."""
    return torch.from_numpy(np.moveaxis(obs, len(obs.shape) - 2, 0).copy())
