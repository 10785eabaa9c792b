"""Every example runs: its `--smoke` form, in this process."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name, capsys):
    runpy.run_path(str(EXAMPLES / name))["main"](["--smoke"])
    return capsys.readouterr().out


def numbers(label, text):
    return [float(number) for number in re.findall(rf"\b{label} +(-?[\d.]+)", text)]


def test_this_file_runs_all_examples():
    tested = set(re.findall(r'run\("(\w+\.py)"', Path(__file__).read_text()))
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


def test_nothing_takes_it_for_granted_that_an_episode_has_ended():
    for path in [*EXAMPLES.glob("*.py"), EXAMPLES.parent / "README.md"]:
        assert not re.search(r"\[.(agent_)?episode_returns?_mean.\]", path.read_text()), path.name


def test_minimal_prints_each_agents_return(ray_session, capsys):
    out = run("minimal.py", capsys)
    assert numbers("iteration", out) == [1, 2]
    agents = [numbers(f"agent_{i}", out) for i in range(4)]
    for team, *each in zip(numbers("team", out), *agents, strict=True):
        assert abs(team - sum(each)) < 0.3  # both rounded to a tenth


def test_own_coupling_acts(ray_session, capsys):
    out = run("own_coupling.py", capsys)
    before, without, same, with_coupling = numbers("crowding", out)
    assert abs(before - 0.1) < 0.01 and abs(same - 0.1) < 0.01  # untrained: ten houses chosen evenly
    assert with_coupling < without - 0.005


def test_coverage_team_says_what_is_covered(ray_session, capsys):
    out = run("coverage_team.py", capsys)
    assert len(numbers("covered", out)) == len(numbers("connected", out)) == 2
    assert all(0 < share <= 1 for label in ("covered", "connected") for share in numbers(label, out))
    assert len(numbers("price", out)) == 3


def test_pettingzoo_env_prints_each_agents_return(ray_session, capsys):
    out = run("pettingzoo_env.py", capsys)
    assert len(numbers("team", out)) == 2
    assert all(numbers(f"agent_{i}", out)[0] < 0 for i in range(3))  # the task pays negative distances


def test_best_response_moves_one_agent_only(ray_session, capsys):
    out = run("best_response.py", capsys)
    changes = dict(re.findall(r"^  (agent_\d) ([\d.]+)", out, re.MULTILINE))
    assert list(changes) == [f"agent_{i}" for i in range(4)]
    assert float(changes.pop("agent_0")) > 1e-3
    assert set(map(float, changes.values())) == {0.0}
    assert out.count("(equal to the bit)") == 3
    played = out.splitlines()[:2]
    for line, moment in zip(played, ("before", "after"), strict=True):
        assert line.startswith(moment)
        each = [numbers(f"agent_{i}", line)[0] for i in range(4)]
        assert abs(numbers("team", line)[0] - sum(each)) < 0.3


def test_best_response_would_notice_a_weight_that_moved(capsys):
    weights = {"agent_0": {"w": np.zeros(2)}, "agent_1": {"w": np.zeros(2)}}
    moved = {"agent_0": {"w": np.zeros(2)}, "agent_1": {"w": np.array([0.0, -1e-3])}}
    runpy.run_path(str(EXAMPLES / "best_response.py"))["print_changes"](weights, moved)
    assert re.findall(r"agent_\d [\d.]+", capsys.readouterr().out) == ["agent_0 0.000000", "agent_1 0.001000"]


def test_training_loop_saves_and_restores(ray_session, capsys):
    out = run("training_loop.py", capsys)
    assert numbers("iteration", out) == [1, 2, 2, 2, 3]  # two trained, saved, restored, one more
    saved, restored = numbers("plays", out)
    assert saved == restored
    for team, least in zip(numbers("team", out), numbers("least", out), strict=True):
        assert team / 4 > least


def test_central_critic_prints_what_a_collision_costs(ray_session, capsys):
    out = run("central_critic.py", capsys)
    assert numbers("iteration", out) == [1, 2, 3]
    costs, prices = numbers("collisions", out), numbers("price", out)
    assert prices[0] == 0 < max(prices)
    assert all(0 < cost < 1 for cost in costs) and all(team < 0 for team in numbers("team", out))


class Scripted:
    """Stands in for an algorithm: each result holds these returns of two agents."""

    def __init__(self, returns):
        self.returns = iter(returns)

    def train(self):
        own = next(self.returns)
        if own is None:
            return {"env_runners": {}}
        return {"env_runners": {"agent_episode_returns_mean": {"a": own, "b": 0.0}, "episode_return_mean": own}}


def test_training_loop_stops_after_three_good_iterations_running(capsys):
    train = runpy.run_path(str(EXAMPLES / "training_loop.py"))["train"]
    train(Scripted([None, -9.0, -1.0, -1.0, -9.0, -1.0, -1.0, -1.0, 5.0]), -2.0, 99)
    out = capsys.readouterr().out
    assert numbers("iteration", out)[-1] == 8 and "stopped: every agent above -2" in out
    train(Scripted([-9.0] * 5), -2.0, 4)
    assert "stopped: 4 iterations" in capsys.readouterr().out


def test_callbacks_report_their_metrics(ray_session, capsys):
    out = run("callbacks.py", capsys)
    assert out.startswith("runner 0: 16 environments") and "modules: agent_0, agent_1, agent_2, agent_3" in out
    assert numbers("after iteration", out) == [1, 2]
    shares = numbers("works", out)
    assert len(shares) == 8 and all(0.3 < share < 0.7 for share in shares)  # untrained: works half of the time
    assert all(spread > 0 for spread in numbers("spread", out)) and len(numbers("evaluation", out)) == 2


def test_the_metrics_of_the_callbacks_are_what_they_say(ray_session, capsys):
    from thrust_rllib import JointPPOConfig

    example = runpy.run_path(str(EXAMPLES / "callbacks.py"))
    rollouts = []

    class Watched(example["TeamCallbacks"]):
        def on_sample_end(self, *, samples, **kwargs):
            super().on_sample_end(samples=samples, **kwargs)
            rollouts.extend(samples)

    config = JointPPOConfig().environment("bucket_brigade").env_runners(num_envs_per_env_runner=4)
    config.training(train_batch_size_per_learner=128, minibatch_size=128).callbacks(Watched).debugging(seed=0)
    algo = config.build_algo()
    result = algo.train()
    algo.stop()
    (rollout,) = rollouts
    for agent, share in result["env_runners"]["works"].items():
        assert share == pytest.approx((rollout.stream(agent).actions[..., 1] == 1).mean())
    returns = result["env_runners"]["agent_episode_returns_mean"].values()
    assert result["return_spread"] == max(returns) - min(returns) > 0


def test_self_play_ends_in_a_match(ray_session, capsys):
    out = run("self_play.py", capsys)
    assert "iteration    4" in out
    wins, draws, losses = (numbers(word, out)[-1] for word in ("wins", "draws", "losses"))
    assert 0.0 < wins <= 1.0 and abs(wins + draws + losses - 1.0) < 0.01


def test_memory_succeeds_where_luck_does_not(ray_session, capsys):
    out = run("memory.py", capsys)
    assert numbers("chance", out) == [0.5, 0.5, 0.5]
    recalled, guessed, relayed = numbers("success", out)
    assert recalled > 0.95 and relayed > 0.95
    assert abs(guessed - 0.5) < 0.1  # 400 episodes: four standard errors
