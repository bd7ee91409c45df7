"""Run XPFL's grids and tabulate them: python run.py [NAME ...] [--out runs] [--done FOLDER ...]

NAMEs are files of small/ without their ending; with --done, finished grids are tabulated instead
(of several of one name the later runs count).
Needs MNIST, Fashion-MNIST and CIFAR-10 below $FEDSIM_DATA. Writes a row for each run to
results/NAME.csv and prints the tables of the README. Further, each by itself: --reconstruction
compares autoencoders, --trees ours with scikit-learn's, --clients shows the memory of 100 clients
that keep teachers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import ttest_1samp
from torch import Tensor, nn

import fedsim
from fedsim import Grid
from fedsim.config_file import RawConfig
from fedsim.explain.canvas import new_figure, place, save
from fedsim.explain.tree import build_tree, fidelity
from fedsim.methods.xpfl import XPFL, Teacher
from fedsim.models.masked_autoencoder import (
    ConvolutionalAutoencoder,
    MaskedAutoencoder,
    patchify,
    unpatchify,
)
from fedsim.prepare import prepare
from fedsim.privacy.inversion import fidelity as closeness

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.memory import own_megabytes, stored_megabytes
from tables import better, finished, grids, parser, spread, table

HERE = Path(__file__).parent
RESULTS = HERE / "results"
DATA = ("mnist", "fashion_mnist", "cifar10")
# As in small/, but with smaller batches.
TEACHER = {
    **{"width": 64, "depth": 4, "heads": 4},
    **{"decoder_width": 32, "decoder_depth": 2, "decoder_heads": 4, "batch_size": 32},
}


# -- grids -------------------------------------------------------------------------------------


def collect(name: str, grids: list[Grid]) -> pd.DataFrame:
    """A row for each run; of `explained` one for each round and client that was explained."""
    rows = []
    for cell, run in finished(grids):
        rounds = run.rounds
        scores = rounds["accuracy"].dropna()
        found = {"accuracy": scores.iloc[-1], "best": scores.max()}
        for mean in ("teacher_loss", "psi"):
            if mean in run.clients:
                by_round = run.clients.groupby("round")[mean].mean()
                found[mean], found[f"first_{mean}"] = by_round.iloc[-1], by_round.iloc[0]
        if name != "explained":
            rows.append({**cell, **found, "result_hash": run.result_hash})
            continue
        tested = run.clients.dropna(subset="test_accuracy")
        for row in run.explanations.to_dict("records"):
            rows.append({**cell, "what": "explanation", **row, "result_hash": run.result_hash})
        columns = ["round", "client", "test_accuracy", "global_accuracy", "psi"]
        for row in tested[columns].to_dict("records"):
            rows.append({**cell, "what": "own test", **row, "result_hash": run.result_hash})
    return pd.DataFrame(rows)


# -- tables ------------------------------------------------------------------------------------


def with_few_labels(methods: list[str]) -> pd.DataFrame:
    """Runs of skew.yaml at Dir(0.5): a tenth of the labels."""
    path = RESULTS / "skew.csv"
    if not path.exists():
        return pd.DataFrame({"method": []})
    skew = pd.read_csv(path)
    return skew[(skew["eta"] == 0.5) & skew["method"].isin(methods)]


def labels(results: pd.DataFrame) -> Iterator[str]:
    few = with_few_labels(["XPFL", "FedAvg"])
    few = few.assign(method=few["method"] + " 0.1")
    results = pd.concat([results, few], ignore_index=True)
    methods = results["method"].unique().tolist()
    scores = {key: runs["accuracy"] for key, runs in results.groupby(["data", "method"])}
    data = [d for d in DATA if d in set(results["data"])]
    none = pd.Series(dtype=float)
    rows = [[m, *(spread(scores.get((d, m), none)) for d in data)] for m in methods]
    yield table(["method", *data], rows)
    pairs = [
        ("CL", "FedAvg"),
        ("FedAvg", "XPFL 0.1"),
        ("XPFL 0.1", "SemiFL 0.1"),
        ("XPFL 0.1", "SemiFL 0.2"),
        ("XPFL 0.2", "FedAvg"),
        ("CL", "XPFL 0.2"),
        ("XPFL 0.1", "FedAvg 0.1"),
    ]
    rows = []
    for a, b in pairs:
        both = [d for d in data if (d, a) in scores and (d, b) in scores]
        ps = {d: f"{better(scores[d, a], scores[d, b]):.4f}" for d in both}
        rows.append([f"{a} above {b}", *(ps.get(d, "–") for d in data)])
    yield "\n" + table(["p", *data], rows)


def skew(results: pd.DataFrame) -> Iterator[str]:
    results = results.assign(eta=results["eta"].astype(float))
    for data in DATA:
        part = results[results["data"] == data]
        if part.empty:
            continue
        yield f"\n{data}\n"
        etas = sorted(part["eta"].unique())
        rows = []
        for method, runs in part.groupby("method", sort=False):
            cells = []
            for eta in etas:
                at = part[part["eta"] == eta]
                own = at[at["method"] == "XPFL"]["accuracy"]
                scores = runs[runs["eta"] == eta]["accuracy"]
                p = "" if method == "XPFL" else f" (p {better(own, scores):.3f})"
                cells.append(spread(scores) + p)
            rows.append([str(method), *cells])
        yield table(["method", *(f"η {eta} (XPFL above)" for eta in etas)], rows)
    yield "\nlead of XPFL over the best of FedAvgM, FedProx and SCAFFOLD at η 0.1:"
    for data in DATA:
        part = results[(results["data"] == data) & (results["eta"] == 0.1)]
        means = part.groupby("method")["accuracy"].mean()
        if "XPFL" not in means:
            continue
        rivals = means[["FedAvgM", "FedProx", "SCAFFOLD"]]
        yield f"{data}: {means['XPFL'] - rivals.max():+.3f} (over {rivals.idxmax()})"


def parts(results: pd.DataFrame) -> Iterator[str]:
    results = pd.concat([with_few_labels(["FedAvg", "no teacher", "XPFL"]), results])
    scores = {key: runs["accuracy"] for key, runs in results.groupby(["data", "method"])}
    data = [d for d in DATA if (d, "one model") in scores]
    methods = ["FedAvg", "no teacher", "one model", "XPFL"]
    none = pd.Series(dtype=float)
    rows = [[m, *(spread(scores.get((d, m), none)) for d in data)] for m in methods]
    yield table(["method", *data], rows)


def laptop(results: pd.DataFrame) -> Iterator[str]:
    data = [d for d in DATA if d in set(results["data"])]
    rows = []
    for method, runs in results.groupby("method", sort=False):
        of = {d: runs[runs["data"] == d] for d in data}
        told = [*(spread(of[d]["accuracy"]) for d in data), *(spread(of[d]["psi"]) for d in data)]
        rows.append([str(method), *told])
    yield table(["method", *data, *(f"ψ, {d}" for d in data)], rows)


def explained(results: pd.DataFrame) -> Iterator[str]:
    found = results[results["what"] == "explanation"]
    rows = []
    for (data, t), part in found.groupby(["data", "round"], sort=False):
        columns = ("fidelity", "held_out_fidelity", "depth", "leaves", "qox_tree", "qox_tsne")
        digits = {"depth": 0, "leaves": 0, "qox_tree": 4, "qox_tsne": 5}
        cells = [spread(part[c], digits.get(c, 3)) for c in columns]
        rows.append([str(data), str(t), *cells])
    header = ["data", "round", "fidelity", "held out", "depth", "leaves", "QoX tree", "QoX t-SNE"]
    yield table(header, rows)
    rows = []
    for (data, t), part in found.groupby(["data", "round"], sort=False):
        before, after = part["divergence_before"], part["divergence_after"]
        # One figure a seed: the clients of a run share its global model.
        fallen = (before - after).groupby(part["seed"]).mean()
        p = ttest_1samp(fallen, 0, alternative="greater").pvalue
        rows.append([str(data), str(t), spread(before), spread(after), f"{p:.3f}"])
    yield "\n" + table(["data", "round", "KL before fusion", "after", "p (falls)"], rows)
    tests = results[results["what"] == "own test"]
    rows = []
    for (data, t), part in tests.groupby(["data", "round"], sort=False):
        gain = (part["test_accuracy"] - part["global_accuracy"]).groupby(part["seed"]).mean()
        p = ttest_1samp(gain, 0, alternative="greater").pvalue
        above = (part["test_accuracy"] > part["global_accuracy"]).mean()
        scores = [spread(part[c]) for c in ("test_accuracy", "global_accuracy", "psi")]
        rows.append([str(data), str(t), *scores, f"{above:.0%}", f"{p:.3f}"])
    header = ["data", "round", "personal", "global", "ψ", "clients better off", "p"]
    yield "\n" + table(header, rows)


TABLES: dict[str, Callable[[pd.DataFrame], Iterator[str]]] = {
    "skew": skew,
    "labels": labels,
    "parts": parts,
    "laptop": laptop,
    "explained": explained,
}


# -- reconstruction ----------------------------------------------------------------------------

EPOCHS, SEEDS, TESTED = 10, 3, 1000


def fit(network: nn.Module, loss: Callable[[Tensor], Tensor], x: Tensor, epochs: int) -> None:
    """Adam with a learning rate of 0.001 and batches of 128, from torch's random state."""
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    network.train()
    for _ in range(epochs):
        for rows in torch.split(torch.randperm(len(x)), 128):
            optimizer.zero_grad()
            torch.autograd.backward(loss(x[rows]).mean())
            optimizer.step()
    network.eval()


