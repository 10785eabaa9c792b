"""`Seats`: agents that are named anew in each episode, under names that stay."""

import gymnasium as gym
import numpy as np
import pytest
from ray.rllib.env.multi_agent_env import MultiAgentEnv

from thrust_rllib.envs import Climbing, Seats, make_joint_env


class Hotel(MultiAgentEnv):
    """Two guests come first, a third after a step, and the first one leaves; each pays for its own action."""

    def __init__(self, config):
        super().__init__()
        self.observation_space = gym.spaces.Box(0.0, 100.0, (1,)) if config.get("spaces", True) else None
        self.action_space = gym.spaces.Discrete(5)
        self.known, self.played, self.closed = config.get("first", 0), [], False

    def _welcome(self, count):
        self.here += [f"guest_{self.known + i}" for i in range(count)]
        self.known += count

    def _see(self):
        return {guest: np.float32([int(guest.removeprefix("guest_"))]) for guest in self.here}

    def reset(self, *, seed=None, options=None):
        self.here, self.t = [], 0
        self._welcome(2)
        return self._see(), {"__common__": {"seed": seed}}

    def step(self, actions):
        self.played.append(actions)
        self.t += 1
        rewards = {guest: float(action) for guest, action in actions.items()}
        gone = self.here.pop(0) if self.t == 1 else None
        self._welcome(self.t == 1)
        ends = {"__all__": self.t == 3, **({gone: True} if gone else {})}
        return self._see(), rewards, ends, {"__all__": False}, {guest: {"t": self.t} for guest in self.here}

    def get_state(self):
        return {"known": self.known, "here": [*self.here], "t": self.t}

    def set_state(self, state):
        self.known, self.here, self.t = state["known"], [*state["here"]], state["t"]

    def render(self):
        return "picture"

    def close(self):
        self.closed = True


def made(**settings):
    return Seats({"env": Hotel, "seats": 3, **settings})


def test_agents_sit_where_they_were_named():
    env = made(env_config={"first": 40})
    assert env.possible_agents == ["seat_0", "seat_1", "seat_2"]
    for first in (40, 43):
        observations, infos = env.reset(seed=7)
        assert infos == {"__common__": {"seed": 7}}
        assert {seat: seen.item() for seat, seen in observations.items()} == {"seat_0": first, "seat_1": first + 1}
        observations, rewards, terminateds, truncateds, infos = env.step({"seat_1": 4, "seat_0": 2})
        assert env.env.played[-1] == {f"guest_{first}": 2, f"guest_{first + 1}": 4}
        assert {seat: seen.item() for seat, seen in observations.items()} == {"seat_1": first + 1, "seat_2": first + 2}
        assert rewards == {"seat_0": 2.0, "seat_1": 4.0}
        assert terminateds == {"__all__": False, "seat_0": True} and truncateds == {"__all__": False}
        assert infos == {"seat_1": {"t": 1}, "seat_2": {"t": 1}}
        assert env.seat_of == {f"guest_{first + i}": f"seat_{i}" for i in range(3)}


def test_a_state_remembers_who_sits_where():
    env, other = made(), made()
    env.reset()
    env.step({"seat_0": 0, "seat_1": 0})
    state = env.get_state()
    other.reset()
    other.set_state(state)
    actions = {"seat_1": 1, "seat_2": 3}
    assert str(other.step(actions)) == str(env.step(actions)) and other.env.played[-1] == {"guest_1": 1, "guest_2": 3}
    other.reset()
    assert state["seat_of"] == {"guest_0": "seat_0", "guest_1": "seat_1", "guest_2": "seat_2"}


def test_an_environment_without_a_state_says_so():
    class Forgetful(Hotel):
        get_state = set_state = None

    with pytest.raises(NotImplementedError, match="Forgetful has no get_state"):
        Seats({"env": Forgetful, "seats": 3}).get_state()


def test_everything_else_is_the_environments():
    env = make_joint_env(Seats, {"env": Hotel, "seats": 3})
    assert env.render() == "picture" and env.observation_spaces["seat_2"] == gym.spaces.Box(0.0, 100.0, (1,))
    env.close()
    assert env.env.env.closed


def test_one_agent_too_many_is_an_error():
    env = made(seats=2)
    env.reset()
    with pytest.raises(ValueError, match="Hotel names 'guest_2', agent number 3 of this episode; there are 2 seats"):
        env.step({"seat_0": 0, "seat_1": 0})


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"seats": 3}, ValueError, r"Seats got {'seats': 3}; needed: {'env': a MultiAgentEnv class"),
        ({"env": Hotel}, ValueError, "needed: .* 'seats': how many agents"),
        ({"env": Hotel, "seats": 0}, ValueError, "'seats': 0"),
        ({"env": Hotel, "seat": 3}, ValueError, "no setting 'seat'; did you mean 'seats'"),
        ({"env": Hotel, "seats": 3, "first": 4}, ValueError, "no setting 'first'.* belong into env_config"),
        ({"env": Hotel, "seats": 3, "env_config": {"spaces": False}}, ValueError, "Hotel has no observation_space for"),
        ({"env": lambda config: Climbing(), "seats": 3}, TypeError, "a Climbing; needed: a MultiAgentEnv"),
    ],
)
def test_mistakes(config, error, message):
    with pytest.raises(error, match=message):
        Seats(config)
