"""Run XPFL's grids and tabulate them: python run.py [NAME ...] [--out runs] [--done FOLDER ...]

NAMEs are files of small/ without their ending; with --done, finished grids are tabulated instead
(of several of one name the later runs count). Needs Fashion-MNIST and CIFAR-10 below $FEDSIM_DATA.
Writes a row for each run to results/NAME.csv, one for each client that was explained or tested to
results/NAME-clients.csv, and prints the tables of the README. Further, each by itself:
--reconstruction compares autoencoders, --trees ours with scikit-learn's (both need MNIST as well),
--clients shows the memory of 100 clients that keep teachers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from multiprocessing import Pool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

import fedsim
from fedsim import Grid
from fedsim.analysis.attacks.inversion import fidelity as closeness
from fedsim.config.file import RawConfig
from fedsim.explain.pictures.canvas import new_figure, place, save
from fedsim.explain.tree import build_tree, fidelity
from fedsim.launch.prepare import prepare
from fedsim.methods.xpfl import XPFL, Teacher
from fedsim.models.masked_autoencoder import (
    MaskedAutoencoder,
    patchify,
    unpatchify,
)
from fedsim.results.significance import paired

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.memory import own_megabytes, stored_megabytes
from convolutional import ConvolutionalAutoencoder
from tables import against, finished, grids, parser, spread, table, tested
from tuning import SEED

HERE = Path(__file__).parent
RESULTS = HERE / "results"
DATA = ("mnist", "fashion_mnist", "cifar10")
# The teacher in small/*.yaml.
TEACHER = {
    **{"width": 64, "depth": 4, "heads": 4},
    **{"decoder_width": 32, "decoder_depth": 2, "decoder_heads": 4, "batch_size": 32},
}


# -- grids -------------------------------------------------------------------------------------

LAST = (24, 32, 40)  # rounds whose mean accuracy is a run's score
FINE_TUNED = "FedAvg fine-tuned 0.1"


def collect(grids: list[Grid]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A row for each run; and one for each client that was explained or tested, and round."""
    rows, clients = [], []
    for cell, run in finished(grids):
        cell = {"data": run.experiment.data.name, **cell}
        scores = run.rounds.set_index("round")["accuracy"]
        found = {"accuracy": scores[list(LAST)].mean()}
        for mean in ("teacher_loss", "psi"):
            if mean in run.clients:
                by_round = run.clients.groupby("round")[mean].mean()
                found[mean], found[f"first_{mean}"] = by_round.iloc[-1], by_round.iloc[0]
        rows.append({**cell, **found, "result_hash": run.result_hash})
        for row in run.explanations.to_dict("records"):
            clients.append({**cell, "what": "explanation", **row})
        if "test_accuracy" in run.clients:
            own = ["round", "client", "test_accuracy", "global_accuracy"]
            tests = run.clients.dropna(subset="test_accuracy").reindex(columns=own)
            for row in tests[tests["round"] == tests["round"].max()].to_dict("records"):
                clients.append({**cell, "what": "own test", **row})
    return pd.DataFrame(rows), pd.DataFrame(clients)


# -- tables ------------------------------------------------------------------------------------


def compared(results: pd.DataFrame, ours: str) -> Iterator[str]:
    """Each method's accuracy, and what one of them is above it, by data set."""
    for data, part in results.groupby("data", sort=False):
        tests = against(part, ours)
        rows = [
            [str(method), spread(runs["accuracy"]), *tests.get(str(method), [""] * 3)]
            for method, runs in part.groupby("method", sort=False)
        ]
        header = ["method", "accuracy", f"{ours} above by", "p, Holm", "detectable"]
        yield f"\n{data}\n\n" + table(header, rows)


def room(results: pd.DataFrame) -> str:
    """What more labels and another method are worth, above FedAvg with a tenth of the labels."""
    rows = []
    for data, part in results.groupby("data", sort=False):
        of = part.pivot(index="seed", columns="method", values="accuracy")
        above = {m: paired(of[m], of["FedAvg 0.1"]) for m in ("FedAvg", "CL", "SemiFL 0.1")}
        rows += [[str(data), method, *cells] for method, cells in tested(above).items()]
    return table(["data", "method", "above FedAvg 0.1 by", "p, Holm", "detectable"], rows)


def labels(results: pd.DataFrame) -> Iterator[str]:
    yield room(results)
    # The two have no global model of their own.
    results = results[~results["method"].isin([FINE_TUNED, "alone 0.1"])]
    yield from compared(results, "XPFL 0.1")
    more = ["XPFL 0.2", "SemiFL 0.2", "FedAvg", "CL"]
    yield from compared(results[results["method"].isin(more)], "XPFL 0.2")
    shown = results[results["method"].str.startswith(("XPFL", "no teacher"))]
    yield "\n" + mixing(shown)


