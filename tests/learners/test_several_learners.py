"""L learners give the parameters and the metrics of one learner, and are equal to the bit."""

from __future__ import annotations

import itertools
import math
import pickle

import numpy as np
import pytest
import torch

from tests.core.ragged import AGENTS, ragged_batch
from tests.learners.threads import ThreadLearners, ThreadRanks, everything, flat, for_learners
from tests.support import (
    box,
    declared_config,
    discrete,
    largest_difference,
    make_learner,
    make_runner,
    optimizer_states,
    parameters,
    tiny_config,
    update,
)  # fmt: skip
from thrust_rllib import CrossAgentLoss, FeatureSimilarity, JensenShannon, JointPPOLearner, MLPModule, RedundancyPenalty
from thrust_rllib.joint_batch import AlignmentError

BATCH, MINIBATCH, UPDATES = 96, 48, 10
COUPLED = dict(
    critic_lr=2e-3,
    cross_agent_losses={
        "redundancy": RedundancyPenalty(), "alike": FeatureSimilarity(), "apart": JensenShannon("raise"),
    },
    cross_agent_coeffs={"redundancy": 0.5, "alike": 0.2, "apart": [[0, 0.1], [500, 0.3]]},
    iterate_all_minibatches=True,
)  # fmt: skip


def config_of(**options):
    settings = {"lr": 1e-3, "train_batch_size_per_learner": BATCH, "minibatch_size": MINIBATCH, "num_envs": 4}
    return tiny_config(**{**settings, **options})


def rollouts(config, updates=UPDATES, steps=BATCH):
    """[batches of one runner] per update, from an untrained policy."""
    runner = make_runner(for_learners(config, 1))
    return runner.get_spaces(), [runner.sample(num_timesteps=steps) for _ in range(updates)]


class Pair:
    """One learner, and L learners that started with its state."""

    def __init__(self, config, size, spaces, **options):
        self.one = make_learner(for_learners(config, 0), spaces)
        self.several = ThreadLearners(config, size, spaces, **options)
        self.several.set_state(self.one.get_state())

    def update(self, batches, steps=0):
        """Both train on the same; their metrics are compared."""
        expected = flat(update(self.one, batches, steps=steps))
        for found in self.several.update(batches, steps=steps):
            found = flat(found)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                limit = 1e-3 if name.endswith("cosine") else 2e-5  # of a gradient that is 0 up to rounding
                assert found[name] == pytest.approx(value, rel=1e-4, abs=limit, nan_ok=True), name
        return expected

    def check(self, limit=1e-5):
        """Parameters near those of one learner, everything equal to the bit between the several."""
        first, *others = [everything(learner) for learner in self.several.learners]
        assert largest_difference(first["parameters"], parameters(self.one)) < limit
        for other in others:
            assert largest_difference(first, other) == 0.0
        calls = self.several.calls
        assert all(mine == calls[0] for mine in calls[1:]) and calls[0]
        return first


