"""Bad input is one message and exit code 2, and leaves nothing behind."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import re
import shutil
import struct
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from networks import regularised

from experiments import change_manifest, small_experiment
from fedsim import Run, load, run
from fedsim.cli import main
from fedsim.cluster.placement import Node, actors_on, plan_actors
from fedsim.errors import ClusterError, ExperimentError
from fedsim.federation import EngineSettings
from fedsim.launch.prepare import prepare
from fedsim.methods.fedavg import FedAvg
from fedsim.results.manifest import NAMES

EXPERIMENT = """\
name: small
data: {name: synthetic, samples: 60, test_samples: 10, shape: [4], classes: 3}
partition: {kind: iid, clients: 4}
model: {name: mlp, hidden: [4]}
method: {name: fedavg}
train: {rounds: 1}
engine: {kind: local}
"""

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory with one experiment, and no data anywhere else."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("FEDSIM_DATA", str(tmp_path / "data"))
    Path("small.yaml").write_text(EXPERIMENT)


@pytest.fixture
def fedsim(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run the command line in this process: exit code, stdout, stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedsim", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return ended.value.code, shown.out, shown.err  # type: ignore[return-value]

    return call


@pytest.fixture
def refused(fedsim: Call) -> Callable[..., str]:
    """Run the command line, see it refuse and touch nothing; its message."""

    def call(*arguments: str) -> str:
        before = everything()
        code, out, err = fedsim(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert "Traceback" not in err
        assert err.count("\n") <= 8
        assert everything() == before
        return err.removeprefix("error: ").rstrip("\n")

    return call


@pytest.fixture
def module(tmp_path: Path) -> Callable[[str], str]:
    """Write a package of the user's own; the name of its module."""

    def write(source: str) -> str:
        package = tmp_path / f"own_{tmp_path.name}"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "code.py").write_text(source)
        importlib.invalidate_caches()
        return f"{package.name}.code"

    return write


def everything() -> dict[str, bytes | None]:
    """All files and folders below the working directory."""
    return {str(p): p.read_bytes() if p.is_file() else None for p in Path().rglob("*")}


def the_run() -> Run:
    (path,) = Path("runs").glob("*/*")
    return load(path)


# the experiment file


def write_experiment(line: int, text: str) -> None:
    """Replace a line (from 1 on) of the experiment."""
    lines = EXPERIMENT.splitlines()
    lines[line - 1] = text
    Path("small.yaml").write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("line", "text", "message"),
    [
        (6, "trian: {rounds: 1}", "small.yaml:6: trian: unknown key; did you mean 'train'?"),
        (
            6,
            "train:\n  rounds: 1\n  batchsize: 5",
            "small.yaml:8: train.batchsize: unknown key; did you mean 'batch_size'?",
        ),
        (
            6,
            "train: {optimizer: {learning_rate: 1}}",
            "small.yaml:6: train.optimizer.learning_rate: unknown key; known: betas, lr, ",
        ),
        (5, "method: {name: fedvag}", "small.yaml:5: method.name: unknown method 'fedvag'; did"),
        (5, "method: {mu: 1}", "small.yaml:5: method.name: missing; known: afl, apfl, "),
        (
            5,
            "method: fedavg",
            "small.yaml:5: method: must be a section of keys; write {name: fedavg}",
        ),
        (2, "data: {name: digit}", "small.yaml:2: data.name: unknown data set 'digit'; did you"),
        (3, "partition: {kind: idd, clients: 4}", "small.yaml:3: partition.kind: unknown partiti"),
        (3, "partition: {kind: iid}", "small.yaml:3: partition.clients: missing"),
        (4, "model: {name: mpl}", "small.yaml:4: model.name: unknown model 'mpl'; did you mean"),
        (4, "", "small.yaml: model: missing"),
        (6, "train: {rounds: few}", "small.yaml:6: train.rounds: must be a whole number, not 'f"),
        (6, "train: {rounds: 1.5}", "small.yaml:6: train.rounds: must be a whole number, not 1."),
        (6, "train: {rounds: [1]}", "small.yaml:6: train.rounds: must be a whole number"),
        (6, "train: {rounds: true}", "small.yaml:6: train.rounds: must be a whole number"),
        (6, "train: {optimizer: {lr: true}}", "small.yaml:6: train.optimizer.lr: must be a num"),
        (6, "evaluate: {clients: maybe}", "small.yaml:6: evaluate.clients: must be true or fal"),
        (6, "train: {rounds: 0}", "small.yaml:6: train.rounds: must be greater than or equal to"),
        (6, "train: {participation: 1.5}", "train.participation: must be less than or equal to "),
        (6, "train: {optimizer: {lr: .inf}}", "train.optimizer.lr: must be a finite number, not"),
        (6, "train: {optimizer: {lr: .nan}}", "train.optimizer.lr: must be a finite number, not"),
        (6, "train: {optimizer: {name: rmsprop}}", "must be 'sgd', 'adam' or 'adamw', not 'rmsp"),
        (6, "train: {optimizer: {nesterov: true}}", "optimizer: nesterov needs momentum >"),
        (
            7,
            "engine: {actors: lots}",
            "small.yaml:7: engine.actors: must be a whole number or 'au",
        ),
        (
            7,
            "engine: {clients_per_step: many}",
            "small.yaml:7: engine.clients_per_step: must be a whole number or 'auto', not 'many'",
        ),
        (7, "engine: {clients_per_step: 0}", "engine.clients_per_step: must be greater than or"),
        (6, "train: {lr_decay: 1.1}", "train.lr_decay: must be less than or equal to 1, not 1.1"),
        (6, "train: {clip_norm: 0}", "train.clip_norm: must be greater than 0, not 0"),
        (5, "method: {name: fedsam, variant: asma}", "method.variant: must be 'sam' or 'asam', "),
        (
            3,
            "partition: {kind: file, path: a.json, server_fraction: 0.1}",
            "partition: a file assigns all examples; server_fraction must be 0 and train_fraction "
            "1",
        ),
        (4, "model: {name: mlp, hidden: [4, 0]}", "small.yaml:4: model.hidden.1: must be greater"),
        (1, "name: a/b", "small.yaml:1: name: "),
        (1, f"name: {'a' * 300}", "small.yaml:1: name: String should have at most 100 characters"),
        (1, "name: ${nothing}", "small.yaml:"),
    ],
)
def test_what_does_not_fit_the_schema(
    refused: Callable[..., str], line: int, text: str, message: str
) -> None:
    write_experiment(line, text)
    assert message in refused("run", "small.yaml")


