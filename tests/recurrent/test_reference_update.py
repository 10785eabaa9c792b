"""Three updates of the learner on hand-made sequences equal an independent float64 loop over time."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from tests.core import test_reference_update as feed_forward
from tests.core.reference_loop import AgentKind
from tests.core.test_reference_update import check_statistics
from tests.recurrent.reference import FixedSequences, RecurrentLoop, RecurrentSettings
from tests.recurrent.reference_data import Shape, fixed_sequences
from tests.reference import ReferenceModule, ReferenceSettings
from tests.support import declared_config, make_learner, parameters, scramble, update
from thrust_rllib import GRUModule, LSTMModule, MLPModule, RedundancyPenalty

TOLERANCE = 1e-5
LR = 2e-3
MINIBATCH = 18
H = 6
LSTM = (LSTMModule, {"cell_size": H})
GRU = (GRUModule, {"cell_size": H})
MLP = (MLPModule, {"fcnet_hiddens": [8, H]})
PLAIN = {"a0": AgentKind(3), "a1": AgentKind(4, sizes=(2,)), "a2": AgentKind(5)}
COUPLED = {"cross_agent_losses": {"redundancy": RedundancyPenalty()}, "cross_agent_coeffs": {"redundancy": 0.5}}
RED = {"redundancy_coeff": 0.5}
COMES_AND_GOES = {"a0": "late", "a1": "dead", "a2": "gaps"}
SPACES = {
    "a0": AgentKind(3, "multi_discrete", (3, 2), masked=True),
    "a1": AgentKind(4, "gaussian_free", (1, 1)),
    "a2": AgentKind(5, sizes=(4,), masked=True),
}


def separate(cls, **more):
    """A critic with a memory of its own, MLPs before both."""
    return cls, {"cell_size": H, "vf_share_layers": False, "fcnet_hiddens": [7], **more}


@dataclasses.dataclass
class Case:
    """Options of the package and what they are in the reference's words."""

    nets: tuple = (LSTM, LSTM, LSTM)  # one of each module, ids sorted
    kinds: dict = dataclasses.field(default_factory=lambda: dict(PLAIN))
    agents: dict | None = None  # {agent: module}
    config: dict = dataclasses.field(default_factory=dict)
    loop: dict = dataclasses.field(default_factory=dict)
    step: dict = dataclasses.field(default_factory=dict)
    shapes: tuple = (Shape(),)  # of each batch of an update


