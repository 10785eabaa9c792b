"""What stands at absent rows, behind the end of a column or behind the end of a sequence reaches nothing."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from ray.rllib.core.columns import Columns

from tests.recurrent.reference_data import Shape
from tests.recurrent.test_reference_update import (
    COMES_AND_GOES,
    GRU,
    LSTM,
    MLP,
    SPACES,
    Both,
    Case,
    joint_batch,
    separate,
)
from tests.support import largest_difference, optimizer_states, parameters, update
from thrust_rllib import CrossAgentLoss, FeatureSimilarity, LSTMModule, RedundancyPenalty


class RowCounter(CrossAgentLoss):
    """Keeps how many rows, and how many present ones, each minibatch has; couples nothing."""

    def __init__(self):
        self.rows, self.present = [], []

    def __call__(self, features, logits, actions, present):
        assert all(torch.isfinite(x).all() for x in features.values())
        self.rows.append({len(x) for x in features.values()})
        self.present.append({agent: int(mask.sum()) for agent, mask in present.items()})


COUPLINGS = {"redundancy": RedundancyPenalty(), "similarity": FeatureSimilarity(), "counter": RowCounter()}
CASE = Case(
    (separate(LSTMModule), GRU, MLP),
    kinds=SPACES,
    config={"cross_agent_losses": COUPLINGS, "coupling_gradient_interval": 1},
    shapes=(Shape(max_seq_len=4, ragged=True, presence=COMES_AND_GOES),),
)
GARBAGE = [np.nan, np.inf, 1e6, -1e6]


def unused(batch, streams):
    """Bool arrays of what a module's agents do not use: steps [T, n, E], bootstrap rows [n, K], sequences [n, C]."""
    steps, envs = batch.valid.shape
    acted = streams.present & batch.valid[:, None]
    following, entering = [], []
    for j in range(len(streams.agents)):
        last = {e: max(np.flatnonzero(acted[:, j, e]), default=-1) for e in range(envs)}
        following.append([])
        for row in batch.bootstrap_rows:
            at = row // envs, j, row % envs
            ends = streams.truncated[at] or row // envs == last[row % envs]
            following[-1].append(not (acted[at] and ends and not streams.terminated[at]))
        entering.append([])
        for row in batch.sequence_rows:
            t, e, reads = row // envs, row % envs, False
            while t < steps and not batch.episode_start[t, e] and not reads:
                reads = acted[t, j, e]
                t += 1
                if t * envs + e in batch.sequence_rows:
                    break
            entering[-1].append(not reads)
    return ~acted, np.array(following), np.array(entering)


def poisoned(batch, garbage):
    """A copy with `garbage` in every field where nothing should be read."""
    batch = copy.deepcopy(batch)
    finite = np.clip(np.nan_to_num(garbage, nan=1e6), -1e6, 1e6)
    for streams in batch.modules.values():
        steps, following, entering = unused(batch, streams)
        assert steps.any() and following.any()
        # A network without memory gives values of all rows at once, and those must be finite.
        value = finite if streams.state_in is None else garbage
        streams.obs[steps], streams.bootstrap_obs[following] = value, value
        streams.action_logp[steps], streams.rewards[steps] = garbage, garbage
        streams.actions[steps] = garbage if streams.actions.dtype.kind == "f" else 10**6
        streams.terminated[steps] = streams.truncated[steps] = True
        if streams.action_mask is not None:
            streams.action_mask[steps] = False
        if streams.state_in is not None:
            assert entering.any() and not entering.all()
            streams.state_in[entering] = garbage
    batch.episode_start[~batch.valid] = True
    return batch.check()


def trained(case, change=lambda batch: batch, prepare=lambda learner: None):
    """Learner and results of two updates."""
    both = Both(case)
    prepare(both.learner)
    results = []
    for _ in range(2):
        batches = [joint_batch(fixed, both.agents) for fixed in both.data()]
        results.append(update(both.learner, [change(batch) for batch in batches]))
        assert results[-1]["__all_modules__"]["num_non_finite_minibatches"] == 0
    assert min(both.movement(m) for m in both.first) > 1e-4
    return both.learner, results


def assert_alike(first, second):
    """To the bit: what is reported (losses, statistics, couplings and their gradients) and what moved."""
    assert first[1] == second[1]
    assert largest_difference(parameters(first[0]), parameters(second[0])) == 0.0
    assert largest_difference(optimizer_states(first[0]), optimizer_states(second[0])) == 0.0


@pytest.mark.parametrize("standardize", ["rollout", "minibatch", "team"])
@pytest.mark.parametrize("garbage", GARBAGE)
def test_what_stands_at_absent_rows_and_behind_columns_changes_no_bit(garbage, standardize):
    case = dataclasses.replace(CASE, config={**CASE.config, "standardize_advantages": standardize})
    assert_alike(trained(case), trained(case, lambda batch: poisoned(batch, garbage)))


def test_the_comparison_sees_garbage_where_it_is_read():
    def one_real_number(batch):
        streams = batch.modules["a0"]
        streams.obs[tuple(np.argwhere(streams.present)[0])] += 1.0
        return batch

    first, second = trained(CASE), trained(CASE, one_real_number)
    assert first[1] != second[1]
    assert largest_difference(parameters(first[0]), parameters(second[0])) > 1e-4


@pytest.mark.parametrize("garbage", [1e6, -1e6])
@pytest.mark.parametrize("net", [LSTM, GRU, separate(LSTMModule)])
def test_what_stands_behind_the_end_of_a_sequence_changes_no_bit(net, garbage):
    """Sequences of different lengths run side by side; the shorter ones are filled up, which no row may see."""
    filled = []

    def fill(module, name):
        plain = getattr(module, name)

        def forward(batch, *args, **kwargs):
            obs = batch[Columns.OBS].clone()
            again = (obs[:, 1:] == obs[:, :-1]).all(-1)  # rows are random: only filling repeats one
            padding = again.flip(1).cumprod(1).flip(1).bool()
            filled.append(int(padding.sum()))
            obs[:, 1:][padding] = garbage
            return plain({**batch, Columns.OBS: obs}, *args, **kwargs)

        setattr(module, name, forward)

    def prepare(learner):
        for module_id in learner.module.keys():
            for name in ("forward_train", "compute_values"):
                fill(learner.module[module_id].unwrapped(), name)

    case = dataclasses.replace(CASE, nets=(net,) * 3)
    assert_alike(trained(case), trained(case, prepare=prepare))
    assert sum(filled) > 50


def test_a_coupling_gets_the_real_rows_of_a_minibatch_and_no_others():
    both = Both(CASE)
    counter = both.learner.config.cross_agent_losses["counter"]
    valid, present = 0, dict.fromkeys(SPACES, 0)
    for _ in range(2):
        for fixed in both.data():
            update(both.learner, [joint_batch(fixed, both.agents)])
            valid += int(fixed.valid.sum())
            for agent, stream in fixed.streams.items():
                present[agent] += int(stream.present.sum())
    assert all(len(rows) == 1 for rows in counter.rows)
    epochs = both.learner.config.num_epochs
    assert sum(min(rows) for rows in counter.rows) == epochs * valid
    for agent in SPACES:
        assert sum(mask[agent] for mask in counter.present) == epochs * present[agent] > 0
