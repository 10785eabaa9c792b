"""Recurrent modules, and what they remember according to a replay in float64, one step after the other."""

from __future__ import annotations

import copy

import numpy as np
import torch
import tree
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from thrust_rllib.rl_modules.recurrent import GRUModule, LSTMModule


def lstm(max_seq_len=None, **model_config):
    return RLModuleSpec(LSTMModule, model_config={"cell_size": 4, "max_seq_len": max_seq_len, **model_config})


def gru_with_two_memories(max_seq_len=None):
    config = {"cell_size": 3, "max_seq_len": max_seq_len, "vf_share_layers": False, "fcnet_hiddens": [5]}
    return RLModuleSpec(GRUModule, model_config=config)


def rllibs_lstm(max_seq_len=None):
    config = DefaultModelConfig(
        fcnet_hiddens=[5], use_lstm=True, lstm_cell_size=4, max_seq_len=max_seq_len or 20, vf_share_layers=True
    )
    return RLModuleSpec(DefaultPPOTorchRLModule, model_config=config)


def replay(module, observations):
    """The states entering each step [R, S], leaves in the order of sorted keys, and the logits [R, A]; both float64.

    Args:
        module: a recurrent module; a copy of it runs.
        observations: encoded, of one agent in one episode, from its first step on.
    """
    module = copy.deepcopy(module).double()
    state = tree.map_structure(lambda x: torch.as_tensor(x, dtype=torch.float64)[None], module.get_initial_state())
    states, logits = [], []
    with torch.no_grad():
        for observation in observations:
            states.append(np.concatenate([leaf.ravel().numpy() for leaf in tree.flatten(state)]))
            obs = torch.as_tensor(np.asarray(observation), dtype=torch.float64)[None, None]
            outputs = module.forward_inference({Columns.OBS: obs, Columns.STATE_IN: state})
            logits.append(outputs[Columns.ACTION_DIST_INPUTS][0, 0].numpy())
            state = outputs[Columns.STATE_OUT]
    return np.array(states), np.array(logits)


def sequences_of(batch):
    """(number of the sequence, e, rows t) of every training sequence; checks that every valid row is in one."""
    envs, found, covered = batch.num_envs, [], np.zeros_like(batch.valid)
    for number, row in enumerate(batch.sequence_rows):
        t, e = divmod(int(row), envs)
        later = [int(r) // envs for r in batch.sequence_rows if r % envs == e and r > row]
        stop = min([*later, int(batch.valid[:, e].sum())])
        found.append((number, e, range(t, stop)))
        assert not covered[t:stop, e].any()
        covered[t:stop, e] = True
    np.testing.assert_array_equal(covered, batch.valid)
    return found
