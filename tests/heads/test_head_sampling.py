"""What the runners of both doors store head by head, and how conditional heads act."""

import numpy as np
import pytest
import torch
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.columns import Columns
from ray.rllib.core.distribution.torch.torch_distribution import TorchMultiCategorical
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from tests.heads import enumeration
from tests.heads.worlds import CONDITIONAL, MIXED, World, batch_of, world_config, world_runner
from tests.support import hand_batch, hand_streams
from thrust_rllib import JointBatch
from thrust_rllib.rl_modules.distributions import mask_logits
from thrust_rllib.rl_modules.mlp import MLPModule
from thrust_rllib.rl_modules.stacked import can_be_stacked
from thrust_rllib.sampling.acting import ModuleActing
from thrust_rllib.sampling.agent_groups import agent_groups
from thrust_rllib.sampling.plain_acting import Noise, PlainActing

DOORS = ["arrays", "episodes"]
KINDS = {"plain": {}, "conditional": CONDITIONAL}
CELLS = {"mlp": {}, "lstm": {"cell": "lstm", "cell_size": 8}, "gru": {"cell": "gru", "cell_size": 8}}


def sampled(door, model=None, steps=14, explore=True, **options):
    config = world_config(door, model, **options)
    runner = world_runner(config)
    samples = runner.sample(num_timesteps=steps * runner.num_envs, explore=explore)
    return runner, batch_of(config, runner, samples)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("door", DOORS)
def test_what_is_stored_are_the_modules_log_probabilities(door, kind, masked):
    runner, batch = sampled(door, KINDS[kind], masked=masked)
    parents = (None, 0) if kind == "conditional" else (None, None)
    looked_at = 0
    for module_id, streams in batch.modules.items():
        module = runner.module[module_id]
        assert streams.head_logp.dtype == np.float32 and streams.head_logp.shape == (*streams.action_logp.shape, 2)
        np.testing.assert_array_equal(streams.head_logp.sum(-1), streams.action_logp)
        assert (streams.head_logp[~streams.present] == 0).all() and (streams.head_logp[streams.present] < 0).all()
        with torch.no_grad():
            obs = torch.from_numpy(streams.obs).flatten(0, 2)
            logits = module.forward_exploration({Columns.OBS: obs})[Columns.ACTION_DIST_INPUTS]
        logits = logits.double().numpy().reshape(*streams.action_logp.shape, -1)
        for place in np.argwhere(streams.present)[:30]:
            t, n, e = place
            mask = streams.action_mask[t, n, e] if masked else None
            of = enumeration.joint(logits[t, n, e], [3, 4], parents, mask)
            _, parts = of[tuple(streams.actions[t, n, e].tolist())]
            np.testing.assert_allclose(streams.head_logp[t, n, e], parts, atol=1e-5)
            looked_at += 1
    assert looked_at >= 60


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("kind", KINDS)
def test_both_doors_store_the_same(kind, cell):
    """Greedy, with masks, agents that leave and fragments that are cut."""
    model = {**KINDS[kind], **CELLS[cell]}
    (_, fast), (_, general) = (sampled(d, model, explore=False, masked=True, num_envs=1) for d in DOORS)
    for module_id, left in fast.modules.items():
        right = general.modules[module_id]
        np.testing.assert_array_equal(left.present, right.present)
        np.testing.assert_array_equal(left.actions, right.actions)
        np.testing.assert_array_equal(left.action_mask, right.action_mask)
        assert left.action_mask.shape[-1] == 7  # as the environment gives it
        np.testing.assert_allclose(left.head_logp, right.head_logp, rtol=0, atol=4e-6)
        assert left.head_logp.dtype == right.head_logp.dtype and len(np.unique(left.head_logp)) > 8


@pytest.mark.parametrize("door", DOORS)
def test_teams_of_different_actions(door):
    """One head is the joint log-probability to the bit."""
    _, batch = sampled(door, spaces=MIXED)
    heads = {m: streams.head_logp.shape[-1] for m, streams in batch.modules.items()}
    assert heads == {"a0": 2, "a1": 1, "a2": 1, "a3": 3}
    for streams in batch.modules.values():
        np.testing.assert_allclose(streams.head_logp.sum(-1), streams.action_logp, rtol=1e-6, atol=1e-7)
        if streams.head_logp.shape[-1] == 1:
            np.testing.assert_array_equal(streams.head_logp[..., 0], streams.action_logp)