CASES = {
    "mlp": {},
    "coupled": COUPLED,
    "frozen": {**COUPLED, "trained": ["agent_0", "agent_2"]},
    "raw values": {**COUPLED, "value_normalization": False},
    "shared": {**COUPLED, "policies": "shared"},
    "groups": {**COUPLED, "policies": {"left": ["agent_0", "agent_2"], "right": ["agent_1"]}},
    "own settings": {
        **COUPLED, "overrides": {"agent_1": {"lr": 5e-3, "critic_lr": 1e-3, "gamma": 0.5, "grad_clip": 0.1}},
    },
    "advantages by minibatch": {**COUPLED, "standardize_advantages": "minibatch"},
    "advantages by team": {**COUPLED, "standardize_advantages": "team"},
    "raw advantages": {**COUPLED, "standardize_advantages": False, "gae_bootstrap": "zero"},
    "stops in an epoch": {**COUPLED, "target_kl": 1e-3, "num_epochs": 4, "lr": 5e-3},
    "stops in an update": {**COUPLED, "target_kl": 1e-3, "target_kl_scope": "update", "num_epochs": 4, "lr": 5e-3},
    "clip by value": {**COUPLED, "grad_clip_by": "value", "grad_clip": 0.01},
    "clip by norm": {**COUPLED, "grad_clip_by": "norm", "grad_clip": 0.05},
    "one draw": {**COUPLED, "iterate_all_minibatches": False},
    "whole batch": {**COUPLED, "minibatch_size": None},
    "unshuffled": {**COUPLED, "shuffle_batch_per_epoch": False},
    "lstm": {**COUPLED, "model": {"cell": "lstm", "cell_size": 12, "fcnet_hiddens": [16], "max_seq_len": 6}},
    "whole rollouts": {**COUPLED, "model": {"cell": "lstm", "cell_size": 12, "fcnet_hiddens": [16]}},
    "gru": {**COUPLED, "model": {"cell": "gru", "cell_size": 12, "fcnet_hiddens": [16], "max_seq_len": 8}},
}  # fmt: skip


THREE = ("coupled", "frozen", "lstm")


@pytest.mark.parametrize("name, size", [*((name, 2) for name in CASES), *((name, 3) for name in THREE)])
def test_ten_updates_are_those_of_one_learner(name, size):
    config = config_of(**CASES[name])
    spaces, data = rollouts(config)
    pair = Pair(config, size, spaces)
    start = parameters(pair.one)
    stops = 0.0
    for k, batches in enumerate(data):
        found = pair.update(batches, steps=BATCH * (k + 1))
        stops += sum(value for key, value in found.items() if key.endswith("num_kl_stops"))
    state = pair.check()
    trained = CASES[name].get("trained")
    for module_id, before in start.items():
        moved = largest_difference(before, state["parameters"][module_id])
        assert moved == 0.0 if trained and module_id not in trained else moved > 1e-3
    assert stops > 0 if "stops" in name else stops == 0


def test_agents_that_differ_in_everything():
    config = declared_config(
        [box(3), box(7), box(2), discrete(4)],
        [discrete(3), discrete(5), box(2), discrete(2)],
        train_batch_size_per_learner=BATCH, minibatch_size=MINIBATCH, lr=1e-3, iterate_all_minibatches=True,
        critic_lr=2e-3, cross_agent_losses={"redundancy": RedundancyPenalty()},
    )  # fmt: skip
    spaces, data = rollouts(config, updates=4)
    pair = Pair(config, 3, spaces)
    for batches in data:
        pair.update(batches)
    pair.check()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("standardize", ["rollout", "minibatch"])
def test_rows_in_which_agents_are_absent(standardize, size):
    config = declared_config(
        [box(3)] * 3, [discrete(3)] * 3, AGENTS, train_batch_size_per_learner=30, minibatch_size=6, lr=1e-3,
        standardize_advantages=standardize, **COUPLED,
    )  # fmt: skip
    pair = Pair(config, size, make_runner(for_learners(config, 1)).get_spaces())
    for k in range(4):
        pair.update([ragged_batch(seed=k)])
    state = pair.check()
    assert all(np.isfinite(x).all() for own in state["parameters"].values() for x in own.values())


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("rows", [1, 3, 47, 49, 50])
def test_learners_without_a_row_take_part(rows, size):
    config = config_of(**COUPLED, num_envs=1)
    spaces, data = rollouts(config, updates=3, steps=rows)
    pair = Pair(config, size, spaces)
    for batches in data:
        assert sum(map(len, batches)) == rows
        found = pair.update(batches)
        assert found["/__all_modules__/num_minibatch_steps"] == 2 * math.ceil(rows / MINIBATCH)
    pair.check()


