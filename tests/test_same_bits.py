"""The same bits, whatever carries the work out and whatever dies on the way."""

from __future__ import annotations

import contextlib
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import result_hashes
from commands import Command
from matrix import MODELS
from misbehaving_methods import HABITS
from ray.cluster_utils import Cluster

from experiments import (
    FOUR,
    KINDS,
    NETWORK_METHODS,
    NUMBERS,
    QUARTER,
    TREE_METHODS,
    WITHOUT_GLOBAL,
    WRITTEN,
    Finish,
    by_day,
    forked,
    interrupted,
    small_experiment,
    with_method,
)
from fedsim import load, resume, run
from fedsim.cluster.ray_compat import actor_table
from fedsim.errors import ClientError, ClusterError, RunError, RunFolderError
from fedsim.federation.ray_engine import STATE_LOST
from fedsim.launch import run as launch

# By day those in which actors are asked for different things: sums of two vectors and kept states,
# messages, parts for single clients, a reduction of one's own, what is made once of examples.
BY_DAY = ("scaffold", "fedaux", "fedbuff", "sse_agg", "hist_trees")

KEEPING = WITHOUT_GLOBAL - {"ifca"}  # whose clients keep their models

# Whose models are explained, where it is not the global one and the cohort's.
EXPLAINED: dict[str, dict[str, Any]] = {
    **{n: {"share": None, "of": ["cohort", "personal"], "inputs_from": "own"} for n in KEEPING},
    "centralised": {"share": None, "of": ["global"]},
    "hist_trees": {"share": None, "of": ["global"]},
    "ifca": {"share": None, "of": ["cohort"], "inputs_from": "own"},
    "xpfl": {"of": ["global", "cohort", "personal"], "explainers": ["random", "tree"]},
}

with tempfile.TemporaryDirectory() as folder:
    OTHERS = result_hashes.experiments(Path(folder))

STORED = WRITTEN / "same_bits.npz"


@pytest.fixture(scope="module", autouse=True)
def stored() -> None:
    np.savez(STORED, x=np.random.default_rng(0).random((40, 5)), y=np.arange(40) % 4)


SCAFFOLD = with_method("scaffold", train={"participation": 0.7, "rounds": 3})
SAME: dict[str, dict[str, Any]] = {
    "stacks": SCAFFOLD,
    "noise of privacy": {**SCAFFOLD, "privacy": {"clip": 1, "noise_multiplier": 1}},
    "forged updates and their median": {
        **SCAFFOLD,
        "aggregation": {"name": "median"},
        "adversaries": {"share": 0.3, "attack": {"name": "gaussian", "std": 0.1}},
    },
    "compressed": {**SCAFFOLD, "uplink": {"name": "topk"}, "downlink": {"name": "qsgd"}},
    "a reduction of one's own": {
        "method": {"name": "own_components:FedMedian"},
        "train": {"rounds": 3},
    },
    "masked": {
        "train": {"rounds": 3},
        "secure_aggregation": {"dropout": 0.2, "threshold": 0.3},
    },
}
SAME["prediction sets"] = {
    **with_method("ditto", train={"participation": 0.7, "rounds": 2}),
    "partition": {"test_fraction": 0.2},
    "model": {"name": "networks:regularised"},
    "evaluate": {"validation": 0.2, "clients": True, "conformal": {"kind": "adaptive"}},
}
LAYOUTS = {
    layout: {
        "data": {"name": "strided:Strided", "shape": shape, "layout": layout},
        "partition": FOUR,
        "model": {"name": "cnn" if len(shape) == 3 else "mlp"},
        "train": {"rounds": 2, "optimizer": {"lr": 0.02}},
    }
    for layout, shape in (
        ("channels_last", (3, 12, 12)),
        ("odd_stride_of_one_channel", (1, 12, 12)),
        ("fortran", (9,)),
    )
}
SAME["images whose channels are last"] = LAYOUTS.pop("channels_last")
SAME["documents"] = {**KINDS["documents"], "train": {"rounds": 2}}
SAME["inputs in their files"] = {
    **{"data": {"name": "npz", "path": str(STORED), "in_place": True}, "partition": FOUR},
    "train": {"rounds": 2},
}
SAME["rules"] = {
    **{key: MODELS["rules"][key] for key in ("data", "partition", "train")},
    **{"method": {"name": "openfl_xai"}, "model": {"name": "tree_rules"}},
}
SAME_BY_NIGHT: dict[str, dict[str, Any]] = {
    **LAYOUTS,
    "numbers": {**NUMBERS, "train": {"rounds": 2}},
    # By libraries that draw from the global generators.
    "explained by captum": {
        "train": {"rounds": 2},
        "explain": {
            "explainers": [
                *("gradient_shap", "deep_shap", {"name": "kernel_shap", "size": 2, "samples": 40}),
                {"name": "captum", "method": "Lime", "arguments": {"n_samples": 20}},
            ],
            **{"inputs": 2, "every": 1},
        },
    },
    # With random draws for attributions; with teachers that clients keep; with sampled words.
    **{
        name: OTHERS[name]
        for name in ("fedxds, local smoothgrad", "xpfl, explained", "fedrnl, rationales")
    },
}


