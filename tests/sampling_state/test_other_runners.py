"""States of runners that are not alike, states that fail, and runners that have none."""

from __future__ import annotations

import logging
import pickle

import numpy as np
import pytest

from tests.sampling_state.games import BrokenWalk, LiveWalk, SavedJointLives, SavedWalk, Unsaved
from tests.sampling_state.saving import DOORS, Case, begun, continued, differences, not_the_same, sample, saved
from tests.support import tiny_config
from thrust_rllib import JointEnvRunner
from thrust_rllib.sampling.env_restarts import EnvRestarts
from thrust_rllib.sampling.team_runner import COMPONENT_SAMPLING


def begins_anew(rollout):
    """Whether a rollout begins with the first step of an episode, in all environments."""
    if "episodes" in rollout:
        return all(state["fields"]["env_t_started"] == 0 for state in rollout["episodes"])
    return bool(rollout["batch"].episode_start[0].all())


ELSEWHERE = {
    "more environments": {"num_envs": 4},
    "other memories": {"lstm": True},
    "another environment": {"env": "debug/match_observation"},
    "one module for all": {"options": {"policies": "shared"}},
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("other", [*ELSEWHERE, "another door"])
def test_a_state_of_elsewhere_gives_its_generators_only(door, other):
    case = Case("bucket_brigade", door, num_envs=3)
    state = begun(case).get_sampling_state()
    changed = ELSEWHERE.get(other, {"door": DOORS[door == "arrays"]})
    there = Case(**{**vars(case), **changed})
    runner, same = there.runner(), there.runner()
    for each in (runner, same):
        each.set_sampling_state(pickle.loads(pickle.dumps(state)))
    assert runner._env_seeds.bit_generator.state == state["env_seeds"]
    taken = sample(runner, 2)
    assert begins_anew(taken["rollouts"][0]) and not not_the_same(taken, sample(same, 2))
    assert not_the_same(taken, sample(there.runner(), 2))
    assert runner.get_sampling_state()["envs"] is not None


@pytest.mark.parametrize("door", DOORS)
def test_the_window_goes_along_with_the_same_agents_and_modules(door):
    case = Case("bucket_brigade", door, num_envs=3)
    state = begun(case, rollouts=8).get_sampling_state()
    assert len(state["finished"]["returns"]) > 3
    for changed, kept in (
        ({"num_envs": 1}, True),
        ({"door": DOORS[door == "arrays"]}, True),
        ({"env": "climbing"}, False),
    ):
        runner = Case(**{**vars(case), **changed}).runner()
        runner.set_sampling_state(state)
        finished = runner.get_sampling_state()["finished"]
        assert (not differences(finished, state["finished"])) == kept and len(finished["returns"]) == len(
            finished["lengths"]
        )


@pytest.mark.parametrize("door", DOORS)
def test_runners_take_each_others_place(door):
    """The episodes' numbers of the audit stay apart: they are the new runner's."""
    case = Case("bucket_brigade", door, worker_index=1)
    first = begun(case)
    state = saved(first)
    second = Case("bucket_brigade", door, worker_index=2).runner()
    second.set_state(state)
    wanted, found = sample(first, 2), sample(second, 2)
    for left, right in zip(wanted["rollouts"], found["rollouts"], strict=True):
        for name, streams in left["batch"].modules.items():
            np.testing.assert_array_equal(streams.obs, right["batch"].modules[name].obs)
        if "episodes" not in right:
            origins = [r["batch"].modules["agent_0"].origin[..., 0] for r in (left, right)]
            np.testing.assert_array_equal(*(o - (i + 1 << 40) for i, o in enumerate(origins)))
        else:
            assert second._ongoing_episodes[0].runner_index == 2


@pytest.mark.parametrize("door", DOORS)
def test_what_an_environment_does_not_take_back_is_made_anew(door, caplog):
    case = Case(BrokenWalk, door)
    state = saved(begun(case))
    runner = case.runner()
    first_env = runner.env
    with caplog.at_level(logging.WARNING):
        runner.set_state(state)
    assert "'BrokenWalk' (runner 1) does not go on from its saved state and is made anew: OSError: the" in caplog.text
    assert runner.env is not first_env
    assert runner._env_seeds.bit_generator.state == state["sampling"]["env_seeds"]
    assert begins_anew(sample(runner)["rollouts"][0])


@pytest.mark.parametrize("door", DOORS)
def test_the_window_goes_along_where_environments_are_made_anew(door):
    case = Case(BrokenWalk, door)
    state = saved(begun(case, rollouts=8))
    assert len(state["sampling"]["finished"]["returns"])
    runner = case.runner()
    runner.set_state(state)
    assert not differences(runner.get_sampling_state()["finished"], state["sampling"]["finished"])
    runner.reseed(1)
    assert not len(runner.get_sampling_state()["finished"]["returns"])


@pytest.mark.parametrize("door", DOORS)
def test_a_state_that_cannot_be_stored_is_left_out(door, caplog):
    case = Case(LiveWalk, door)
    runner = begun(case)
    with caplog.at_level(logging.WARNING):
        state = saved(runner)
    assert "'LiveWalk' (runner 1) cannot be saved" in caplog.text and "pickle" in caplog.text
    assert state["sampling"]["envs"] is None is state["sampling"]["playing"]
    pickle.dumps(state)
    assert begins_anew(continued(case, state, 1)["rollouts"][0])


@pytest.mark.parametrize("door", DOORS)
def test_without_an_environments_state_nothing_is_said(door, caplog):
    with caplog.at_level(logging.WARNING):
        assert begun(Case(Unsaved, door)).get_sampling_state()["envs"] is None
    assert not caplog.text


@pytest.mark.parametrize("state", [{}, {"version": 0}, None, "state"])
def test_what_is_no_state_is_an_error(state):
    runner = Case("bucket_brigade", "arrays").runner()
    with pytest.raises(ValueError, match=r"set_sampling_state got .*; needed: version 1, as get_sampling_state"):
        runner.set_sampling_state(state)


@pytest.mark.parametrize("door", DOORS)
def test_only_who_asks_for_it_gets_the_state(door):
    runner = begun(Case("bucket_brigade", door))
    asked = runner.get_state(components=COMPONENT_SAMPLING)
    assert set(asked) == {"num_env_steps_sampled_lifetime", "sampling"}
    assert set(runner.get_state(components=["rl_module", "sampling"])) > {"rl_module", "sampling"}
    for components in (None, "rl_module", ["rl_module", "env_to_module_connector"]):
        assert "sampling" not in runner.get_state(components=components)
    assert "sampling" not in runner.get_state(not_components="rl_module")


def test_a_runner_without_environments_has_none():
    config = tiny_config(runners={"num_env_runners": 1})
    config.validate()
    runner = JointEnvRunner(
        config=config, worker_index=0, spaces=Case("debug/random_observations", "arrays").runner().spaces
    )
    assert runner.env is None and runner.get_sampling_state() is None
    runner.set_sampling_state(Case("bucket_brigade", "arrays").runner().get_sampling_state())
    runner.reseed(3)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("error", [OSError("the cable is out"), KeyboardInterrupt()])
def test_behind_an_error_comes_a_reset(door, error):
    case = Case(SavedWalk, door)
    runner = begun(case)
    runner.env_restarts = EnvRestarts(allowed=False)
    env = getattr(runner.env.envs[1], "env", runner.env.envs[1])
    step, count = env.step_joint, iter(range(100))

    def failing(actions):
        if next(count) == 3:
            raise error
        return step(actions)

    env.step_joint = failing
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else RuntimeError):
        sample(runner)
    state = saved(runner)
    assert state["sampling"]["envs"] is None
    wanted = sample(runner, 2)
    assert begins_anew(wanted["rollouts"][0]) and not not_the_same(wanted, continued(case, state, 2))