def mixing(results: pd.DataFrame) -> str:
    """ψ and teachers' loss L^U, means over clients."""
    columns = ("first_psi", "psi", "first_teacher_loss", "teacher_loss")
    rows = [
        [*map(str, key), *(spread(runs[c]) for c in columns)]
        for key, runs in results.groupby(["data", "method"], sort=False)
    ]
    header = ["data", "method", "ψ, round 1", "ψ, round 40", "L^U, round 1", "L^U, round 40"]
    return table(header, rows)


def of_labels(file: str, *methods: str) -> pd.DataFrame:
    """Rows of `labels`, to compare with."""
    found = pd.read_csv(RESULTS / f"{file}.csv")
    return found[found["method"].isin(methods)]


def released(results: pd.DataFrame) -> Iterator[str]:
    beside = of_labels("labels", "XPFL 0.1", "FedAvg 0.1", "no teacher 0.1")
    beside = beside[beside["data"] == "fashion_mnist"]
    together = pd.concat([beside, results], ignore_index=True)
    yield from compared(together, "XPFL 0.1")
    yield from compared(together, "FedAvg 0.1")
    small = results[results["method"].str.endswith("batches of 4")]
    yield from compared(small, "XPFL, batches of 4")


def explained(clients: pd.DataFrame) -> Iterator[str]:
    """Trees and t-SNE; means of a run's clients."""
    found = clients[clients["what"] == "explanation"]
    by_run = found.groupby(["data", "method", "round", "seed"], sort=False).mean(numeric_only=True)
    columns = ("fidelity", "held_out_fidelity", "held_out_majority", "depth", "leaves")
    columns += ("qox_tree", "qox_tsne")
    digits = {"depth": 0, "leaves": 0, "qox_tree": 4, "qox_tsne": 5}
    header = ["data", "method", "round"]
    rows, fused, falls = [], [], {}
    for key, part in by_run.groupby(["data", "method", "round"], sort=False):
        cells = [*map(str, key)]
        rows.append([*cells, *(spread(part[c], digits.get(c, 3)) for c in columns)])
        before, after = part["divergence_before"], part["divergence_after"]
        fused.append([*cells, spread(before), spread(after)])
        falls[" ".join(cells)] = paired(before, after)
    trees = ["fidelity", "held out", "one leaf", "depth", "leaves", "QoX tree", "QoX t-SNE"]
    yield table([*header, *trees], rows)
    fused = [[*row, *cells] for row, cells in zip(fused, tested(falls).values(), strict=True)]
    divergences = ["KL before fusion", "after", "falls by", "p, Holm", "detectable"]
    yield "\n" + table([*header, *divergences], fused)


def personal(clients: pd.DataFrame, ours: str) -> Iterator[str]:
    """Accuracy of clients' models on their own test images, beside that of their average.

    One method is compared with the others, and with fine-tuned averaging in `labels`.
    """
    tests = clients[clients["what"] == "own test"]
    if not (tests["method"] == FINE_TUNED).any():
        tests = pd.concat([tests, of_labels("labels-clients", FINE_TUNED)], ignore_index=True)
    scores = ["test_accuracy", "global_accuracy"]
    rows, gains = [], {}
    for key, part in tests.dropna(subset=scores).groupby(["data", "method"], sort=False):
        by_seed = part.groupby("seed")[scores].mean()
        gains[" ".join(key)] = paired(by_seed["test_accuracy"], by_seed["global_accuracy"])
        better = (part["test_accuracy"] > part["global_accuracy"]).mean()
        rows.append([*key, *(spread(by_seed[c]) for c in scores), f"{better:.0%}"])
    rows = [[*row, *cells] for row, cells in zip(rows, tested(gains).values(), strict=True)]
    header = ["data", "method", "own model", "average", "clients better off", "above by"]
    yield "\non clients' own test images, round 40\n"
    yield table([*header, "p, Holm", "detectable"], rows)
    by_run = tests.groupby(["data", "method", "seed"], sort=False)["test_accuracy"].mean()
    yield from compared(by_run.rename("accuracy").reset_index(), ours)


def fusion(results: pd.DataFrame) -> Iterator[str]:
    beside = of_labels("labels", "XPFL 0.1", "FedAvg 0.1")
    together = pd.concat([beside, results], ignore_index=True)
    yield from compared(together, "as described")
    yield from compared(together, "FedAvg 0.1")
    yield "\n" + mixing(results)


TABLES: dict[str, Callable[[pd.DataFrame], Iterator[str]]] = {
    "labels": labels,
    "skew": lambda results: compared(results, "XPFL"),
    "released": released,
    "fusion": fusion,
}

