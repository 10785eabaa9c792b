"""Joint rows of many batches: what they are made from, to the bit, and what is neither copied nor computed twice."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.learners.threads import talk
from tests.support import hand_batch, hand_streams
from thrust_rllib import joint_advantages, joint_values
from thrust_rllib.joint_rows import joint_rows
from thrust_rllib.ranks import ALONE, Ranks
from thrust_rllib.valid_rows import ValidRows

TEAM = {"shared": (("a", "b", "c"), (4,)), "own": (("d",), (2, 3))}  # {module: (agents, shape of an observation)}
SIZES = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=6)


def random_batch(rng, steps, envs, padding=False, absence=False):
    """A batch of `TEAM` in which every number is drawn."""
    valid = (
        np.arange(steps)[:, None] < rng.integers(1, steps + 1, size=envs) if padding else np.ones((steps, envs), bool)
    )
    bootstrap_rows = np.flatnonzero(valid & (rng.random(valid.shape) < 0.5))
    modules = {}
    for module_id, (agents, shape) in TEAM.items():
        size = (steps, len(agents), envs)
        modules[module_id] = hand_streams(
            agents,
            rng.normal(size=(*size, *shape)),
            actions=rng.integers(5, size=size),
            rewards=rng.normal(size=size),
            logp=rng.normal(size=size),
            bootstrap_obs=rng.normal(size=(len(agents), len(bootstrap_rows), *shape)),
            present=(rng.random(size) < (0.6 if absence else 1)) & valid[:, None],
            terminated=rng.random(size) < 0.2,
            truncated=rng.random(size) < 0.2,
            action_mask=rng.random((*size, 5)) < 0.5,
            origin=rng.integers(99, size=(*size, 2)),
        )
    return hand_batch(modules, bootstrap_rows, valid=valid)


def first_number(module_id, obs, sequences):
    """A critic that reads each row by itself."""
    return obs.flatten(1)[:, 0] * 0.3 + 0.1


def rows_of(batches, values_of=first_number, ranks=ALONE):
    modules = batches[0].modules
    return joint_rows(
        batches,
        values_of=values_of,
        memories={},
        normalizers={},
        gamma=dict(zip(modules, (0.9, 0.99), strict=True)),
        lambda_=dict(zip(modules, (0.95, 0.8), strict=True)),
        bootstrap=True,
        standardize_rollout=False,
        device="cpu",
        ranks=ranks,
    )


def tensors(rows):
    """{name: [n, M, …]} of everything."""
    found = {
        "columns": rows.columns.permute(1, 2, 0),
        "present": rows.present,
        "values": rows.critic.columns.permute(1, 2, 0),
        "values present": rows.critic.present,
    }
    for module_id, module in rows.modules.items():
        for name in ("obs", "actions", "action_mask", "origin"):
            found[f"{module_id} {name}"] = getattr(module, name)
    return found


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 999), sizes=SIZES, padding=st.booleans(), absence=st.booleans())
def test_rows_are_those_of_each_batch_alone(seed, sizes, padding, absence):
    rng = np.random.default_rng(seed)
    batches = [random_batch(rng, *size, padding, absence) for size in sizes]
    alone = [tensors(rows_of([batch])) for batch in batches]
    for name, together in tensors(rows_of(batches)).items():
        assert torch.equal(together, torch.cat([each[name] for each in alone], dim=1)), name


@pytest.mark.parametrize("padding", [False, True])
def test_each_row_holds_one_step_of_one_environment(padding):
    rng = np.random.default_rng(5)
    batches = [random_batch(rng, *size, padding) for size in ((4, 3), (2, 5), (4, 1))]
    rows, m = rows_of(batches), 0
    for batch in batches:
        for t, e in np.argwhere(batch.valid):
            for n, stream in enumerate(batch.streams()):
                module = rows.modules[stream.module_id]
                j = module.agents.index(stream.agent_id)
                assert rows.action_logp[n, m] == stream.action_logp[t, e]
                for name in ("obs", "actions", "action_mask"):
                    np.testing.assert_array_equal(getattr(module, name)[j, m].numpy(), getattr(stream, name)[t, e])
            m += 1
    assert m == len(rows)
    assert not torch.equal(rows.columns, rows_of(batches[::-1]).columns)  # the order of the batches is the rows'


def test_the_loop_over_time_runs_once_for_batches_of_a_length(monkeypatch):
    lengths, compute = [], joint_advantages.generalized_advantages
    monkeypatch.setattr(
        joint_advantages, "generalized_advantages", lambda x, *args: lengths.append(tuple(x.shape)) or compute(x, *args)
    )
    rng = np.random.default_rng(1)
    rows_of([random_batch(rng, steps, envs) for steps, envs in ((3, 1), (5, 2), (3, 4), (5, 2), (3, 1))])
    assert lengths == [(3, 4, 6), (5, 4, 4)]


# --------------------------------------------------------------------------------------------- values


def observations(batches, module_id):
    """[R, …] of all batches, then what follows."""
    streams = [batch.modules[module_id] for batch in batches]
    shape = TEAM[module_id][1]
    return np.concatenate(
        [x.reshape(-1, *shape) for x in [s.obs for s in streams] + [s.bootstrap_obs for s in streams]]
    )


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("limit", [1, 7, 16_384])
@pytest.mark.parametrize("count", [1, 4])
def test_every_learner_reads_its_own_part_a_bounded_number_of_rows_at_a_time(size, limit, count, monkeypatch):
    monkeypatch.setattr(joint_values, "VALUE_ROWS", limit)
    rng = np.random.default_rng(count)
    batches = [random_batch(rng, 4, 3) for _ in range(count)]
    expected = rows_of(batches)

    def work(ranks):
        seen = {module_id: [] for module_id in TEAM}

        def values_of(module_id, obs, sequences):
            seen[module_id].append(obs.clone())
            return first_number(module_id, obs, sequences)

        return rows_of(batches, values_of, ranks), seen

    parts = [found for found, _ in talk(size, work)]
    for rank, (rows, seen) in enumerate(parts):
        assert torch.equal(rows.columns, expected.columns)
        assert torch.equal(rows.critic.columns, expected.critic.columns)
        for module_id, pieces in seen.items():
            everything = observations(batches, module_id)
            mine = everything[Ranks(rank, size).part(len(everything))]
            np.testing.assert_array_equal(torch.cat(pieces).numpy(), mine)
            assert [len(x) for x in pieces[:-1]] == [limit] * ((len(mine) - 1) // limit) and len(pieces[-1]) <= limit


def test_a_learner_without_rows_asks_nothing():
    batch = random_batch(np.random.default_rng(2), 1, 1)
    total = len(observations([batch], "own"))
    asked = [0] * (total + 2)

    def work(ranks):
        def values_of(module_id, obs, sequences):
            asked[ranks.rank] += module_id == "own"
            return first_number(module_id, obs, sequences)

        return rows_of([batch], values_of, ranks)

    for rows, _ in talk(len(asked), work):
        assert torch.equal(rows.critic.columns, rows_of([batch]).critic.columns)
    assert sorted(asked) == [0] * 2 + [1] * total


@pytest.mark.parametrize("writeable", [True, False])
def test_rows_inside_one_array_are_not_copied_where_torch_may_read_them(writeable, monkeypatch):
    monkeypatch.setattr(joint_values, "VALUE_ROWS", 5)
    batch = random_batch(np.random.default_rng(3), 4, 3)
    obs = batch.modules["shared"].obs
    obs.flags.writeable = writeable  # arrays of Ray's object store are not
    shared = []

    def values_of(module_id, rows, sequences):
        if module_id == "shared":
            shared.append(np.shares_memory(rows.numpy(), obs))
        return first_number(module_id, rows, sequences)

    rows = rows_of([batch], values_of)
    assert shared[: obs[..., 0].size // 5] == [writeable] * 7 and not shared[-1]
    assert not np.shares_memory(rows.modules["shared"].obs.numpy(), obs)


# --------------------------------------------------------------------------------------------- memory and shapes


def peak_of(work):
    """The most bytes that numpy held at a time."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def wide_batches():
    """8 batches, 4 MB of observations of three agents of one module."""
    obs = np.zeros((16, 3, 4, 680), np.float32)
    return [hand_batch({"m": hand_streams("abc", obs.copy(), bootstrap_obs=np.zeros((3, 0, 680)))}) for _ in range(8)]


