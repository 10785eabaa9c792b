"""Names and dependencies of heads: what modules take, what they refuse, and how it is said."""

import gymnasium as gym
import numpy as np
import pytest
import torch

from tests.heads.worlds import CONDITIONAL, SKILLS
from thrust_rllib.rl_modules.heads import check_head_names, head_parents, module_head_names
from thrust_rllib.rl_modules.mlp import MLPModule
from thrust_rllib.rl_modules.multi_discrete import MultiDiscreteMLPModule
from thrust_rllib.rl_modules.recurrent import GRUModule, LSTMModule
from thrust_rllib.rl_modules.stacked import can_be_stacked

OBS = gym.spaces.Box(-1, 1, (5,))
BOX = gym.spaces.Box(-1, 1, (2,))


def module(space=SKILLS, kind=MLPModule, **model):
    return kind(observation_space=OBS, action_space=space, model_config={"fcnet_hiddens": [8], **model})


@pytest.mark.parametrize("kind", [MLPModule, MultiDiscreteMLPModule, LSTMModule, GRUModule])
def test_modules_take_conditional_heads(kind):
    built = module(kind=kind, **CONDITIONAL)
    assert built.policy_head.out_features == 3 + 3 * 4 and built.head_parents == (None, 0)
    assert module_head_names("m", built) == ("skill", "goal")
    assert module(kind=kind).policy_head.out_features == 7 and can_be_stacked([built, module(kind=kind, **CONDITIONAL)])
    assert not can_be_stacked([built, module(kind=kind)])


def test_same_widths_with_other_dependencies_are_not_stacked():
    space = gym.spaces.MultiDiscrete([2, 2, 2])
    one, other = (module(space, conditional_heads={child: "0"}) for child in ("1", "2"))
    assert one.policy_head.out_features == other.policy_head.out_features == 8
    assert not can_be_stacked([one, other])


def test_heads_may_stand_in_any_order_and_several_depend_on_one():
    built = module(gym.spaces.MultiDiscrete([4, 3, 2]), conditional_heads={"0": "1", "2": "1"})
    assert built.head_parents == (1, None, 1) and built.policy_head.out_features == 3 * 4 + 3 + 3 * 2


def test_default_names():
    assert module_head_names("m", module()) == ("0", "1")
    assert module_head_names("m", module(gym.spaces.Discrete(3))) == module_head_names("m", module(BOX)) == ("0",)
    assert module_head_names("m", module(), ["role", "goal"]) == ("role", "goal")
    assert check_head_names(gym.spaces.Discrete(3), ("move",)) == ("move",)


def test_parameters_of_plain_heads_do_not_fit():
    state = module().get_state()
    with pytest.raises(ValueError, match=r"policy_head.weight is \[7, 8\], needed \[15, 8\].*conditional_heads"):
        module(**CONDITIONAL).set_state(state)
    built = module(**CONDITIONAL)
    built.set_state({name: np.zeros_like(value) for name, value in built.get_state().items()})
    assert all((p == 0).all() for p in built.parameters())


@pytest.mark.parametrize(
    "space, model, message",
    [
        (SKILLS, {"head_names": ("skill",)}, r"head_names has 1 names, \['skill'\], but actions in .* have 2 heads"),
        (SKILLS, {"head_names": ("skill", "skill")}, "a name twice"),
        (SKILLS, {"head_names": "skill"}, "needed: a tuple of names"),
        (SKILLS, {"head_names": ("skill", 3)}, "needed: a tuple of names"),
        (BOX, {"head_names": ("x",)}, "which has no separate heads"),
        (gym.spaces.Discrete(3), {"head_names": ("a", "b")}, r"have 1 heads"),
        (BOX, {"conditional_heads": {"1": "0"}}, "needed: MultiDiscrete"),
        (gym.spaces.Discrete(3), {"conditional_heads": {"1": "0"}}, "needed: MultiDiscrete"),
        (SKILLS, {**CONDITIONAL, "conditional_heads": {"goal": "skil"}}, r"names 'skil'; did you mean 'skill'\?"),
        (SKILLS, {**CONDITIONAL, "conditional_heads": {"gaol": "skill"}}, r"names 'gaol'; did you mean 'goal'\?"),
        (SKILLS, {"conditional_heads": {"goal": "skill"}}, r"The heads of .* are \['0', '1'\] \(head_names"),
        (SKILLS, {**CONDITIONAL, "conditional_heads": {"goal": "goal"}}, "needed: a head that depends on none"),
        (
            gym.spaces.MultiDiscrete([2, 2, 2]),
            {"conditional_heads": {"1": "0", "2": "1"}},
            "'2' depends on '1', which depends on '0' itself",
        ),
        (SKILLS, {"conditional_heads": ["goal"]}, "needed: a dict"),
        (SKILLS, {"conditional_head": {"goal": "skill"}}, "did you mean 'conditional_heads'"),
    ],
)
def test_heads_that_do_not_fit_are_refused(space, model, message):
    with pytest.raises(ValueError, match=message):
        module(space, **model)


def test_two_places_that_disagree_are_refused():
    with pytest.raises(
        ValueError, match=r"module 'm': head_names is \['a', 'b'\].*\['skill', 'goal'\] in its model_con"
    ):
        module_head_names("m", module(**CONDITIONAL), ("a", "b"))
    with pytest.raises(ValueError, match=r"module 'm': head_names has 3 names"):
        module_head_names("m", module(), ("a", "b", "c"))
    assert module_head_names("m", module(**CONDITIONAL), ["skill", "goal"]) == ("skill", "goal")


def test_nothing_depends_without_conditional_heads():
    assert head_parents(SKILLS, ("0", "1"), None) is None and head_parents(SKILLS, ("0", "1"), {}) is None
    assert head_parents(SKILLS, ("0", "1"), {"0": "1"}) == (1, None)


def test_the_mode_of_a_module_is_its_skills_and_then_its_goals():
    built = module(**CONDITIONAL)
    with torch.no_grad():
        for p in built.parameters():
            p.zero_()
        built.policy_head.bias[2] = 1.0  # skill 2
        built.policy_head.bias[3 + 2 * 4 + 1] = 1.0  # its goal 1
        built.policy_head.bias[3 + 0 * 4 + 3] = 9.0  # another skill's goal, however probable
    logits = built.forward_inference({"obs": torch.zeros(1, 5)})["action_dist_inputs"]
    assert built.get_inference_action_dist_cls().from_logits(logits).to_deterministic().sample().tolist() == [[2, 1]]
