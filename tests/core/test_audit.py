"""The audit: joint rows that hold one step of one episode pass, every other kind of row is an error."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.general.runs import Lives
from tests.support import hand_batch, hand_streams, make_learner, make_runner, parameters, tiny_config, update
from thrust_rllib import env_runner
from thrust_rllib.audit import AlignmentError, Audit, check_alignment
from thrust_rllib.config import JointPPOConfig
from thrust_rllib.episode_runner import JointEpisodeRunner
from thrust_rllib.joint_rows import joint_rows
from thrust_rllib.minibatches import Units, joint_epochs
from thrust_rllib.sampling.rollout import RolloutRecorder

STEPS, ENVS = 6, 2


def batch_of(present=None, modules=("left", "right")):
    """Two agents with a module of their own, two environments; env e is in episode e."""
    streams = {}
    for k, module_id in enumerate(modules):
        obs = np.random.default_rng(k).normal(size=(STEPS, 1, ENVS, 3))
        flags = {} if present is None else {"present": present[:, k : k + 1]}
        streams[module_id] = hand_streams([f"a{k}"], obs, bootstrap_obs=np.zeros((1, ENVS, 3)), **flags)
    last = (STEPS - 1) * ENVS
    return hand_batch(streams, bootstrap_rows=[last, last + 1])


def rows_of(batch):
    modules = list(batch.modules)
    return joint_rows(
        [batch],
        values_of=lambda _, obs, sequences: obs.sum(-1),
        memories={},
        normalizers={},
        gamma=dict.fromkeys(modules, 0.9),
        lambda_=dict.fromkeys(modules, 0.9),
        bootstrap=True,
        standardize_rollout=False,
        device="cpu",
    )


def with_origin(rows, module_id, origin):
    """The rows with another origin of one module."""
    modules = {**rows.modules, module_id: replace(rows.modules[module_id], origin=origin)}
    return replace(rows, modules=modules)


def minibatches(rows, epochs=2, size=5):
    epochs_of_minibatches = joint_epochs(
        Units.single_rows(len(rows)),
        minibatch_size=size,
        num_epochs=epochs,
        iterate_all_minibatches=True,
        max_minibatches_per_epoch=None,
        shuffle=True,
        generator=torch.Generator().manual_seed(0),
    )
    return itertools.chain.from_iterable(epochs_of_minibatches)


def audit_all(rows, epochs=2):
    audit = Audit(rows, epochs)
    count = 0
    for indices in minibatches(rows, epochs):
        audit.check(rows.select(indices), indices)
        count += len(indices)
    return count


def test_aligned_rows_pass_and_each_is_read_once_an_epoch():
    rows = rows_of(batch_of())
    assert audit_all(rows) == 2 * STEPS * ENVS
    check_alignment(rows)


def permuted(origin):
    return origin[:, torch.tensor([1, 0, *range(2, STEPS * ENVS)])]


def shifted(origin):
    return torch.stack([origin[..., 0], origin[..., 1] + 1], dim=-1)


def other_episode(origin):
    """Of the same steps of the other environment's episode."""
    return torch.stack([1 - origin[..., 0], origin[..., 1]], dim=-1)


def one_row(origin):
    origin = origin.clone()
    origin[0, -1, 1] += 1
    return origin


@pytest.mark.parametrize("module_id", ["left", "right"])
@pytest.mark.parametrize("change", [permuted, shifted, other_episode, one_row])
def test_rows_that_join_different_steps_are_found(change, module_id):
    rows = rows_of(batch_of())
    wrong = with_origin(rows, module_id, change(rows.modules[module_id].origin))
    with pytest.raises(AlignmentError, match=r"row \d+ of a joint minibatch of 12 joins different steps"):
        check_alignment(wrong)
    with pytest.raises(AlignmentError, match=r"row \d+ of a joint minibatch of \d+ joins different steps"):
        audit_all(wrong)


def test_the_message_says_who_is_where():
    rows = rows_of(batch_of())
    origin = rows.modules["right"].origin.clone()
    origin[0, 7] = torch.tensor([1, 9])
    with pytest.raises(AlignmentError) as caught:
        check_alignment(with_origin(rows, "right", origin))
    assert str(caught.value) == (
        "row 7 of a joint minibatch of 12 joins different steps, as (episode, step) by agent: "
        "{'a0': (1, 3), 'a1': (1, 9)}"
    )


def test_numbers_of_episodes_may_be_as_large_as_the_doors_make_them():
    rows = rows_of(batch_of())
    large = {m: module.origin + torch.tensor([2**56 - 3, 0]) for m, module in rows.modules.items()}
    for m, origin in large.items():
        rows = with_origin(rows, m, origin)
    check_alignment(rows)
    with pytest.raises(AlignmentError):  # one off, which a float would not see
        check_alignment(with_origin(rows, "left", large["left"] + torch.tensor([1, 0])))


