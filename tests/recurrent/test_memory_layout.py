"""States as vectors of numbers, and the length of a team's training sequences."""

import numpy as np
import pytest
import torch
import tree
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

from tests.support import box, discrete
from thrust_rllib import GRUModule, LSTMModule, MLPModule
from thrust_rllib.rl_modules.memory import MemoryLayout, joint_sequence_length


def module_of(kind, **model_config):
    return kind(observation_space=box(4), action_space=discrete(2), model_config=model_config)


def rllibs(**options):
    config = DefaultModelConfig(use_lstm=True, fcnet_hiddens=[6], lstm_cell_size=5, **options)
    return DefaultPPOTorchRLModule(observation_space=box(4), action_space=discrete(2), model_config=vars(config))


class Remembers(MLPModule):
    """A module of a user's own, with any state."""

    initial = None

    def get_initial_state(self):
        return self.initial


def remembering(initial, **attributes):
    return module_of(type("Remembering", (Remembers,), {"initial": initial, **attributes}))


# ------------------------------------------------------------------------------------------- layouts


def test_where_numbers_lie():
    """Leaves follow each other as their names are sorted, whatever the order of the dict."""
    module = remembering({"b": torch.tensor([1.0, 2.0]), "a": {"z": np.array([[3.0], [4.0]]), "y": torch.tensor(5.0)}})
    layout = MemoryLayout.of(module)
    assert layout.size == 5 and layout.initial.dtype == np.float32
    np.testing.assert_array_equal(layout.initial, [5, 3, 4, 1, 2])
    vectors = torch.arange(15.0).view(3, 5)
    state = layout.unflatten(vectors)
    assert state["a"]["z"].shape == (3, 2, 1) and state["a"]["y"].shape == (3,)
    np.testing.assert_array_equal(state["b"], [[3, 4], [8, 9], [13, 14]])
    assert torch.equal(layout.flatten(state), vectors)


def test_types_of_leaves_come_back():
    initial = {"seen": np.array([3], np.int64), "near": torch.tensor([True, False]), "x": np.zeros(2)}
    layout = MemoryLayout.of(remembering(initial))
    vectors = layout.flatten(
        {"seen": torch.tensor([[7]]), "near": torch.tensor([[False, True]]), "x": torch.ones(1, 2)}
    )
    assert vectors.dtype == torch.float32
    state = layout.unflatten(vectors)
    assert [state[k].dtype for k in ("seen", "near", "x")] == [torch.int64, torch.bool, torch.float64]
    assert state["seen"].item() == 7 and state["near"].tolist() == [[False, True]]


@settings(deadline=None, max_examples=60)
@given(
    leaves=st.dictionaries(
        st.sampled_from("abcde"), nps.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3), min_size=1
    ),
    rows=st.integers(0, 4),
)
def test_flatten_undoes_unflatten(leaves, rows):
    initial = {"nested": ({name: np.zeros(shape, np.float32) for name, shape in leaves.items()}, [np.ones(2)])}
    layout = MemoryLayout(initial)
    vectors = torch.randn(rows, layout.size)
    state = layout.unflatten(vectors)
    assert {name: tuple(x.shape[1:]) for name, x in state["nested"][0].items()} == leaves
    assert torch.equal(layout.flatten(state), vectors)


@pytest.mark.parametrize("kind, shared, size", [(LSTMModule, True, 10), (GRUModule, True, 5), (LSTMModule, False, 20)])
def test_own_modules(kind, shared, size):
    layout = MemoryLayout.of(module_of(kind, cell_size=5, vf_share_layers=shared))
    assert layout.size == size and (layout.initial == 0).all()
    state = layout.unflatten(torch.arange(2.0 * size).view(2, size))
    if kind is LSTMModule and shared:
        assert list(state) == ["c", "h"] and state["h"][0].tolist() == [5, 6, 7, 8, 9]
    if not shared:
        assert state["critic"]["c"][0].tolist() == [10, 11, 12, 13, 14]