CASES = {
    "lstm": Case(),
    "gru": Case((GRU, GRU, GRU)),
    "lstm, gru and mlp, coupled": Case((LSTM, GRU, MLP), config=COUPLED, step=RED),
    "critic_lr": Case((LSTM, GRU, MLP), config={"critic_lr": 1e-3, **COUPLED}, step={"critic_lr": 1e-3, **RED}),
    "max_seq_len 4": Case((LSTM, GRU, LSTM), shapes=(Shape(max_seq_len=4),)),
    "max_seq_len 4, coupled, ragged, two batches": Case(
        (LSTM, GRU, MLP),
        config=COUPLED,
        step=RED,
        shapes=(Shape(max_seq_len=4, ragged=True), Shape(7, 2, max_seq_len=4, ragged=True)),
    ),
    "max_seq_len 1": Case((LSTM, GRU, MLP), shapes=(Shape(6, max_seq_len=1),)),
    "no episode ends": Case((LSTM, GRU, MLP), shapes=(Shape(episodes=None),)),
    "an episode in every row": Case((LSTM, GRU, MLP), shapes=(Shape(episodes=(1, 1)),)),
    "other spaces, a mask": Case((LSTM, GRU, GRU), kinds=SPACES, config=COUPLED, step=RED),
    "critics with their own memory": Case(
        (separate(LSTMModule), separate(GRUModule), MLP), kinds=SPACES, shapes=(Shape(max_seq_len=4),)
    ),
    "critics with their own memory, critic_lr": Case(
        (separate(LSTMModule, fcnet_hiddens=[]), separate(GRUModule, fcnet_hiddens=[5, 7]), LSTM),
        config={"critic_lr": 1e-3, **COUPLED},
        step={"critic_lr": 1e-3, **RED},
    ),
    "layers before the cell": Case(
        (
            (LSTMModule, {"cell_size": H, "fcnet_hiddens": [9, 7]}),
            (GRUModule, {"cell_size": 5, "fcnet_hiddens": [4]}),
            LSTM,
        )
    ),
    "agents come and go": Case((LSTM, GRU, LSTM), config=COUPLED, step=RED, shapes=(Shape(presence=COMES_AND_GOES),)),
    "agents come and go, max_seq_len 4, ragged, two optimizers": Case(
        (LSTM, GRU, separate(LSTMModule)),
        config={"critic_lr": 1e-3, **COUPLED},
        step={"critic_lr": 1e-3, **RED},
        shapes=(Shape(max_seq_len=4, ragged=True, presence=COMES_AND_GOES),),
    ),
    "an agent never acts": Case(
        (LSTM, GRU, MLP), config=COUPLED, step=RED, shapes=(Shape(max_seq_len=4, presence={"a0": "never"}),)
    ),
    "nobody acts in some minibatches": Case(
        (LSTM, GRU, LSTM),
        config={"minibatch_size": 4},
        loop={"minibatch_size": 4},
        shapes=(Shape(episodes=(7, 9), max_seq_len=4, presence=dict.fromkeys(PLAIN, "dead")),),
    ),
    "agents of other spaces come and go": Case(
        (LSTM, GRU, LSTM), kinds=SPACES, shapes=(Shape(max_seq_len=4, presence=COMES_AND_GOES),)
    ),
    "fragments behind each other": Case(
        (LSTM, GRU, MLP),
        config=COUPLED,
        step=RED,
        shapes=(Shape(12, cuts=(4, 8), presence=COMES_AND_GOES),),
    ),
    "fragments, max_seq_len 4": Case((LSTM, GRU, MLP), shapes=(Shape(12, cuts=(5, 6), max_seq_len=4),)),
    "shared module": Case(
        (LSTM, GRU),
        kinds={"a0": AgentKind(3), "b": AgentKind(4), "a1": AgentKind(3)},
        agents={"a0": "m1", "b": "m0", "a1": "m1"},
        config={"policies": {"m1": ["a0", "a1"], "m0": ["b"]}, **COUPLED},
        step=RED,
        shapes=(Shape(max_seq_len=4, presence={"a0": "gaps", "b": "late"}),),
    ),
    "frozen module": Case(
        (LSTM, GRU, MLP), config={"trained": ["a0", "a2"], **COUPLED}, step={"frozen": frozenset({"a1"}), **RED}
    ),
    "raw value targets": Case(config={"value_normalization": False}, loop={"value_normalization": False}),
    "standardised by minibatch": Case(
        (LSTM, GRU, MLP),
        config={"standardize_advantages": "minibatch"},
        loop={"standardize": "minibatch"},
        shapes=(Shape(presence=COMES_AND_GOES),),
    ),
    "standardised by team": Case(
        config={"standardize_advantages": "team"}, loop={"standardize": "team"}, shapes=(Shape(max_seq_len=4),)
    ),
    "one draw per epoch": Case(config={"iterate_all_minibatches": False}, loop={"iterate_all": False}),
    "first minibatches of an epoch": Case(
        config={"max_minibatches_per_epoch": 2}, loop={"max_minibatches": 2}, shapes=(Shape(max_seq_len=4),)
    ),
    "target_kl": Case(
        (LSTM, GRU, MLP),
        config={"target_kl": 0.02, "num_epochs": 4, **COUPLED},
        loop={"target_kl": 0.02, "num_epochs": 4},
        step=RED,
        shapes=(Shape(max_seq_len=4),),
    ),
    "target_kl, rest of the update": Case(
        (LSTM, GRU, MLP),
        config={"target_kl": 0.05, "target_kl_scope": "update", "num_epochs": 4},
        loop={"target_kl": 0.05, "target_kl_scope": "update", "num_epochs": 4},
        shapes=(Shape(max_seq_len=4, presence=COMES_AND_GOES),),
    ),
    "target_kl with two optimizers": Case(
        (LSTM, GRU, MLP),
        config={"target_kl": 0.02, "critic_lr": 1e-3},
        loop={"target_kl": 0.02},
        step={"critic_lr": 1e-3},
        shapes=(Shape(max_seq_len=4),),
    ),
}


