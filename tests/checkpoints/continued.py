"""Run in a fresh process: goes on from checkpoints and tells what came of it.

python -m tests.checkpoints.continued RESULTS CHECKPOINT…
"""

import pickle
import sys
from pathlib import Path

import torch

from tests.checkpoints.outcomes import outcome, sampled_returns, state_of
from thrust_rllib import JointPPO


def go_on(algo, iterations):
    """[(deterministic numbers of the result, rewards of the batches), …], and the learner's state at the end."""
    told = []
    for _ in range(iterations):
        with sampled_returns(algo) as returns:
            result = algo.train()
        told.append((outcome(result), returns))
    return told, state_of(algo)


def main(results, *checkpoints):
    import ray

    torch.set_num_threads(1)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    found = []
    for path in checkpoints:
        algo = JointPPO.from_checkpoint(path)
        found.append(go_on(algo, int(Path(path).name)))
        algo.stop()
    Path(results).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
