"""What `SyncVectorJointEnv` says to environments that return the wrong thing."""

import gymnasium as gym
import numpy as np
import pytest

from tests.envs.helpers import Pair
from thrust_rllib.envs import JointEnv, JointStepResult, SyncVectorJointEnv, check_spaces


def run(change, steps=3, num_envs=2):
    """Steps `Pair` environments whose third step in environment 1 is altered by `change`."""
    made = []

    def factory():
        made.append(len(made))
        index = made[-1]
        return Pair(change=lambda env, r: change(r) if (index, env.t) == (1, 3) else r)

    env = SyncVectorJointEnv(factory, num_envs)
    env.reset_joint(range(num_envs))
    for _ in range(steps):
        result = env.step_joint(np.ones((2, num_envs), dtype=int))
    return result


def put(field, **entries):
    def change(result):
        setattr(result, field, {**getattr(result, field), **entries})
        return result

    return change


def replace(field, value):
    def change(result):
        setattr(result, field, value)
        return result

    return change


def drop(field, agent="a1"):
    def change(result):
        del getattr(result, field)[agent]
        return result

    return change


ZEROS = np.zeros(3, dtype=np.float32)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda r: (r.observations, r.rewards), TypeError, "step_joint returned a tuple; return JointStepResult"),
        (lambda r: None, TypeError, "step_joint returned a NoneType"),
        (replace("observations", [ZEROS, ZEROS]), TypeError, "observations are a list; return a dict"),
        (replace("rewards", [1.0, 1.0]), TypeError, "rewards are a list; return a dict"),
        (replace("rewards", 1.0), TypeError, "rewards are a float; return a dict"),
        (drop("rewards"), ValueError, "rewards have no entry for agent 'a1'"),
        (drop("terminated"), ValueError, "terminated flags have no entry for agent 'a1'"),
        (put("rewards", ghost=1.0), ValueError, r"rewards name \['ghost'\], which are not in possible_agents"),
        (put("observations", ghost=ZEROS), ValueError, r"observations name \['ghost'\]"),
        (put("terminated", __all__=False), ValueError, r"'__all__'.*is RLlib's key: leave it out"),
        (put("rewards", a1="much"), TypeError, "the reward of agent 'a1' is 'much'; return one number"),
        (put("rewards", a1=np.ones(2)), TypeError, "the reward of agent 'a1' is array.*; return one number"),
        (put("terminated", a1="no"), TypeError, "terminated of agent 'a1' is 'no'; return a bool"),
        (replace("truncated", 1), TypeError, "truncated is a int; return one bool"),
        (put("observations", a1=ZEROS[:2]), ValueError, r"agent 'a1' has shape \(2,\).*declares \(3,\)"),
        (put("observations", a1=None), TypeError, "agent 'a1' is a NoneType that makes no array"),
        (put("observations", a1=[[1], [2, 3]]), TypeError, "agent 'a1' is a list that makes no array"),
        (replace("present", {"a0": True, "a1": False}), ValueError, "present is for a VectorJointEnv"),
        (replace("final_observations", {}), ValueError, "final_observations is for a VectorJointEnv"),
    ],
)
def test_error_says_where_who_and_what_to_return(change, error, says):
    with pytest.raises(error, match=says) as caught:
        run(change)
    where = "Pair, environment 1" if "the reward of agent" in says else "Pair, environment 1, step 3 of its episode"
    assert str(caught.value).startswith(where)


def test_the_unaltered_environment_runs():
    assert run(lambda r: r, steps=9).rewards.tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    "value", [[0.0, 0.5, 1.0], np.zeros(3), np.zeros(3, dtype=int), (0, 0, 0), np.float32([0, 0.5, 1])]
)
def test_observations_that_convert_are_taken(value):
    seen = run(put("observations", a1=value)).observations[1, 1]
    np.testing.assert_array_equal(seen, np.asarray(value, dtype=np.float32))


def test_fractions_in_an_integer_space():
    class Room(Pair):
        def __init__(self):
            super().__init__()
            self.observation_spaces = {a: gym.spaces.Discrete(4) for a in self.possible_agents}

        def _see(self):
            return {"a0": 1, "a1": 1.5 if self.t else np.int64(2)}

    env = SyncVectorJointEnv(Room, 1)
    assert env.reset_joint().tolist() == [[1], [2]]
    with pytest.raises(TypeError, match="step 1.*agent 'a1' has type float64.*declares int64.*fractions"):
        env.step_joint(np.zeros((2, 1), dtype=int))


