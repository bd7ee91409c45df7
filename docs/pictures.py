"""Makes the pictures of the gallery, the front page and the guides, from the runs they show.

python docs/pictures.py [NAME ...]

NAMEs are functions here, such as front; all of them by default. TREC-6 and the heart disease data
lie below $FEDSIM_DATA.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
import urllib.request
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
from fedsim.explain.explainers.gradients import IntegratedGradients  # noqa: E402
from fedsim.explain.groups import by_feature  # noqa: E402
from fedsim.explain.inputs import Inputs  # noqa: E402
from fedsim.explain.pictures.canvas import AGAINST, FOR  # noqa: E402

PICTURE = re.compile(r"!\[[^\]]*\]\((pictures/[\w.-]+)\)")
WIDEST = 1000  # pixels
# Which file a picture is, where a command draws several; otherwise the last one drawn.
FILES = {"shared": "shared_images*.png", "rules": "rules-*.png"}
HOSPITALS = {"hungarian": "Budapest", "va": "Long Beach"}  # of heart.yaml
# What its columns mean.
MEANINGS = {
    "ca": "coloured vessels",
    "cp": "chest pain",
    "exang": "angina when exercising",
    "fbs": "blood sugar, fasting",
    "oldpeak": "ST depression",
    "restecg": "ECG at rest",
    "slope": "slope of ST",
    "thal": "thallium scan",
    "thalach": "highest heart rate",
    "trestbps": "blood pressure",
}


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


def keep(drawn: Path, path: Path, colours: int | None = 128) -> None:
    """A copy that is small enough for a repository: narrower, and of few colours."""
    image = Image.open(drawn).convert("RGB")
    if image.width > WIDEST:
        image = image.resize((WIDEST, round(image.height * WIDEST / image.width)), Image.LANCZOS)
    path.parent.mkdir(exist_ok=True)
    (image.quantize(colours) if colours else image).save(path, optimize=True)
    print(f"{path.relative_to(HERE.parent)}: {path.stat().st_size / 1000:.0f} kB")


def front(folder: Path) -> None:
    """What the models of four hospitals say of one patient, and why.

    The patient is the first one of the test set of whom the hospitals' own models (Ditto) are
    divided. Relevances are for "ill", whatever a model says.
    """
    experiment = fedsim.Experiment.load(
        HERE.parent / "experiments" / "heart_disease" / "heart.yaml",
        ["method={name: ditto, lam: 0.5}", "explain=null"],
    )
    run = fedsim.run(experiment, folder)
    models = ModelSnapshot.of_clients(run, range(4), run.last_round, of="personal")
    data, names = models[0].dataset, run.manifest["client_names"]
    x = torch.as_tensor(data.test_x)
    with torch.no_grad():
        chances = np.stack([each.network()(x).softmax(dim=1)[:, 1].numpy() for each in models])
    said = chances > 0.5
    row = int(np.flatnonzero(said.sum(axis=0) == 2)[0])
    explainer = IntegratedGradients(target="centred")
    found = [
        explainer.relevance(each.network(), x[[row]], torch.ones(1), np.random.default_rng(0))
        for each in models
    ]
    relevance = np.stack([by_feature(each, data.parts)[0].numpy() for each in found])
    order = np.argsort(np.abs(relevance).max(axis=0))[-7:]
    # Two by two, so that it can be read on a phone.
    figure, panels = plt.subplots(
        *(2, 2), figsize=(5.2, 5.2), sharey=True, sharex=True, layout="constrained"
    )
    about = zip(panels.flat, names, relevance, chances[:, row], strict=True)
    for panel, name, own, chance in about:
        colours = np.where(own[order] > 0, FOR, AGAINST)
        panel.barh(range(len(order)), own[order], color=colours)
        panel.axvline(0, color="black", linewidth=0.8)
        verdict = f"ill ({chance:.0%})" if chance > 0.5 else f"healthy ({1 - chance:.0%})"
        place = HOSPITALS.get(name, name.capitalize())
        panel.set_title(f"{place}\nsays {verdict}", fontsize=11)
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.tick_params(left=False)
    told = [one.partition(" = ") for one in Inputs.of_rows(data, [row]).shown(data, 0)]
    values = [f"{MEANINGS.get(column, column)}: {value}" for column, _, value in told]
    for panel in panels[:, 0]:
        panel.set_yticks(range(len(order)), [values[f] for f in order], fontsize=9)
    figure.supxlabel("← speaks for healthy   relevance   speaks for ill →", fontsize=10)
    truth = data.classes[data.test_y[row]]
    figure.suptitle(f"One patient ({truth}), the models of four hospitals", fontsize=12)
    figure.savefig(folder / "front.png", dpi=150)
    keep(folder / "front.png", HERE / "pictures" / "front.png")


def strip(folder: Path) -> None:
    """The strip of the guide to explanations."""
    page = (HERE / "guides" / "explain.md").read_text(encoding="utf-8")
    part = folder / "part.md"
    part.write_text(page[: page.index("(../pictures/strip.png)")], encoding="utf-8")
    run_page(part, folder)
    keep(next(folder.rglob("strip-*.png")), HERE / "pictures" / "strip.png")


def words(folder: Path) -> None:
    """The words that decide, of the guide to transformers: minutes of training."""
    run = fedsim.run(HERE.parent / "experiments" / "adapters" / "trec6.yaml", folder)
    rows = [0, 1, 5, 10, 20, 100]
    fedsim.explanations(run, "attn_lrp", row=rows).save(folder / "words.png")
    keep(folder / "words.png", HERE / "pictures" / "words.png")


def view(folder: Path) -> None:
    """The page of a run, of the guide to it."""
    run_page(HERE / "guides" / "view.md", folder)
    page = fedsim.view(folder / "runs" / "looked-at")
    (path,) = (folder / "runs" / "looked-at").iterdir()
    url = f"{page.url}at/{path.name}?round=6&against=2&client=1&client=2&row=20"
    while b"data-wait" in urllib.request.urlopen(url).read():
        time.sleep(0.2)
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--disable-background-networking", "--window-size=1280,1720"]
    subprocess.run([*command, f"--screenshot={folder / 'view.png'}", url], check=True)
    page.close()
    keep(folder / "view.png", HERE / "pictures" / "view.png", None)


if __name__ == "__main__":
    drawn = {each.__name__: each for each in (gallery, front, strip, words, view)}
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or drawn:
            drawn[name](Path(folder).resolve())