def test_two_mistakes_are_two_lines(refused: Callable[..., str]) -> None:
    write_experiment(6, "train: {rounds: 0, batch_size: 0}")
    lines = refused("run", "small.yaml").splitlines()
    assert [line.split(": ")[1] for line in lines] == ["train.rounds", "train.batch_size"]


def test_the_line_number_is_shown_as_it_is(refused: Callable[..., str]) -> None:
    """Rich reads ":100:" as the name of a pictogram."""
    write_experiment(7, "\n" * 93 + "engin: {kind: local}")
    assert refused("run", "small.yaml").startswith("small.yaml:100: engin: unknown key")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"data: [", "not YAML: "),
        (b"- data\n- model\n", "must be a mapping of sections, not a list or a word"),
        (b"data: 1\ndata: 2\n", "not YAML: "),
        (b"\xff\xfe\x00", "cannot be read: "),
        (b"", "data: missing"),
    ],
)
def test_a_file_that_is_no_experiment(
    refused: Callable[..., str], content: bytes, message: str
) -> None:
    Path("small.yaml").write_bytes(content)
    assert refused("run", "small.yaml").startswith(f"small.yaml: {message}")


def test_a_file_that_is_too_long(refused: Callable[..., str]) -> None:
    """YAML is read at some hundred kB a second."""
    Path("small.yaml").write_text(EXPERIMENT + "#" * 600_000)
    assert refused("run", "small.yaml") == "small.yaml: is 0.6 MB long, too long for an experiment"


@pytest.mark.parametrize(
    "words",
    [
        ["verify"],
        ["report"],
        ["pack"],
        ["run"],
        ["grid"],
        ["resume"],
        ["run", "small.yaml", "--out"],
    ],
)
def test_a_path_that_is_too_long(refused: Callable[..., str], words: list[str]) -> None:
    message = refused(*words, f"{'a' * 300}/{'b' * 5000}")
    assert re.search(r"(ame (is )?too long(: '.*')?|there is no such folder)$", message)


@pytest.mark.parametrize("command", ["report", "verify", "pack", "resume", "explain"])
def test_a_link_to_itself(refused: Callable[..., str], command: str) -> None:
    Path("link").symlink_to("link")
    assert refused(command, "link").endswith("link: there is no such folder")


def test_a_list_of_nothing(refused: Callable[..., str]) -> None:
    message = refused("list", "method")
    assert message == "there is no list of 'method'; did you mean 'methods'?"


def test_no_such_file(refused: Callable[..., str]) -> None:
    assert refused("run", "large.yaml").startswith("large.yaml: cannot be read: ")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.rounds", "override 'train.rounds': must read section.key=value"),
        ("=3", "override '=3': must read section.key=value"),
        ("train.rounds=[1", "override 'train.rounds=[1': "),
        ("train.rounds=-1", "override train.rounds=-1: train.rounds: must be greater than or "),
        ("train.round=1", "override train.round=1: train.round: unknown key; did you mean 'round"),
        ("rounds=1", "override rounds=1: rounds: unknown key; did you mean 'train.rounds'?"),
        ("lr=1", "override lr=1: lr: unknown key; did you mean 'train.optimizer.lr'?"),
        (
            "train.lr=0.1",
            "override train.lr=0.1: train.lr: unknown key; did you mean 'train.optimizer.lr'?",
        ),
        ("alpha=1", "override alpha=1: alpha: unknown key; known: adversaries, "),
        (
            "model.name=cnn",
            "small.yaml:4: model.hidden: is not a key of cnn; to replace the whole section: "
            "'model={name: cnn}'",
        ),
        (
            "model={name: cnn, hidden: [4]}",
            "override model={name: cnn, hidden: [4]}: model.hidden: unknown key; known: ",
        ),
        ("trian.rounds=1", "override trian.rounds=1: trian: unknown key; did you mean 'train'?"),
        ("train={rounds: 0}", "override train={rounds: 0}: train.rounds: must be greater than or"),
        ("method.name=:x:", "override method.name=:x:: method.name: "),
    ],
)
def test_a_wrong_override_is_named(
    refused: Callable[..., str], override: str, message: str
) -> None:
    assert refused("run", "small.yaml", override).startswith(message)


