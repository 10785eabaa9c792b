"""Both doors on random environments: no step is lost, doubled or joined with another, and the numbers are right.

Whatever the environment did (`random_envs.Journal`), in episodes cut anywhere, has to stand in the learner's batches.
Steps belong to the sample in which they were completed: a *piece* is what one sample adds to one agent's stream.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.general.random_envs import Journal, ScriptedJointEnv, ScriptedMultiAgentEnv, scripts
from tests.general.reference import advantages_and_targets
from tests.general.script import Episode, Kind, Life, Script, encode, origin, received
from tests.support import tiny_config
from thrust_rllib import JointBatch
from thrust_rllib.connectors.episodes_to_joint_batch import JOINT_BATCH, EpisodesToJointBatch
from thrust_rllib.joint_rows import JointRows, joint_rows
from thrust_rllib.minibatches import Units, joint_epochs

examples = settings(max_examples=40, deadline=None, derandomize=True)
lengths = st.lists(st.integers(1, 9), min_size=1, max_size=5)
envs = st.sampled_from([ScriptedMultiAgentEnv, ScriptedJointEnv])
discounts = st.sampled_from([(0.9, 0.95), (1.0, 0.0), (0.5, 1.0)])

# --- playing ----------------------------------------------------------------------------------------------------------


@dataclass
class Sampled:
    """Samples that make up one batch.

    Args:
        batch: what the learner gets.
        pieces: (episode number, agent, first own step, step after the last): what was completed, sample by sample.
        env_steps: number of environment steps played.
    """

    batch: JointBatch
    pieces: list[tuple[int, str, int, int]]
    env_steps: int


class Door:
    """Plays a script through one of the doors.

    Args:
        script: what to play.
        env: `ScriptedMultiAgentEnv` or `ScriptedJointEnv`; each door serves both.
        sampling: "episodes" (the general door) or "arrays" (the fast one).
        num_envs: E.
        shared: agents with the same spaces share a module.
        **rl_module: options of `.rl_module(…)`.
    """

    def __init__(
        self, script: Script, env=ScriptedMultiAgentEnv, sampling="episodes", num_envs=1, shared=False, **rl_module
    ):
        self.script, self.journal = script, Journal()
        groups: dict[Kind, list[str]] = {}
        for agent, kind in zip(script.agents, script.kinds, strict=True):
            groups.setdefault(kind, []).append(agent)
        config = tiny_config(
            env,
            {"script": script, "journal": self.journal},
            num_envs=num_envs,
            policies={f"team_{members[-1]}": members for members in groups.values()} if shared else None,
            runners={"sampling": sampling},
        )
        config.rl_module(**rl_module).validate()
        self.runner = config.env_runner_cls(config=config, worker_index=0)
        self.to_batch = EpisodesToJointBatch(codec=config.team_codec()) if sampling == "episodes" else None

    def kind(self, agent: str) -> Kind:
        return self.script.kinds[self.script.agents.index(agent)]

    def sample(self, *asked: dict) -> Sampled:
        """One batch of one sample after another; `asked` are the arguments of `runner.sample`."""
        results, pieces, before = [], [], self._played()
        for arguments in asked:
            done = self._completed()
            results += self.runner.sample(**arguments)
            for (number, agent), stop in self._completed().items():
                if stop > done.get((number, agent), 0):
                    pieces.append((number, agent, done.get((number, agent), 0), stop))
        if self.to_batch is None:
            (batch,) = results
        else:
            batch = self.to_batch(episodes=results, batch={}, rl_module=self.runner.module)[JOINT_BATCH]
        return Sampled(batch, pieces, self._played() - before)

    def _completed(self) -> dict[tuple[int, str], int]:
        return {(e.number, agent): s.complete() for e in self.journal.episodes for agent, s in e.streams.items()}

    def _played(self) -> int:
        return sum(episode.steps for episode in self.journal.episodes)

    def stream(self, number: int, agent: str):
        return self.journal.episodes[number].streams[agent]


# --- what has to hold -------------------------------------------------------------------------------------------------


def check_steps(door: Door, sampled: Sampled) -> None:
    """Each completed step once, with its observation, mask, action, reward and end; nothing else is present."""
    found = {}
    for stream in sampled.batch.streams():
        kind = door.kind(stream.agent_id)
        for t, e in np.argwhere(stream.present):
            assert sampled.batch.valid[t, e]
            step = (*origin(kind, stream.obs[t, e]), stream.agent_id)
            assert step not in found, f"{step} stands in the batch twice"
            found[step] = (stream, t, e)
    expected = {}
    for number, agent, first, stop in sampled.pieces:
        truth = door.stream(number, agent)
        for i in range(first, stop):
            end = truth.end if i + 1 == len(truth.steps) else None
            early = truth.early_reward if i == 0 else 0.0
            expected[number, truth.steps[i].t, agent] = (truth.steps[i], truth.steps[i].reward + early, end)
    assert set(found) == set(expected)
    for step, (truth, reward, end) in expected.items():
        stream, t, e = found[step]
        kind = door.kind(stream.agent_id)
        np.testing.assert_array_equal(stream.obs[t, e], encode(kind, truth.observation))
        np.testing.assert_allclose(received(kind, stream.actions[t, e]), truth.action, rtol=0, atol=1e-5)
        assert stream.rewards[t, e] == reward, step
        assert stream.terminated[t, e] == (end == "terminated"), step
        if end == "truncated":
            assert stream.truncated[t, e], step
        if kind.observation == "masked":
            np.testing.assert_array_equal(stream.action_mask[t, e], truth.observation["action_mask"] > 0)


def check_number_of_rows(door: Door, sampled: Sampled) -> None:
    """A joint row for each environment step played, and for each earlier one at which a step completed now began."""
    began = {(number, door.stream(number, agent).steps[i].t) for number, agent, i, stop in sampled.pieces}
    assert sampled.env_steps <= sampled.batch.env_steps() <= sampled.env_steps + len(began)


def check_joined(door: Door, rows: JointRows) -> None:
    """The agents of one joint row are at the same step of the same episode."""
    agents = [(module, j, agent) for module in rows.modules.values() for j, agent in enumerate(module.agents)]
    for b in range(len(rows)):
        places = {
            origin(door.kind(agent), module.obs[j, b].numpy())
            for n, (module, j, agent) in enumerate(agents)
            if rows.present[n, b]
        }
        assert len(places) <= 1, f"one joint row holds {sorted(places)}"


def check_absent_is_masked(rows: JointRows) -> None:
    """Nothing of an absent agent can reach a loss."""
    absent = ~rows.present
    assert not rows.advantages[absent].any() and not rows.value_targets[absent].any()
    start = 0
    for module in rows.modules.values():
        mine = absent[start : start + len(module.agents)]
        start += len(module.agents)
        assert not module.obs[mine].any() and not module.actions[mine].any()
        assert module.action_mask is None or module.action_mask[mine].all()


def value(x: np.ndarray) -> np.ndarray:
    """Some value between -1 and 1 of encoded observations [R, …]."""
    flat = np.asarray(x, np.float64).reshape(len(x), -1)
    return np.sin(flat @ np.linspace(0.3, 1.7, flat.shape[1]))


def rows_of(batches: list[JointBatch], gamma: float, lambda_: float) -> JointRows:
    modules = list(batches[0].modules)
    return joint_rows(
        batches,
        values_of=lambda _, obs, sequences: torch.from_numpy(value(obs.numpy())),
        memories={},
        normalizers={},
        gamma=dict.fromkeys(modules, gamma),
        lambda_=dict.fromkeys(modules, lambda_),
        bootstrap=True,
        standardize_rollout=False,
        device="cpu",
    )


def check_advantages(door: Door, all_sampled: list[Sampled], rows: JointRows, gamma: float, lambda_: float) -> None:
    """Equal to the reference, step by step."""
    expected = {}
    for sampled in all_sampled:
        for number, agent, first, stop in sampled.pieces:
            truth, kind = door.stream(number, agent), door.kind(agent)
            results = advantages_and_targets(
                truth, first, stop, lambda seen, kind=kind: float(value(encode(kind, seen)[None])[0]), gamma, lambda_
            )
            for step, advantage, target in zip(truth.steps[first:stop], *results, strict=True):
                expected[number, step.t, agent] = (advantage, target)
    n, seen = 0, 0
    for module in rows.modules.values():
        for j, agent in enumerate(module.agents):
            for b in torch.nonzero(rows.present[n])[:, 0].tolist():
                place = (*origin(door.kind(agent), module.obs[j, b].numpy()), agent)
                found = (float(rows.advantages[n, b]), float(rows.value_targets[n, b]))
                np.testing.assert_allclose(found, expected[place], rtol=1e-5, atol=1e-5, err_msg=str(place))
                seen += 1
            n += 1
    assert seen == len(expected)


def check_minibatches(door: Door, rows: JointRows, size: int) -> None:
    """Every joint minibatch is aligned, and two epochs use every step twice."""
    used: Counter = Counter()
    epochs = joint_epochs(
        Units.single_rows(len(rows)),
        minibatch_size=size,
        num_epochs=2,
        iterate_all_minibatches=True,
        max_minibatches_per_epoch=None,
        shuffle=True,
        generator=torch.Generator().manual_seed(0),
    )
    for chosen in itertools.chain.from_iterable(epochs):
        minibatch = rows.select(chosen)
        check_joined(door, minibatch)
        used.update({int(b): int(count) for b, count in zip(chosen, minibatch.present.sum(0), strict=True)})
    assert sum(used.values()) == 2 * int(rows.present.sum())


def check_rewards_are_kept(door: Door, all_sampled: list[Sampled]) -> None:
    """Per agent, over all batches: what was paid, but for steps that are open and agents that have not acted."""
    for agent in door.script.agents:
        streams = [episode.streams[agent] for episode in door.journal.episodes]
        paid = sum(s.early_reward + sum(step.reward for step in s.steps) for s in streams)
        open_steps = sum(step.reward for s in streams for step in s.steps[s.complete() :])
        uncredited = sum(s.early_reward for s in streams if not s.complete())
        credited = sum(sampled.batch.stream(agent).rewards.sum() for sampled in all_sampled)
        assert credited == paid - open_steps - uncredited, agent


def check_all(door: Door, all_sampled: list[Sampled], gamma: float, lambda_: float, size: int) -> None:
    for sampled in all_sampled:
        check_steps(door, sampled)
        check_number_of_rows(door, sampled)
    rows = rows_of([sampled.batch for sampled in all_sampled], gamma, lambda_)
    check_absent_is_masked(rows)
    check_joined(door, rows)
    check_minibatches(door, rows, size)
    check_advantages(door, all_sampled, rows, gamma, lambda_)
    check_rewards_are_kept(door, all_sampled)


# --- the general door -------------------------------------------------------------------------------------------------


@examples
@given(scripts(), envs, lengths, st.integers(1, 2), st.booleans(), discounts, st.integers(1, 20))
def test_fragments_cut_anywhere(script, env, lengths, num_envs, shared, discount, size):
    door = Door(script, env, num_envs=num_envs, shared=shared)
    all_sampled = [door.sample({"num_timesteps": length * num_envs}) for length in lengths]
    check_all(door, all_sampled, *discount, size)


@settings(examples, max_examples=30)
@given(scripts(), lengths, st.integers(1, 2), discounts)
def test_several_samples_in_one_batch(script, lengths, num_envs, discount):
    door = Door(script, num_envs=num_envs)
    sampled = door.sample(*({"num_timesteps": length * num_envs} for length in lengths))
    check_all(door, [sampled], *discount, 7)


@settings(examples, max_examples=30)
@given(scripts(), st.integers(1, 4), discounts)
def test_whole_episodes(script, num_episodes, discount):
    door = Door(script)
    all_sampled = [door.sample({"num_episodes": num_episodes}) for _ in range(2)]
    check_all(door, all_sampled, *discount, 7)
    for sampled in all_sampled:
        assert len({number for number, *_ in sampled.pieces}) == num_episodes


# --- the fast door ----------------------------------------------------------------------------------------------------


@examples
@given(scripts(waits=False), envs, lengths, st.integers(1, 2), st.booleans(), discounts)
def test_fast_door(script, env, lengths, num_envs, shared, discount):
    if any(life.at(0) != "A" for life in script.episodes[0].lives):
        env = ScriptedJointEnv  # one of RLlib's kind that shows only some agents at first is taken to be turn-based
    door = Door(script, env, "arrays", num_envs, shared)
    all_sampled = [door.sample({"num_timesteps": length * num_envs}) for length in lengths]
    check_all(door, all_sampled, *discount, 7)


# --- by hand ----------------------------------------------------------------------------------------------------------

TURNS = Script(
    kinds=(Kind(), Kind("discrete")),
    episodes=(Episode((Life("A.A.A"), Life("+A+AA", "truncated")), over="terminated"),),
)


def test_a_step_open_at_a_cut_stands_in_the_next_batch():
    door = Door(TURNS)
    first, second = door.sample({"num_timesteps": 3}), door.sample({"num_timesteps": 2})
    assert [piece[1:] for piece in first.pieces] == [("north", 0, 1), ("east", 0, 1)]
    assert [piece[1:] for piece in second.pieces] == [("north", 1, 3), ("east", 1, 3)]
    assert (first.batch.env_steps(), second.batch.env_steps()) == (3, 3)
    check_all(door, [first, second], 0.9, 0.95, 2)
    north, east = (second.batch.stream(agent).present[:, 0] for agent in ("north", "east"))
    assert (north.tolist(), east.tolist()) == ([True, False, True], [False, True, True])


def shifted(rows: JointRows) -> JointRows:
    """The rows of the first module's agents one place further on, the others' where they are."""
    module_id, module = next(iter(rows.modules.items()))
    rolled = replace(module, obs=module.obs.roll(1, dims=1))
    present = rows.present.clone()
    present[: len(module.agents)] = present[: len(module.agents)].roll(1, dims=1)
    return replace(rows, modules={**rows.modules, module_id: rolled}, present=present)


def test_rows_of_one_agent_out_of_place_are_found():
    door = Door(replace(TURNS, episodes=(Episode((Life("AAAA"), Life("AAAA"))),)))
    rows = rows_of([door.sample({"num_timesteps": 4}).batch], 0.9, 0.95)
    check_joined(door, rows)
    with pytest.raises(AssertionError, match="one joint row holds"):
        check_joined(door, shifted(rows))


@pytest.mark.parametrize("field", ["obs", "actions", "rewards", "present"])
def test_a_wrong_number_is_found(field):
    door = Door(TURNS)
    sampled = door.sample({"num_timesteps": 5})
    check_steps(door, sampled)
    array = getattr(sampled.batch.modules["north"], field)
    array[2] = ~array[2] if field == "present" else array[2] + 1
    with pytest.raises(AssertionError):
        check_steps(door, sampled)


def test_what_an_agent_is_paid_that_never_acts_is_told(caplog):
    class PaidForNothing(ScriptedMultiAgentEnv):
        """Its own name: the warning comes once for each name."""

    script = Script((Kind(), Kind()), (Episode((Life("AAAA"), Life("+++."))),))
    door = Door(script, PaidForNothing)
    with caplog.at_level(logging.WARNING):
        sampled = door.sample({"num_episodes": 1})
    check_all(door, [sampled], 0.9, 0.95, 2)
    told = [r.getMessage() for r in caplog.records if "never acted" in r.getMessage()]
    assert len(told) == 1 and "'east'" in told[0]
    assert f"{door.stream(sampled.pieces[0][0], 'east').early_reward:g}" in told[0]
