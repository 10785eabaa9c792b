"""Cases 1 to 9, 19, 20 and 22 of the collection of reported inputs, through the fast door.

Environments come as a `JointEnv`, a PettingZoo environment and an RLlib one where that makes a difference.
"""

from __future__ import annotations

import os
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
from mpe2 import simple_spread_v3
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.tune.utils import flatten_dict

from tests.envs.lives import FORMS, JointLives, MultiLives, Plan, ZooLives
from tests.envs.test_presence import Turns
from tests.inputs.general_envs import Minibatches, Values, value
from tests.support import make_learner, make_runner, parameters, runner_metrics, tiny_config, update
from thrust_rllib import JointEnv, JointStepResult
from thrust_rllib.envs import PettingZooJointEnv, RLlibJointEnv

EVERY_FORM = pytest.mark.parametrize("form", FORMS)


def runner_and_learner(env, env_config, **options):
    plain = {"value_normalization": False, "standardize_advantages": False}  # then absent rows are 0: `Minibatches`
    config = tiny_config(env, env_config, **{"num_envs": 1, "iterate_all_minibatches": True, **plain, **options})
    return make_runner(config), make_learner(config)


def finite(result, agents=("a0", "a1")):
    return all(np.isfinite(v) for agent in agents for v in flatten_dict(result[agent]).values())


# --------------------------------------------------------------------------------------------- cases 1 to 3


@EVERY_FORM
def test_case_1_an_agent_ends_without_a_last_observation(form, monkeypatch):
    lives = {"a0": (0, 1, "terminated"), "a1": (0, 5, "terminated")}
    runner, learner = runner_and_learner(FORMS[form], {"lives": lives, "length": 6, "silent": ["a0"]})
    (batch,) = runner.sample(num_timesteps=6)
    assert batch.stream("a0").present[:, 0].tolist() == [True] * 2 + [False] * 4
    assert batch.stream("a1").present.all() and batch.bootstrap_rows.size == 0
    seen = Minibatches(monkeypatch)
    assert finite(update(learner, batch))
    uses = seen.uses()  # checks that the rows of one step are joined
    assert uses == {**{("a0", 0, t): 2 for t in range(2)}, **{("a1", 0, t): 2 for t in range(6)}}


@EVERY_FORM
def test_case_2_one_terminates_and_one_is_truncated_in_the_last_step(form):
    lives = {"a0": (0, 2, "terminated"), "a1": (0, 2, "truncated")}
    env_config = {"lives": lives, "length": 3}
    if form == "rllib":
        env_config["key"] = False  # "__all__" not set
    options = {"num_envs": 1, "gamma": 0.5, "lambda_": 0.0, "value_normalization": False}
    config = tiny_config(FORMS[form], env_config, standardize_advantages=False, **options)
    config.rl_module(rl_module_spec=RLModuleSpec(module_class=Values), model_config={})
    (batch,) = make_runner(config).sample(num_timesteps=3)
    targets = make_learner(config)._joint_rows([batch]).value_targets[:, 2].tolist()
    assert targets == [3.0, 13.0 + 0.5 * value(np.array([0.0, 3.0, 1.0]))]
    assert batch.episode_start[:, 0].tolist() == [True, False, False]