@pytest.mark.parametrize("door", DOORS)
def test_nothing_is_stored_where_nobody_asks(door):
    _, batch = sampled(door, ratio="joint")
    assert all(streams.head_logp is None for streams in batch.modules.values())
    assert batch.stream("a0").head_logp is None


@pytest.mark.parametrize("door", DOORS)
def test_fragments_follow_each_other(door):
    """Episodes of 6 steps cut every 4: what is stored does not depend on the cuts."""
    config = world_config(door, CONDITIONAL, num_envs=2)
    runner, whole = world_runner(config), world_runner(config)
    parts = [batch_of(config, runner, runner.sample(num_timesteps=8, explore=False)) for _ in range(3)]
    batch = batch_of(config, whole, whole.sample(num_timesteps=24, explore=False))
    for module_id, streams in batch.modules.items():
        joined = np.concatenate([part.modules[module_id].head_logp for part in parts])
        np.testing.assert_allclose(joined, streams.head_logp, rtol=0, atol=4e-6)


@pytest.mark.parametrize("explore", [True, False])
@pytest.mark.parametrize("masked", [False, True])
def test_acting_in_numpy_is_the_twin_of_the_modules(explore, masked):
    runner = world_runner(world_config(model=CONDITIONAL, masked=masked))
    (group,) = agent_groups(runner.env, runner.module_of, True, False)
    modules = [runner.module[m].unwrapped() for m in group.module_ids]
    assert can_be_stacked(modules)
    generator = torch.Generator().manual_seed(0)
    obs = np.repeat(np.random.default_rng(0).normal(size=(3, 1, 3)).astype(np.float32), 20_000, axis=1)
    mask = None
    if masked:
        mask = np.tile(World(masked=True).mask(1, "a0") > 0, (3, 20_000, 1))
    fast = PlainActing(group, modules, Noise(generator)).act(obs, mask, explore, False, None)
    slow = ModuleActing(group, modules, generator, torch.device("cpu")).act(obs, mask, explore, False, None)
    np.testing.assert_allclose(fast[0], slow[0], rtol=1e-5, atol=1e-5)
    assert fast[0].shape == (3, 20_000, 15) and fast[1].shape == (3, 20_000, 2) and fast[1].dtype == slow[1].dtype
    if not explore:
        np.testing.assert_array_equal(fast[1], slow[1])
        return
    for agent in range(3):
        allowed = None if mask is None else mask[agent, 0]
        raw = modules[agent].policy_head(modules[agent].trunk(torch.from_numpy(obs[agent, :1])))[0].detach()
        of = enumeration.joint(raw.double().numpy(), [3, 4], (None, 0), allowed)
        for actions in (fast[1][agent], slow[1][agent]):
            for action, (probability, _) in of.items():
                assert (actions == action).all(-1).mean() == pytest.approx(probability, abs=0.02)
            assert {tuple(a) for a in np.unique(actions, axis=0).tolist()} <= set(of)


def test_random_actions_choose_skills_evenly():
    runner = world_runner(world_config(model=CONDITIONAL))
    (batch,) = runner.sample(num_timesteps=2000, explore=True, random_actions=True)
    actions = np.concatenate([s.actions[s.present] for s in batch.modules.values()])
    for head, size in enumerate((3, 4)):
        np.testing.assert_allclose(np.bincount(actions[:, head]) / len(actions), 1 / size, atol=0.03)


def test_ratios_begin_at_1_because_the_stored_skills_goal_counts():
    """Up to the rounding of another forward pass; `test_head_distributions` has them exact for the same logits."""
    config = world_config("episodes", CONDITIONAL, masked=True)
    runner = world_runner(config)
    batch = batch_of(config, runner, runner.sample(num_timesteps=40))
    for module_id, streams in batch.modules.items():
        module, of = runner.module[module_id], runner.module[module_id].action_dist_cls
        obs, mask, actions = (torch.from_numpy(x) for x in (streams.obs, streams.action_mask, streams.actions))
        with torch.no_grad():
            logits = module.forward_exploration({Columns.OBS: obs.flatten(0, 2)})[Columns.ACTION_DIST_INPUTS]
        logits = logits.view(*actions.shape[:3], -1)
        new = of.from_logits(mask_logits(logits, mask, of)).head_logp(actions)
        ratio = torch.exp(new - torch.from_numpy(streams.head_logp))[torch.from_numpy(streams.present)]
        torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=2e-6)
        wrong = actions.clone()
        wrong[..., 0] = (wrong[..., 0] + 1) % 3  # it could fail: another skill gives the goal another probability
        other = of.from_logits(mask_logits(logits, None, of)).head_logp(wrong)[..., 1]
        assert ((other - new[..., 1]).abs() > 0.05).any()


