"""What a checkpoint brings and what the configuration decides; input case 16."""

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ray import tune

from tests.support import largest_difference, make_runner, optimizer_states, parameters, tiny_config, update
from thrust_rllib import JointPPO, RedundancyPenalty
from thrust_rllib.optimizer_pass import OptimizerPass


def case_16():
    return tiny_config(
        lr=1e-3,
        critic_lr=1e-2,
        entropy_coeff=[[0, 0.02], [1000, 0.0]],
        cross_agent_losses={"redundancy": RedundancyPenalty()},
        cross_agent_coeffs={"redundancy": [[0, 0.1], [640, 1.0]]},
    )


ONE_UPDATE = """
import pickle, sys
from tests.support import optimizer_states, parameters, update
from thrust_rllib import JointPPO

algo = JointPPO.from_checkpoint(sys.argv[1])
batch = pickle.load(open(sys.argv[2], "rb"))
learner = algo.learner_group._learner
result = update(learner, batch, steps=192)
pickle.dump((parameters(learner), optimizer_states(learner), result), open(sys.argv[3], "wb"))
algo.stop()
"""


@pytest.mark.timeout(120)
def test_case_16_one_update_on_fixed_data_in_a_fresh_process(build, tmp_path):
    algo = build(case_16())
    for _ in range(2):
        algo.train()
    path = algo.save_to_path(tmp_path / "saved")
    (batch,) = make_runner(case_16()).sample(num_timesteps=64)
    (tmp_path / "batch").write_bytes(pickle.dumps(batch))
    command = [sys.executable, "-c", ONE_UPDATE, path, str(tmp_path / "batch"), str(tmp_path / "result")]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], capture_output=True)
    learner = algo.learner_group._learner
    before = parameters(learner)
    result = update(learner, batch, steps=192)
    weights, optimizers, other = pickle.loads((tmp_path / "result").read_bytes())
    assert largest_difference(weights, parameters(learner)) == 0.0 < largest_difference(before, parameters(learner))
    assert largest_difference(optimizers, optimizer_states(learner)) == 0.0
    assert other["__all_modules__"]["cross_agent_coeff"] == result["__all_modules__"]["cross_agent_coeff"]
    assert other["__all_modules__"]["cross_agent_coeff"]["redundancy"] == pytest.approx(0.1 + 0.9 * 128 / 640)
    assert other["agent_0"]["curr_entropy_coeff"] == pytest.approx(0.02 * (1 - 128 / 1000))


def new_settings():
    """Of everything another value than in `case_16`."""
    return tiny_config(
        lr=[[0, 1e-5], [10_000, 2e-5]],
        critic_lr=3e-4,
        entropy_coeff=0.5,
        grad_clip=0.125,
        clip_param=0.01,
        trained=["agent_0", "agent_2"],
        cross_agent_losses={"redundancy": RedundancyPenalty()},
        cross_agent_coeffs={"redundancy": 7.0},
        overrides={"agent_2": {"lr": 5e-5, "grad_clip": 0.25}},
    )


@pytest.fixture
def first_minibatch(monkeypatch):
    """What the first minibatch after a `clear()` is trained with, read inside the optimizers' step."""
    seen = {}
    step = OptimizerPass.step

    def look(self, finite):
        name = "actor" if "actor" not in seen else "critic"
        if name not in seen:
            seen[name] = {
                "lr": [float(one.param_groups[0]["lr"]) for own in self.optimizers.values() for one in own],
                "clip": dict(self._limits),
                "stepped": [m for m, mine in self._slices.items() if mine.stop > mine.start],
            }
        step(self, finite)

    init = OptimizerPass.__init__

    def remember(self, optimizers, *args, **kwargs):
        self.optimizers = optimizers
        init(self, optimizers, *args, **kwargs)

    monkeypatch.setattr(OptimizerPass, "__init__", remember)
    monkeypatch.setattr(OptimizerPass, "step", look)
    return seen


WAYS = ["restore_from_path", "set_state", "from_checkpoint", "Tune's restore", "restore_from_path, back in time"]


