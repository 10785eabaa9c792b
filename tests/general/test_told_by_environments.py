"""What environments tell beside observations and rewards: the same through both doors, or a clear error."""

import gymnasium as gym
import numpy as np
import pytest
from pettingzoo import AECEnv, ParallelEnv
from ray.rllib.env.multi_agent_env import MultiAgentEnv

from tests.general.doors import Doors
from tests.general.test_global_states import Counting, OwnVector, both
from tests.support import tiny_config
from thrust_rllib import JointStepResult
from thrust_rllib.envs import AECJointEnv, JointEnv, JointEnvMultiAgentEnv, JointEnvParallel, make_vector_env
from thrust_rllib.envs.difference import WithDifferenceRewards
from thrust_rllib.envs.global_state import state_size

SPREAD = {"max_cycles": 4}


def telling(extras):
    """`Counting` with other extras: a function of the step."""

    class Telling(Counting):
        def step_joint(self, actions):
            result = super().step_joint(actions)
            result.extras = extras(self.t)
            return result

    return Telling


def sample(doors, door, steps):
    sampled = doors.runners[door].sample(num_timesteps=steps * doors.runners[door].num_envs, explore=False)
    return sampled[0] if door == "arrays" else doors.joint_batch(sampled)


@pytest.mark.parametrize("door", ["arrays", "episodes"])
@pytest.mark.parametrize("num_envs", [1, 2])
@pytest.mark.parametrize(
    ("extras", "message"),
    [
        (lambda t: {"c": 1.0} if t % 2 else {}, r"extras.*\['c'\].* same names in every step"),
        (lambda t: {"c" if t % 2 else "d": 1.0}, r"extras.*\['d'\].*\['c'\].* same names in every step"),
        (lambda t: {"c": {"a": 1.0}}, "extras 'c' have no entry for agent 'b', which acted"),
        (lambda t: {"c": {"a": 1.0, "b": 1.0, "z": 1.0}}, r"extras 'c' name \['z'\]"),
        (lambda t: {"c": {"a": {"z": 1}, "b": {}}}, r"extras 'c' of agent 'a' name \['z'\]"),
        (lambda t: {"c": {"a": {"b": 1}, "b": 2}}, "extras 'c' of agent 'b' are a int; return a dict"),
        (lambda t: {"c": {"a": {"b": [1, 2]}, "b": {}}}, r"the pair 'a', 'b' have shape \(2,\)"),
        (lambda t: {"c": None}, r"extras 'c' are .*None.*, which make no array of numbers"),
        (lambda t: {"c": {"a": "x", "b": "y"}}, r"extras 'c' are .*x.*, which make no array of numbers"),
        (lambda t: {"c": {"a": [1.0], "b": [1.0, 2.0, 3.0]}}, r"extras 'c' (are .* same shape|now give .* same shape)"),
        (lambda t: [1], r"extras are a list; return a dict|AttributeError: 'list'"),
    ],
)
def test_extras_of_a_wrong_form(door, num_envs, extras, message):
    doors = Doors(telling(extras), num_envs=num_envs)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        sample(doors, door, 6)


@pytest.mark.parametrize("door", ["arrays", "episodes"])
@pytest.mark.parametrize(
    ("extras", "whose"),
    [
        (lambda t: {"c": [t, 2.0]}, "the team have shape .* numbers of the 2 agents"),
        (
            lambda t: {"c": {"a": [t, 2.0], "b": [3.0, 4.0]}},
            "each agent have shape .* of pairs of the 2 agents",
        ),
    ],
)
def test_vectors_that_would_be_taken_for_something_else(door, extras, whose):
    """Two agents, two environments and two numbers."""
    doors = Doors(telling(extras), num_envs=2)
    with pytest.raises((ValueError, RuntimeError), match=rf"extras 'c' of {whose}.* with shape \(1, 2\)"):
        sample(doors, door, 4)
    for num_envs in (1, 3):
        fast, _ = both(Doors(telling(extras), num_envs=num_envs), 6)
        value = fast.extras["c"] if fast.extras["c"].ndim == 3 else fast.extras["c"][:, fast.agents.index("a")]
        assert value.shape == (6, num_envs, 2)
        assert value[:, -1, 0].tolist() == [1, 2, 3, 4, 1, 2] and (value[..., 1] == 2).all()


