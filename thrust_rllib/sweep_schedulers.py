"""How trials of a sweep are chosen and ended: Tune's schedulers and searches with the numbers of a sweep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME
from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, PopulationBasedTraining, TrialScheduler
from ray.tune.search import BasicVariantGenerator, ConcurrencyLimiter
from ray.tune.utils import flatten_dict

from thrust_rllib.search_space import KeepInRange, Parameter, put
from thrust_rllib.sweep_trial import SCORE

SCHEDULERS = ("none", "asha", "pbt")
SEARCHES = ("random", "grid", "optuna")
MUTABLE = ("lr", "critic_lr", "entropy_coeff", "cross_agent_coeffs")
"""What population based training changes in a running trial; the others are drawn once."""

MUTATIONS = 10
"""Times in a trial that population based training looks at it."""
HALVINGS, REDUCTION = 2, 3
"""ASHA looks at a trial after 1/9 and 1/3 of its steps and goes on with the better third."""


class Population(PopulationBasedTraining):
    """Tune's, which remembers nothing of a sweep that was interrupted, and then waits for ever.

    Where trials come back with results, it goes on from these: it looks at them next when all are one interval further
    than the one that has got furthest.
    """

    _next_perturbation_sync: int

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        """A trial is there, a new one or one that comes back."""
        super().on_trial_add(tune_controller, trial)
        result = flatten_dict(trial.last_result or {})
        steps = int(result.get(self._time_attr, 0))
        if not steps:
            return
        self._save_trial_state(self._trial_state[trial], steps, {SCORE: math.nan, **result}, trial)
        self._trial_state[trial].last_perturbation_time = steps
        self._next_perturbation_sync = max(self._next_perturbation_sync, steps + self._perturbation_interval)


def make_scheduler(name: str, steps: int, mutable: Sequence[Parameter]) -> TrialScheduler:
    """One of `SCHEDULERS`.

    Args:
        name: which.
        steps: of a whole trial.
        mutable: what population based training changes.
    """
    if name == "asha":
        return ASHAScheduler(
            time_attr=NUM_ENV_STEPS_SAMPLED_LIFETIME,
            max_t=steps,
            grace_period=max(1, steps // REDUCTION**HALVINGS),
            reduction_factor=REDUCTION,
        )
    if name == "pbt":
        return Population(
            time_attr=NUM_ENV_STEPS_SAMPLED_LIFETIME,
            perturbation_interval=max(steps // MUTATIONS, 1),
            hyperparam_mutations=put((p, p.mutations()) for p in mutable),
            custom_explore_fn=KeepInRange(tuple(mutable)),
            log_config=False,
            # Otherwise a trial that is ahead takes over the same checkpoint again and again, and goes back to it.
            synch=True,
        )
    return FIFOScheduler()


def make_search(name: str, parameters: Sequence[Parameter], trials: int, at_a_time: int, seed: int | None) -> Any:
    """One of `SEARCHES`, at most so many trials at a time (0: no limit)."""
    if name == "optuna":
        optuna = import_optuna()
        from ray.tune.search.optuna import OptunaSearch

        # TPE begins with random trials: with its default of ten a small sweep would have no others.
        begin = min(10, max(2, trials // 3))
        search = OptunaSearch(
            OptunaSearch.convert_search_space(put((p, p.domain()) for p in parameters)),
            metric=SCORE,
            mode="max",
            sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=begin),
        )
        return ConcurrencyLimiter(search, at_a_time)
    return BasicVariantGenerator(max_concurrent=at_a_time, random_state=seed)


def import_optuna() -> Any:
    """The package.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise ValueError("search optuna needs the package optuna: pip install 'thrust_rllib[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
