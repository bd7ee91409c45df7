"""Run grids of FedXDS and tabulate them: python run.py [NAME ...] [--out runs] [--done FOLDER ...]

NAMEs are files of small/ without their ending; with --done, finished grids are tabulated instead
(several of one name are put together). Needs Fashion-MNIST, MNIST (control) and CIFAR-10 (control,
cifar) below $FEDSIM_DATA. Writes a row for each run to results/NAME.csv, pictures beside it, and
prints the tables of the README. --cost times five methods, one after another, with nothing beside
them; --tables tabulates results/ as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

import fedsim
from fedsim import Grid
from fedsim.analysis.attacks.audit import PrivacyAudit
from fedsim.analysis.attacks.inversion import (
    Inversion,
    draw_reconstructions,
    fidelity,
    invert_gradient,
)
from fedsim.config.file import RawConfig
from fedsim.launch.prepare import prepare
from fedsim.results.significance import Difference, paired
from fedsim.results.summary import of_run

sys.path.insert(0, str(Path(__file__).parents[1]))
from tables import against, finished, grids, parser, spread, table, tested

HERE = Path(__file__).parent
RESULTS = HERE / "results"
FEDXDS = "FedXLRP"
TARGET = 0.7  # an accuracy to be reached
OF_MAPS = ("FedAvg", FEDXDS, f"{FEDXDS}, local", "random map")  # beside the released code
GUESSES = ("mean_image", "class_mean")  # of an attacker without the shared images
# Runs that LiRA attacks as well; four shadow models each take as long as the run.
LIRA = ("FedAvg", "FedAvg clipped, z 0.1", "raw, σ 0.15", "FedXLRP, σ 0.15", "FedXLRP, σ 1.5")


# -- rows --------------------------------------------------------------------------------------


def row_of(run: fedsim.Run) -> dict[str, Any]:
    """What is reported of a run; bytes are megabytes of one client, both ways.

    `late` is the mean of the last sixteen rounds, interpolated where there is no evaluation.
    """
    rounds, clients = run.rounds, run.manifest["clients"]
    scores = rounds["accuracy"].dropna()
    late = scores[rounds["round"] > 12].diff().dropna()  # after the pool is shared
    reached = rounds["round"][scores.index[scores >= TARGET]]
    last = np.arange(len(rounds) - 15, len(rounds) + 1)
    once = sum(rounds[c].sum() for c in ("one_off_up", "one_off_down") if c in rounds)
    found = of_run(rounds, run.primary_metric)
    return {
        "accuracy": found["last5"],
        "late": np.interp(last, rounds["round"][scores.index], scores).mean(),
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
    found |= {f"{what}_ssim": getattr(inversion, what).ssim for what in GUESSES}
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


TESTED = ("p, Holm", "detectable")  # titles after that of a difference; see tables.tested
REACHED = f"round of {TARGET:.0%}"
FURTHER = {
    "best": "best",
    REACHED: "round_reached",
    "roughness": "roughness",
}


def compared(results: pd.DataFrame, further: Sequence[str] = ("best",)) -> str:
    """Each method, and what FedXLRP is above it, by pairs of runs with the same seed."""
    tests = against(results, FEDXDS)
    rows = []
    for method, runs in results.groupby("method", sort=False):
        more = [spread(runs[FURTHER[c]], 0 if c == REACHED else 3) for c in further]
        rows.append(
            [str(method), spread(runs["accuracy"]), *tests.get(str(method), [""] * 3), *more]
        )
    return table(["method", "accuracy", f"{FEDXDS} above by", *TESTED, *further], rows)


def control(results: pd.DataFrame) -> Iterator[str]:
    for share, part in results.groupby("data.spurious", sort=False):
        yield f"\nspurious = {share:g}\n"
        yield compared(part)


def heterogeneity(results: pd.DataFrame) -> Iterator[str]:
    for alpha, part in results.groupby("alpha", sort=False):
        yield f"\nα = {alpha}\n"
        yield compared(part, [*FURTHER])
        yield "\nMegabytes of one client, both ways\n"
        means = part.groupby("method", sort=False)[["megabytes", "megabytes_once"]].mean()
        sent = [[str(name), f"{a:.2f}", f"{b:.2f}"] for name, a, b in means.itertuples()]
        yield table(["method", "MB a client", "of which once"], sent)
        yield "\nRoughness: theirs less FedXLRP's\n"
        tests = against(part.assign(smooth=-part["roughness"]), FEDXDS, "smooth")
        rows = [[method, *cells] for method, cells in tests.items()]
        yield table(["method", "smoother by", *TESTED], rows)


def along(results: pd.DataFrame, axis: str) -> Iterator[str]:
    """Methods in rows, an axis in columns; and the last value against the first, by pairs."""
    values = list(dict.fromkeys(results[axis]))
    cells, changes = {}, {}
    for method, runs in results.groupby("method", sort=False):
        of = {v: own.set_index("seed")["accuracy"] for v, own in runs.groupby(axis)}
        cells[method] = [spread(of[v]) for v in values]
        changes[method] = paired(of[values[-1]], of[values[0]])
    rows = [[method, *cells[method], *test] for method, test in tested(changes).items()]
    header = [f"{values[-1]} above {values[0]} by", *TESTED]
    yield table(["method", *map(str, values), *header], rows)
    if len(rows) > 1:
        yield "\nall values together\n"
        mean = results.groupby(["method", "seed"], sort=False)["accuracy"].mean().reset_index()
        yield compared(mean, [])


def steps(results: pd.DataFrame, axis: str) -> Iterator[str]:
    """An axis in rows, each value against the one before, by pairs; of the last sixteen rounds."""
    of = {v: own.set_index("seed") for v, own in results.groupby(axis, sort=False)}
    tests = tested({v: paired(of[v]["late"], of[u]["late"]) for u, v in pairwise(of)})
    rows = [
        [str(v), spread(own["late"]), spread(own["best"]), *tests.get(v, [""] * 3)]
        for v, own in of.items()
    ]
    yield table([axis, "accuracy", "best", "above the row before by", *TESTED], rows)


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
    guesses = {f"{g}_ssim": f"SSIM of the {g.replace('_', ' ')}" for g in GUESSES}
    columns |= {c: title for c, title in guesses.items() if c in results}
    rows = []
    for method, runs in results.groupby("method", sort=False):
        figures = [spread(runs[c], 1 if c.endswith("psnr") else 3) for c in columns]
        epsilon = f"{runs['epsilon'].mean():.4g}".replace("nan", "–").replace("inf", "∞")
        rows.append([str(method), epsilon, *figures])
    yield table(["run", "ε", *columns.values()], rows)
    shares = results.dropna(subset="reconstructed_ssim")
    of = {m: own.set_index("seed") for m, own in shares.groupby("method", sort=False)}
    tests: dict[str, Difference] = {}
    for method, own in of.items():
        sigma = str(method).rpartition(" ")[2]
        if (ours := f"{FEDXDS}, σ {sigma}") in of and method != ours:
            tests[method] = paired(own["reconstructed_ssim"], of[ours]["reconstructed_ssim"])
    rows = [[name, *cells[:2]] for name, cells in tested(tests).items()]
    yield "\n" + table(["at equal σ", "SSIM above FedXLRP's by", TESTED[0]], rows)


def with_maps(
    results: pd.DataFrame, methods: Sequence[str], axis: str = "method", value: object = None
) -> pd.DataFrame:
    """With runs of results/maps.csv that belong to a grid's table, and their value of its axis."""
    maps = pd.read_csv(RESULTS / "maps.csv")
    maps = maps[maps["method"].isin(methods) & maps["seed"].isin(results["seed"])]
    assert len(maps) == len(set(methods)) * results["seed"].nunique()
    assert value is None or value not in set(results[axis])
    if value is None:
        return pd.concat([maps, results], ignore_index=True)
    both = pd.concat([results, maps.assign(**{axis: value})], ignore_index=True)
    return both.sort_values(axis, kind="stable")


