"""From what a user typed to what a sweep varies; no training."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tune.helpers import COUPLING, LR, RANGE, SWEEP, sweep, tiny
from thrust_rllib.command_line.sweep import SweepOptions, build_sweep
from thrust_rllib.search_space import KeepInRange, Parameter, corners, parse_parameter, put


def parsed(text, **how):
    return parse_parameter("--lr", text, ("lr",), **how)


@pytest.mark.parametrize(
    ("text", "low", "high", "log"),
    [("1e-4:1e-2", 1e-4, 1e-2, True), ("0:1:linear", 0, 1, False), ("1:9:log", 1, 9, True)],
)
def test_a_range(text, low, high, log):
    assert parsed(text) == Parameter("lr", ("lr",), low=low, high=high, log=log)
    assert parsed(text.split(":linear")[0].split(":log")[0], log=log).log == log


def test_a_list_and_a_single_value():
    assert parsed("64, 128", parse=int).choices == (64, 128)
    assert parsed("0.1") == 0.1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1e-2:1e-4", "from 0.01 to 0.0001; needed: finite, the smaller first"),
        ("0:1", "from 0 on a logarithmic scale; needed: more than 0, or a uniform range: 0:1:linear"),
        ("-1:1:log", "needed: more than 0"),
        ("1:2:3", "needed: LOW:HIGH, LOW:HIGH:linear or LOW:HIGH:log"),
        ("1:2:log:4", "needed: LOW:HIGH, LOW:HIGH:linear or LOW:HIGH:log"),
        ("1:", "--lr 1:: '' is not a number"),
        ("a:2", "'a' is not a number"),
        ("1,,2", "'' is not a number"),
        ("1,1", "needed: two or more different ones"),
        ("1:inf", "needed: finite"),
    ],
)
def test_what_is_neither(text, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        parsed(text)


def test_whole_numbers_have_no_range():
    with pytest.raises(ValueError, match="needed: a list of values, such as 64,128,256"):
        parsed("64:128", parse=int, ranges=False)
    with pytest.raises(ValueError, match="'1.5' is not a whole number"):
        parsed("1.5,2", parse=int)


def test_a_logarithmic_range_is_drawn_by_its_logarithm():
    domain = parsed("1e-4:1e-2").domain()
    drawn = np.log10([domain.sample(random_state=0) for _ in range(1)] + list(domain.sample(size=4000, random_state=1)))
    assert drawn.min() >= -4 and drawn.max() <= -2
    # Uniform on [-4, -2]: mean -3, standard error of the mean 0.577 / √4000 = 0.009.
    assert abs(drawn.mean() + 3) < 0.05
    uniform = np.array(parsed("1e-4:1e-2:linear").domain().sample(size=4000, random_state=1))
    assert abs(uniform.mean() - 0.00505) < 0.0003 and abs(np.log10(uniform).mean() + 3) > 0.3


@given(st.floats(-1e6, 1e6))
def test_mutations_stay_in_their_range(value):
    inside = KeepInRange((RANGE, COUPLING))({"lr": value, "cross_agent_coeffs": {"redundancy": 0.5, "other": 7.0}})
    assert RANGE.low <= inside["lr"] <= RANGE.high
    assert inside["lr"] == value or not RANGE.low <= value <= RANGE.high
    assert inside["cross_agent_coeffs"] == {"redundancy": 0.5, "other": 7.0}


def test_neighbours_in_a_list_are_neighbours_by_size():
    assert Parameter("x", ("x",), choices=(1.0, 0.0, 0.1)).mutations() == [0.0, 0.1, 1.0]
    assert Parameter("x", ("x",), choices=("b", "a")).mutations() == ["b", "a"]


def test_all_corners_or_one_parameter_at_a_time():
    assert corners((RANGE, COUPLING)) == [(lr, c) for lr in (1e-4, 1e-2) for c in (0.0, 0.5, 2.0)]
    many = [Parameter(f"p{i}", (f"p{i}",), choices=(0, 1, 2, 3)) for i in range(4)]
    tried = corners(many)
    assert len(tried) == 1 + 4 * 3 and {values.count(0) for values in tried} == {3, 4}


def test_places_in_the_configuration():
    base = {"lr": 0, "cross_agent_coeffs": {"redundancy": 0, "other": 7}}
    assert put([(RANGE, 1), (COUPLING, 2)], base) == {"lr": 1, "cross_agent_coeffs": {"redundancy": 2, "other": 7}}
    assert base == {"lr": 0, "cross_agent_coeffs": {"redundancy": 0, "other": 7}}
    config = SWEEP.at((2e-3, 0.5))
    assert config.lr == 2e-3 and config.cross_agent_coeffs == {"redundancy": 0.5}
    assert RANGE.of(config.to_dict()) == 2e-3 and COUPLING.of(config.to_dict()) == 0.5
    assert SWEEP.config.lr != 2e-3


def test_other_names_of_an_option_do_not_stand_beside_it():
    batch = Parameter("batch", ("train_batch_size_per_learner",), choices=(32, 64))
    space = sweep(parameters=(batch, Parameter("lambda", ("lambda_",), low=0.9, high=0.99))).space()
    assert not {"_train_batch_size_per_learner", "lambda"} & space.keys()
    assert space["train_batch_size_per_learner"].categories == [32, 64] and space["lambda_"].lower == 0.9


# --- mistakes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parameters": ()}, "nothing is varied"),
        ({"parameters": (RANGE, LR)}, "set the same option lr"),
        ({"trials": 0}, "trials is 0; needed: at least 1"),
        ({"trials": None}, "trials is None; needed: at least 1"),
        ({"steps": 0}, "steps is 0"),
        ({"scheduler": "hyperband"}, "needed: one of none, asha, pbt"),
        ({"search": "bayes"}, "needed: one of random, grid, optuna"),
        ({"search": "grid"}, "lr is the range 0.0001:0.01, and a grid needs lists"),
        ({"search": "grid", "parameters": (LR,)}, "a grid has as many trials as there are combinations"),
        ({"scheduler": "pbt", "search": "optuna"}, "needs search random or grid, not optuna"),
        ({"scheduler": "pbt", "trials": 1}, "needs at least 2 trials"),
        (
            {"scheduler": "pbt", "parameters": (Parameter("minibatch", ("minibatch_size",), choices=(8, 16)),)},
            "none of them is varied",
        ),
        (
            {"parameters": (Parameter("minibatch", ("minibatch_size",), choices=(16, 64)),)},
            "a trial with minibatch=64 cannot be run: minibatch_size=64 is larger than the batch",
        ),
        ({"parameters": (Parameter("clip", ("clip_parm",), choices=(0.1, 0.2)),)}, "did you mean 'clip_param'"),
    ],
)
def test_a_sweep_that_cannot_be_run(changes, message):
    with pytest.raises(ValueError, match=message):
        sweep(**changes).check()


def test_a_sweep_that_can_be_run():
    SWEEP.check()
    grid = sweep(search="grid", trials=None, parameters=(LR, COUPLING))
    grid.check()
    assert grid.num_trials == 6 and SWEEP.num_trials == 2


def test_without_optuna_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(ValueError, match=r"pip install 'thrust_rllib\[tune\]'"):
        sweep(search="optuna").check()


# --- the options of the command -----------------------------------------------------------------------------------


def built(**options):
    return build_sweep(SweepOptions(env="climbing", batch="512", seed=3, **options))


def test_options_become_a_sweep():
    found = built(
        lr="1e-4:1e-2", redundancy="0,0.1,1", minibatch="64,128", lambda_="0.9:0.99", entropy="0.02",
        vary=["clip_param=0.1,0.2"], settings=["vf_loss_coeff=0.25"], trials=5, steps=4096, scheduler="asha",
    )  # fmt: skip
    assert [(p.name, p.path) for p in found.parameters] == [
        ("lr", ("lr",)),
        ("redundancy", ("cross_agent_coeffs", "redundancy")),
        ("lambda", ("lambda_",)),
        ("minibatch", ("minibatch_size",)),
        ("clip_param", ("clip_param",)),
    ]
    assert [p.log for p in found.parameters] == [True, False, False, False, False]
    config = found.config
    assert config.entropy_coeff == 0.02 and config.vf_loss_coeff == 0.25 and config.seed == 3
    assert config.train_batch_size_per_learner == 512 and set(config.cross_agent_losses) == {"redundancy"}
    assert (found.trials, found.steps, found.scheduler, found.search) == (5, 4096, "asha", "random")
    found.check()
    assert found.at((1e-3, 0.1, 0.95, 64, 0.2)).lambda_ == 0.95


def test_a_learning_rate_that_is_not_given_falls_over_the_steps_of_a_trial():
    assert built(redundancy="0,1", minibatch="64", steps=2048).config.lr == [[0, 1e-3], [2048, 0.0]]
    assert built(redundancy="0,1", minibatch="64", lr="1e-4").config.lr == 1e-4


def test_a_grid_has_no_default_number_of_trials():
    assert built(lr="1e-4,1e-3", minibatch="64,128", search="grid").num_trials == 4
    assert built(lr="1e-4,1e-3", minibatch="64").num_trials == 8
    assert math.isclose(built(lr="1e-4,1e-3", minibatch="64").cpus_per_trial, 1)


def test_varying_a_single_value_is_a_mistake():
    with pytest.raises(ValueError, match="has one value; give a range or a list, or --set clip_param=0.1"):
        built(lr="1e-4,1e-3", vary=["clip_param=0.1"])
    with pytest.raises(ValueError, match="needed: NAME=VALUE"):
        built(vary=["clip_param"])


def test_the_tiny_configuration_is_valid():
    tiny().validate()
