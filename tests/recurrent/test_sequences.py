"""Padded sequences: every row that an agent acted in stands in exactly one, in its order, and nothing else is read."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import hand_batch, hand_streams
from thrust_rllib.minibatches import Units
from thrust_rllib.rl_modules.memory import MemoryLayout
from thrust_rllib.sequences import ModuleSequences, RowSequences, SequenceLayout, TimeAxis, row_sequences


def rows_of_segments(begins, present):
    """{(agent, segment): flat rows j·B + b}, by a loop."""
    found = {}
    for j in range(len(present)):
        segment = -1
        for b, begin in enumerate(begins):
            segment += bool(begin)
            if present[j, b]:
                found.setdefault((j, segment), []).append(j * len(begins) + b)
    return found


@st.composite
def cases(draw):
    count = draw(st.integers(1, 40))
    begins = np.array([True, *draw(st.lists(st.booleans(), min_size=count - 1, max_size=count - 1))])
    agents = draw(st.integers(1, 3))
    seed = draw(st.integers(0, 2**16))
    present = np.random.default_rng(seed).random((agents, count)) < draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]))
    return begins, present, draw(st.sampled_from([None, 1, 7, 64]))


@settings(deadline=None, max_examples=150)
@given(cases())
def test_the_layout_holds_every_acted_row_once_and_in_order(case):
    begins, present, max_rows = case
    layout = SequenceLayout(begins, present, len(present), "cpu", max_rows)
    expected = rows_of_segments(begins, present)
    num_segments = int(begins.sum())
    seen = {}
    for call in layout.calls if expected else []:
        assert max_rows is None or call.rows.numel() <= max_rows or len(call.rows) == 1
        for rows, segment in zip(call.rows.tolist(), call.segments.tolist(), strict=True):
            key = divmod(segment, num_segments)
            assert key not in seen
            seen[key] = rows[: len(expected[key])]
            assert rows[len(expected[key]) :] == [expected[key][-1]] * (len(rows) - len(expected[key]))
    assert seen == expected
    # What comes out of each place finds its way back to its row; absent rows get zeros.
    outputs = [(call.rows + 1.0)[..., None] for call in layout.calls]
    back = layout.by_row(outputs)
    assert torch.equal(
        back[:, 0], torch.from_numpy(np.where(present.ravel(), np.arange(present.size) + 1.0, 0.0)).float()
    )


@settings(deadline=None, max_examples=50)
@given(cases())
def test_everybody_present_needs_no_mask(case):
    begins, present, max_rows = case
    masked = SequenceLayout(begins, np.ones_like(present), len(present), "cpu", max_rows)
    layout = SequenceLayout(begins, None, len(present), "cpu", max_rows)
    for mine, other in zip(layout.calls, masked.calls, strict=True):
        assert torch.equal(mine.rows, other.rows) and torch.equal(mine.segments, other.segments)


def test_padding_is_bounded_by_more_calls():
    lengths = [2000, *[10] * 100]
    begins = np.zeros(sum(lengths), bool)
    begins[np.cumsum([0, *lengths[:-1]])] = True
    layout = SequenceLayout(begins, None, 1, "cpu")
    assert [tuple(call.rows.shape) for call in layout.calls] == [(1, 2000), (100, 10)]
    even = np.zeros(120, bool)
    even[::20] = True
    assert [tuple(call.rows.shape) for call in SequenceLayout(even, None, 2, "cpu").calls] == [(12, 20)]


def two_columns():
    """5 steps of 2 environments: sequences of 3, an episode begins at (2, 0); (4, 1) is padding."""
    valid = np.ones((5, 2), bool)
    valid[4, 1] = False
    start = np.zeros((5, 2), bool)
    start[0, 1] = start[2, 0] = True
    obs = np.arange(10, dtype=np.float32).reshape(5, 1, 2, 1)
    truncated = np.zeros((5, 1, 2), bool)
    truncated[1, 0, 0] = True
    present = valid[:, None].copy()
    streams = hand_streams(
        ["a"], obs, truncated=truncated, present=present, bootstrap_obs=np.array([[[100.0], [101.0], [102.0]]])
    )
    streams.state_in = np.arange(4, dtype=np.float32).reshape(1, 4, 1)
    return hand_batch({"m": streams}, [2, 7, 8], valid=valid, episode_start=start, sequence_rows=np.array([0, 1, 6, 7]))


def test_rows_know_their_training_sequence():
    sequences = row_sequences(two_columns())
    #                        (0,0) (0,1) (1,0) (1,1) (2,0) (2,1) (3,0) (3,1) (4,0)
    assert sequences.unit.tolist() == [0, 1, 0, 1, 0, 1, 2, 3, 2]
    assert sequences.begins.tolist() == [True, True, False, False, True, False, True, True, False]
    assert sequences.fresh.tolist() == [False, True, False, False, True, False, False, False, False]
    units = sequences.units()
    assert units.rows.tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 7] and units.lengths.tolist() == [3, 3, 2, 1]


def test_the_time_axis_has_an_extra_step_behind_each_bootstrap():
    batch = two_columns()
    axis = TimeAxis.of(batch)
    obs = np.concatenate([batch.modules["m"].obs.ravel(), batch.modules["m"].bootstrap_obs.ravel()])
    along = obs[axis.obs_index(batch, 1)][0]
    assert along.tolist() == [0, 2, 100, 4, 6, 8, 102, 1, 3, 5, 7, 101]
    assert axis.present(batch, "m").all()
    assert axis.sequences.begins.tolist() == [bool(x) for x in (1, 0, 0, 1, 1, 0, 0, 1, 0, 0, 1, 0)]


def test_no_extra_step_in_the_middle_of_another_agents_sequence():
    """Agent a is truncated at step 1 and gone; b goes on, so the extra step there is none of its own."""
    truncated, present = np.zeros((3, 2, 1), bool), np.ones((3, 2, 1), bool)
    truncated[1, 0] = True
    present[2, 0] = False
    streams = hand_streams(
        ["a", "b"], np.zeros((3, 2, 1, 1)), truncated=truncated, present=present, bootstrap_obs=np.zeros((2, 2, 1))
    )
    streams.state_in = np.zeros((2, 1, 1), np.float32)
    batch = hand_batch({"m": streams}, [1, 2], sequence_rows=np.array([0]))
    #                                                       0     1    1+    2     2+
    assert TimeAxis.of(batch).present(batch, "m").tolist() == [
        [True, True, True, False, False],
        [True, True, False, True, True],
    ]


def test_a_selection_keeps_what_begins():
    rows = RowSequences(np.array([0, 1, 0]), np.array([True, False, False]), np.array([True, True, False]), None)
    chosen = rows.select(np.array([0, 2]))
    assert chosen.unit.tolist() == [0, 0] and chosen.begins.tolist() == [True, False]
    assert isinstance(rows.units(), Units)


@pytest.mark.parametrize("missing", [[0, 6, 7], [1, 6, 7]])
def test_every_column_begins_a_sequence(missing):
    batch = two_columns()
    batch.sequence_rows = np.array(missing)
    for streams in batch.modules.values():
        streams.state_in = streams.state_in[:, 1:]
    with pytest.raises(ValueError, match="sequence_rows lacks"):
        batch.check()


def test_where_nobody_acted_outputs_are_zero_and_move_nothing():
    """A minibatch of whole sequences may hold none of an agent that ended early."""
    present = np.zeros((1, 3), bool)
    layout = SequenceLayout(np.array([True, False, True]), present, 1, "cpu")
    memory = MemoryLayout({"h": torch.zeros(2)})
    cell = torch.nn.GRU(1, 2, batch_first=True)

    def forward(batch):
        return {"logits": cell(batch["obs"], batch["state_in"]["h"][None])[0]}

    logits = ModuleSequences(layout, torch.ones(2, 2), memory).run(torch.ones(3, 1), forward)["logits"]
    assert logits.tolist() == [[0.0, 0.0]] * 3
    logits.sum().backward()
    assert all(not parameter.grad.any() for parameter in cell.parameters())


def test_no_sequence_begins_at_padding():
    batch = two_columns()
    batch.sequence_rows = np.array([0, 1, 6, 9])
    with pytest.raises(ValueError, match=r"sequence_rows has \[9\], which are padding"):
        batch.check()


def test_an_agent_that_goes_on_behind_its_end_is_an_error():
    batch = two_columns()
    batch.episode_start[2, 0] = False  # truncated at step 1, and no episode begins
    with pytest.raises(ValueError, match=r"agent 'a' .* acts in row \(t, e\) = \(2, 0\), behind its own end"):
        batch.check()
