"""Run folders by hand, as `thrust-rllib train` writes them."""

import csv
import json

import numpy as np

from thrust_rllib.reporting.correlation_file import CORRELATION_FILE, FeatureCorrelation


def write_progress(
    folder,
    agents=2,
    iterations=30,
    modules=None,
    couplings=("redundancy",),
    first_return=3,
    offset=0.0,
    steps=64,
    gradients=(),
    scale=1.0,
    diversity=None,
    targets=(),
    constraints=None,
    at_most=True,
):
    """A run's folder with progress.csv and config.json; agent k's return in iteration i is scale (10 k + i + offset).

    Gradients are measured in the iterations 1, 11, 21, …, with norm ratios .5, .6, .7, …
    diversity: {group of modules: statistics}, measured as i / 100 in the iterations 1, 6, 11, … and then repeated.
    targets: auxiliary ones, whose accuracy is 1 − 1/i.
    constraints: {name: limit}, of costs 1 / i, which nobody measured in iteration 2, and multipliers i + offset.
    """
    names = [f"agent_{k}" for k in range(agents)] if isinstance(agents, int) else list(agents)
    table = []
    for i in range(1, iterations + 1):
        row = {
            "training_iteration": i,
            "time_total_s": i / 2,
            "env_runners/num_env_steps_sampled_lifetime": float(steps * i),
        }
        if i >= first_return:
            for k, name in reversed(list(enumerate(names))):
                row[f"env_runners/agent_episode_returns_mean/{name}"] = scale * (10 * k + i + offset)
            row["env_runners/episode_return_mean"] = scale * sum(10 * k + i + offset for k in range(len(names)))
        for module in modules or names:
            row[f"learners/{module}/entropy"] = 1 / i
            row[f"learners/{module}/vf_explained_var"] = -50 if i == 1 else 0.5
            row[f"learners/{module}/approx_kl"] = 0.01
            for name in gradients:
                for statistic, value in {"norm": 2.0, "norm_ratio": (5 + (i - 1) // 10) / 10, "cosine": -0.1}.items():
                    row[f"learners/{module}/coupling_gradient/{name}/{statistic}"] = value
            for name in targets:
                row[f"learners/{module}/auxiliary_accuracy/{name}"] = 1 - 1 / i
                row[f"learners/{module}/auxiliary_loss/{name}"] = 7.0
        for kind, statistics in (diversity or {}).items():
            for statistic in statistics:
                row[f"learners/__all_modules__/diversity/{kind}/{statistic}"] = (i - (i - 1) % 5 + offset) / 100
        for name, limit in (constraints or {}).items():
            cost = "nan" if i == 2 else 1 / i
            violation = float(cost) - limit if at_most else limit - float(cost)
            own = {"cost": cost, "limit": limit, "violation": violation, "multiplier": i + offset, "saturated": 0.0}
            row |= {f"learners/__all_modules__/constraints/{name}/{key}": value for key, value in own.items()}
        for name in couplings:
            row[f"learners/__all_modules__/cross_agent_loss/{name}"] = 0.3 + offset
            row["learners/__all_modules__/cross_agent_loss/total"] = 0.03
        table.append(row)
    folder.mkdir(exist_ok=True, parents=True)
    with (folder / "progress.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in table for name in row)), restval="")
        writer.writeheader()
        writer.writerows(table)
    if not (folder / "config.json").exists():
        write_config(folder)
    return folder


def write_config(folder, seed=0, env="climbing", env_config=None, **changed):
    """config.json with these options besides the defaults lr 3e-4 and cross_agent_coeffs {}."""
    folder.mkdir(exist_ok=True, parents=True)
    record = {
        "command": f"thrust-rllib train {env} --seed {seed}",
        "versions": {"thrust_rllib": "0.1.0"},
        "seed": seed,
        "environment": {"name": env, "env_config": env_config or {}},
        "changed": {"seed": seed, "env": env, "env_config": env_config or {}, "env_spec": f"Spec({env})", **changed},
        "options": {"lr": 3e-4, "cross_agent_coeffs": {}, "cross_agent_losses": {}, "seed": seed, **changed},
    }
    (folder / "config.json").write_text(json.dumps(record))
    return folder


def write_correlation(folder, agents=("agent_0", "agent_1"), width=3, seed=0):
    """report/feature_correlation.npz with random numbers; returns the matrix."""
    generator = np.random.default_rng(seed)
    total = width * len(agents)
    matrix = generator.uniform(0, 0.3, (len(agents), len(agents)))
    matrix = (matrix + matrix.T) / 2
    (folder / "report").mkdir(exist_ok=True, parents=True)
    FeatureCorrelation(
        list(agents), [width] * len(agents), matrix, generator.uniform(-1, 1, (total, total)), 8192
    ).save(folder / "report" / CORRELATION_FILE)
    return matrix