@pytest.mark.parametrize("shared", [True, False])
def test_rllibs_own_recurrent_module_fits(shared):
    module = rllibs(vf_share_layers=shared)
    layout = MemoryLayout.of(module)
    assert layout.size == (10 if shared else 20)
    batch = {Columns.OBS: torch.randn(3, 7, 4), Columns.STATE_IN: layout.unflatten(torch.randn(3, layout.size))}
    outputs = module.forward_train(batch)
    assert outputs[Columns.ACTION_DIST_INPUTS].shape == (3, 7, 2)
    after = layout.flatten(outputs[Columns.STATE_OUT])
    assert after.shape == (3, layout.size)
    again = module.forward_train({**batch, Columns.STATE_IN: layout.unflatten(after)})
    assert not torch.allclose(again[Columns.ACTION_DIST_INPUTS], outputs[Columns.ACTION_DIST_INPUTS])


def test_gradients_pass():
    layout = MemoryLayout.of(module_of(GRUModule, cell_size=3))
    vectors = torch.randn(2, 3, requires_grad=True)
    layout.flatten(tree.map_structure(lambda x: 2 * x, layout.unflatten(vectors))).sum().backward()
    assert (vectors.grad == 2).all()


def test_modules_without_a_state():
    assert MemoryLayout.of(module_of(MLPModule)) is None
    assert MemoryLayout.of(remembering({})) is None


@pytest.mark.parametrize(
    "state",
    [
        {"c": torch.zeros(2, 5)},
        {"c": torch.zeros(2, 5), "g": torch.zeros(2, 5)},
        {"c": torch.zeros(2, 5), "h": torch.zeros(2, 4)},
        {"c": torch.zeros(5), "h": torch.zeros(5)},
        {"c": {"h": torch.zeros(2, 5)}, "h": torch.zeros(2, 5)},
        torch.zeros(2, 10),
    ],
)
def test_states_that_do_not_fit_are_named(state):
    layout = MemoryLayout.of(module_of(LSTMModule, cell_size=5))
    layout.flatten({"h": torch.zeros(2, 5), "c": torch.zeros(2, 5)})
    with pytest.raises(ValueError, match=r"needed, behind the axis of rows: \{'c': \(5,\), 'h': \(5,\)\}"):
        layout.flatten(state)


@pytest.mark.parametrize("shape", [(2, 9), (10,), (2, 1, 10)])
def test_vectors_that_do_not_fit_are_named(shape):
    layout = MemoryLayout.of(module_of(LSTMModule, cell_size=5))
    with pytest.raises(ValueError, match=r"needed: \[rows, 10\], the numbers of the leaves \{'c': \(5,\), 'h'"):
        layout.unflatten(torch.zeros(shape))


# ------------------------------------------------------------------------------------------- sequence lengths


@pytest.mark.parametrize(
    "modules, length",
    [
        ({"a": (MLPModule, {})}, None),
        ({"a": (MLPModule, {}), "b": (GRUModule, {"max_seq_len": 7})}, 7),
        ({"a": (LSTMModule, {}), "b": (GRUModule, {"max_seq_len": None})}, None),
        ({"a": (LSTMModule, {"use_lstm": True}), "b": (GRUModule, {"max_seq_len": 20})}, 20),
    ],
)
def test_the_length_that_all_agree_on(modules, length):
    assert joint_sequence_length({m: module_of(kind, **config) for m, (kind, config) in modules.items()}) == length


def test_lengths_of_other_modules_stand_in_their_model_config():
    assert joint_sequence_length({"a": rllibs(max_seq_len=6), "b": module_of(LSTMModule, max_seq_len=6)}) == 6
    assert joint_sequence_length({"a": remembering({"x": np.zeros(2)})}) is None


def test_lengths_that_differ_are_named():
    modules = {"a": module_of(LSTMModule), "b": rllibs(max_seq_len=20), "c": module_of(MLPModule)}
    with pytest.raises(ValueError, match=r"max_seq_len differs between modules: \{'a': None, 'b': 20\}"):
        joint_sequence_length(modules)


@pytest.mark.parametrize("length", [0, -3, 2.5, "20", True])
def test_a_length_that_is_none_is_named(length):
    with pytest.raises(ValueError, match=f"max_seq_len of module 'a' is {length!r}; needed: a whole number ≥ 1"):
        joint_sequence_length({"a": remembering({"x": np.zeros(2)}, max_seq_len=length)})