@pytest.mark.parametrize("way", WAYS)
def test_the_new_settings_count_from_the_first_minibatch(build, tmp_path, monkeypatch, first_minibatch, way):
    donor = build(case_16())
    for _ in range(2):
        donor.train()
    path, weights = donor.save_to_path(tmp_path / "saved"), parameters(donor.learner_group._learner)
    settings = new_settings()
    if way == "from_checkpoint":
        settings.validate()
        algo = JointPPO.from_checkpoint(path, config=settings)
    else:
        algo = build(settings)
        if way.startswith("restore_from_path"):
            for _ in range(3 * way.endswith("back in time")):
                algo.train()
            algo.restore_from_path(path)
        elif way == "set_state":
            algo.set_state(donor.get_state())
        else:
            algo.restore(donor.save(str(tmp_path / "exploited")))  # as an actor with another trial's configuration does
    learner = algo.learner_group._learner
    assert largest_difference(parameters(learner), weights) == 0.0 and algo.iteration == 2
    losses, seen_losses = learner._losses, []

    def look(module, minibatch, trained, ranks, settings):
        seen_losses.append((settings.cross_agent_coeffs["redundancy"], settings.coefficients))
        return losses(module, minibatch, trained, ranks, settings)

    monkeypatch.setattr(learner, "_losses", look)
    first_minibatch.clear()
    try:
        algo.train()
        now = parameters(learner)
    finally:
        if way == "from_checkpoint":
            algo.stop()
    rate = 1e-5 + 1e-5 * 128 / 10_000
    assert first_minibatch["actor"]["lr"] == pytest.approx([rate, rate, 5e-5], rel=1e-6)
    assert first_minibatch["critic"]["lr"] == pytest.approx([3e-4] * 3)
    assert first_minibatch["actor"]["clip"] == {"agent_0": 0.125, "agent_1": 0.125, "agent_2": 0.25}
    assert first_minibatch["actor"]["stepped"] == first_minibatch["critic"]["stepped"] == ["agent_0", "agent_2"]
    coupling, coefficients = seen_losses[0]
    assert float(coupling) == 7.0
    assert coefficients.entropy_coeff.unique().tolist() == [0.5]
    assert coefficients.clip_param.flatten().tolist() == pytest.approx([0.01] * 3)
    assert largest_difference(now["agent_1"], weights["agent_1"]) == 0.0
    assert largest_difference(now["agent_0"], weights["agent_0"]) > 0.0


def test_without_a_change_the_donors_numbers_would_have_been_there(build, tmp_path, first_minibatch):
    """The values of `case_16` differ from all that are expected above."""
    algo = build(case_16())
    algo.train()
    algo.restore_from_path(algo.save_to_path(tmp_path / "saved"))
    first_minibatch.clear()
    algo.train()
    assert first_minibatch["actor"]["lr"] == pytest.approx([1e-3] * 3)
    assert first_minibatch["critic"]["lr"] == pytest.approx([1e-2] * 3)
    assert set(first_minibatch["actor"]["clip"].values()) == {0.5}


class Watched(JointPPO):
    """Reports the learning rate of each update's first step."""

    def training_step(self):
        learner, rates = self.learner_group._learner, []
        passes = learner._passes

        def watched(trained):
            made = passes(trained)
            step = made[0].step

            def look(finite):
                rates.append(float(learner.get_optimizer("agent_0").param_groups[0]["lr"]))
                step(finite)

            made[0].step = look
            return made

        learner._passes = watched
        super().training_step()
        learner._passes = passes
        self.metrics.log_value("first_lr", rates[0], window=1)


@pytest.mark.filterwarnings("ignore:Consider boosting PBT performance:UserWarning")
@pytest.mark.timeout(180)
@pytest.mark.slow_checkpoints
def test_pbt_trains_with_the_mutated_rate_from_the_first_minibatch(ray_session, tmp_path):
    config = tiny_config("debug/match_observation", train_batch_size_per_learner=32)
    config.algo_class = Watched
    space = config.training(lr=tune.grid_search([1e-5, 1e-2])).to_dict()
    scheduler = tune.schedulers.PopulationBasedTraining(
        time_attr="training_iteration",
        metric="env_runners/episode_return_mean",
        mode="max",
        perturbation_interval=2,
        resample_probability=0.0,
        hyperparam_mutations={"lr": tune.loguniform(1e-6, 1.0)},
        require_attrs=False,
    )
    results = tune.Tuner(
        Watched,
        param_space=space,
        tune_config=tune.TuneConfig(scheduler=scheduler, num_samples=1, max_concurrent_trials=2),
        run_config=tune.RunConfig(stop={"training_iteration": 8}, storage_path=str(tmp_path), verbose=0),
    ).fit()
    assert not results.errors
    told = [row for result in results for row in result.metrics_dataframe[["first_lr", "config/lr"]].to_numpy()]
    assert all(np.isclose(found, needed) for found, needed in told)
    assert len({rate for _, rate in told}) > 2, "nothing was exploited"