# what does not go together


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("{kind: iid, clients: 61}", "partition.clients=61: the data set has 60 training exampl"),
        (
            "{kind: pathological, clients: 4, classes_per_client: 4}",
            "partition.classes_per_client=4: the data set has 3 classes",
        ),
        ("{kind: dirichlet, clients: 4, alpha: 0}", "must be greater than 0, not 0"),
        ("{kind: dirichlet, clients: 4, alpha: -1}", "must be greater than 0, not -1"),
        (
            "{kind: dirichlet, clients: 4, alpha: 1, min_samples: 16}",
            "partition.clients=4 with partition.min_samples=16 asks for 64 training examples; "
            "the data set has 60",
        ),
        ("{kind: natural, column: writer}", "the data set has no such column"),
        ("{kind: file, path: none.json}", "partition.path: there is no file "),
        ("{kind: iid, clients: 4, test_fraction: 0.99}", "client 0 holds 15 examples, too few fo"),
        ("{kind: iid, clients: 4, test_fraction: 1}", "partition.test_fraction: must be less th"),
    ],
)
def test_a_partition_that_cannot_be_made(
    refused: Callable[..., str], section: str, message: str
) -> None:
    write_experiment(3, f"partition: {section}")
    assert message in refused("run", "small.yaml")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("train.participation=0", "train.participation: must be greater than 0, not 0"),
        (
            "train.participation=0.1",
            "train.participation=0.1 of 4 clients samples nobody; 0.25 samples one",
        ),
        (
            "evaluate.clients=true",
            "evaluate.clients=true needs partition.test_fraction above 0: clients have no test",
        ),
        (
            "method.name=scaffold train.optimizer.name=adam",
            "method.name=scaffold needs train.optimizer.name=sgd: its control variates are",
        ),
        (
            "method.name=feddf",
            "method.name=feddf needs unlabelled auxiliary inputs on the server: name a data set",
        ),
        (
            "method.name=semifl",
            "method.name=semifl augments images (channels, height, width); the data's inputs",
        ),
        (
            "train.optimizer.name=adam train.optimizer.momentum=0.9",
            "train.optimizer: momentum and nesterov are for sgd, and adam has betas; leave them "
            "out, or set momentum=0 and nesterov=false",
        ),
    ],
)
def test_what_does_not_go_together(
    refused: Callable[..., str], overrides: str, message: str
) -> None:
    assert message in refused("run", "small.yaml", *overrides.split())


def test_a_model_that_does_not_take_the_inputs(refused: Callable[..., str]) -> None:
    write_experiment(4, "model: {name: cnn}")
    message = refused("run", "small.yaml")
    assert message.startswith("model.name=cnn takes images (channels, height, width); the data's ")
    assert "(4,)" in message


@pytest.mark.parametrize(
    ("method", "further"),
    [
        *(("moon", []), ("fedbabu", []), ("fedgen", [])),
        ("fedbabu", ["devices={deadline: 9}"]),
        ("fedbabu", ["privacy={clip: 1, noise_multiplier: 1}"]),
    ],
)
def test_a_model_without_a_head(
    refused: Callable[..., str], module: Callable[[str], str], method: str, further: list[str]
) -> None:
    name = module(
        "from torch import nn\n"
        "def it(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(4, classes))\n"
    )
    given = [f"method.name={method}", f"model={{name: '{name}:it'}}", *further]
    message = refused("run", "small.yaml", *given)
    assert f"method.name={method} needs a model with features and a head" in message
    assert "not Sequential" in message


def test_a_picture_that_cannot_be_drawn(fedsim: Call) -> None:
    code, _, err = fedsim("data", "small.yaml", "--picture", "small.yaml/x.png")
    assert (code, err) == (1, "error: small.yaml/x.png: cannot be written: Not a directory\n")


def test_the_data_command_refuses_alike(refused: Callable[..., str]) -> None:
    assert "partition.clients=61" in refused("data", "small.yaml", "partition.clients=61")


# data files


