"""Pictures of a coverage world show what there is; GIFs can be read."""

import numpy as np
import pytest
from PIL import Image

from tests.envs.coverage.play import random_actions, reset, step
from thrust_rllib.envs.animation import MAX_SIDE, save_gif, small_image
from thrust_rllib.envs.coverage import drawing
from thrust_rllib.envs.coverage.drawing import draw

GRID = 8


def world(positions, links=None, grid=GRID, coverage=0.25, lambda2=0.5, scale=20):
    """A picture, and its part below the bars; the last column is wall, the first two rows are covered."""
    walls = np.zeros((grid, grid), bool)
    walls[:, -1] = True
    covered = np.zeros((grid, grid), bool)
    covered[:2, :-1] = True
    links = np.zeros((len(positions),) * 2, bool) if links is None else links
    picture = draw(walls, covered, np.array(positions).reshape(-1, 2), links, coverage, lambda2, scale)
    return picture, picture[-grid * (picture.shape[1] // grid) :]


def middle(board, row, column, scale=20):
    return tuple(board[row * scale + scale // 2, column * scale + scale // 2].tolist())


def count(picture, colour):
    return int((picture == colour).all(axis=-1).sum())


def test_cells_and_agents_have_their_colours():
    picture, board = world([(4, 3), (6, 1)])
    assert picture.dtype == np.uint8 and picture.shape == (GRID * 20 + drawing.bars_height(GRID * 20), GRID * 20, 3)
    assert middle(board, 0, 0) == drawing.COVERED and middle(board, 5, 5) == drawing.UNSEEN
    assert middle(board, 3, GRID - 1) == drawing.WALL
    assert middle(board, 4, 3) == drawing.AGENTS[0] and middle(board, 6, 1) == drawing.AGENTS[1]
    assert len(set(drawing.AGENTS)) == len(drawing.AGENTS)


@pytest.mark.parametrize("number", [2, 3, 4, 5])
def test_agents_on_one_cell_are_all_seen_inside_of_it(number):
    _, board = world([(3, 3)] * number, scale=40)
    outside = board.copy()
    outside[3 * 40 - 2 : 4 * 40 + 2, 3 * 40 - 2 : 4 * 40 + 2] = 0
    sizes = [count(board, colour) for colour in drawing.AGENTS[:number]]
    assert min(sizes) > 40 and max(sizes) - min(sizes) <= 0.2 * max(sizes)
    assert all(count(outside, colour) == 0 for colour in drawing.AGENTS[:number])


def test_links_are_lines_between_their_agents_alone():
    cells = [(2, 0), (2, 6), (7, 0)]
    linked = np.zeros((3, 3), bool)
    linked[0, 1] = linked[1, 0] = True
    _, without = world(cells)
    _, board = world(cells, linked)
    changed = np.argwhere((board != without).any(axis=-1))
    rows, columns = changed[:, 0] // 20, changed[:, 1] // 20
    assert set(rows.tolist()) == {2} and set(columns.tolist()) == set(range(7))
    _, itself = world(cells, np.eye(3, dtype=bool))
    np.testing.assert_array_equal(itself, without)


@pytest.mark.parametrize(
    "share, shown", [(-0.5, 0), (np.nan, 0), (0, 0), (0.25, 0.25), (0.8, 0.8), (1, 1), (3.5, 1), (np.inf, 1)]
)
@pytest.mark.parametrize(
    "name, colour, other",
    [
        ("coverage", drawing.COVERAGE_BAR, drawing.CONNECTED_BAR),
        ("lambda2", drawing.CONNECTED_BAR, drawing.COVERAGE_BAR),
    ],
)
def test_bars_grow_with_their_number_and_are_full_at_1(name, colour, other, share, shown):
    picture, _ = world([(4, 4)], **{"coverage": 0.0, "lambda2": 0.0, name: share})
    full, _ = world([(4, 4)], **{"coverage": 0.0, "lambda2": 0.0, name: 1.0})
    assert count(full, colour) > 400 and count(picture, other) == 0
    assert count(picture, colour) / count(full, colour) == pytest.approx(shown, abs=0.01)


@pytest.mark.parametrize("grid, scale", [(1, None), (2, 1), (5, 3), (16, None), (33, None), (100, None), (600, None)])
def test_any_size_can_be_drawn(grid, scale):
    picture, board = world([(0, 0), (grid - 1, 0), (grid - 1, grid - 1)], ~np.eye(3, dtype=bool), grid, scale=scale)
    assert board.shape[0] == board.shape[1] and board.shape[0] % grid == 0
    assert max(picture.shape) <= drawing.SIDE or board.shape[0] == grid


def test_no_agents_and_a_wrong_scale():
    assert count(world([])[1], drawing.WALL) == GRID * 20 * 20
    with pytest.raises(ValueError, match="scale is 0; needed: pixels of a cell's side, at least 1"):
        world([(1, 1)], scale=0)


def test_a_gif_shows_its_pictures_at_its_speed(tmp_path):
    pictures = [world([(4, column)])[0] for column in range(6)]
    save_gif(tmp_path / "world.gif", pictures, fps=5)
    with Image.open(tmp_path / "world.gif") as gif:
        assert (gif.n_frames, gif.info["duration"], gif.info["loop"]) == (6, 200, 0)
        for index, picture in enumerate(pictures):
            gif.seek(index)
            shown = np.asarray(gif.convert("RGB"), int)
            board = shown[-GRID * 20 :]
            assert shown.shape == picture.shape and np.abs(shown - picture).mean() < 2
            np.testing.assert_allclose(middle(board, 4, index), drawing.AGENTS[0], atol=12)


@pytest.mark.parametrize("terrain", ["open", "rooms", "random"])
def test_an_episode_of_a_world_becomes_a_gif(tmp_path, terrain):
    env, _, _ = reset([1, 2], grid=12, num_agents=3, terrain=terrain, horizon=5)
    pictures, rng = [env.render(1)], np.random.default_rng(0)
    agents = [count(pictures[0], colour) for colour in drawing.AGENTS[:3]]
    assert min(agents) > 0 and count(pictures[0], drawing.AGENTS[3]) == 0
    for t in range(5):
        step(env, random_actions(env, rng))
        pictures.append(env.render_final(1) if t == 4 else env.render(1))
    green = [count(picture, drawing.COVERAGE_BAR) for picture in pictures]
    assert green == sorted(green) and green[-1] > green[0] > count(env.render(1), drawing.COVERAGE_BAR) * 0.5
    save_gif(tmp_path / "world.gif", pictures, env.metadata["render_fps"])
    with Image.open(tmp_path / "world.gif") as gif:
        assert gif.size == pictures[0].shape[1::-1] and gif.n_frames > 1


def test_a_gif_takes_small_images_and_shrinks_large_pictures(tmp_path):
    large = [np.full((700, 960, 3), grey, np.uint8) for grey in (10, 200)]
    save_gif(tmp_path / "large.gif", iter([small_image(large[0]), large[1]]), fps=1000)
    with Image.open(tmp_path / "large.gif") as gif:
        assert gif.size == (MAX_SIDE, 350) and gif.n_frames == 2 and gif.info["duration"] == 20


@pytest.mark.parametrize(
    "frames, fps, message",
    [
        ([], 5, "there are no frames; give at least one picture"),
        ([np.zeros((4, 4), np.uint8)], 5, r"an array uint8 \[4, 4\]; needed: uint8 \[height, width, 3\]"),
        ([np.zeros((4, 4, 3))], 5, r"an array float64 \[4, 4, 3\]; needed"),
        ([np.zeros((4, 4, 3), np.uint8)], 0, "fps is 0; needed: pictures per second, above 0"),
    ],
)
def test_errors_of_a_gif(tmp_path, frames, fps, message):
    with pytest.raises(ValueError, match=message):
        save_gif(tmp_path / "x.gif", frames, fps)
    assert not (tmp_path / "x.gif").exists()