def autoencoders(
    x: Tensor, low: Tensor, high: Tensor, teacher: Teacher
) -> Iterator[tuple[str, nn.Module]]:
    """The generative one, as teachers are trained and on masked patches alone; and the other."""
    shape = tuple(x.shape[1:])
    mae = teacher.build(shape)
    fit(mae, lambda batch: teacher.loss(mae, batch), x, EPOCHS)
    yield "GAE", mae
    masked = teacher.build(shape)
    fit(masked, lambda batch: masked.loss(batch, teacher.mask_ratio), x, EPOCHS)
    yield "GAE, masked patches alone", masked
    cae = ConvolutionalAutoencoder(shape, low, high)
    fit(cae, cae.loss, x, EPOCHS)
    yield "CAE", cae


@torch.no_grad()
def reconstruction() -> pd.DataFrame:
    """PSNR and SSIM of test images, and pictures of some."""
    _, sheet = RawConfig.read(HERE / "small" / "skew.yaml").take("grid")
    teacher = Teacher(**TEACHER)
    rows = []
    for data in DATA:
        share = 1 if data == "cifar10" else 4000 / 60_000
        settings = {"data.name": data, "partition.train_fraction": share}
        for seed in range(SEEDS):
            cell = sheet.changed({**settings, "seed": seed}, "reconstruction")
            dataset, splits, _ = prepare(cell.build(fedsim.Experiment))
            mean, std = (torch.tensor(v)[:, None, None] for v in (dataset.mean, dataset.std))
            used = np.sort(np.concatenate([splits.train.values, splits.unlabelled.values]))
            x = (torch.from_numpy(dataset.x[used]).float() / 255 - mean) / std
            pixels = torch.from_numpy(dataset.test_x[:TESTED]).float() / 255
            test = (pixels - mean) / std
            torch.manual_seed(seed)
            drawn: dict[str, Tensor] = {"original": pixels[:8]}
            with torch.enable_grad():
                made = list(autoencoders(x, -mean / std, (1 - mean) / std, teacher))
            for name, network in made:
                found = (network(test) * std + mean).clamp(0, 1)
                close = closeness(pixels, found)
                rows.append(
                    {"data": data, "seed": seed, "autoencoder": name}
                    | {"psnr": close.psnr, "ssim": close.ssim, "mse": close.mse}
                )
                print(rows[-1], flush=True)
                if name == "GAE" and isinstance(network, MaskedAutoencoder):
                    shown, filled = masked_and_filled(network, test[:8], teacher.mask_ratio)
                    drawn["masked"] = (shown * std + mean).clamp(0, 1)
                    drawn["GAE, of the masked"] = (filled * std + mean).clamp(0, 1)
                drawn[name] = found[:8]
            if seed == 0:
                draw(drawn, RESULTS / f"reconstruction-{data}.png")
    return pd.DataFrame(rows)


