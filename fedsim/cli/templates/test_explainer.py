from __future__ import annotations

from pathlib import Path

from fedsim import Experiment, run

FILE = Path(__file__).with_name("template.yaml")


def test_it_explains_better_than_the_plain_gradient(tmp_path: Path) -> None:
    experiment = Experiment.load(FILE, ["engine.kind=local"])
    last = run(experiment, tmp_path).rounds.iloc[-1]
    # The curve falls fast if the pixels of most relevance are removed first.
    assert last["template:Template/deletion"] < last["gradient/deletion"]
