"""What several benchmarks share: the environment and the training constants, rounds in turn, results."""
