"""Tune every method, run the best of each with three seeds, and tabulate.

python run.py [--out runs] [--processes 2]

Each method gets six trials: three learning rates of the clients times two settings of its own, or
six learning rates. Trials have a seed of their own, and are scored on a tenth of the training
examples, held out, or by the accuracy of personal models on the clients' tests; the tables are of
three other seeds. Runs that are in the tables beside this file already are not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[1]))
from tables import spread, table

Job = tuple[str, Mapping[str, Any], int]  # a method, the changes to landscape.yaml, and a seed

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
    "fedftg": {},
    "feddf": {"method.lr": (0.0003, 0.001)},
    "fedaux": {"method.lr": (0.00005, 0.0005)},
    "sse_agg": {"method.beta": (1.0, 3.0)},
    "xfedalign": {},
    "fedxds": {"method.removed": (50.0, 80.0)},
    "semifl": {"method.threshold": (0.8, 0.95)},
    "xpfl": {"method.lam": (0.5, 2.0)},
    "local": {},
    "centralised": {},
}
# What some methods need: examples on the server, clients without labels, an attribution that fits.
LRP = {"name": "lrp", "composite": "epsilon"}
LITTLE = {
    **{"width": 16, "depth": 1, "heads": 2},
    **{"decoder_width": 16, "decoder_depth": 1, "decoder_heads": 2},
}
NEEDS: dict[str, Mapping[str, Any]] = {
    "fedftg": {"method.width": 8, "method.iterations": 1},
    "feddf": {"partition.server_fraction": 0.1},
    "fedaux": {"partition.server_fraction": 0.1},
    "sse_agg": {"partition.server_fraction": 0.1},
    "semifl": {"partition.server_fraction": 0.1},
    "xpfl": {"partition.labelled_fraction": 0.1, "method.teacher": LITTLE},
    "fedxds": {"method.attribution": LRP, "method.sigma": 0.1},
}
# Tuned by the accuracy of the clients' models; the others by that of the global model.
PERSONAL = {
    *("fedavg_ft", "fedbabu", "perfedavg", "ditto", "apfl", "pfedme", "fedper", "fedrep"),
    *("lg_fedavg", "ifca", "xpfl", "local"),
}
ATTACKS = ("sign_flip", "gaussian", "alie")
CODECS: dict[str, Mapping[str, Any]] = {
    "none": {},
    "float16": {"uplink.name": "float16"},
    "int8": {"uplink.name": "int8"},
    "qsgd, 7 levels": {"uplink.name": "qsgd"},
    "sign": {"uplink.name": "sign"},
    "topk, 10 %": {"uplink.name": "topk", "uplink.fraction": 0.1},
    "topk, 1 %": {"uplink.name": "topk"},
    "randomk, 10 %": {"uplink.name": "randomk", "uplink.fraction": 0.1},
    "randomk, 1 %": {"uplink.name": "randomk"},
    "lowrank, rank 2": {"uplink.name": "lowrank"},
}
# Without devices: masked messages take longer, and simulated times count to the hash.
MASKED = {"secure_aggregation.threshold": 0.6}
RULES = ("mean", "median", "trimmed_mean", "multi_krum", "geometric_median")


def trials(name: str) -> list[dict[str, Any]]:
    """The changes of each trial of a method."""
    own = SETTINGS[name]
    rates = RATES if own else MORE_RATES
    axes = {"train.optimizer.lr": rates, **own}
    settings = product(*axes.values())
    return [{**NEEDS.get(name, {}), **dict(zip(axes, v, strict=True))} for v in settings]


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
        "minutes simulated": last.get("total_simulated_seconds", 0) / 60,
        "seconds": run.manifest["wall_seconds"],
        "hash": run.result_hash,
    }


def complete(file: Path, jobs: Iterable[Job], out: Path, processes: int) -> pd.DataFrame:
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


def _of(out: Path, job: Job) -> dict[str, Any]:
    return carry_out(*job, out)


def best(tuning: pd.DataFrame, name: str) -> dict[str, Any]:
    """The changes of a method's best trial."""
    rows = tuning[tuning.method == name]
    scores = rows["personal" if name in PERSONAL else "validation"]
    found: dict[str, Any] = json.loads(rows.loc[scores.idxmax(), "changes"])
    found.pop("evaluate.validation")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs"), help="where runs lie")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()

    def carry_out_all(file: str, jobs: Iterable[Job]) -> pd.DataFrame:
        return complete(HERE / file, jobs, given.out, given.processes)

    held_out = {"evaluate.validation": 0.1}
    tuning = carry_out_all(
        "tuning.csv", [(n, {**c, **held_out}, TUNING_SEED) for n in SETTINGS for c in trials(n)]
    )
    carry_out_all("results.csv", [(n, best(tuning, n), s) for s in SEEDS for n in SETTINGS])
    rate = best(tuning, "fedavg")
    attacked = [
        {
            **({} if rule == "mean" else {"aggregation.name": rule}),
            **({} if attack is None else {"adversaries.share": 0.2}),
            **({} if attack is None else {"adversaries.attack.name": attack}),
        }
        for attack in (None, *ATTACKS)
        for rule in RULES
    ]
    for file, changes in (
        ("robust.csv", attacked),
        ("compression.csv", list(CODECS.values())),
        ("masked.csv", [{"devices": None}, {"devices": None, **MASKED}]),
    ):
        carry_out_all(file, [("fedavg", {**rate, **c}, s) for c in changes for s in SEEDS])
    print(tables())


def tables() -> str:
    """The tables of README.md."""
    results, robust, compression, masked = (
        pd.read_csv(HERE / f"{name}.csv")
        for name in ("results", "robust", "compression", "masked")
    )
    methods = [
        [
            f"`{name}`",
            *(spread(rows[column]) for column in ("accuracy", "personal", "worst decile")),
            f"{rows['MB'].mean():.0f}",
            f"{rows['minutes simulated'].mean():.1f}",
        ]
        for name, rows in results.groupby("method", sort=False)
    ]
    changes = robust["changes"].map(json.loads)
    rule = changes.map(lambda c: c.get("aggregation.name", "mean"))
    attack = changes.map(lambda c: c.get("adversaries.attack.name", "none"))
    rules = [
        [
            f"`{wanted}`",
            *(
                spread(robust["accuracy"][(rule == wanted) & (attack == each)])
                for each in ("none", *ATTACKS)
            ),
        ]
        for wanted in RULES
    ]
    labels = dict(zip(compression["changes"].unique(), CODECS, strict=True))
    codecs = [
        [
            label,
            spread(rows["accuracy"]),
            f"{rows['MB'].mean():.1f}",
            spread(rows["minutes simulated"], 2),
        ]
        for label, rows in compression.groupby(compression["changes"].map(labels), sort=False)
    ]
    hashes = [
        [str(seed), *rows["hash"], *(f"{sent:.1f}" for sent in rows["MB"])]
        for seed, rows in masked.groupby("seed")  # without masks first
    ]
    return "\n\n".join(
        [
            table(
                ["method", "accuracy", "clients' accuracy", "worst decile", "MB", "minutes"],
                methods,
            ),
            table(["rule", "no attack", *(f"`{a}`" for a in ATTACKS)], rules),
            table(["uplink", "accuracy", "MB up and down", "minutes"], codecs),
            table(["seed", "hash without masks", "with masks", "MB without", "with"], hashes),
        ]
    )


if __name__ == "__main__":
    main()
