"""Random play beside the slow reference: moves, beliefs, coverage, rewards, extras, links, planes, masks."""

import numpy as np
import pytest

from tests.envs.coverage.play import cells_in, random_actions, references, reset, step

CASES = {
    "goals on open ground": {"grid": 9, "num_agents": 4},
    "moves on open ground": {"grid": 6, "num_agents": 3, "actions": "moves", "comm_r": 2},
    "goals in rooms": {"grid": 12, "num_agents": 4, "terrain": "rooms", "comm_r": 3},
    "goals in random walls": {"grid": 10, "num_agents": 4, "terrain": "random", "comm_r": 3},
    "many walls": {"grid": 9, "num_agents": 5, "terrain": "random", "wall_share": 0.4, "actions": "moves", "comm_r": 2},
    "roles with goals": {"grid": 9, "num_agents": 5, "roles": True, "comm_r": 2, "terrain": "random"},
    "roles with moves": {"grid": 8, "num_agents": 4, "roles": True, "comm_r": 2, "actions": "moves"},
    "skills": {"grid": 8, "num_agents": 3, "skills": True},
    "one agent": {"grid": 7, "num_agents": 1, "terrain": "rooms"},
    "two agents": {"grid": 8, "num_agents": 2, "comm_r": 2, "terrain": "random"},
    "six agents that see their cell alone": {"grid": 8, "num_agents": 6, "cover_r": 0, "comm_r": 2, "actions": "moves"},
    "six agents that see far": {"grid": 14, "num_agents": 6, "cover_r": 2, "comm_r": 3, "terrain": "rooms"},
    "masks": {"grid": 9, "num_agents": 3, "mask": "safe_goals", "comm_r": 2, "terrain": "random", "floor": 0.02},
    "masks of moves": {"grid": 9, "num_agents": 3, "mask": "safe_goals", "actions": "moves", "comm_r": 3, "floor": 0.3},
    "masks with roles": {"grid": 9, "num_agents": 4, "mask": "safe_goals", "roles": True, "comm_r": 2},
    "windows": {"grid": 8, "num_agents": 3, "observation": "window", "window": 2, "terrain": "random", "comm_r": 2},
    "wide windows": {"grid": 5, "num_agents": 2, "observation": "window", "actions": "moves", "cover_r": 2},
    "other weights": {
        "grid": 7, "num_agents": 4, "coverage_reward": 0.5, "reach_reward": 3.0, "crowding_penalty": 1.5, "stride": 2,
        "degree_target": 2.5, "tau": 0.9, "actions": "moves", "comm_r": 1,
    },
}  # fmt: skip


def compare(e, told, result):
    """One environment's rewards and extras with what the reference told, before a reset."""
    np.testing.assert_allclose(result.rewards[:, e], told["rewards"], atol=1e-5)
    assert set(result.extras) == told.keys() - {"rewards"}
    for name in result.extras:
        mine = np.asarray(result.extras[name])
        np.testing.assert_allclose(mine[..., e], told[name], atol=1e-5, err_msg=name)


def compare_inside(env, world, e):
    """Positions and everything that is remembered."""
    assert [tuple(cell) for cell in env.positions[e].tolist()] == world.cells
    assert cells_in(env.covered[e]) == world.covered
    for i in range(world.n):
        assert cells_in(env.beliefs[e, i]) == world.beliefs[i], i
        assert cells_in(env.seen[e, i]) == world.seen[i], i


def compare_seen(observations, world, e, window):
    """Planes or windows, links and masks of one environment."""
    for i in range(world.n):
        np.testing.assert_allclose(observations["links"][i, e], world.links(i), atol=1e-6)
        planes = world.planes(i) if window is None else world.window(i, window)
        np.testing.assert_allclose(observations["observations"][i, e], planes, atol=1e-6)
        if "action_mask" in observations:
            count = 9 if world.actions == "goals" else 5
            mask = observations["action_mask"][i, e]
            np.testing.assert_array_equal(mask[-count:], world.mask(i))
            assert mask[:-count].all()


@pytest.mark.parametrize("name", CASES)
def test_random_play_is_the_same(name):
    settings = {"horizon": 12, **CASES[name]}
    rng = np.random.default_rng(len(name))
    window = settings.get("window", 4) if settings.get("observation") == "window" else None
    env, observations, worlds = reset([3, 4, 5], **settings)
    for _ in range(2):
        for e, world in enumerate(worlds):
            compare_inside(env, world, e)
            np.testing.assert_allclose(env.state()[e], world.state(), atol=1e-6)
            compare_seen(observations, world, e, window)
        for t in range(12):
            actions = random_actions(env, rng)
            played = actions[..., 1] if settings.get("skills") else actions
            result = step(env, actions)
            over = t == 11
            assert (result.truncated == over).all() and not np.any(result.terminated)
            observations = result.seen
            for e, world in enumerate(worlds):
                told = world.step([a if np.ndim(a) else int(a) for a in played[:, e]])
                compare(e, told, result)
                compare_seen(result.last_seen, world, e, window)
                if not over:
                    compare_inside(env, world, e)
                    np.testing.assert_allclose(env.state()[e], world.state(), atol=1e-6)
        worlds = references(env, settings)


def test_the_cases_meet_what_they_are_for():
    """Random play has crowds, broken links, relays that stay and cells seen twice; else the test above is blind."""
    rng = np.random.default_rng(0)
    met = set()
    for settings in CASES.values():
        env, _, worlds = reset([1, 2], horizon=20, **settings)
        for _ in range(15):
            actions = random_actions(env, rng)
            for e, world in enumerate(worlds):
                row_ = actions[:, e]
                if world.roles:
                    kept = [
                        a for i, a in enumerate(row_) if a[0] == 1 and world.breaks_a_link(i, world.move_of(i, a[1]))
                    ]
                    met |= {"relay stays"} if kept else set()
                told = world.step([a[1] if settings.get("skills") else a for a in row_])
                met |= {"crowd"} if len(set(world.cells)) < world.n else set()
                met |= {"apart"} if not told["connected"] else {"connected"}
                met |= {"shared cells"} if told["rewards"] != told["difference_reward"] else set()
                met |= {"margin"} if max(told["local_edge_margin"]) > 0 else set()
                met |= {"beliefs differ"} if any(belief != world.covered for belief in world.beliefs) else set()
                met |= {"heard of"} if any(b > s for b, s in zip(world.beliefs, world.seen, strict=True)) else set()
    assert met == {
        "relay stays", "crowd", "apart", "connected", "shared cells", "margin", "beliefs differ", "heard of",
    }  # fmt: skip
