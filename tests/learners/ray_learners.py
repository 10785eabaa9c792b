"""One learner and several of Ray's on the same rollouts: what `test_learner_group.py` and the slow tests share.

A learner group starts processes, which takes seconds. So most comparisons build their learners *inside* those of a
group that is up (`trained_inside`): they speak by the same process group, and are built as RLlib builds them.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
import ray
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from tests.support import largest_difference, make_learner, optimizer_states, parameters, tiny_config
from thrust_rllib import JensenShannon, JointEnvRunner, RedundancyPenalty
from thrust_rllib.episode_runner import JointEpisodeRunner

LIMIT_S = 100
"""How long learners may take to answer: if one of them waits for the others in vain, it waits for minutes."""
ROWS, MINIBATCH = 49, 24
"""Of a rollout and a joint minibatch, whatever the number of learners: the last minibatch has one row."""
SEVERAL_ONLY = {"num_collectives", "collective_bytes", "collective_seconds"}
MODELS = {
    "mlp": {"fcnet_hiddens": [16, 12]},
    "lstm": {"cell": "lstm", "cell_size": 8, "fcnet_hiddens": [12], "max_seq_len": 7},
    "gru": {"cell": "gru", "cell_size": 8, "max_seq_len": 7},
}


def team(learners=0, model="mlp", **options):
    """Three agents, one of them frozen, two couplings, two optimizers, normalised value targets.

    Args:
        learners: `num_learners`; batch and minibatch are the same for all together.
        model: a key of `MODELS`.
        **options: of `tiny_config`, in place of these.
    """
    many = max(learners, 1)
    given = {
        "env_config": {"agents": 3, "episode_length": 10},
        "num_envs": 1,
        "trained": ["agent_0", "agent_2"],
        "model": MODELS[model],
        "critic_lr": 2e-3,
        "lr": 1e-3,
        "iterate_all_minibatches": True,
        "cross_agent_losses": {"redundancy": RedundancyPenalty(), "divergence": JensenShannon("raise")},
        "cross_agent_coeffs": {"redundancy": 0.5, "divergence": 0.1},
        "minibatch_size": MINIBATCH // many,
        "train_batch_size_per_learner": 48 // many,
    }
    # Half a CPU: three learners and an algorithm with two fit into the tests' Ray.
    return tiny_config(**{**given, **options}).learners(num_learners=learners, num_cpus_per_learner=0.5)


def rollouts_of(config, count):
    """Rollouts of `ROWS` rows by either door, one list each, and the spaces."""
    config = config.copy(copy_frozen=False)
    config.validate()
    kind = JointEpisodeRunner if config.sampling == "episodes" else JointEnvRunner
    runner = kind(config=config, worker_index=0)
    rollouts = [runner.sample(num_timesteps=ROWS, explore=True) for _ in range(count)]
    spaces = runner.get_spaces()
    runner.stop()
    return rollouts, spaces


def group_of(config, spaces):
    """A learner group without an algorithm."""
    config.validate()
    return config.build_learner_group(spaces=spaces)


def of_all(group, function, **kwargs):
    """What `function(learner, **kwargs)` gives in each learner, in the order of the ranks; fails after `LIMIT_S`."""
    answers = list(group.foreach_learner(function, timeout_seconds=LIMIT_S, **kwargs).result_or_errors)
    assert len(answers) == max(len(group), 1), f"{len(answers)} learners have answered within {LIMIT_S} s"
    found = [answer.get() for answer in answers]
    for value in found:
        if isinstance(value, Exception):
            raise value
    return found


def snapshot(learner):
    """Everything of a learner that an update changes, as arrays."""
    joint = learner.get_state()["joint"]
    return {
        "parameters": parameters(learner),
        "optimizers": optimizer_states(learner),
        "generator": joint["generator"],
        "moments": {
            m: {name: float(value) for name, value in moments.items()}
            for m, moments in joint["value_normalizers"].items()
        },
    }


def train(learner, rollouts):
    """One update on each rollout; the results as plain numbers."""
    return [
        MetricsLogger.peek_results(
            learner.update(
                training_data=TrainingData(episodes=list(rollout)),
                **_options(learner.config, k),
            )
        )
        for k, rollout in enumerate(rollouts)
    ]


def train_group(group, rollouts):
    """As `train`, by the group."""
    found = []
    for k, rollout in enumerate(rollouts):
        (results,) = group.update_from_rollouts([rollout], **_options(group.config, k))
        found.append(MetricsLogger.peek_results(results))
    return found


def _options(config, k):
    """Of update number k, from 0."""
    return {
        "timesteps": {"num_env_steps_sampled_lifetime": ROWS * (k + 1)},
        "num_epochs": config.num_epochs,
        "minibatch_size": config.minibatch_size,
        "shuffle_batch_per_epoch": config.shuffle_batch_per_epoch,
    }


def trained_inside(group, config, spaces, rollouts, state=None):
    """[(before, after, results)] of each rank of learners of another configuration, built in the group's processes.

    Args:
        group: whose processes are taken.
        config: with as many learners as the group.
        spaces: of the runner.
        rollouts: as `rollouts_of`.
        state: of the learners before the first update, in place of their own.
    """
    assert config.num_learners == len(group)
    config.validate()
    spec = config.get_multi_rl_module_spec(spaces=spaces)
    reference = ray.put(rollouts)
    return of_all(group, _build_and_train, config=config, spec=spec, reference=reference, state=state)


def _build_and_train(_, config, spec, reference, state):
    learner = config.learner_class(config=config, module_spec=spec)
    learner.build()
    if state is not None:
        learner.set_state(state)
    before = snapshot(learner)
    results = train(learner, ray.get(reference))
    return before, snapshot(learner), results


def trained_alone(config, spaces, rollouts, state=None):
    """(before, after, results) of one learner in this process."""
    learner = make_learner(config.copy(copy_frozen=False), spaces)
    if state is not None:
        learner.set_state(state)
    before = snapshot(learner)
    results = train(learner, rollouts)
    return before, snapshot(learner), results


def check_alike(ranks, alone):
    """L learners gave what one gives, to the bit the same for each of them.

    Args:
        ranks: [(before, after, results)] of the learners.
        alone: the same of one learner.
    """
    for before, after, results in ranks[1:]:
        assert largest_difference(before, ranks[0][0]) == 0.0, "the learners did not begin alike"
        assert largest_difference(after, ranks[0][1]) == 0.0, "the learners went apart"
        check_metrics(results, ranks[0][2], rel=0.0)
    (before, after, results), (own_before, own_after, own_results) = ranks[0], alone
    assert largest_difference(before["parameters"], own_before["parameters"]) == 0.0
    assert largest_difference(after["parameters"], own_after["parameters"]) < 1e-5
    assert largest_difference(after["generator"], own_after["generator"]) == 0.0
    for module_id, moments in own_after["moments"].items():
        assert after["moments"][module_id] == pytest.approx(moments, rel=1e-5)
    assert largest_difference(own_before["parameters"], own_after["parameters"]) > 1e-3, "nothing was learned"
    check_metrics(results, own_results)


def check_metrics(several, one, rel=1e-3):
    """The same numbers of each update, but for seconds, and for what only several learners count."""
    assert len(several) == len(one) > 0
    for theirs, mine in zip(several, one, strict=True):
        theirs, mine = numbers(theirs), numbers(mine)
        assert theirs.keys() == mine.keys()
        for name, value in mine.items():
            assert theirs[name] == pytest.approx(value, rel=rel, abs=2e-5 if rel else 0.0, nan_ok=True), name


def numbers(results, path=()):
    """{path: number} of a result, without seconds and what only several learners have."""
    found = {}
    for key, value in results.items():
        if key in SEVERAL_ONLY or "throughput" in key or "timer" in key or key == "timers":
            continue
        if isinstance(value, dict):
            found |= numbers(value, (*path, key))
        elif isinstance(value, (int, float, np.number)):
            found[(*path, key)] = float(value)
    return found


def in_time(function, seconds=LIMIT_S):
    """(what `function` raises, seconds that it took); fails if it raises nothing, or too late."""
    started = time.monotonic()
    with pytest.raises(Exception) as raised:  # noqa: PT011 (the caller looks at it)
        function()
    took = time.monotonic() - started
    assert took < seconds, f"it took {took:.0f} s"
    return raised.value, took