def masked_and_filled(
    network: MaskedAutoencoder, x: Tensor, ratio: float
) -> tuple[Tensor, Tensor]:
    """Images with masked patches at the mean, and with these as the network fills them."""
    tokens, mask, restore = network.encode(x, ratio)
    patches, side = patchify(x, network.patch), network.patch
    hidden = mask[..., None]
    made = torch.where(hidden, network.decode(tokens, restore), patches)
    blank = patches.masked_fill(hidden, 0)
    return (unpatchify(blank, side, network.shape), unpatchify(made, side, network.shape))


def draw(rows: dict[str, Tensor], path: Path) -> None:
    """A row of images for each name, of pixels in [0, 1]."""
    side, gap, left = 0.8, 0.04, 1.9
    figure = new_figure(left + 8 * (side + gap), len(rows) * (side + gap))
    for i, (name, images) in enumerate(rows.items()):
        for k, image in enumerate(images.movedim(1, -1).numpy()):
            axes = place(figure, left + k * (side + gap), i * (side + gap), side, side)
            axes.imshow(image, cmap="gray", vmin=0, vmax=1)
            axes.set_axis_off()
            if k == 0:
                axes.text(-0.1, 0.5, name, ha="right", va="center", transform=axes.transAxes)
    save(figure, path)