def test_agents_of_one_module_are_compared_with_each_other():
    obs = np.zeros((STEPS, 3, ENVS, 3))
    batch = hand_batch({"shared": hand_streams(["a0", "a1", "a2"], obs)}, [])
    rows = rows_of(batch)
    check_alignment(rows)
    origin = rows.modules["shared"].origin.clone()
    origin[2, 4, 1] -= 1
    with pytest.raises(AlignmentError, match=r"row 4 .*'a1': \(0, 2\), 'a2': \(0, 1\)"):
        check_alignment(with_origin(rows, "shared", origin))


def test_absent_agents_are_not_compared():
    present = np.ones((STEPS, 2, ENVS), bool)
    present[:3, 1] = False  # a1 comes late
    present[4:, 0] = False  # a0 dies early
    present[5, :, 1] = False  # nobody
    rows = rows_of(batch_of(present))
    right = rows.modules["right"].origin.clone()
    right[0, : 3 * ENVS] = -99
    left = rows.modules["left"].origin.clone()
    left[0, 4 * ENVS :] = 10**9
    wild = with_origin(with_origin(rows, "right", right), "left", left)
    assert audit_all(wild) == 2 * STEPS * ENVS
    right[0, 3 * ENVS] = -99  # a row in which both act
    with pytest.raises(AlignmentError, match=r"row 6 .*'a0': \(0, 3\), 'a1': \(-99, -99\)"):
        check_alignment(with_origin(rows, "right", right))


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_row_read_too_often_is_found(epochs):
    rows = rows_of(batch_of())
    audit = Audit(rows, epochs)
    everything = torch.arange(len(rows))
    for _ in range(epochs):
        audit.check(rows, everything)
    again = torch.tensor([8])
    with pytest.raises(AlignmentError, match=rf"joint row 8 is read {epochs + 1} times in {epochs} epochs"):
        audit.check(rows.select(again), again)


def test_a_row_twice_in_one_minibatch_is_found():
    rows = rows_of(batch_of())
    twice = torch.tensor([3, 1, 3])
    with pytest.raises(AlignmentError, match="joint row 3 is read 2 times in 1 epochs"):
        Audit(rows, 1).check(rows.select(twice), twice)


def test_rows_without_an_origin_are_a_clear_error():
    rows = rows_of(batch_of())
    with pytest.raises(ValueError, match=r"audit=True, but the rows of module 'right' do not say.*origin.*audit=False"):
        Audit(with_origin(rows, "right", None), 1)


# --- both doors -------------------------------------------------------------------------------------------------------


def aligned_config(door, audit=True, agents=3, **options):
    """debug/alignment, whose observation is (episode, step, agent)."""
    config = tiny_config(
        "debug/alignment", {"agents": agents, "episode_length": 7}, runners={"sampling": door}, **options
    )
    if not audit:
        config.training(audit=False)
    return config


def sampler(config):
    """(runner, what makes JointBatches of its samples)."""
    config.validate()
    if config.samples_episodes:
        runner = JointEpisodeRunner(config=config, worker_index=1)
        learner = make_learner(config, runner.get_spaces())
        return runner, learner._batches
    return make_runner(config, worker_index=1), list


@pytest.mark.parametrize("door", ["arrays", "episodes"])
def test_origin_is_what_the_observations_say(door):
    """Episode, step and agent, through fragments that cut episodes anywhere."""
    runner, batches_of = sampler(aligned_config(door))
    seen = {}
    for length in (10, 6, 22):
        for batch in batches_of(runner.sample(num_timesteps=length, explore=True)):
            for i, agent in enumerate(batch.agents):
                stream, module_id = batch.stream(agent), batch.stream(agent).module_id
                origin = batch.modules[module_id].origin[:, batch.modules[module_id].agents.index(agent)]
                assert stream.present.all() and (stream.obs[..., 2] == i).all()
                np.testing.assert_array_equal(origin[..., 1], stream.obs[..., 1])
                for t, e in np.ndindex(origin.shape[:2]):
                    seen.setdefault((e, int(stream.obs[t, e, 0])), set()).add(int(origin[t, e, 0]))
    # One number per episode of an environment, and no number twice.
    numbers = [number for said in seen.values() for number in said]
    assert len(seen) >= 6 and len(numbers) == len(set(numbers)) == len(seen)


