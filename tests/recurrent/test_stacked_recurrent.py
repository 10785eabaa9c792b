"""Acting of recurrent modules in numpy: against their own forward passes, and when it is not done."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from ray.rllib.core.columns import Columns

from tests.support import box, declared_config, discrete, make_runner
from thrust_rllib import GRUModule, LSTMModule, MLPModule
from thrust_rllib.rl_modules.distributions import distribution_class
from thrust_rllib.rl_modules.memory import MemoryLayout
from thrust_rllib.rl_modules.recurrent import RecurrentModule
from thrust_rllib.rl_modules.stacked import can_be_stacked
from thrust_rllib.rl_modules.stacked_recurrent import StackedRecurrentPolicies
from thrust_rllib.sampling.acting import ModuleActing
from thrust_rllib.sampling.agent_groups import agent_groups
from thrust_rllib.sampling.plain_acting import Noise, PlainActing

KINDS = [LSTMModule, GRUModule]
SPACES = {
    "discrete": gym.spaces.Discrete(5),
    "multi_discrete": gym.spaces.MultiDiscrete([3, 2, 4]),
    "box": gym.spaces.Box(-1.0, 1.0, (2,), np.float32),
}


def module_of(kind=LSTMModule, space=SPACES["discrete"], obs=(6,), inference_only=True, **model):
    module = kind(
        observation_space=gym.spaces.Box(-1.0, 1.0, obs, np.float32),
        action_space=space,
        inference_only=inference_only,
        model_config={"cell_size": 8, **model} if issubclass(kind, RecurrentModule) else model,
    )
    for param in module.parameters():
        torch.nn.init.normal_(param, std=0.4)
    return module


def steps_of_the_modules(modules, obs, state):
    """Logits [m, R, A] and the next state [m, R, S] of the modules' own forward passes."""
    layouts = [MemoryLayout.of(module) for module in modules]
    batches = [
        {Columns.OBS: torch.from_numpy(x)[:, None], Columns.STATE_IN: layout.unflatten(torch.from_numpy(s))}
        for x, s, layout in zip(obs, state, layouts, strict=True)
    ]
    outputs = [module.forward_exploration(batch) for module, batch in zip(modules, batches, strict=True)]
    logits = torch.stack([x[Columns.ACTION_DIST_INPUTS][:, 0] for x in outputs])
    after = [layout.flatten(x[Columns.STATE_OUT]) for x, layout in zip(outputs, layouts, strict=True)]
    return logits.numpy(), torch.stack(after).numpy()


# ------------------------------------------------------------------------------------------- the numpy twin


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("hiddens, activation", [([], "tanh"), ([7, 5], "tanh"), ([7], "relu")])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_fifty_steps_equal_the_modules_one_by_one(kind, shared, hiddens, activation, name):
    model = {"vf_share_layers": shared, "fcnet_hiddens": hiddens, "fcnet_activation": activation}
    modules = [module_of(kind, SPACES[name], obs=(2, 3), **model) for _ in range(3)]
    assert can_be_stacked(modules)
    twin = StackedRecurrentPolicies(modules)
    rng = np.random.default_rng(0)
    state = np.zeros((3, 9, MemoryLayout.of(modules[0]).size), np.float32)
    theirs = state
    for _ in range(50):
        obs = rng.normal(size=(3, 9, 2, 3)).astype(np.float32)
        before = state.copy()
        logits, after = twin(obs, state)
        np.testing.assert_array_equal(state, before)
        assert logits.dtype == after.dtype == np.float32 and not np.shares_memory(after, state)
        expected, theirs = steps_of_the_modules(modules, obs, theirs)
        np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(after, theirs, rtol=1e-5, atol=1e-5)
        state = after
    assert np.abs(state[0] - state[1]).max() > 0.1  # three modules, and every number of the state in use
    assert (state.std(axis=1) > 1e-3).all()


