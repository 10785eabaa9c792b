"""A restore brings everything or changes nothing; a piece's state and a runner that was away are a part of it."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from tests.checkpoints.outcomes import assert_alike, outcome, state_of
from tests.checkpoints.test_going_back import assert_runners_equal_learner
from tests.support import tiny_config
from thrust_rllib import JointPPO

WAYS = ["folder", "state"]


def restore(algo, donor, way, path):
    """Restores what `donor` is now; a folder is written at `path`."""
    if way == "folder":
        algo.restore_from_path(donor.save_to_path(path))
    else:
        algo.set_state(donor.get_state())


def of_widths(*widths):
    """Climbing with networks of these widths, one for each agent."""
    specs = {f"agent_{i}": RLModuleSpec(model_config={"fcnet_hiddens": [width]}) for i, width in enumerate(widths)}
    return tiny_config("climbing").rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=specs))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda: of_widths(8, 5),
            r"module 'agent_1' of the checkpoint has another network.* \[5, 2\], needed \[6, 2\]",
        ),
        (lambda: tiny_config("bucket_brigade"), r"the checkpoint has modules \['agent_2', 'agent_3'\]"),
    ],
    ids=["network", "agents"],
)
def test_of_another_team_nothing_is_restored(build, tmp_path, way, other, message):
    algo, donor = build(of_widths(8, 6)), build(other())
    algo.train()
    before = state_of(algo)
    with pytest.raises(ValueError, match=message):
        restore(algo, donor, way, tmp_path / "saved")
    assert_alike(state_of(algo), before)
    assert algo.iteration == 1


@pytest.mark.parametrize("way", WAYS)
def test_behind_a_failed_restore_runners_still_get_the_weights(build, tmp_path, way, monkeypatch):
    algo, donor = build(of_widths(8, 6)), build(of_widths(8, 5))
    algo.train()
    monkeypatch.setattr(algo, "_check_modules", lambda modules: None)  # an error on the way, of any kind
    with pytest.raises(ValueError, match="another network"):
        restore(algo, donor, way, tmp_path / "saved")
    for _ in range(2):
        algo.train()
        assert_runners_equal_learner(algo)


def test_what_is_no_checkpoint(build, tmp_path):
    algo = build(tiny_config("climbing"))
    with pytest.raises(ValueError, match="does not exist; needed: a folder"):
        algo.restore_from_path(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="is no checkpoint of an algorithm: it has no"):
        algo.restore_from_path(tmp_path)


def test_parts_that_were_lost(build, tmp_path, caplog):
    algo = build(tiny_config("climbing"))
    modules = Path(algo.save_to_path(tmp_path / "saved")) / "learner_group" / "learner" / "rl_module"
    algo.train()
    before = state_of(algo)
    shutil.rmtree(modules / "agent_1")
    with caplog.at_level("WARNING", logger="thrust_rllib"):
        algo.restore_from_path(tmp_path / "saved")
    assert "modules ['agent_1'] are not in the checkpoint" in caplog.text and algo.iteration == 0
    assert_alike(state_of(algo)["parameters"]["agent_1"], before["parameters"]["agent_1"])
    algo.train()
    before = state_of(algo)
    shutil.rmtree(modules)
    with pytest.raises(ValueError, match="is not complete: it has no modules in learner_group/learner/rl_module"):
        algo.restore_from_path(tmp_path / "saved")
    assert_alike(state_of(algo), before)


class Fading(ConnectorV2):
    """A piece of the learner's pipeline: divides the rewards of call k by k."""

    calls = 0

    def get_state(self, *args, **kwargs):
        return {"calls": self.calls}

    def set_state(self, state):
        self.calls = state["calls"]

    def __call__(self, *, batch, episodes, **kwargs):
        self.calls += 1
        for episode in episodes:
            for single in episode.agent_episodes.values():
                single.rewards.data = np.asarray(single.rewards.data) / self.calls
        return batch


@pytest.mark.parametrize("way", [*WAYS, "fresh"])
def test_what_a_learners_piece_has_gathered(build, tmp_path, way):
    config = tiny_config("climbing", runners={"sampling": "episodes"})
    algo = build(config.learners(learner_connector=lambda *spaces: Fading()))
    for _ in range(2):
        algo.train()
    path, state = algo.save_to_path(tmp_path / "saved"), algo.get_state()
    needed = outcome(algo.train())
    if way == "folder":
        algo.restore_from_path(path)
    elif way == "state":
        algo.set_state(state)
    else:
        algo = JointPPO.from_checkpoint(path)
    assert_alike(outcome(algo.train()), needed)
    if way == "fresh":
        algo.stop()


@pytest.mark.timeout(120)
def test_a_runner_that_was_away_while_a_checkpoint_was_restored(build, tmp_path):
    algo = build(tiny_config("climbing", lr=0.1, runners={"num_env_runners": 2}))
    path = algo.save_to_path(tmp_path / "saved")
    for _ in range(2):
        algo.train()
    manager = algo.env_runner_group._worker_manager
    manager.set_actor_state(1, healthy=False)
    algo.restore_from_path(path)
    with pytest.raises(AssertionError):
        manager.set_actor_state(1, healthy=True)
        assert_runners_equal_learner(algo)
    manager.set_actor_state(1, healthy=False)
    assert algo.restore_env_runners(algo.env_runner_group) == [1]
    assert_runners_equal_learner(algo)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("runners", [0, 1])
def test_a_state_that_a_runner_does_not_take(build, caplog, runners):
    algo = build(tiny_config("climbing", runners={"num_env_runners": runners}))
    algo.train()
    state = algo.get_state()
    state["runners"]["training"][runners]["version"] = 0
    with caplog.at_level("WARNING", logger="thrust_rllib"):
        algo.set_state(state)
    assert f"(runner {runners}: ValueError: set_sampling_state got version 0; needed: version 1" in caplog.text
    assert algo.env_runner_group.num_healthy_remote_workers() == runners
    algo.train()
