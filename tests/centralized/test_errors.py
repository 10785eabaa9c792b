"""Options of heads, auxiliary targets and constraints that do not fit are early errors that say how to mend them."""

from __future__ import annotations

import dataclasses

import pytest

from tests.centralized.algorithms import LIMIT, spread
from tests.heads.worlds import CONDITIONAL, SKILLS
from tests.support import box, declared_config, discrete, make_learner, make_runner, update
from thrust_rllib import AuxiliaryTarget, Constraint, JensenShannon, RedundancyPenalty
from thrust_rllib.action_spread import ActionSpread

COUPLED = {"cross_agent_losses": {"redundancy": RedundancyPenalty()}}
DRIVEN = Constraint("redundancy", 0.1, "lagrangian", rate=1.0, of="coupling")


def team(*actions, **options):
    return declared_config([box(3)] * len(actions), actions, **options)


ERRORS = {
    "an unknown ratio": (
        team(SKILLS, SKILLS, ratio="perhead"),
        ["ratio='perhead'", "'joint', 'per_head'", "'per_head'?"],
    ),
    "names that nothing reads": (
        team(SKILLS, SKILLS, head_names=("skill", "goal")),
        ["head_names=('skill', 'goal') would be ignored", "Set ratio='per_head'"],
    ),
    "too few names": (
        team(SKILLS, SKILLS, ratio="per_head", head_names=("skill",)),
        ["module 'a0': head_names has 1 names, ['skill']", "have 2 heads"],
    ),
    "names of one head": (
        team(SKILLS, discrete(3), ratio="per_head", head_names=("skill", "goal")),
        ["module 'a1': head_names has 2 names", "leave the option out, and name the heads of each in its model_config"],
    ),
    "names of a Box": (
        team(SKILLS, box(2), ratio="per_head", head_names=("skill", "goal")),
        ["module 'a1': head_names is ['skill', 'goal']", "which has no separate heads"],
    ),
    "a name that is no name": (
        team(SKILLS, SKILLS, ratio="per_head", head_names=("a/b", "c")),
        ["head_names has ['a/b']", "names without '/'"],
    ),
    "ratios of a Box": (
        team(box(2), box(1), ratio="per_head"),
        ["ratio='per_head' would change nothing", "Box(-10.0, 10.0, (2,), float32)", "Set ratio='joint'"],
    ),
    "ratios of one head": (team(discrete(2), discrete(3), ratio="per_head"), ["ratio='per_head' would change nothing"]),
    "targets by name": (
        spread(auxiliary_targets=("covered",)),
        ["auxiliary_targets has 'covered'", "needed: AuxiliaryTarget(name"],
    ),
    "one target": (spread(auxiliary_targets=AuxiliaryTarget("covered")), ["auxiliary_targets=AuxiliaryTarget("]),
    "a weight that is given twice": (
        spread(plain=True, **COUPLED, constraints=(DRIVEN,), cross_agent_coeffs={"redundancy": 0.1}),
        ["cross_agent_coeffs gives 'redundancy' a weight, which a constraint drives as well"],
    ),
    "a coupling that is not there": (
        spread(plain=True, constraints=(DRIVEN,)),
        ["constraint 'redundancy' drives the weight of a coupling; cross_agent_losses has []"],
    ),
    "a compiled weight": (
        spread(plain=True, **COUPLED, constraints=(DRIVEN,)).framework(torch_compile_learner=True),
        ["torch_compile_learner=True with constraints that drive the weights of the couplings ['redundancy']"],
    ),
    "an activation": (
        spread(critic_config={"fcnet_activation": ["tanh"]}),
        ["critic_config fcnet_activation=['tanh']; needed: one of tanh"],
    ),
    "a number of scalars": (
        spread(critic="set", critic_config={"scalars": 3}),
        ["critic_config scalars=3; needed: 'state' for all of it, or a tuple of names"],
    ),
    "a joint clip of nothing": (
        spread(plain=True, clip_jointly=True, grad_clip=None),
        ["clip_jointly=True with grad_clip=None would clip nothing"],
    ),
    "an interval": (spread(diversity_interval=-1), ["diversity_interval=-1", "0 for no such metrics"]),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_an_error_says(name):
    config, words = ERRORS[name]
    with pytest.raises(ValueError) as error:
        config.copy(copy_frozen=False).validate()
    for word in words:
        assert word in str(error.value), str(error.value)


@pytest.mark.parametrize(
    "config",
    [
        team(SKILLS, box(2), discrete(2), ratio="per_head"),
        team(SKILLS, SKILLS, ratio="per_head", head_names=("skill", "goal")),
        spread(plain=True, **COUPLED, constraints=(LIMIT,)).framework(torch_compile_learner=True),
    ],
    ids=["a Box beside", "names", "a compiled cost"],
)
def test_what_may_be_set(config):
    config = config.copy(copy_frozen=False)
    config.validate()
    assert (config.critic_plan.critic, config.critic_plan.credit) == (config.critic, config.credit)


def test_a_target_that_no_environment_gives_is_an_error_at_the_first_update():
    config = spread(auxiliary_targets=(AuxiliaryTarget("coverd"),))
    learner = make_learner(config)
    batches = make_runner(config).sample(num_timesteps=64)
    with pytest.raises(ValueError, match=r"'coverd' is not among the rollout's extras \['collisions', 'covered', 'tou"):
        update(learner, batches)


@pytest.mark.parametrize("loss", [JensenShannon("raise"), ActionSpread("lower")], ids=repr)
def test_distances_of_actions_know_no_conditional_heads(loss):
    config = team(SKILLS, SKILLS, model={"fcnet_hiddens": [8], **CONDITIONAL}, cross_agent_losses={"apart": loss})
    with pytest.raises(ValueError, match=r"cross-agent loss 'apart' \(\w+\) compares .* module 'a0' has conditional h"):
        make_learner(config)
    make_learner(team(SKILLS, SKILLS, cross_agent_losses={"apart": loss}))
    make_learner(team(SKILLS, SKILLS, model={"fcnet_hiddens": [8], **CONDITIONAL}, **COUPLED))


def test_constraints_may_be_dicts_as_tune_gives_them():
    given = {"name": "collisions", "limit": 0.01, "mechanism": "lagrangian", "rate": 5.0}
    plain = spread(plain=True)
    config = plain.copy(copy_frozen=False).update_from_dict({"constraints": [given]})
    learner = make_learner(config)
    results = update(learner, make_runner(config).sample(num_timesteps=64))["__all_modules__"]
    assert config.constraints == (Constraint(**given),) and results["constraints"]["collisions"]["limit"] == 0.01
    with pytest.raises(ValueError, match="constraints: Constraint has no 'limt'; .*did you mean 'limit'"):
        plain.copy(copy_frozen=False).update_from_dict({"constraints": [{"name": "c", "limt": 1.0}]}).validate()
    assert dataclasses.replace(LIMIT, limit=0.01) == LIMIT
