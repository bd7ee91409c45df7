"""Tune every method, run the best of each with three seeds, and tabulate.

python run.py [--out runs] [--processes 2]

Each method gets six trials: three learning rates of the clients, times two settings of its own or
two further learning rates. Trials are scored on a validation set (a tenth of the training
examples) with a seed of their own; the table is of the test set, with three other seeds. Runs that
are in tuning.csv and results.csv already are not run again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

HERE = Path(__file__).parent
SEEDS = (1, 2, 3)
TUNING_SEED = 0
RATES = (0.03, 0.1, 0.3)
MORE_RATES = (0.01, 0.02, 0.03, 0.1, 0.3, 0.5)  # of methods without a setting to tune
SETTINGS: dict[str, Mapping[str, tuple[Any, ...]]] = {
    "fedavg": {},
    "fedavgm": {"method.beta": (0.5, 0.9)},
    "fedadagrad": {"method.server_lr": (0.01, 0.1)},
    "fedadam": {"method.server_lr": (0.003, 0.03)},
    "fedyogi": {"method.server_lr": (0.003, 0.03)},
    "fednova": {},
    "mime_lite": {"method.beta": (0.5, 0.9)},
    "qfedavg": {"method.q": (0.1, 1.0)},
    "afl": {"method.mixture_lr": (0.01, 0.1)},
    "fedprox": {"method.mu": (0.01, 0.1)},
    "scaffold": {},
    "feddyn": {"method.alpha": (0.01, 0.1)},
    "moon": {"method.mu": (0.1, 1.0)},
    "fedsam": {"method.rho": (0.01, 0.05)},
    "fedbabu": {"method.fine_tune": ("head", "all")},
    "feddisco": {"method.a": (0.1, 0.5)},
    "fedbuff": {"method.staleness": (0.0, 0.5)},
    "fedavg_ft": {"method.fine_tune": ("head", "all")},
    "perfedavg": {"method.alpha": (0.01, 0.03)},
    "ditto": {"method.lam": (0.1, 1.0)},
    "apfl": {"method.alpha": (0.25, 0.5)},
    "pfedme": {"method.lam": (1.0, 5.0)},
    "fedper": {},
    "fedrep": {"method.head_epochs": (2, 10)},
    "lg_fedavg": {},
    "ifca": {"method.clusters": (2, 4)},
    "fedgen": {"train.optimizer.momentum": (0.0, 0.5)},
    "fedftg": {"method.iterations": (1, 3)},
    "local": {},
    "centralised": {},
}
ATTACKS = ("sign_flip", "gaussian", "alie")
RULES = ("mean", "median", "trimmed_mean", "multi_krum", "geometric_median")


def trials(name: str) -> list[dict[str, Any]]:
    """The changes of each trial of a method."""
    own = SETTINGS[name]
    rates = RATES if own else MORE_RATES
    axes = [("train.optimizer.lr", rates), *own.items()]
    return [dict(zip([k for k, _ in axes], v, strict=True)) for v in product(*dict(axes).values())]


def carry_out(name: str, changes: Mapping[str, Any], seed: int, out: Path) -> dict[str, Any]:
    """Run a method with these changes; its figures."""
    import torch

    import fedsim

    torch.set_num_threads(1)
    method = {k.partition(".")[2]: v for k, v in changes.items() if k.startswith("method.")}
    others = {k: v for k, v in changes.items() if not k.startswith("method.")}
    given = {"method": {"name": name, **method}, "seed": seed, **others}
    experiment = fedsim.Experiment.load(HERE / "landscape.yaml", given)
    row = {"method": name, "changes": json.dumps(dict(changes)), "seed": seed}
    try:
        run = fedsim.run(experiment, out, progress=False)
    except fedsim.errors.Diverged as error:
        return {**row, "error": str(error)}
    last = run.rounds.iloc[-1]
    clients = run.clients[run.clients["round"] == run.last_round]
    tested = clients.get("test_accuracy", pd.Series(dtype=float)).dropna()
    return {
        **row,
        "accuracy": last["accuracy"],
        "validation": last.get("validation_accuracy"),
        "personal": last.get("client_accuracy"),
        "worst decile": tested.quantile(0.1) if len(tested) else None,
        "MB": (last["total_bytes_up"] + last["total_bytes_down"]) / 1e6,
        "minutes simulated": last["total_simulated_seconds"] / 60,
        "seconds": run.manifest["wall_seconds"],
        "hash": run.result_hash,
    }


def complete(
    file: Path, jobs: Iterable[tuple[str, Mapping[str, Any], int]], out: Path, processes: int
) -> pd.DataFrame:
    """Carry out the jobs that the file has no row of, and add their rows."""
    done = pd.read_csv(file) if file.exists() else pd.DataFrame()
    known = set() if done.empty else set(zip(done.method, done.changes, done.seed, strict=True))
    left = [job for job in jobs if (job[0], json.dumps(dict(job[1])), job[2]) not in known]
    with ProcessPoolExecutor(processes) as pool:
        for row in pool.map(partial(_of, out), left):
            done = pd.concat([done, pd.DataFrame([row])], ignore_index=True)
            done.to_csv(file, index=False)
            print(row, flush=True)
    return done


def _of(out: Path, job: tuple[str, Mapping[str, Any], int]) -> dict[str, Any]:
    return carry_out(*job, out)


def best(tuning: pd.DataFrame, name: str) -> dict[str, Any]:
    """The changes of a method's best trial: personal methods by their clients' tests."""
    rows = tuning[tuning.method == name]
    scores = rows["validation"]
    found: dict[str, Any] = json.loads(rows.loc[scores.idxmax(), "changes"])
    found.pop("evaluate.validation")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs"), help="where runs lie")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    held_out = {"evaluate.validation": 0.1}
    jobs = [(n, {**c, **held_out}, TUNING_SEED) for n in SETTINGS for c in trials(n)]
    tuning = complete(HERE / "tuning.csv", jobs, given.out, given.processes)
    finals = [(n, best(tuning, n), seed) for seed in SEEDS for n in SETTINGS]
    results = complete(HERE / "results.csv", finals, given.out, given.processes)
    shares = {"adversaries.share": 0.2}
    rate = best(tuning, "fedavg")
    attacked = [
        (
            "fedavg",
            {
                **rate,
                **({} if attack is None else {**shares, "adversaries.attack.name": attack}),
                **({} if rule == "mean" else {"aggregation.name": rule}),
            },
            seed,
        )
        for attack in (None, *ATTACKS)
        for rule in RULES
        for seed in SEEDS
    ]
    robust = complete(HERE / "robust.csv", attacked, given.out, given.processes)
    print(results.groupby("method")[["accuracy", "personal", "worst decile"]].mean())
    print(robust.groupby("changes")["accuracy"].mean())


if __name__ == "__main__":
    main()
