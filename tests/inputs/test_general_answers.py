"""Wrong answers of environments in the general door: an error that says what, or what was stored stays right.

With cases 21 and 22 of the collection of reported inputs.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.inputs.general_envs import (
    ALL,
    GOES_ON,
    PAID,
    Game,
    Says,
    Told,
    episodes_config,
    episodes_runner,
    general_training,
    lives,
)
from tests.inputs.test_reported_inputs import Masked, NoBase
from tests.support import box, largest_difference, make_learner, parameters


@pytest.mark.parametrize(
    "fault, message",
    [
        ("nan observation", "environment 'Spoiled', environment index 1 .*agent 'a1' got an observation.*step 3 .*nan"),
        ("outside", "environment 'Spoiled', environment index 1 .*agent 'a1' got an observation.*step 3 .*2000"),
        ("nan reward", "environment 'Spoiled', environment index 1 .*agent 'a1' got the reward nan.*step 2 "),
    ],
)
def test_case_21_bad_numbers_name_agent_environment_and_step(fault, message):
    game = Game(*lives(6, a0=5, a1=5), num_envs=2, env=Spoiled)
    game.envs[1].fault = fault
    before = parameters(game.learner)
    with pytest.raises(ValueError, match=message):
        game.update(game.sample(num_timesteps=16))
    assert largest_difference(before, parameters(game.learner)) == 0.0
    game.envs[1].fault = None
    game.update(game.sample(num_timesteps=40, force_reset=True))


class Spoiled(Told):
    """What a1 is shown or paid in step 3 is wrong."""

    fault = None

    def step(self, action_dict):
        seen, rewards, *rest = super().step(action_dict)
        if self.t == 3 and self.fault == "nan reward":
            rewards = {**rewards, "a1": float("nan")}
        if self.t == 3 and self.fault in ("nan observation", "outside"):
            seen["a1"][1] = np.nan if self.fault == "nan observation" else 2000.0
        return seen, rewards, *rest


def test_case_22_a_forgotten_base_class():
    with pytest.raises(TypeError, match="NoBase, which is no known environment; needed: a class derived from JointEnv"):
        episodes_config(NoBase).validate()


class Wrong(Told):
    """Answers in a wrong form."""

    def __init__(self, config):
        self.form = config["form"]
        super().__init__({"steps": [GOES_ON] * 10})

    def step(self, action_dict):
        returned = super().step(action_dict)
        if self.form in ("none", "four"):
            return None if self.form == "none" else (*returned[:3], returned[4])
        seen, rewards, terminateds, truncateds, infos = returned
        wrong = {
            "lists": {"seen": list(seen.values())},
            "bool": {"terminateds": False, "truncateds": False},
            "number": {"rewards": 1.0},
            "unknown": {"seen": {**seen, "a7": seen["a0"]}},
            "shape": {"seen": {**seen, "a1": np.zeros(4, np.float32)}},
            "list": {"seen": {**seen, "a1": [0.0, 0.0]}},
            "text": {"rewards": {"a0": "much", "a1": 1.0}},
            "None": {"rewards": {"a0": None, "a1": 1.0}},
            "array": {"rewards": {"a0": np.array([1.0, 2.0]), "a1": 1.0}},
            "flag of nobody": {"terminateds": {"a7": True}},
            "flag text": {"terminateds": {"a0": "no"}},
        }[self.form]
        right = {"seen": seen, "rewards": rewards, "terminateds": terminateds, "truncateds": truncateds}
        return *{**right, **wrong}.values(), infos


@pytest.mark.parametrize(
    "form, error, message",
    [
        ("lists", TypeError, "returned observations as a list; return a dict agent -> val"),
        ("four", TypeError, "step returned 4 values; return .observations, rewards, ter"),
        ("none", TypeError, "step returned a NoneType; return .observations, rewards, te"),
        ("bool", TypeError, "returned terminateds as a bool; return a dict agent -> val"),
        ("number", TypeError, "returned rewards as a float; return a dict agent -> value"),
        ("unknown", ValueError, "agent 'a7' is not in possible_agents .*'a0', 'a1'"),
        ("shape", ValueError, r"agent 'a1'.*\(4,\).*\(3,\)"),
        ("list", ValueError, r"agent 'a1'.*\(2,\).*\(3,\)"),
        ("text", ValueError, "agent 'a0'.*'much'.*number"),
        ("None", ValueError, "agent 'a0'.*None.*number"),
        ("array", ValueError, "agent 'a0'.*number"),
        ("flag of nobody", ValueError, "'a7'.*not in possible_agents"),
        ("flag text", TypeError, "'a0'.*bool"),
    ],
)
def test_case_22_wrong_answers_say_what_to_return(form, error, message):
    config = episodes_config(Wrong, {"form": form})
    with pytest.raises(error, match=f"'Wrong', environment index 0, step 1 .*{message}"):
        general_training(config)


@pytest.mark.parametrize("what", ["rewards", "observations"])
def test_an_unknown_agent(what):
    class Stranger(Told):
        def step(self, action_dict):
            seen, rewards, *rest = super().step(action_dict)
            (rewards if what == "rewards" else seen)["a7"] = 1.0 if what == "rewards" else seen["a0"]
            return seen, rewards, *rest

    game = Game(Says("a0 a1", dict(PAID)), env=Stranger)
    with pytest.raises(ValueError, match=r"'Stranger', environment index 0, step 1 .*agent 'a7' is not in possible_ag"):
        game.sample()


def test_a_reward_that_is_infinite():
    game = Game(Says("a0 a1", {"a0": float("inf"), "a1": 1.0}), Says("", PAID, ALL))
    with pytest.raises(ValueError, match="agent 'a0' got the reward inf for what it did at step 0 of its episode"):
        game.rows()


def test_nobody_in_the_first_step():
    with pytest.raises(ValueError, match="'Told', environment index 0.*reset showed no agent anything"):
        Game(GOES_ON, start="").sample()


def test_dicts_that_the_environment_uses_again():
    class SameDicts(Told):
        def __init__(self, config):
            super().__init__(config)
            self.same = [{} for _ in range(5)]

        def step(self, action_dict):
            for mine, new in zip(self.same, super().step(action_dict), strict=True):
                mine.clear()
                mine.update(new)
            action_dict.clear()
            return tuple(self.same)

    steps = [GOES_ON, Says("a1", PAID, {"a0": True}), Says("", {"a1": 1.0}, ALL)]
    assert Game(*steps, env=SameDicts).rows() == Game(*steps).rows()


def test_case_15_no_legal_action_is_an_error_that_names_agent_environment_and_step():
    runner = episodes_runner(episodes_config(Masked, {"legal": [0, 1, 1], "stuck": 3}))
    message = (
        "environment index 0 .*agent 'a1' got an action mask that allows no action, at step 3 .*return at least one"
    )
    with pytest.raises(ValueError, match=message):
        runner.sample(num_timesteps=40)


class SameBuffer(Told):
    """Writes every observation into the same array, as many simulators do."""

    def see(self, names):
        if not hasattr(self, "buffers"):
            self.buffers = {agent: np.zeros(3, np.float32) for agent in self.possible_agents}
        for agent, observation in (shown := super().see(names)).items():
            self.buffers[agent][:] = observation
        return {agent: self.buffers[agent] for agent in shown}


def test_observations_in_an_array_that_is_used_again():
    steps = [GOES_ON, GOES_ON, Says("a0 a1", PAID, ALL)]
    assert Game(*steps, env=SameBuffer).rows() == Game(*steps).rows()


class ChangesActions(Told):
    """Clips its action in place."""

    def __init__(self, config):
        super().__init__(config)
        self.action_spaces, self.got = dict.fromkeys(self.possible_agents, box(2, 1.0)), []

    def step(self, action_dict):
        self.got.append(action_dict["a0"].copy())
        for action in action_dict.values():
            action[:] = 7.0
        return super().step(action_dict)


@pytest.mark.parametrize("normalize", [True, False])
def test_actions_that_the_environment_changes(normalize):
    config = episodes_config(ChangesActions, {"steps": [GOES_ON, GOES_ON, Says("", PAID, ALL)]}, num_envs=1)
    config.environment(normalize_actions=normalize, clip_actions=False)
    runner = episodes_runner(config)
    learner = make_learner(config, runner.get_spaces())
    (batch,) = learner._batches(runner.sample(num_episodes=1))
    assert (batch.stream("a0").actions[:, 0] != 7.0).all()


def test_nan_with_normalized_observations():
    config = episodes_config(
        "debug/faulty", {"fault": "nan_observation", "step": 3}, runners={"normalize_observations": True}
    )
    runner = episodes_runner(config)
    learner = make_learner(config, runner.get_spaces())
    with pytest.raises(ValueError, match="agent 'agent_1'.*is nan"):
        learner._batches(runner.sample(num_timesteps=20))
    state = runner.get_state(components="env_to_module_connector")["env_to_module_connector"]
    assert state["ObservationNormalizer"]["agent_0"]["total"]["count"] == 0


@pytest.mark.parametrize("fault", ["nan_observation", "nan_reward"])
def test_nan_in_an_evaluation(fault):
    runner = episodes_runner(episodes_config("debug/faulty", {"fault": fault}))
    with pytest.raises(ValueError, match="environment index 0 .*agent 'agent_1' got .*at step"):
        runner.sample(num_episodes=4)
