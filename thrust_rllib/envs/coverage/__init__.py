"""Coverage world: agents survey a grid and must not lose each other."""

from thrust_rllib.envs.coverage.world import CoverageWorld

__all__ = ["CoverageWorld"]
