"""The mathematics: arrays in, arrays out. Needs torch and numpy, never ray."""

from thrust_rllib.functional.advantages import generalized_advantages
from thrust_rllib.functional.auxiliary import huber_error, relative_accuracy, squared_error
from thrust_rllib.functional.clipping import (
    clip_by_global_norm_,
    clip_by_global_norms_,
    clip_by_norm_,
    clip_by_value_,
    global_norm,
    global_norms,
)
from thrust_rllib.functional.diversity import (
    system_neural_diversity,
    time_averaged_total_variation,
    total_variation,
)
from thrust_rllib.functional.heads import has_head, head_statistics, per_head_surrogate, stack_heads
from thrust_rllib.functional.jensen_shannon import jensen_shannon
from thrust_rllib.functional.masked import masked_mean, masked_moments, standardize
from thrust_rllib.functional.multipliers import lagrangian_multiplier, pid_multiplier, violation
from thrust_rllib.functional.normalization import RunningMoments
from thrust_rllib.functional.ppo import (
    approximate_kl,
    clip_indicator,
    clipped_surrogate,
    explained_variance,
    value_loss_change_clipped,
)
from thrust_rllib.functional.redundancy import cross_correlation, redundancy_penalty
from thrust_rllib.functional.similarity import linear_cka

__all__ = [
    "RunningMoments",
    "approximate_kl",
    "clip_by_global_norm_",
    "clip_by_global_norms_",
    "clip_by_norm_",
    "clip_by_value_",
    "clip_indicator",
    "clipped_surrogate",
    "cross_correlation",
    "explained_variance",
    "generalized_advantages",
    "global_norm",
    "global_norms",
    "has_head",
    "head_statistics",
    "huber_error",
    "jensen_shannon",
    "lagrangian_multiplier",
    "linear_cka",
    "masked_mean",
    "masked_moments",
    "per_head_surrogate",
    "pid_multiplier",
    "redundancy_penalty",
    "relative_accuracy",
    "squared_error",
    "stack_heads",
    "standardize",
    "system_neural_diversity",
    "time_averaged_total_variation",
    "total_variation",
    "value_loss_change_clipped",
    "violation",
]
