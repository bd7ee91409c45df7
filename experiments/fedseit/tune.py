"""Tune FedSeIT, FedWeIT and their controls: python tune.py data.vectors=FILE [--out runs]

Each method gets ten trials at λ₂ = 1, those of `SPACES`, on tasks of TREC6, scored after the last
task on every eighth document of its training set, which is held out (TREC lies below
$FEDSIM_DATA). Writes results/tuning.csv and prints the best trial of each method; --done FIRST
SECOND: of both finished grids.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from fedsim.data.sources import files

sys.path.insert(0, str(Path(__file__).parents[1]))
from tuning import Space, tune

HERE = Path(__file__).parent
AXES = {
    "train.optimizer.lr": (0.0005, 0.001, 0.002, 0.004, 0.008),
    "method.lam1": (0.0001, 0.001),
}
SPACES: dict[str, Space] = {
    "FedWeIT": ({"method.name": "fedweit"}, AXES),
    "FedWeIT + dense": ({"method.name": "fedweit", "method.dense_layer": True}, AXES),
    "without others": ({"method.top_k": 0}, AXES),
    "FedSeIT": ({}, AXES),
    "DLS": ({"method.share_dense": True}, AXES),
}


def hold_out(folder: Path) -> None:
    """Write TREC's training set as a smaller one and a test set."""
    file = files.find(["train_5500.label"], "trec", None)
    lines = file.read_bytes().splitlines(keepends=True)
    folder.mkdir(exist_ok=True)
    (folder / "TREC_10.label").write_bytes(b"".join(lines[::8]))
    del lines[::8]
    (folder / file.name).write_bytes(b"".join(lines))


if __name__ == "__main__":
    held_out = Path(tempfile.gettempdir()) / "fedseit-tuning"
    hold_out(held_out)
    changes = {"name": "fedseit-tuning", "data.root": str(held_out), "evaluate.every": 15}
    tune(__doc__, HERE / "small" / "transfer.yaml", changes, SPACES, "accuracy")
