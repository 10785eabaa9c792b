"""Messages between agents in plain loops of numpy float64: written without the package, from its formulas alone.

Weights are read by their names in a state dict.
"""

from __future__ import annotations

import numpy as np


def parameters(module):
    return {name: value.detach().double().numpy() for name, value in module.state_dict().items()}


def layer(weights, name, x):
    return weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]


def mlp(weights, name, x):
    """Linear layers at the even places of a chain, relu at the odd ones."""
    places = sorted(int(key.split(".")[-2]) for key in weights if key.startswith(f"{name}.") and key.endswith("weight"))
    for place in places:
        x = np.maximum(layer(weights, f"{name}.{place}", x), 0.0)
    return x


def normed(weights, name, x):
    x = (x - x.mean()) / np.sqrt(((x - x.mean()) ** 2).mean() + 1e-5)
    return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def convolved(weights, name, planes):
    """One layer of stride 1 with zeros around the grid, then relu: [C, H, W] to [C', H, W]."""
    kernels, biases = weights[f"{name}.weight"], weights[f"{name}.bias"]
    outputs, _, size, _ = kernels.shape
    height, width = planes.shape[1:]
    padded = np.pad(planes, ((0, 0), (size // 2,) * 2, (size // 2,) * 2))
    found = np.zeros((outputs, height, width))
    for c in range(outputs):
        for y in range(height):
            for x in range(width):
                found[c, y, x] = biases[c] + (kernels[c] * padded[:, y : y + size, x : x + size]).sum()
    return np.maximum(found, 0.0)


def encoded(weights, rest, shape=None):
    """One agent's observation without links to its features."""
    if shape is None:
        return mlp(weights, "encoder", rest)
    planes = rest.reshape(shape)
    found = planes
    for place in (0, 2):
        found = convolved(weights, f"encoder.convolutions.{place}", found)
    here = (found * planes[0]).sum((1, 2))
    pooled = np.concatenate([found.max((1, 2)), found.mean((1, 2)), here])
    return mlp(weights, "encoder.mlp", pooled)


def message(sender, receiver, r, carried, link):
    total = 0.0
    if f"messages.{r}.say.weight" in sender:
        total = total + layer(sender, f"messages.{r}.say", carried)
    if f"messages.{r}.distance.weight" in receiver:
        total = total + layer(receiver, f"messages.{r}.distance", np.array([link]))
    return total


def aggregated(weights, r, i, carried, links, aggregation):
    """What agent i makes of the messages of round r.

    weights: for each agent those of its module. carried: of each agent. links: of agent i to each.
    """
    heard = [j for j in range(len(carried)) if links[j] > 0]
    if not heard:
        return np.zeros(len(carried[i]))
    messages = [message(weights[j], weights[i], r, carried[j], links[j]) for j in heard]
    if aggregation == "max":
        return np.max(messages, axis=0)
    if aggregation == "mean":
        return sum(messages) / len(messages)
    query = layer(weights[i], f"messages.{r}.query", carried[i])
    scores = [query @ layer(weights[j], f"messages.{r}.key", carried[j]) / np.sqrt(len(query)) for j in heard]
    shares = np.exp(scores) / np.exp(scores).sum()
    return sum(share * m for share, m in zip(shares, messages, strict=True))


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def gru(weights, name, x, h):
    inputs = weights[f"{name}.weight_ih"] @ x + weights[f"{name}.bias_ih"]
    recurrent = weights[f"{name}.weight_hh"] @ h + weights[f"{name}.bias_hh"]
    (ri, zi, ni), (rh, zh, nh) = np.split(inputs, 3), np.split(recurrent, 3)
    z = sigmoid(zi + zh)
    return (1 - z) * np.tanh(ni + sigmoid(ri + rh) * nh) + z * h


def exchanged(weights, rests, links, rounds, aggregation, shape=None, memories=None):
    """One joint step: features of all agents, and their next memories.

    weights: for each agent. rests: of each agent. links [N][N]: by which each hears each, 0 for absent ones.
    """
    agents = range(len(rests))
    z = [encoded(weights[i], rests[i], shape) for i in agents]
    carried = z if memories is None else list(memories)
    for r in range(rounds):
        heard = [aggregated(weights, r, i, carried, links[i], aggregation) for i in agents]
        if memories is None:
            inputs = [np.concatenate([carried[i], heard[i]]) for i in agents]
            carried = [
                normed(weights[i], f"updates.{r}.2", np.maximum(layer(weights[i], f"updates.{r}.0", inputs[i]), 0.0))
                for i in agents
            ]
        else:
            carried = [gru(weights[i], f"updates.{r}", np.concatenate([z[i], heard[i]]), carried[i]) for i in agents]
    if memories is None:
        return carried, None
    return [normed(weights[i], "memory_norm", carried[i]) for i in agents], carried