@pytest.mark.parametrize("model", [None, {"cell": "lstm", "cell_size": 8, "fcnet_hiddens": [8], "max_seq_len": 4}])
def test_rollouts_of_different_lengths(model):
    config = config_of(**COUPLED, model=model)
    runners = [make_runner(for_learners(config, 1), worker_index=k) for k in range(3)]
    pair = Pair(config, 2, runners[0].get_spaces())
    for steps in (20, 36, 52):
        pair.update([batch for k, runner in enumerate(runners) for batch in runner.sample(num_timesteps=steps + 8 * k)])
    pair.check()


def test_an_optimizer_of_another_kind():
    class Momentum(JointPPOLearner):
        def configure_optimizers_for_module(self, module_id, config=None):
            params = list(self.get_parameters(self.module[module_id]))
            self.register_optimizer(
                module_id=module_id,
                optimizer_name="default_optimizer",
                optimizer=torch.optim.SGD(params, lr=0.1, momentum=0.9),
                params=params,
                lr_or_lr_schedule=0.1,
            )

    config = config_of(iterate_all_minibatches=True)
    spaces, data = rollouts(config, updates=4)
    one = make_learner(for_learners(config, 0, Momentum), spaces)
    several = ThreadLearners(config, 2, spaces, learner_class=Momentum)
    several.set_state(one.get_state())
    for batches in data:
        update(one, batches)
        several.update(batches)
    first, second = map(parameters, several.learners)
    assert largest_difference(first, second) == 0.0 and 0.0 < largest_difference(first, parameters(one)) < 1e-5


def test_without_a_seed_all_begin_with_what_the_first_one_drew():
    config = config_of(**COUPLED, seed=None)
    spaces, data = rollouts(config, updates=2)
    drawn = []

    class Draws(JointPPOLearner):
        def _take_in_modules(self):
            drawn.append(parameters(self))
            super()._take_in_modules()

    several = ThreadLearners(config, 3, spaces, learner_class=Draws)
    assert all(largest_difference(x, y) > 0.0 for x, y in itertools.combinations(drawn, 2))
    first, *others = map(everything, several.learners)
    assert any(largest_difference(first["parameters"], x) == 0.0 for x in drawn)
    assert all(largest_difference(first, other) == 0.0 for other in others)
    for batches in data:
        several.update(batches)
    first, *others = map(everything, several.learners)
    assert all(largest_difference(first, other) == 0.0 for other in others)


def test_a_gradient_that_is_not_summed_shows():
    class Mute(ThreadRanks):
        def _all_reduce(self, x):
            own = x.clone()
            super()._all_reduce(x)
            if len(self.calls) > self.silent_from:
                x.copy_(own * self.size)

        silent_from = 0

    config = config_of(**COUPLED, audit=False)
    spaces, data = rollouts(config, updates=1)
    pair = Pair(config, 2, spaces, ranks_class=Mute)
    update(pair.one, data[0])
    pair.several.update(data[0])
    first, second = map(parameters, pair.several.learners)
    assert largest_difference(first, second) > 1e-4 and largest_difference(first, parameters(pair.one)) > 1e-4


def test_learners_that_have_come_apart_are_told_by_the_audit():
    config = config_of(**COUPLED)
    spaces, (batches,) = rollouts(config, updates=1)
    several = ThreadLearners(config, 3, spaces)
    with torch.no_grad():
        next(iter(several.learners[1].module["agent_1"].parameters()))[0] += 1e-6
    with pytest.raises(AlignmentError, match=r"after an update learners \[1\] have other parameters than learner 0"):
        several.update(batches)
    assert len(several.errors) == 3


def test_the_audit_tells_numbers_that_have_changed_places():
    config = config_of(**COUPLED)
    spaces, (batches,) = rollouts(config, updates=1)
    several = ThreadLearners(config, 2, spaces)
    weights = several.learners[1].module["agent_1"].unwrapped().trunk[0].weight
    with torch.no_grad():
        weights.copy_(weights.flip(0))
    with pytest.raises(AlignmentError, match=r"learners \[1\] have other parameters than learner 0"):
        several.update(batches)


