"""Slow, obvious float64 twins of the package's mathematics. Never imports the package.

Plain numpy and Python loops, one function per function of `thrust_rllib.functional`, and `ReferenceTrainer`,
a whole joint PPO update: networks, losses, coupling, clipping and Adam from scratch, with torch.float64 for
derivatives only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

# ------------------------------------------------------------------------------------------------ advantages


def generalized_advantages(rewards, values, terminated, truncated, bootstrap_values, gamma, lambda_, present=None):
    """GAE stream by stream; arrays [T, ...], gamma and lambda_ numbers or broadcastable to rewards[0]."""
    rewards, values, bootstrap_values = (np.asarray(x, dtype=np.float64) for x in (rewards, values, bootstrap_values))
    present = np.ones(rewards.shape, bool) if present is None else np.asarray(present)
    gamma = np.broadcast_to(np.asarray(gamma, dtype=np.float64), rewards.shape[1:])
    lambda_ = np.broadcast_to(np.asarray(lambda_, dtype=np.float64), rewards.shape[1:])
    advantages, targets = np.zeros(rewards.shape), np.zeros(rewards.shape)
    for stream in np.ndindex(*rewards.shape[1:]):
        following = None  # the row that comes next in this stream
        for t in reversed(range(rewards.shape[0])):
            at = (t, *stream)
            if not present[at]:
                continue
            if terminated[at]:
                next_value, next_advantage = 0.0, 0.0
            elif truncated[at] or following is None:
                next_value, next_advantage = bootstrap_values[at], 0.0
            else:
                next_value, next_advantage = values[following], advantages[following]
            delta = rewards[at] + gamma[stream] * next_value - values[at]
            advantages[at] = delta + gamma[stream] * lambda_[stream] * next_advantage
            targets[at] = advantages[at] + values[at]
            following = at
    return advantages, targets


# ------------------------------------------------------------------------------------------------ PPO losses


def _elementwise(function, *arrays):
    arrays = np.broadcast_arrays(*(np.asarray(x, dtype=np.float64) for x in arrays))
    out = np.zeros(arrays[0].shape)
    for at in np.ndindex(*out.shape):
        out[at] = function(*(float(x[at]) for x in arrays))
    return out


def clipped_surrogate(logp, logp_old, advantages, clip_param):
    def one(new, old, a, eps):
        r = math.exp(new - old)
        return min(a * r, a * min(max(r, 1 - eps), 1 + eps))

    return _elementwise(one, logp, logp_old, advantages, clip_param)


def clip_indicator(logp, logp_old, clip_param):
    return _elementwise(lambda n, o, eps: float(abs(math.exp(n - o) - 1) > eps), logp, logp_old, clip_param)


def approximate_kl(logp, logp_old):
    return _elementwise(lambda new, old: old - new, logp, logp_old)


def value_loss_change_clipped(values, values_old, targets, clip_range):
    def one(v, v_old, target, c):
        if math.isinf(c):
            return (v - target) ** 2
        v_clipped = v_old + min(max(v - v_old, -c), c)
        return max((v - target) ** 2, (v_clipped - target) ** 2)

    return _elementwise(one, values, values_old, targets, clip_range)


# ------------------------------------------------------------------------------------- masked statistics


def masked_moments(x, mask=None):
    """(mean, population std, count) of all present elements, element by element."""
    x = np.asarray(x, dtype=np.float64)
    mask = np.ones(x.shape, bool) if mask is None else np.broadcast_to(mask, x.shape)
    kept = [float(x[at]) for at in np.ndindex(*x.shape) if mask[at]]
    if not kept:
        return 0.0, 0.0, 0
    mean = math.fsum(kept) / len(kept)
    return mean, math.sqrt(math.fsum((y - mean) ** 2 for y in kept) / len(kept)), len(kept)


def over(function, dim, *arrays):
    """Applies a reference that reduces everything to each slice that `dim` (int or tuple) reduces.

    The arrays must have one shape; returns an array of the remaining dimensions.
    """
    first = np.asarray(arrays[0])
    dims = (dim,) if isinstance(dim, int) else dim
    dims = tuple(d % first.ndim for d in dims)
    kept = [d for d in range(first.ndim) if d not in dims]
    out = []
    for at in np.ndindex(*(first.shape[d] for d in kept)):
        index = [slice(None)] * first.ndim
        for d, k in zip(kept, at, strict=True):
            index[d] = k
        out.append(function(*(np.asarray(x)[tuple(index)] for x in arrays)))
    return np.asarray(out).reshape([first.shape[d] for d in kept])


def standardize(x, mask=None, floor="max", eps=1e-8):
    x = np.asarray(x, dtype=np.float64)
    mask = np.ones(x.shape, bool) if mask is None else np.broadcast_to(mask, x.shape)
    mean, std, _ = masked_moments(x, mask)
    out = np.zeros(x.shape)
    for at in np.ndindex(*x.shape):
        if mask[at]:
            out[at] = (x[at] - mean) / (max(std, eps) if floor == "max" else std + eps)
    return out


def explained_variance(values, targets, mask=None):
    values, targets = np.asarray(values, dtype=np.float64), np.asarray(targets, dtype=np.float64)
    _, std_target, _ = masked_moments(targets, mask)
    if std_target == 0:
        return 1.0
    _, std_residual, _ = masked_moments(targets - values, mask)
    return 1 - std_residual**2 / std_target**2


# ------------------------------------------------------------------------------------------------ clipping


def global_norm(grads: Iterable[np.ndarray | None]) -> float:
    return math.sqrt(sum(float(x) ** 2 for g in grads if g is not None for x in np.asarray(g).ravel()))


def clip_factor(norm: float, max_norm: float) -> float:
    return max_norm / (norm + 1e-6) if math.isfinite(norm) and norm > max_norm and max_norm > 0 else 1.0


def clip_by_global_norm(grads, max_norm):
    """(new gradients, norm before)."""
    norm = global_norm(grads)
    factor = clip_factor(norm, max_norm)
    return [None if g is None else np.asarray(g, dtype=np.float64) * factor for g in grads], norm


def clip_by_norm(grads, max_norm):
    return [None if g is None else clip_by_global_norm([g], max_norm)[0][0] for g in grads]


def clip_by_value(grads, max_value):
    if max_value <= 0:
        return list(grads)
    return [None if g is None else _elementwise(lambda x: min(max(x, -max_value), max_value), g) for g in grads]


# ------------------------------------------------------------------------------------------------ redundancy


def cross_correlation(a, b, mask=None, eps=1e-6):
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    rows = [t for t in range(a.shape[0]) if mask is None or mask[t]]
    out = np.zeros((a.shape[1], b.shape[1]))
    if len(rows) < 2:
        return out
    for p in range(a.shape[1]):
        for q in range(b.shape[1]):
            x, y = standardize(a[rows, p], eps=eps), standardize(b[rows, q], eps=eps)
            out[p, q] = sum(float(x[t] * y[t]) for t in range(len(rows))) / len(rows)
    return out


def redundancy_penalty(features, masks=None, normalization="dimensions"):
    total, pairs = 0.0, 0
    for i in range(len(features)):
        for j in range(i + 1, len(features)):
            mask = None if masks is None else np.asarray(masks[i]) & np.asarray(masks[j])
            corr = cross_correlation(features[i], features[j], mask)
            total += sum(float(c) ** 2 for c in corr.ravel()) / (corr.shape[0] * corr.shape[1])
            pairs += 1
    return total / pairs if normalization == "pairs" else total


# ------------------------------------------------------------------------------------------ other couplings


def linear_cka(features, masks=None):
    """By the centred kernel matrices of the rows instead of the products of columns."""

    def kernel(z):
        z = np.asarray(z, dtype=np.float64)
        centring = np.eye(len(z)) - 1.0 / len(z)
        return centring @ z @ z.T @ centring

    pairs = []
    for i, j in itertools.combinations(range(len(features)), 2):
        rows = [b for b in range(len(features[i])) if masks is None or (masks[i][b] and masks[j][b])]
        if len(rows) < 2:
            pairs.append(0.0)
            continue
        k, l = (kernel(np.asarray(features[a])[rows]) for a in (i, j))  # noqa: E741
        pairs.append(float(np.trace(k @ l) / math.sqrt(np.trace(k @ k) * np.trace(l @ l))))
    return sum(pairs) / len(pairs)


def jensen_shannon(logits, masks=None, head_sizes=None):
    def probabilities(x):
        e = [math.exp(v - max(x)) for v in x]
        return [v / sum(e) for v in e]

    def kl(p, q):
        return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)

    sizes = [len(logits[0][0])] if head_sizes is None else head_sizes
    pairs = []
    for i, j in itertools.combinations(range(len(logits)), 2):
        rows = []
        for b in range(len(logits[i])):
            if masks is None or (masks[i][b] and masks[j][b]):
                total, start = 0.0, 0
                for size in sizes:
                    p, q = (probabilities([float(v) for v in logits[a][b][start : start + size]]) for a in (i, j))
                    m = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
                    total += kl(p, m) / 2 + kl(q, m) / 2
                    start += size
                rows.append(total / len(sizes))
        pairs.append(sum(rows) / len(rows) if rows else 0.0)
    return sum(pairs) / len(pairs)


# --------------------------------------------------------------------------------------- running moments


class RunningMoments:
    """Keeps every row with its weight; `decay` multiplies all weights before each non-empty update."""

    def __init__(self, shape=(), decay=1.0):
        self.shape, self.decay = tuple(shape), decay
        self.batches: list[np.ndarray] = []
        self.weights: list[float] = []

    def update(self, x, mask=None):
        x = np.asarray(x, dtype=np.float64)
        rows = x.reshape(-1, *self.shape) if x.size else np.zeros((0, *self.shape))
        if mask is not None:
            rows = rows[np.asarray(mask).reshape(-1)]
        if len(rows):
            self.weights = [w * self.decay for w in self.weights] + [1.0]
            self.batches.append(rows)

    @property
    def count(self):
        return sum(w * len(b) for w, b in zip(self.weights, self.batches, strict=True))

    @property
    def mean(self):
        """Exact only for decay = 1: see `merged`."""
        return np.concatenate(self.batches).mean(0)

    @property
    def var(self):
        return np.concatenate(self.batches).var(0)

    def merged(self):
        """(count, mean, var) by the definition of the decayed merge, one batch after the other.

        The past enters with its own mean and variance and a count that has decayed.
        """
        count, mean, second = 0.0, np.zeros(self.shape), np.zeros(self.shape)  # second: E[x^2]
        for batch in self.batches:
            old, count = count * self.decay, count * self.decay + len(batch)
            mean = (old * mean + batch.sum(0)) / count
            second = (old * second + np.square(batch).sum(0)) / count
        return count, mean, second - np.square(mean)


# ------------------------------------------------------------------------------ a whole joint PPO update


@dataclass
class ReferenceModule:
    """One network: two tanh layers, a policy head and a value head that both read the last trunk activation.

    Attributes:
        parameters: float64 arrays by name, weights [out, in] as in torch.nn.Linear:
            "trunk_0.weight" [H, obs], "trunk_0.bias" [H], "trunk_1.weight" [D, H], "trunk_1.bias" [D],
            "policy.weight" [A, D], "policy.bias" [A], "value.weight" [1, D], "value.bias" [1].
        action: "discrete" (A logits, actions [M] or [M, 1]), "multi_discrete" (sum(nvec) logits, actions
            [M, K]), "gaussian" (A = 2K numbers: K means, then K log stds; actions [M, K]) or "gaussian_free"
            (A = K means; the parameter "log_std" [K] is the same for all rows).
        nvec: number of choices of each dimension, for "multi_discrete".
    """

    parameters: dict[str, np.ndarray]
    action: str = "discrete"
    nvec: tuple[int, ...] = ()


@dataclass
class ReferenceRollout:
    """One agent's own stream of M joint rows; row m is the same step of the same environment for every agent.

    Attributes:
        obs: [M, obs].
        actions: [M] or [M, K].
        logp_old: [M] log-probability at sampling time, summed over action dimensions.
        advantages: [M], standardised by the caller if wanted.
        value_targets: [M].
        values_old: [M] values at sampling time.
        present: [M] bool; False rows count in no mean and in no pair of the coupling. None means all True.
        action_mask: [M, A] bool, the logits that may be chosen; the others have probability 0. None means all.
    """

    obs: np.ndarray
    actions: np.ndarray
    logp_old: np.ndarray
    advantages: np.ndarray
    value_targets: np.ndarray
    values_old: np.ndarray
    present: np.ndarray | None = None
    action_mask: np.ndarray | None = None


@dataclass
class ReferenceSettings:
    """Hyperparameters, with the seed's defaults.

    `value_clip_range` bounds the value's change, `vf_clip_param` the squared error after that.
    `critic_lr` None: one gradient set and one Adam per module. Otherwise two sets from one graph before any
    step: actor = sum of (policy - entropy) + coupling, critic = sum of value terms; each clipped on its own,
    each with its own Adam, actor step first.
    `frozen`: ids of modules that do not move; their losses count, their features enter the coupling detached.
    `standardize`: None, or which present rows of a minibatch share the mean and std of the advantages,
    (A - mean) / (std + 1e-8): "minibatch" one agent's, "team" all agents'.
    """

    lr: float = 3e-4
    critic_lr: float | None = None
    clip_param: float = 0.2
    value_clip_range: float = 0.2
    vf_clip_param: float = math.inf
    vf_loss_coeff: float = 0.5
    entropy_coeff: float = 0.01
    grad_clip: float = 0.5
    redundancy_coeff: float = 0.0
    redundancy_normalization: str = "dimensions"
    frozen: frozenset[str] = frozenset()
    betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = 1e-8
    standardize: str | None = None


@dataclass
class ReferenceAdam:
    """Adam (Kingma and Ba 2015, algorithm 1) on a dict of float64 arrays; state by parameter name."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    steps: int = 0
    m: dict[str, np.ndarray] = field(default_factory=dict)
    v: dict[str, np.ndarray] = field(default_factory=dict)

    def step(self, parameters: dict[str, np.ndarray], grads: Mapping[str, np.ndarray]) -> None:
        self.steps += 1
        b1, b2 = self.betas
        for name, g in grads.items():
            self.m[name] = b1 * self.m.get(name, 0.0) + (1 - b1) * g
            self.v[name] = b2 * self.v.get(name, 0.0) + (1 - b2) * g * g
            m_hat = self.m[name] / (1 - b1**self.steps)
            v_hat = self.v[name] / (1 - b2**self.steps)
            parameters[name] = parameters[name] - self.lr * m_hat / (np.sqrt(v_hat) + self.eps)