def kill_newest_client_actor() -> None:
    """End the process of the last one that this process, or one below it, has started.

    Those of a run before may still be about to end; and this run's may have ended.
    """
    ours = []
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended a moment ago
            if "".join(each.cmdline()).startswith("ray::ClientActor"):
                ours.append(each)
    if ours:
        with contextlib.suppress(psutil.NoSuchProcess):
            max(ours, key=lambda each: each.pid).kill()


def kill_one(event: Any) -> None:
    """Kill a client actor after round 1 of a run."""
    if isinstance(event, dict) and event["round"] == 1:
        kill_newest_client_actor()


def alive_client_actors() -> int:
    states = [a["State"] for a in actor_table().values() if a["ActorClassName"] == "ClientActor"]
    return states.count("ALIVE")


@pytest.mark.usefixtures("own_ray")
class TestOnRay:
    @pytest.mark.usefixtures("driver_here")
    @pytest.mark.parametrize("name", by_day([*NETWORK_METHODS, *TREE_METHODS], BY_DAY))
    def test_two_actors_of_which_one_is_killed_give_the_hash_of_the_local_engine(
        self, finish: Finish, tmp_path: Path, name: str
    ) -> None:
        by = "gradient" if name in ("fedavg", "scaffold", "fedaux") else "occlusion"
        explain = {"explainers": [by], "inputs": 2, "every": 2, "maps": True}
        explain |= {"target": "label", "share": {"noise": 0.5, "poisoned": 0.3}}
        common = with_method(
            name,
            train={"participation": 0.5, "rounds": 4},
            explain=explain | EXPLAINED.get(name, {}),
        )
        local = finish(**common)
        lines = []

        def note(event: Any) -> None:
            lines.append(str(event))
            kill_one(event)

        two_actors = small_experiment(**common, engine={"kind": "ray", "actors": 2})
        for _ in range(20):  # a run of milliseconds may be over before its actor is killed
            two = run(two_actors, tmp_path, note)
            assert local.result_hash == two.result_hash
            times = ["seconds", "explain_seconds"]
            assert local.rounds.drop(columns=times).equals(two.rounds.drop(columns=times))
            # Those of "centralised" have no work, and may be gone unnoticed.
            if name == "centralised" or any("a client actor was lost" in line for line in lines):
                break
        else:
            raise AssertionError("no run has lost an actor")

    @pytest.mark.usefixtures("driver_here")
    def test_tasks_in_turn_are_the_same_when_an_actor_is_killed(self, tmp_path: Path) -> None:
        """FedSeIT's clients are sent what was chosen for each, and keep all of their tasks."""
        common = {
            **{key: MODELS["tasks"][key] for key in ("data", "partition", "model")},
            "method": {"name": "fedseit", "top_k": 2},
            "train": {"rounds": 4, "participation": 0.7, "batch_size": 8}
            | {"optimizer": {"name": "adam", "lr": 0.01}},
        }

        local = run(small_experiment(**common), tmp_path)
        two = small_experiment(**common, engine={"kind": "ray", "actors": 2})
        there = run(two, tmp_path, kill_one)
        assert len(local.explanations)
        assert there.result_hash == local.result_hash
        assert there.tasks.equals(local.tasks)
        assert there.explanations.equals(local.explanations)

    @pytest.mark.usefixtures("driver_here")
    @pytest.mark.parametrize("what", by_day([*SAME, *SAME_BY_NIGHT], SAME))
    def test_the_same_on_actors(self, finish: Finish, what: str) -> None:
        common = {**SAME, **SAME_BY_NIGHT}[what]
        stacks = {"clients_per_step": 3} if what == "stacks" else {}
        local = finish(**common, engine={"kind": "local", **stacks})
        for actors in (1, 3) if what in SAME_BY_NIGHT else (2,):
            there = finish(**common, engine={"kind": "ray", "actors": actors, **stacks})
            assert there.result_hash == local.result_hash
            assert there.manifest.get("clients_per_step") == local.manifest.get("clients_per_step")
        if what == "stacks":
            assert local.manifest["clients_per_step"] == 3

    # FailsNowAndThen keeps a nested state as well, and TrainsTwice is tried in stacks by day.
    @pytest.mark.usefixtures("driver_here")
    @pytest.mark.parametrize("habit", by_day(HABITS, {*HABITS} - {"NestedState", "TrainsTwice"}))
    def test_what_clients_do_is_the_same_on_actors_and_after_a_resume(
        self, finish: Finish, tmp_path: Path, habit: str
    ) -> None:
        """Methods of all habits: state now and then, nested state, torch's generator, failures."""
        common: dict[str, Any] = {
            "data": QUARTER,
            "method": {"name": f"misbehaving_methods:{habit}"},
            "train": {"rounds": 6, "on_client_error": "skip"},
        }
        local = finish(**common)
        on_ray = finish(**common, engine={"kind": "ray", "actors": 2})
        assert on_ray.result_hash == local.result_hash
        folder = interrupted(small_experiment(**common), tmp_path / "interrupted", 4)
        assert resume(folder).result_hash == local.result_hash

    @pytest.mark.usefixtures("driver_here")
    def test_stacks_without_memory_are_halved(self, finish: Finish, tmp_path: Path) -> None:
        method = {"name": "faults:ScarceMemory", "marker": str(tmp_path / "marker")}
        common: dict[str, Any] = {"method": method, "train": {"rounds": 2}}
        there = finish(**common, engine={"kind": "ray", "actors": 1, "clients_per_step": 4})
        assert (there.manifest["clients_per_step"], there.manifest["halved"]) == (2, [[0, 4]])
        local = finish(**common, engine={"kind": "local", "clients_per_step": 2})
        assert there.result_hash == local.result_hash

    @pytest.mark.usefixtures("driver_here")
    def test_actors_that_wait_for_lost_states_are_replaced(
        self, finish: Finish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Told by the driver, who knows it before them."""
        asked: list[str] = []
        marker = tmp_path / "marker"  # until it is there, the actor has not answered

        def is_lost(handle: Any, here: str) -> bool:
            asked.append(here)
            marker.touch()
            return len(asked) == 1

        monkeypatch.setattr("fedsim.federation.ray_engine.LOOK", 0)
        monkeypatch.setattr("fedsim.federation.ray_engine.is_lost", is_lost)
        method = {"name": "faults:WaitingClient", "marker": str(marker)}
        common: dict[str, Any] = {"method": method, "train": {"rounds": 2}}
        lines: list[Any] = []
        there = run(
            small_experiment(**common, engine={"kind": "ray", "actors": 1}), tmp_path, lines.append
        )
        assert asked[0] == ray.get_runtime_context().get_node_id()
        assert STATE_LOST + "; falling back to the last checkpoint" in lines
        assert there.result_hash == finish(**common).result_hash

    @pytest.mark.usefixtures("driver_here")
    @pytest.mark.parametrize("name", ["DyingWhileCombining", "DyingSums"])
    def test_an_actor_killed_with_the_sums_of_its_node(self, tmp_path: Path, name: str) -> None:
        marker = tmp_path / "marker"
        method = {"name": f"faults:{name}", "marker": str(marker)}
        lines = []

        def wait_for_all(event: Any) -> None:
            lines.append(str(event))
            while not marker.exists() and alive_client_actors() < 3:
                time.sleep(0.1)

        three = small_experiment(method=method, engine={"kind": "ray", "actors": 3})
        found = run(three, tmp_path, wait_for_all)
        assert any("a client actor was lost" in line for line in lines)
        undisturbed = run(small_experiment(method=method), tmp_path)
        assert undisturbed.result_hash == found.result_hash

    def test_the_driver_killed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from mlflow import MlflowClient

        undisturbed = run(small_experiment(), tmp_path).result_hash
        # Set after Ray was started, so that only the driver's arguments can tell it.
        database = f"sqlite:///{tmp_path / 'mlflow.db'}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
        experiment = small_experiment(
            method={"name": "faults:DyingDriver", "marker": str(tmp_path / "marker")},
            engine={"kind": "ray", "actors": 2},
            loggers=["mlflow"],
        )
        lines: list[Any] = []
        killed = run(experiment, tmp_path, lines.append)
        assert killed.result_hash == undisturbed
        assert "the driver was lost; a new one continues from the last checkpoint" in lines
        assert "continuing after round 5" in lines
        assert list(killed.rounds["round"]) == list(range(1, 11))
        assert len(killed.clients) == 100
        client = MlflowClient(database)
        logged = client.get_metric_history(killed.manifest["mlflow_run"], "accuracy")
        assert [(p.step, p.value) for p in logged] == [
            *killed.rounds.set_index("round")["accuracy"].items()
        ]

    def test_a_driver_that_always_dies_stops_the_run(self, tmp_path: Path) -> None:
        experiment = small_experiment(
            method={"name": "faults:DyingDriver"}, engine={"kind": "ray", "actors": 1}
        )
        lines: list[Any] = []
        with pytest.raises(RunError, match="the driver died 3 times in a row"):
            run(experiment, tmp_path, lines.append)
        # What the first driver tells of round 6 may be lost with it; then the second gets further.
        assert lines.count("continuing after round 5") in (2, 3)
        (folder,) = (tmp_path / "small").iterdir()
        assert load(folder).manifest["status"] == "failed"
        assert list(load(folder).rounds["round"]) == [1, 2, 3, 4, 5]

    @pytest.mark.usefixtures("driver_here")
    @pytest.mark.parametrize(
        ("sections", "message"),
        [
            (
                {"method": {"name": "faults:DyingClient"}},
                r"3 actors in a row died while working on clients \[\d+\]",
            ),
            ({"method": {"name": "faults:DyingSums"}}, "3 actors in a row died"),
            (
                {"model": {"name": "faults:deadly_net"}},
                "client actors cannot start: 3 died in a row",
            ),
        ],
        ids=["at a block", "with its sums", "at its start"],
    )
    def test_what_always_kills_an_actor_stops_the_run(
        self, finish: Finish, sections: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(RunError, match=message):
            finish(**sections, engine={"kind": "ray", "actors": 1})

    def test_a_client_that_fails_is_named(self, tmp_path: Path) -> None:
        experiment = small_experiment(
            method={"name": "misbehaving_methods:Reports", "column": "error"},
            engine={"kind": "ray", "actors": 2},
        )
        with pytest.raises(ClientError, match=r"client \d, round 1, local_update: (?s:.*)'error'"):
            run(experiment, tmp_path)

    @pytest.mark.parametrize(
        ("error", "status"), [(LookupError, "failed"), (KeyboardInterrupt, "interrupted")]
    )
    def test_leaving_a_run_ends_its_driver_before_it_writes_to_the_folder(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        error: type[BaseException],
        status: str,
    ) -> None:
        """Also if Ray does not, as after the loss of its processes, and a traceback is kept."""
        if error is KeyboardInterrupt:
            monkeypatch.setattr(ray, "kill", lambda actor: None)
        monkeypatch.setattr("fedsim.launch.run.KILLED", 0.2)
        found: list[psutil.Process] = []
        process = launch._process

        def noted(*driver: Any) -> Any:
            found.append(made := process(*driver))
            return made

        def leave(event: Any) -> None:
            if isinstance(event, dict) and event["round"] == 3:
                raise error

        monkeypatch.setattr(launch, "_process", noted)
        endless = small_experiment(train={"rounds": 100_000}, engine={"kind": "ray", "actors": 1})
        with pytest.raises(error) as kept:
            run(endless, tmp_path, leave)
        (driver,) = found
        driver.wait(60)
        (folder,) = (tmp_path / "small").iterdir()
        assert load(folder).manifest["status"] == status
        del kept

    def test_the_driver_is_known_by_its_start_as_well(self) -> None:
        here = psutil.Process()
        assert launch._process(here.pid, here.create_time()) == here
        assert launch._process(here.pid, here.create_time() - 1) is None

    def test_a_run_is_carried_out_by_one_process(self, tmp_path: Path) -> None:
        def resume_meanwhile(event: Any) -> None:
            (folder,) = (tmp_path / "small").iterdir()
            with pytest.raises(RunFolderError, match="another process carries out this run"):
                resume(folder)

        run(small_experiment(train={"rounds": 1}), tmp_path, resume_meanwhile)

    @pytest.mark.usefixtures("driver_here")
    def test_what_is_told_of_nodes_and_of_their_store(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            "fedsim.support.hardware._processor", lambda: "Z80"
        )  # here, not in actors
        monkeypatch.setattr("fedsim.federation.ray_engine.SPILLS", 0)
        experiment = small_experiment(
            method={"name": "scaffold"},
            model={"hidden": [200, 180]},  # as below, for states that live on nodes
            train={"rounds": 3},
            engine={"kind": "ray", "actors": 1, "mixed_processors": True},
        )
        lines: list[Any] = []
        run(experiment, tmp_path, lines.append)
        told = "results depend on which node computes what, because nodes round differently (Z80, "
        assert any(str(line).startswith(told) for line in lines)
        told = "10 clients keep 0.00204 GB; all 10 would keep 0.00204 GB, and Ray's object store "
        assert sum(str(line).startswith(told) for line in lines) == 1

    def test_gpu_fractions_are_honoured(self, tmp_path: Path) -> None:
        engine = {"kind": "ray", "gpus_per_actor": 0.25}
        lines: list[Any] = []
        # A model that draws from torch's own generator.
        common: dict[str, Any] = {"model": {"name": "faults:dropout_net"}, "train": {"rounds": 2}}
        done = run(small_experiment(**common, engine=engine), tmp_path, lines.append)
        assert done.manifest["actors"] == 4
        assert done.result_hash == run(small_experiment(**common), tmp_path).result_hash
        assert "the requested GPUs are not available to PyTorch: computing on CPUs" in lines
        with pytest.raises(ClusterError, match=r"engine.actors=5: only 4 client actor\(s\)"):
            run(small_experiment(engine={**engine, "actors": 5}), tmp_path / "refused")
        assert not (tmp_path / "refused").exists()


# By day a command that is interrupted on Ray is that of tests/test_signals.py.
ENDS = [(signal.SIGKILL, "local"), (signal.SIGKILL, "ray"), (signal.SIGINT, "ray")]


@pytest.mark.parametrize("end", by_day(ENDS, ENDS[:1]))
def test_the_whole_command_stopped_and_resumed(
    tmp_path: Path, end: tuple[signal.Signals, str]
) -> None:
    how, kind = end
    undisturbed = run(small_experiment(method={"name": "scaffold"}), tmp_path / "undisturbed")
    marker = tmp_path / "marker"
    experiment = small_experiment(
        method={"name": "faults:WaitingDriver", "marker": str(marker)},
        engine={"kind": kind, "actors": 2 if kind == "ray" else "auto"},
    )
    file = tmp_path / "experiment.yaml"
    file.write_text(experiment.to_yaml())
    first = Command("run", str(file), "--out", str(tmp_path), shares_workers=True)
    for line in first.stdout:
        if line.startswith("round 6/10"):  # the seventh waits
            while not marker.exists():
                time.sleep(0.05)
            first.send_signal(how)
            break
    rest = first.stdout.read()
    code = first.wait()
    (folder,) = (tmp_path / "small").iterdir()
    assert load(folder).manifest["status"] in ("running", "interrupted")
    if how == signal.SIGINT:
        assert code == 130
        assert re.search(r"interrupted after round \d+; to continue:\n  fedsim resume \S+", rest)

    lines: list[Any] = []
    resumed = resume(folder, lines.append)
    assert "continuing after round 5" in lines
    assert resumed.result_hash == undisturbed.result_hash


@pytest.fixture
def three_nodes() -> Iterator[tuple[Cluster, Any]]:
    """A cluster of a head without client actors and two nodes with two CPUs each."""
    with forked():
        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "include_dashboard": False},
        )
        cluster.add_node(num_cpus=2)
        node = cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster, node
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.night  # a cluster of three nodes; by day is_lost stands in for one that is gone
def test_a_node_removed(three_nodes: tuple[Cluster, Any], tmp_path: Path) -> None:
    cluster, node = three_nodes
    # 52,650 parameters: kept states of 200 kB, too large to travel inline, live on the nodes.
    common: dict[str, Any] = {"model": {"hidden": [200, 180]}, "train": {"rounds": 9}}
    undisturbed = run(small_experiment(method={"name": "scaffold"}, **common), tmp_path)
    marker = tmp_path / "marker"

    def remove() -> None:
        while not marker.exists():
            time.sleep(0.1)
        cluster.remove_node(node)
        marker.with_suffix(".done").touch()

    remover = threading.Thread(target=remove)
    remover.start()
    lines: list[Any] = []
    experiment = small_experiment(
        method={"name": "faults:WaitingDriver", "marker": str(marker)},
        engine={"kind": "ray"},
        **common,
    )
    done = run(experiment, tmp_path, lines.append)
    remover.join()
    assert done.manifest["actors"] == 4
    assert done.result_hash == undisturbed.result_hash
    assert STATE_LOST + "; falling back to the last checkpoint" in lines
    assert "continuing after round 5" in lines
