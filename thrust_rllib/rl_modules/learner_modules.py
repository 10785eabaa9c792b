"""Modules that only the learner has, beside the policies: they train with them and never act."""

from __future__ import annotations

from ray.rllib.utils.typing import ModuleID

TEAM_CRITIC: ModuleID = "team_critic"
AUXILIARY_HEADS: ModuleID = "auxiliary_heads"
LEARNER_MODULES = (TEAM_CRITIC, AUXILIARY_HEADS)