def idx(path: Path, *shape: int, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    header = struct.pack(f">{1 + len(shape)}I", 0x0800 + len(shape), *shape)
    path.write_bytes(gzip.compress(header + content))


@pytest.fixture
def mnist() -> Path:
    """A well-formed MNIST of six examples, and an experiment on it."""
    folder = Path("data/mnist")
    folder.parent.mkdir()
    for stem in ("train", "t10k"):
        idx(folder / f"{stem}-images-idx3-ubyte.gz", 6, 28, 28, content=bytes(6 * 28 * 28))
        idx(folder / f"{stem}-labels-idx1-ubyte.gz", 6, content=bytes([0, 1, 2, 0, 1, 2]))
    write_experiment(2, "data: {name: mnist}")
    return folder


def test_well_formed_data_is_accepted(fedsim: Call, mnist: Path) -> None:
    assert fedsim("run", "small.yaml")[0] == 0


def test_truncated_data(refused: Callable[..., str], mnist: Path) -> None:
    path = mnist / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    message = refused("run", "small.yaml")
    assert message.startswith(f"{path.absolute()}: cannot be read: ")
    assert "end-of-stream" in message


def test_mislabelled_data(refused: Callable[..., str], mnist: Path) -> None:
    path = mnist / "train-labels-idx1-ubyte.gz"
    idx(path, 6, content=bytes([0, 1, 10, 0, 1, 2]))
    message = f"{path.absolute()}: record 2 has label 10, expected 0 to 9"
    assert refused("run", "small.yaml") == message


def test_unreadable_data(refused: Callable[..., str]) -> None:
    Path("mine.npz").write_bytes(b"this is no archive")
    write_experiment(2, "data: {name: npz, path: mine.npz}")
    assert "/mine.npz: cannot be read: " in refused("run", "small.yaml")


def test_missing_data(refused: Callable[..., str], tmp_path: Path) -> None:
    write_experiment(2, "data: {name: mnist}")
    message = refused("run", "small.yaml")
    assert "mnist: no file 'train-images-idx3-ubyte'" in message  # which
    assert str(tmp_path / "data" / "mnist") in message  # where it looked
    assert "FEDSIM_DATA" in message  # how to get it
    assert "data.download=true" in message


# code of the user's own


USER_CODE = """
from torch import nn
from fedsim import Method
from fedsim.methods.fedavg import FedAvg

class Incomplete(Method):
    name: str = "incomplete"

class Plain:
    pass

number = 3

def net(shape, classes, width: int = 3):
    return nn.Sequential(nn.Flatten(), nn.Linear(4, width), nn.Linear(width, classes))

def no_module(shape, classes):
    return "a network"

def other_inputs(shape, classes):
    return nn.Linear(7, classes)

def other_classes(shape, classes):
    return nn.Linear(4, classes + 1)

def raises(shape, classes):
    raise ValueError("made of cheese")
"""


@pytest.mark.parametrize(
    ("line", "section", "message"),
    [
        (
            5,
            "method: {name: 'nowhere.code:It'}",
            "'nowhere.code:It' cannot be imported: no module",
        ),
        (5, "method: {name: 'MODULE:Missing'}", "code has no 'Missing'; known: Incomplete, "),
        (5, "method: {name: 'MODULE:Plain'}", "is not a method: it must be a class that extends "),
        (5, "method: {name: 'MODULE:net'}", "is not a method: it must be a class that extends Me"),
        (5, "method: {name: 'MODULE:Incomplete'}", "round"),
        (5, "method: {name: ':It'}", "small.yaml:5: method.name: method ':It' cannot be imported"),
        (4, "model: {name: 'nowhere.code:net'}", "'nowhere.code:net' cannot be imported: no modu"),
        (4, "model: {name: 'MODULE:missing'}", "code has no 'missing'; known: Incomplete, "),
        (4, "model: {name: 'MODULE:number'}", "is neither a function nor"),
        (4, "model: {name: 'MODULE:net', widht: 4}", "takes no 'widht'; did you mean 'width'?"),
        (4, "model: {name: 'MODULE:net', classes: 4}", "classes"),
        (4, "model: {name: 'MODULE:no_module'}", "no_module"),
        (4, "model: {name: 'MODULE:other_inputs'}", "other_inputs"),
        (4, "model: {name: 'MODULE:other_classes'}", "other_classes"),
        (4, "model: {name: 'MODULE:raises'}", "made of cheese"),
    ],
)
def test_code_of_the_wrong_sort(
    refused: Callable[..., str],
    module: Callable[[str], str],
    line: int,
    section: str,
    message: str,
) -> None:
    write_experiment(line, section.replace("MODULE", module(USER_CODE)))
    assert message in refused("run", "small.yaml")


@pytest.mark.parametrize("section", ["method: {name: 'MODULE:It'}", "model: {name: 'MODULE:it'}"])
@pytest.mark.parametrize(
    ("source", "message"),
    [("def it(:\n", "invalid syntax"), ("nothing_here\n", "name 'nothing_here' is not defined")],
)
def test_code_that_breaks_on_import(
    refused: Callable[..., str],
    module: Callable[[str], str],
    section: str,
    source: str,
    message: str,
) -> None:
    name = module(source)
    write_experiment(5 if section.startswith("method") else 4, section.replace("MODULE", name))
    shown = refused("run", "small.yaml")
    assert f"'{name}:" in shown
    assert message in shown


# what would take for ever


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.rounds=1e30", "train.rounds"),
        ("train.rounds=10000001", "train.rounds: must be less than or equal to 10000000"),
        ("train.local_epochs=1e30", "train.local_epochs"),
        ("partition.clients=1e12", "partition.clients"),
        ("train.batch_size=10000000000", "train.batch_size"),
    ],
)
def test_sizes_that_nobody_can_mean(
    refused: Callable[..., str], override: str, message: str
) -> None:
    assert message in refused("run", "small.yaml", override)


def test_a_grid_of_more_cells_than_can_be_run(refused: Callable[..., str]) -> None:
    text = Path("small.yaml").read_text()
    axes = {f"train.{key}": [*range(1, 201)] for key in ("rounds", "local_epochs", "batch_size")}
    Path("grid.yaml").write_text(text + f"\ngrid: {json.dumps({'axes': axes})}\n")
    message = refused("grid", "grid.yaml")
    assert message.endswith(
        "grid.axes: 8,000,000 cells, each with one or more runs; the maximum is 100,000"
    )


