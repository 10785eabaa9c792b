"""Global states and extras through both doors: the same arrays, in the right rows, agents in the batch's order."""

import copy

import gymnasium as gym
import numpy as np
import pytest
from ray.rllib.env.multi_agent_env import MultiAgentEnv

from tests.general.doors import Comers, Doors, assert_same_batches, column
from tests.general.runs import Lives
from tests.support import make_learner, tiny_config
from thrust_rllib import JointStepResult
from thrust_rllib.envs import JointEnv
from thrust_rllib.envs.fixed_length import FixedLengthEnv


class Counting(JointEnv):
    """Agents "b" and "a"; the state is (episode, step), the last action of each agent moves nothing.

    Episodes have `length` steps and are truncated, "a" alone terminates where `ends` says so. Extras: a cost of the
    team, one of each agent, and one of each pair.
    """

    def __init__(self, length=4, ends=False, space=None, change=None):
        self.possible_agents = ["b", "a"]
        self.observation_spaces = {a: gym.spaces.Box(-100, 100, (1,)) for a in self.possible_agents}
        self.action_spaces = {a: gym.spaces.Discrete(2) for a in self.possible_agents}
        self.length, self.ends, self.episode, self.t = length, ends, -1, 0
        self.state_space, self.change = space, change

    def reset_joint(self, seed=None):
        self.episode, self.t = self.episode + 1, 0
        return self._see()

    def _see(self):
        return {a: np.float32([self.t]) for a in self.possible_agents}

    def step_joint(self, actions):
        self.t += 1
        over = self.t == self.length
        extras = {
            "cost": self.t,
            "own": {"b": 10 + self.t, "a": 20.5 + self.t},
            "pair": {"b": {"a": 1.0 + self.t}, "a": {"b": 2.0 + self.t, "a": 3.0}},
        }
        flags = {"b": False, "a": over and self.ends}, {"b": over, "a": over and not self.ends}
        return JointStepResult(dict.fromkeys(self.possible_agents, 1.0), self._see(), *flags, extras)

    def state(self):
        state = np.float32([self.episode, self.t])
        if self.space_is_dict:
            return {"episode": state[:1], "late": int(self.t >= 2)}
        return state if self.change is None else self.change(self, state)

    @property
    def space_is_dict(self):
        return isinstance(self.state_space, gym.spaces.Dict)


def both(doors, steps):
    fast, episodes = doors.sample(steps)
    general = doors.joint_batch(episodes)
    assert_same_batches(fast, general)
    return fast, general


@pytest.mark.parametrize("ends", [False, True])
def test_the_state_is_the_one_before_the_step(ends):
    """Rows by hand; behind the row of an end stands the state before the reset."""
    doors = Doors(Counting, {"ends": ends}, num_envs=2, records_state=True)
    for _ in range(2):
        for batch in both(doors, 6):
            assert batch.global_state.shape == (6, 2, 2) and batch.bootstrap_state.shape == (4, 2)
    first, episode, step = batch.bootstrap_rows.tolist(), batch.global_state[:, 0, 0], batch.global_state[:, 0, 1]
    assert step.tolist() == [2, 3, 0, 1, 2, 3] and np.diff(episode).tolist() == [0, 1, 0, 0, 0]
    assert first == [2, 3, 10, 11]
    assert batch.bootstrap_state[::2, 1].tolist() == [4, 4]
    assert batch.bootstrap_state[::2, 0].tolist() == [episode[0], episode[-1]]


def test_nobody_pays_who_has_not_asked():
    def fail(env, state):
        raise AssertionError("state() was called")

    doors = Doors(Counting, {"change": fail}, num_envs=1)
    fast, general = both(doors, 9)
    assert fast.global_state is general.global_state is fast.bootstrap_state is general.bootstrap_state is None


def test_a_state_space_is_flattened():
    space = gym.spaces.Dict({"episode": gym.spaces.Box(0, 100, (1,)), "late": gym.spaces.Discrete(2)})
    doors = Doors(Counting, {"space": space}, num_envs=2, records_state=True)
    fast, _ = both(doors, 8)
    assert fast.global_state[:, 1].tolist() == [[0, 1, 0]] * 2 + [[0, 0, 1]] * 2 + [[1, 1, 0]] * 2 + [[1, 0, 1]] * 2


STATES = {
    "bucket_brigade": ({"scenario": "minimal_specialization"}, 1, 43),
    "spread": ({"max_cycles": 6}, 3, 6 + 4 * 4 + 2 * 8),
    "pettingzoo:mpe2.simple_spread_v3": ({"max_cycles": 6}, 2, 54),
    "pettingzoo:mpe2.simple_speaker_listener_v4": ({"max_cycles": 6}, 2, 14),
}


