"""Environments of other packages, unchanged, through three iterations of the whole algorithm, audited."""

from __future__ import annotations

import numpy as np
import pytest
from ray.rllib.core import ALL_MODULES

from tests.support import largest_difference, tiny_config
from thrust_rllib.env_runner import JointEnvRunner
from thrust_rllib.episode_runner import JointEpisodeRunner

RLLIB = "ray.rllib.examples.envs.classes.multi_agent"
ITERATIONS, BATCH, ENVS = 3, 64, 2

# Every agent acts in every step: name: (settings, agents).
JOINT = {
    "pettingzoo:mpe2.simple_tag_v3": ({}, 4),
    "pettingzoo:mpe2.simple_world_comm_v3": ({}, 6),
    "pettingzoo:mpe2.simple_crypto_v3": ({}, 3),
    "pettingzoo:mpe2.simple_reference_v3": ({}, 2),
    "pettingzoo:mpe2.simple_spread_v3": ({"continuous_actions": True, "max_cycles": 10}, 3),
    "pettingzoo:sisl.pursuit_v5": ({"max_cycles": 20}, 8),
    "pettingzoo:classic.rps_v2": ({}, 2),
    "gymnasium:lbforaging:Foraging-8x8-2p-2f-coop-v3": ({}, 2),
    "gymnasium:rware:rware-tiny-2ag-v2": ({"max_steps": 40}, 2),
    f"{RLLIB}.rock_paper_scissors:RockPaperScissors": ({"sheldon_cooper_mode": True}, 2),
    f"{RLLIB}.two_step_game:TwoStepGame": ({"one_hot_state_encoding": True}, 2),
    f"{RLLIB}:MultiAgentPendulum": ({"num_agents": 2}, 2),
    f"{RLLIB}:MultiAgentMountainCar": ({"num_agents": 2}, 2),
    f"{RLLIB}.bandit_envs_discrete:SimpleContextualBandit": ({}, 1),
    f"{RLLIB}.bandit_envs_discrete:LinearDiscreteEnv": ({}, 1),
    f"{RLLIB}.bandit_envs_discrete:WheelBanditEnv": ({}, 1),
    f"{RLLIB}.bandit_envs_recommender_system:ParametricRecSys": ({"user_time_budget": 5.0}, 1),
}  # fmt: skip
# Agents end before their episode does.
DYING = {
    "pettingzoo:butterfly.knights_archers_zombies_v11": ({"spawn_delay": 1, "line_death": True}, 4),
    f"{RLLIB}.double_row_corridor_env:DoubleRowCorridorEnv": ({"length": 3}, 2),
    f"{RLLIB}:MultiAgentCartPole": ({"num_agents": 3}, 3),
    f"{RLLIB}:MultiAgentStatelessCartPole": ({"num_agents": 2}, 2),
    f"{RLLIB}:MultiAgentCartPoleWithDictObservationSpace": ({"num_agents": 2}, 2),
}
# One agent acts in a step.
TURNS = {
    "pettingzoo:classic.connect_four_v3": ({}, 2),
    "pettingzoo:classic.tictactoe_v3": ({}, 2),
    "pettingzoo:classic.chess_v6": ({}, 2),
    "pettingzoo:classic.go_v5": ({"board_size": 5}, 2),
    f"{RLLIB}.tic_tac_toe:TicTacToe": ({}, 2),
    f"{RLLIB}.guess_the_number_game:GuessTheNumberGame": ({"max_steps": 1000}, 2),
    f"{RLLIB}.pettingzoo_connect4:MultiAgentConnect4": ({}, 2),
    f"{RLLIB}.pettingzoo_chess:MultiAgentChess": ({}, 2),
}
# Through the general door, which "auto" would not take for them.
BOTH_WAYS = [
    "pettingzoo:mpe2.simple_world_comm_v3",
    "pettingzoo:mpe2.simple_spread_v3",
    "pettingzoo:sisl.pursuit_v5",
    "gymnasium:rware:rware-tiny-2ag-v2",
    f"{RLLIB}.two_step_game:TwoStepGame",
    *DYING,
]


def weights(algo):
    return {
        m: {name: np.array(value) for name, value in state.items()}
        for m, state in algo.learner_group.get_weights().items()
    }


def train(env, env_config, sampling="auto", **options):
    """Three iterations; the runners' class and each iteration's result."""
    config = tiny_config(
        env, env_config, num_envs=ENVS, runners={"sampling": sampling}, model={"fcnet_hiddens": [16]},
        train_batch_size_per_learner=BATCH, minibatch_size=32, num_epochs=1, iterate_all_minibatches=True, **options,
    )  # fmt: skip
    assert config.audit
    algo = config.build_algo()
    try:
        results = []
        for _ in range(ITERATIONS):
            before = weights(algo)
            results.append(algo.train())
            after = weights(algo)
            for module_id, learned in after.items():
                moved = largest_difference(before[module_id], learned)
                if results[-1]["learners"][module_id]["num_module_steps_trained"]:
                    assert 1e-5 < moved < 1.0, module_id
                else:  # its agents were dead all the time
                    assert moved == 0.0, module_id
        return algo.config.env_runner_cls, results
    finally:
        algo.stop()


