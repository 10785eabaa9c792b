"""What JointEpisode refuses: its messages say which environment, which step and which agent."""

from __future__ import annotations

import pytest

from tests.general.joint_episodes import start, step

WHERE = r"^environment 'village', environment index 5, step {step} of its episode: agent '{agent}' "


def two_steps():
    """a0 is alive, a1 has ended in step 1, a2 was not seen yet."""
    episode = start(["a0", "a1"])
    episode.add_env_step(**step(["a0", "a1"], ["a0", "a1"], {"a0": 1.0, "a1": 1.0}, ended=["a1"], t=1))
    return episode


@pytest.mark.parametrize(
    ("agent", "told", "arguments"),
    [
        ("a1", r"has ended and still got the reward 0.0; leave an agent out", {"rewards": {"a0": 1.0, "a1": 0.0}}),
        ("a1", r"has ended and still got an observation; leave", {"observations": ["a0", "a1"]}),
        (
            "a1",
            r"has ended and still got an observation and the reward 2.0",
            {"observations": ["a0", "a1"], "rewards": {"a0": 1.0, "a1": 2.0}},
        ),
        ("a1", r"has ended and still got an action", {"actions": ["a0", "a1"], "rewards": {"a0": 1.0}}),
        ("a0", r"acted but got no reward; return a number for every agent that acted \(0.0", {"rewards": {}}),
        ("a0", r"was truncated without a last observation.*return one, or let it terminate", {
            "observations": [], "cut": ["a0"]}),
        ("a0", r"was truncated without a last observation", {"observations": [], "over": "truncated"}),
        ("a0", r"was observed again before it acted", {"actions": [], "rewards": {}}),
        ("a0", r"got the reward None; return one number", {"rewards": {"a0": None}}),
        ("a0", r"got the reward \[1, 2\]; return one number", {"rewards": {"a0": [1, 2]}}),
    ],
)  # fmt: skip
def test_what_is_refused_and_where_it_happened(agent, told, arguments):
    defaults = {"observations": ["a0"], "actions": ["a0"], "rewards": {"a0": 1.0}}
    episode = two_steps()
    # The step that is being added is counted, as environments and messages of the fast door do.
    with pytest.raises(ValueError, match=WHERE.format(step=2, agent=agent) + told):
        episode.add_env_step(**step(**{**defaults, **arguments}, t=2))


@pytest.mark.parametrize("field", ["observations", "rewards"])
def test_an_unknown_agent_is_refused(field):
    unknown = {"observations": ["a0", "zed"]} if field == "observations" else {"rewards": {"a0": 1.0, "zed": 1.0}}
    arguments = {"observations": ["a0"], "actions": ["a0"], "rewards": {"a0": 1.0}, **unknown}
    with pytest.raises(
        ValueError, match=r"'village'.*index 5, step \d.*agent 'zed' is not in possible_agents.*declare"
    ):
        two_steps().add_env_step(**step(**arguments, t=2))


def test_an_unknown_agent_is_refused_at_the_reset():
    with pytest.raises(ValueError, match=r"'village'.*index 5, step 0.*agent 'zed' is not in possible_agents"):
        start(["zed"])


def test_an_episode_that_is_over_neither_grows_nor_goes_on():
    episode = two_steps()
    episode.add_env_step(**step(["a0"], ["a0"], {"a0": 1.0}, over="terminated", t=2))
    with pytest.raises(ValueError, match=r"environment 'village', environment index 5.*over, and still a step"):
        episode.add_env_step(**step(["a0"], ["a0"], {"a0": 1.0}, t=3))
    with pytest.raises(ValueError, match=r"environment 'village', environment index 5.*cannot go on in another"):
        episode.cut()
