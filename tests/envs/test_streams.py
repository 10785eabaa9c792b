import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from thrust_rllib.envs.streams import UniformStreams


@given(st.integers(1, 9).flatmap(lambda block: st.tuples(st.just(block), st.lists(st.integers(1, block), max_size=30))))
def test_rows_are_those_of_the_generator_whatever_the_portions(case):
    block, portions = case
    streams = UniformStreams(3, width=2, block=block)
    streams.seed([5, None, 6])
    taken = [streams.take(count) for count in portions]
    alone = [streams.take(1, np.array([2])) for _ in portions]
    total = sum(portions)
    for env, seed in ((0, 5), (2, 6)):
        expected = np.random.default_rng(seed).random((total + len(portions), 2))
        rows = np.concatenate([np.zeros((0, 2)), *[part[env] for part in taken]])
        if env == 2:
            rows = np.concatenate([rows, *[part[0] for part in alone]])
        np.testing.assert_array_equal(rows, expected[: len(rows)])
