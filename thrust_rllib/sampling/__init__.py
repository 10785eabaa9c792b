"""The parts of the fast door: who acts and how, the arrays of a rollout, its checks, the episodes it counts."""
