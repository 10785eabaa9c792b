"""What rollouts of recurrent modules tell the learner: in the first pass over fresh data every ratio is 1.

And the values, those to bootstrap from included, are those of a replay step by step in float64.
"""

import copy

import numpy as np
import pytest
import torch
import tree
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from tests.envs.lives import LIVES, JointLives
from tests.general.doors import Doors
from tests.support import make_learner, tiny_config
from thrust_rllib.joint_values import joint_values
from thrust_rllib.rl_modules.memory import MemoryLayout
from thrust_rllib.rl_modules.recurrent import GRUModule
from thrust_rllib.rl_modules.stacked import can_be_stacked
from thrust_rllib.team_outputs import forward_team

MODELS = {
    "lstm": {"cell": "lstm", "cell_size": 8},
    "gru": {"cell": "gru", "cell_size": 8, "fcnet_hiddens": [6]},
    "lstm, own critic": {"cell": "lstm", "cell_size": 8, "vf_share_layers": False},
    "stock lstm": RLModuleSpec(
        module_class=DefaultPPOTorchRLModule,
        model_config=DefaultModelConfig(use_lstm=True, lstm_cell_size=8, fcnet_hiddens=[6], max_seq_len=5),
    ),
}
# Three agents; episodes of 7 steps end inside rollouts of 13.
RANDOM = ("debug/random_observations", {"episode_length": 7})
COME_AND_GO = (JointLives, {"lives": LIVES, "length": 4})


class Recurrent(Doors):
    """Both doors with one kind of module."""

    def __init__(self, env, model, max_seq_len=None, **options):
        if isinstance(model, dict):
            model = {**model, "max_seq_len": max_seq_len}
        super().__init__(*env, model=model, minibatch_size=None, **options)


def joint_rows_of(doors, door, steps):
    """Samples, and gives the learner's joint rows in the order of time, and the batches they came from."""
    runner, learner = doors.runners[door], doors.learners[door]
    batches = learner._batches(runner.sample(num_timesteps=steps * runner.num_envs, explore=True))
    rows = learner._joint_rows(batches)
    return rows.select(rows.units().rows), batches


@pytest.fixture
def spec_config(monkeypatch):
    """`tiny_config` with an RLModuleSpec where one is given as the model."""
    import tests.general.doors as doors

    made = doors.tiny_config

    def make(*args, model=None, **options):
        if not isinstance(model, RLModuleSpec):
            return made(*args, model=model, **options)
        config = made(*args, model={}, **options)
        return config.rl_module(rl_module_spec=copy.deepcopy(model), model_config=model.model_config)

    monkeypatch.setattr(doors, "tiny_config", make)


class Replay:
    """An agent's module in float64, one step at a time; its memories go on from rollout to rollout."""

    def __init__(self, learner, module_id):
        self.learner, self.module_id, self.memory = learner, module_id, {}

    def play(self, stream, batch):
        """{(t, e): value} of the rows, and of what follows those that are bootstrapped from."""
        self.module = copy.deepcopy(self.learner.module[self.module_id].unwrapped()).double()
        self.layout = MemoryLayout.of(self.module)
        values, following = {}, {}
        for e in range(batch.num_envs):
            acted = np.flatnonzero(stream.present[:, e])
            for t in range(batch.num_steps):
                if batch.episode_start[t, e] or e not in self.memory:
                    self.memory[e] = tree.map_structure(lambda x: x[None].double(), self.module.get_initial_state())
                if t not in acted:
                    continue
                values[t, e], self.memory[e] = self.step(stream.obs[t, e], self.memory[e])
                if (stream.truncated[t, e] or t == acted[-1]) and not stream.terminated[t, e]:
                    (k,) = np.flatnonzero(batch.bootstrap_rows == t * batch.num_envs + e)
                    following[t, e], _ = self.step(stream.bootstrap_obs[k], self.memory[e])
        return values, following

    def step(self, obs, memory):
        """Value of one observation, and the state behind it."""
        batch = {"obs": torch.from_numpy(obs).double()[None, None], "state_in": memory}
        with torch.no_grad():
            return float(self.module.compute_values(batch)), self.module.forward_train(batch)["state_out"]


# Each kind of module in each door, with whole rollouts and with sequences of 5, with agents that stay and that do not.
CASES = {
    f"{name}, {door}, {kind}": (
        name,
        door,
        env,
        5 if name == "stock lstm" or (env is RANDOM) == (door == "arrays") else None,
    )
    for name in MODELS
    for door in ("arrays", "episodes")
    for kind, env in (("random", RANDOM), ("come and go", COME_AND_GO))
}