@pytest.mark.parametrize("env", STATES)
@pytest.mark.parametrize("policies", [None, "shared"])
def test_environments_with_a_state(env, policies):
    env_config, num_envs, size = STATES[env]
    if policies and "listener" in env:
        return  # its agents cannot share
    doors = Doors(env, env_config, num_envs=num_envs, records_state=True, policies=policies)
    for steps in (4, 13, 9):
        fast, _ = both(doors, steps)
        if env == "spread":
            size = fast.stream("agent_0").obs.shape[-1] * 3
        assert fast.global_state.shape == (steps, num_envs, size)
    if "spread" in env:  # its state is what all agents see
        seen = np.concatenate([fast.stream(f"agent_{i}").obs for i in range(3)], axis=-1)
        np.testing.assert_array_equal(fast.global_state, seen)
        following = np.concatenate([fast.stream(f"agent_{i}").bootstrap_obs for i in range(3)], axis=-1)
        np.testing.assert_array_equal(fast.bootstrap_state, following)


class Seen(Comers):
    """Comers with a state."""

    def state(self):
        return np.array([self.t, self.moved, *(a in self.lives for a in self.possible_agents)])


@pytest.mark.parametrize("num_envs", [1, 3])
def test_agents_that_come_and_go(num_envs):
    doors = Doors(Seen, num_envs=num_envs, records_state=True)
    for steps in (40, 1, 7):
        fast, episodes = doors.sample(steps)
        for e in range(num_envs) if steps == 40 else ():
            assert_same_batches(column(fast, e), doors.column(episodes, e))
        # Observations hold the step, too.
        for stream in fast.streams():
            acted = stream.present
            np.testing.assert_array_equal(stream.obs[acted][:, 1], fast.global_state[acted][:, 0])


class LivesWithState(Lives):
    """RLlib's own kind; the state is a method of its class."""

    def state(self):
        return [self.t, -self.t]