# Of grids with clients' own tests, the method that is compared with the others.
PERSONAL = {"labels": "XPFL 0.1", "fusion": "as described"}


# -- reconstruction ----------------------------------------------------------------------------

STEPS = 1500
SEEDS = range(5)  # of the comparison; the search has that of tuning.py
TESTED = 500  # images to choose settings on, and as many others to compare on
GAE, ALONE, CAE, SQUARED = "GAE", "GAE, masked patches alone", "CAE", "CAE, squared error"
# Variants and learning rates. Of the convolutional one's losses each had two rates at first, and
# got a third as the best was at an end.
CANDIDATES = {
    GAE: list(product([GAE], (0.0003, 0.001, 0.003, 0.01))),
    CAE: [*product([CAE], (0.0003, 0.001, 0.003)), *product([SQUARED], (0.001, 0.003, 0.01))],
}


class Images(NamedTuple):
    """Images to train on, normalised; others, pixels in [0, 1]; and how they are normalised."""

    x: Tensor
    pixels: Tensor
    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, data: str, seed: int) -> Images:
        _, sheet = RawConfig.read(HERE / "small" / "skew.yaml").take("grid")
        settings = {
            "seed": seed,
            "data.name": data,
            "partition.train_fraction": 1 if data == "cifar10" else 4000 / 60_000,
            "partition.test_fraction": 0,
        }
        cell = sheet.changed(settings, "reconstruction").build(fedsim.Experiment)
        dataset, splits, _ = prepare(cell)
        mean, std = (torch.tensor(v)[:, None, None] for v in (dataset.mean, dataset.std))
        used = np.sort(np.concatenate([splits.train.values, splits.unlabelled.values]))
        x = (torch.from_numpy(dataset.x[used]).float() / 255 - mean) / std
        return cls(x, torch.from_numpy(dataset.test_x[: 2 * TESTED]).float() / 255, mean, std)

    @torch.no_grad()
    def reconstructed(self, network: nn.Module, rows: slice) -> Tensor:
        """Pixels that a network makes of some of the images that it was not trained on."""
        found: Tensor = network((self.pixels[rows] - self.mean) / self.std)
        return (found * self.std + self.mean).clamp(0, 1)


def fit(network: nn.Module, loss: Callable[[Tensor], Tensor], x: Tensor, lr: float) -> None:
    """Adam with batches of 128, from torch's random state."""
    optimizer = torch.optim.Adam(network.parameters(), lr)
    network.train()
    step = 0
    while step < STEPS:
        for rows in torch.split(torch.randperm(len(x)), 128)[: STEPS - step]:
            optimizer.zero_grad()
            torch.autograd.backward(loss(x[rows]).mean())
            optimizer.step()
            step += 1
    network.eval()


def autoencoder(variant: str, images: Images, seed: int, lr: float) -> nn.Module:
    """Train one: the masked one with the teachers' loss or on masked patches alone, or the CAE.

    The released code trains the convolutional one on the absolute error; PSNR is of the squared.
    """
    torch.manual_seed(seed)
    x, shape, teacher = images.x, tuple(images.x.shape[1:]), Teacher(**TEACHER)
    if variant in (GAE, ALONE):
        masked = teacher.build(shape)
        losses = {
            GAE: lambda batch: teacher.loss(masked, batch),
            ALONE: lambda batch: masked.loss(batch, teacher.mask_ratio),
        }
        fit(masked, losses[variant], x, lr)
        return masked
    low, high = -images.mean / images.std, (1 - images.mean) / images.std
    network = ConvolutionalAutoencoder(shape, low, high)
    squared = variant == SQUARED
    fit(network, lambda b: (network(b) - b).square() if squared else network.loss(b), x, lr)
    return network


def candidate(data: str, variant: str, lr: float) -> dict[str, Any]:
    """PSNR with one setting, on the images to choose settings on."""
    torch.set_num_threads(1)
    images = Images.of(data, SEED)
    network = autoencoder(variant, images, SEED, lr)
    rows = slice(TESTED)
    psnr = closeness(images.pixels[rows], images.reconstructed(network, rows)).psnr
    return {"data": data, "variant": variant, "lr": lr, "seed": SEED, "validation_psnr": psnr}


def chosen(search: pd.DataFrame, data: str) -> dict[str, tuple[str, float]]:
    """The best variant and learning rate of each autoencoder."""
    found = {}
    for name, settings in CANDIDATES.items():
        own = search[(search["data"] == data) & search["variant"].isin([v for v, _ in settings])]
        best = own.loc[own["validation_psnr"].idxmax()]
        found[name] = (str(best["variant"]), float(best["lr"]))
    return found