@pytest.mark.parametrize("form", ["joint", "rllib"])
@pytest.mark.parametrize("steps", [10, 4])
def test_case_3_nobody_lives_for_a_while(form, steps):
    """In PettingZoo's contract an episode without agents is over."""
    lives = {"a0": (0, 2, "terminated"), "a1": (5, 9, "terminated")}
    runner, learner = runner_and_learner(FORMS[form], {"lives": lives, "length": 10})
    batches = [runner.sample(num_timesteps=steps)[0] for _ in range(20 // steps)]
    starts = np.concatenate([batch.episode_start[:, 0] for batch in batches])
    assert np.flatnonzero(starts).tolist() == [0, 10]
    present = [np.concatenate([b.stream(a).present[:, 0] for b in batches]) for a in ("a0", "a1")]
    for t in range(20):
        assert [bool(here[t]) for here in present] == [t % 10 <= 2, t % 10 >= 5]
    assert runner_metrics(runner)["episode_len_mean"] == 10
    for batch in batches:
        result = update(learner, batch)
        assert finite(result, [a for a in lives if batch.stream(a).present.any()])
        assert all(np.isfinite(p).all() for named in parameters(learner).values() for p in named.values())


@EVERY_FORM
def test_case_4_who_is_paid_before_its_first_observation_needs_episodes(form):
    class Early(FORMS[form]):
        def step_joint(self, actions):
            result = super().step_joint(actions)
            if "a1" not in actions:
                result.rewards["a1"] = 5.0
            return result

        def step(self, actions):
            seen, rewards, *rest = super().step(actions)
            return seen, {"a1": 5.0, **rewards}, *rest

    lives = {"a0": (0, 4, "terminated"), "a1": (3, 4, "terminated")}
    runner, _ = runner_and_learner(Early, {"lives": lives, "length": 5})
    message = "agent 'a1' was paid without acting in environment index 0, step 0 .*sampling=\"episodes\""
    with pytest.raises(ValueError, match=message):
        runner.sample(num_timesteps=5)


# --------------------------------------------------------------------------------------------------- case 5


def altered(form, change):
    """Agents a0 (steps 0 to 1 of 6) and a1; `change(t, observations, rewards)` alters what step t (from 1) answers."""

    class Altered(FORMS[form]):
        def step_joint(self, actions):
            result = super().step_joint(actions)
            change(self.plan.t, result.observations, result.rewards)
            return result

        def step(self, actions):
            seen, rewards, *rest = super().step(actions)
            change(self.plan.t, seen, rewards)
            return seen, rewards, *rest

    lives = {"a0": (0, 1, "terminated"), "a1": (0, 5, "terminated")}
    return runner_and_learner(Altered, {"lives": lives, "length": 6})[0]


@EVERY_FORM
def test_case_5_a_reward_of_zero_for_an_agent_that_has_ended(form):
    runner = altered(form, lambda t, seen, rewards: rewards.update({"a0": 0.0} if t == 4 else {}))
    message = r"Altered, environment 0, step 4 of its episode: rewards have an entry .*'a0', which ended earlier"
    with pytest.raises(RuntimeError, match=message):
        runner.sample(num_timesteps=6)


@EVERY_FORM
def test_case_5_an_observation_of_an_agent_that_has_ended(form):
    runner = altered(form, lambda t, seen, rewards: seen.update({"a0": np.zeros(3, np.float32)} if t == 4 else {}))
    message = r"Altered, environment 0, step 4 of its episode: observations have an entry .*'a0', which ended earlier"
    with pytest.raises(RuntimeError, match=message):
        runner.sample(num_timesteps=6)


@EVERY_FORM
def test_case_5_an_agent_that_acts_and_is_not_paid(form):
    runner = altered(form, lambda t, seen, rewards: rewards.pop("a1") if t == 3 else None)
    message = "Altered, environment 0, step 3 of its episode: rewards have no entry for agent 'a1', which acted"
    with pytest.raises(RuntimeError, match=message):
        runner.sample(num_timesteps=6)


@EVERY_FORM
def test_case_5_an_agent_that_goes_on_and_sees_nothing(form, monkeypatch):
    monkeypatch.setattr(Plan, "strict", False)

    def change(t, seen, rewards):
        if t == 3:
            del seen["a1"]

    for steps in (6, 3):  # in the middle and at the end of a rollout
        message = "agent 'a1' d.* not act in environment index 0, step 3 .*sampling=\"episodes\""
        with pytest.raises(ValueError, match=message):
            altered(form, change).sample(num_timesteps=steps)


# ------------------------------------------------------------------------------------------- cases 6 to 9


@EVERY_FORM
@pytest.mark.parametrize("death", [4, 5, 6])
def test_case_6_rollouts_of_5_steps_and_a_death_beside_their_ends(form, death, monkeypatch):
    lives = {"a0": (0, 11, "terminated"), "a1": (0, death - 1, "terminated")}
    runner, learner = runner_and_learner(FORMS[form], {"lives": lives, "length": 12}, minibatch_size=4)
    seen = Minibatches(monkeypatch)
    trained = []
    for _ in range(2):
        batches = [runner.sample(num_timesteps=5)[0] for _ in range(3)]
        seen.all.clear()
        assert finite(update(learner, batches))
        uses = seen.uses()
        assert set(uses.values()) == {2}  # two epochs
        trained += list(uses)
    steps = [divmod(t, 12) for t in range(30)]
    expected = [("a0", *step) for step in steps] + [("a1", *step) for step in steps if step[1] < death]
    assert sorted(trained) == sorted(expected)


@pytest.mark.parametrize("env, where", [(Turns, "step 1"), (lambda: Turns(), "step 1")], ids=["class", "function"])
def test_case_7_turns_are_refused_and_the_error_says_where_to_go(env, where):
    runner, _ = runner_and_learner(env, {})
    message = rf"agent 'a0' did not act in environment index 0, {where} .*\.env_runners\(sampling=\"episodes\"\)"
    with pytest.raises(ValueError, match=message):
        runner.sample(num_timesteps=19)
    runner, _ = runner_and_learner(env, {})
    with pytest.raises(ValueError, match="agent 'a0' does not act in environment index 0, step 1 "):
        runner.sample(num_timesteps=1)


@EVERY_FORM
@pytest.mark.parametrize(
    "options", [{"iterate_all_minibatches": False}, {}, {"shuffle_batch_per_epoch": True}], ids=str
)
def test_case_8_no_row_is_used_more_often_than_there_are_epochs(form, options, monkeypatch):
    lives = {"a0": (0, 19, "truncated"), "a1": (0, 1, "truncated")}
    env_config = {"lives": lives, "length": 20}
    runner, learner = runner_and_learner(FORMS[form], env_config, minibatch_size=32, **options)
    (batch,) = runner.sample(num_timesteps=200)
    seen = Minibatches(monkeypatch)
    assert finite(update(learner, batch))
    uses = seen.uses()
    assert max(uses.values()) <= 2
    if options.get("iterate_all_minibatches", True):
        assert set(uses.values()) == {2}
        assert sum(key[0] == "a0" for key in uses) == 200 and sum(key[0] == "a1" for key in uses) == 20


@EVERY_FORM
@pytest.mark.parametrize("policies", [None, "shared"])
def test_case_9_the_agents_of_a_row_agree_in_every_minibatch(form, policies, monkeypatch):
    lives = {"a0": (0, 7, "truncated"), "a1": (3, 7, "terminated"), "a2": (0, 4, "truncated")}
    runner, learner = runner_and_learner(
        FORMS[form],
        {"lives": lives, "length": 8},
        num_envs=2,
        policies=policies,
        shuffle_batch_per_epoch=True,
        minibatch_size=5,
    )
    seen = Minibatches(monkeypatch)
    for _ in range(2):
        (batch,) = runner.sample(num_timesteps=2 * 21)
        seen.all.clear()
        update(learner, batch)
        uses = seen.uses()  # checks the rows, and that absent agents hold nothing
        assert set(uses.values()) == {4}  # two epochs, two environments that play the same
        assert sum(uses.values()) == 2 * batch.agent_steps()


# ------------------------------------------------------------------------------------- cases 19, 20, 22


def test_case_19_one_agent_terminates_and_one_is_truncated_in_the_last_step_of_a_pettingzoo_environment():
    lives = {"b": (0, 2, "terminated"), "a": (0, 2, "truncated")}
    runner, _ = runner_and_learner(ZooLives, {"lives": lives, "length": 3})
    (batch,) = runner.sample(num_timesteps=7)
    assert batch.episode_start[:, 0].tolist() == [t % 3 == 0 for t in range(7)]
    runner.get_metrics()
    (sampled,) = runner.sample(num_episodes=2)
    assert sampled.env_steps() == 6 and runner_metrics(runner)["episode_len_mean"] == 3


def test_case_19_spaces_of_all_possible_agents():
    class Unequal(ZooLives):
        def observation_space(self, agent):
            return gym.spaces.Box(-1, 1000, (3 if agent == "late" else 4,))

        def _wide(self, seen):
            return {a: x if a == "late" else np.append(x, np.float32(0)) for a, x in seen.items()}

        def reset(self, seed=None, options=None):
            seen, infos = super().reset()
            return self._wide(seen), infos

        def step(self, actions):
            seen, *rest = super().step(actions)
            return self._wide(seen), *rest

    lives = {"early": (0, 3, "terminated"), "late": (2, 5, "truncated")}
    runner, learner = runner_and_learner(Unequal, {"lives": lives, "length": 6})
    (batch,) = runner.sample(num_timesteps=12)
    assert batch.stream("early").obs.shape[2:] == (4,) and batch.stream("late").obs.shape[2:] == (3,)
    assert finite(update(learner, batch), lives)


def test_case_19_equal_first_observations_and_an_image():
    env = PettingZooJointEnv(simple_spread_v3.parallel_env, render_mode="rgb_array")
    first, again = ({a: x.copy() for a, x in env.reset_joint(5).items()} for _ in range(2))
    other = env.reset_joint(6)
    for agent in first:
        np.testing.assert_array_equal(first[agent], again[agent])
        assert (first[agent] != other[agent]).any()
    assert env.render().shape[-1] == 3 and env.render().dtype == np.uint8
    env.close()
    with pytest.raises(ValueError, match='made without a render mode; make it with render_mode="rgb_array"'):
        PettingZooJointEnv(simple_spread_v3.parallel_env).render()


ORDER = """
import gymnasium as gym, numpy as np
from pettingzoo import ParallelEnv
from thrust_rllib.envs import JointEnvParallel, PettingZooJointEnv, make_vector_env
class Zoo(ParallelEnv):
    metadata, render_mode, possible_agents = {"name": "zoo"}, None, ["wolf", "cat", "owl", "dog"]
    def observation_space(self, agent):
        return gym.spaces.Box(0, 1, (1,))
    def action_space(self, agent):
        return gym.spaces.Discrete(2)
    def see(self):
        return {a: np.zeros(1, np.float32) for a in set(self.agents)}
    def reset(self, seed=None, options=None):
        self.agents = ["owl", "wolf"]
        return self.see(), {}
    def step(self, actions):
        gone, self.agents = self.agents, ["dog", "cat"]
        return self.see(), {a: 1.0 for a in set(gone)}, {a: True for a in set(gone)}, {a: False for a in set(gone)}, {}
env = make_vector_env(Zoo, {}, 1)
env.reset_joint()
print(env.possible_agents, env.acts_next()[:, 0].tolist())
parallel = JointEnvParallel(PettingZooJointEnv(Zoo()))
seen, infos = parallel.reset(seed=0)
print(list(seen), parallel.agents, *[list(x) for x in parallel.step(dict.fromkeys(seen, 0))], parallel.agents)
"""


def test_case_19_the_same_order_of_agents_under_three_hash_seeds():
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", ORDER], env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True
        )
        for seed in "012"
    ]
    said = [process.communicate(timeout=120)[0] for process in runs]
    assert all(process.returncode == 0 for process in runs)
    assert said[0] == said[1] == said[2]
    first, second = said[0].splitlines()
    assert first == "['wolf', 'cat', 'owl', 'dog'] [True, False, True, False]"
    assert second.startswith("['wolf', 'owl'] ['wolf', 'owl'] ") and second.endswith(" ['cat', 'dog']")