def reconstructed(results: pd.DataFrame) -> Iterator[str]:
    rows = []
    for data, part in results.groupby("data", sort=False):
        of = dict(list(part.groupby("autoencoder", sort=False)))
        for name, runs in of.items():
            p = ["", ""]
            if name == "CAE":
                p = [f"{better(of['GAE'][m], runs[m]):.4f}" for m in ("psnr", "ssim")]
            cells = [spread(runs["psnr"], 2), p[0], spread(runs["ssim"]), p[1]]
            rows.append([str(data), str(name), *cells])
    header = ["data", "autoencoder", "PSNR, dB", "p (GAE above)", "SSIM", "p (GAE above)"]
    yield table(header, rows)


# -- trees, clients ----------------------------------------------------------------------------


def trees(turns: int = 3) -> str:
    """Our gain-ratio tree beside scikit-learn's entropy tree, on labels of 6,000 images."""
    from sklearn.tree import DecisionTreeClassifier

    _, sheet = RawConfig.read(HERE / "small" / "skew.yaml").take("grid")
    rows = []
    for data in DATA[:2]:
        cell = sheet.changed({"data.name": data}, "trees")
        dataset, _, _ = prepare(cell.build(fedsim.Experiment))
        x = dataset.x[:6000].reshape(6000, -1).astype(np.float32)
        test = dataset.test_x.reshape(len(dataset.test_x), -1).astype(np.float32)
        y, test_y = dataset.y[:6000], dataset.test_y
        seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
        for _ in range(turns):
            started = time.perf_counter()
            ours = build_tree(x, y, 10)
            seconds["ours"].append(time.perf_counter() - started)
            theirs = DecisionTreeClassifier(
                criterion="entropy", min_samples_leaf=2, random_state=0
            )
            started = time.perf_counter()
            theirs.fit(x, y)
            seconds["theirs"].append(time.perf_counter() - started)
        for name, found in (
            ("gain ratio, ours", (fidelity(ours, x, y), fidelity(ours, test, test_y))),
            ("entropy, scikit-learn", (theirs.score(x, y), theirs.score(test, test_y))),
        ):
            mine = name.endswith("ours")
            size = (ours.depth, ours.leaves)
            if not mine:
                size = (theirs.get_depth(), theirs.get_n_leaves())
            took = np.median(seconds["ours" if mine else "theirs"])
            rows.append([data, name, f"{took:.2f}", *(f"{f:.3f}" for f in found), *map(str, size)])
    return table(["data", "tree", "s", "training", "test", "depth", "leaves"], rows)


def clients(out: Path) -> str:
    """Memory of 100 clients that keep a teacher each, on two client actors."""
    _, sheet = RawConfig.read(HERE / "small" / "skew.yaml").take("grid")
    changes: dict[str, Any] = {
        "data.name": "fashion_mnist",
        "partition": {
            **{"kind": "iid", "clients": 100},
            **{"labelled_fraction": 0.1, "train_fraction": 0.2},
        },
        "method": {"name": "xpfl", "teacher": TEACHER},
        "train.rounds": 12,
        "engine": {"kind": "ray", "actors": 2},
        "evaluate.every": 12,
    }
    experiment = sheet.changed(changes, "clients").build(fedsim.Experiment)
    assert isinstance(experiment.method, XPFL)
    rows = []

    def note(event: dict[str, Any] | str) -> None:
        if isinstance(event, dict):
            used = {**own_megabytes(), "stored": stored_megabytes()}
            cells = [f"{used[role]:.0f}" for role in ("driver", "actors", "stored")]
            rows.append([str(event["round"]), *cells])

    fedsim.run(experiment, out, note)
    size = experiment.method.teacher.build((1, 28, 28))
    kept = sum(p.numel() for p in size.parameters()) * 4 / 1e6
    header = ["round", "driver, MB", "both actors, MB", "object store, MB"]
    return f"{kept:.2f} MB a teacher\n\n" + table(header, rows)


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--reconstruction", action="store_true", help="autoencoders, no more")
    command.add_argument("--trees", action="store_true", help="time trees, and no more")
    command.add_argument("--clients", action="store_true", help="100 clients, and no more")
    arguments = command.parse_args()
    RESULTS.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    if arguments.reconstruction:
        found = reconstruction()
        found.to_csv(RESULTS / "reconstruction.csv", index=False, float_format="%.6g")
        print("\n".join(reconstructed(found)))
    elif arguments.trees:
        print(trees())
    elif arguments.clients:
        print(clients(arguments.out))
    else:
        made = grids(arguments, HERE, TABLES)
        for name in TABLES:  # in this order: `labels` reads what `skew` has written
            if name in made:
                results = collect(name, made[name])
                results.to_csv(RESULTS / f"{name}.csv", index=False, float_format="%.6g")
                print(f"\n## {name}\n", *TABLES[name](results), sep="\n")


if __name__ == "__main__":
    main()