class Shuffled(MLPModule):
    """Another order of its parameters in every second one that is built."""

    built = 0

    def setup(self):
        super().setup()
        Shuffled.built += 1
        if Shuffled.built % 2:
            self._modules = dict(reversed(self._modules.items()))


def test_parameters_in_another_order_are_an_early_error(monkeypatch):
    config = config_of(policies="shared")
    spaces = make_runner(for_learners(config, 1)).get_spaces()
    monkeypatch.setattr("thrust_rllib.config.module_class_for", lambda model_config: Shuffled)
    with pytest.raises(ValueError, match="have other parameters than learner 0, or the same ones in another order"):
        ThreadLearners(config, 2, spaces)


def test_different_updates_are_an_error_not_a_wait():
    config = config_of()
    spaces, (first, second) = rollouts(config, updates=2)
    several = ThreadLearners(config, 2, spaces)
    with pytest.raises(ValueError, match="the learners were given different rollouts"):
        several.each(lambda learner: update(learner, first if learner.ranks.rank else [*first, *second]))
    several.update(first)


class Counts(MLPModule):
    """Has a buffer in which every forward pass of training leaves its number of rows."""

    def setup(self):
        super().setup()
        self.register_buffer("rows", torch.zeros(()))

    def _forward_train(self, batch, **kwargs):
        self.rows += len(batch["obs"])
        return super()._forward_train(batch, **kwargs)


def test_buffers_that_forward_passes_change_are_those_of_the_first(monkeypatch):
    monkeypatch.setattr("thrust_rllib.config.module_class_for", lambda model_config: Counts)
    config = config_of(iterate_all_minibatches=True)
    spaces, (batches,) = rollouts(config, updates=1, steps=BATCH - 4)
    several = ThreadLearners(config, 2, spaces)
    several.update(batches)
    rows = [float(learner.module["agent_0"].unwrapped().rows) for learner in several.learners]
    assert rows[0] == rows[1] > 0


class Routed(MLPModule):
    """Values of some rows get a term of a layer that other rows do not reach."""

    def setup(self):
        super().setup()
        self.extra = torch.nn.Linear(self.observation_space.shape[0], 1)

    def compute_values(self, batch, embeddings=None):
        values, reached = super().compute_values(batch, embeddings=embeddings), batch["obs"][:, 0] > 0.8
        if not reached.any():
            return values
        return values.index_add(0, reached.nonzero()[:, 0], self.extra(batch["obs"][reached])[:, 0])


@pytest.mark.parametrize("size", [2, 3])
def test_a_layer_that_the_rows_of_some_learners_do_not_reach(size, monkeypatch):
    monkeypatch.setattr("thrust_rllib.config.module_class_for", lambda model_config: Routed)
    config = config_of(**{**COUPLED, "minibatch_size": 6})
    spaces, (batches,) = rollouts(config, updates=1)
    pair = Pair(config, size, spaces)
    pair.update(batches)
    pair.check()
    states = [optimizer_states(learner) for learner in (pair.one, *pair.several.learners)]
    assert all(largest_difference(states[0], state) < 1e-5 for state in states[1:])  # the numbers of steps among them
    assert len({float(value) for value in states[0]["agent_0_critic_optimizer"] if value.ndim == 0}) == 2


class Transposed(MLPModule):
    """Weights that are views: their memory is not in the order of their axes."""

    def setup(self):
        super().setup()
        for layer in self.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.weight = torch.nn.Parameter(layer.weight.detach().t().contiguous().t())


def test_parameters_whose_memory_is_laid_out_otherwise(monkeypatch):
    monkeypatch.setattr("thrust_rllib.config.module_class_for", lambda model_config: Transposed)
    config = config_of(**COUPLED)
    spaces, updates = rollouts(config, updates=3)
    pair = Pair(config, 2, spaces)
    for batches in updates:
        pair.update(batches)
    pair.check()
    state = pair.one.get_state()
    resumed = make_learner(for_learners(config, 0), spaces)
    resumed.set_state(pickle.loads(pickle.dumps(state)))
    for learner in (pair.one, resumed):
        update(learner, updates[0])
    assert largest_difference(parameters(pair.one), parameters(resumed)) == 0.0