@EVERY_FORM
def test_case_20_agents_named_by_numbers_come_and_go(form):
    lives = {1: (0, 3, "truncated"), 0: (1, 2, "terminated")}
    runner, learner = runner_and_learner(FORMS[form], {"lives": lives, "length": 4})
    (batch,) = runner.sample(num_timesteps=8)
    assert batch.stream(0).present[:, 0].tolist() == [False, True, True, False] * 2
    assert runner_metrics(runner)["agent_steps"] == {"0": 2, "1": 4}
    assert finite(update(learner, batch), ("0", "1"))


def test_case_22_the_base_class_is_forgotten():
    class Forgets:
        reset_joint = step_joint = None

    message = "class Forgets.*Derive it from thrust_rllib.JointEnv and implement reset_joint and step_joint"
    with pytest.raises(TypeError, match=message):
        tiny_config(Forgets).validate()
    for adapter, says in ((PettingZooJointEnv, "needed: a ParallelEnv"), (RLlibJointEnv, "an RLlib MultiAgentEnv")):
        with pytest.raises(TypeError, match=says):
            adapter(Forgets())


class Odd(JointEnv):
    """`LIVES` of two agents, whose answers in step `at` are made by `answer(plan, seen, rewards)`."""

    def __init__(self, answer, at):
        self.plan, self.answer, self.at = Plan({"a0": (0, 1, "terminated"), "a1": (0, 5, "terminated")}, 6), answer, at
        self.possible_agents = self.plan.possible_agents
        self.observation_spaces, self.action_spaces = self.plan.observation_spaces, self.plan.action_spaces

    def reset_joint(self, seed=None):
        seen = self.plan.start()
        return self.answer(seen, {})[0] if self.at == 0 else seen

    def step_joint(self, actions):
        seen, rewards, terminated, truncated, _ = self.plan.play(actions)
        if self.plan.t == self.at:
            seen, rewards = self.answer(seen, rewards)
        return JointStepResult(rewards, seen, terminated, truncated)


