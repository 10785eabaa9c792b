"""A runner that is given another one's state samples what that one would have sampled, to the bit."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.connectors.env_to_module.frame_stacking import FrameStackingEnvToModule
from ray.rllib.connectors.learner.frame_stacking import FrameStackingLearner

from tests.general.counting import Counting, general_config
from tests.sampling_state.games import (
    CarelessWalk,
    InTurn,
    SavedJointLives,
    SavedMultiLives,
    SavedTurns,
    SavedWalk,
    SavedZooLives,
    Unsaved,
    Walk,
)
from tests.sampling_state.saving import (
    DOORS,
    STEPS,
    Case,
    agents_of,
    begun,
    continued,
    differences,
    flat,
    not_the_same,
    random_weights,
    sample,
    saved,
)
from tests.support import runner_metrics
from thrust_rllib import MLPModule
from thrust_rllib.envs import list_envs

COMES_AND_GOES = (SavedJointLives, SavedZooLives, SavedMultiLives, SavedTurns, InTurn, SavedWalk, CarelessWalk)


class Own(MLPModule):
    """A module that is not stacked, and acts by its own forward pass."""

    def _forward(self, batch, **kwargs):
        return super()._forward(batch, **kwargs)


def careful(case):
    """Keeps the environment from failing on purpose, and lets its episodes end within the rollouts."""
    case.env_config = {"debug/faulty": {"fault": "none"}, "coverage": {"horizon": 20}}.get(case.env, case.env_config)
    return case


CASES = [
    *(
        careful(Case(env, door, lstm, normalize, num_envs))
        for env in list_envs()
        for door in DOORS
        for lstm, normalize, num_envs in ((False, False, 1), (True, True, 3))
    ),
    *(
        Case(env, door, lstm, normalize, num_envs)
        for env in ("bucket_brigade", SavedJointLives, SavedTurns)
        for door in DOORS
        for lstm in (False, True)
        for normalize in (False, True)
        for num_envs in (1, 3)
        if not (env is SavedTurns and door == "arrays")
    ),
    *(Case(env, "episodes", lstm=True, normalize=True, num_envs=3) for env in COMES_AND_GOES),
    *(
        Case(env, "arrays", lstm=True, normalize=True)
        for env in (SavedZooLives, SavedMultiLives, SavedWalk, CarelessWalk)
    ),
    *(Case("debug/mixed_spaces", door, options={"module_class": Own}) for door in DOORS),
    *(Case("two_step_game", door, options={"in_evaluation": True}) for door in DOORS),
]
CASES = list({str(case) + str(case.options): case for case in CASES}.values())
# Every environment and door by default, with one kind of modules each; all kinds with the others.
QUICK = [case for i, case in enumerate(CASES) if (i + i // 2 + i // 4) % 2 == 0 or case.options]
PARAMETERS = [
    pytest.param(case, id=str(case), marks=() if case in QUICK else pytest.mark.slow_checkpoints) for case in CASES
]


@pytest.mark.parametrize("case", PARAMETERS)
def test_a_new_runner_goes_on_to_the_bit(case):
    first = begun(case)
    state = saved(first)
    before = pickle.dumps(state["sampling"])
    wanted = sample(first, 3)
    found = continued(case, pickle.loads(before) and {**state, "sampling": pickle.loads(before)})
    assert not not_the_same(wanted, found)
    assert len(wanted["rollouts"]) == 3 and any("episode_return_mean" in name for name in wanted["metrics"])
    assert state["sampling"]["envs"] is not None and pickle.dumps(state["sampling"]) == before
    del state["sampling"]
    assert not_the_same(wanted, continued(case, state))  # moments and weights alone are not enough


def test_a_state_can_be_taken_twice_and_given_twice():
    """`CarelessWalk` hands out its own arrays, and keeps those that it is given."""
    for door in DOORS:
        case = Case(CarelessWalk, door, lstm=True, normalize=True)
        first = begun(case)
        state = saved(first)
        before = pickle.dumps(state)
        wanted = sample(first, 2)
        assert not not_the_same(wanted, continued(case, state, 2))
        assert not not_the_same(wanted, continued(case, state, 2))
        assert pickle.dumps(state) == before


def test_taking_the_state_changes_nothing():
    for door in DOORS:
        case = Case("bucket_brigade", door, lstm=True)
        asked, unasked = begun(case), begun(case)
        for _ in range(3):
            asked.get_sampling_state()
            assert not not_the_same(sample(asked), sample(unasked))


def test_the_state_is_small():
    for door in DOORS:
        runner = begun(Case("bucket_brigade", door, num_envs=4), rollouts=30)
        assert len(pickle.dumps(runner.get_sampling_state())) < 80_000


def test_a_fresh_process_goes_on_to_the_bit(tmp_path):
    cases = [
        Case("bucket_brigade", "arrays", lstm=True, normalize=True, num_envs=3),
        Case("bucket_brigade", "episodes", lstm=True, normalize=True, num_envs=3),
        Case("debug/match_target", "arrays"),
        Case(SavedJointLives, "arrays", lstm=True),
        Case(SavedTurns, "episodes", lstm=True, normalize=True),
        Case(Unsaved, "episodes"),
    ]
    runners = [case.runner() for case in cases]
    for case, runner in zip(cases, runners, strict=True):
        random_weights(runner)
        if case.env is not Unsaved:
            sample(runner, 3)
    file = tmp_path / "cases"
    file.write_bytes(pickle.dumps([(case, saved(runner)) for case, runner in zip(cases, runners, strict=True)]))
    command = [sys.executable, "-m", "tests.sampling_state.saving", str(file)]
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(command, timeout=100, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for case, runner, found in zip(
        cases, runners, pickle.loads((tmp_path / "cases.sampled").read_bytes()), strict=True
    ):
        assert not not_the_same(sample(runner, 3), found), case


@pytest.mark.parametrize("door", DOORS)
def test_environments_without_a_state_go_on_from_a_reset(door):
    case = Case(Unsaved, door, lstm=True, normalize=True)
    first = case.runner()
    random_weights(first)
    at_the_start = saved(first)
    wanted = sample(first, 2)
    assert not not_the_same(wanted, continued(case, at_the_start, 2))
    in_the_middle = saved(first)
    assert in_the_middle["sampling"]["envs"] is None is in_the_middle["sampling"]["playing"]
    first._needs_initial_reset = True
    assert not not_the_same(sample(first, 2), continued(case, in_the_middle, 2))


@pytest.mark.parametrize("door", DOORS)
def test_random_actions_and_greedy_ones_go_on(door):
    case = Case("debug/mixed_spaces", "arrays")
    first = begun(case)
    for options in ({"random_actions": True}, {"explore": False}, {}):
        state = saved(first)
        second = case.runner()
        second.set_state(state)
        assert not not_the_same(sample(first, 2, **options), sample(second, 2, **options))


@pytest.mark.parametrize("door", DOORS)
def test_behind_an_evaluation_comes_a_reset(door):
    case = Case("bucket_brigade", door)
    first = begun(case)
    window = first.get_sampling_state()["finished"]
    first.sample(num_episodes=3)
    kept = first.get_sampling_state()["finished"]  # of training, while the evaluation's is not told yet
    first.get_metrics()
    state = saved(first)
    assert state["sampling"]["envs"] is None
    assert not differences(window, kept) and not differences(window, state["sampling"]["finished"])
    assert not not_the_same(sample(first, 2), continued(case, state, 2))


@pytest.mark.parametrize("door", DOORS)
def test_the_means_of_finished_episodes_are_there_at_once(door):
    case = Case("bucket_brigade", door)
    first = begun(case, rollouts=8)
    known = dict(flat(runner_metrics(first)))
    assert "/episode_return_mean" in known
    second = case.runner()
    assert "/episode_return_mean" not in dict(flat(runner_metrics(second)))
    second.set_sampling_state(first.get_sampling_state())
    told = dict(flat(runner_metrics(second)))
    assert {name: told[name] for name in known if "episode" in name and name in told} == {
        name: value for name, value in known.items() if "episode" in name and name in told
    }
    assert told["/episode_return_mean"] == known["/episode_return_mean"]


class Adds(RLlibCallback):
    """Adds up each episode out of its fragments, by hand, and keeps a number in it."""

    def on_episode_step(self, *, episode, **kwargs):
        episode.custom_data["steps"] = episode.custom_data.get("steps", 0) + 1

    def on_episode_end(self, *, episode, prev_episode_chunks, metrics_logger, **kwargs):
        returns = sum(chunk.get_return() for chunk in [*prev_episode_chunks, episode])
        metrics_logger.log_value("by_hand", returns, window=100)
        metrics_logger.log_value("steps_by_hand", episode.custom_data["steps"], window=100)


def test_callbacks_see_the_fragments_from_before():
    case = Case(SavedWalk, "episodes", lstm=True)

    def runner():
        made = case.runner()
        made._callbacks.append(Adds())
        made._tells_ends = True
        return made

    first, second = runner(), runner()
    random_weights(first)
    sample(first, 2)
    second.set_state(pickle.loads(pickle.dumps(saved(first))))
    wanted = sample(first)
    assert not not_the_same(wanted, sample(second))
    assert wanted["metrics"]["/steps_by_hand"] == 9.0 and "/by_hand" in wanted["metrics"]


class SavedCounting(Counting):
    """Can be saved."""

    def get_state(self):
        return {"t": self.t, "episode": self.episode}

    def set_state(self, state):
        vars(self).update(state)


def test_stacks_of_frames_go_on():
    """A user's piece looks back into what the episodes have kept."""

    def runner():
        config = general_config(
            SavedCounting,
            {"shape": (2, 2, 1)},
            pieces=lambda env, spaces, device: FrameStackingEnvToModule(num_frames=3, multi_agent=True),
            learner=lambda observation_space, action_space: FrameStackingLearner(num_frames=3, multi_agent=True),
            runners={"episode_lookback_horizon": 2},
            model={"fcnet_hiddens": [4]},
        )
        config.validate()
        return config.env_runner_cls(config=config, worker_index=1)

    first, second = runner(), runner()
    random_weights(first)
    first.sample(num_timesteps=3 * first.num_envs)
    second.set_state(pickle.loads(pickle.dumps(saved(first))))
    for _ in range(3):
        wanted, found = (r.sample(num_timesteps=3 * r.num_envs) for r in (first, second))
        assert [e.env_t for e in wanted] == [e.env_t for e in found]
        for left, right in zip(wanted, found, strict=True):
            assert not differences(agents_of(left), agents_of(right))


def test_extras_and_the_length_of_a_rollout_may_differ():
    case = Case(SavedWalk, "arrays")
    first = begun(case)
    second = case.runner()
    second.set_state(saved(first))
    whole = sample(first, 1, steps=2 * STEPS)["rollouts"][0]["batch"]
    parts = [rollout["batch"] for rollout in sample(second, 2)["rollouts"]]
    np.testing.assert_array_equal(whole.extras["cost"], np.concatenate([part.extras["cost"] for part in parts]))


def test_two_walks_are_not_alike():
    """The environments here do have random numbers of their own."""
    assert not_the_same(sample(Case(Walk, "arrays").runner()), sample(Case(Walk, "arrays", worker_index=2).runner()))