@pytest.mark.parametrize("door", DOORS)
def test_reseeded_runners_repeat_nothing(door):
    case = Case("bucket_brigade", door)

    def reseeded(*numbers, runner=None):
        runner = runner or case.runner()
        runner.reseed(*numbers)
        return sample(runner, 2)

    at_the_start = sample(case.runner(), 2)
    others = [reseeded(0), reseeded(1), reseeded(7), reseeded(0, 1), reseeded(1, 0)]
    for i, one in enumerate(others):
        assert begins_anew(one["rollouts"][0])
        assert all(not_the_same(one, other) for other in [at_the_start, *others[:i]])
    assert not not_the_same(reseeded(7), others[2])
    began = begun(case)
    assert differences(reseeded(7, runner=began)["rollouts"][1]["batch"].modules["agent_0"].actions,
                       at_the_start["rollouts"][1]["batch"].modules["agent_0"].actions)  # fmt: skip
    assert not not_the_same(reseeded(), at_the_start)


def test_reseeded_runners_differ_by_index_kind_and_seed():
    def reseeded(**changes):
        runner = Case("bucket_brigade", "arrays", **changes).runner()
        runner.reseed(4)
        return sample(runner)["rollouts"][0]["batch"].modules["agent_0"].obs

    first = reseeded()
    for changes in (
        {"worker_index": 2},
        {"options": {"in_evaluation": True}},
        {"options": {"seed": 4}},
        {"options": {"seed": None}},
    ):
        assert differences(first, reseeded(**changes)), changes
    assert differences(reseeded(options={"seed": None}), reseeded(options={"seed": None}))


def test_agents_that_come_and_go_are_still_checked():
    """Who has acted and not ended must act: the runner that goes on knows who that is."""
    case = Case(SavedJointLives, "arrays", num_envs=1)
    first = case.runner()
    sample(first, 1, steps=2)
    runner = case.runner()
    runner.set_sampling_state(first.get_sampling_state())
    runner.env.envs[0].plan.lives = {**runner.env.envs[0].plan.lives, "c": (0, 0, "truncated")}
    for episode in runner.env._episodes:
        episode.acting = [agent for agent in episode.acting if agent != "c"]
    with pytest.raises(ValueError, match="'c' did not act"):
        sample(runner, 1, steps=2)