class Pauses(JointEnv):
    """Nobody acts in the third step; then "late" comes."""

    def __init__(self):
        self.possible_agents = ["early", "late"]
        self.observation_spaces = {a: gym.spaces.Box(0, 9, (1,)) for a in self.possible_agents}
        self.action_spaces = {a: gym.spaces.Discrete(2) for a in self.possible_agents}

    def reset_joint(self, seed=None):
        self.t = 0
        return self._see()

    def _see(self):
        agent = ("early", "early", None, "late", "late")[self.t]
        return {agent: np.float32([self.t])} if agent else {}

    def step_joint(self, actions):
        self.t += 1
        ended = self.t in (2, 5)
        extras = {"own": {a: [1.0, self.t] for a in actions}, "pair": {a: {a: self.t} for a in actions}}
        seen = self._see() if self.t < 5 else {}
        return JointStepResult(dict.fromkeys(actions, 1.0), seen, ended, extras=extras, over=self.t == 5)


def test_steps_in_which_nobody_acts():
    fast, _ = both(Doors(Pauses, num_envs=1), 10)
    assert fast.extras["own"].shape == (10, 2, 1, 2) and fast.extras["pair"].shape == (10, 2, 2, 1)
    assert fast.extras["own"][:5].sum(axis=1)[:, 0, 1].tolist() == [1, 2, 0, 4, 5]
    assert fast.extras["pair"][:5].sum(axis=(1, 2, 3)).tolist() == [1, 2, 0, 4, 5]


def spread_with_differences(max_cycles=5):
    defaults = dict.fromkeys((f"agent_{i}" for i in range(3)), 0)
    return WithDifferenceRewards("spread", {"max_cycles": max_cycles}, default_actions=defaults)


@pytest.mark.parametrize("door", ["arrays", "episodes"])
def test_difference_rewards_through_both_doors(door):
    """All else is as without them, over the ends of episodes; a runner that takes over goes on to the bit."""
    doors = Doors(spread_with_differences, num_envs=2, records_state=True)
    plain = Doors("spread", {"max_cycles": 5}, num_envs=2, records_state=True)
    for _ in range(2):
        fast, _ = both(doors, 8)
        without, _ = both(plain, 8)
        assert np.ptp(fast.extras.pop("difference_reward")) > 0.01 and fast.extras.keys() == without.extras.keys()
        np.testing.assert_array_equal(fast.global_state, without.global_state)
        np.testing.assert_array_equal(fast.bootstrap_state, without.bootstrap_state)
        for agent in fast.agents:
            np.testing.assert_array_equal(fast.stream(agent).rewards, without.stream(agent).rewards)
    first = doors.runners[door]
    second = Doors(spread_with_differences, num_envs=2, records_state=True, seed=8).runners[door]
    second.set_sampling_state(first.get_sampling_state())
    second.set_state({"rl_module": first.get_state()["rl_module"]})
    sampled = [runner.sample(num_timesteps=2 * 8, explore=False) for runner in (first, second)]
    left, right = (x[0] if door == "arrays" else doors.joint_batch(x) for x in sampled)
    np.testing.assert_array_equal(left.extras["difference_reward"], right.extras["difference_reward"])
    np.testing.assert_array_equal(left.global_state, right.global_state)


class Zoo(ParallelEnv):
    """The state, an image, is one buffer that every step writes into. No `state_space`."""

    metadata = {"name": "zoo"}
    fails_at, made = 0, 0

    def __init__(self):
        type(self).made += 1
        self.possible_agents = ["a", "b"]
        self.image = np.zeros((2, 3), np.uint8)

    def observation_space(self, agent):
        return gym.spaces.Box(-9, 9, (1,))

    def action_space(self, agent):
        return gym.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents, self.t = ["a", "b"], 0
        return self._see(), {a: {} for a in self.agents}

    def _see(self):
        return {a: np.float32([self.t]) for a in self.agents}

    def step(self, actions):
        self.t += 1
        seen, over = self._see(), {a: self.t == 4 for a in self.agents}
        if self.t == 4:
            self.agents = []
        return seen, dict.fromkeys(seen, 1.0), dict.fromkeys(seen, False), over, {a: {} for a in seen}

    def state(self):
        if type(self).fails_at and self.t == type(self).fails_at and self.made <= 3:
            raise OSError("the camera is gone")
        self.image[:] = 250 + self.t
        return self.image