def test_rllibs_environments_have_one_if_their_class_has():
    doors = Doors(LivesWithState, num_envs=1, records_state=True)
    fast, _ = both(doors, 14)
    assert fast.global_state[:8, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    doors = Doors(Lives, num_envs=1, records_state=True)
    for runner in doors.runners.values():
        with pytest.raises(
            RuntimeError, match="(Lives|'Lives').* state.* failed: NotImplementedError: Lives has no method"
        ):
            runner.sample(num_timesteps=5, explore=False)


@pytest.mark.parametrize("door", ["arrays", "episodes"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda env, s: s if env.t < 2 else s[:1], ValueError, r"Counting.* state\(\) has 1 numbers"),
        (
            lambda env, s: s * (np.nan if env.t == 2 else 1), ValueError,
            "index 0, step 2.* global state is nan|global state is nan.* index 0, step 2",
        ),
        (lambda env, s: s / (env.t != 4), ValueError, "global state is (inf|nan)"),
        (lambda env, s: "north", TypeError, r"state\(\) returned a str that makes no array of numbers"),
        (lambda env, s: 1 // 0, RuntimeError, "ZeroDivisionError"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_states_that_must_reach_nobody(door, change, error, message):
    doors = Doors(Counting, {"change": change}, num_envs=2, records_state=True)
    with pytest.raises(error, match=message):
        doors.runners[door].sample(num_timesteps=14, explore=False)


def test_a_state_of_another_shape_than_declared():
    for door in ("arrays", "episodes"):
        doors = Doors(Counting, {"space": gym.spaces.Box(0, 1, (3,))}, num_envs=1, records_state=True)
        with pytest.raises(ValueError, match=r"state\(\) has shape \(2,\); state_space declares \(3,\)"):
            doors.runners[door].sample(num_timesteps=3, explore=False)


class OwnVector(FixedLengthEnv):
    """A vector that tells what its state was at the end of an episode only if it is kind."""

    kind = True

    def __init__(self, num_envs=1):
        super().__init__(num_envs, 2, gym.spaces.Box(0, 9, (1,)), gym.spaces.Discrete(2), episode_length=3)

    def _observe(self, envs):
        return np.broadcast_to(self.step_count[envs, None].astype(np.float32), (2, len(envs), 1))

    def _pay(self, actions):
        return np.zeros(self.num_envs)

    def state(self):
        return self.step_count[:, None] + 0.5

    def step_joint(self, actions):
        result = super().step_joint(actions)
        if not self.kind:
            result.final_state = None
        return result


class Unkind(OwnVector):
    kind = False


def test_a_vector_that_does_not_tell_the_state_at_the_end():
    fast, _ = both(Doors(OwnVector, num_envs=2, records_state=True), 7)
    assert fast.global_state[:, 0, 0].tolist() == [0.5, 1.5, 2.5, 0.5, 1.5, 2.5, 0.5]
    assert fast.bootstrap_state[::2, 0].tolist() == [3.5, 3.5, 1.5]
    doors = Doors(Unkind, num_envs=2, records_state=True)
    for door, words in (("arrays", "environment index 0, step 2"), ("episodes", "environment index 0, step 3")):
        with pytest.raises((ValueError, RuntimeError), match=words + r".*\n?.*final_state=\.\.\."):
            doors.runners[door].sample(num_timesteps=8, explore=False)


@pytest.mark.parametrize("policies", [None, "shared", {"one": ["a"], "two": ["b"]}])
def test_extras_stand_in_the_order_of_the_batch(policies):
    """Modules are sorted by id: not the environment's order of agents."""
    doors = Doors(Counting, num_envs=2, policies=policies)
    for batch in both(doors, 6):
        assert batch.agents == (("b", "a") if policies == "shared" else ("a", "b"))
        a, b = batch.agents.index("a"), batch.agents.index("b")
        t = np.array([1, 2, 3, 4, 1, 2])
        cost, own, pair = (batch.extras[name] for name in ("cost", "own", "pair"))
        assert cost.shape == (6, 2) and own.shape == (6, 2, 2) and pair.shape == (6, 2, 2, 2)
        np.testing.assert_array_equal(cost[:, 1], t)
        np.testing.assert_array_equal(own[:, b, 0], 10 + t)
        np.testing.assert_array_equal(own[:, a, 1], 20.5 + t)
        np.testing.assert_array_equal(pair[:, b, a, 0], 1 + t)
        np.testing.assert_array_equal(pair[:, a, b, 0], 2 + t)
        assert (pair[:, a, a] == 3).all() and (pair[:, b, b] == 0).all()


def test_extras_of_a_vector_in_the_order_of_the_batch():
    """More than ten agents: "agent_10" stands behind "agent_1"."""
    doors = Doors("spread", {"num_agents": 11, "max_cycles": 5}, num_envs=1)
    for batch in both(doors, 12):
        assert batch.agents[:3] == ("agent_0", "agent_1", "agent_10")
        x = np.stack([batch.stream(agent).obs[..., 2:4] for agent in batch.agents], axis=1)[:, :, 0]  # [T, N, 2]
        near = np.linalg.norm(x[:, :, None] - x[:, None], axis=-1) < 0.3
        near[:, range(11), range(11)] = False
        rows = [t for t in range(1, 12) if not batch.episode_start[t, 0]]  # told behind the step before
        before = [t - 1 for t in rows]
        np.testing.assert_array_equal(batch.extras["touching"][before, :, :, 0], near[rows])
        np.testing.assert_array_equal(batch.extras["collisions"][before, :, 0], near[rows].sum(axis=-1))
        assert near[rows].any()


class Costs(Comers):
    """Pairs of those that acted; the others are absent."""

    def step_joint(self, actions):
        result = super().step_joint(actions)
        numbers = {a: self.possible_agents.index(a) + 1 for a in actions}
        result.extras["pair"] = {a: {b: 10 * numbers[a] + numbers[b] for b in actions if b != a} for a in actions}
        return result


def test_pairs_of_absent_agents_are_zero():
    doors = Doors(Costs, num_envs=1)
    for batch in both(doors, 60):
        numbers = np.array([["cat", "ant", "bee"].index(agent) + 1 for agent in batch.agents])
        present = np.stack([batch.stream(agent).present for agent in batch.agents], axis=1)
        together = present[:, :, None] & present[:, None] & ~np.eye(3, dtype=bool)[..., None]
        expected = together * (10 * numbers[:, None] + numbers)[..., None]
        np.testing.assert_array_equal(batch.extras["pair"], expected)
        assert 0 < together.sum() < together.size


def test_fractions_that_come_later_are_kept():
    class Later(Counting):
        def step_joint(self, actions):
            result = super().step_joint(actions)
            result.extras = {"cost": 0 if self.t < 3 else 0.25, "own": {"a": 1, "b": self.t / 2}}
            return result

    for batch in both(Doors(Later, num_envs=1), 4):
        assert batch.extras["cost"][:, 0].tolist() == [0, 0, 0.25, 0.25]
        assert batch.extras["own"][:, batch.agents.index("b"), 0].tolist() == [0.5, 1, 1.5, 2]


def test_an_extra_that_changes_its_shape():
    class Changes(Counting):
        def step_joint(self, actions):
            result = super().step_joint(actions)
            result.extras = {"cost": np.zeros(self.t)}
            return result

    config = tiny_config(Changes, num_envs=1)
    for door in ("arrays", "episodes"):
        doors = Doors(Changes, num_envs=1)
        with pytest.raises(ValueError, match=r"step 1.*extras 'cost' now give .*return the same shape in every step"):
            if door == "arrays":
                doors.sample(4)
            else:
                doors.joint_batch(doors.runners[door].sample(num_timesteps=4))
    assert make_learner(config) is not None


class InTurn(MultiAgentEnv):
    """ "quick" acts in every step, "slow" in every third; both see the step, which is the state. Costs are extras."""

    def __init__(self, config=None):
        super().__init__()
        self.possible_agents = self.agents = ["quick", "slow"]
        self.observation_spaces = {a: gym.spaces.Box(0, 100, (1,)) for a in self.agents}
        self.action_spaces = {a: gym.spaces.Discrete(2) for a in self.agents}

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self._see(), {}

    def _see(self):
        acting = self.agents if self.t % 3 == 0 else ["quick"]
        return {a: np.float32([self.t]) for a in acting}

    def step(self, actions):
        infos = {"__common__": {"extras": {"cost": 1.0 * self.t, "own": {a: 1.0 * self.t for a in actions}}}}
        self.t += 1
        return self._see(), dict.fromkeys(actions, 1.0), {"__all__": self.t == 10}, {"__all__": False}, infos

    def state(self):
        return np.array([self.t, 7])


def test_rows_of_steps_that_were_open_where_a_fragment_was_cut():
    """They stand in the next fragment's batch, with the state and the extras of the step in which they began."""
    doors = Doors(InTurn, num_envs=1, records_state=True)
    late = 0
    for _ in range(6):
        batch = doors.joint_batch(doors.runners["episodes"].sample(num_timesteps=5, explore=False))
        for stream in batch.streams():
            acted = stream.present
            began = stream.obs[acted][:, 0]
            np.testing.assert_array_equal(batch.global_state[acted][:, 0], began)
            np.testing.assert_array_equal(batch.extras["cost"][acted], began)
            own = batch.extras["own"][:, batch.agents.index(stream.agent_id)]
            np.testing.assert_array_equal(own[acted], began)
        late += int((~batch.stream("quick").present & batch.stream("slow").present).sum())
        following = batch.global_state.reshape(-1, 2)[batch.bootstrap_rows] + [1, 0]
        np.testing.assert_array_equal(batch.bootstrap_state, following)
    assert late >= 2


@pytest.mark.parametrize("door", ["arrays", "episodes"])
@pytest.mark.parametrize("recorded_before", [True, False])
def test_a_runner_that_goes_on_records_on(door, recorded_before):
    """Also where the runner whose state it takes over recorded none."""
    doors = Doors("spread", {"max_cycles": 6}, num_envs=2, records_state=recorded_before)
    first = doors.runners[door]
    first.sample(num_timesteps=2 * 9, explore=False)
    other = Doors("spread", {"max_cycles": 6}, num_envs=2, records_state=True, seed=8)
    second = other.runners[door]
    second.set_sampling_state(first.get_sampling_state())
    second.set_state({"rl_module": first.get_state()["rl_module"]})
    sampled = [runner.sample(num_timesteps=2 * 9, explore=False) for runner in (first, second)]
    expected, found = sampled if door == "arrays" else map(doors.joint_batch, sampled)
    expected, found = (x[0] if isinstance(x, list) else x for x in (expected, found))
    seen = np.concatenate([expected.stream(f"agent_{i}").obs for i in range(3)], axis=-1)
    np.testing.assert_array_equal(found.global_state, seen)


@pytest.mark.parametrize("field", ["global_state", "bootstrap_state"])
def test_each_field_is_compared(field):
    fast, episodes = (doors := Doors(Counting, num_envs=1, records_state=True)).sample(6)
    general = copy.deepcopy(doors.joint_batch(episodes))
    getattr(general, field)[0, ..., 1] += 1
    with pytest.raises(AssertionError):
        assert_same_batches(fast, general)
    setattr(general, field, None)
    with pytest.raises(ValueError, match="fill both or none"):
        general.check()
    general.global_state, general.bootstrap_state = np.zeros((5, 1, 2)), np.zeros((2, 2))
    with pytest.raises(ValueError, match="global_state has leading shape"):
        general.check()
    general.global_state, general.bootstrap_state = np.zeros((6, 1, 2)), np.zeros((2, 3))
    with pytest.raises(ValueError, match="bootstrap_state has leading shape"):
        general.check()