def scores(data: str, seed: int, settings: dict[str, tuple[str, float]]) -> list[dict[str, Any]]:
    """PSNR and SSIM of test images by each autoencoder; seed 0 draws some of the images."""
    torch.set_num_threads(1)
    images = Images.of(data, seed)
    if seed == 0:
        settings = settings | {ALONE: (ALONE, settings[GAE][1])}
    rows, tested = [], slice(TESTED, None)
    drawn: dict[str, Tensor] = {"original": images.pixels[tested][:8]}
    for name, (variant, lr) in settings.items():
        network = autoencoder(variant, images, seed, lr)
        found = images.reconstructed(network, tested)
        close = closeness(images.pixels[tested], found)
        row = {"data": data, "seed": seed, "autoencoder": name, "variant": variant, "lr": lr}
        rows.append(row | {"psnr": close.psnr, "ssim": close.ssim})
        if name == GAE and isinstance(network, MaskedAutoencoder):
            hidden = masked_and_filled(network, images, tested)
            drawn |= dict(zip(("masked", "GAE, of the masked"), hidden, strict=True))
        drawn[name] = found[:8]
    if seed == 0:
        draw(drawn, RESULTS / f"reconstruction-{data}.png")
    return rows


def reconstruction() -> tuple[pd.DataFrame, pd.DataFrame]:
    """The search for settings, and the comparison; as many runs at a time as there are cores."""
    with Pool() as pool:
        tried = [(data, *each) for data in DATA for own in CANDIDATES.values() for each in own]
        search = pd.DataFrame(pool.starmap(candidate, tried, chunksize=1))
        compared = [(data, seed, chosen(search, data)) for data, seed in product(DATA, SEEDS)]
        made = pool.starmap(scores, compared, chunksize=1)
    return search, pd.DataFrame([row for rows in made for row in rows])


@torch.no_grad()
def masked_and_filled(
    network: MaskedAutoencoder, images: Images, rows: slice
) -> tuple[Tensor, Tensor]:
    """Eight images with masked patches at the mean, and with these as the network fills them."""
    torch.manual_seed(0)
    x = ((images.pixels[rows] - images.mean) / images.std)[:8]
    tokens, mask, restore = network.encode(x, Teacher(**TEACHER).mask_ratio)
    patches, side = patchify(x, network.patch), network.patch
    hidden = mask[..., None]
    made = torch.where(hidden, network.decode(tokens, restore), patches)
    blank = patches.masked_fill(hidden, 0)
    shown, filled = (
        (unpatchify(each, side, network.shape) * images.std + images.mean).clamp(0, 1)
        for each in (blank, made)
    )
    return shown, filled


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


def reconstruction_tables(search: pd.DataFrame, results: pd.DataFrame) -> Iterator[str]:
    rows = [
        [row["data"], row["variant"], str(row["lr"]), f"{row['validation_psnr']:.2f}"]
        for row in search.to_dict("records")
    ]
    yield table(["data", "variant", "lr", "validation PSNR, dB"], rows) + "\n"
    rows = []
    for key, runs in results.groupby(["data", "autoencoder", "variant", "lr"], sort=False):
        rows.append([*map(str, key), spread(runs["psnr"], 2), spread(runs["ssim"])])
    yield table(["data", "autoencoder", "variant", "lr", "PSNR, dB", "SSIM"], rows) + "\n"
    for score in ("psnr", "ssim"):
        tests = {}
        for data, runs in results.groupby("data", sort=False):
            of = runs.pivot(index="seed", columns="autoencoder", values=score)
            tests[str(data)] = paired(of[GAE], of[CAE])
        header = ["data", f"GAE's {score.upper()} above by", "p, Holm", "detectable"]
        yield table(header, [[data, *cells] for data, cells in tested(tests).items()]) + "\n"


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
        search, found = reconstruction()
        search.to_csv(RESULTS / "reconstruction-search.csv", index=False, float_format="%.6g")
        found.to_csv(RESULTS / "reconstruction.csv", index=False, float_format="%.6g")
        print(*reconstruction_tables(search, found), sep="\n")
    elif arguments.trees:
        print(trees())
    elif arguments.clients:
        print(clients(arguments.out))
    else:
        made = grids(arguments, HERE, TABLES)
        for name in TABLES:  # in this order: others read what `labels` has written
            if name in made:
                results, by_client = collect(made[name])
                results.to_csv(RESULTS / f"{name}.csv", index=False, float_format="%.6g")
                print(f"\n## {name}\n", *TABLES[name](results), sep="\n")
                if not by_client.empty:
                    path = RESULTS / f"{name}-clients.csv"
                    by_client.to_csv(path, index=False, float_format="%.6g")
                    print(f"\n## {name}, clients\n", *explained(by_client), sep="\n")
                    if name in PERSONAL:
                        print(*personal(by_client, PERSONAL[name]), sep="\n")


if __name__ == "__main__":
    main()
