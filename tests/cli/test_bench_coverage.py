"""The experiments of `benchmarks/coverage_world.py`: their settings, bars, and one of them for two iterations."""

import importlib
from pathlib import Path

import pytest
from typer.testing import CliRunner

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark():
    """Imports a module of `benchmarks/`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module


def invoke(benchmark, *arguments):
    return CliRunner().invoke(benchmark("coverage_world").app, [str(argument) for argument in arguments])


def a_row(mechanism, coverage, connected, terrain="open", seed=0):
    numbers = {"coverage": coverage, "coverage_error": 0.01, "connected": connected, "firmly_connected": 0.5}
    trained = dict.fromkeys(("multiplier", "training_seconds", "return_curve", "cost_curve", "multiplier_curve"), "")
    row = {"terrain": terrain, "mechanism": mechanism, "seed": seed, "env_steps": 1, "return": 1.0} | numbers | trained
    return {key: str(value) for key, value in row.items()}


def test_the_bar_asks_one_mechanism_for_both_on_every_terrain(benchmark):
    show = benchmark("covering.mechanisms").show
    assert show([a_row("pid", 0.61, 0.96), a_row("none", 0.9, 0.9)])
    assert not show([a_row("pid", 0.61, 0.94), a_row("none", 0.59, 1.0)])  # each keeps one of both
    assert not show([a_row("random", 0.9, 1.0)])
    assert show([a_row("mask", 0.5, 0.97), a_row("mask", 0.71, 0.97, seed=1)])  # the mean of its seeds counts
    assert not show([a_row("mask", 0.9, 1.0), a_row("mask", 0.3, 1.0, terrain="rooms")])


def test_a_warm_start_has_to_be_ahead_of_new_weights_and_of_chance(benchmark):
    show = benchmark("covering.growth").show

    def rows(warm, before, scratch):
        numbers = {"warm": (warm, before), "scratch": (scratch, 0.1), "random": (0.3, "")}
        about = {"seed": "0", "minutes": "5", "env_steps": "9", "connected": "1", "firmly_connected": "1"}
        return [
            {"start": name, "coverage": str(after), "before": str(first), "small_coverage": ""} | about
            for name, (after, first) in numbers.items()
        ]

    assert show(rows(0.8, 0.6, 0.7))
    assert not show(rows(0.7, 0.6, 0.8))
    assert not show(rows(0.8, 0.2, 0.7))


def test_mechanisms_differ_in_the_mask_and_the_constraint_alone(benchmark):
    team = benchmark("covering.team")
    found = {}
    for mechanism in team.MECHANISMS:
        config = team.config_of(team.world_of(mechanism, "rooms"), mechanism, 3, 8000)
        own = (config.env_config.pop("mask"), tuple(each.mechanism for each in config.constraints))
        found[mechanism] = (own, config.training(constraints=()).to_dict())
    assert {name: own for name, (own, _) in found.items()} == {
        "none": ("none", ()),
        "penalty": ("none", ("penalty",)),
        "lagrangian": ("none", ("lagrangian",)),
        "pid": ("none", ("pid",)),
        "mask": ("safe_goals", ()),
    }
    settings = [repr(sorted(rest.items(), key=str)) for _, rest in found.values()]
    assert len(set(settings)) == 1


def test_an_experiment_writes_rows_a_plot_and_weights_that_can_be_filmed(benchmark, ray_session, tmp_path):
    path, gif = tmp_path / "mechanisms.csv", tmp_path / "film.gif"
    common = ["mechanisms", "--terrain", "rooms", "--seed", "7", "--steps", "3200", "--output", path]
    found = invoke(benchmark, *common, "--mechanism", "pid", "--keep", tmp_path / "kept")
    assert found.exit_code in (0, 1), found.output
    found = invoke(benchmark, *common, "--mechanism", "random")
    assert found.exit_code == 1, found.output  # chance passes no bar
    trained, chance = benchmark("common.results").read(path)
    assert (trained["mechanism"], trained["env_steps"], chance["env_steps"]) == ("pid", "3200", "0")
    assert trained["multiplier_curve"].startswith("1600:") and chance["multiplier"] == ""
    assert all(0 < float(row["coverage"]) < 1 for row in (trained, chance))
    assert path.with_suffix(".png").stat().st_size > 5000
    found = invoke(benchmark, "film", tmp_path / "kept" / "rooms_pid_7", "--output", gif)
    assert found.exit_code == 0, found.output
    assert gif.read_bytes()[:6] == b"GIF89a" and "coverage" in found.output


def test_teams_train_in_turn_until_each_has_had_its_seconds(benchmark):
    class Stub:
        class config:
            class policy_mapping_fn:
                table = ("a", "b")

        def __init__(self, told, seconds):
            self.told, self.told_seconds, self.steps = told, seconds, 0

        def train(self):
            self.told.append(self)
            clock.now += self.told_seconds
            self.steps += 10
            return {"env_runners": {"num_env_steps_sampled_lifetime": self.steps, "episode_return_mean": 8.0}}

    class clock:
        now = 0.0

        @classmethod
        def perf_counter(cls):
            return cls.now

    growth = benchmark("covering.growth")
    order = []
    teams = {"warm": Stub(order, 2.0), "scratch": Stub(order, 3.0)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growth, "time", clock)
        found = growth.train_in_turn(teams, 5.0)
    warm, scratch = teams.values()
    assert order == [warm, scratch, warm, scratch, warm]
    assert found["warm"] == {"env_steps": 30, "training_seconds": 6.0, "curve": "10:4 20:4 30:4"}
    assert found["scratch"]["training_seconds"] == 6.0