@pytest.mark.parametrize("at", [0, 1, 4])
def test_case_22_a_list_in_place_of_a_dict(at):
    moment = "reset_joint" if at == 0 else f"step {at} of its episode"
    runner, _ = runner_and_learner(Odd, {"answer": lambda seen, rewards: (list(seen.values()), rewards), "at": at})
    message = f"environment 0, {moment}: observations are a list; return a dict"
    # What a step raises is wrapped by the runner, which knows the step.
    with pytest.raises(RuntimeError if at else TypeError, match=message):
        runner.sample(num_timesteps=6)
    if at:
        runner, _ = runner_and_learner(Odd, {"answer": lambda seen, rewards: (seen, list(rewards.values())), "at": at})
        with pytest.raises(RuntimeError, match=f"environment 0, {moment}: rewards are a list; return a dict"):
            runner.sample(num_timesteps=6)


@pytest.mark.parametrize("form, flags", [("pettingzoo", "terminations"), ("rllib", "terminateds")])
def test_case_22_what_other_libraries_environments_return(form, flags):
    class Wrong(FORMS[form]):
        place, moment = 0, "step"

        def reset(self, *, seed=None, options=None):
            returned = super().reset(seed=seed)
            return self._spoilt(returned) if self.moment == "reset" else returned

        def step(self, actions):
            returned = super().step(actions)
            return self._spoilt(returned) if self.moment == "step" else returned

        def _spoilt(self, returned):
            if self.place is None:
                return returned[:-1]
            return tuple(list(x.values()) if i == self.place else x for i, x in enumerate(returned))

    lives = {"a0": (0, 1, "terminated"), "a1": (0, 5, "terminated")}
    for moment, place, says in [
        ("reset", 0, "Wrong.reset returned observations as a list; return a dict agent -> value"),
        ("reset", None, r"Wrong.reset returned 1 values; return \(observations, infos\)"),
        ("step", 0, "environment 0, step 1 .*Wrong.step returned observations as a list"),
        ("step", 1, "environment 0, step 1 .*Wrong.step returned rewards as a list"),
        ("step", 2, f"environment 0, step 1 .*Wrong.step returned {flags} as a list"),
        ("step", None, rf"Wrong.step returned 4 values; return \(observations, rewards, {flags}, truncat.*, infos\)"),
    ]:
        broken = type("Wrong", (Wrong,), {"moment": moment, "place": place})
        with pytest.raises(TypeError if moment == "reset" else RuntimeError, match=says):
            runner_and_learner(broken, {"lives": lives, "length": 6})[0].sample(num_timesteps=6)