def test_end_flags():
    for flags, expected in [
        ((True, False), (True, False)),
        ((False, True), (False, True)),
        ((np.True_, False), (True, False)),
        ((True, True), (True, False)),  # both: terminated, no bootstrap
        (({"a0": True, "a1": False}, {"a0": False, "a1": True}), ([True, False], [False, True])),
    ]:
        result = run(lambda r, f=flags: JointStepResult(r.rewards, r.observations, *f))
        assert result.terminated[:, 1].tolist() == list(np.broadcast_to(expected[0], 2))
        assert result.truncated[:, 1].tolist() == list(np.broadcast_to(expected[1], 2))
        assert not result.terminated[:, 0].any() and not result.truncated[:, 0].any()
    assert run(lambda r: JointStepResult(r.rewards, r.observations, done=True)).terminated[:, 1].all()


def test_terminated_agents_need_no_last_observation():
    def change(result):
        return JointStepResult(result.rewards, {"a0": ZEROS + 1}, {"a0": False, "a1": True}, {"a0": True, "a1": False})

    final = run(change).final_observations
    assert final[:, 1].tolist() == [[1, 1, 1], [0, 0, 0]]
    with pytest.raises(ValueError, match="observations have no entry for agent 'a1'"):
        run(lambda r: JointStepResult(r.rewards, {"a0": ZEROS}, False, True))


def test_what_a_reset_returns():
    def with_reset(value):
        return lambda: type("Odd", (Pair,), {"reset_joint": lambda self, seed=None: value})()

    for value, error, says in [
        (({}, {}), TypeError, "Odd, environment 0, reset_joint: it returned a tuple; return only"),
        ([ZEROS, ZEROS], TypeError, "reset_joint: observations are a list"),
        ({}, ValueError, "reset_joint: observations are empty; return those of the agents that act first"),
        ({"a0": ZEROS, "z": ZEROS}, ValueError, r"reset_joint: observations name \['z'\]"),
    ]:
        with pytest.raises(error, match=says):
            SyncVectorJointEnv(with_reset(value), 2).reset_joint()


def test_errors_of_the_environment_name_it_and_keep_their_cause():
    def fail(result):
        raise OSError("socket closed")

    with pytest.raises(RuntimeError, match="Pair, environment 1, step 3 of its episode: OSError: socket closed") as e:
        run(fail)
    assert isinstance(e.value.__cause__, OSError)


def test_misuse_of_the_vector():
    env = SyncVectorJointEnv(Pair, 2)
    with pytest.raises(RuntimeError, match="before reset_joint"):
        env.step_joint(np.zeros((2, 2), dtype=int))
    with pytest.raises(TypeError, match="single seed 3; needed: one seed"):
        env.reset_joint(3)
    with pytest.raises(ValueError, match="1 seeds for 2 environments"):
        env.reset_joint([3])
    env.reset_joint()
    with pytest.raises(ValueError, match=r"actions have shape \(2,\); needed: .*\(2, 2\)"):
        env.step_joint(np.zeros(2, dtype=int))
    with pytest.raises(ValueError, match="num_envs is 0"):
        SyncVectorJointEnv(Pair, 0)
    with pytest.raises(TypeError, match="made a dict, which is not a JointEnv; derive"):
        SyncVectorJointEnv(dict, 1)
    one = Pair()
    with pytest.raises(ValueError, match="same object twice"):
        SyncVectorJointEnv(lambda: one, 2)
    names = iter(["a0", "b0"])
    with pytest.raises(ValueError, match=r"environment 1 declares possible_agents \['b0'\], environment 0 \['a0'\]"):
        SyncVectorJointEnv(lambda: Pair(agents=[next(names)]), 2)


def test_actions_are_elements_of_their_spaces_and_the_environments_own():
    got = []

    class Spy(Pair):
        def __init__(self):
            super().__init__()
            box, nested = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Dict(go=gym.spaces.Discrete(3, start=1))
            self.action_spaces = {"a0": box, "a1": nested}

        def step_joint(self, actions):
            assert all(self.action_spaces[a].contains(actions[a]) for a in self.possible_agents)
            got.append(actions)
            return JointStepResult(dict.fromkeys(self.possible_agents, 0.0), self._see(), False)

    env = SyncVectorJointEnv(Spy, 2)
    env.reset_joint()
    batch = {"a0": np.full((2, 2), 0.5, dtype=np.float32), "a1": {"go": np.array([1, 3])}}
    env.step_joint(batch)
    batch["a0"][:] = 9
    assert [a["a1"]["go"] for a in got] == [1, 3] and got[0]["a0"].tolist() == [0.5, 0.5]
    with pytest.raises(ValueError, match=r"actions are \['a0'\]; needed: a dict of arrays"):
        env.step_joint({"a0": batch["a0"]})
    with pytest.raises(ValueError, match=r"actions of agent 'a0' have shape \(2,\)"):
        env.step_joint({**batch, "a0": np.zeros(2)})