def test_origin_says_which_runner():
    """Batches of different runners meet in one update."""
    numbers = []
    for index in (1, 2):
        config = aligned_config("arrays")
        (batch,) = make_runner(config, worker_index=index).sample(num_timesteps=64)
        numbers.append({int(n) for n in next(iter(batch.modules.values())).origin[..., 0].ravel()})
    assert not numbers[0] & numbers[1]


@pytest.mark.parametrize("door", ["arrays", "episodes"])
def test_without_audit_the_batches_carry_nothing_more(door):
    config = aligned_config(door, audit=False)
    runner, batches_of = sampler(config)
    batches = batches_of(runner.sample(num_timesteps=64, explore=True))
    assert all(streams.origin is None for batch in batches for streams in batch.modules.values())
    learner = make_learner(config, runner.get_spaces())
    rows = learner._joint_rows(batches)
    assert all(module.origin is None for module in rows.modules.values())
    update(learner, batches)


def test_audit_is_off_unless_asked_for(monkeypatch):
    assert JointPPOConfig().audit is True  # the tests' environment variable
    for value in ("", "0"):
        monkeypatch.setenv("THRUST_RLLIB_AUDIT", value)
        assert JointPPOConfig().audit is False
    monkeypatch.delenv("THRUST_RLLIB_AUDIT")
    assert JointPPOConfig().audit is False
    assert JointPPOConfig().training(audit=True).audit is True


@pytest.mark.parametrize("door", ["arrays", "episodes"])
def test_an_update_stops_before_any_weight_moves(door):
    config = aligned_config(door)
    runner, batches_of = sampler(config)
    learner = make_learner(config, runner.get_spaces())
    batches = batches_of(runner.sample(num_timesteps=64, explore=True))
    wrong = batches[0].modules["agent_1"]
    wrong.origin = np.roll(wrong.origin, 1, axis=0)
    before = parameters(learner)
    with pytest.raises(AlignmentError, match=r"joins different steps.*'agent_0'.*'agent_1'"):
        update(learner, batches)
    after = parameters(learner)
    for module_id in before:
        for name in before[module_id]:
            np.testing.assert_array_equal(before[module_id][name], after[module_id][name])
    # And the same rows in order are trained on.
    wrong.origin = np.roll(wrong.origin, -1, axis=0)
    update(learner, batches)
    moved = parameters(learner)
    assert any((before[m][name] != moved[m][name]).any() for m in before for name in before[m])


def test_an_update_refuses_batches_without_origin():
    config = aligned_config("arrays")
    learner = make_learner(config)
    batches = make_runner(config).sample(num_timesteps=64)
    batches[0].modules["agent_2"].origin = None
    before = parameters(learner)
    with pytest.raises(ValueError, match=r"audit=True, but the rows of module 'agent_2'"):
        update(learner, batches)
    assert all((before[m][n] == p).all() for m, named in parameters(learner).items() for n, p in named.items())


# --- mistakes of the doors --------------------------------------------------------------------------------------------


def early(steps):
    """(learner, episodes): agent "early" acts in steps 0 and 1, and `steps` is when the episodes say that it did."""
    config = tiny_config(Lives, runners={"sampling": "episodes"})
    runner, _ = sampler(config)
    episodes = runner.sample(num_timesteps=24)
    for episode in episodes:
        assert episode.step_times["early"] == [0, 1]
        episode.step_times["early"] = steps
    return make_learner(config, runner.get_spaces()), episodes


def test_episodes_that_say_when_each_agent_acted_pass():
    learner, episodes = early([0, 1])
    assert update(learner, episodes)["early"]["num_module_steps_trained"] > 0


def test_steps_that_an_episode_shifts_are_found():
    """The action itself has said when it was taken."""
    learner, episodes = early([1, 2])
    with pytest.raises(AlignmentError, match=r"joins different steps.*'early': \(\d+, [01]\)"):
        update(learner, episodes)


def test_two_steps_of_an_agent_in_one_row_are_found():
    learner, episodes = early([1, 1])
    with pytest.raises(AlignmentError, match=r"agents \['early'\]: two steps of one agent stand in the same joint row"):
        update(learner, episodes)


def test_observations_that_the_recorder_stores_a_step_late_are_found(monkeypatch):
    class Late(RolloutRecorder):
        def record_acted(self, t, *seen):
            super().record_acted((t + 1) % self.num_steps, *seen)

    runner = make_runner(aligned_config("arrays"))
    runner.sample(num_timesteps=20)
    monkeypatch.setattr(env_runner, "RolloutRecorder", Late)
    with pytest.raises(
        AlignmentError, match=r"agents \['agent_0', .*: observations and ends of a rollout do not match"
    ):
        runner.sample(num_timesteps=20)
