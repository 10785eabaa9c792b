"""Joint minibatches: every row once, the same rows for every agent, all randomness from one generator."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import make_learner, make_runner, tiny_config, update
from thrust_rllib import CrossAgentLoss
from thrust_rllib.minibatches import Units, joint_epochs, rows_per_epoch

rows = st.integers(1, 60)
sizes = st.none() | st.integers(1, 70)
epochs = st.integers(1, 4)
limits = st.none() | st.integers(0, 10)


def draw(num_rows, size, num_epochs, iterate_all, limit=None, shuffle=True, seed=0):
    return list(
        itertools.chain(*draw_epochs(Units.single_rows(num_rows), size, num_epochs, iterate_all, limit, shuffle, seed))
    )


def draw_epochs(units, size, num_epochs, iterate_all, limit=None, shuffle=True, seed=0):
    return list(
        joint_epochs(
            units,
            minibatch_size=size,
            num_epochs=num_epochs,
            iterate_all_minibatches=iterate_all,
            max_minibatches_per_epoch=limit,
            shuffle=shuffle,
            generator=torch.Generator().manual_seed(seed),
        )
    )


@settings(deadline=None)
@given(rows, sizes, epochs, st.integers(0, 5))
def test_all_minibatches_use_every_row_exactly_once_per_epoch(num_rows, size, num_epochs, seed):
    chunks = draw(num_rows, size, num_epochs, True, seed=seed)
    per_epoch = -(-num_rows // min(size or num_rows, num_rows))
    assert len(chunks) == num_epochs * per_epoch
    for epoch in range(num_epochs):
        mine = chunks[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(torch.cat(mine).tolist()) == list(range(num_rows))
        full = min(size or num_rows, num_rows)
        assert [len(c) for c in mine[:-1]] == [full] * (per_epoch - 1) and 1 <= len(mine[-1]) <= full


@settings(deadline=None)
@given(rows, sizes, epochs, limits)
def test_the_default_is_one_draw_per_epoch_and_knows_no_limit(num_rows, size, num_epochs, limit):
    chunks = draw(num_rows, size, num_epochs, False, limit)
    assert len(chunks) == num_epochs
    for chunk in chunks:
        assert len(chunk) == min(size or num_rows, num_rows) == len(set(chunk.tolist()))
        assert 0 <= int(chunk.min()) and int(chunk.max()) < num_rows


@settings(deadline=None)
@given(rows, sizes, epochs, limits)
def test_a_limit_keeps_the_first_chunks_of_the_same_epochs(num_rows, size, num_epochs, limit):
    everything = draw(num_rows, size, num_epochs, True)
    limited = draw(num_rows, size, num_epochs, True, limit)
    per_epoch = len(everything) // num_epochs
    kept = per_epoch if limit is None else min(max(limit, 1), per_epoch)
    expected = [everything[e * per_epoch + k] for e in range(num_epochs) for k in range(kept)]
    assert len(limited) == len(expected)
    assert all(torch.equal(x, y) for x, y in zip(limited, expected, strict=True))


@settings(deadline=None)
@given(rows, sizes, st.booleans(), limits)
def test_rows_per_epoch_counts_what_is_drawn(num_rows, size, iterate_all, limit):
    drawn = sum(len(c) for c in draw(num_rows, size, 1, iterate_all, limit))
    assert rows_per_epoch(Units.single_rows(num_rows), size, iterate_all, limit) == drawn


def test_without_shuffling_the_order_is_that_of_time():
    assert [c.tolist() for c in draw(5, 2, 2, True, shuffle=False)] == [[0, 1], [2, 3], [4]] * 2


def test_the_generator_is_the_only_source_of_randomness():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = draw(50, 8, 3, True)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert all(torch.equal(x, y) for x, y in zip(first, draw(50, 8, 3, True), strict=True))
    assert any(not torch.equal(x, y) for x, y in zip(first, draw(50, 8, 3, True, seed=1), strict=True))


def test_no_rows_is_an_error():
    with pytest.raises(ValueError, match="empty"):
        draw(0, 4, 1, True)


# --- units of several rows ----------------------------------------------------------------------------------------

lengths_of_units = st.lists(st.integers(1, 9), min_size=1, max_size=12)


def units_of(lengths, seed=0):
    """Units of these lengths whose rows are scattered over the batch, each unit's ascending; and each unit's rows."""
    order = np.random.default_rng(seed).permutation(sum(lengths))
    parts = [sorted(part.tolist()) for part in np.split(order, np.cumsum(lengths)[:-1])]
    return Units(torch.tensor(sum(parts, []), dtype=torch.int64), torch.tensor(lengths)), parts


def greedy(parts, size):
    """Units in a row, packed into minibatches: [[unit, …], …]."""
    chunks = []
    for part in parts:
        if not chunks or sum(map(len, chunks[-1])) + len(part) > size:
            chunks.append([])
        chunks[-1].append(part)
    return chunks


@settings(deadline=None)
@given(rows, sizes, epochs, limits, st.booleans(), st.integers(0, 5))
def test_single_rows_are_chunks_of_torchs_permutation(num_rows, size, num_epochs, limit, iterate_all, seed):
    generator, expected = torch.Generator().manual_seed(seed), []
    for _ in range(num_epochs):
        chunks = torch.randperm(num_rows, generator=generator).split(min(size or num_rows, num_rows))
        expected += chunks[: (len(chunks) if limit is None else max(limit, 1)) if iterate_all else 1]
    drawn = draw(num_rows, size, num_epochs, iterate_all, limit, seed=seed)
    assert [x.dtype for x in drawn] == [torch.int64] * len(expected)
    assert [x.tolist() for x in drawn] == [x.tolist() for x in expected]


@settings(deadline=None)
@given(lengths_of_units, sizes, epochs, st.integers(0, 5))
def test_minibatches_are_filled_with_whole_units(lengths, size, num_epochs, seed):
    units, parts = units_of(lengths, seed)
    generator = torch.Generator().manual_seed(seed)
    for epoch in draw_epochs(units, size, num_epochs, True, seed=seed):
        order = torch.randperm(len(units), generator=generator).tolist()
        expected = greedy([parts[k] for k in order], size or sum(lengths))
        assert [chunk.tolist() for chunk in epoch] == [sum(chunk, []) for chunk in expected]


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 12), sizes)
def test_units_of_one_length_are_packed_like_any_others(length, count, size):
    units, parts = units_of([length] * count)
    (epoch,) = draw_epochs(units, size, 1, True, shuffle=False)
    assert [chunk.tolist() for chunk in epoch] == [sum(c, []) for c in greedy(parts, size or length * count)]


@settings(deadline=None)
@given(lengths_of_units, sizes, st.booleans(), limits)
def test_rows_per_epoch_counts_those_of_the_units(lengths, size, iterate_all, limit):
    units, _ = units_of(lengths)
    drawn = sum(len(c) for epoch in draw_epochs(units, size, 1, iterate_all, limit, shuffle=False) for c in epoch)
    assert rows_per_epoch(units, size, iterate_all, limit) == drawn


def test_a_minibatch_smaller_than_a_unit_is_one_unit():
    units, parts = units_of([4, 2, 3])
    (epoch,) = draw_epochs(units, 1, 1, True, shuffle=False)
    assert [chunk.tolist() for chunk in epoch] == parts


def test_an_epochs_shuffle_does_not_depend_on_what_was_used_of_earlier_ones():
    units, _ = units_of([4, 2, 3, 5])
    options = dict(num_epochs=3, iterate_all_minibatches=True, max_minibatches_per_epoch=None, shuffle=True)
    whole, cut = (torch.Generator().manual_seed(1) for _ in range(2))
    for epoch in joint_epochs(units, minibatch_size=5, generator=whole, **options):
        list(epoch)
    for _ in joint_epochs(units, minibatch_size=5, generator=cut, **options):
        pass
    assert torch.equal(whole.get_state(), cut.get_state())
    assert not torch.equal(whole.get_state(), torch.Generator().manual_seed(1).get_state())


@pytest.mark.parametrize("lengths", [[2, 2], [5, 0], [6, -1], []])
def test_lengths_that_are_not_those_of_the_rows_are_an_error(lengths):
    with pytest.raises(ValueError, match="for 5 rows; needed: lengths"):
        Units(torch.arange(5), torch.tensor(lengths, dtype=torch.int64))


class Rows(CrossAgentLoss):
    """Looks at which rows each agent has in a minibatch."""

    def __init__(self):
        self.seen = []

    def __call__(self, features, logits, actions, present):
        self.seen.append({agent: x.clone() for agent, x in actions.items()})
        return None


@pytest.mark.parametrize("policies", ["per_agent", "shared", {"x": ["agent_0", "agent_2"], "y": ["agent_1"]}])
@pytest.mark.parametrize("iterate_all", [True, False])
def test_every_agent_reads_the_same_rows(policies, iterate_all):
    config = tiny_config(
        "debug/alignment",
        {"episode_length": 7},
        policies=policies,
        iterate_all_minibatches=iterate_all,
        cross_agent_losses={"rows": Rows()},
        num_epochs=3,
    )
    (batch,) = make_runner(config).sample(num_timesteps=64)
    # The stored action names the row: (episode, step) and environment, the same number for every agent.
    for streams in batch.modules.values():
        steps, envs = batch.valid.shape
        numbers = np.arange(steps * envs).reshape(steps, 1, envs)
        streams.actions = np.broadcast_to(numbers, streams.actions.shape).copy()
        streams.obs[..., 2] = 0.0
    learner = make_learner(config)
    seen = learner.config.cross_agent_losses["rows"].seen
    for module in learner.module.values():  # log-probabilities of these "actions" do not matter
        module.action_dist_cls = Anything
    update(learner, batch)
    assert len(seen) == (12 if iterate_all else 3)
    for actions in seen:
        first = actions["agent_0"]
        assert all(torch.equal(first, other) for other in actions.values())
    for epoch in range(3):
        chunks = seen[epoch * 4 : (epoch + 1) * 4] if iterate_all else []
        if chunks:
            assert sorted(torch.cat([c["agent_0"] for c in chunks]).tolist()) == list(range(64))
    # A new order in each epoch.
    assert not torch.equal(seen[0]["agent_0"], seen[-1]["agent_0"])


class Anything:
    """A distribution that takes any number for an action."""

    def __init__(self, logits):
        self.logits = logits

    @classmethod
    def from_logits(cls, logits):
        return cls(logits)

    def logp(self, actions):
        return self.logits[:, 0] - actions * 0.0

    def entropy(self):
        return self.logits[:, 1]