def reference_name(name: str) -> str:
    """The reference's name of a parameter."""
    name = re.sub(r"trunk\.(\d+)", lambda found: f"trunk_{int(found[1]) // 2}", name)
    return name.replace("_l0", "").replace("_head.", ".")


def joint_batch(fixed: FixedSequences, agents: dict):
    """The batch as the package takes it."""
    batch = feed_forward.joint_batch(fixed, agents)
    batch.episode_start, batch.sequence_rows = fixed.episode_start, fixed.sequence_rows
    for streams in batch.modules.values():
        if streams.agents[0] in fixed.state_in:
            streams.state_in = np.stack([fixed.state_in[agent] for agent in streams.agents])
    return batch.check()


class Both:
    """The package's learner and the reference, from the same parameters, and their data."""

    def __init__(self, case: Case, seed: int = 0):
        self.case, self.agents = case, case.agents or {agent: agent for agent in case.kinds}
        module_ids = sorted(set(self.agents.values()))
        observation_spaces, action_spaces = zip(*map(feed_forward.space_of, case.kinds.values()), strict=True)
        shape = case.shapes[0]
        options = {"iterate_all_minibatches": True, "minibatch_size": MINIBATCH, "lr": LR, **case.config}
        config = declared_config(
            observation_spaces,
            action_spaces,
            list(case.kinds),
            num_envs=shape.envs,
            model={},
            train_batch_size_per_learner=shape.steps * shape.envs,
            **options,
        )
        specs = {}
        for module_id, (cls, model) in zip(module_ids, case.nets, strict=True):
            length = {} if cls is MLPModule else {"max_seq_len": shape.max_seq_len}
            specs[module_id] = RLModuleSpec(module_class=cls, model_config={**model, **length})
        config.rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=specs))
        self.learner = make_learner(config)
        scramble(self.learner, seed)
        self.first = parameters(self.learner)
        modules = {}
        for agent, module_id in self.agents.items():
            kind = case.kinds[agent]
            named = {reference_name(name): p.astype(np.float64) for name, p in self.first[module_id].items()}
            modules[module_id] = ReferenceModule(
                named, kind.action, kind.sizes if kind.action == "multi_discrete" else ()
            )
        step = ReferenceSettings(**{"lr": LR, **case.step})
        if case.loop.get("standardize") in ("minibatch", "team"):
            step = dataclasses.replace(step, standardize=case.loop["standardize"])
        discounts = {"gamma": dict.fromkeys(modules, 0.99), "lambda_": dict.fromkeys(modules, 0.95)}
        settings = RecurrentSettings(**{**discounts, "minibatch_size": MINIBATCH, **case.loop}, step=step)
        self.reference = RecurrentLoop(modules, self.agents, settings)
        self.rng = np.random.default_rng(seed + 100)

    def data(self) -> list[FixedSequences]:
        """One update's batches, sampled near the current policy of the reference."""
        return [fixed_sequences(self.rng, self.case.kinds, self.reference.trainer, shape) for shape in self.case.shapes]

    def run(self, updates: int = 3, mistake=lambda fixed: fixed):
        """Trains both; (results of the package, statistics of the reference) of each update.

        `mistake` changes what the reference sees.
        """
        log = []
        for _ in range(updates):
            data = self.data()
            results = update(self.learner, [joint_batch(fixed, self.agents) for fixed in data])
            log.append((results, self.reference.update([mistake(fixed) for fixed in data])))
        return log

    def difference(self, module_id: str | None = None) -> float:
        """The largest difference of any parameter, or of a module's."""
        mine, theirs = parameters(self.learner), self.reference.trainer.parameters
        assert {m: {reference_name(name) for name in named} for m, named in mine.items()} == {
            m: set(named) for m, named in theirs.items()
        }
        return max(
            float(np.abs(p - theirs[m][reference_name(name)]).max())
            for m, named in mine.items()
            if module_id in (None, m)
            for name, p in named.items()
        )

    def idle(self) -> set[str]:
        """Modules none of whose agents ever acts."""
        presence = self.case.shapes[0].presence
        return set(self.first) - {m for agent, m in self.agents.items() if presence.get(agent) != "never"}

    def movement(self, module_id: str) -> float:
        """How far the module's parameters moved."""
        now = parameters(self.learner)[module_id]
        return max(float(np.abs(now[name] - self.first[module_id][name]).max()) for name in now)


