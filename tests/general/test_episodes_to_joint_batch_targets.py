"""Value targets of batches that EpisodesToJointBatch made, by hand and in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.general.plans import AGENTS, collect, pay, play, team
from tests.reference import generalized_advantages
from thrust_rllib.joint_rows import joint_rows


def targets(batch, agent, gamma, lambda_, value=lambda obs: 0.5 + 0 * obs[:, 0]):
    """Value targets of an agent's rows, as the learner computes them."""
    rows = joint_rows(
        [batch],
        values_of=lambda _, obs, sequences: value(obs),
        memories={},
        normalizers={},
        gamma=dict.fromkeys(batch.modules, gamma),
        lambda_=dict.fromkeys(batch.modules, lambda_),
        bootstrap=True,
        standardize_rollout=False,
        device="cpu",
    )
    i = batch.agents.index(agent)
    return rows.value_targets[i][rows.present[i]].double().numpy()


@pytest.mark.parametrize(
    ("end", "lambda_", "expected"),
    [
        # γ = 0.9, rewards 1, 2, 3, V = 0.5: r + 0.45 where something follows (λ = 0); discounted sums (λ = 1).
        ("terminated", 0.0, [1.45, 2.45, 3.0]),
        ("terminated", 1.0, [1 + 0.9 * 4.7, 2 + 0.9 * 3.0, 3.0]),
        ("truncated", 0.0, [1.45, 2.45, 3.45]),
        ("truncated", 1.0, [1 + 0.9 * 5.105, 2 + 0.9 * 3.45, 3.45]),
        ("cut", 0.0, [1.45, 2.45, 3.0]),
        ("cut", 1.0, [1 + 0.9 * 2.45, 2.45, 3.0]),
    ],
)
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("partner", ["there", "dead", "late"])
def test_targets_computed_by_hand(end, lambda_, expected, together, partner):
    """Case 10; another agent that comes or goes meanwhile changes nothing."""
    cut = end == "cut"
    plan = {"a0": "oooo", "a1": {"there": "oooo", "dead": "oT..", "late": ".ooo"}[partner]}
    fragments = play(plan, over="terminated" if cut else end, cuts=[2] if cut else (), reward=lambda t, i: t + 1.0)
    codec = team(AGENTS[:2])
    batches = [collect(fragments, codec)] if together else [collect([f], codec) for f in fragments]
    found = np.concatenate([targets(batch, "a0", 0.9, lambda_) for batch in batches])
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def value_of(obs):
    """[R, 3] to [R]: something that depends on all components."""
    return 0.3 * obs[:, 0] - 0.07 * obs[:, 1] ** 2 + 0.5 * obs[:, 2] + torch.sin(obs[:, 1])


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("lambda_", [0.0, 0.95, 1.0])
def test_targets_of_agents_that_come_go_and_wait(lambda_, together):
    plan = {"a0": "o.oo..ooo", "a1": "oo..oo.t.", "a2": "..ooooooo"}
    cuts, gamma = [3, 5], 0.9
    fragments = play(plan, cuts=cuts, over="truncated", wait_pay=0.25)
    groups = [fragments] if together else [[f] for f in fragments]
    v = lambda t, i: float(value_of(torch.tensor([[0.0, float(t), float(i)]], dtype=torch.float64))[0])  # noqa: E731
    for agent, (i, moments) in zip(plan, enumerate(plan.values()), strict=True):
        expected = []
        starts = [t for t, m in enumerate(moments[:-1]) if m == "o"]
        ends = [next((u for u in range(t + 1, len(moments)) if moments[u] != "."), None) for t in starts]
        rewards = [pay(t, i) + 0.25 * (end - t - 1) for t, end in zip(starts, ends, strict=True)]
        # A step belongs to the fragment in which it ends.
        limits = [0, *cuts, len(moments) - 1]
        for low, high in zip(limits, limits[1:], strict=False):
            mine = [k for k, end in enumerate(ends) if low < end <= high]
            if mine:
                last = ends[mine[-1]]
                after = 0.0 if moments[last] in "tT" else v(last, i)
                goes_on, following = np.zeros(len(mine), bool), np.array([*[0.0] * (len(mine) - 1), after])
                picked = [rewards[k] for k in mine], [v(starts[k], i) for k in mine]
                expected.append(generalized_advantages(*picked, goes_on, goes_on, following, gamma, lambda_)[1])
        batches = [collect(group, team()) for group in groups]
        found = np.concatenate([targets(batch, agent, gamma, lambda_, value_of) for batch in batches])
        np.testing.assert_allclose(found, np.concatenate(expected), rtol=1e-5, atol=1e-5)


def test_a_missing_mark_of_a_cut_would_be_noticed():
    fragments = play({"a0": "oooo"}, over="terminated", cuts=[2], reward=lambda t, i: t + 1.0)
    batch = collect(fragments, team(("a0",)))
    assert batch.modules["m_a0"].truncated.sum() == 1
    batch.modules["m_a0"].truncated[:] = False
    assert abs(targets(batch, "a0", 0.9, 1.0)[1] - 2.45) > 0.1
