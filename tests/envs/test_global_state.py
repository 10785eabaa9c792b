"""Global states of single environments, of vectors and through the adapters; and extras of pairs."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from tests.envs.helpers import Pair
from tests.general.runs import Team
from thrust_rllib.envs import (
    JointEnvMultiAgentEnv,
    JointEnvParallel,
    PettingZooJointEnv,
    RLlibJointEnv,
    SingleJointEnv,
    SyncVectorJointEnv,
    TupleJointEnv,
    make_joint_env,
    make_vector_env,
)
from thrust_rllib.envs.extras import extra_axes, in_order, is_of_pairs
from thrust_rllib.envs.global_state import flat_state, flat_states, state_size

SPACE = spaces.Dict({"where": spaces.Box(-9, 9, (2, 2)), "who": spaces.Discrete(3), "what": spaces.MultiBinary(2)})
ELEMENT = {"where": [[1, 2], [3, 4]], "who": 2, "what": [0, 1]}
FLAT = spaces.flatten(SPACE, {"where": np.array([[1, 2], [3, 4]]), "who": 2, "what": np.array([0, 1])}).tolist()


def test_flat_states_by_hand():
    assert sorted(FLAT) == sorted([1, 2, 3, 4, 0, 0, 1, 0, 1])
    found = flat_state(SPACE, {k: np.array(v) for k, v in ELEMENT.items()}, "")
    assert found.dtype == np.float32 and found.tolist() == FLAT
    assert flat_state(spaces.Discrete(3), 1, "").tolist() == [0, 1, 0]
    assert flat_state(spaces.Box(0, 9, (2, 2)), np.arange(4).reshape(2, 2), "").tolist() == [0, 1, 2, 3]
    assert flat_state(None, [[1, 2], [3, 4]], "").tolist() == [1, 2, 3, 4]
    batch = {key: np.array([value, value]) for key, value in ELEMENT.items()}
    assert flat_states(SPACE, batch, 2, "").tolist() == [FLAT, FLAT]
    assert flat_states(spaces.Discrete(3), np.array([0, 2]), 2, "").tolist() == [[1, 0, 0], [0, 0, 1]]
    assert flat_states(None, np.arange(8).reshape(2, 2, 2), 2, "").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("space", "states", "error", "message"),
    [
        (None, [1.0], ValueError, r"here: state\(\) has shape \(1,\); needed: \[environments, ...\] = \[2, ...\]"),
        (spaces.Box(0, 1, (3,)), np.zeros((2, 4)), ValueError, r"shape \(2, 4\); needed: .* = \[2, 3\]"),
        (None, ["north", "south"], TypeError, "here: state.. returned a list that makes no array of numbers"),
        (spaces.Discrete(3), np.array([0, 5]), ValueError, "which is no element of state_space Discrete"),
        (spaces.Discrete(3), np.array([0]), ValueError, "needed: 2 elements of state_space Discrete"),
        (spaces.Discrete(3), np.array([0, -1]), ValueError, "which is no element of state_space Discrete"),
        (spaces.Discrete(3, start=1), np.array([1, 0]), ValueError, "which is no element of state_space Discrete"),
        (spaces.Discrete(3), np.array([0, 0.5]), ValueError, "which is no element of state_space Discrete"),
        (spaces.MultiDiscrete([3, 3]), np.array([[0, 0], [4, 0]]), ValueError, "no element of state_space Multi"),
        (
            spaces.Dict({"a": spaces.Box(0, 9, (2,)), "b": spaces.Box(0, 9, (3,))}),
            {"a": np.ones((2, 3)), "b": np.ones((2, 2))}, ValueError, "no element of state_space Dict",
        ),
        (None, None, TypeError, "state.. returned a NoneType that makes no array of numbers"),
        (None, [[1, 2], [3]], TypeError, "state.. returned a list that makes no array of numbers"),
        (None, np.zeros((2, 0)), ValueError, r"returned an array of shape \(2, 0\); return at least one number"),
    ],
)  # fmt: skip
def test_states_of_another_form(space, states, error, message):
    with pytest.raises(error, match=message):
        flat_states(space, states, 2, "here")


def test_what_a_returned_array_holds_is_kept():
    state = np.zeros(2, np.float32)
    kept = flat_states(None, state[:, None], 2, "")
    state += 1
    assert kept.tolist() == [[0], [0]]


class Stated(Pair):
    def state(self):
        return np.array([self.t, -self.t])


def test_a_vector_says_what_the_state_was_at_the_end():
    env = SyncVectorJointEnv(lambda: Stated(length=3), 2)
    env.reset_joint([0, 1])
    actions = np.zeros((2, 2), int)
    assert [env.step_joint(actions).final_state for _ in range(3)] == [None] * 3  # nobody asked
    env.record_states()
    results = [env.step_joint(actions) for _ in range(2)]
    assert env.state().tolist() == [[2, -2]] * 2 and results[-1].final_state is None
    assert env.step_joint(actions).final_state.tolist() == [[3, -3]] * 2
    assert env.state().tolist() == [[0, 0]] * 2


def test_a_state_space_of_several_parts_in_a_vector():
    class Parts(Pair):
        state_space = SPACE

        def state(self):
            return {**{k: np.array(v) for k, v in ELEMENT.items()}, "who": self.t}

    env = SyncVectorJointEnv(Parts, 2)
    env.reset_joint()
    env.step_joint(np.zeros((2, 2), int))
    assert env.state_space == spaces.flatten_space(SPACE) and state_size(env) == 9
    env.step_joint(np.zeros((2, 2), int))
    around = SyncVectorJointEnv(lambda: SingleJointEnv(SyncVectorJointEnv(Parts, 1)), 1)
    around.reset_joint()
    around.step_joint(np.zeros((2, 1), int))
    np.testing.assert_array_equal(around.state(), env.state()[:1])


@pytest.mark.parametrize("name", ["bucket_brigade", "spread"])
def test_a_single_environment_shows_its_end(name):
    vector, single = make_vector_env(name, {}, 1), make_joint_env(name)
    for env in (vector, single):
        env.record_states()
    vector.reset_joint([4])
    single.reset_joint(4)
    rng, over, ends = np.random.default_rng(0), False, 0
    for _ in range(60):
        actions = {a: rng.integers(getattr(s, "nvec", getattr(s, "n", 0))) for a, s in vector.action_spaces.items()}
        mine, theirs = single.step_joint(actions), vector.step_joint(np.stack(list(actions.values()))[:, None])
        over = mine.over
        np.testing.assert_array_equal(single.state(), (theirs.final_state if over else vector.state())[0])
        if over:
            state = single.get_state()
            single.reset_joint()
            np.testing.assert_array_equal(single.state(), vector.state()[0])
            single.set_state(state)
            np.testing.assert_array_equal(single.state(), theirs.final_state[0])
            single.reset_joint()
            ends += 1
    assert ends >= 2


def test_the_end_of_a_single_environment_is_not_known_where_nobody_asked():
    env = make_joint_env("spread", {"max_cycles": 1})
    env.reset_joint(0)
    env.step_joint(dict.fromkeys(env.possible_agents, 0))
    with pytest.raises(RuntimeError, match=r"the episode of Spread is over.* call record_states\(\) first"):
        env.state()
    assert len(env.reset_joint()) == 3 and env.state().shape == (54,)


class Together(gym.Env):
    """Two agents by tuples."""

    observation_space = spaces.Tuple([spaces.Box(-9, 9, (1,))] * 2)
    action_space = spaces.Tuple([spaces.Discrete(2)] * 2)
    state_space = spaces.Discrete(4)
    t = 0

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return (np.zeros(1, np.float32),) * 2, {}

    def step(self, actions):
        self.t += 1
        return (np.zeros(1, np.float32),) * 2, [0.0, 0.0], False, self.t == 3, {}

    def state(self):
        return self.t


class Alone(Together):
    state = np.zeros(3)  # as CartPole's: no method


class TeamState(Team):
    def state(self):
        return np.array([self.t])


def test_adapters_pass_states_on():
    env = SyncVectorJointEnv(lambda: TupleJointEnv(Together()), 1)
    env.record_states()
    env.reset_joint()
    finals = [env.step_joint(np.zeros((2, 1), int)).final_state for _ in range(3)]
    assert finals[2].tolist() == [[0, 0, 0, 1]] and env.state().tolist() == [[1, 0, 0, 0]]
    ways = [
        RLlibJointEnv(TeamState()),
        RLlibJointEnv(JointEnvMultiAgentEnv(RLlibJointEnv(TeamState()))),
        PettingZooJointEnv(JointEnvParallel(RLlibJointEnv(TeamState()))),
    ]
    for env in ways:
        env.reset_joint(0)
        env.step_joint({"a": 0, "b": 0})
        assert env.state().tolist() == [1]


@pytest.mark.parametrize(
    ("env", "size"),
    [
        ("bucket_brigade", 43), ("spread", 54), ("climbing", None), ("pettingzoo:mpe2.simple_spread_v3", 54),
        ("coverage", 769),
        (Team, None), (TeamState, 1), ("CartPole-v1", None), (lambda: TupleJointEnv(Alone()), None),
        (lambda: TupleJointEnv(Together()), 4),
        (lambda: PettingZooJointEnv(JointEnvParallel("climbing")), None),
    ],
)  # fmt: skip
def test_which_environments_have_one(env, size):
    made = make_vector_env(env, {}, 2)
    assert state_size(made) == size
    if size is not None:
        assert size == made.state().reshape(2, -1).shape[1]


def told(extras, length=4):
    def change(env, result):
        result.extras = extras(env)
        return result

    return SyncVectorJointEnv(lambda: Pair(length, change), 3)


def test_extras_of_pairs():
    env = told(lambda e: {"near": {"a0": {"a1": 0.5 + e.t}, "a1": {}}})
    env.reset_joint()
    env.step_joint(np.zeros((2, 3), int))
    near = env.step_joint(np.zeros((2, 3), int)).extras["near"]
    assert near.tolist() == [[[0] * 3, [2.5] * 3], [[0] * 3, [0] * 3]]
    env = told(lambda e: {"near": {"a0": {}, "a1": {}}})
    env.reset_joint()
    assert env.step_joint(np.zeros((2, 3), int)).extras["near"].shape == (2, 2, 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a0": {"a1": 1}}, "extras 'near' have no entry for agent 'a1', which acted"),
        ({"a0": {"a1": 1}, "a1": {"b": 1}}, r"extras 'near' of agent 'a1' name \['b'\]"),
        (
            {"a0": {"a1": np.ones(2)}, "a1": {}},
            r"extras 'near' of the pair 'a0', 'a1' have shape \(2,\); return one number",
        ),
    ],
)
def test_pairs_of_a_wrong_form(given, message):
    env = told(lambda e: {"near": given})
    env.reset_joint()
    with pytest.raises(ValueError, match="Pair, environment 0: " + message):
        env.step_joint(np.zeros((2, 3), int))


def test_pairs_go_through_a_single_environment():
    vector, single = make_vector_env("spread", {"num_agents": 8}, 1), make_joint_env("spread", {"num_agents": 8})
    vector.reset_joint([1])
    single.reset_joint(1)
    touched = 0
    for _ in range(25):
        mine = single.step_joint(dict.fromkeys(single.possible_agents, 1)).extras
        arrays = vector.step_joint(np.ones((8, 1), int)).extras
        assert is_of_pairs(mine["touching"]) and not is_of_pairs(mine["collisions"])
        for i, one in enumerate(single.possible_agents):
            assert mine["collisions"][one] == arrays["collisions"][i, 0]
            for j, other in enumerate(single.possible_agents):
                assert mine["touching"][one][other] == arrays["touching"][i, j, 0]
        assert mine["covered"] == arrays["covered"][0]
        touched += int(arrays["collisions"].sum())
    assert touched


def test_axes_and_order():
    assert [extra_axes(s, 2, 3) for s in ((3,), (3, 2), (2, 3), (2, 3, 4), (2, 2, 3), (3, 2, 2), ())] == [
        0,
        0,
        1,
        1,
        2,
        0,
        0,
    ]
    pairs = np.arange(12).reshape(1, 2, 2, 3)
    np.testing.assert_array_equal(in_order(pairs, [1, 0], 3), pairs[:, ::-1, ::-1])
    agents = np.arange(6).reshape(1, 2, 3)
    np.testing.assert_array_equal(in_order(agents, [1, 0], 3), agents[:, ::-1])
    team = np.arange(3)[None]
    assert in_order(team, [1, 0], 3) is team and in_order(agents, [0, 1], 3) is agents
