"""A joint minibatch in slices: no row is lost or twice there, and the slices' gradients are those of the whole."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.learners.test_several_learners import BATCH, COUPLED, MINIBATCH, Pair, config_of, rollouts
from tests.learners.threads import ThreadLearners, flat, talk
from thrust_rllib import JensenShannon, JointPPOLearner, RedundancyPenalty
from thrust_rllib.gradient_sum import sum_gradients
from thrust_rllib.joint_losses import Decisive
from thrust_rllib.joint_rows import CriticRows, JointRows
from thrust_rllib.optimizer_pass import OptimizerPass
from thrust_rllib.ranks import ALONE, Ranks
from thrust_rllib.sequences import RowSequences
from thrust_rllib.shared_minibatch import MinibatchShares, outputs_of_all
from thrust_rllib.team_outputs import TeamOutputs

# ------------------------------------------------------------------------------------------------------ the slices


def numbered(count, sequences=None):
    """Joint rows of one agent; the first column of each is its number, and that of its values."""
    columns = torch.zeros(2, 1, count)
    columns[0] = torch.arange(count)
    present = torch.ones(1, count, dtype=torch.bool)
    return JointRows({}, columns, present, CriticRows(columns.clone(), present), sequences)


def in_slices(rows, indices, size):
    """What each of `size` learners selects."""
    return [MinibatchShares(rows, Ranks(rank, size)).select(indices) for rank in range(size)]


def check_slices(found, indices):
    """Behind each other the slices are the minibatch, which every learner has as a whole."""
    sizes = found[0].sizes
    assert sum(sizes) == len(indices) and len(sizes) == len(found)
    assert all(minibatch.sizes == sizes for minibatch in found)
    for minibatch, size in zip(found, sizes, strict=True):
        for read in (lambda rows: rows.columns, lambda rows: rows.critic.columns):
            assert read(minibatch.whole)[0, 0].tolist() == indices.tolist()
            if size == 0:
                assert read(minibatch.own)[0, 0].tolist() == indices[:1].tolist()
    for read in (lambda rows: rows.columns, lambda rows: rows.critic.columns):
        own = [read(minibatch.own)[0, 0, :size] for minibatch, size in zip(found, sizes, strict=True)]
        assert torch.cat(own).tolist() == indices.tolist()


@given(st.integers(1, 60), st.integers(1, 9), st.data())
def test_slices_of_rows(count, size, data):
    indices = torch.tensor(data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=count, unique=True)))
    found = in_slices(numbered(count), indices, size)
    check_slices(found, indices)
    assert max(found[0].sizes) - min(found[0].sizes) <= 1


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 5), st.data())
def test_slices_of_whole_sequences(lengths, size, data):
    unit = np.repeat(np.arange(len(lengths)), lengths)
    begins = np.diff(unit, prepend=-1) > 0
    rows = numbered(len(unit), RowSequences(unit, begins, begins, None))
    order = data.draw(st.permutations(range(len(lengths))))[: data.draw(st.integers(1, len(lengths)))]
    indices = torch.cat([torch.arange(len(unit))[unit == k] for k in order])
    found = in_slices(rows, indices, size)
    check_slices(found, indices)
    for minibatch, own in zip(found, found[0].sizes, strict=True):
        sequences = minibatch.own.sequences
        assert sequences.begins[0]
        if own:
            assert len(sequences.unit) == sum(lengths[k] for k in set(sequences.unit.tolist()))
    ideal = np.arange(1, size) * len(indices) / size
    bounds = np.cumsum(found[0].sizes)[:-1]
    assert (np.abs(bounds - ideal) <= max(lengths[k] for k in order) / 2).all()


def test_one_learner_has_the_minibatch_itself():
    (found,) = in_slices(numbered(7), torch.tensor([4, 2, 6]), 1)
    assert found.own is found.whole and found.sizes == (3,)


# ----------------------------------------------------------------------------------------------------- the outputs

N, FEATURES, CHOICES = 2, 4, 3  # agents, and for each of them
WIDTHS = (N, N, N, *[FEATURES] * N, *[CHOICES] * N)


def outputs_of(x, weight):
    """A network for the whole team: rows [B, 3] and weight [3, W] to its outputs."""
    logp, entropy, values, *rest = torch.tanh(x @ weight).split(WIDTHS, dim=1)
    features, logits = (dict(enumerate(part)) for part in (rest[:N], rest[N:]))
    return TeamOutputs(logp.T, entropy.T, values.T, features, logits)


def loss_of(outputs):
    """Reads all rows at once, so that a wrong row or a row twice shows."""
    team = torch.cat([outputs.logp, outputs.entropy, outputs.values]).T
    every = torch.cat([team, *outputs.features.values(), *outputs.logits.values()], dim=1)
    return (every.T @ every / len(every)).square().sum() + (every[1:] * every[:-1]).sum()


class LogitsOnly(JensenShannon):
    needs_features = False


@pytest.mark.parametrize("sizes", [(3, 4), (0, 1), (1, 0), (2, 3, 2), (0, 5, 0)])
def test_the_sum_of_the_slices_gradients_is_the_gradient_of_the_whole(sizes):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), 3, generator=generator, dtype=torch.float64)
    weight = torch.randn(3, sum(WIDTHS), generator=generator, dtype=torch.float64)

    def gradient(rows, ranks):
        own_weight = weight.clone().requires_grad_()
        outputs = outputs_of_all(outputs_of(rows, own_weight), sizes, ranks, [RedundancyPenalty()])
        (found,) = torch.autograd.grad(loss_of(outputs), own_weight)
        return outputs, found

    def of_slice(ranks):
        own = x.split(sizes)[ranks.rank]
        return gradient(own if len(own) else x[:1] + 100.0, ranks)

    whole, expected = gradient(x, ALONE)
    found = talk(len(sizes), of_slice)
    for (outputs, _), calls in found:
        assert calls == [("gather", max(sizes) * sum(WIDTHS))]
        for name in ("logp", "entropy", "values"):
            torch.testing.assert_close(getattr(outputs, name), getattr(whole, name), rtol=0.0, atol=1e-15)
        for name in ("features", "logits"):
            assert list(getattr(outputs, name)) == [0, 1]
            for agent, mine in getattr(outputs, name).items():
                torch.testing.assert_close(mine, getattr(whole, name)[agent], rtol=0.0, atol=1e-15)
    gradients = [own for (_, own), _ in found]
    torch.testing.assert_close(sum(gradients), expected, rtol=1e-10, atol=1e-10)
    assert all(bool(own.any()) == bool(size) for own, size in zip(gradients, sizes, strict=True))
    if min(sizes):
        assert all((own - expected / len(sizes)).abs().max() > 1e-3 for own in gradients), "no slice is the whole"


@pytest.mark.parametrize(
    ("couplings", "width"),
    [([], 3 * N), ([LogitsOnly("raise")], (3 + CHOICES) * N), ([RedundancyPenalty()], (3 + CHOICES + FEATURES) * N)],
)
def test_only_what_couplings_read_is_sent(couplings, width):
    def work(ranks):
        return outputs_of_all(outputs_of(torch.ones(2, 3), torch.ones(3, sum(WIDTHS))), (2, 2), ranks, couplings)

    for outputs, calls in talk(2, work):
        assert calls == [("gather", 2 * width)]
        assert bool(outputs.logits) == bool(couplings) and bool(outputs.features) == (width == (3 + 7) * N)


# --------------------------------------------------------------------------------------------------- the gradients


def passes_of(frozen=()):
    """Two passes over modules a and b, of float32 and float64 parameters."""
    modules = {"a": nn.Linear(2, 3), "b": nn.Linear(3, 1, dtype=torch.float64)}
    trained = {m: m not in frozen for m in modules}
    return [
        OptimizerPass(
            {m: [torch.optim.Adam(module.parameters(), fused=True)] for m, module in modules.items()},
            trained,
            dict.fromkeys(modules),
            "global_norm",
            "cpu",
        )
        for _ in range(2)
    ]


@pytest.mark.parametrize("frozen", [(), ("a",)])
def test_a_gradient_is_there_for_all_learners_where_it_is_for_one(frozen):
    has = {0: (0, 1), 1: (0, 2), 2: (2,)}  # learner: which of each pass's parameters have one; nobody has the last

    def work(ranks):
        passes = passes_of(frozen)
        for k, optimizer_pass in enumerate(passes):
            optimizer_pass.all_grads = [
                torch.full_like(p, 10.0**ranks.rank * (k + 1)) if i in has[ranks.rank] else None
                for i, p in enumerate(optimizer_pass.all_params)
            ]
        mine = float(ranks.rank)
        decisive = Decisive(torch.tensor([mine, 2.0]), torch.tensor(3 * mine), torch.tensor([-1.0, -mine]))
        return passes, sum_gradients(passes, decisive, ranks)

    for (passes, decisive), calls in talk(3, work):
        assert decisive.total.tolist() == [1.0, 2.0] and decisive.approx_kl.tolist() == [-1.0, -1.0]
        assert decisive.coupling.shape == () and decisive.coupling.item() == 3.0
        parameters = sum(p.numel() + 1 for optimizer_pass in passes for p in optimizer_pass.all_params)
        assert calls == [("sum", parameters + 5)]
        for k, optimizer_pass in enumerate(passes):
            for i, (p, g) in enumerate(zip(optimizer_pass.all_params, optimizer_pass.all_grads, strict=True)):
                expected = sum(10.0**rank * (k + 1) for rank, mine in has.items() if i in mine)
                if not expected:
                    assert g is None
                    continue
                assert g.dtype == p.dtype and torch.equal(g, torch.full_like(p, expected))


def test_a_gradient_that_is_not_finite_reaches_everybody():
    def work(ranks):
        (first, second) = passes_of()
        for optimizer_pass in (first, second):
            optimizer_pass.all_grads = [torch.zeros_like(p) for p in optimizer_pass.all_params]
        first.all_grads[0][1, 1] = [float("inf"), -float("inf"), 0.0][ranks.rank]
        second.all_grads[2][0, 2] = [0.0, 0.0, float("nan")][ranks.rank]
        sum_gradients([first, second], Decisive(torch.zeros(2), torch.zeros(()), torch.zeros(2)), ranks)
        return [
            [int((~torch.isfinite(g)).sum()) for g in optimizer_pass.all_grads] for optimizer_pass in (first, second)
        ]

    for counts, _ in talk(3, work):
        assert counts == [[1, 0, 0, 0], [0, 0, 1, 0]]


def test_one_learner_keeps_its_gradients():
    passes, decisive = passes_of(), Decisive(torch.ones(2), torch.ones(()), torch.ones(2))
    for optimizer_pass in passes:
        optimizer_pass.all_grads = [None, *map(torch.ones_like, optimizer_pass.all_params[1:])]
    before = [list(optimizer_pass.all_grads) for optimizer_pass in passes]
    assert sum_gradients(passes, decisive, ALONE) is decisive
    for optimizer_pass, kept in zip(passes, before, strict=True):
        assert all(x is y for x, y in zip(optimizer_pass.all_grads, kept, strict=True))


# -------------------------------------------------------------------------------------------------- whole updates


def moody(features, logits, actions, present):
    """No term in short minibatches, and none of the features in others, depending on what the features say."""
    first, *others = features.values()
    if len(first) < 40:
        return None
    if first.mean() > others[0].mean():
        return sum((first - x).square().mean() for x in others)
    return -next(iter(logits.values())).square().mean()


@pytest.mark.parametrize("size", [2, 3])
def test_a_coupling_that_is_not_always_there_and_does_not_always_read_features(size):
    config = config_of(
        cross_agent_losses={"moody": moody, "never": lambda *_: None},
        cross_agent_coeffs={"moody": 0.5},
        iterate_all_minibatches=True,
        coupling_gradient_interval=1,
    )
    spaces, data = rollouts(config, updates=4, steps=120)
    pair = Pair(config, size, spaces)
    losses = [pair.update(batches)["/__all_modules__/cross_agent_loss/moody"] for batches in data]
    pair.check()
    assert all(losses)


class Counts(JointPPOLearner):
    """Keeps how many rows each learner has of each minibatch."""

    def build(self):
        super().build()
        self.sizes = []
        losses = self._losses

        def counted(module, minibatch, *args):
            self.sizes.append(minibatch.sizes)
            return losses(module, minibatch, *args)

        self._losses = counted


@pytest.mark.parametrize("critic_lr", [None, 2e-3])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_minibatch_of_one_training_sequence_leaves_learners_without_rows(cell, size, critic_lr):
    model = {"cell": cell, "cell_size": 8, "fcnet_hiddens": [8], "max_seq_len": 6}
    config = config_of(**{**COUPLED, "critic_lr": critic_lr}, model=model, minibatch_size=6)
    spaces, data = rollouts(config, updates=2, steps=24)
    pair = Pair(config, size, spaces, learner_class=Counts)
    for batches in data:
        found = pair.update(batches)
    assert found["/__all_modules__/num_minibatch_steps"] == 2 * 4
    pair.check()
    assert {sum(sizes) for sizes in pair.several.learners[0].sizes} == {6}
    assert all(0 in sizes for sizes in pair.several.learners[0].sizes)


def test_learners_that_round_differently_decide_alike():
    """On unlike machines one learner's KL may lie above the limit and another's below: their mean decides."""
    config = config_of(target_kl=1e-3, num_epochs=4, lr=5e-3, iterate_all_minibatches=True)
    spaces, (batches,) = rollouts(config, updates=1)

    def updated(kl_of_1):
        def change(rank, learner):
            losses = learner._losses

            def rounded(*args):
                found = losses(*args)
                decisive = found.decisive()
                mine = dataclasses.replace(decisive, approx_kl=torch.full_like(decisive.approx_kl, kl_of_1 * rank))
                object.__setattr__(found, "decisive", lambda: mine)
                return found

            learner._losses = rounded

        several = ThreadLearners(config, 2, spaces, change=change)
        results = [flat(found) for found in several.update(batches)]
        assert results[0] == results[1] and several.calls[0] == several.calls[1]
        return results[0]["/agent_0/num_kl_stops"], results[0]["/__all_modules__/num_minibatch_steps"]

    assert updated(1.9e-3) == (0, 4 * BATCH // MINIBATCH)  # the mean is below the limit, learner 1 above
    assert updated(2.1e-3) == (4, 4)  # above it, learner 0 below: each epoch ends after its first minibatch