def test_a_learner_joins_no_more_than_its_own_part():
    class First(Ranks):
        def sum_(self, x):
            return x

    def values(ranks):
        joint_values.joint_values(batches, lambda module_id, obs, _: obs[:, 0], {}, "cpu", ranks)

    batches = wide_batches()
    for batch in batches:
        batch.modules["m"].obs.flags.writeable = False
    total = sum(batch.modules["m"].obs.nbytes for batch in batches)
    assert peak_of(lambda: values(ALONE)) > total
    assert peak_of(lambda: values(First(0, 4))) < 0.35 * total


def test_rows_are_written_once():
    batches = wide_batches()
    arrays = [batch.modules["m"].obs for batch in batches]
    total = sum(array.nbytes for array in arrays)
    assert total <= peak_of(lambda: ValidRows.of(batches).join(arrays)) < 1.05 * total
    joined_twice = peak_of(lambda: np.concatenate([x.swapaxes(0, 1).reshape(3, -1, 680) for x in arrays], axis=1))
    assert joined_twice > 1.9 * total


def test_steps_of_different_shapes_are_an_error():
    left, right = (
        hand_batch({"m": hand_streams("a", np.zeros((2, 1, 2, width)), bootstrap_obs=np.zeros((1, 0, width)))})
        for width in (3, 1)
    )
    with pytest.raises(ValueError, match=r"different shapes.*\(3,\) in the first and \(1,\) in another"):
        ValidRows.of([left, right]).join([batch.modules["m"].obs for batch in (left, right)])


def test_numbers_of_several_types_are_kept():
    batches = [random_batch(np.random.default_rng(k), 2, 2) for k in range(2)]
    batches[1].modules["own"].obs = batches[1].modules["own"].obs.astype(np.float64)
    batches[1].modules["own"].obs += 1e-12
    rows = rows_of(batches, lambda module_id, obs, _: obs.flatten(1)[:, 0].float())
    obs = rows.modules["own"].obs
    assert obs.dtype == torch.float64 and obs[0, 4, 0, 0] == batches[1].modules["own"].obs[0, 0, 0, 0, 0]
