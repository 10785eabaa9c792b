"""Wrong answers of environments in the general door: an error that says what, or what was stored stays right."""

import numpy as np
import pytest

from tests.inputs.general_envs import Game, Says, Told, episodes_config, episodes_runner, general_training
from tests.inputs.test_general_inputs import ALL, GOES_ON, PAID
from tests.inputs.test_reported_inputs import Masked
from tests.support import box, make_learner


def test_case_15_no_legal_action_is_an_error_that_names_agent_environment_and_step():
    runner = episodes_runner(episodes_config(Masked, {"legal": [0, 1, 1], "stuck": 3}))
    message = (
        "environment index 0 .*agent 'a1' got an action mask that allows no action, at step 3 .*return at least one"
    )
    with pytest.raises(ValueError, match=message):
        runner.sample(num_timesteps=40)


class Wrong(Told):
    def __init__(self, config):
        self.form = config["form"]
        super().__init__({"steps": [GOES_ON] * 10})

    def step(self, action_dict):
        seen, rewards, terminateds, truncateds, infos = super().step(action_dict)
        return {
            "shape": ({**seen, "a1": np.zeros(4, np.float32)}, rewards, terminateds, truncateds, infos),
            "list": ({**seen, "a1": [0.0, 0.0]}, rewards, terminateds, truncateds, infos),
            "text": (seen, {"a0": "much", "a1": 1.0}, terminateds, truncateds, infos),
            "None": (seen, {"a0": None, "a1": 1.0}, terminateds, truncateds, infos),
            "array": (seen, {"a0": np.array([1.0, 2.0]), "a1": 1.0}, terminateds, truncateds, infos),
            "flag of nobody": (seen, rewards, {"a7": True}, truncateds, infos),
            "flag text": (seen, rewards, {"a0": "no"}, truncateds, infos),
        }[self.form]


@pytest.mark.parametrize(
    "form, message",
    [
        ("shape", r"'Wrong', environment index 0, step 1 .*agent 'a1'.*\(4,\).*\(3,\)"),
        ("list", r"'Wrong', environment index 0, step 1 .*agent 'a1'.*\(2,\).*\(3,\)"),
        ("text", "'Wrong', environment index 0, step 1 .*agent 'a0'.*'much'.*number"),
        ("None", "'Wrong', environment index 0, step 1 .*agent 'a0'.*None.*number"),
        ("array", "'Wrong', environment index 0, step 1 .*agent 'a0'.*number"),
        ("flag of nobody", "'Wrong', environment index 0, step 1 .*'a7'.*not in possible_agents"),
        ("flag text", "'Wrong', environment index 0, step 1 .*'a0'.*bool"),
    ],
)
def test_wrong_answers(form, message):
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        general_training(episodes_config(Wrong, {"form": form}))


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