# ------------------------------------------------------------------------------------------------------- the batch


def test_a_batch_checks_the_shape_and_hands_out_views():
    rng = np.random.default_rng(0)
    streams = hand_streams(["a", "b"], rng.normal(size=(3, 2, 2, 4)), actions=np.zeros((3, 2, 2, 2), np.int64))
    streams.head_logp = rng.normal(size=(3, 2, 2, 2)).astype(np.float32)
    batch: JointBatch = hand_batch({"m": streams})
    assert np.shares_memory(batch.stream("b").head_logp, streams.head_logp)
    np.testing.assert_array_equal(batch.stream("b").head_logp, streams.head_logp[:, 1])
    streams.head_logp = streams.head_logp[:, :1]
    with pytest.raises(ValueError, match=r"head_logp of module 'm' has leading shape \(3, 1, 2\), needed \(3, 2, 2\)"):
        batch.check()


# -------------------------------------------------------------------------------------------------------- mistakes


class Decides(ConnectorV2):
    """A piece that chooses actions and their log-probabilities itself."""

    heads = False

    def __call__(self, *, batch, **kwargs):
        for outputs in batch.values():
            rows = len(outputs[Columns.ACTION_DIST_INPUTS])
            outputs[Columns.ACTIONS] = torch.ones(rows, 2, dtype=torch.int64)
            outputs[Columns.ACTION_LOGP] = torch.full((rows,), -3.0)
            if self.heads:
                outputs["head_logp"] = torch.tensor([-1.0, -2.0]).expand(rows, 2)
        return batch


class DecidesHeads(Decides):
    heads = True


def with_piece(piece):
    return {"module_to_env_connector": lambda env=None, spaces=None, device=None: piece()}


def test_who_puts_out_log_probabilities_puts_out_those_of_the_heads():
    config = world_config("episodes", runners=with_piece(DecidesHeads))
    runner = world_runner(config)
    batch = batch_of(config, runner, runner.sample(num_timesteps=8))
    for streams in batch.modules.values():
        assert (streams.head_logp[streams.present] == [-1.0, -2.0]).all() and (
            streams.actions[streams.present] == 1
        ).all()
    runner = world_runner(world_config("episodes", runners=with_piece(Decides)))
    with pytest.raises(ValueError, match=r"'action_logp' was put out .* but not 'head_logp'.*put out both"):
        runner.sample(num_timesteps=8)


def test_episodes_without_them_are_refused():
    plain = world_config("episodes", ratio="joint")
    episodes = world_runner(plain).sample(num_timesteps=8)
    config = world_config("episodes")
    with pytest.raises(ValueError, match=r"agent 'a0': its steps came without 'head_logp'"):
        batch_of(config, world_runner(config), episodes)


class Rllibs(MLPModule):
    """Acts by a distribution of RLlib's."""

    def setup(self):
        super().setup()
        self.action_dist_cls = TorchMultiCategorical.get_partial_dist_cls(input_lens=[3, 4])


@pytest.mark.parametrize("door", DOORS)
def test_distributions_that_know_no_heads_are_an_early_error(door):
    for ratio in ("joint", "per_head"):
        changed = world_config(door, ratio=ratio).copy(copy_frozen=False)
        changed.rl_module(rl_module_spec=RLModuleSpec(module_class=Rllibs))
        changed.validate()
        if ratio == "joint":
            changed.env_runner_cls(config=changed, worker_index=0)
            continue
        with pytest.raises(ValueError, match=r"module 'a0' \(Rllibs\).*no log-probabilities head by head"):
            changed.env_runner_cls(config=changed, worker_index=0)
