"""Auxiliary losses, their gradients and the accuracy as loops in float64; never imports the package."""

import numpy as np


def error(kind, p, y):
    distance = abs(p - y)
    if kind == "mse":
        return distance**2
    return distance**2 / 2 if distance <= 1 else distance - 0.5


def slope(kind, p, y):
    """Derivative of the error in p."""
    return 2 * (p - y) if kind == "mse" else min(max(p - y, -1.0), 1.0)


def agents_of(sizes):
    """[agents of each module]."""
    starts = np.cumsum([0, *sizes])
    return [range(starts[m], starts[m + 1]) for m in range(len(sizes))]


def losses(predictions, targets, present, kinds, sizes):
    """[K, m] of [K, N, B]."""
    found = np.zeros((len(kinds), len(sizes)))
    for k, kind in enumerate(kinds):
        for m, agents in enumerate(agents_of(sizes)):
            rows = [(i, b) for i in agents for b in range(present.shape[1]) if present[i, b]]
            errors = [error(kind, float(predictions[k, i, b]), float(targets[k, i, b])) for i, b in rows]
            found[k, m] = sum(errors) / len(errors) if errors else 0.0
    return found


def accuracy(predictions, targets, present, sizes):
    """[K, m]."""
    found = np.zeros((len(predictions), len(sizes)))
    for k in range(len(predictions)):
        for m, agents in enumerate(agents_of(sizes)):
            rows = [(i, b) for i in agents for b in range(present.shape[1]) if present[i, b]]
            rows = [(i, b) for i, b in rows if abs(targets[k, i, b]) > 1e-3]
            relative = [abs(predictions[k, i, b] - targets[k, i, b]) / abs(targets[k, i, b]) for i, b in rows]
            found[k, m] = min(max(1 - np.median(relative), 0.0), 1.0) if rows else 0.0
    return found


def gradients(heads, features, targets, present, kinds, weights, sizes):
    """Of Σ_m Σ_k weight_k loss_km, by the chain rule.

    Args:
        heads: [(weight [K, D_m], bias [K])] of each module.
        features: [[B, D_m]] of each agent.
        targets: [K, N, B].
        present: [N, B].
        kinds: of each target.
        weights: of each target.
        sizes: agents of each module.

    Returns:
        [(d weight, d bias)] of each module, and [d features] of each agent.
    """
    of_heads = [(np.zeros_like(w), np.zeros_like(b)) for w, b in heads]
    of_features = [np.zeros_like(x) for x in features]
    for m, agents in enumerate(agents_of(sizes)):
        weight, bias = heads[m]
        count = sum(int(present[i].sum()) for i in agents)
        for i in agents:
            for b in range(present.shape[1]):
                if not present[i, b]:
                    continue
                for k, kind in enumerate(kinds):
                    prediction = float(weight[k] @ features[i][b] + bias[k])
                    g = weights[k] * slope(kind, prediction, float(targets[k, i, b])) / count
                    of_heads[m][0][k] += g * features[i][b]
                    of_heads[m][1][k] += g
                    of_features[i][b] += g * weight[k]
    return of_heads, of_features
