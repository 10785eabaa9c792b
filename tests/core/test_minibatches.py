"""Joint minibatches: every row once, the same rows for every agent, all randomness from one generator."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import make_learner, make_runner, tiny_config, update
from thrust_rllib import CrossAgentLoss
from thrust_rllib.minibatches import joint_minibatches, rows_per_epoch

rows = st.integers(1, 60)
sizes = st.none() | st.integers(1, 70)
epochs = st.integers(1, 4)
limits = st.none() | st.integers(0, 10)


def draw(num_rows, size, num_epochs, iterate_all, limit=None, shuffle=True, seed=0):
    return list(
        joint_minibatches(
            num_rows,
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
    assert rows_per_epoch(num_rows, size, iterate_all, limit) == drawn


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
