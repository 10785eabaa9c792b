"""Population based training: what is mutated acts in the first minibatch after a trial took over another one."""

import csv
import json
from types import SimpleNamespace

import numpy as np
import pytest
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME

from tests.tune.helpers import COUPLING, sweep, tiny
from thrust_rllib.algorithm import JointPPO
from thrust_rllib.learner import JointPPOLearner
from thrust_rllib.search_space import Parameter
from thrust_rllib.sweep_trial import SCORE, SweepTrial

pytestmark = pytest.mark.timeout(120)

BAD, GOOD = 1e-9, 1e-2
LR = Parameter("lr", ("lr",), choices=(BAD, GOOD, 2e-2))


def watching(path):
    """A learner that writes down, inside each optimizer step, the numbers with which it is taken."""

    class Watching(JointPPOLearner):
        def build(self):
            super().build()
            losses = self._losses

            def compute(module, minibatch, trained, ranks, settings):
                self.coeffs = {name: float(value) for name, value in settings.cross_agent_coeffs.items()}
                return losses(module, minibatch, trained, ranks, settings)

            self._losses = compute

        def _passes(self, trained):
            passes = super()._passes(trained)
            step = passes[0].step

            def write_and_step(finite):
                lrs = {group["lr"] for o in self._named_optimizers.values() for group in o.param_groups}
                entropies = {float(s.get_current_value()) for s in self._entropy_schedules.values()}
                line = {"update": self._weights_seq_no, "lr": sorted(lrs), "entropy": sorted(entropies)} | self.coeffs
                with open(path, "a") as file:
                    file.write(json.dumps(line) + "\n")
                step(finite)

            passes[0].step = write_and_step
            return passes

    return Watching


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_restored_trial_steps_with_its_own_numbers_from_the_first_minibatch(ray_session, tmp_path):
    donor = tiny(lr=GOOD, entropy_coeff=0.01, cross_agent_coeffs={"redundancy": 0.5})
    algo = SweepTrial(donor.to_dict())
    for _ in range(2):
        algo.step()
    algo.save_to_path(str(tmp_path / "donor"))
    algo.stop()
    watch = tmp_path / "steps"
    mutated = tiny(lr=3e-3, entropy_coeff=0.05, cross_agent_coeffs={"redundancy": 2.0}, learner_class=watching(watch))
    clone = SweepTrial(mutated.to_dict())
    try:
        clone.load_checkpoint(str(tmp_path / "donor"))
        clone.step()
    finally:
        clone.stop()
    first = lines(watch)[0]
    assert first["update"] > 1  # it goes on from the donor's updates
    assert (first["lr"], first["entropy"], first["redundancy"]) == ([3e-3], [0.05], 2.0)
    assert all(line == first for line in lines(watch)[:2])


@pytest.mark.parametrize("trial, alike", [("donor", True), ("clone", False)])
def test_a_trial_that_takes_over_another_samples_with_numbers_of_its_own(ray_session, tmp_path, trial, alike):
    donor = SweepTrial(tiny(lr=GOOD).to_dict())
    donor.step()
    donor.save_to_path(str(tmp_path / "donor" / "checkpoint_000000"))
    clone = SweepTrial(tiny(lr=GOOD).to_dict())
    try:
        clone._storage = SimpleNamespace(trial_dir_name=trial)
        clone.load_checkpoint(str(tmp_path / "donor" / "checkpoint_000000"))
        one, other = (algo.env_runner.sample(num_timesteps=32)[0] for algo in (donor, clone))
    finally:
        donor.stop()
        clone.stop()
    first = next(iter(one.modules))
    assert np.array_equal(one.modules[first].actions, other.modules[first].actions) == alike


def test_a_process_becomes_another_trial_without_a_trace_of_the_first(ray_session):
    first = tiny(lr=GOOD).to_dict()
    second = tiny(lr=BAD, cross_agent_coeffs={"redundancy": 1.0}).to_dict()
    reused, fresh = SweepTrial(first), SweepTrial(second)
    try:
        reused.step()
        assert reused.reset(dict(second))
        assert reused.iteration == 0 and reused.config.lr == BAD
        one, other = reused.step(), fresh.step()
        assert one[SCORE.split("/")[0]]["episode_return_mean"] == other["env_runners"]["episode_return_mean"]
        assert one[NUM_ENV_STEPS_SAMPLED_LIFETIME] == 32
        totals = [r["learners"]["__all_modules__"]["total_loss"] for r in (one, other)]
        assert totals[0] == totals[1]
    finally:
        reused.stop()
        fresh.stop()


def test_a_plain_algorithm_lacks_the_score_before_an_episode_has_ended_and_a_trial_has_nan(ray_session):
    long = tiny().environment("debug/match_observation", env_config={"episode_length": 64})
    plain, trial = JointPPO(long.to_dict()), SweepTrial(long.to_dict())
    try:
        assert "episode_return_mean" not in plain.step()["env_runners"]
        score = trial.step()["env_runners"]["episode_return_mean"]
        assert score != score
    finally:
        plain.stop()
        trial.stop()


@pytest.mark.slow_checkpoints
@pytest.mark.timeout(300)
def test_the_worse_trial_takes_over_the_better_one_and_changes_its_numbers(ray_session, tmp_path):
    watch = tmp_path / "steps"
    population = sweep(
        config=tiny(learner_class=watching(watch)),
        parameters=(LR, COUPLING),
        scheduler="pbt",
        trials=2,
        steps=32 * 20,
        concurrent=2,
    )
    results = population.run(tmp_path / "sweep")
    assert [row.state for row in results.rows] == ["finished"] * 2

    with (tmp_path / "sweep" / "curves.csv").open(newline="") as file:
        logged = list(csv.DictReader(file))
    trained_with = {}
    for row in logged:
        trained_with.setdefault(row["trial"], []).append((float(row["lr"]), float(row["redundancy"])))
    changed = [pairs for pairs in trained_with.values() if len(set(pairs)) > 1]
    assert changed  # somebody was taken over
    # What was in force in a step is what Tune says the trial had, and nothing else: no step with the donor's numbers.
    stepped = {(line["lr"][0], line["redundancy"]) for line in lines(watch)}
    assert all(len(line["lr"]) == 1 for line in lines(watch))
    assert stepped == {pair for pairs in trained_with.values() for pair in pairs}
    for lr, coupling in stepped:
        assert lr in LR.choices and coupling in COUPLING.choices
