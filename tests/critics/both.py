"""The package's learner and the float64 loop side by side, from the same parameters and on the same data."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

import numpy as np

from tests.core.test_reference_update import space_of
from tests.critics.data import SIMPLE, Lives, team_rollout
from tests.critics.reference import CRITIC, Joined, Pooled, TeamLoop, TeamSettings, View
from tests.critics.support import APART, KINDS, WIDTHS, WithState, package_batch
from tests.recurrent.test_reference_update import reference_name
from tests.reference import ReferenceModule, ReferenceSettings
from tests.support import Declared, make_learner, parameters, scramble, tiny_config, update
from thrust_rllib import JointPPOConfig

TOLERANCE = 1e-5
LR = 2e-3
MINIBATCH = 18


@dataclass
class Case:
    """Options of the package, and what they are in the reference's words.

    Attributes:
        critic, credit: as the options.
        seed: of parameters and data; another one where a gradient that is 0 but for rounding would make Adam's step.
        net: `critic_config`.
        columns: of the state, that the critic sees; observations: whether it sees them.
        config: other options of `tiny_config`.
        loop, step: fields of `TeamSettings` and `ReferenceSettings`.
    """

    critic: str = "central"
    credit: str = "shared"
    agents: dict = field(default_factory=lambda: dict(APART))
    net: dict = field(default_factory=dict)
    observations: bool = True
    columns: tuple = ()
    config: dict = field(default_factory=dict)
    loop: dict = field(default_factory=dict)
    step: dict = field(default_factory=dict)
    lives: tuple[Lives, ...] = (SIMPLE,)
    with_state: bool = False
    seed: int = 0


def config_of(case: Case) -> JointPPOConfig:
    """Of the package."""
    spaces = [space_of(kind) for kind in KINDS.values()]
    first = case.lives[0]
    options = {"minibatch_size": MINIBATCH, "lr": LR, "iterate_all_minibatches": True, **case.config}
    if case.critic in ("central", "set"):
        options["critic_config"] = {"fcnet_hiddens": [9, 7], **case.net}
    return tiny_config(
        WithState if case.with_state else Declared,
        {
            "observation_spaces": [observation for observation, _ in spaces],
            "action_spaces": [action for _, action in spaces],
            "agents": list(KINDS),
        },
        policies={m: [a for a in KINDS if case.agents[a] == m] for m in sorted(set(case.agents.values()))},
        num_envs=first.envs,
        train_batch_size_per_learner=first.steps * first.envs,
        critic=case.critic,
        credit=case.credit,
        **options,
    )


def critic_name(name: str) -> str:
    """The reference's name of a parameter of the team's critic."""
    return re.sub(r"encoders\.width_(\d+)\.(\d+)", lambda x: f"encoder_{x[1]}_{int(x[2]) // 2}", reference_name(name))


class Both:
    """See the file.

    Args:
        case: see `Case`.
        **mistakes: fields of `TeamSettings` or `ReferenceSettings` in which the reference differs.
    """

    def __init__(self, case: Case, **mistakes):
        self.case = case
        self.learner = make_learner(config_of(case))
        scramble(self.learner, case.seed)
        self.first = parameters(self.learner)
        own_step = {k: v for k, v in mistakes.items() if k in ReferenceSettings.__dataclass_fields__}
        own_loop = {k: v for k, v in mistakes.items() if k not in own_step}
        modules = {
            m: ReferenceModule({reference_name(name): p.astype(np.float64) for name, p in self.first[m].items()})
            for m in sorted(set(case.agents.values()))
        }
        step = ReferenceSettings(**{"lr": LR, **case.step, **own_step})
        if case.loop.get("standardize") in ("minibatch", "team"):
            step = replace(step, standardize=case.loop["standardize"])
        critic = network = view = None
        if case.critic in ("central", "set"):
            critic = {critic_name(name): p for name, p in self.first[CRITIC].items()}
            view = View(tuple(KINDS), case.observations, case.columns)
            network = Joined()
            if case.critic == "set":
                network = Pooled(WIDTHS, case.net.get("pooling", "mean"), case.credit == "own")
        settings = TeamSettings(
            **{
                "gamma": dict.fromkeys(modules, 0.99),
                "lambda_": dict.fromkeys(modules, 0.95),
                "minibatch_size": MINIBATCH,
                "critic": case.critic,
                "credit": case.credit,
                "view": view,
                "network": network,
                "max_seq_len": case.net.get("max_seq_len"),
                **case.loop,
                **own_loop,
            },
            step=step,
        )
        self.reference = TeamLoop(modules, critic, {agent: case.agents[agent] for agent in KINDS}, settings)
        self.rng = np.random.default_rng(case.seed + 100)

    def data(self):
        """One update's batches, near the current policy of the reference."""
        return [team_rollout(self.rng, KINDS, lives, self.reference.trainer) for lives in self.case.lives]

    def run(self, updates: int = 2):
        """Trains both; (results of the package, statistics of the reference) of each update."""
        log = []
        for _ in range(updates):
            fixed = self.data()
            batches = [package_batch(x, self.case.agents, with_state=self.case.with_state) for x in fixed]
            log.append((update(self.learner, batches), self.reference.update(fixed)))
        return log

    def differences(self) -> dict[str, float]:
        """{module: the largest difference of any of its parameters}."""
        mine, theirs = parameters(self.learner), self.reference.trainer.parameters
        assert mine.keys() == theirs.keys()
        found = {}
        for m, named in mine.items():
            assert {critic_name(name) for name in named} == set(theirs[m])
            found[m] = max(float(np.abs(p - theirs[m][critic_name(name)]).max()) for name, p in named.items())
        return found

    def movement(self, module_id: str, part: str = "") -> float:
        """How far the parameters whose names begin with `part` moved."""
        now, before = parameters(self.learner)[module_id], self.first[module_id]
        return max(float(np.abs(now[name] - before[name]).max()) for name in now if name.startswith(part))