def check_losses(results):
    """Finite in every iteration in which the module had a row; agents' own numbers are there."""
    for result in results:
        learners = result["learners"]
        assert learners[ALL_MODULES]["num_non_finite_minibatches"] == 0
        for module_id, numbers in learners.items():
            names = ["total_loss"]
            if module_id != ALL_MODULES:
                names += ["policy_loss", "vf_loss", "entropy"]
            finite = np.isfinite([numbers[name] for name in names])
            assert (finite if numbers["num_module_steps_trained"] else ~finite).all(), module_id


def steps(results):
    """Sampled and trained steps in all iterations: environment's, and {module: agent's}."""
    runners, learners = results[-1]["env_runners"], results[-1]["learners"]
    sampled = {m: int(n) for m, n in runners["num_module_steps_sampled_lifetime"].items()}
    trained = {m: int(x["num_module_steps_trained_lifetime"]) for m, x in learners.items() if m != ALL_MODULES}
    assert sum(trained.values()) == learners[ALL_MODULES]["num_module_steps_trained_lifetime"]
    played = int(runners["num_env_steps_sampled_lifetime"])
    return played, int(learners[ALL_MODULES]["num_env_steps_trained_lifetime"]), sampled, trained


@pytest.mark.parametrize("env", JOINT)
def test_everybody_acts(env):
    env_config, agents = JOINT[env]
    door, results = train(env, env_config)
    assert door is JointEnvRunner
    check_losses(results)
    played, rows, sampled, trained = steps(results)
    assert played == rows == ITERATIONS * BATCH
    assert len(trained) == agents and set(trained.values()) == set(sampled.values()) == {rows}


@pytest.mark.parametrize("env", DYING)
def test_agents_that_die(env):
    env_config, agents = DYING[env]
    door, results = train(env, env_config)
    assert door is JointEnvRunner
    check_losses(results)
    played, rows, sampled, trained = steps(results)
    assert played == rows == ITERATIONS * BATCH and len(trained) == agents
    assert trained == sampled and min(trained.values()) > 0
    assert sum(trained.values()) < agents * rows


@pytest.mark.parametrize("env", TURNS)
def test_agents_that_take_turns(env):
    """A row for each step, and once more where the one who waits for an answer gets it in the next iteration."""
    env_config, agents = TURNS[env]
    door, results = train(env, env_config)
    assert door is JointEpisodeRunner
    check_losses(results)
    played, rows, sampled, trained = steps(results)
    assert ITERATIONS * BATCH <= played < ITERATIONS * (BATCH + ENVS)
    assert played <= rows <= played + (ITERATIONS - 1) * ENVS * agents
    assert sum(sampled.values()) == played and len(trained) == agents
    for module_id in trained:
        assert 0 <= sampled[module_id] - trained[module_id] <= ENVS  # open steps at the end


@pytest.mark.parametrize("env", BOTH_WAYS)
def test_by_episodes_too(env):
    env_config, agents = {**JOINT, **DYING}[env]
    door, results = train(env, env_config, sampling="episodes")
    assert door is JointEpisodeRunner
    check_losses(results)
    played, rows, sampled, trained = steps(results)
    assert ITERATIONS * BATCH <= played == rows < ITERATIONS * (BATCH + ENVS)
    assert trained == sampled and len(trained) == agents
    assert (sum(trained.values()) < agents * rows) == (env in DYING)


@pytest.mark.parametrize("sampling", ["arrays", "episodes"])
def test_shared_modules_and_normalized_observations(sampling):
    env, (env_config, agents) = next(iter(DYING.items()))
    groups = {"archers": ["archer_0", "archer_1"], "knights": ["knight_0", "knight_1"]}
    _, results = train(env, env_config, sampling=sampling, policies=groups)
    check_losses(results)
    played, _, sampled, trained = steps(results)
    assert set(trained) == set(groups) and trained == sampled
    assert sum(trained.values()) < agents * played


def test_a_truncated_game_without_a_last_observation_is_refused():
    """RLlib refuses it, too: nothing tells what the waiting player's return goes on with."""
    env = f"{RLLIB}.guess_the_number_game:GuessTheNumberGame"
    with pytest.raises(ValueError, match="agent 0 was truncated without a last observation"):
        train(env, {"max_number": 1000, "max_steps": 3})
