"""Distances of distributions as loops in float64; never imports the package."""

import math

import numpy as np


def softmax(x):
    shifted = [math.exp(value - max(x)) for value in x]
    return [value / sum(shifted) for value in shifted]


def probabilities(x, sizes):
    """One row's logits to a list of probabilities for each head."""
    heads, start = [], 0
    for size in sizes:
        heads.append(softmax([float(value) for value in x[start : start + size]]))
        start += size
    return heads


def distance(p, q):
    """Total variation, mean over heads."""
    per_head = [sum(abs(a - b) for a, b in zip(*pair, strict=True)) / 2 for pair in zip(p, q, strict=True)]
    return sum(per_head) / len(per_head)


def over_pairs(number, masks, of_row):
    """Mean over pairs of the mean of of_row(i, j, r) over the rows that both have."""
    N, total = len(masks), 0.0
    for i in range(N):
        for j in range(i + 1, N):
            rows = [r for r in range(number) if masks[i][r] and masks[j][r]]
            total += sum(of_row(i, j, r) for r in rows) / len(rows) if rows else 0.0
    return total / (N * (N - 1) / 2)


def present(logits, masks):
    return [np.ones(len(x), bool) for x in logits] if masks is None else masks


def total_variation(logits, masks, sizes):
    masks = present(logits, masks)

    def of_row(i, j, r):
        return distance(probabilities(logits[i][r], sizes), probabilities(logits[j][r], sizes))

    return over_pairs(len(logits[0]), masks, of_row)


def time_averaged(logits, masks, sizes):
    masks, averages = present(logits, masks), []
    for x, mask in zip(logits, masks, strict=True):
        rows = [probabilities(row, sizes) for row, here in zip(x, mask, strict=True) if here]
        averages.append(
            [[sum(row[h][k] for row in rows) / max(len(rows), 1) for k in range(n)] for h, n in enumerate(sizes)]
        )
    return over_pairs(1, [[mask.any()] for mask in masks], lambda i, j, r: distance(averages[i], averages[j]))


def neural_diversity(means, stds, masks):
    masks = present(means, masks)

    def of_row(i, j, r):
        squares = [(float(x[i][r][d]) - float(x[j][r][d])) ** 2 for x in (means, stds) for d in range(len(x[i][r]))]
        return math.sqrt(sum(squares))

    return over_pairs(len(means[0]), masks, of_row)
