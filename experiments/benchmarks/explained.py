"""What explanations cost: python explained.py [--turns 3]

The quickstart in one process, without explanations and with each explainer in turn (but for
the slow `sage`), by the defaults of `explain`. Prints the median processor time of a run, and its
ratio to that of a run without explanations.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import fedsim
from fedsim import Experiment
from fedsim.federation import limit_threads

QUICKSTART = Path(__file__).parents[1] / "quickstart.yaml"
EXPLAINERS = (
    *("random", "gradient", "gradient_x_input", "gradcam", "lrp", "occlusion"),
    *("integrated_gradients", "smoothgrad", "gradient_shap", "deep_shap", "kernel_shap"),
)


def seconds(overrides: list[str], folder: str) -> float:
    """Processor time of a run."""
    experiment = Experiment.load(QUICKSTART, ["engine.kind=local", *overrides])
    begun = time.process_time()
    fedsim.run(experiment, folder, progress=False)
    return time.process_time() - begun


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--turns", type=int, default=3)
    turns = made.parse_args().turns
    limit_threads(1)
    wanted = {"none": [], **{name: [f"explain.explainers=[{name}]"] for name in EXPLAINERS}}
    found: dict[str, list[float]] = {name: [] for name in wanted}
    with tempfile.TemporaryDirectory() as folder:
        for overrides in wanted.values():  # what is imported and built once
            seconds([*overrides, "train.rounds=1"], folder)
        for _ in range(turns):
            for name, overrides in wanted.items():
                found[name].append(seconds(overrides, folder))
    plain = statistics.median(found["none"])
    print("| explained by | processor time, s | of none |\n| --- | --- | --- |")
    for name, times in found.items():
        median = statistics.median(times)
        print(f"| {name} | {median:.2f} | {median / plain:.2f} |")


if __name__ == "__main__":
    main()
