"""Restoring into a living algorithm, of an earlier or a later time: learners and all runners go along."""

import time

import numpy as np
import pytest
import ray

from tests.checkpoints.outcomes import assert_alike, outcome, state_of
from tests.support import Declared, box, discrete, largest_difference, parameters, tiny_config
from thrust_rllib import JointPPO, RedundancyPenalty

COUPLED = {"cross_agent_losses": {"redundancy": RedundancyPenalty()}, "coupling_gradient_interval": 2}


def runner_weights(group):
    """Of each runner {module: {name: array}}."""
    return group.foreach_env_runner(lambda runner: runner.get_state(components="rl_module")["rl_module"])


def assert_runners_equal_learner(algo):
    state = algo.learner_group.get_state(components="learner/rl_module", inference_only=True)["learner"]
    for group in (algo.env_runner_group, algo.eval_env_runner_group):
        for weights in runner_weights(group) if group is not None else ():
            assert set(weights) == set(state["rl_module"])
            for module_id, own in weights.items():
                for name, value in own.items():
                    np.testing.assert_array_equal(value, state["rl_module"][module_id][name])


def moments(algo):
    """Of each runner {module: how many observations it has seen}."""
    return algo.env_runner_group.foreach_env_runner(
        lambda runner: {m: float(x.count) for m, x in runner.normalizer.moments.items()}
    )


def config(env="bucket_brigade", **options):
    config = tiny_config(env, critic_lr=1e-2, **COUPLED, **options)
    return config.evaluation(evaluation_interval=2, evaluation_duration=2)


@pytest.mark.parametrize("way", ["folder", "state"])
def test_back_and_forth_in_one_process(build, tmp_path, way):
    algo = build(config(runners={"normalize_observations": True}))

    def save(name):
        return algo.save_to_path(tmp_path / name) if way == "folder" else algo.get_state()

    restore = algo.restore_from_path if way == "folder" else algo.set_state
    saved, states, outcomes = [save("0")], [state_of(algo)], []
    for k in range(4):
        outcomes.append(outcome(algo.train()))
        saved.append(save(str(k + 1)))
        states.append(state_of(algo))
    for k in (2, 0, 3, 1):
        restore(saved[k])
        assert algo.iteration == k
        assert_runners_equal_learner(algo)
        assert_alike(state_of(algo), states[k])
        assert_alike(outcome(algo.train()), outcomes[k])
        assert_alike(state_of(algo), states[k + 1])


@pytest.mark.timeout(180)
@pytest.mark.parametrize("local", [pytest.param(True, marks=pytest.mark.slow_checkpoints), False])
def test_back_and_forth_with_remote_runners(build, tmp_path, local):
    runners = {"num_env_runners": 2, "normalize_observations": True, "create_local_env_runner": local}
    algo = build(config(runners=runners).evaluation(evaluation_num_env_runners=1))
    saved, states, outcomes = [], [], []
    for k in range(3):
        saved.append(algo.save_to_path(tmp_path / str(k)))
        states.append(algo.get_state())
        outcomes.append((moments(algo), outcome(algo.train())))
    for k in (0, 2, 1):
        for restore, what in ((algo.restore_from_path, saved[k]), (algo.set_state, states[k])):
            restore(what)
            assert_runners_equal_learner(algo)
            assert moments(algo) == outcomes[k][0]
            assert_alike(outcome(algo.train()), outcomes[k][1])