@pytest.mark.parametrize("name", CASES)
def test_three_updates_equal_the_float64_loop_over_time(name):
    both = Both(CASES[name])
    log = both.run()
    assert both.difference() < TOLERANCE
    still = both.case.step.get("frozen", frozenset()) | both.idle()
    for module_id in both.first:
        moved = both.movement(module_id)
        assert moved == 0.0 if module_id in still else moved > 100 * TOLERANCE
    if "target_kl" in both.case.loop:
        check_stops(both, log)
    elif not both.idle():
        for results, steps in log:
            check_statistics(results, steps, still)


def check_stops(both, log):
    """Some modules stopped while others went on: else the comparison does not see that each stops on its own."""
    target, stopped, alone = both.case.loop["target_kl"], 0, 0
    for results, steps in log:
        assert results["__all_modules__"]["num_minibatch_steps"] == len(steps)
        over = [{m for m, kl in s["kl"].items() if kl > target} for s in steps]
        stopped += sum(bool(found) for found in over)
        alone += sum(bool(found) and found < set(both.first) for found in over)
    assert stopped > 0 and alone > 0


def test_the_comparison_sees_a_target_kl_that_is_not_kept():
    case = CASES["target_kl"]
    both = Both(dataclasses.replace(case, loop={**case.loop, "target_kl": None}))
    both.run()
    assert both.difference() > 100 * TOLERANCE


# --- the comparison sees mistakes ------------------------------------------------------------------------------------


def never_resets(fixed: FixedSequences) -> FixedSequences:
    return dataclasses.replace(fixed, episode_start=np.zeros_like(fixed.episode_start))


def starts_from_zero(fixed: FixedSequences) -> FixedSequences:
    return dataclasses.replace(fixed, state_in={agent: np.zeros_like(s) for agent, s in fixed.state_in.items()})


def resets_one_row_late(fixed: FixedSequences) -> FixedSequences:
    return dataclasses.replace(fixed, episode_start=np.roll(fixed.episode_start, 1, axis=0))


MISTAKES = {
    "no reset": (never_resets, None),
    "states that enter": (starts_from_zero, None),
    "states that enter, max_seq_len 4": (starts_from_zero, 4),
    "a reset that comes a row late": (resets_one_row_late, None),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_comparison_sees_a_memory_that_is_wrong(name):
    mistake, length = MISTAKES[name]
    both = Both(Case((LSTM, GRU, MLP), shapes=(Shape(max_seq_len=length),)))
    both.run(3, mistake)
    assert both.difference("a0") > 1e-3 and both.difference("a1") > 1e-3
    assert both.difference("a2") < TOLERANCE  # has no memory
