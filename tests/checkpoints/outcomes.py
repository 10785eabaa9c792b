"""What must be the same after a restore, in a form that can be compared to the bit."""

import contextlib

import numpy as np
import ray

from tests.support import optimizer_states, parameters
from thrust_rllib import JointBatch

OF_THE_CLOCK = (
    "time",
    "duration_sec",
    "_seconds",
    "timer",
    "throughput",
    "_per_s",
    "date",
    "pid",
    "perf",
    "hostname",
    "node_ip",
    "traffic",
)
TIMERS = "sample", "connector_pipeline_timer", "env_to_module_connector", "module_to_env_connector"
OF_THE_PROCESS = ("config", "trial_id", "iterations_since_restore", "episodes_total", "timesteps_total")
OF_THE_HEALTH = ("fault_tolerance", "num_healthy_workers", "actor_manager", "dropped", "restarts")


def outcome(result):
    """{path: value} of all numbers of a training result that do not depend on the clock."""
    found = {}

    def walk(value, path):
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{path}/{key}")
        else:
            found[path] = value

    walk(result, "")
    unlike = OF_THE_CLOCK + OF_THE_PROCESS + OF_THE_HEALTH
    return {
        path: value
        for path, value in found.items()
        if not any(word in path for word in unlike) and path.rpartition("/")[2] not in TIMERS
    }


def state_of(algo):
    """Parameters, optimizer states and the learner's own part."""
    if algo.learner_group.is_local:
        return _learner_state(algo.learner_group._learner)
    return algo.learner_group.ask_first(_learner_state)


def _learner_state(learner):
    joint = learner.get_state(components="joint")["joint"]
    return {"parameters": parameters(learner), "optimizers": optimizer_states(learner), "joint": joint}


def assert_alike(found, needed, path=""):
    """Equal to the bit, with the path of the first thing that is not."""
    if isinstance(needed, dict):
        assert isinstance(found, dict) and set(found) == set(needed), (path, set(found) ^ set(needed))
        for key in needed:
            assert_alike(found[key], needed[key], f"{path}/{key}")
    elif isinstance(needed, list | tuple):
        assert len(found) == len(needed), path
        for k, (one, other) in enumerate(zip(found, needed, strict=True)):
            assert_alike(one, other, f"{path}/{k}")
    else:
        np.testing.assert_array_equal(np.asarray(found), np.asarray(needed), err_msg=path)


@contextlib.contextmanager
def sampled_returns(algo):
    """A list that fills with the rewards of each rollout on its way to the learner."""
    found = []
    update = algo.learner_group.update_from_rollouts

    def look(rollouts, *args, **kwargs):
        for rollout in rollouts:
            for part in ray.get(rollout) if isinstance(rollout, ray.ObjectRef) else rollout:
                found.append(_rewards(part))
        return update(rollouts, *args, **kwargs)

    algo.learner_group.update_from_rollouts = look
    yield found
    del algo.learner_group.update_from_rollouts


def _rewards(part):
    """Of a batch of the fast door, or an episode of the general one."""
    if isinstance(part, JointBatch):
        return {m: streams.rewards for m, streams in part.modules.items()}
    return {agent: np.asarray(rewards) for agent, rewards in part.get_rewards().items()}