@pytest.mark.timeout(180)
@pytest.mark.slow_checkpoints
def test_another_number_of_runners_and_learners(build, tmp_path):
    def built(runners, learners, local=True):
        options = {"num_env_runners": runners, "normalize_observations": True, "create_local_env_runner": local}
        each = config(runners=options).training(minibatch_size=16 // max(learners, 1))
        return build(each.learners(num_learners=learners).evaluation(evaluation_interval=None))

    one = built(0, 0)
    one.train()
    path = one.save_to_path(tmp_path / "one")
    weights, seen = parameters(one.learner_group._learner), moments(one)[0]
    for sizes in ((2, 1), (1, 0)):
        other = built(*sizes, local=sizes[1] == 0)
        other.train()
        other.restore_from_path(path)
        assert_runners_equal_learner(other)
        remote = [counts for counts in moments(other) if counts]
        assert remote == [seen] * len(remote) and remote
        found = other.learner_group.get_state(components="learner/rl_module")["learner"]["rl_module"]
        assert all(np.array_equal(found[m][name], value) for m, own in weights.items() for name, value in own.items())
        assert other.train()["training_iteration"] == 2
        back = other.save_to_path(tmp_path / "other")
        other.stop()
    one.restore_from_path(back)
    assert_runners_equal_learner(one)
    assert one.train()["training_iteration"] == 3


@pytest.mark.timeout(120)
@pytest.mark.slow_checkpoints
def test_runners_without_a_state_sample_other_numbers_than_at_the_start(build, tmp_path):
    options = {"normalize_observations": False}
    env_config = {"observation_spaces": [box()] * 2, "action_spaces": [discrete()] * 2}
    algo = build(tiny_config(Declared, env_config, runners=options))
    path = algo.save_to_path(tmp_path / "saved")
    first = first_observations(algo)
    wide = build(tiny_config(Declared, env_config, runners={"num_env_runners": 2, **options}))
    at_start = first_observations(wide)
    wide.restore_from_path(path)
    restored = first_observations(wide)
    streams = [*first, *at_start, *restored]
    assert len(streams) == 5 and len({stream.tobytes() for stream in streams}) == 5
    wide.restore_from_path(path)
    assert [x.tobytes() for x in first_observations(wide)] == [x.tobytes() for x in restored]


def first_observations(algo):
    """Of each runner that samples."""
    remote = algo.env_runner_group.num_remote_workers() > 0
    return algo.env_runner_group.foreach_env_runner(
        lambda runner: runner.sample(num_timesteps=4)[0].modules["a0"].obs, local_env_runner=not remote
    )


def test_a_runner_that_does_not_answer_is_left_out(build, tmp_path, caplog, monkeypatch):
    algo = build(tiny_config())

    def fails():
        raise RuntimeError("the simulator is away")

    monkeypatch.setattr(algo.env_runner, "get_sampling_state", fails)
    with caplog.at_level("WARNING", logger="thrust_rllib"):
        path = algo.save_to_path(tmp_path / "saved")
    assert "runner 0: RuntimeError: the simulator is away" in caplog.text
    algo.restore_from_path(path)
    algo.train()


@pytest.mark.timeout(180)
@pytest.mark.slow_checkpoints
def test_a_runner_that_was_started_again_is_left_out_until_it_samples(build, tmp_path, caplog):
    algo = build(config(runners={"num_env_runners": 2}).evaluation(evaluation_interval=None))
    algo.train()
    manager = algo.env_runner_group._worker_manager
    ray.kill(manager.actors()[1], no_restart=False)
    with caplog.at_level("WARNING", logger="thrust_rllib"):
        while True:
            states = algo.get_runner_states()["training"]
            if "runner 1: it was started again" in caplog.text:
                break
            time.sleep(0.5)
            manager.probe_unhealthy_actors(mark_healthy=True)
    assert set(states) == {2}
    algo.train()
    state = algo.get_state()
    assert set(state["runners"]["training"]) == {1, 2}
    needed = outcome(algo.train())
    algo.set_state(state)
    assert_alike(outcome(algo.train()), needed)


def test_what_ended_the_training_is_forgotten(build, tmp_path):
    algo = build(tiny_config("climbing", min_entropy=100.0, min_entropy_updates=2))
    state = algo.get_state()
    assert [algo.train()["done"] for _ in range(2)] == [False, True]
    with pytest.raises(RuntimeError, match="entropy guard"):
        algo.train()
    algo.set_state(state)
    assert [algo.train()["done"] for _ in range(2)] == [False, True]


def test_one_module_alone(build, tmp_path):
    algo = build(tiny_config())
    path = algo.save_to_path(tmp_path / "saved")
    before = parameters(algo.learner_group._learner)
    algo.train()
    after = parameters(algo.learner_group._learner)
    algo.restore_from_path(
        f"{path}/learner_group/learner/rl_module/agent_1", component="learner_group/learner/rl_module/agent_1"
    )
    now = parameters(algo.learner_group._learner)
    assert largest_difference(now, {**after, "agent_1": before["agent_1"]}) == 0.0
    assert largest_difference(after["agent_1"], before["agent_1"]) > 0.0
    assert algo.iteration == 1
    assert_runners_equal_learner(algo)


def test_optimizers_of_which_the_other_configuration_has_fewer(build, tmp_path):
    two, one = (build(tiny_config("climbing", critic_lr=lr)) for lr in (1e-2, None))
    two.train()
    path = two.save_to_path(tmp_path / "two")
    one.train()
    one.restore_from_path(path)
    learner = one.learner_group._learner
    assert all(len(names) == 1 for names in learner._module_optimizers.values())
    one.train()
    two.restore_from_path(one.save_to_path(tmp_path / "one"))
    two.train()


def test_a_team_that_has_grown(build, tmp_path):
    algo = build(config("climbing"))
    algo.train()
    algo.add_module("new", new_agent_to_module_mapping_fn=lambda agent, *_: "new" if agent == "agent_0" else "agent_1")
    algo.train()
    path = algo.save_to_path(tmp_path / "grown")
    state, then = state_of(algo), outcome(algo.train())
    restored = JointPPO.from_checkpoint(path)
    try:
        assert_alike(state_of(restored), state)
        assert_runners_equal_learner(restored)
        assert_alike(outcome(restored.train()), then)
    finally:
        restored.stop()