Coupling = Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], torch.Tensor]


class ReferenceTrainer:
    """Joint PPO from scratch; keeps parameters and Adam states between updates.

    Args:
        modules: {module_id: ReferenceModule}; copied; the current parameters are `self.parameters`.
        settings: ReferenceSettings.
        agents: {agent_id: module_id} in the agents' order; None means one module per agent, same ids.
        per_module: {module_id: ReferenceSettings} for modules with rates, coefficients or limits of their own;
            what concerns the team (coupling, frozen, standardize, whether there is a critic_lr) is read from
            `settings`.
        coupling: the coupling before its coefficient, a scalar of {agent: [B, …]} features, masked policy outputs and
            presence [B]; None means the redundancy penalty.

    `stopped` holds the modules that take no step for now; the caller fills and empties it.

    A module's losses are one mean over the present rows of all its agents (0 where there are none: it then
    takes no step); the joint loss is their sum over modules plus `redundancy_coeff` times
    the coupling over agents.
    """

    def __init__(
        self,
        modules: Mapping[str, ReferenceModule],
        settings: ReferenceSettings,
        agents: Mapping[str, str] | None = None,
        per_module: Mapping[str, ReferenceSettings] | None = None,
        coupling: Coupling | None = None,
    ) -> None:
        self.modules, self.settings = dict(modules), settings
        self.coupling = coupling or self.redundancy
        self.per_module = {m: (per_module or {}).get(m, settings) for m in modules}
        self.agents = dict(agents) if agents is not None else {m: m for m in modules}
        self.stopped: set[str] = set()
        self.parameters = {
            module_id: {name: np.array(p, dtype=np.float64) for name, p in module.parameters.items()}
            for module_id, module in modules.items()
        }
        self.optimizers = {m: ReferenceAdam(s.lr, s.betas, s.adam_eps) for m, s in self.per_module.items()}
        self.critic_optimizers = {
            m: ReferenceAdam(s.critic_lr, s.betas, s.adam_eps)
            for m, s in self.per_module.items()
            if s.critic_lr is not None
        }

    def update(
        self, rollouts: Mapping[str, ReferenceRollout], minibatches: Iterable[Sequence[int]]
    ) -> list[dict[str, object]]:
        """One gradient step per minibatch; see `step`."""
        return [self.step(rollouts, np.asarray(rows)) for rows in minibatches]

    def step(self, rollouts: Mapping[str, ReferenceRollout], rows: np.ndarray) -> dict[str, object]:
        """Losses on the joint rows, one backward (two with `critic_lr`), clip, Adam.

        Args:
            rollouts: {agent_id: ReferenceRollout}.
            rows: [B] indices of joint rows, the same for every agent.

        Returns:
            "total_loss" (with critic_lr without the value terms), "aux_loss" (weighted), and by module id
            "policy_loss", "value_loss", "entropy", "clip_fraction", "kl", "grad_norm", "critic_grad_norm"
            (before clipping; 0 for frozen modules), "grads", "critic_grads" ({name: array}, before clipping), "rows"
            (the present rows of all its agents).
        """
        s = self.settings
        rows = np.asarray(rows)
        leaves = {
            m: {name: torch.tensor(p, dtype=torch.float64, requires_grad=True) for name, p in params.items()}
            for m, params in self.parameters.items()
        }
        features: dict[str, torch.Tensor] = {}
        policies: dict[str, torch.Tensor] = {}
        present: dict[str, torch.Tensor] = {}
        terms: dict[str, dict[str, list[torch.Tensor]]] = {m: {} for m in self.modules}
        standardized = self._advantages(rollouts, rows)
        for agent_id, module_id in self.agents.items():
            r, s = rollouts[agent_id], self.per_module[module_id]
            mask = np.ones(len(r.obs), bool) if r.present is None else np.asarray(r.present)
            present[agent_id] = torch.tensor(mask[rows])
            features[agent_id], outputs, values = self._run(leaves[module_id], r, rows, mask[rows])
            kept = rows[mask[rows]]
            if r.action_mask is not None:
                allowed = torch.tensor(np.asarray(r.action_mask)[rows])
                outputs = torch.where(allowed, outputs, torch.full_like(outputs, -1e30))
            policies[agent_id] = outputs
            logp, entropy = self._distribution(module_id, outputs[present[agent_id]], np.asarray(r.actions)[kept])
            logp_old, targets, values_old = (
                torch.tensor(np.asarray(x, dtype=np.float64)[kept]) for x in (r.logp_old, r.value_targets, r.values_old)
            )
            advantages = torch.tensor(standardized[agent_id])
            values = values[present[agent_id]]
            ratio = torch.exp(logp - logp_old)
            bounded = torch.clamp(ratio, 1 - s.clip_param, 1 + s.clip_param)
            square = (values - targets) ** 2
            if math.isfinite(s.value_clip_range):
                change = torch.clamp(values - values_old, -s.value_clip_range, s.value_clip_range)
                square = torch.maximum(square, (values_old + change - targets) ** 2)
            for name, term in {
                "policy_loss": -torch.minimum(advantages * ratio, advantages * bounded),
                "value_loss": torch.clamp(square, max=s.vf_clip_param),
                "entropy": entropy,
                "clip_fraction": ((ratio - 1).abs() > s.clip_param).double(),
                "kl": logp_old - logp,
            }.items():
                terms[module_id].setdefault(name, []).append(term)
        means = {m: {name: self._mean(torch.cat(parts)) for name, parts in named.items()} for m, named in terms.items()}
        s = self.settings
        aux = s.redundancy_coeff * self.coupling(features, policies, present) if s.redundancy_coeff else None
        own = self.per_module
        actor = sum(x["policy_loss"] - own[m].entropy_coeff * x["entropy"] for m, x in means.items())
        actor = actor if aux is None else actor + aux
        critic = sum(own[m].vf_loss_coeff * x["value_loss"] for m, x in means.items())
        split = s.critic_lr is not None
        total = actor if split else actor + critic

        grads = self._gradients(total, leaves)
        critic_grads = self._gradients(critic, leaves) if split else None
        rows_of = {m: sum(len(part) for part in named["entropy"]) for m, named in terms.items()}
        result: dict[str, object] = {
            "total_loss": float(total.detach()),
            "aux_loss": 0.0 if aux is None else float(aux.detach()),
            "grads": grads,
            "critic_grads": critic_grads,
            "rows": rows_of,
            "grad_norm": self._clip_and_step(grads, self.optimizers, rows_of),
        }
        if critic_grads is not None:
            result["critic_grad_norm"] = self._clip_and_step(critic_grads, self.critic_optimizers, rows_of)
        for name in ("policy_loss", "value_loss", "entropy", "clip_fraction", "kl"):
            result[name] = {m: float(x[name].detach()) for m, x in means.items()}
        return result

    def _clip_and_step(
        self,
        grads: dict[str, dict[str, np.ndarray]],
        optimizers: dict[str, ReferenceAdam],
        rows_of: Mapping[str, int],
    ) -> dict[str, float]:
        norms = dict.fromkeys(self.modules, 0.0)
        for module_id, named in grads.items():
            if module_id not in self.settings.frozen | self.stopped and rows_of[module_id]:
                limit = self.per_module[module_id].grad_clip
                clipped, norms[module_id] = clip_by_global_norm(list(named.values()), limit)
                optimizers[module_id].step(self.parameters[module_id], dict(zip(named, clipped, strict=True)))
        return norms

    def _advantages(self, rollouts: Mapping[str, ReferenceRollout], rows: np.ndarray) -> dict[str, np.ndarray]:
        """Advantages of each agent's present rows of the minibatch, standardised if the settings say so."""
        kept = {}
        for agent_id in self.agents:
            r = rollouts[agent_id]
            mine = rows if r.present is None else rows[np.asarray(r.present)[rows]]
            kept[agent_id] = np.asarray(r.advantages, dtype=np.float64)[mine]
        if self.settings.standardize == "minibatch":
            return {agent_id: standardize(a, floor="add") for agent_id, a in kept.items()}
        if self.settings.standardize == "team":
            together = standardize(np.concatenate(list(kept.values())), floor="add")
            ends = np.cumsum([len(a) for a in kept.values()])[:-1]
            return dict(zip(kept, np.split(together, ends), strict=True))
        return kept

    def _run(self, p: Mapping[str, torch.Tensor], rollout: ReferenceRollout, rows: np.ndarray, present: np.ndarray):
        """`_forward` on rows [B] of an agent's rollout; present [B]."""
        # What stands at absent rows must not matter: zeros keep it finite.
        obs = np.where(present[:, None], np.asarray(rollout.obs, dtype=np.float64)[rows], 0.0)
        return self._forward(p, torch.tensor(obs))

    @staticmethod
    def _forward(p: Mapping[str, torch.Tensor], obs: torch.Tensor):
        """(features [B, D], policy outputs [B, A], values [B])."""
        hidden = torch.tanh(obs @ p["trunk_0.weight"].T + p["trunk_0.bias"])
        features = torch.tanh(hidden @ p["trunk_1.weight"].T + p["trunk_1.bias"])
        outputs = features @ p["policy.weight"].T + p["policy.bias"]
        if "log_std" in p:
            outputs = torch.cat([outputs, p["log_std"].expand_as(outputs)], dim=1)
        return features, outputs, (features @ p["value.weight"].T + p["value.bias"])[:, 0]

    def _distribution(self, module_id: str, outputs: torch.Tensor, actions: np.ndarray):
        """(log-probability [B], entropy [B]), both summed over action dimensions."""
        module = self.modules[module_id]
        B = outputs.shape[0]
        if module.action in ("gaussian", "gaussian_free"):
            mean, log_std = outputs.chunk(2, dim=1)
            x = torch.tensor(np.asarray(actions, dtype=np.float64)).reshape(mean.shape)
            constant = 0.5 * math.log(2 * math.pi)
            logp = -0.5 * ((x - mean) / torch.exp(log_std)) ** 2 - log_std - constant
            return logp.sum(1), (log_std + constant + 0.5).sum(1)
        nvec = module.nvec if module.action == "multi_discrete" else (outputs.shape[1],)
        actions = np.asarray(actions, dtype=np.int64).reshape(B, len(nvec))
        logp, entropy, start = outputs.new_zeros(B), outputs.new_zeros(B), 0
        for k, n in enumerate(nvec):
            logits = outputs[:, start : start + n]
            start += n
            logits = logits - logits.max(1, keepdim=True).values.detach()
            log_p = logits - torch.log(torch.exp(logits).sum(1, keepdim=True))
            logp = logp + log_p[torch.arange(B), torch.tensor(actions[:, k])]
            entropy = entropy - (torch.exp(log_p) * log_p).sum(1)
        return logp, entropy

    def redundancy(
        self,
        features: Mapping[str, torch.Tensor],
        policies: Mapping[str, torch.Tensor],
        present: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """The redundancy penalty, of frozen modules' features detached."""
        total, pairs = torch.zeros((), dtype=torch.float64), 0
        for i, j in itertools.combinations(self.agents, 2):
            pairs += 1
            both = present[i] & present[j]
            if int(both.sum()) < 2:
                continue
            z = []
            for agent_id in (i, j):
                x = features[agent_id][both]
                x = x.detach() if self.agents[agent_id] in self.settings.frozen else x
                x = x - x.mean(0)
                z.append(x / torch.clamp(torch.sqrt((x**2).mean(0) + 1e-300), min=1e-6))
            corr = z[0].T @ z[1] / int(both.sum())
            total = total + (corr**2).sum() / corr.numel()
        return total / pairs if self.settings.redundancy_normalization == "pairs" else total

    @staticmethod
    def _mean(x: torch.Tensor) -> torch.Tensor:
        return x.sum() / max(len(x), 1)

    @staticmethod
    def _gradients(loss: torch.Tensor, leaves: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, np.ndarray]]:
        flat = [x for named in leaves.values() for x in named.values()]
        if not loss.requires_grad:  # nobody acts in any row
            return {m: {name: np.zeros(x.shape) for name, x in named.items()} for m, named in leaves.items()}
        found = iter(torch.autograd.grad(loss, flat, retain_graph=True, allow_unused=True))
        return {m: {name: _array(next(found), x) for name, x in named.items()} for m, named in leaves.items()}


def _array(grad: torch.Tensor | None, like: torch.Tensor) -> np.ndarray:
    return np.zeros(like.shape) if grad is None else grad.numpy()


def reference_joint_update(
    modules: Mapping[str, ReferenceModule],
    settings: ReferenceSettings,
    updates: Iterable[tuple[Mapping[str, ReferenceRollout], Iterable[Sequence[int]]]],
    agents: Mapping[str, str] | None = None,
) -> tuple[dict[str, dict[str, np.ndarray]], list[list[dict[str, object]]]]:
    """Runs joint PPO updates one after the other.

    Args:
        modules: start networks by module id.
        settings: hyperparameters.
        updates: for each update the rollouts by agent id and the index arrays of its minibatches, all epochs
            in order. If a rollout needs the parameters of an earlier update, call `ReferenceTrainer.update`.
        agents: {agent_id: module_id}; None means one module per agent.

    Returns:
        (parameters by module id and name, statistics per update and gradient step).
    """
    trainer = ReferenceTrainer(modules, settings, agents)
    return trainer.parameters, [trainer.update(rollouts, minibatches) for rollouts, minibatches in updates]
