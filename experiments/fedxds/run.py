"""Run grids of FedXDS and tabulate them: python run.py [NAME ...] [--out runs] [--done FOLDER ...]

NAMEs are files of small/ without their ending; with --done, finished grids are tabulated instead
(several of one name are put together). Needs Fashion-MNIST below $FEDSIM_DATA. Writes a row for
each run to results/NAME.csv, pictures beside it, and prints the tables of the README. --cost times
four methods, one after another, with nothing beside them.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from scipy.stats import ttest_rel

import fedsim
from fedsim import Grid
from fedsim.analysis.audit import Inversion, PrivacyAudit
from fedsim.config_file import RawConfig
from fedsim.prepare import prepare
from fedsim.privacy.inversion import draw_reconstructions, fidelity, invert_gradient
from fedsim.results.summary import of_run

sys.path.insert(0, str(Path(__file__).parents[1]))
from tables import better, finished, grids, parser, spread, table

HERE = Path(__file__).parent
RESULTS = HERE / "results"
FEDXDS = "FedXLRP"
TARGET = 0.7  # an accuracy to be reached
# Runs that LiRA attacks as well; four shadow models each take as long as the run.
LIRA = ("FedAvg", "FedAvg clipped, z 0.1", "raw, σ 0.15", "FedXLRP, σ 0.15", "FedXLRP, σ 1.5")


# -- rows --------------------------------------------------------------------------------------


def row_of(run: fedsim.Run) -> dict[str, Any]:
    """What is reported of a run; bytes are megabytes of one client, both ways."""
    rounds, clients = run.rounds, run.manifest["clients"]
    scores = rounds["accuracy"].dropna()
    late = scores[rounds["round"] > 12].diff().dropna()  # after the pool is shared
    reached = rounds["round"][scores.index[scores >= TARGET]]
    once = sum(rounds[c].sum() for c in ("one_off_up", "one_off_down") if c in rounds)
    found = of_run(rounds, run.primary_metric)
    return {
        "accuracy": found["last5"],
        "best": found["best"],
        "roughness": late.std(),
        "round_reached": reached.iloc[0] if len(reached) else np.nan,
        "megabytes": found["total_bytes"] / clients / 1e6,
        "megabytes_once": once / clients / 1e6,
        "result_hash": run.result_hash,
    }


def attack(run: fedsim.Run, name: str) -> tuple[dict[str, float], Inversion | None]:
    """What attacks find out of a run, and what they make of its shared images."""
    attacked = PrivacyAudit(run)
    found = {"epsilon": run.rounds.get("epsilon", pd.Series([np.nan])).iloc[-1]}
    for kind, outcome in attacked.infer_membership(4 if name in LIRA else 0)[None].items():
        found |= {f"{kind}_auc": outcome.auc, f"{kind}_balanced": outcome.balanced_accuracy}
        found[f"{kind}_tpr"] = outcome.tpr
    if not attacked.shares_images:
        return found, None
    inversion = attacked.invert_shared()
    for what in ("shared", "reconstructed"):
        close = getattr(inversion, what)
        found |= {f"{what}_{m}": getattr(close, m) for m in ("mse", "psnr", "ssim")}
    return found, inversion


def draw_inversions(inversions: dict[str, Inversion]) -> None:
    """A picture for each σ: what mechanisms make of the same images, and attacks of that."""
    for sigma in sorted({name.rpartition(" ")[2] for name in inversions}):
        of_sigma = {n: i for n, i in inversions.items() if n.endswith(f"σ {sigma}")}
        first = next(iter(of_sigma.values()))
        rows = {}
        for name, inversion in of_sigma.items():
            assert torch.allclose(inversion.originals, first.originals, atol=1e-6)
            rows[name] = (inversion.items, inversion.found)
        path = RESULTS / f"reconstructed-{sigma}.png"
        draw_reconstructions(rows, first.originals, first.labels, path)


def collect(name: str, grids: list[Grid]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A row for each run, and all rounds of all runs, by the axes of the grid."""
    rows, rounds, inversions = [], [], {}
    for cell, run in finished(grids):
        extra: dict[str, float] = {}
        if name == "privacy":
            extra, inversion = attack(run, cell["method"])
            if inversion is not None and cell["seed"] == 0:
                inversions[cell["method"]] = inversion
        rows.append({**cell, **row_of(run), **extra})
        sent = (run.rounds["total_bytes_up"] + run.rounds["total_bytes_down"]) / 1e6
        curve = run.rounds[["round", "accuracy"]].assign(
            megabytes=sent / run.manifest["clients"], **cell
        )
        rounds.append(curve.dropna(subset="accuracy"))
    if inversions:
        draw_inversions(inversions)
    return pd.DataFrame(rows), pd.concat(rounds, ignore_index=True)


# -- tables ------------------------------------------------------------------------------------