class TowardsFrozen(CrossAgentLoss):
    """Tells who is frozen by whether a gradient is asked for."""

    needs_features = False

    def __call__(self, features, logits, actions, present):
        fixed, moving = ([x for x in logits.values() if x.requires_grad == asked] for asked in (False, True))
        assert len(fixed) == 1 and len(moving) == 2
        return sum((a - b).square().mean() for a in fixed for b in moving)


@pytest.mark.parametrize("size", [2, 3])
def test_what_frozen_agents_give_is_detached(size):
    config = config_of(cross_agent_losses={"pull": TowardsFrozen()}, trained=["agent_0", "agent_2"])
    spaces, (batches,) = rollouts(config, updates=1)
    pair = Pair(config, size, spaces)
    pair.update(batches)
    pair.check()


class Noisy(MLPModule):
    def setup(self):
        super().setup()
        self.drop = torch.nn.Dropout(0.1)


def test_layers_whose_outputs_depend_on_the_learner_are_told_once(monkeypatch, caplog):
    monkeypatch.setattr("thrust_rllib.config.module_class_for", lambda model_config: Noisy)
    config = config_of(policies="shared")
    spaces, _ = rollouts(config, updates=0)
    with caplog.at_level("WARNING", logger="thrust_rllib"):
        make_learner(for_learners(config, 0), spaces)
        assert not caplog.records
        ThreadLearners(config, 2, spaces)
    (record,) = caplog.records
    assert "has Dropout" in record.getMessage()


def test_an_added_module_starts_alike_and_trains():
    from ray.rllib.core.rl_module.rl_module import RLModuleSpec

    config = config_of(**COUPLED)
    spaces, data = rollouts(config, updates=2)
    several = ThreadLearners(config, 2, spaces)
    several.update(data[0])
    old = several.learners[0].module["agent_0"].unwrapped()
    spec = RLModuleSpec(
        module_class=MLPModule,
        observation_space=old.observation_space,
        action_space=old.action_space,
        model_config=dict(old.model_config),
    )
    several.each(lambda learner: learner.add_module(module_id="new", module_spec=spec))
    first, second = map(everything, several.learners)
    assert "new" in first["parameters"] and largest_difference(first, second) == 0.0
    several.update(data[1])  # a module without a row
    several.each(lambda learner: learner.remove_module("new"))
    several.update(data[1])
    first, second = map(everything, several.learners)
    assert "new" not in first["parameters"] and largest_difference(first, second) == 0.0


def test_one_learner_says_nothing():
    config = config_of(**COUPLED)
    spaces, (batches,) = rollouts(config, updates=1)
    learner = make_learner(for_learners(config, 0), spaces)
    result = update(learner, batches)
    assert learner.ranks.size == 1 and learner.ranks.traffic.calls == 0
    assert "num_collectives" not in result["__all_modules__"]


def test_messages_are_counted():
    config = config_of(iterate_all_minibatches=True)
    spaces, (batches,) = rollouts(config, updates=1)
    several = ThreadLearners(config, 2, spaces)
    before = len(several.calls[0])
    for result, calls in zip(several.update(batches), several.calls, strict=True):
        shared, calls = result["__all_modules__"], calls[before:]
        assert shared["num_collectives"] == len(calls)
        # The same update? The same rollouts? Values; outputs and gradients of each minibatch; the audit's parameters.
        assert [kind for kind, _ in calls] == ["gather", "gather", "sum", *["gather", "sum"] * 4, "gather"]
        numbers = sum(n for _, n in calls)
        assert 4 * numbers <= shared["collective_bytes"] <= 8 * numbers and shared["collective_seconds"] > 0.0
