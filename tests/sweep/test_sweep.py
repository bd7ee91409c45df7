"""What a sweep's section may not say."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import Say
from fedsim import Experiment
from fedsim.errors import ExperimentError

# Seven lines, to which each test adds the section of a sweep.
FILE = """\
name: small
data: {name: synthetic, samples: 60, test_samples: 10, shape: [4], classes: 3}
partition: {kind: iid, clients: 4}
model: {name: mlp, hidden: [4]}
method: {name: fedprox}
train: {rounds: 4}
engine: {kind: local}
"""

SPACE = "search:\n  space: {method.mu: {type: float, low: 0.1, high: 1}}\n"
BEST = "\n  objectives: {accuracy: max}"

GRIDS = [
    ("", "small.yaml: has no grid section; run it with: fedsim run small.yaml"),
    ("grid: {seeds: [1]}", "small.yaml:8: grid.axes: missing"),
    ("grid: {axes: {}}", "small.yaml:8: grid.axes: must not be empty"),
    ("grid: {axis: {}}", "small.yaml:8: grid.axis: unknown key; did you mean 'axes'?"),
    (
        "grid: {axes: {train.batch_size: [8]}, seeds: [1, 1]}",
        "small.yaml:8: grid.seeds: names a seed twice",
    ),
    (
        "grid: {axes: {seed: [1, 2]}}",
        "small.yaml:8: grid.axes.seed: is not the name of an axis; give grid.seeds",
    ),
    (
        "grid: {axes: {train.batch_size: [8, 8]}}",
        "small.yaml:8: grid.axes.train.batch_size: has a value twice",
    ),
    (
        "grid: {axes: {train.batch_size: []}}",
        "small.yaml:8: grid.axes.train.batch_size: has no values",
    ),
    (
        "grid: {axes: {train.batch_size: [8]}, baseline: {train.batchsize: 8}}",
        "small.yaml:8: grid.baseline: 'train.batchsize' is not an axis; did you mean "
        "'train.batch_size'?",
    ),
    (
        "grid: {axes: {train.batch_size: [8, 16]}, baseline: {train.batch_size: 9}}",
        "small.yaml:8: grid.baseline: train.batch_size has no value 9; known: 16, 8",
    ),
    (
        "grid: {axes: {train.batch_size: [8]}, exclude: [{train.batch_size: 8}]}",
        "small.yaml:8: grid.exclude: leaves no cell",
    ),
    (
        "grid: {axes: {train.batchsize: [8, 16]}}",
        "small.yaml:8: cell train.batchsize=8: train.batchsize: unknown key; did you mean "
        "'batch_size'?",
    ),
    *(
        (
            "grid:\n  axes:\n    train.batchsize: [8, 16]\n  " + named,
            "small.yaml:10: cell train.batchsize=8: train.batchsize: unknown key; did you mean "
            "'batch_size'?",
        )
        for named in ("exclude: [{train.batch_size: 8}]", "baseline: {train.batch_size: 8}")
    ),
    (
        "grid:\n  axes: {method.mu: [-1, 0.1, 1]}\n  exclude: [{mu: -1}]",
        "small.yaml:10: grid.exclude: 'mu' is not an axis; known: method.mu",
    ),
    (
        "grid: {axes: {method: {a: {method.name: fedavg}, b: {method.name: fedprx}}}}",
        "small.yaml:8: cell b: method.name: unknown method 'fedprx'; did you mean 'fedprox'?",
    ),
    (
        "grid: {axes: {model: {a: {model.name: cnn}}}}",
        "small.yaml:4: model.hidden: is not a key of cnn; to replace the whole section: "
        "'model: {name: cnn}'",
    ),
    (
        "grid: {axes: {partition.clients: [4, 100]}}",
        "partition.clients=100",
    ),
    ("grid: {axes: {train.batch_size: [8]}, concurrent: 0}", "grid.concurrent: "),
    (
        "grid: {axes: {r2: {a: {train.batch_size: 8}}}}",
        "small.yaml:8: grid.axes.r2: is not the name of an axis; choose another name",
    ),
    (
        "grid: {axes: {method.mu: [0.1, 1], method: {b: {method: {name: fedprox}}}}}",
        "small.yaml:8: grid.axes: both 'method.mu' and 'method' set method.mu",
    ),
    (
        "grid: {axes: {method: {b: {seed: 1, method.name: fedprox}}}}",
        "small.yaml:8: grid.axes.method: sets seed; give grid.seeds",
    ),
]
SEARCHES = [
    ("", "small.yaml: has no search section; run it with: fedsim run small.yaml"),
    ("search:\n  objectives: {accuracy: max}", "small.yaml:8: search.space: missing"),
    (
        SPACE + "  objectives: {accuracy: up}",
        "search.objectives.accuracy: must be 'max' or 'min'",
    ),
    (
        SPACE + "  objectives: {accuracy: max, total_bytes: min}\n  asha: {grace: 1}",
        "small.yaml:8: search.asha: stops trials by one objective, and there are 2 (a trial "
        "that is behind in one may be ahead in another); leave out search.asha, or all "
        "objectives but one",
    ),
    (
        SPACE + "  objectives: {accuracy: max}\n  asha: {grace: 4}",
        "small.yaml:11: search.asha.grace=4: every trial would run to its end; train.rounds is 4",
    ),
    (
        "search:\n  space: {train.rounds: [4, 8]}" + BEST + "\n  asha: {grace: 1}",
        "small.yaml:11: search.asha: compares trials at the same round, and search.space has "
        "train.rounds; leave out one of them",
    ),
    (
        SPACE + "  objectives: {worst_client_accuracy: max}",
        "small.yaml:10: search.objectives.worst_client_accuracy: needs evaluate.clients=true",
    ),
    (
        SPACE + "  objectives: {acuracy: max}",
        "small.yaml:10: search.objectives.acuracy: is not recorded; did you mean 'accuracy'? An "
        "objective can be accuracy, loss, train_loss, bytes_up, bytes_down, total_bytes_up, "
        "total_bytes_down, total_bytes, or a column of the method",
    ),
    (
        SPACE + "  objectives: {client_r2: max}",
        "small.yaml:10: search.objectives.client_r2: needs evaluate.clients=true",
    ),
    (
        "search:\n  space: {method.nu: {type: float, low: 0.1, high: 1}}" + BEST,
        "small.yaml:9: with method.nu=0.1: method.nu: unknown key; known: mu, name",
    ),
    (
        "search:\n  space: {method.mu: {type: float, low: -1, high: 1}}" + BEST,
        "small.yaml:9: with method.mu=-1.0: method.mu: ",
    ),
    (
        "search:\n  space: {method.mu: {type: float, low: 1, high: 0.1}}" + BEST,
        "small.yaml:8: search.space.method.mu: `low <= high` must hold",
    ),
    (
        "search:\n  space: {method.mu: {type: flaot, low: 0.1, high: 1}}" + BEST,
        "unknown range 'flaot'; did you mean 'float'?",
    ),
    (
        "search:\n  space: {engine.actors: [1, 2]}" + BEST,
        "engine.actors: the engine changes only the last bits of a result, so there is nothing",
    ),
    (
        SPACE + "  objectives: {accuracy: max}\n  sampler: tpee",
        "search.sampler: must be 'tpe', 'nsga2', 'gp' or 'random', not 'tpee'",
    ),
    (
        "search:\n  space: {partition.clients: [4, 100]}" + BEST,
        "partition.clients=100: ",
    ),
]


@pytest.mark.parametrize(
    ("command", "section", "message"),
    [*(("grid", *given) for given in GRIDS), *(("tune", *given) for given in SEARCHES)],
)
def test_bad_input_is_one_message_and_leaves_nothing_behind(
    command: str, section: str, message: str, tmp_path: Path, say: Say
) -> None:
    (tmp_path / "small.yaml").write_text(FILE + section)
    code, _, said = say(command, "small.yaml")
    assert code == 2
    assert message in said
    assert said.count("\n") <= 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.yaml"]


def test_a_grid_file_is_no_single_run(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(FILE + "grid: {axes: {train.batch_size: [8]}}")
    with pytest.raises(
        ExperimentError, match=r":8: this file has a grid of experiments; run it with: fedsim grid"
    ):
        Experiment.load(path)