@pytest.mark.parametrize("at", [0, 1, 4])
def test_case_22_an_observation_outside_its_space(at):
    def outside(seen, rewards):
        return {**seen, "a1": np.array([0, -5, 0], np.float32)}, rewards

    runner, _ = runner_and_learner(Odd, {"answer": outside, "at": at})
    message = rf"agent 'a1'.* environment index 0, step {at} .*-5.0, outside the space's bounds \[-1.0, 1000.0\]"
    with pytest.raises(ValueError, match=message):
        runner.sample(num_timesteps=6)

    def short(seen, rewards):
        return {**seen, "a1": np.zeros(2, np.float32)}, rewards

    runner, _ = runner_and_learner(Odd, {"answer": short, "at": at})
    with pytest.raises(
        RuntimeError if at else ValueError, match=r"agent 'a1' has shape \(2,\); its observation space .*\(3,\)"
    ):
        runner.sample(num_timesteps=6)


def test_the_three_forms_play_the_same():
    lives = {"a0": (0, 1, "terminated"), "a1": (2, 5, "truncated"), "a2": (0, 5, "terminated")}
    batches = []
    for form in (JointLives, ZooLives, MultiLives):
        runner, _ = runner_and_learner(form, {"lives": lives, "length": 6}, num_envs=2)
        batches.append(runner.sample(num_timesteps=2 * 9)[0])
    for agent in lives:
        first, *others = [batch.stream(agent) for batch in batches]
        for other in others:
            for name in ("obs", "actions", "rewards", "present", "terminated", "truncated", "bootstrap_obs"):
                np.testing.assert_array_equal(getattr(first, name), getattr(other, name), name)