def heterogeneity(results: pd.DataFrame) -> Iterator[str]:
    for alpha, part in results.groupby("alpha", sort=False):
        yield f"\nα = {alpha}\n"
        own = part[part["method"] == FEDXDS]["accuracy"]
        rows = []
        for method, runs in part.groupby("method", sort=False):
            p = "" if method == FEDXDS else f"{better(own, runs['accuracy']):.3f}"
            figures = [spread(runs["accuracy"]), p, spread(runs["best"])]
            figures += [spread(runs["round_reached"], 0), spread(runs["roughness"])]
            figures += [f"{runs[c].mean():.2f}" for c in ("megabytes", "megabytes_once")]
            rows.append([str(method), *figures])
        header = ["method", "accuracy", f"p ({FEDXDS} above)", "best", f"round of {TARGET:.0%}"]
        yield table([*header, "roughness", "MB a client", "of which once"], rows)


def by_two(results: pd.DataFrame, axis: str) -> Iterator[str]:
    """Methods in rows, another axis in columns, and a test of FedXLRP against each method."""
    values = results[axis].unique().tolist()
    own = results[results["method"] == FEDXDS]
    # One figure for each seed: runs of one seed share the partition, and are no separate samples.
    by_seed = results.groupby(["method", "seed"], sort=False)["accuracy"].mean()
    rows = []
    for method, runs in results.groupby("method", sort=False):
        cells = [spread(runs[runs[axis] == value]["accuracy"]) for value in values]
        p = "" if method == FEDXDS else f"{better(by_seed[FEDXDS], by_seed[method]):.3f}"
        rows.append([str(method), *cells, spread(by_seed[method]), p])
    yield table(["method", *map(str, values), "mean", f"p ({FEDXDS} above)"], rows)
    ends = [own[own[axis] == v]["accuracy"] for v in (values[-1], values[0])]
    yield f"\n{FEDXDS} at {values[-1]} above {values[0]}: p = {better(*ends):.3f}"


def warmup(results: pd.DataFrame) -> Iterator[str]:
    axis = "warm-up rounds"
    rows = [
        [str(n), spread(runs["accuracy"]), spread(runs["best"])]
        for n, runs in results.groupby(axis, sort=False)
    ]
    yield table([axis, "accuracy", "best"], rows)
    of = {n: runs["accuracy"] for n, runs in results.groupby(axis)}
    yield f"\n10 above 0: p = {better(of['10'], of['0']):.3f}; "
    yield f"20 above 10: p = {better(of['20'], of['10']):.3f}"


def seeds(results: pd.DataFrame) -> Iterator[str]:
    by_seed = results.pivot(index="seed", columns="method", values="accuracy")
    rows = []
    for method, runs in results.groupby("method", sort=False):
        cells = [spread(runs["accuracy"]), "", "", spread(runs["best"])]
        if method != FEDXDS:
            # Runs of one seed share partition and initial weights: pairs say more.
            paired = ttest_rel(by_seed[FEDXDS], by_seed[method], alternative="greater").pvalue
            cells[1:3] = f"{better(by_seed[FEDXDS], by_seed[method]):.4f}", f"{paired:.4f}"
        rows.append([str(method), *cells])
    yield table(["method", "accuracy", f"p ({FEDXDS} above)", "p of pairs", "best"], rows)


def privacy(results: pd.DataFrame) -> Iterator[str]:
    columns = {
        "accuracy": "accuracy",
        "loss_auc": "loss AUC",
        "loss_tpr": "TPR at 1 %",
        "lira_auc": "LiRA AUC",
        "lira_tpr": "TPR at 1 %",
        "shared_ssim": "SSIM of what is shared",
        "reconstructed_ssim": "SSIM of reconstructions",
        "reconstructed_psnr": "PSNR, dB",
    }
    rows = []
    for method, runs in results.groupby("method", sort=False):
        figures = [spread(runs[c], 1 if c.endswith("psnr") else 3) for c in columns]
        rows.append([str(method), f"{runs['epsilon'].mean():.3g}".replace("nan", "–"), *figures])
    yield table(["run", "ε", *columns.values()], rows)


TABLES: dict[str, Callable[[pd.DataFrame], Iterator[str]]] = {
    "heterogeneity": heterogeneity,
    "attribution": lambda results: by_two(results, "method.fraction"),
    "sparsification": lambda results: by_two(results, "method.removed"),
    "warmup": warmup,
    "seeds": seeds,
    "privacy": privacy,
}


# -- gradients ---------------------------------------------------------------------------------


