"""Mistakes of environments in whole runs through the general door."""

from __future__ import annotations

import pytest

from tests.general.runs import Team, episode_runner, episodes_config


class Faulty(Team):
    """Makes one mistake in the third step."""

    def __init__(self, config):
        super().__init__(config)
        self.fault = config["fault"]

    def reset(self, *, seed=None, options=None):
        result = super().reset(seed=seed, options=options)
        if self.fault == "reset":
            raise OSError("no connection")
        return result[0] if self.fault == "reset alone" else result

    def step(self, actions):
        observations, rewards, terminated, truncated, infos = super().step(actions)
        if self.t == 3 and self.fault == "raises":
            raise ZeroDivisionError("by hand")
        if self.t == 3 and self.fault == "list":
            return list(observations.values()), rewards, terminated, truncated, infos
        if self.t == 3 and self.fault == "four":
            return observations, rewards, terminated, infos
        if self.t == 3 and self.fault == "agent":
            observations["ghost"] = observations["a"]
        if self.t == 3 and self.fault == "unpaid":
            del rewards["b"]
        return observations, rewards, terminated, truncated, infos


@pytest.mark.parametrize(
    "fault, error, message",
    [
        ("raises", RuntimeError, r" failed in a step \(runner 0\): .*ZeroDivisionError: by hand"),
        ("reset", RuntimeError, r" failed in its reset \(runner 0\): .*OSError: no connection"),
        ("list", TypeError, ", environment index 0, step 3 of its episode: .*returned observations as a list"),
        ("four", TypeError, ", environment index 0, step 3.*step returned 4 values; return .observations, rew"),
        ("reset alone", TypeError, ", environment index 0, step 0.*reset returned a dict; return .obs.*, infos"),
        ("agent", ValueError, ", environment index 0, step 3.*agent 'ghost' is not in possible_agents"),
        ("unpaid", ValueError, ", environment index 0, step .*agent 'b' acted but got no reward"),
    ],
)
def test_a_mistake_of_an_environment_is_told(fault, error, message):
    with pytest.raises(error, match=f"environment '.*Faulty'{message}"):
        episode_runner(episodes_config(Faulty, {"fault": fault})).sample()


def test_a_mistake_in_a_remote_runner_is_told(build):
    algo = build(episodes_config(Faulty, {"fault": "raises"}, runners={"num_env_runners": 1}))
    with pytest.raises(RuntimeError, match=r"Faulty' failed in a step \(runner 1\): .*ZeroDivisionError: by hand"):
        algo.train()