def test_pipes_are_not_waited_for(fedsim: Call, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    os.mkfifo(tmp_path / "pipe.npz")
    code, _, message = fedsim("run", "pipe.yaml")
    assert code == 2
    assert message == "error: pipe.yaml: is not a regular file\n"
    write_experiment(2, f"data: {{name: npz, path: {tmp_path / 'pipe.npz'}}}")
    code, _, message = fedsim("run", "small.yaml")
    assert code == 2
    assert message == f"error: {tmp_path / 'pipe.npz'}: is a pipe, not a file\n"


# what does not fit


def test_a_model_that_cannot_be_built_for_want_of_memory(refused: Callable[..., str]) -> None:
    write_experiment(4, "model: {name: mlp, hidden: [1000000, 1000000]}")
    message = refused("run", "small.yaml")
    assert message.startswith("model.name=mlp: there is not enough memory for it: ")


def test_a_run_in_one_process_that_does_not_fit(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SimpleNamespace(available=10**7)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    larger = "model={name: mlp, hidden: [1000, 1000]}"
    message = refused("run", "small.yaml", "engine={kind: local}", larger)
    assert message == (
        "engine.kind=local: training takes about 0.0 GB of memory, and 0.0 GB are free; use a "
        "smaller model or a smaller engine.clients_per_step"
    )


@pytest.mark.parametrize("command", ["run", "grid", "tune"])
def test_checkpoints_that_the_disk_has_no_room_for(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: (10**9, 10**9 - 1000, 1000))
    sections = {
        "run": "",
        "grid": "\ngrid: {axes: {train.optimizer.lr: [0.1]}}\n",
        "tune": "\nsearch: {space: {train.optimizer.lr: [0.1]}, objectives: {accuracy: max}}\n",
    }
    Path("all.yaml").write_text(Path("small.yaml").read_text() + sections[command])
    keep = "checkpoint={keep: all, every: 1}"
    message = refused(command, "all.yaml", "train.rounds=50", keep)
    assert re.search(
        r"checkpoint: 51 times the weights, \S+ GB each, are \S+ GB, and 1e-06 GB are free below "
        rf"{tmp_path}\S*; raise checkpoint.every, or set checkpoint.keep=last$",
        message,
    )


def test_actors_are_as_many_as_the_memory_holds_and_are_of_use() -> None:
    node = Node("laptop", cpus=16, gpus=0, memory=10e9)
    assert plan_actors(EngineSettings(), [node]) == 16
    assert plan_actors(EngineSettings(), [node], actor_bytes=3e9) == 3
    assert plan_actors(EngineSettings(), [node], most=12) == 12
    assert plan_actors(EngineSettings(actors=14), [node], most=12) == 14
    with pytest.raises(ClusterError) as told:
        plan_actors(EngineSettings(actors=4), [node], actor_bytes=3e9)
    assert str(told.value) == (
        "engine.actors=4: only 3 client actor(s) of 1 CPU(s) and 3.0 GB fit (laptop: 16 CPUs, 0 "
        "GPUs, 10 GB); set engine.actors=3 or engine.actors=auto"
    )
    with pytest.raises(ClusterError) as told:
        plan_actors(EngineSettings(), [node], actor_bytes=11e9)
    assert str(told.value) == (
        "no node has enough memory for a client actor of 1 CPU(s) and 11.0 GB (laptop: 16 CPUs, 0 "
        "GPUs, 10 GB); use a smaller model or a smaller engine.clients_per_step"
    )


# run folders


@pytest.fixture
def finished(fedsim: Call) -> Path:
    assert fedsim("run", "small.yaml")[0] == 0
    return the_run().path


def change_experiment(path: Path, before: str, after: str) -> None:
    file = path / "experiment.yaml"
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))


def write_manifests(path: Path, content: str | None) -> None:
    """Replace the manifest and its copy; None removes them."""
    for name in NAMES:
        (path / name).unlink()
        if content is not None:
            (path / name).write_text(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: None, "the run is finished; there is nothing to resume"),
        (
            lambda path: change_manifest(path, format=99),
            "a run folder of format 99; this version of fedsim reads format 2",
        ),
        (
            lambda path: write_manifests(path, None),
            "not the folder of a run, a grid or a search (no readable manifest.json",
        ),
        (
            lambda path: change_experiment(path, "rounds: 1", "rounds: 2"),
            "its experiment.yaml was edited after the run started (or is damaged; remove it to "
            "have it put back); undo that, or start a new run with it",
        ),
        (
            lambda path: change_experiment(path, "rounds: 1", "rounds: none"),
            "its experiment.yaml was edited after the run started (or is damaged; remove it to ",
        ),
        (
            lambda path: change_manifest(path, status="failed", partition_hash="another"),
            "the data changed since the run started",
        ),
    ],
)
def test_a_folder_that_cannot_be_resumed(
    refused: Callable[..., str], finished: Path, change: Callable[[Path], object], message: str
) -> None:
    change(finished)
    assert refused("resume", str(finished)).startswith(f"{finished}: {message}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "it is not a mapping"),
        ("{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[" * 100_000, "too many levels"),
        ('{"format": 2}', "status: Field required"),
        ('{"format": "1"}', "format: Input should be a valid integer"),
    ],
)
def test_a_manifest_that_is_none(
    refused: Callable[..., str], finished: Path, content: str, message: str
) -> None:
    write_manifests(finished, content)
    assert refused("resume", str(finished)) == f"{finished}/manifest.json: is damaged: {message}"


