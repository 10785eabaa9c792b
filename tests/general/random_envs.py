"""Environments that are played from a script (`script.py`) and write down what happens in them; random scripts.

While it is played, an environment keeps a log of what each agent saw, did and was paid (`Journal`): the truth to which
batches are compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from ray.rllib.env.multi_agent_env import MultiAgentEnv

from tests.general.script import (
    FLAGS,
    MAX_STEPS,
    Episode,
    Kind,
    Life,
    Script,
    action_space,
    observation_space,
    observe,
    pay,
)
from thrust_rllib.envs.joint_env import JointEnv, JointStepResult

# --- the log ----------------------------------------------------------------------------------------------------------


@dataclass
class OwnStep:
    """An agent's own step: from its action to its next observation, or its end."""

    t: int
    observation: Any
    action: Any
    reward: float = 0.0


@dataclass
class Stream:
    """One agent in one episode: its own steps, and what there was before, between and after them.

    Args:
        steps: in the order in which it acted.
        early_reward: what it was paid before its first action.
        following: an observation on which it has not acted (yet): its next one, or its last one; None if there is none.
        end: "terminated", "truncated", or None: it goes on.
    """

    steps: list[OwnStep] = field(default_factory=list)
    early_reward: float = 0.0
    following: Any = None
    end: str | None = None

    def complete(self) -> int:
        """The number of complete own steps: the last one is open while the agent waits for its next observation."""
        open_step = bool(self.steps) and self.end is None and self.following is None
        return len(self.steps) - open_step


@dataclass
class EpisodeLog:
    """One episode: its number, {agent: stream}, and the number of environment steps played so far."""

    number: int
    streams: dict[str, Stream]
    steps: int = 0


class Journal:
    """All episodes that environments with this journal have begun; an episode's number is its place in the list."""

    def __init__(self) -> None:
        self.episodes: list[EpisodeLog] = []

    def __deepcopy__(self, memo: dict) -> Journal:
        return self  # a configuration copies its settings, and the log must stay one

    def begin(self, agents: tuple[str, ...]) -> EpisodeLog:
        self.episodes.append(EpisodeLog(len(self.episodes), {agent: Stream() for agent in agents}))
        return self.episodes[-1]


# --- the play ---------------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """What a step answers: dicts by agent with entries only where there is something to say."""

    observations: dict[str, Any]
    rewards: dict[str, float]
    ends: dict[str, str | None]  # everybody who lived in this step: its own flag
    over: bool


class Play:
    """Plays a script and logs it; the two environments below only translate."""

    def __init__(self, script: Script, journal: Journal) -> None:
        self.script, self.journal = script, journal
        self.begun = 0
        self.log: EpisodeLog | None = None

    def reset(self) -> dict[str, Any]:
        if self.log is not None:
            assert self.log.steps in (0, self.episode.length), "reset in the middle of an episode"
        self.episode = self.script.episodes[self.begun % len(self.script.episodes)]
        self.begun += 1
        self.log = self.journal.begin(self.script.agents)
        self.t = 0
        return self._show([n for n, life in enumerate(self.episode.lives) if life.at(0) == "A"])

    def step(self, actions: dict[str, Any]) -> Answer:
        t, lives, agents, streams = self.t, self.episode.lives, self.script.agents, self.log.streams
        assert set(actions) == {a for a, life in zip(agents, lives, strict=True) if life.at(t) == "A"}, (t, actions)
        for agent, action in actions.items():
            self._check_action(agent, action)
            streams[agent].steps.append(OwnStep(t, streams[agent].following, np.array(action)))
            streams[agent].following = None

        rewards = {a: pay(self.log.number, t, n) for n, a in enumerate(agents) if lives[n].at(t) in "A+"}
        for agent, reward in rewards.items():
            stream = streams[agent]
            if stream.steps:
                stream.steps[-1].reward += reward
            else:
                stream.early_reward += reward

        self.t = self.log.steps = t + 1
        over = self.t == self.episode.length
        seen, ends = [], {}
        for n, (agent, life) in enumerate(zip(agents, lives, strict=True)):
            if life.at(t) == " ":
                continue
            ends[agent] = life.end if self.t == len(life.timeline) else None
            if ends[agent] or over:
                streams[agent].end = "truncated" if (ends[agent] or self.episode.over) == "truncated" else "terminated"
                if life.last:
                    seen.append(n)
            elif life.at(self.t) == "A":
                seen.append(n)
        return Answer(self._show(seen), rewards, ends, over)

    def _show(self, numbers: list[int]) -> dict[str, Any]:
        shown = {}
        for n in numbers:
            kind, agent = self.script.kinds[n], self.script.agents[n]
            observation = observe(kind, self.log.number, self.t, n)
            assert observation_space(kind).contains(observation), (kind, observation)
            shown[agent] = self.log.streams[agent].following = observation
        return shown

    def _check_action(self, agent: str, action: Any) -> None:
        kind = self.script.kinds[self.script.agents.index(agent)]
        space = action_space(kind)
        assert space.contains(action), (agent, action, space)
        if kind.observation == "masked":
            mask = self.log.streams[agent].following["action_mask"]
            chosen = action[1] + 2 if kind.action == "multi" else action - space.start
            assert mask[chosen], (agent, action, mask)


