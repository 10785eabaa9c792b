"""PPO for a team as one would write it by hand, in the manner of CleanRL: what a framework's seconds are held against.

Everything that JointPPO computes in an iteration and nothing else: no configuration, no checks, no metrics per episode,
no Ray. A loop over networks for the forward passes, clips and optimizers; all the rest is done for all agents at once.

Letters: N agents, T steps, E environments, M = T·E rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from common.drifting_team import (
    ACTIONS,
    BATCH,
    CLIP,
    ENTROPY_COEFF,
    EPOCHS,
    GAMMA,
    GRAD_CLIP,
    LAMBDA,
    LR,
    MINIBATCH,
    OBS,
    VALUE_CLIP,
    VALUE_COEFF,
    DriftingTeam,
)
from thrust_rllib import JointStepResult
from thrust_rllib.functional import RunningMoments


class PlainTeams:
    """Several `DriftingTeam`, stepped one after another, from and to arrays."""

    def __init__(self, num_envs: int, agents: int) -> None:
        self.envs = [DriftingTeam({"agents": agents}) for _ in range(num_envs)]
        self.shape = (agents, num_envs)

    def reset_joint(self, seeds: list[int]) -> np.ndarray:
        shown = [list(env.reset(seed=seed)[0].values()) for env, seed in zip(self.envs, seeds, strict=True)]
        return np.array(shown).swapaxes(0, 1)

    def step_joint(self, actions: np.ndarray) -> JointStepResult:
        observations = np.empty((*self.shape, OBS), np.float32)
        rewards, over, final = np.empty(self.shape, np.float32), np.zeros(self.shape[1], bool), None
        for e, (env, chosen) in enumerate(zip(self.envs, actions.T.tolist(), strict=True)):
            shown, paid, _, truncated, _ = env.step(dict(zip(env.agents, chosen, strict=True)))
            rewards[:, e] = list(paid.values())
            if truncated["__all__"]:
                over[e] = True
                final = np.empty_like(observations) if final is None else final
                final[:, e] = list(shown.values())
                shown, _ = env.reset()
            observations[:, e] = list(shown.values())
        return JointStepResult(rewards, observations, np.zeros_like(over), over, final_observations=final)


class Network(nn.Module):
    """2 × 64 tanh, a policy head and a value head on the same trunk; orthogonal weights."""

    def __init__(self) -> None:
        super().__init__()
        gain = math.sqrt(2)
        self.trunk = nn.Sequential(layer(OBS, 64, gain), nn.Tanh(), layer(64, 64, gain), nn.Tanh())
        self.policy, self.value = layer(64, ACTIONS, 0.01), layer(64, 1, 0.01)


def layer(inputs: int, outputs: int, gain: float) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.zeros_(linear.bias)
    return linear


class HandLoop:
    """One network and one Adam per agent; `iteration` is a rollout and its epochs."""

    def __init__(self, env: Any, agents: int, envs: int, seed: int, clock: Callable[[], float] = time.perf_counter):
        self.env, self.clock = env, clock
        self.generator = torch.Generator().manual_seed(seed)
        self.networks = [Network() for _ in range(agents)]
        # The fused kernel is the fastest of torch's own on small networks.
        self.optimizers = [torch.optim.Adam(network.parameters(), lr=LR, fused=True) for network in self.networks]
        self.parameters = [list(network.parameters()) for network in self.networks]
        self.moments = [RunningMoments(decay=0.95) for _ in range(agents)]
        steps = math.ceil(BATCH / envs)
        self.obs = torch.empty(agents, steps, envs, OBS)
        self.logits = torch.empty(agents, steps, envs, ACTIONS)
        self.actions = torch.empty(agents, steps, envs, dtype=torch.int64)
        self.rewards = np.empty((agents, steps, envs), np.float32)
        self.truncated = np.empty((steps, envs), bool)
        self.observation = env.reset_joint(list(range(seed, seed + envs)))
        self.gradient_steps = self.rows_trained = 0
        self.statistics: dict[str, float] = {}

    @property
    def mean_reward(self) -> float:
        """Per agent and step, over the latest rollout."""
        return float(self.rewards.mean())

    def iteration(self) -> dict[str, float]:
        """Seconds of each phase."""
        start = self.clock()
        following = self.rollout()
        sampled = self.clock()
        self.train(*self.prepare(following))
        end = self.clock()
        return {"sampling": sampled - start, "learner": end - sampled, "iteration": end - start}

    @torch.no_grad()
    def rollout(self) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """Fills the arrays; returns (step, environments, observations [N, k, O]) of what follows cut rows."""
        following = []
        obs = self.obs.numpy()
        # Gumbel noise of all steps: the largest of logit + noise is a draw from the distribution.
        noise = -torch.empty_like(self.logits).exponential_(generator=self.generator).log_()
        for t in range(len(self.truncated)):
            obs[:, t] = self.observation
            seen = self.obs[:, t].unbind()
            logits = torch.stack([net.policy(net.trunk(x)) for net, x in zip(self.networks, seen, strict=True)])
            actions = (logits + noise[:, t]).argmax(-1)
            result = self.env.step_joint(actions.numpy())
            self.logits[:, t], self.actions[:, t] = logits, actions
            self.rewards[:, t], self.truncated[t] = result.rewards, result.truncated
            if result.truncated.any():
                where = np.flatnonzero(result.truncated)
                following.append((t, where, result.final_observations[:, where]))
            self.observation = result.observations
        self.logp = self.logits.log_softmax(-1).gather(-1, self.actions[..., None]).squeeze(-1)
        running = np.flatnonzero(~self.truncated[-1])
        return [*following, (t, running, self.observation[:, running])]

    @torch.no_grad()
    def prepare(self, following: list[tuple[int, np.ndarray, np.ndarray]]) -> tuple[Tensor, ...]:
        """obs, actions, log-probabilities, values, advantages, targets: [N, M, …]."""
        agents, steps, envs = self.rewards.shape
        obs, actions = self.obs.flatten(1, 2), self.actions.flatten(1, 2)
        after = torch.from_numpy(np.concatenate([shown for *_, shown in following], axis=1))
        values = torch.stack(
            [
                net.value(net.trunk(x)).squeeze(-1)
                for net, x in zip(self.networks, torch.cat([obs, after], dim=1), strict=True)
            ]
        )
        raw = values[:, : steps * envs]
        mean, std = self.scale()
        scaled = (values * std + mean).numpy()

        # Generalised advantages; nothing terminates here, a cut row is followed by what `after` holds.
        current = scaled[:, : steps * envs].reshape(agents, steps, envs)
        upcoming = np.concatenate([current[:, 1:], current[:, :1]], axis=1)
        row = np.concatenate([np.full(len(where), t) for t, where, _ in following])
        upcoming[:, row, np.concatenate([where for _, where, _ in following])] = scaled[:, steps * envs :]
        deltas = self.rewards + GAMMA * upcoming - current
        decay = (GAMMA * LAMBDA * ~self.truncated).astype(np.float32)
        advantages = np.empty_like(deltas)
        last = np.zeros((agents, envs), np.float32)
        for t in reversed(range(steps)):
            last = advantages[:, t] = deltas[:, t] + decay[t] * last
        targets = advantages + current

        for moments, own in zip(self.moments, targets, strict=True):
            moments.update(own)
        mean, std = self.scale()
        standardized = torch.from_numpy(advantages).flatten(1)
        standardized = (standardized - standardized.mean(1, keepdim=True)) / (
            standardized.std(1, correction=0, keepdim=True).clamp(min=1e-8)
        )
        normalized = (torch.from_numpy(targets).flatten(1) - mean) / std
        return obs, actions, self.logp.flatten(1), raw, standardized, normalized

    def scale(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation of each agent's value targets, [N, 1]."""
        columns = np.array([(moments.mean, moments.std) for moments in self.moments], np.float32)
        return torch.from_numpy(columns).unsqueeze(-1).unbind(1)

    def train(self, *rows: Tensor) -> None:
        self.gradient_steps = self.rows_trained = 0
        for _ in range(EPOCHS):
            order = torch.randperm(rows[0].shape[1], generator=self.generator)
            # The epoch's order once for the whole batch: minibatches are then views.
            for minibatch in zip(*(x.index_select(1, order).split(MINIBATCH, dim=1) for x in rows), strict=True):
                statistics = self.gradient_step(*minibatch)
                self.gradient_steps += 1
                self.rows_trained += minibatch[0].shape[1]
        # Of the last minibatch, once per iteration.
        self.statistics = {name: x.detach().float().mean().item() for name, x in statistics.items()}

    def gradient_step(
        self, obs: Tensor, actions: Tensor, logp_old: Tensor, values_old: Tensor, advantages: Tensor, targets: Tensor
    ) -> dict[str, Tensor]:
        """One backward for the summed loss, then a clip and a step per network; returns what is reported."""
        features = [network.trunk(x) for network, x in zip(self.networks, obs.unbind(), strict=True)]
        logits = torch.stack([net.policy(x) for net, x in zip(self.networks, features, strict=True)])
        values = torch.stack([net.value(x) for net, x in zip(self.networks, features, strict=True)]).squeeze(-1)

        logps = logits.log_softmax(-1)
        logp = logps.gather(-1, actions[..., None]).squeeze(-1)
        ratio = (logp - logp_old).exp()
        policy_loss = -torch.minimum(advantages * ratio, advantages * ratio.clamp(1 - CLIP, 1 + CLIP))
        clipped = values_old + (values - values_old).clamp(-VALUE_CLIP, VALUE_CLIP)
        value_loss = torch.maximum((values - targets).square(), (clipped - targets).square())
        entropy = -(logps.exp() * logps).sum(-1)
        loss = (policy_loss + VALUE_COEFF * value_loss - ENTROPY_COEFF * entropy).mean(1).sum()

        loss.backward()
        for parameters, optimizer in zip(self.parameters, self.optimizers, strict=True):
            nn.utils.clip_grad_norm_(parameters, GRAD_CLIP)
            optimizer.step()
            optimizer.zero_grad()
        return {
            "policy_loss": policy_loss,
            "vf_loss": value_loss,
            "entropy": entropy,
            "approx_kl": logp_old - logp,
            "clip_fraction": (ratio - 1).abs() > CLIP,
        }
