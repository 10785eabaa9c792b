"""The exchange of messages, against loops of numpy; who is heard and who is not; gradients."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from tests.communicating.message_reference import exchanged, parameters
from tests.communicating.networks import GRID, WIDTH, D, N, by_agent, network, observations
from thrust_rllib.rl_modules import message_passing
from thrust_rllib.rl_modules.communication_settings import AGGREGATIONS, CONTENTS
from thrust_rllib.rl_modules.exchange import check_alike, exchange, scan
from thrust_rllib.rl_modules.message_passing import Heard, Messages, attention, largest, weighted

ORDER = torch.arange(N)
KINDS = list(itertools.product(AGGREGATIONS, CONTENTS))


def run(module, obs, present=None, state=None):
    """One module for all agents: [B, N, N + O] to z [B, N, D]."""
    (z,), after = exchange([module], [by_agent(obs)], torch.arange(obs.shape[-2]), present, state)
    return z.transpose(0, 1), after


def expected(weights, obs, rounds, aggregation, shape=None, present=None):
    """z [B, N, D] of one module for all agents, by loops."""
    n = obs.shape[1]
    rows = []
    for b, row in enumerate(obs):
        links = row[:, :n] * (1.0 if present is None else present[:, b])
        rows.append(exchanged([weights] * n, row[:, n:], links, rounds, aggregation, shape)[0])
    return np.array(rows)


@pytest.mark.parametrize("rounds", [0, 1, 2, 3])
@pytest.mark.parametrize("aggregation, content", KINDS)
def test_features_behind_the_messages(aggregation, content, rounds):
    module = network(aggregation=aggregation, message_content=content, message_rounds=rounds)
    obs = observations(3)
    obs[0, 1, :N] = 0.0  # agent 1 hears nobody
    z, after = run(module, obs)
    assert z.shape == (3, N, D) and after is None
    np.testing.assert_allclose(z.detach(), expected(parameters(module), obs, rounds, aggregation), atol=1e-12)


@pytest.mark.parametrize("aggregation, content", KINDS)
def test_absent_agents_say_nothing(aggregation, content):
    module = network(aggregation=aggregation, message_content=content)
    obs = observations(4, density=0.8)
    present = np.random.default_rng(3).random((N, 4)) < 0.6
    present[:, 0] = False
    z, _ = run(module, obs, torch.from_numpy(present))
    wanted = expected(parameters(module), obs, 2, aggregation, present=present)
    np.testing.assert_allclose(z.detach(), wanted, atol=1e-12)
    assert torch.isfinite(z).all()
    everybody, _ = run(module, obs)
    assert not torch.allclose(z, everybody)


@pytest.mark.parametrize("filters, kernels", [([[3, 3], [4, 1]], (3, 1)), ([[2, 5], [3, 3]], (5, 3))])
def test_grids_are_convolved_and_pooled(filters, kernels):
    module = network(input_shape=GRID, conv_filters=filters)
    assert tuple(module.encoder.convolutions[k].kernel_size[0] for k in (0, 2)) == kernels
    obs = observations(2, width=int(np.prod(GRID)))
    z, _ = run(module, obs)
    np.testing.assert_allclose(z.detach(), expected(parameters(module), obs, 2, "max", GRID), atol=1e-12)


def test_a_grid_may_be_read_as_a_row():
    module = network(input_shape=GRID, encoder="mlp")
    obs = observations(2, width=int(np.prod(GRID)))
    np.testing.assert_allclose(run(module, obs)[0].detach(), expected(parameters(module), obs, 2, "max"), atol=1e-12)


def test_the_largest_message_is_found_in_pieces(monkeypatch):
    module, obs = network(message_content="both"), observations(7)
    whole, _ = run(module, obs)
    monkeypatch.setattr(message_passing, "MOST_NUMBERS", 2 * N * N * D)  # two rows at once
    pieces, _ = run(module, obs)
    assert torch.equal(whole, pieces)


# --- several modules ---


def test_modules_with_other_weights_understand_each_other():
    names = ("attention", "both")
    modules = [network(seed, aggregation=names[0], message_content=names[1]) for seed in (1, 2, 3)]
    owners, obs = [2, 0, 1, 0, 2], observations(3)
    order = [i for k in range(3) for i in range(N) if owners[i] == k]
    sizes = [owners.count(k) for k in range(3)]
    parts = by_agent(obs)[order].split(sizes)
    z, _ = exchange(modules, parts, torch.tensor(order), None)
    assert [len(mine) for mine in z] == sizes
    weights = [parameters(modules[k]) for k in owners]
    for b in range(3):
        wanted, _ = exchanged(weights, obs[b, :, N:], obs[b, :, :N], 2, names[0])
        np.testing.assert_allclose(torch.cat(z)[:, b].detach(), np.array(wanted)[order], atol=1e-12)


def test_agents_that_take_no_part_are_not_heard():
    module, obs = network(), observations(3)
    part = [0, 2, 3]
    (z,), _ = exchange([module], [by_agent(obs)[part]], torch.tensor(part), None)
    silent = obs.copy()
    silent[..., [1, 4]] = 0.0
    torch.testing.assert_close(z, run(module, silent)[0].transpose(0, 1)[part], atol=1e-12, rtol=0)


def test_copies_of_a_module_do_what_the_module_does():
    one, copy = network(), network(seed=5)
    copy.load_state_dict(one.state_dict())
    obs = by_agent(observations(4))
    (z,), _ = exchange([one], [obs], ORDER, None)
    parts, _ = exchange([one, copy], list(obs.split([2, 3])), ORDER, None)
    torch.testing.assert_close(torch.cat(parts), z, atol=1e-12, rtol=0)


# --- what messages reach ---


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_a_cut_link_matters_within_the_reach_of_the_rounds_only(aggregation, rounds):
    n = 7
    module = network(num_links=n, message_rounds=rounds, aggregation=aggregation)
    obs = observations(1, num_links=n, density=0.0)
    for i in range(1, n):
        obs[0, i, i - 1] = 0.5  # a chain: each hears the one before
    whole, _ = run(module, obs)
    obs[0, 1, 0] = 0.0  # agent 1 no longer hears agent 0
    cut, _ = run(module, obs)
    changed = (whole != cut).any(-1)[0]
    assert changed.tolist() == [1 <= i <= rounds for i in range(n)]


@pytest.mark.parametrize("aggregation, content", KINDS)
def test_agents_in_another_order_have_the_same_features(aggregation, content):
    module, obs = network(aggregation=aggregation, message_content=content), observations(3)
    order = [3, 0, 4, 2, 1]
    mixed = obs[:, order].copy()
    mixed[..., :N] = mixed[..., order]
    torch.testing.assert_close(run(module, mixed)[0], run(module, obs)[0][:, order], atol=1e-12, rtol=0)


@pytest.mark.parametrize("aggregation, content", KINDS)
def test_who_hears_nobody_gets_0(aggregation, content):
    torch.manual_seed(0)
    messages = Messages(D, aggregation, content).double()
    torch.nn.init.ones_(next(layer for layer in (messages.say, messages.distance) if layer is not None).bias)
    carried = torch.randn(3, 2, D, dtype=torch.float64)
    sent = messages.send(carried)
    assert sent.shape == (3, 2, messages.sent_width)
    links = torch.zeros(3, 2, 3, dtype=torch.float64)
    links[0, 0, 1] = 0.5
    heard = messages(carried, sent, links)
    assert not heard[1:].any() and not heard[0, 1].any() and heard[0, 0].all()
    heard[1:].sum().backward()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in messages.parameters())


# --- gradients ---


@pytest.mark.parametrize("part", ["said", "distance", "both"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradients_of_the_aggregation(aggregation, part):
    torch.manual_seed(1)
    double = {"dtype": torch.float64, "requires_grad": True}
    links = torch.from_numpy(observations(2)[..., :N]).transpose(0, 1)
    mask = (links > 0).double()
    said, slope, offset = torch.randn(N, 2, 3, **double), torch.randn(3, **double), torch.randn(3, **double)
    queries, keys = torch.randn(N, 2, 3, **double), torch.randn(N, 2, 3, **double)

    def aggregate(said, slope, offset, queries, keys):
        heard = Heard(links, None if part == "distance" else said, None if part == "said" else (slope, offset))
        if aggregation == "max":
            return largest(heard)
        if aggregation == "mean":
            return weighted(mask / mask.sum(-1, keepdim=True).clamp(min=1), heard)
        return weighted(attention(queries, keys, mask), heard)

    inputs = (said, slope, offset, queries, keys)
    assert torch.autograd.gradcheck(aggregate, inputs, atol=1e-8)
    assert aggregate(*inputs).requires_grad


def test_learned_messages_keep_nothing_for_each_pair():
    n, rows, size = 16, 8, 32
    links = (torch.rand(n, rows, n) < 0.7).float()
    kept = []

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    for aggregation in AGGREGATIONS:
        messages, carried = Messages(size, aggregation, "learned"), torch.randn(n, rows, size)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            messages(carried, messages.send(carried), links)
    assert max(kept) <= n * rows * 2 * size < n * rows * n * size


# --- memory inside the messages ---


@pytest.mark.parametrize("aggregation, content", [("max", "learned"), ("mean", "both"), ("attention", "distance")])
def test_the_memory_runs_along_time(aggregation, content):
    modules = [network(s, cell="message_gru", aggregation=aggregation, message_content=content) for s in (1, 2)]
    sizes, (q, steps) = [2, 3], (3, 4)
    obs = observations(q, steps)
    rng = np.random.default_rng(1)
    present, before = rng.random((N, q, steps)) < 0.7, rng.normal(size=(N, q, D))
    z, after = scan(
        modules,
        by_agent(obs).split(sizes),
        ORDER,
        torch.from_numpy(present),
        torch.from_numpy(before).split(sizes),
    )
    assert [tuple(mine.shape) for mine in z] == [(n, q, steps, D) for n in sizes]
    weights = [parameters(modules[0])] * 2 + [parameters(modules[1])] * 3
    for s in range(q):
        h = list(before[:, s])
        for t in range(steps):
            links = obs[s, t, :, :N] * present[:, s, t]
            wanted, behind = exchanged(weights, obs[s, t, :, N:], links, 2, aggregation, memories=h)
            np.testing.assert_allclose(torch.cat(z)[:, s, t].detach(), wanted, atol=1e-12)
            h = [new if there else old for new, old, there in zip(behind, h, present[:, s, t], strict=True)]
        np.testing.assert_allclose(torch.cat(after)[:, s].detach(), h, atol=1e-12)


def test_steps_one_by_one_are_the_scan():
    module, obs = network(cell="message_gru"), by_agent(observations(3, 5))
    present = torch.rand(N, 3, 5) < 0.7
    (z,), (last,) = scan([module], [obs], ORDER, present, [torch.zeros(N, 3, D, dtype=torch.float64)])
    state = None
    for t in range(5):
        (step,), state = exchange([module], [obs[:, :, t]], ORDER, present[:, :, t], state)
        torch.testing.assert_close(step, z[:, :, t], atol=1e-12, rtol=0)
    torch.testing.assert_close(state[0], last, atol=1e-12, rtol=0)


def test_the_first_memory_is_learned_through_the_scan():
    module = network(cell="message_gru")
    first = torch.zeros(N, 2, D, dtype=torch.float64, requires_grad=True)
    (z,), _ = scan([module], [by_agent(observations(2, 4))], ORDER, None, [first])
    z[:, :, -1].sum().backward()
    assert first.grad.abs().sum() > 0
    used = [p for name, p in module.named_parameters() if not name.startswith(("policy_head", "value_head"))]
    assert all(p.grad is not None for p in used)


# --- who can speak to whom ---


@pytest.mark.parametrize(
    "name, other",
    [
        ("message_rounds", {"message_rounds": 3}),
        ("message_size", {"message_size": 8}),
        ("aggregation", {"aggregation": "attention"}),
        ("message_content", {"message_content": "both"}),
        ("message_gru", {"cell": "message_gru"}),
        ("num_links", {"num_links": N + 1}),
    ],
)
def test_modules_that_cannot_speak_to_each_other(name, other):
    check_alike({"scouts": network(), "relays": network(width=WIDTH + 3)})
    with pytest.raises(ValueError, match=f"{name}.*differs.*scouts.*relays"):
        check_alike({"scouts": network(), "relays": network(**other)})