def test_a_folder_that_is_no_run(refused: Callable[..., str], tmp_path: Path) -> None:
    assert refused("resume", "nowhere") == f"{tmp_path / 'nowhere'}: there is no such folder"
    message = refused("resume", ".")
    assert message.startswith(f"{tmp_path}: not the folder of a run, a grid or a search (no read")


def test_a_run_folder_that_cannot_be_made(refused: Callable[..., str]) -> None:
    Path("runs").write_text("a file where the folder should be")
    assert "cannot be made: " in refused("run", "small.yaml")


# runs that break off


METHODS = """
import torch
from fedsim import Update
from fedsim.methods.fedavg import FedAvg

BAD = {0, 3}

class Raises(FedAvg):
    def local_update(self, client, weights):
        if client.id == 2 and client.round == 2:
            raise ValueError("made of cheese")
        return super().local_update(client, weights)

class Poisoned(FedAvg):
    "Two clients send NaN in their second vector."
    def local_update(self, client, weights):
        trained = client.train(weights)
        other = trained * float("nan") if client.id in BAD else trained
        return Update(weights=trained, other=other, weight=client.num_samples)

class Without(FedAvg):
    "As Poisoned, but these two are never asked."
    def round(self, fed, state, t):
        cohort = [k for k in range(fed.num_clients) if k not in BAD]
        mean = fed.mean(self.local_update, cohort, weights=state.weights)
        return type(state)(weights=mean.weights)

class Shorter(FedAvg):
    def local_update(self, client, weights):
        trained = client.train(weights)
        return Update(weights=trained[:-1] if client.id == 2 else trained)

class Scalar(FedAvg):
    def local_update(self, client, weights):
        trained = client.train(weights)
        return Update(weights=trained[:1] if client.id == 2 else trained)

class OtherName(FedAvg):
    def local_update(self, client, weights):
        trained = client.train(weights)
        return Update(delta=trained) if client.id == 2 else Update(weights=trained)

class NoUpdate(FedAvg):
    def local_update(self, client, weights):
        return client.train(weights)

class Complex(FedAvg):
    def local_update(self, client, weights):
        return Update(weights=client.train(weights).to(torch.complex64))

class KeepsAWord(FedAvg):
    def local_update(self, client, weights):
        client.state = "cheese"
        return super().local_update(client, weights)

class ServerRaises(FedAvg):
    def round(self, fed, state, t):
        raise ValueError("made of cheese\\nof all sorts" * t)

class ServerExits(FedAvg):
    def round(self, fed, state, t):
        raise SystemExit(0)

class Stateless(FedAvg):
    def round(self, fed, state, t):
        return super().round(fed, state, t).weights

class BareInit(FedAvg):
    def init(self, fed):
        return super().init(fed).weights

class InitRaises(FedAvg):
    def init(self, fed):
        raise KeyError("cheese")

class Strangers(FedAvg):
    def round(self, fed, state, t):
        fed.mean(self.local_update, [99], weights=state.weights)
"""


@pytest.fixture
def broken(fedsim: Call, module: Callable[[str], str]) -> Callable[..., str]:
    """Run a method of `METHODS`, see it break off; its message."""
    name = module(METHODS)

    def call(method: str, *overrides: str) -> str:
        write_experiment(5, f"method: {{name: '{name}:{method}'}}")
        code, _, err = fedsim("run", "small.yaml", *overrides)
        assert code == 1
        message, _, advice = err.removeprefix("error: ").partition("failed")
        assert advice.endswith(f"fedsim resume {the_run().path.relative_to(Path.cwd())}\n")
        assert the_run().manifest["status"] == "failed"
        return message

    return call


def test_a_client_function_that_raises(broken: Callable[..., str]) -> None:
    message = broken("Raises", "train.rounds=3", "checkpoint.every=1")
    assert re.fullmatch(
        r"client 2, round 2, local_update: ValueError: made of cheese \(code.py, line \d+\)\n",
        message,
    )
    assert the_run().rounds["round"].tolist() == [1]
    assert 'raise ValueError("made of cheese")' in (the_run().path / "log.txt").read_text()


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("NoUpdate", "client 0, round 1, local_update: must return an Update, not Tensor"),
        ("KeepsAWord", "client 0, round 1, local_update: TypeError: client.state must be a dict,"),
        ("Complex", "client 0, round 1, local_update: 'weights' has complex numbers"),
    ],
)
def test_what_cannot_be_averaged(broken: Callable[..., str], method: str, message: str) -> None:
    assert broken(method).startswith(message)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("ServerRaises", r"round 1: ValueError: made of cheese \(code.py, line \d+\)\n"),
        ("Stateless", r"round 1: round must return a State, not ndarray\n"),
        ("BareInit", r"init: init must return a State, not ndarray\n"),
        ("InitRaises", r"init: KeyError: 'cheese' \(code.py, line \d+\)\n"),
        ("Strangers", r"round 1: IndexError: index 99 is out of bounds .*\n"),
    ],
)
def test_a_server_function_that_raises(
    broken: Callable[..., str], method: str, message: str
) -> None:
    assert re.fullmatch(message, broken(method))
    assert "Traceback (most recent call last)" in (the_run().path / "log.txt").read_text()