def gradients(images: int = 8, steps: int = 600) -> str:
    """How much of an image its gradient shows, with noise on it, as client-level privacy adds.

    The gradient is of a single image at the initial weights, where it shows most; noise is in
    units of the root mean square of the gradient's entries.
    """
    _, sheet = RawConfig.read(HERE / "small" / "privacy.yaml").take("grid")
    dataset, _, spec = prepare(sheet.build(fedsim.Experiment))
    network = spec.build_model().eval()
    mean, std = (torch.tensor(v)[:, None, None] for v in (dataset.mean, dataset.std))
    pixels = torch.from_numpy(dataset.x[:images]).float() / 255
    x, y = (pixels - mean) / std, torch.from_numpy(dataset.y[:images])
    rows = []
    for noise in (0.0, 0.1, 0.5, 2.0):
        found = []
        for k in range(images):
            loss = torch.nn.functional.cross_entropy(network(x[k : k + 1]), y[k : k + 1])
            gradient = torch.autograd.grad(loss, list(network.parameters()))
            size = torch.cat([g.flatten() for g in gradient]).square().mean().sqrt()
            generator = torch.Generator().manual_seed(k)
            noisy = [
                g + noise * size * torch.randn(g.shape, generator=generator) for g in gradient
            ]
            low, high = -mean / std, (1 - mean) / std
            inverted = invert_gradient(
                network, noisy, y[k : k + 1], spec.data.shape, low, high, steps, seed=k
            )
            found.append(inverted[0] * std + mean)
        close = fidelity(pixels, torch.stack(found).clamp(0, 1))
        rows.append([f"{noise:g}", f"{close.psnr:.1f}", f"{close.ssim:.3f}"])
    return table(["noise on the gradient", "PSNR, dB", "SSIM"], rows)


# -- pictures ----------------------------------------------------------------------------------


def draw(rounds: pd.DataFrame, path: Path) -> None:
    """Accuracy by rounds and by bytes: the mean over seeds of each method."""
    figure = Figure(figsize=(11, 4.2), layout="constrained", dpi=130)
    left, right = figure.subplots(1, 2, sharey=True)
    for k, (method, runs) in enumerate(rounds.groupby("method", sort=False)):
        mean = runs.groupby("round")[["accuracy", "megabytes"]].mean()
        style = {"color": f"C{k % 10}", "linestyle": ("-", "--")[k // 10], "linewidth": 1.2}
        if method == FEDXDS:
            style |= {"color": "black", "linewidth": 2.4}
        left.plot(mean.index, mean["accuracy"], label=str(method), **style)
        right.plot(mean["megabytes"], mean["accuracy"], **style)
    left.set(xlabel="round", ylabel="accuracy, mean over seeds")
    right.set(xlabel="megabytes a client has sent and received, the pool included", xscale="log")
    figure.legend(loc="outside right center", fontsize=8, frameon=False)
    figure.savefig(path)


# -- cost --------------------------------------------------------------------------------------


def cost(out: Path, turns: int = 3) -> str:
    """Seconds of four methods, in turn: a round of training, and all that comes before it."""
    base = RawConfig.read(HERE / "small" / "heterogeneity.yaml")
    methods = base.content["grid"]["axes"]["method"]
    _, sheet = base.take("grid")
    seconds: dict[str, list[tuple[float, float]]] = {}
    for turn in range(turns):
        for name in ("FedFed", "FedGen", "FedFTG", FEDXDS, "FedAvg"):
            cell = sheet.changed({**methods[name], "seed": turn, "train.rounds": 16}, "cost")
            cell = cell.changed({"evaluate.every": 16}, "cost")
            started = time.perf_counter()
            rounds = fedsim.run(cell.build(fedsim.Experiment), out).rounds
            print(f"{name}, {time.perf_counter() - started:.0f} s", flush=True)
            training = rounds["seconds"].iloc[-5:-1].median()  # the last one evaluates
            before = rounds["seconds"].iloc[:11].sum()
            seconds.setdefault(name, []).append((training, before))
    rows = []
    for name, measured in seconds.items():
        medians = (statistics.median(column) for column in zip(*measured, strict=True))
        rows.append([name, *(f"{m:.2f}" for m in medians)])
    return table(["method", "a round of training, s", "the first 11 rounds, s"], rows)


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--gradients", action="store_true", help="invert gradients, and no more")
    command.add_argument("--cost", action="store_true", help="time four methods, and no more")
    arguments = command.parse_args()
    if arguments.cost or arguments.gradients:
        print(cost(arguments.out) if arguments.cost else gradients())
        return
    RESULTS.mkdir(exist_ok=True)
    for name, folders in grids(arguments, HERE, TABLES).items():
        results, rounds = collect(name, folders)
        results.to_csv(RESULTS / f"{name}.csv", index=False, float_format="%.6g")
        print(f"\n### {name}\n")
        print("\n".join(TABLES[name](results)))
        if name == "heterogeneity":
            for alpha, part in rounds.groupby("alpha"):
                draw(part, RESULTS / f"progression-{alpha}.png")


if __name__ == "__main__":
    main()