def test_stacked_actions_are_the_environments_own():
    got = []

    class Spy(Pair):
        def __init__(self):
            super().__init__()
            self.action_spaces = dict.fromkeys(self.possible_agents, gym.spaces.Box(-1, 1, (2,)))

        def step_joint(self, actions):
            got.append(actions["a1"])
            return JointStepResult(dict.fromkeys(self.possible_agents, 0.0), self._see(), False)

    env = SyncVectorJointEnv(Spy, 2)
    env.reset_joint()
    batch = np.full((2, 2, 2), 0.5, dtype=np.float32)
    env.step_joint(batch)
    batch[:] = 9
    assert env.stacked and [action.tolist() for action in got] == [[0.5, 0.5]] * 2


def test_extras():
    def change(env, r):
        r.extras = {"cost": {"a0": 1.0, "a1": 2.0}, "place": np.arange(3) + env.t}
        return r

    env = SyncVectorJointEnv(lambda: Pair(change=change), 4)
    env.reset_joint()
    extras = env.step_joint(np.zeros((2, 4), dtype=int)).extras
    assert extras["cost"].tolist() == [[1.0] * 4, [2.0] * 4]
    assert extras["place"].tolist() == [[1, 2, 3]] * 4
    with pytest.raises(ValueError, match=r"environment 1 returned extras \['cost'\], environment 0 \[\]"):
        run(replace("extras", {"cost": 1.0}))


def test_step_result():
    with pytest.raises(TypeError, match="done together with terminated"):
        JointStepResult({}, {}, terminated=True, done=True)
    with pytest.raises(TypeError, match="done together with"):
        JointStepResult({}, {}, truncated=True, done=True)
    with pytest.raises(TypeError, match="got no terminated"):
        JointStepResult({}, {})
    result = JointStepResult({}, {}, done=True)
    assert (result.terminated, result.truncated, result.extras) == (True, False, {})


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"possible_agents": None}, TypeError, "has no possible_agents"),
        ({"possible_agents": {"a0", "a1"}}, TypeError, "possible_agents is a set; needed: a list"),
        ({"possible_agents": []}, ValueError, "possible_agents is empty"),
        ({"possible_agents": ["a0", "a0"]}, ValueError, "an agent twice"),
        ({"possible_agents": [("a", 0)]}, TypeError, "type str or int"),
        ({"observation_spaces": gym.spaces.Discrete(2)}, TypeError, "observation_spaces is a Discrete; needed: a dict"),
        ({"action_spaces": {"a0": gym.spaces.Discrete(2)}}, ValueError, "action_spaces has no space for agent 'a1'"),
        ({"action_spaces": {"a0": 2, "a1": 3}}, TypeError, r"action_spaces\['a0'\] is 2; needed: a gymnasium space"),
        (
            {"observation_spaces": dict.fromkeys(("a0", "a1"), gym.spaces.Dict(says=gym.spaces.Text(3)))},
            TypeError,
            r"observation_spaces\['a0'\]\['says'\] is Text.*needed: Box",
        ),
    ],
)
def test_what_an_environment_declares(change, error, says):
    env = Pair()
    for name, value in change.items():
        setattr(env, name, value)
    with pytest.raises(error, match=says):
        check_spaces(env)


def test_agents_may_be_numbers():
    env = SyncVectorJointEnv(lambda: Pair(agents=(0, 1)), 2)
    env.reset_joint([0, 1])
    assert env.possible_agents == [0, 1] and env.stacked
    assert env.step_joint(np.array([[0, 0], [1, 1]])).rewards.tolist() == [[0, 0], [1, 1]]


def test_environment_without_optional_parts_says_so():
    class Bare(JointEnv):
        reset_joint = step_joint = None

    for call in ("state", "get_state", "render"):
        with pytest.raises(NotImplementedError, match="Bare .*override"):
            getattr(Bare(), call)()
    with pytest.raises(NotImplementedError, match="Bare cannot be restored"):
        Bare().set_state(None)
    assert Bare().close() is None
