"""Options that contradict each other, or the environment, are early errors that say how to mend them."""

from __future__ import annotations

import math

import pytest

from tests.critics.both import Case, config_of
from tests.support import box, declared_config, discrete, make_learner

MEMORY = {"model": {"cell": "gru", "cell_size": 6, "fcnet_hiddens": [7], "max_seq_len": 4}}


def message_of(case: Case, **training) -> str:
    with pytest.raises(ValueError) as error:
        config_of(case).training(**training).validate()
    return str(error.value)


ERRORS = {
    "an unknown critic": (
        Case(),
        {"critic": "centrall"},
        ["critic='centrall'", "'independent', 'mean', 'central'", "'central'?"],
    ),
    "an unknown credit": (Case(), {"credit": "sharde"}, ["credit='sharde'", "'own', 'shared', 'agent', 'difference'"]),
    "mean, own": (Case("mean", "own"), {}, ["critic='mean' with credit='own'", "Set credit='shared', 'agent' or"]),
    "independent, agent": (
        Case("independent", "agent"),
        {},
        ["credit='agent' with critic='independent'", "credit='own'", "critic='mean', 'cent"],
    ),
    "a network that nobody has": (
        Case("mean"),
        {"critic_config": {"cell": "gru"}},
        [
            "critic_config={'cell': 'gru'} would be ignored",
            "critic='mean'",
            "critic='central' or 'set'",
            "model_config",
        ],
    ),
    "an unknown key": (
        Case(net={"fcnet_hidens": [4]}),
        {},
        ["no key 'fcnet_hidens' with critic='central'", "'fcnet_hiddens'?", "Its keys: "],
    ),
    "a key of a set critic": (Case(net={"pooling": "max"}), {}, ["no key 'pooling' with critic='central'"]),
    "a key of a central critic": (Case("set", net={"input": "state"}), {}, ["no key 'input' with critic='set'"]),
    "no dict": (Case(), {"critic_config": [1]}, ["critic_config", "dict"]),
    **{
        f"{key}={given!r}": (
            Case("set", net={key: given}),
            {},
            [f"critic_config {key} is {given!r}", "needed: layers of width 1 or more, a list such as [64, 64]"],
        )
        for key in ("fcnet_hiddens", "encoder_hiddens")
        for given in ("32", 32, [0], [-3], [1.5], ["4"])
    },
    **{
        f"cell_size={given!r}": (Case(net={"cell": "gru", "cell_size": given}), {}, [f"cell_size={given!r}", "≥ 1"])
        for given in (0, -1, 1.5, "4", True)
    },
    "a length of no memory": (
        Case(net={"max_seq_len": 5}),
        {},
        ["max_seq_len=5 would be ignored", "no memory", "cell='lstm' or 'gru'"],
    ),
    "a size of no memory": (Case(net={"cell": None, "cell_size": 5}), {}, ["cell_size=5 would be ignored"]),
    "an activation": (
        Case(net={"fcnet_activation": "tanhh"}),
        {},
        ["fcnet_activation='tanhh'", "needed: one of tanh, "],
    ),
    "a cell": (Case(net={"cell": "rnn"}), {}, ["cell='rnn'", "None, 'lstm' or 'gru'"]),
    "an input": (Case(net={"input": "obs"}), {}, ["input='obs'", "'auto', 'state' or 'observations'"]),
    "a pooling": (Case("set", net={"pooling": "men"}), {}, ["pooling='men'", "one of mean, sum, max", "'mean'?"]),
    "no encoder": (Case("set", net={"encoder_hiddens": []}), {}, ["encoder_hiddens=[]", "one width or more"]),
    "no state": (
        Case(net={"input": "state"}),
        {},
        ["input='state'", "has no state()", "critic_config={'input': 'observations'}"],
    ),
    "scalars of no state": (Case("set", net={"scalars": ("rest",)}), {}, ["scalars=('rest',)", "has no state()"]),
    "an unknown scalar": (
        Case("set", net={"scalars": ("rst",)}, with_state=True),
        {},
        ["scalars names 'rst'", "the parts ['first', 'rest']", "'rest'?", "Declare state_space as a Dict"],
    ),
    "one scalar by name": (
        Case("set", net={"scalars": "rest"}, with_state=True),
        {},
        ["scalars='rest'", "'state' for all of it, or a tuple"],
    ),
    **{
        f"weight_decay={given}": (Case(), {"weight_decay": given}, [f"weight_decay={given!r}", "needed: a number ≥ 0"])
        for given in (-0.1, math.nan, math.inf, True, "0.1", None)
    },
    "clip_jointly=1": (Case(), {"clip_jointly": 1}, ["clip_jointly=1", "True, False"]),
    "a joint clip by value": (
        Case(),
        {"clip_jointly": True, "grad_clip_by": "value"},
        ["clip_jointly=True with grad_clip_by='value'", "set grad_clip_by='global_norm'"],
    ),
    "a joint clip of two gradients": (
        Case("mean"),
        {"clip_jointly": True, "critic_lr": 1e-3},
        [
            "clip_jointly=True with critic_lr=0.001 and critic='mean'",
            "Leave critic_lr out",
            "critic='central' or 'set'",
        ],
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_an_error_says(name):
    case, training, words = ERRORS[name]
    message = message_of(case, **training)
    for word in words:
        assert word in message, message


def override(name, value, critic="central", credit="shared", **config):
    return Case(critic, credit, config={"overrides": {"m1": {name: value}}, **config})


@pytest.mark.parametrize("critic, credit", [("mean", "shared"), ("central", "agent"), ("set", "difference")])
@pytest.mark.parametrize("name", ["gamma", "lambda_", "lambda"])
def test_one_value_of_the_team_has_one_discount(name, critic, credit):
    message = message_of(override(name, 0.5, critic, credit))
    option = name.removesuffix("_") if name == "gamma" else "lambda_"
    assert (
        f"of 'm1' sets {option}=0.5, but critic={critic!r} with credit={credit!r} has one value of the whole" in message
    )
    assert f"set it once: .training({option}=…)" in message


@pytest.mark.parametrize(
    "name, value",
    [("vf_loss_coeff", 1.0), ("value_clip_range", 0.1), ("vf_clip_param", 9.0), ("value_normalization", False)],
)
@pytest.mark.parametrize("critic, credit", [("mean", "shared"), ("central", "own"), ("set", "agent")])
def test_one_critic_has_one_way_to_be_trained(name, value, critic, credit):
    message = message_of(override(name, value, critic, credit))
    assert f"sets {name}={value!r}, but critic={critic!r} is one critic for all; set it once" in message


def test_a_critic_of_its_own_has_one_rate():
    message = message_of(override("critic_lr", 1e-4, critic_lr=1e-3))
    assert "sets critic_lr=0.0001, but critic='central' is one critic for all" in message


def test_a_joint_clip_has_one_limit():
    message = message_of(override("grad_clip", 0.1, "independent", "own", clip_jointly=True))
    assert "sets grad_clip=0.1, but clip_jointly=True clips all modules together" in message


@pytest.mark.parametrize(
    "case",
    [
        override("gamma", 0.5, "independent", "shared"),
        override("gamma", 0.5, "central", "own"),
        override("gamma", 0.99, "mean"),  # the same as the others'
        override("vf_loss_coeff", 1.0, "independent"),
        override("critic_lr", 1e-4, "mean", critic_lr=1e-3),
        override("lr", 1e-4),
        override("grad_clip", 0.1),
        Case(config={"clip_jointly": True, "critic_lr": 1e-3}),
        Case(net={"cell": None}),
    ],
)
def test_what_may_be_set(case):
    config = config_of(case)
    config.validate()
    assert (config.critic_plan.critic, config.critic_plan.credit) == (config.critic, config.credit)


@pytest.mark.parametrize("name", ["team_critic", "auxiliary_heads"])
def test_a_policy_with_the_name_of_the_learners_own_module(name):
    config = declared_config([box(3)] * 2, [discrete(2)] * 2, policies={name: ["a0"], "other": ["a1"]})
    with pytest.raises(
        ValueError, match=f"a policy is called '{name}', as the learner's own module is; name it otherwise"
    ):
        config.validate()


def test_a_critic_and_policies_with_sequences_of_other_lengths():
    with pytest.raises(ValueError, match=r"max_seq_len differs between modules: .*'team_critic': 3"):
        make_learner(config_of(Case(net={"cell": "gru", "max_seq_len": 3}, config=MEMORY)))


def test_a_critic_with_sequences_longer_than_the_rollout():
    with pytest.raises(ValueError, match="max_seq_len=50 is longer than what is sampled at a time, 11 steps"):
        make_learner(config_of(Case(net={"cell": "gru", "max_seq_len": 50})))