def test_a_buffer_that_is_written_into_again():
    for batch in both(Doors(Zoo, num_envs=2, records_state=True), 6):
        assert batch.global_state.shape == (6, 2, 6) and batch.global_state.dtype == np.float32
        assert batch.global_state[:, 1, 5].tolist() == [250, 251, 252, 253, 250, 251]
        assert batch.bootstrap_state[:, 0].tolist() == [254, 254, 252, 252]


@pytest.mark.parametrize("door", ["arrays", "episodes"])
def test_environments_that_fail_in_state_are_made_anew(door):
    class Fails(Zoo):
        fails_at, made = 3, 0

        def __init__(self):
            super().__init__()
            self.made = type(self).made

    doors = Doors(Fails, num_envs=1, records_state=True)
    Fails.made = 2  # the runners' environments fail, what is made from now on does not
    for env in (doors.runners["arrays"].env.envs[0].env, doors.runners["episodes"].env.envs[0].env.env):
        env.made = 0
    batch = sample(doors, door, 6)
    assert batch.global_state[:, 0, 0].tolist() == [250, 251, 252, 253, 250, 251]
    assert [message for message in doors.runners[door].env_restarts.pop_told() if "the camera is gone" in message]


class Attribute(Zoo):
    """As in PettingZoo's own example: something else is called `state`."""

    state = property(lambda self: {"a": 3})


class JointAttribute(Counting):
    state = np.zeros(3)


class AECState(AECEnv):
    """Three agents in turns; all see the step, which is the state. One is truncated early, the others at the end."""

    metadata = {"name": "turns"}

    def __init__(self):
        self.possible_agents = ["x", "y", "z"]

    def observation_space(self, agent):
        return gym.spaces.Box(0, 99, (1,))

    def action_space(self, agent):
        return gym.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents, self.t = [*self.possible_agents], 0
        self.rewards, self._cumulative_rewards = dict.fromkeys(self.agents, 0.0), dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self.infos = {a: {} for a in self.agents}
        self.agent_selection = "x"

    def observe(self, agent):
        return np.float32([self.t])

    def step(self, action):
        mover = self.agent_selection
        following = self.agents[(self.agents.index(mover) + 1) % len(self.agents)]
        if self.truncations[mover]:
            following = following if len(self.agents) > 1 else None
            self._was_dead_step(action)
        else:
            self.t += 1
            self.rewards = {a: 0.0 if self.truncations[a] else 1.0 for a in self.agents}
            if self.t == 5:
                self.truncations["y"] = True
            if self.t == 11:
                self.truncations = dict.fromkeys(self.agents, True)
        self.agent_selection = following if following in self.agents else next(iter(self.agents), None)

    def state(self):
        return np.array([self.t, 7])


class AECAttribute(AECState):
    state = property(lambda self: {"a": 3})


@pytest.mark.parametrize("env", [Attribute, JointAttribute, AECAttribute, OwnVector])
def test_only_a_method_is_a_state(env):
    assert (state_size(make_vector_env(env, {}, 2)) is None) == (env is not OwnVector)


def test_the_states_of_turns():
    """Rows stand at the step in which their agent acted, with the state before it; what follows is the next one."""
    doors = Doors(lambda: AECJointEnv(AECState()), num_envs=1, records_state=True, runners={"sampling": "episodes"})
    ends = 0
    for _ in range(5):
        batch = doors.joint_batch(doors.runners["episodes"].sample(num_timesteps=7, explore=False))
        for stream in batch.streams():
            acted = stream.present
            np.testing.assert_array_equal(stream.obs[acted][:, 0], batch.global_state[acted][:, 0])
            ends += int(stream.truncated.sum())
        before = batch.global_state.reshape(-1, 2)[batch.bootstrap_rows]
        np.testing.assert_array_equal(batch.bootstrap_state, before + [1, 0])
    assert ends > 4


class ForRLlib(JointEnvMultiAgentEnv):
    def __init__(self, config=None):
        super().__init__("spread", SPREAD)


class ForPettingZoo(JointEnvParallel):
    def __init__(self):
        super().__init__("spread", **SPREAD)