class ScriptedMultiAgentEnv(MultiAgentEnv):
    """The script as an RLlib environment; `config` has "script" and "journal"."""

    def __init__(self, config: dict) -> None:
        script = config["script"]
        self.possible_agents = list(script.agents)
        self.agents = list(script.agents)
        self.observation_spaces = dict(zip(script.agents, map(observation_space, script.kinds), strict=True))
        self.action_spaces = dict(zip(script.agents, map(action_space, script.kinds), strict=True))
        self.play = Play(script, config["journal"])
        super().__init__()

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        return self.play.reset(), {}

    def step(self, action_dict: dict) -> tuple[dict, dict, dict, dict, dict]:
        answer = self.play.step(action_dict)
        flags = []
        for place in (0, 1):
            flagged = {agent: True for agent, end in answer.ends.items() if FLAGS[end][place]}
            flags.append({**flagged, "__all__": answer.over and FLAGS[self.play.episode.over][place]})
        return answer.observations, answer.rewards, *flags, {}


class ScriptedJointEnv(JointEnv):
    """The same script as a `JointEnv`: the end of the episode reaches every agent by a flag of its own."""

    def __init__(self, script: Script, journal: Journal) -> None:
        self.possible_agents = list(script.agents)
        self.observation_spaces = dict(zip(script.agents, map(observation_space, script.kinds), strict=True))
        self.action_spaces = dict(zip(script.agents, map(action_space, script.kinds), strict=True))
        self.play = Play(script, journal)

    def reset_joint(self, seed: int | None = None) -> dict[str, Any]:
        return self.play.reset()

    def step_joint(self, actions: Any) -> JointStepResult:
        answer = self.play.step(dict(actions))
        by_episode = self.play.episode.over if answer.over else None
        flags = {agent: FLAGS[end or by_episode] for agent, end in answer.ends.items()}
        terminated, truncated = ({agent: both[place] for agent, both in flags.items()} for place in (0, 1))
        return JointStepResult(answer.rewards, answer.observations, terminated, truncated, over=answer.over)


# --- random scripts ---------------------------------------------------------------------------------------------------


@st.composite
def scripts(draw: st.DrawFn, *, waits: bool = True, max_agents: int = 4) -> Script:
    """Random scripts; in every episode somebody acts in the first step.

    Args:
        draw: hypothesis' own.
        waits: False: agents act in every step from their birth to their end, and nobody else is paid.
        max_agents: up to `len(AGENTS)`.
    """
    kinds = tuple(draw(st.lists(_KINDS, min_size=1, max_size=max_agents)))
    return Script(kinds, tuple(draw(st.lists(_episodes(len(kinds), waits), min_size=1, max_size=3))))


_KINDS = st.builds(
    Kind,
    st.sampled_from(["box", "long", "square", "discrete"]),
    st.sampled_from(["discrete", "shifted", "multi", "continuous"]),
) | st.builds(Kind, st.just("masked"), st.sampled_from(["discrete", "shifted", "multi"]))


def _letters(alphabet: str, size: int) -> st.SearchStrategy[str]:
    # A list of choices: text would give each letter the same weight.
    return st.lists(st.sampled_from(alphabet), min_size=size, max_size=size).map("".join)


@st.composite
def _episodes(draw: st.DrawFn, num_agents: int, waits: bool) -> Episode:
    longest = draw(st.integers(1, MAX_STEPS))
    style = draw(st.sampled_from(["together", "free", "turns"])) if waits else "together"
    first = 0 if style == "turns" else draw(st.integers(0, num_agents - 1))  # acts in the first step
    timelines = []
    for n in range(num_agents):
        size = longest if draw(st.booleans()) else draw(st.integers(n == first, longest))
        born = 0 if n == first or style == "turns" else draw(st.integers(0, size))
        timeline = draw(_letters(".+" if waits else ".", born))
        if style == "turns":
            timeline += "".join("A" if t % num_agents == n else draw(st.sampled_from(".+")) for t in range(size))
        else:
            timeline += draw(_letters("AAA.+" if style == "free" else "A", size - born))
        timelines.append("A" + timeline[1:] if n == first else timeline)

    length = max(map(len, timelines))
    all_end_by_themselves = all("A" in timeline for timeline in timelines) and draw(st.booleans())
    over = None if all_end_by_themselves else draw(st.sampled_from(["terminated", "truncated", "both"]))
    lives = []
    for timeline in timelines:
        ends = ["terminated", "truncated", "both"] if timeline else [None]
        if len(timeline) == length and over is not None:
            ends = [None, *ends]
        end = draw(st.sampled_from(ends))
        needed = "A" in timeline and (end or over) in ("truncated", "both")
        lives.append(Life(timeline, end, last=needed or draw(st.booleans())))
    return Episode(tuple(lives), over)
