"""Whole updates of agents that exchange messages equal an independent float64 loop, parameter by parameter."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import gymnasium as gym
import numpy as np
import pytest
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from tests.communicating.update_reference import SpeakingLoop, spoken_rollout
from tests.critics.both import critic_name
from tests.critics.data import Lives
from tests.critics.reference import CRITIC, Joined, TeamSettings, View
from tests.critics.support import package_batch
from tests.reference import ReferenceModule, ReferenceSettings
from tests.support import Declared, largest_difference, make_learner, parameters, scramble, tiny_config, update

TOLERANCE, LR, MINIBATCH, WIDTH = 1e-5, 2e-3, 18, 3
AGENTS = ("cat", "ant", "bee")
ONE = dict.fromkeys(AGENTS, "m")
GROUPS = {"cat": "right", "ant": "left", "bee": "right"}  # the modules' order is not that of the links
APART = {agent: agent for agent in AGENTS}
DEAF = {"cat": "speaks", "ant": "deaf", "bee": "speaks"}
MODEL = {"message_rounds": 2, "message_size": 6, "encoder_hiddens": [7]}
GRU = {"cell": "gru", "cell_size": 5}
MESSAGE_GRU = {"cell": "message_gru"}
RAGGED = Lives(gaps=0.2, deaths=0.2, padding=True)
EVERYTHING = Lives(steps=13, gaps=0.2, deaths=0.15, cuts=(4, 9), empty=0.1, padding=True)


def in_sequences(lives, length=4):
    return dataclasses.replace(lives, max_seq_len=length)


@dataclass
class Case:
    """Options of the package, and what they are in the reference's words.

    Attributes:
        agents: {agent: module}; the module "deaf" does not exchange messages.
        model: more of the `model_config`.
        critic, credit: as the options.
        config: other options of `tiny_config`.
        loop, step: fields of `TeamSettings` and `ReferenceSettings`.
        lives: of each batch.
        seed: of parameters and data.
    """

    agents: dict = field(default_factory=lambda: dict(GROUPS))
    model: dict = field(default_factory=dict)
    critic: str = "independent"
    credit: str = "own"
    config: dict = field(default_factory=dict)
    loop: dict = field(default_factory=dict)
    step: dict = field(default_factory=dict)
    lives: tuple[Lives, ...] = (RAGGED,)
    seed: int = 0


def config_of(case):
    n, first = len(AGENTS), case.lives[0]
    space = gym.spaces.Dict(
        {"links": gym.spaces.Box(0, 1, (n,)), "observations": gym.spaces.Box(-np.inf, np.inf, (WIDTH,))}
    )
    length = {"max_seq_len": first.max_seq_len} if "cell" in case.model else {}
    model = {**MODEL, **case.model, **length}
    options = {"minibatch_size": MINIBATCH, "lr": LR, "iterate_all_minibatches": True, **case.config}
    if case.critic == "central":
        options["critic_config"] = {"fcnet_hiddens": [9, 7]}
    policies = {m: [a for a in AGENTS if case.agents[a] == m] for m in sorted(set(case.agents.values()))}
    config = tiny_config(
        Declared,
        {"observation_spaces": [space] * n, "action_spaces": [gym.spaces.Discrete(3)] * n, "agents": list(AGENTS)},
        policies=policies,
        num_envs=first.envs,
        train_batch_size_per_learner=first.steps * first.envs,
        critic=case.critic,
        credit=case.credit,
        model=model,
        **options,
    )
    if "deaf" in policies:
        plain = {"fcnet_hiddens": [5], **(GRU | length if length else {})}
        specs = {m: RLModuleSpec(model_config=plain if m == "deaf" else model) for m in policies}
        config.rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=specs), model_config={})
    return config


class Both:
    """The package's learner and the float64 loop, from the same parameters and on the same data.

    Args:
        case: see `Case`.
        **mistakes: fields of `TeamSettings`, or arguments of `SpeakingLoop`, in which the reference differs.
    """

    def __init__(self, case, **mistakes):
        self.case = case
        self.learner = make_learner(config_of(case))
        scramble(self.learner, case.seed)
        self.first = parameters(self.learner)
        modules = {
            m: ReferenceModule({name: x.astype(np.float64) for name, x in self.first[m].items()})
            for m in sorted(set(case.agents.values()))
        }
        critic = None
        if case.critic == "central":
            critic = {critic_name(name): x for name, x in self.first[CRITIC].items()}
        heard = {"rounds": 2, "aggregation": case.model.get("aggregation", "max")}
        heard |= {k: v for k, v in mistakes.items() if k in heard}
        settings = TeamSettings(
            **{
                "gamma": dict.fromkeys(modules, 0.99),
                "lambda_": dict.fromkeys(modules, 0.95),
                "minibatch_size": MINIBATCH,
                "critic": case.critic,
                "credit": case.credit,
                "view": View(AGENTS) if critic else None,
                "network": Joined() if critic else None,
                **case.loop,
                **{k: v for k, v in mistakes.items() if k not in heard},
            },
            step=ReferenceSettings(**{"lr": LR, **case.step}),
        )
        self.reference = SpeakingLoop(modules, critic, {a: case.agents[a] for a in AGENTS}, settings, **heard)
        self.rng = np.random.default_rng(case.seed + 100)

    def run(self, updates=2, mistake=lambda fixed: fixed):
        """Trains both; `mistake` changes what the reference sees."""
        for _ in range(updates):
            data = [
                spoken_rollout(self.rng, self.reference.agents, WIDTH, lives, self.reference)
                for lives in self.case.lives
            ]
            batches = [package_batch(fixed, self.case.agents, with_state=False) for fixed in data]
            results = update(self.learner, batches)
            assert results["__all_modules__"]["num_non_finite_minibatches"] == 0
            self.reference.update([mistake(fixed) for fixed in data])
        return self

    def differences(self):
        """{module: the largest difference of any of its parameters}."""
        theirs = self.reference.trainer.parameters
        found = {}
        for m, named in parameters(self.learner).items():
            name_of = critic_name if m == CRITIC else str
            assert {name_of(name) for name in named} == set(theirs[m])
            mine = {name_of(name): x for name, x in named.items() if not name.endswith("key.bias")}
            # That adds the same to all scores of a softmax: its gradient is 0 but for rounding, which Adam enlarges.
            found[m] = largest_difference(mine, {name: theirs[m][name] for name in mine})
        return found


CASES = {
    "one module": Case(ONE),
    "groups": Case(),
    "each its own, two ragged batches": Case(APART, lives=(EVERYTHING, Lives(6, 2, gaps=0.3))),
    "one that does not speak": Case(DEAF),
    "mean of messages and distances": Case(model={"aggregation": "mean", "message_content": "both"}),
    "attention": Case(model={"aggregation": "attention"}),
    "memory behind the messages": Case(model=GRU, lives=(in_sequences(EVERYTHING),)),
    "message_gru": Case(model=MESSAGE_GRU, lives=(in_sequences(EVERYTHING),)),
    "message_gru, one module, attention": Case(
        ONE, {**MESSAGE_GRU, "aggregation": "attention"}, lives=(in_sequences(RAGGED, 5),)
    ),
    "message_gru, one that does not speak": Case(DEAF, MESSAGE_GRU, lives=(in_sequences(RAGGED),)),
    "message_gru, whole rollouts": Case(APART, MESSAGE_GRU, lives=(in_sequences(Lives(9, 3, gaps=0.2), 9),)),
    "mean critic, shared": Case(critic="mean", credit="shared"),
    "mean critic, difference": Case(critic="mean", credit="difference", lives=(EVERYTHING,)),
    "message_gru, mean critic, difference": Case(
        model=MESSAGE_GRU, critic="mean", credit="difference", lives=(in_sequences(EVERYTHING),)
    ),
    "independent, difference": Case(APART, credit="difference"),
    "central, difference": Case(critic="central", credit="difference"),
    "message_gru, central": Case(model=MESSAGE_GRU, critic="central", credit="shared", lives=(in_sequences(RAGGED),)),
    "critic_lr": Case(config={"critic_lr": 5e-3}, step={"critic_lr": 5e-3}),
    "clip_jointly": Case(config={"clip_jointly": True}, loop={"clip_jointly": True}),
    "raw targets, no bootstrap": Case(
        config={"value_normalization": False, "gae_bootstrap": "zero"},
        loop={"value_normalization": False, "bootstrap": "zero"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_updates_equal_the_float64_loop(name):
    both = Both(CASES[name]).run()
    assert max(both.differences().values()) < TOLERANCE, both.differences()
    now = parameters(both.learner)
    for m, before in both.first.items():
        for part in ("messages", "updates", "encoder", "policy_head"):
            mine = {k: x for k, x in before.items() if k.startswith(part)}
            assert not mine or largest_difference(mine, {k: now[m][k] for k in mine}) > 100 * TOLERANCE


def links_to_nobody(fixed):
    """Nobody hears anybody."""
    return _with_obs(fixed, lambda x: np.concatenate([0 * x[..., : len(AGENTS)], x[..., len(AGENTS) :]], -1))


def deaf_behind(fixed):
    """What follows a row is seen without links."""
    streams = {
        a: dataclasses.replace(
            x, following=np.concatenate([0 * x.following[..., : len(AGENTS)], x.following[..., len(AGENTS) :]], -1)
        )
        for a, x in fixed.streams.items()
    }
    return dataclasses.replace(fixed, streams=streams)


def forgets(fixed):
    """Memories enter each sequence as zeros."""
    return dataclasses.replace(fixed, state_in={a: 0 * x for a, x in fixed.state_in.items()})


def _with_obs(fixed, change):
    streams = {a: dataclasses.replace(x, obs=change(x.obs)) for a, x in fixed.streams.items()}
    return dataclasses.replace(fixed, streams=streams)


@pytest.mark.parametrize(
    "name, mistake",
    [("groups", links_to_nobody), ("groups", deaf_behind), ("message_gru", deaf_behind), ("message_gru", forgets)],
)
def test_the_comparison_sees_who_hears_whom(name, mistake):
    assert max(Both(CASES[name]).run(1, mistake).differences().values()) > 3 * TOLERANCE


def test_the_comparison_sees_another_way_to_listen():
    both = Both(CASES["groups"], aggregation="mean").run(1)
    assert max(both.differences().values()) > 3 * TOLERANCE
