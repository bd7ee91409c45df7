"""Makes the pictures of the gallery and of the front page, from the runs that the page shows.

python docs/pictures.py
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from PIL import Image

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests")]

from snippets import run_page  # noqa: E402

import fedsim  # noqa: E402
from fedsim.analysis.replay import ModelSnapshot  # noqa: E402
from fedsim.data.labels import label_table  # noqa: E402
from fedsim.explain.explainers.attribution import IntegratedGradients  # noqa: E402
from fedsim.explain.inputs import Inputs  # noqa: E402
from fedsim.launch.prepare import prepare  # noqa: E402

PICTURE = re.compile(r"!\[[^\]]*\]\((pictures/[\w.-]+)\)")
WIDEST = 1000  # pixels
# Which file a picture is, where a command draws several; otherwise the last one drawn.
FILES = {"shared": "shared_images*.png"}


def gallery(folder: Path) -> None:
    """Run the gallery up to each of its pictures, and keep the last one drawn by then."""
    page = (HERE / "gallery.md").read_text(encoding="utf-8")
    done = 0
    for found in PICTURE.finditer(page):
        part = folder / "part.md"
        part.write_text(page[done : found.start()], encoding="utf-8")
        run_page(part, folder)
        done = found.end()
        pattern = FILES.get(Path(found[1]).stem, "*.png")
        drawn = max(folder.rglob(pattern), key=lambda path: path.stat().st_mtime_ns)
        keep(drawn, HERE / found[1])


def keep(drawn: Path, path: Path) -> None:
    """A copy that is small enough for a repository: narrower, and of 128 colours."""
    image = Image.open(drawn).convert("RGB")
    if image.width > WIDEST:
        image = image.resize((WIDEST, round(image.height * WIDEST / image.width)), Image.LANCZOS)
    path.parent.mkdir(exist_ok=True)
    image.quantize(128).save(path, optimize=True)
    print(f"{path.relative_to(HERE.parent)}: {path.stat().st_size / 1000:.0f} kB")


def front(folder: Path) -> None:
    """Who holds which labels, how methods compare, and what models look at."""
    base = fedsim.Experiment.load(
        HERE.parent / "experiments" / "quickstart.yaml",
        ["engine.kind=local", "partition.alpha=0.2", "train.participation=0.5"],
    )
    figure, (labels, curves, image, *maps) = plt.subplots(
        *(1, 6),
        figsize=(10, 2.6),
        width_ratios=[1.4, 1.8, 0.8, 0.8, 0.8, 0.8],
        layout="constrained",
    )
    dataset, splits, _ = prepare(base)
    counts = label_table(dataset, splits).T
    k, c = np.meshgrid(np.arange(counts.shape[1]), np.arange(counts.shape[0]))
    labels.scatter(k, c, s=counts * 1.1, color="#3f51b5", alpha=0.7, linewidths=0)
    labels.set(xlabel="client", ylabel="label", title="Who holds which labels", yticks=range(10))
    runs = {}
    for name, method in {
        "FedAvg": {"name": "fedavg"},
        "FedDyn": {"name": "feddyn", "alpha": 0.1},
        "SCAFFOLD": {"name": "scaffold"},
        "Local": {"name": "local"},
    }.items():
        one = fedsim.Experiment.from_dict({**base.model_dump(mode="json"), "method": method})
        runs[name] = fedsim.run(one, folder)
        curves.plot(runs[name].rounds["round"], runs[name].rounds["accuracy"], label=name)
    curves.set(xlabel="round", ylabel="accuracy", title="Four methods", ylim=(0, 1))
    curves.legend(frameon=False, fontsize=8)
    run = runs["FedAvg"]
    cohort = run.clients[run.clients["round"] == run.last_round]["client"]
    snapshots, row = instructive(
        ModelSnapshot.of_clients(run, sorted(cohort), run.last_round), ModelSnapshot.of(run)
    )
    truth = dataset.classes[dataset.test_y[row]]
    image.imshow(dataset.test_x[row, 0], cmap="gray_r")
    image.set_title(f"What decides:\na {truth}", fontsize=10)
    for axes, snapshot in zip(maps, snapshots, strict=True):
        inputs = Inputs.of_rows(snapshot.dataset, [row])
        found = snapshot.explain(IntegratedGradients(), inputs)
        most = np.abs(found.relevance).max()
        axes.imshow(found.relevance[0], cmap="RdBu_r", vmin=-most, vmax=most)
        whose = "global model" if snapshot.client is None else f"client {snapshot.client}"
        (said,) = found.decisions
        verdict = "right" if said == truth else "wrong"
        axes.set_title(f"{whose}\nsays {said}: {verdict}", fontsize=10)
    for axes in (image, *maps):
        axes.set_xticks([])
        axes.set_yticks([])
    figure.savefig(folder / "front.png", dpi=130)
    keep(folder / "front.png", HERE / "pictures" / "front.png")


def instructive(
    clients: list[ModelSnapshot], last: ModelSnapshot
) -> tuple[list[ModelSnapshot], int]:
    """A client that is wrong about a row of the test set, one that is right, and the last model.

    The last model is right about the row, too.
    """
    x, y = torch.as_tensor(last.dataset.test_x), last.dataset.test_y
    right = [each.network()(x).argmax(dim=1).numpy() == y for each in clients]
    known = last.network()(x).argmax(dim=1).numpy() == y
    row = int(np.flatnonzero(known & np.any(right, axis=0) & ~np.all(right, axis=0))[0])
    told = [bool(own[row]) for own in right]
    return [clients[told.index(False)], clients[told.index(True)], last], row


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        gallery(Path(folder).resolve())
        front(Path(folder).resolve())