def released(results: pd.DataFrame) -> Iterator[str]:
    yield compared(with_maps(results, OF_MAPS))
    yield "\nWith all of it\n"
    whole = results[results["method"].str.endswith(" as released")]
    tests = against(whole, f"{FEDXDS} as released")
    rows = [[method, *cells] for method, cells in tests.items()]
    yield table(["method", f"{FEDXDS} as released above by", *TESTED], rows)


TABLES: dict[str, Callable[[pd.DataFrame], Iterator[str]]] = {
    "control": control,
    "heterogeneity": heterogeneity,
    "maps": lambda results: iter([compared(results)]),
    "cifar": lambda results: iter([compared(results)]),
    "released": released,
    "attribution": lambda results: along(
        with_maps(results, list(results["method"]), "method.fraction", 1.0), "method.fraction"
    ),
    "sparsification": lambda results: along(results, "method.removed"),
    "warmup": lambda results: steps(
        with_maps(results, [FEDXDS], "warm-up rounds", 10), "warm-up rounds"
    ),
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


def cost(out: Path, turns: int = 5) -> pd.DataFrame:
    """Seconds of five methods, in turn: a round of training, and all that comes before it."""
    base = RawConfig.read(HERE / "small" / "heterogeneity.yaml")
    methods = base.content["grid"]["axes"]["method"]
    _, sheet = base.take("grid")
    rows = []
    for turn in range(turns):
        for name in ("FedFed", "FedGen", "FedFTG", FEDXDS, "FedAvg"):
            cell = sheet.changed({**methods[name], "seed": turn, "train.rounds": 16}, "cost")
            cell = cell.changed({"evaluate.every": 16}, "cost")
            rounds = fedsim.run(cell.build(fedsim.Experiment), out).rounds
            training = float(rounds["seconds"].iloc[-5:-1].median())  # the last one evaluates
            phases = rounds.get("phase", pd.Series("train", rounds.index))
            before = float(rounds["seconds"][phases != phases.iloc[-1]].sum())
            rows.append({"method": name, "seed": turn, "training": training, "before": before})
            print(rows[-1], flush=True)
    return pd.DataFrame(rows)


def costs(results: pd.DataFrame) -> Iterator[str]:
    times = results.assign(faster=-results["training"])
    tests = against(times, FEDXDS, "faster")
    rows = []
    for method, runs in results.groupby("method", sort=False):
        medians = [f"{runs[column].median():.2f}" for column in ("training", "before")]
        rows.append([str(method), *medians, *tests.get(str(method), [""] * 3)])
    header = ["method", "a round of training, s", "all rounds before, s"]
    yield table([*header, f"a round above {FEDXDS}'s by, s", *TESTED], rows)


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--gradients", action="store_true", help="invert gradients, and no more")
    command.add_argument("--cost", action="store_true", help="time five methods, and no more")
    command.add_argument("--tables", action="store_true", help="tabulate results/, and no more")
    arguments = command.parse_args()
    RESULTS.mkdir(exist_ok=True)
    if arguments.cost:
        cost(arguments.out).to_csv(RESULTS / "cost.csv", index=False, float_format="%.6g")
    if arguments.tables or arguments.cost:
        tables = {**TABLES, "cost": costs}
        for name in ["cost"] if arguments.cost else arguments.names or tables:
            if (file := RESULTS / f"{name}.csv").exists():
                print(f"\n### {name}\n")
                print("\n".join(tables[name](pd.read_csv(file))))
        return
    if arguments.gradients:
        print(gradients())
        return
    for name, folders in grids(arguments, HERE, TABLES).items():
        results, rounds = collect(name, folders)
        file = RESULTS / f"{name}.csv"
        results.to_csv(file, index=False, float_format="%.6g")
        print(f"\n### {name}\n")
        print("\n".join(TABLES[name](pd.read_csv(file))))
        if name == "heterogeneity":
            for alpha, part in rounds.groupby("alpha"):
                draw(part, RESULTS / f"progression-{alpha}.png")


if __name__ == "__main__":
    main()