class Own(FedAvg):
    """As if a notebook had defined it."""


@pytest.mark.parametrize(
    ("section", "content", "name"),
    [
        ("method", {"name": "__main__:Own"}, "Own"),
        ("model", {"name": "__main__:regularised"}, "regularised"),
    ],
)
def test_code_of_a_notebook_on_ray(
    section: str,
    content: dict[str, Any],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = sys.modules["__main__"]
    monkeypatch.setattr(program, "Own", Own, raising=False)
    monkeypatch.setattr(program, "regularised", regularised, raising=False)
    experiment = small_experiment(**{section: content}, engine={"kind": "ray"})
    with pytest.raises(
        ExperimentError,
        match=f"^{section}: {name} is defined in a notebook or in the script that is running, .*; "
        r"put it into a file of its own, or use engine\.kind=local$",
    ):
        run(experiment, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    prepare(small_experiment(**{section: content}))


def test_an_object_of_a_notebook_on_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Own, "__module__", "__main__")
    experiment = small_experiment(engine={"kind": "ray"}).model_copy(update={"method": Own()})
    with pytest.raises(ExperimentError, match=r"^method: Own is defined in a notebook"):
        prepare(experiment)


def test_a_server_function_that_ends_the_process(
    fedsim: Call, module: Callable[[str], str]
) -> None:
    write_experiment(5, f"method: {{name: '{module(METHODS)}:ServerExits'}}")
    code, _, err = fedsim("run", "small.yaml")
    assert code == 1
    assert "error: code of the experiment has ended the process (sys.exit)\nfailed" in err


def test_scores_that_are_no_numbers(fedsim: Call, module: Callable[[str], str]) -> None:
    name = module(
        "from fedsim.objectives import Classification\n"
        "class It(Classification):\n"
        "    def scores(self, totals):\n"
        "        return {'accuracy': 'good'}\n"
    )
    code, _, err = fedsim("run", "small.yaml", f"objective={{name: '{name}:It'}}")
    assert code == 1
    assert "error: round 1, evaluation: TypeError: scores: 'accuracy' is 'good', not a num" in err


@pytest.mark.parametrize("clients", [4, 20], ids=["own blocks", "shared blocks"])
@pytest.mark.parametrize("method", ["Shorter", "Scalar", "OtherName"])
def test_clients_that_do_not_send_the_same(
    broken: Callable[..., str], method: str, clients: int
) -> None:
    message = broken(method, f"partition.clients={clients}")
    assert "client" in message
    assert "local_update" in message


def test_weights_that_become_nan(fedsim: Call) -> None:
    code, _, err = fedsim("run", "small.yaml", "train.optimizer.lr=1e38", "train.batch_size=4")
    assert code == 1
    what = "client 0: NaN values in 'weights'"  # and nothing of `fedsim resume`
    assert err == f"error: training diverged in round 1: {what}; lower the learning rate\n"


def test_weights_that_become_too_large(fedsim: Call) -> None:
    code, _, err = fedsim("run", "small.yaml", "train.optimizer.lr=1e9")
    assert code == 1
    assert re.fullmatch(
        r"error: training diverged in round 1: client 0: values up to \S+ in 'weights'; lower the "
        r"learning rate\n",
        err,
    )


@pytest.mark.parametrize("clients", [4, 20], ids=["own blocks", "shared blocks"])
def test_skipped_clients_are_recorded_and_left_out(
    fedsim: Call, module: Callable[[str], str], clients: int
) -> None:
    name = module(METHODS)
    weights = []
    for method in ("Poisoned", "Without"):
        write_experiment(5, f"method: {{name: '{name}:{method}'}}")
        code, _, err = fedsim(
            *("run", "small.yaml", "train.on_client_error=skip", "train.rounds=2"),
            *(f"partition.clients={clients}", "--out", method),
        )
        assert (code, err) == (0, "")
        (path,) = Path(method).glob("*/*")
        weights.append(load(path).weights())
        if method == "Poisoned":
            poisoned = load(path)
    assert poisoned.rounds["failed"].tolist() == [2, 2]
    assert poisoned.rounds["clients"].tolist() == [clients - 2] * 2
    failed = poisoned.clients[poisoned.clients["error"].notna()]
    assert failed["client"].tolist() == [0, 3, 0, 3]
    assert failed["error"].iloc[3].startswith("client 3, round 2, local_update: NaN values in 'o")
    for layer, tensor in weights[0].items():
        assert tensor.allclose(weights[1][layer], atol=1e-7)


def test_a_round_in_which_every_client_fails(fedsim: Call) -> None:
    code, _, err = fedsim(
        *("run", "small.yaml", "train.optimizer.lr=1e38", "train.batch_size=4"),
        "train.on_client_error=skip",
    )
    assert code == 1
    message = err.partition("error: ")[2]
    assert "round 1: the weights of the cohort's updates sum to 0" in message
    assert "NaN" in message  # nothing else says why: this round is not in the tables


# GPU fractions: what fits a cluster


def nodes(*gpus: float, cpus: float = 16) -> list[Node]:
    return [Node(f"node{i}", cpus, g, 64e9) for i, g in enumerate(gpus)]


@pytest.mark.parametrize(
    ("gpus_per_actor", "gpus", "actors"),
    [
        (0.25, [1], 4),
        (0.3, [1], 3),
        (0.1, [1], 10),
        (0.6, [2], 2),  # no actor has parts of two cards
        (0.5, [1, 0, 2], 6),
        (1, [3], 3),
        (2, [3, 2], 2),
        (0, [0, 2], 32),
    ],
)
def test_as_many_actors_as_fit(gpus_per_actor: float, gpus: list[float], actors: int) -> None:
    settings = EngineSettings(gpus_per_actor=gpus_per_actor)
    assert plan_actors(settings, nodes(*gpus)) == actors


def test_cpus_bound_actors_too() -> None:
    settings = EngineSettings(gpus_per_actor=0.25, cpus_per_actor=2)
    assert plan_actors(settings, nodes(1, cpus=6)) == 3


def test_memory_bounds_actors_too() -> None:
    laptop = Node("laptop", cpus=1000, gpus=0, memory=3e9)
    assert plan_actors(EngineSettings(), [laptop]) == 10
    with pytest.raises(ClusterError, match=r"only 10 client actor\(s\) .* 0 GPUs, 3 GB\)"):
        plan_actors(EngineSettings(actors=500), [laptop])


@pytest.mark.parametrize(
    ("settings", "gpus", "message"),
    [
        (
            {"gpus_per_actor": 0.25, "actors": 5},
            [1],
            r"engine.actors=5: only 4 client actor\(s\) of 1 CPU\(s\) and 0.25 GPU\(s\) fit "
            r"\(node0: 16 CPUs, 1 GPUs, 64 GB\); set engine.actors=4 or engine.actors=auto",
        ),
        (
            {"gpus_per_actor": 2},
            [1, 1],
            r"no node can hold a client actor of 1 CPU\(s\) and 2 GPU\(s\) "
            r"\(node0: 16 CPUs, 1 GPUs, 64 GB; node1: 16 CPUs, 1 GPUs, 64 GB\); lower",
        ),
        ({"gpus_per_actor": 0.5}, [0], r"no node can hold a client actor of .* 0.5 GPU\(s\)"),
        ({"cpus_per_actor": 17}, [0], r"no node can hold a client actor of 17 CPU\(s\) \(node0"),
        (
            {"gpus_per_actor": 1.5},
            [4],
            r"engine.gpus_per_actor=1.5: must be a whole number if above 1",
        ),
        ({}, [], r"no node can hold a client actor of 1 CPU\(s\)"),
    ],
)
def test_what_never_fits_is_refused(
    settings: dict[str, float], gpus: list[float], message: str
) -> None:
    with pytest.raises(ClusterError, match=message):
        plan_actors(EngineSettings.model_validate(settings), nodes(*gpus))


def test_a_node_without_cpus() -> None:
    head = Node.of({"NodeManagerHostname": "head", "Resources": {"memory": 8e9}})
    assert (head.name, head.cpus, head.gpus) == ("head", 0, 0)
    with pytest.raises(ClusterError, match=r"\(head: 0 CPUs, 0 GPUs, 8 GB\)"):
        plan_actors(EngineSettings(), [head])
    assert plan_actors(EngineSettings(), [head, *nodes(0, cpus=2)]) == 2


def packed(cpus: int, gpus: int, cpus_per_actor: int, share: Fraction) -> int:
    """Place actors one by one on a node, as Ray does, until none fits."""
    free, placed = [Fraction(1)] * gpus, 0
    while cpus >= cpus_per_actor:
        if share > 1:
            cards = [k for k, left in enumerate(free) if left == 1][: int(share)]
            if len(cards) < share:
                break
        else:
            cards = [k for k, left in enumerate(free) if left >= share][:1]
            if share and not cards:
                break
        for k in cards:
            free[k] -= min(share, Fraction(1))
        cpus, placed = cpus - cpus_per_actor, placed + 1
    return placed


@given(
    sizes=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4)), min_size=1, max_size=4),
    cpus_per_actor=st.integers(1, 4),
    hundredths=st.integers(0, 100) | st.sampled_from([200, 300, 400]),
)
def test_the_plan_is_what_can_be_packed(
    sizes: list[tuple[int, int]], cpus_per_actor: int, hundredths: int
) -> None:
    settings = EngineSettings(cpus_per_actor=cpus_per_actor, gpus_per_actor=hundredths / 100)
    share = Fraction(hundredths, 100)
    cluster = [Node("node", cpus, gpus, 64e9) for cpus, gpus in sizes]
    fit = [packed(cpus, gpus, cpus_per_actor, share) for cpus, gpus in sizes]
    assert [actors_on(node, settings) for node in cluster] == fit
    if sum(fit) == 0:
        with pytest.raises(ClusterError, match="no node can hold"):
            plan_actors(settings, cluster)
        return
    assert plan_actors(settings, cluster) == sum(fit)
    asked = settings.model_copy(update={"actors": sum(fit)})
    assert plan_actors(asked, cluster) == sum(fit)
    with pytest.raises(ClusterError, match=f"only {sum(fit)} client actor"):
        plan_actors(asked.model_copy(update={"actors": sum(fit) + 1}), cluster)
