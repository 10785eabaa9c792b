"""A module that cannot be added or removed is refused before anything has changed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule

from tests.support import box, declared_config, discrete, largest_difference, optimizer_states, parameters
from thrust_rllib import RedundancyPenalty
from thrust_rllib.rl_modules.mlp import ENCODER_FEATURES, MLPModule
from thrust_rllib.rl_modules.recurrent import LSTMModule
from thrust_rllib.teams import AgentToModule

pytestmark = pytest.mark.usefixtures("ray_session")

LSTM = {"cell": "lstm", "cell_size": 8, "fcnet_hiddens": [12], "max_seq_len": 8}
DOORS = ("arrays", "episodes")


class WithoutFeatures(LSTMModule):
    def _forward_train(self, batch, **kwargs):
        outputs = super()._forward_train(batch, **kwargs)
        return {name: x for name, x in outputs.items() if name != ENCODER_FEATURES}


class NeedsMore(MLPModule):
    def setup(self):
        raise KeyError("depth")


def team(door):
    """a0 and a1 are alike, a2 sees more and a3 does more; a2 and a3 are frozen; all recurrent, all coupled."""
    return declared_config(
        [box(3), box(3), box(4), box(3)],
        [discrete(2), discrete(2), discrete(2), discrete(3)],
        trained=["a0", "a1"],
        model=LSTM,
        runners={"sampling": door, "normalize_observations": True},
        cross_agent_losses={"redundancy": RedundancyPenalty()},
    )


@pytest.fixture(scope="module", params=DOORS)
def algo(request, ray_session):
    algo = team(request.param).build_algo()
    yield algo
    algo.stop()


def playing(**changed):
    """A mapping function: who plays whom by name, but for these."""
    return lambda agent, *args, **kwargs: changed.get(agent, agent)


def needs_an_episode(agent, episode, **kwargs):
    return agent if hash(episode.id_) % 2 else "new"


ADD = {
    "the name is taken": (("a0",), {}, r"there is a module 'a0' already.*\['a0', 'a1', 'a2', 'a3'\]"),
    "a name with a slash": (("a/b",), {}, r"cannot be called 'a/b'.*folder"),
    "an empty name": (("",), {}, "cannot be called ''"),
    "a number for a name": ((7,), {}, "cannot be called 7"),
    "a dot at the end": (("new.",), {}, "cannot be called 'new.'"),
    "an unknown module": (
        ("new",),
        {"new_agent_to_module_mapping_fn": playing(a0="nwe")},
        "maps agent 'a0' to module 'nwe'.*'new'",
    ),
    "the episode decides": (
        ("new",),
        {"new_agent_to_module_mapping_fn": needs_an_episode},
        "decide by the agent id alone",
    ),
    "agents without a module": (
        ("new",),
        {"new_agent_to_module_mapping_fn": AgentToModule({"a0": "new"})},
        r"policy_mapping_fn\('a1', None\) failed",
    ),
    "other observations": (
        ("new", RLModuleSpec(observation_space=box(3))),
        {"new_agent_to_module_mapping_fn": playing(a2="new")},
        r"'new' has the observation space Box\(.*\(3,\).*'a2'.*\(4,\)",
    ),
    "other actions": (
        ("new", RLModuleSpec(action_space=discrete(2))),
        {"new_agent_to_module_mapping_fn": playing(a3="new")},
        r"'new' has the action space Discrete\(2\).*'a3'.*Discrete\(3\)",
    ),
    "unlike agents for one module": (
        ("new",),
        {"new_agent_to_module_mapping_fn": playing(a0="new", a2="new")},
        "'a0' and 'a2' share module 'new' but their observation spaces differ",
    ),
    "an old module for another agent": (
        ("new", RLModuleSpec(observation_space=box(3), action_space=discrete(2))),
        {"new_agent_to_module_mapping_fn": playing(a0="a3", a3="a0")},
        "module 'a0' has the action space.*'a3'",
    ),
    "unknown what it sees": (("new",), {}, "plays no agent.*Give observation_space and action_space"),
    "an unknown module to train": (
        ("new",),
        {"new_agent_to_module_mapping_fn": playing(a0="new"), "new_should_module_be_updated": ["a1", "nwe"]},
        "policies_to_train names module 'nwe'.*'new'",
    ),
    "nothing to train": (
        ("new",),
        {"new_agent_to_module_mapping_fn": playing(a0="new"), "new_should_module_be_updated": []},
        "nothing would be trained",
    ),
    "only who waits is trained": (
        ("new", RLModuleSpec(observation_space=box(3), action_space=discrete(2))),
        {"new_should_module_be_updated": ["new"]},
        r"nothing would be trained.*\['new'\].*new_should_module_be_updated",
    ),
    "a function that trains nobody": (
        ("new",),
        {
            "new_agent_to_module_mapping_fn": playing(a0="new"),
            "new_should_module_be_updated": lambda module_id, batch=None: False,
        },
        "nothing would be trained",
    ),
    "an option of the whole team": (
        ("new",),
        {"new_agent_to_module_mapping_fn": playing(a0="new"), "config_overrides": {"num_epochs": 3}},
        "overrides_per_module of 'new' sets 'num_epochs'",
    ),
    "an option that does not exist": (
        ("new",),
        {"new_agent_to_module_mapping_fn": playing(a0="new"), "config_overrides": {"clip_parm": 0.1}},
        "'clip_parm' is not an option.*clip_param",
    ),
    "a number that is none": (
        ("new",),
        {"new_agent_to_module_mapping_fn": playing(a0="new"), "config_overrides": {"gamma": 2.0}},
        "of 'new': gamma=2.0",
    ),
    "a second optimizer for one": (
        ("new",),
        {"new_agent_to_module_mapping_fn": playing(a0="new"), "config_overrides": {"critic_lr": 1e-3}},
        "critic optimizer is for every module or for none",
    ),
    "not for the runners": (("new",), {"add_to_env_runners": False}, "add_to_env_runners=False.*same modules"),
    "no such argument": (("new",), {"add_to_learner": True}, "'add_to_learner' is no argument.*add_to_learners"),
    "sequences of another length": (
        ("new", RLModuleSpec(model_config={"max_seq_len": 16})),
        {"new_agent_to_module_mapping_fn": playing(a0="new")},
        "max_seq_len differs between modules",
    ),
    "an unknown cell": (
        ("new", RLModuleSpec(model_config={"cell": "lsmt"})),
        {"new_agent_to_module_mapping_fn": playing(a0="new")},
        "'lsmt'.*lstm",
    ),
    "a network that is not built": (
        ("new", RLModuleSpec(module_class=NeedsMore)),
        {"new_agent_to_module_mapping_fn": playing(a0="new")},
        "'new' cannot be built from its spec: KeyError: 'depth'",
    ),
    "no features for the coupling": (
        ("new", RLModuleSpec(module_class=WithoutFeatures)),
        {"new_agent_to_module_mapping_fn": playing(a0="new")},
        "'redundancy' reads the agents' features, but module 'new'",
    ),
    "a class for a spec": (("new", MLPModule), {}, "needed: an RLModuleSpec"),
    "weights to load": (("new", RLModuleSpec(load_state_path="somewhere")), {}, "load_state_path='somewhere'.*restore"),
    "for learners only": (("new", RLModuleSpec(learner_only=True)), {}, "learner_only=True"),
}

REMOVE = {
    "no such module": (("a4",), {}, r"no module 'a4'.*\['a0', 'a1', 'a2', 'a3'\]"),
    "it plays": (("a0",), {}, r"'a0' plays \['a0'\].*new_agent_to_module_mapping_fn.*\['a1', 'a2', 'a3'\]"),
    "it would still play": (
        ("a0",),
        {"new_agent_to_module_mapping_fn": playing(a1="a0")},
        "maps agent 'a0' to module 'a0', which is not in policies",
    ),
    "who would play does not fit": (
        ("a0",),
        {"new_agent_to_module_mapping_fn": playing(a0="a2")},
        "'a0' and 'a2' share module 'a2'",
    ),
    "nobody else is trained": (
        ("a0",),
        {"new_agent_to_module_mapping_fn": playing(a0="a1"), "new_should_module_be_updated": []},
        "nothing would be trained",
    ),
    "it is to be trained": (
        ("a0",),
        {"new_agent_to_module_mapping_fn": playing(a0="a1"), "new_should_module_be_updated": ["a0", "a1"]},
        "policies_to_train names module 'a0'",
    ),
    "not from the learners": (("a0",), {"remove_from_learners": False}, "remove_from_learners=False"),
    "another call's argument": (("a0",), {"add_to_learners": True}, "'add_to_learners' is no argument"),
}

CASES = [*(("add_module", *case) for case in ADD.values()), *(("remove_module", *case) for case in REMOVE.values())]
NAMES = [f"{call} {name}" for call, cases in (("add", ADD), ("remove", REMOVE)) for name in cases]


def looks(algo):
    """Everything that a change of the team changes."""
    learner, runner = algo.learner_group._learner, algo.env_runner
    configs = algo.config, algo.evaluation_config, algo.learner_group.config, learner.config, runner.config
    return [
        [
            (
                sorted(config.policies),
                config.policy_mapping_fn.table,
                config.policies_to_train,
                config.algorithm_config_overrides_per_module,
            )
            for config in configs
        ],
        sorted(learner.module.keys()),
        sorted(learner._named_optimizers),
        sorted(learner._value_normalizers),
        list(runner.module.keys()),
        sorted(runner.normalizer.moments),
        runner.module_of,
        runner._needs_initial_reset,
    ]


@pytest.mark.parametrize(("call", "arguments", "options", "message"), CASES, ids=NAMES)
def test_a_mistake_is_told_before_anything_has_changed(algo, call, arguments, options, message):
    before, weights = looks(algo), parameters(algo.learner_group._learner)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        getattr(algo, call)(*arguments, **options)
    assert looks(algo) == before
    assert largest_difference(parameters(algo.learner_group._learner), weights) == 0.0


class WithoutValues(TorchRLModule):
    def setup(self):
        self.layer = torch.nn.Linear(3, 2)

    def _forward(self, batch, **kwargs):
        return {}


def test_a_learner_that_refuses_a_module_is_as_before(algo):
    """Asked by itself, not by the algorithm, which asks first."""
    learner = algo.learner_group._learner
    before, weights = looks(algo), parameters(learner)
    spec = RLModuleSpec(WithoutValues, observation_space=box(3), action_space=discrete(2))
    with pytest.raises(ValueError, match="'new' \\(WithoutValues\\) has no value function"):
        learner.add_module(module_id="new", module_spec=spec, new_should_module_be_updated=["a1", "new"])
    assert looks(algo) == before
    assert largest_difference(parameters(learner), weights) == 0.0


@pytest.mark.parametrize("door", DOORS)
def test_training_goes_on_as_if_nothing_had_been_asked(build, door):
    asked, alone = build(team(door)), build(team(door))
    for algo in (asked, alone):
        algo.train()
    for call, arguments, options, _ in CASES:
        with pytest.raises(ValueError):  # noqa: PT011 (the messages have a test of their own)
            getattr(asked, call)(*arguments, **options)
    learners = []
    for algo in (asked, alone):
        algo.train()
        learners.append(algo.learner_group._learner)
    assert largest_difference(*map(parameters, learners)) == 0.0
    assert largest_difference(*map(optimizer_states, learners)) == 0.0
    moments = [
        {m: x.get_state()["mean"] for m, x in algo.env_runner.normalizer.moments.items()} for algo in (asked, alone)
    ]
    assert largest_difference(*moments) == 0.0
    assert any(np.any(mean) for mean in moments[0].values())
    # What is right is still accepted, and it does change something.
    before = looks(asked)
    asked.add_module(
        "new", new_agent_to_module_mapping_fn=playing(a0="new"), new_should_module_be_updated=["a1", "new"]
    )
    assert looks(asked) != before
    asked.train()
    assert "new" in parameters(learners[0])