@pytest.mark.parametrize("name,door,env,max_seq_len", CASES.values(), ids=CASES)
def test_ratios_of_the_first_pass_are_one_and_values_those_of_a_replay(name, door, env, max_seq_len, spec_config):
    doors = Recurrent(env, MODELS[name], max_seq_len)
    learner = doors.learners[door]
    module_ids = sorted(learner.module.keys())
    assert can_be_stacked([learner.module[module_ids[0]].unwrapped()]) == (name != "stock lstm")
    replays = {m: Replay(learner, m) for m in module_ids}
    bootstrapped = set()
    for rollout in range(3):
        rows, (batch,) = joint_rows_of(doors, door, 13)
        outputs = forward(learner, rows)
        ratio = torch.exp(outputs.logp - rows.action_logp)[rows.present]
        assert len(ratio) > 40 and float((ratio - 1).abs().max()) < 1e-5
        assert float((outputs.values - rows.values)[rows.present].abs().max()) < 1e-5
        values_of_all = joint_values([batch], learner._values, learner.memories, "cpu")
        for module_id in module_ids:
            ((own, following),) = values_of_all[module_id]
            for j, agent in enumerate(batch.modules[module_id].agents):
                values, after = replays[module_id].play(batch.stream(agent), batch)
                for found, expected in ((own, values), (following, after)):
                    for (t, e), value in expected.items():
                        assert float(found[t, j, e]) == pytest.approx(value, abs=2e-5)
                bootstrapped |= {t < batch.num_steps - 1 for t, _ in after}
        if rollout:  # memories that begin with zeros at the rollout's first row are not those that acted
            for module in rows.modules.values():
                module.state_in.zero_()
            assert float((forward(learner, rows).logp - rows.action_logp)[rows.present].abs().max()) > 1e-3
        doors.set_weights(rollout + 1)
    assert bootstrapped == {True, False}  # inside rollouts, and at their ends


@torch.no_grad()
def forward(learner, rows):
    return forward_team(learner.module, rows, dict.fromkeys(rows.modules, True))


@pytest.mark.parametrize("max_seq_len,begins", [(5, [0, 1, 10, 11, 20, 21]), (None, [0, 1])])
def test_a_rollout_is_cut_into_sequences_that_both_doors_agree_on(max_seq_len, begins):
    doors = Recurrent(RANDOM, MODELS["gru"], max_seq_len)
    for _ in range(3):
        batches = [joint_rows_of(doors, door, 13)[1][0] for door in doors.runners]
        assert batches[0].sequence_rows.tolist() == begins
        for streams in batches[0].modules.values():
            np.testing.assert_array_equal(batches[0].sequence_rows, batches[1].sequence_rows)
            assert streams.state_in.shape == (1, len(begins), 8)


class Constant(GRUModule):
    """Begins with a buffer that differs from process to process until weights are handed out."""

    def _add_actor(self, config):
        width = super()._add_actor(config)
        self.register_buffer("begin", torch.randn(self.cell_size))
        return width

    def _initial(self):
        return {"h": self.begin}


class Whim(GRUModule):
    def _initial(self):
        return {"h": torch.randn(self.cell_size)}


class Learnt(Constant):
    def _initial(self):
        return {"h": self.cell.bias_ih_l0[: self.cell_size]}


def algorithm_of(module_class, door, model, build):
    config = tiny_config(*RANDOM, runners={"sampling": door}, minibatch_size=None, seed=None, lr=0.02)
    return build(config.rl_module(rl_module_spec=RLModuleSpec(module_class), model_config=model))


STOCK = DefaultModelConfig(use_lstm=True, lstm_cell_size=8, fcnet_hiddens=[6], max_seq_len=5, vf_share_layers=False)


@pytest.mark.parametrize("door", ["arrays", "episodes"])
@pytest.mark.parametrize("module_class,model", [(Constant, {"cell_size": 5}), (DefaultPPOTorchRLModule, STOCK)])
def test_runners_have_all_that_a_memory_begins_and_goes_on_with(module_class, model, door, build):
    algo = algorithm_of(module_class, door, model, build)
    algo.train()
    learner, runner = algo.learner_group._learner, algo.env_runner
    for module_id in runner.module.keys():
        mine, others = (x.module[module_id].unwrapped().state_dict() for x in (runner, learner))
        assert {name for name in mine if "critic" in name} == {name for name in others if "critic" in name}
        for name, value in mine.items():
            assert torch.equal(value, others[name]), name
    batches = learner._batches(runner.sample(num_timesteps=26, explore=True))
    rows = learner._joint_rows(batches)
    rows = rows.select(rows.units().rows)
    assert float((forward(learner, rows).logp - rows.action_logp)[rows.present].abs().max()) < 1e-5


@pytest.mark.parametrize("module_class,said", [(Whim, "another state each time"), (Learnt, "needs a gradient")])
def test_an_initial_state_is_a_constant(module_class, said):
    config = tiny_config(*RANDOM, minibatch_size=None)
    config.rl_module(rl_module_spec=RLModuleSpec(module_class), model_config={"cell_size": 5})
    with pytest.raises(ValueError, match=said):
        make_learner(config)