class WithoutSpace(JointEnvParallel):
    def __init__(self):
        super().__init__(OwnVector)


@pytest.mark.parametrize("env", [ForRLlib, ForPettingZoo, WithoutSpace])
def test_own_environments_inside_other_libraries_kinds(env):
    """Also their extras and the states at the ends of their episodes."""
    fast, _ = both(Doors(env, num_envs=2, records_state=True), 10)
    if env is WithoutSpace:
        assert fast.bootstrap_state[:2, 0].tolist() == [3.5, 3.5]
        return
    plain = Doors("spread", SPREAD, num_envs=2, records_state=True).sample(10)[0]
    np.testing.assert_array_equal(fast.global_state, plain.global_state)
    np.testing.assert_array_equal(fast.bootstrap_state, plain.bootstrap_state)
    if env is ForRLlib:
        assert fast.extras.keys() == plain.extras.keys() and len(fast.extras) == 3
        for name, values in plain.extras.items():
            np.testing.assert_array_equal(fast.extras[name], values)


class OwnInfos(MultiAgentEnv):
    """Calls something of its own "state", among the infos that belong to no agent."""

    def __init__(self, config=None):
        super().__init__()
        self.possible_agents = self.agents = ["a", "b"]
        self.observation_spaces = {a: gym.spaces.Box(0, 99, (1,)) for a in self.agents}
        self.action_spaces = {a: gym.spaces.Discrete(2) for a in self.agents}

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self._see(), {"__common__": {"state": "morning"}}

    def _see(self):
        return {a: np.float32([self.t]) for a in self.agents}

    def step(self, actions):
        self.t += 1
        infos = {"__common__": {"state": "noon", "extras": {"cost": 1.0 * self.t, "own": {"a": 1, "b": self.t / 2}}}}
        return self._see(), dict.fromkeys(actions, 1.0), {"__all__": self.t == 4}, {"__all__": False}, infos


def test_infos_of_rllibs_environments():
    fast, general = both(Doors(OwnInfos, num_envs=2), 6)
    assert fast.global_state is general.global_state is None
    assert fast.extras["cost"][:, 0].tolist() == [1, 2, 3, 4, 1, 2]
    assert fast.extras["own"][:, 1, 1].tolist() == [0.5, 1, 1.5, 2, 0.5, 1]


class Parts(OwnVector):
    """A state of parts; where nothing has ended, what `final_state` holds is no element of its space."""

    def __init__(self, num_envs=1):
        super().__init__(num_envs)
        self.state_space = gym.spaces.Dict({"x": gym.spaces.Box(0, 9, (1,)), "z": gym.spaces.Discrete(4, start=1)})
        self.offset = np.arange(num_envs)

    def reset_joint(self, seeds=None):
        super().reset_joint(seeds)
        self.step_count[:] = self.offset % 3
        return self._observe(np.arange(self.num_envs))

    def state(self):
        return {"x": self.step_count[:, None] + 0.5, "z": self.step_count + 1}

    def step_joint(self, actions):
        result = super().step_joint(actions)
        if result.final_state is not None:
            result.final_state["z"][~np.broadcast_to(result.truncated, (2, self.num_envs))[0]] = 99
        return result


def test_only_ends_of_episodes_are_read_of_the_final_state():
    doors = Doors(Parts, num_envs=2, records_state=True)
    batch = sample(doors, "arrays", 5)
    assert batch.global_state[:, 1].tolist()[:3] == [[1.5, 0, 1, 0, 0], [2.5, 0, 0, 1, 0], [0.5, 1, 0, 0, 0]]
    ended = batch.bootstrap_state[batch.bootstrap_rows < 8]
    assert len(ended) == 2 and (ended == [3.5, 0, 0, 0, 1]).all()


@pytest.mark.parametrize(
    "settings", [{"critic": "central", "critic_config": {"input": "observations"}}, {"critic": "set"}]
)
def test_a_state_that_nobody_reads_is_not_asked_for(settings):
    def fail(env, state):
        raise AssertionError("state() was called")

    config = tiny_config(Counting, {"change": fail}, num_envs=1, **settings)
    config.validate()
    assert not config.records_state
    config = tiny_config(Counting, {"change": fail}, num_envs=1, critic="central")
    with pytest.raises(RuntimeError, match=r"state\(\) was called"):
        config.validate()