@pytest.mark.parametrize("kind", KINDS)
def test_large_inputs_saturate(kind):
    modules = [module_of(kind)]
    state = np.zeros((1, 2, MemoryLayout.of(modules[0]).size), np.float32)
    obs = np.stack([np.full((6,), 1e30), np.full((6,), -1e30)])[None].astype(np.float32)
    with np.errstate(all="raise", under="ignore"):
        logits, after = StackedRecurrentPolicies(modules)(obs, state)
    expected, theirs = steps_of_the_modules(modules, obs, state)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(after, theirs, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------- what is not stacked


class OtherForward(LSTMModule):
    def _forward(self, batch, **kwargs):
        return super()._forward(batch, **kwargs)


class OtherCell(GRUModule):
    def _run(self, cell, inputs, state):
        outputs, state = super()._run(cell, inputs, state)
        return outputs * 2.0, state


class OtherStart(LSTMModule):
    def get_initial_state(self):
        return {name: x + 1.0 for name, x in super().get_initial_state().items()}


class OwnKind(RecurrentModule):
    """A cell of a user's own, under a name of its own."""

    cell_name = "own"

    def _new_cell(self, num_inputs):
        return torch.nn.Linear(num_inputs, self.cell_size)

    def _initial(self):
        return {"h": torch.zeros(self.cell_size)}

    def _run(self, cell, inputs, state):
        outputs = torch.tanh(cell(inputs) + state["h"][:, None])
        return outputs, {"h": outputs[:, -1]}


class OtherName(LSTMModule):
    """Acts as its parent."""


def changed(part, change, **model):
    module = module_of(**model)
    change(getattr(module, part) if part else module)
    return module


def with_cell(cell):
    module = module_of()
    module.cell = cell
    return module


@pytest.mark.parametrize("model", [{}, {"vf_share_layers": False, "fcnet_hiddens": [4]}])
@pytest.mark.parametrize("kind", [*KINDS, OtherName])
def test_plain_recurrent_modules_are_stacked(kind, model):
    for inference_only in (True, False):
        modules = [module_of(kind, inference_only=inference_only, **model) for _ in range(2)]
        assert can_be_stacked(modules)


@pytest.mark.parametrize(
    "other",
    [
        lambda: module_of(GRUModule),
        lambda: module_of(MLPModule, fcnet_hiddens=[8]),
        lambda: module_of(cell_size=9),
        lambda: module_of(obs=(7,)),
        lambda: module_of(space=discrete(4)),
        lambda: module_of(fcnet_hiddens=[6]),
        lambda: module_of(vf_share_layers=False),
    ],
)
def test_modules_that_differ_are_not_alike(other):
    assert can_be_stacked([other(), other()])
    assert not can_be_stacked([module_of(), other()]) and not can_be_stacked([other(), module_of()])


@pytest.mark.parametrize(
    "other",
    [
        lambda: module_of(OtherForward),
        lambda: module_of(OtherCell),
        lambda: module_of(OtherStart),
        lambda: module_of(OwnKind),
        lambda: module_of(fcnet_hiddens=[6], fcnet_activation="gelu"),
        lambda: module_of().double(),
        lambda: with_cell(torch.nn.LSTM(6, 8, num_layers=2, batch_first=True)),
        lambda: with_cell(torch.nn.LSTM(6, 8)),
        lambda: with_cell(torch.nn.LSTM(6, 8, bias=False, batch_first=True)),
        lambda: with_cell(torch.nn.LSTM(6, 8, proj_size=3, batch_first=True)),
        lambda: with_cell(torch.nn.LSTM(6, 8, bidirectional=True, batch_first=True)),
        lambda: with_cell(torch.nn.utils.parametrizations.weight_norm(module_of().cell, "weight_hh_l0")),
        lambda: changed("cell", lambda cell: cell.register_forward_hook(lambda *_: None)),
        lambda: changed("cell", lambda cell: setattr(cell, "forward", lambda *x: x)),
        lambda: changed("critic_cell", lambda cell: cell.register_forward_hook(lambda *_: None), vf_share_layers=False),
        lambda: changed("critic_trunk", lambda x: x.register_forward_hook(lambda *_: None), vf_share_layers=False),
        lambda: changed(None, lambda module: setattr(module, "_run", lambda *x: x)),
        lambda: changed(None, lambda module: setattr(module, "policy_head", torch.nn.Linear(8, 5, bias=False))),
    ],
)
def test_what_a_user_changed_acts_by_its_own_forward(other):
    assert not can_be_stacked([other()])


# ------------------------------------------------------------------------------------------- acting


def acting_of(space, kind, plain, seed=0, agents=2):
    """Agents with equal networks in both cases, acting by numpy or by their modules; and the size of their memory."""
    torch.manual_seed(1)
    config = declared_config([box(3)] * agents, [space] * agents, model={"cell": kind.cell_name, "cell_size": 8})
    runner = make_runner(config)
    for each in runner.module.values():
        for param in each.parameters():
            torch.nn.init.normal_(param, std=0.7)
    (group,) = agent_groups(runner.env, runner.module_of, True, False)
    modules = [runner.module[m].unwrapped() for m in group.module_ids]
    generator = torch.Generator().manual_seed(seed)
    size = MemoryLayout.of(modules[0]).size
    if plain:
        return PlainActing(group, modules, Noise(generator)), size
    return ModuleActing(group, modules, generator, torch.device("cpu")), size


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("kind", KINDS)
def test_plain_acting_is_the_twin_of_the_modules(kind, name):
    space = SPACES[name]
    (fast, size), (slow, _) = acting_of(space, kind, True), acting_of(space, kind, False)
    rng = np.random.default_rng(0)
    memory = expected_memory = np.zeros((2, 5, size), np.float32)
    mask = None
    if name != "box":
        mask = np.ones((2, 5, distribution_class(space).required_input_dim(space)), bool)
        mask[:, :, 0] = False
    for step in range(12):
        obs, explore = rng.normal(size=(2, 5, 3)).astype(np.float32), step % 2 == 0
        logits, actions, memory = fast.act(obs, mask, explore, False, memory)
        right, expected, expected_memory = slow.act(obs, mask, explore, False, expected_memory)
        np.testing.assert_allclose(logits, right, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(memory, expected_memory, rtol=1e-5, atol=1e-5)
        assert memory.shape == (2, 5, size)
        assert actions.shape == expected.shape and actions.dtype == expected.dtype
        if not explore:
            np.testing.assert_allclose(actions, expected, atol=1e-5)
        if mask is not None:
            assert (actions.reshape(2, 5, -1)[..., 0] > 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_random_actions_step_the_memory_too(kind):
    acting, size = acting_of(SPACES["discrete"], kind, True)
    obs, memory = np.ones((2, 500, 3), np.float32), np.zeros((2, 500, size), np.float32)
    logits, actions, after = acting.act(obs, None, False, True, memory)
    np.testing.assert_array_equal(after, acting.act(obs, None, True, False, memory)[2])
    assert np.abs(after).max() > 0.1 and (logits == 0).all()
    np.testing.assert_allclose(np.bincount(actions.ravel(), minlength=5) / actions.size, 0.2, atol=0.06)


def test_a_recurrent_module_needs_its_memory():
    acting, _ = acting_of(SPACES["discrete"], GRUModule, True)
    with pytest.raises(ValueError, match="memory=None; needed: their states"):
        acting.act(np.zeros((2, 1, 3), np.float32), None, True, False, None)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_have_diverged_warn_as_little_as_torch_does(kind):
    acting, size = acting_of(SPACES["box"], kind, True)
    acting._policies._branches[0][1]._input[:] = 3e38
    with np.errstate(all="raise"):
        logits, _, _ = acting.act(
            np.full((2, 1, 3), -1e10, np.float32), None, True, False, np.zeros((2, 1, size), np.float32)
        )
    assert logits.shape == (2, 1, 4)
