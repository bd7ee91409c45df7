"""Simulated devices: time, energy, selection, traces; the same bits each time."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from experiments import (
    NETWORK_METHODS,
    WHOLE,
    Finish,
    by_day,
    federation,
    grid_in_process,
    server_states,
    small_experiment,
    with_method,
)
from fedsim import Client, Grid, Update, load
from fedsim.conditions.devices import Devices, Fleet, read_availability, read_capacities
from fedsim.errors import BadInput, RunError
from fedsim.methods.fedavg import FedAvg
from fedsim.results.report.curves import costs
from fedsim.results.report.html import Report
from fedsim.results.report.results import results
from fedsim.support.rng import keyed_rng

SPREAD: dict[str, Any] = {"speed": {"median": 100, "sigma": 1}}
IID = {"kind": "iid", "clients": 10}
TEN: dict[str, Any] = {"data": WHOLE, "partition": IID}


def fleet(clients: int = 10, seed: int = 0, **settings: Any) -> Fleet:
    return Fleet(Devices.model_validate(settings), clients, seed)


class TestTime:
    def test_is_that_of_the_formula(self) -> None:
        devices = fleet(speed=50, download=8, upload=2, power={"training": 4, "radio": 0.5})
        seconds = devices.seconds([0, 3], np.array([100.0, 0.0]), 1_000_000, 250_000)
        np.testing.assert_allclose(seconds, [1 + 2 + 1, 1 + 1])
        joules = devices.joules([0, 3], np.array([100.0, 0.0]), 1_000_000, 250_000)
        np.testing.assert_allclose(joules, [0.5 * 2 + 4 * 2, 0.5 * 2])

    def test_a_quantity_is_drawn_for_each_client(self) -> None:
        devices = fleet(2000, speed={"median": 30, "sigma": 0.5})
        assert np.median(devices.speed) == pytest.approx(30, rel=0.05)
        assert np.log(devices.speed).std() == pytest.approx(0.5, rel=0.05)
        again = fleet(2000, speed={"median": 30, "sigma": 0.5})
        np.testing.assert_array_equal(devices.speed, again.speed)
        assert not np.array_equal(devices.speed, fleet(2000, seed=1, **SPREAD).speed)

    def test_of_a_run(self, finish: Finish) -> None:
        sections: dict[str, Any] = {
            **TEN,
            "train": {"rounds": 3, "participation": 0.5, "local_epochs": 2, "batch_size": 16},
        }
        devices = {**SPREAD, "download": 8, "upload": 4}
        done, plain = finish(devices=devices, **sections), finish(**sections)
        known = fleet(**devices)
        clients = done.clients
        size = clients["bytes_up"].iloc[0]
        expected = [
            size / 1e6 + size / 0.5e6 + 2 * n / known.speed[k]
            for k, n in zip(clients["client"], clients["samples"], strict=True)
        ]
        np.testing.assert_allclose(clients["simulated_seconds"], expected)
        slowest = clients.groupby("round")["simulated_seconds"].max().to_numpy()
        np.testing.assert_allclose(done.rounds["simulated_seconds"], slowest)
        np.testing.assert_allclose(done.rounds["total_simulated_seconds"], slowest.cumsum())
        energy = clients.groupby("round")["energy_joules"].sum().to_numpy()
        np.testing.assert_allclose(done.rounds["total_energy_joules"], energy.cumsum())
        # Devices that fail nobody change nothing else, nor does a deadline that nobody misses.
        shared = [c for c in plain.rounds if c not in ("seconds",)]
        assert done.rounds[shared].equals(plain.rounds[shared])
        assert (done.rounds["dropped"] == 0).all()
        late = {"deadline": 1e6, "partial_work": True}
        assert finish(devices={**devices, **late}, **sections).result_hash == done.result_hash


def select(devices: Fleet, clients: int = 10, wanted: int = 10, **changes: Any) -> Any:
    examples = np.full(clients, 100.0)
    given = {"sampled": np.arange(clients), "wanted": wanted, "examples": examples, "t": 1}
    return devices.select(**{**given, "down": 125_000, "up": 125_000, **changes})


class TestSelection:
    def test_who_misses_the_deadline_is_left_out(self, finish: Finish) -> None:
        """As many as the formula says, of FedAvg, which neither trains nor sends more."""
        devices = {**SPREAD, "download": 8, "upload": 8, "deadline": 2.0}
        done = finish(**TEN, train={"rounds": 2, "batch_size": 10}, devices=devices)
        fed = federation(small_experiment(**TEN))
        needed = (
            2 * 4 * fed.server.model.size / 1e6 + fed.server.num_samples / fleet(**SPREAD).speed
        )
        late = set(np.flatnonzero(needed > 2).tolist())
        assert 0 < len(late) < 10
        for _, rows in done.clients.groupby("round"):
            assert set(rows.loc[rows["dropped"] == "deadline", "client"]) == late
            assert rows["steps"].notna().sum() == 10 - len(late)
        assert (done.rounds["simulated_seconds"] == 2).all()  # for those that are late

    def test_the_slowest_beyond_those_wanted_are_surplus(self) -> None:
        devices = fleet(over_selection=2, **SPREAD)
        found = select(devices, wanted=4)
        order = np.argsort(-devices.speed)
        assert sorted(found.kept) == sorted(order[:4])
        assert set(found.dropped) == set(order[4:].tolist())
        assert set(found.dropped.values()) == {"surplus"}

    def test_surplus_clients_take_the_place_of_those_that_drop_out(self) -> None:
        devices = fleet(100, over_selection=2, dropout=0.3)
        found = select(devices, 100, wanted=50)
        assert len(found.kept) == 50
        reasons = list(found.dropped.values())
        assert 15 < reasons.count("dropout") < 45
        assert reasons.count("dropout") + reasons.count("surplus") == 50

    @given(dropout=st.floats(0, 0.9), wanted=st.integers(1, 10), t=st.integers(1, 5))
    def test_everybody_is_kept_or_dropped(self, dropout: float, wanted: int, t: int) -> None:
        found = select(fleet(**SPREAD, dropout=dropout, packet_error=0.5), wanted=wanted, t=t)
        assert sorted([*found.kept.tolist(), *found.dropped]) == list(range(10))
        assert len(found.kept) <= wanted
        assert found.lost <= set(found.kept.tolist())

    def test_of_a_run(self, finish: Finish) -> None:
        """Late, surplus and lost clients cost, and do not count."""
        devices = {**SPREAD, "over_selection": 1.5, "dropout": 0.2, "packet_error": 0.3}
        done = finish(
            partition={"kind": "iid", "clients": 20},
            train={"rounds": 4, "participation": 0.4},
            devices=devices,
        )
        clients = done.clients
        gone = clients["dropped"].notna()
        assert (clients[gone].groupby("round").size() == done.rounds["dropped"].tolist()).all()
        assert (clients.groupby("round").size() == 12).all()
        assert clients.loc[gone, "steps"].isna().all()
        assert (clients.loc[gone, "bytes_down"] > 0).all()
        assert (clients.loc[gone, "energy_joules"] > 0).all()
        assert clients["lost"].sum() > 0

    def test_only_those_online_are_sampled(self, finish: Finish) -> None:
        done = finish(
            partition={"kind": "iid", "clients": 20},
            train={"rounds": 3},
            devices={"available": 0.5},
        )
        for t, rows in done.clients.groupby("round"):
            chances = keyed_rng(0, "devices/online", int(t)).random(20)
            assert rows["client"].tolist() == np.flatnonzero(chances < 0.5).tolist()


class TrainsThreeTimes(FedAvg):
    """A method of a user's own, whose work is three times that of FedAvg."""

    name: str = "test_devices:TrainsThreeTimes"

    def local_update(self, client: Client, weights: Tensor) -> Update:
        for _ in range(3):
            weights = client.train(weights)
        return Update(weights=weights, more=torch.cat([weights, weights]))


OWN_LOOPS = {"apfl", "perfedavg", "pfedme", "xpfl"}
ALL = [n for n in NETWORK_METHODS if n != "fedbuff"]
BY_DAY = ("scaffold", "fedaux", "fedfed", "ifca")
SLOW = {"speed": {"median": 200, "sigma": 1.2}, "upload": {"median": 5, "sigma": 1}}


class TestDeadlines:
    """What a method computes and sends in a round is what its clients have time for."""

    @pytest.mark.parametrize("partial", [False, True], ids=["", "partial"])
    @pytest.mark.parametrize("name", [*by_day(ALL, BY_DAY), "test_devices:TrainsThreeTimes"])
    def test_every_method_keeps_them(self, finish: Finish, name: str, partial: bool) -> None:
        own = with_method(
            name,
            train={"rounds": 4, "local_epochs": 3},
            partition=IID,
            devices={**SLOW, "deadline": 0.7, "partial_work": partial},
        )
        if partial and name in OWN_LOOPS:
            with pytest.raises(BadInput, match="has a training loop of its own"):
                small_experiment(**own)
            return
        done = finish(**own)
        assert (done.rounds["simulated_seconds"] <= 0.7 * (1 + 1e-9)).all()
        if "simulated_seconds" in done.clients:
            assert (done.clients["simulated_seconds"].dropna() <= 0.7 * (1 + 1e-9)).all()
        if done.rounds["dropped"].any():
            dropped = done.clients.groupby("round")["dropped"].count()
            assert dropped.tolist() == done.rounds["dropped"].tolist()

    @pytest.mark.parametrize("name", ["fedavg", "local"])
    def test_partial_work_is_fewer_steps(self, finish: Finish, name: str) -> None:
        """Also of clients that send nothing."""
        devices = {"speed": {"median": 100, "sigma": 1.5}, "deadline": 1.0, "partial_work": True}
        train = {"rounds": 1, "batch_size": 4, "local_epochs": 2}
        done = finish(method={"name": name}, **TEN, train=train, devices=devices)
        kept = done.clients[done.clients["steps"].notna()]
        full = 2 * np.ceil(kept["samples"] / 4)
        assert (kept["steps"] < full).any()
        assert (kept["steps"] == full).any()
        assert (kept["simulated_seconds"] <= 1.0 + 1e-9).all()
        assert done.rounds["simulated_seconds"][0] == pytest.approx(
            1.0 if len(kept) < 10 else kept["simulated_seconds"].max()
        )

    def test_partial_work_is_shared_out(self, finish: Finish) -> None:
        """FedRep's head and features, and three trainings alike, get the same share each."""
        own = {"name": "test_devices:TrainsThreeTimes"}
        for method, parts in (({"name": "fedrep", "head_epochs": 3}, 2), (own, 3)):
            done = finish(
                method=method,
                **TEN,
                train={"rounds": 1, "local_epochs": 3, "batch_size": 4},
                devices={**SLOW, "deadline": 1.5, "partial_work": True},
            )
            rows = done.clients[done.clients["steps"].notna()]
            full = 3 * np.ceil(rows["samples"] / 4)
            hurried = rows[rows["steps"] < full]
            assert len(hurried)
            seconds = hurried["simulated_seconds"]
            assert (seconds <= 1.5).all()
            # One part of so many takes its share of the time, within a step for each part.
            speed = fleet(**SLOW).speed[hurried["client"]]
            own = hurried["steps"] * 4 / speed
            assert (abs(parts * own - seconds) <= (1 + parts) * 4 / speed + 0.1 * 1.5).all()

    @pytest.mark.parametrize(
        ("sections", "devices"),
        [
            # A head alone is sent; the whole model would take too long.
            (
                {"method": {"name": "lg_fedavg"}},
                {"speed": 1e6, "download": 100, "upload": 0.02, "deadline": 2.0},
            ),
            (
                {"uplink": {"name": "topk"}},
                {"speed": 1000, "download": 100, "upload": 0.05, "deadline": 1.0},
            ),
        ],
        ids=["a part", "a codec"],
    )
    def test_shorter_messages_meet_them(
        self, finish: Finish, sections: dict[str, Any], devices: dict[str, float]
    ) -> None:
        done = finish(**TEN, train={"rounds": 2}, devices=devices, **sections)
        assert (done.rounds["dropped"] == 0).all()
        with pytest.raises(BadInput, match="no client meets it"):
            finish(**TEN, train={"rounds": 2}, devices=devices)

    def test_clusters_of_clients_train_at_the_same_time(self, finish: Finish) -> None:
        done = finish(method={"name": "ifca"}, **TEN, train={"rounds": 2}, devices=SLOW)
        slowest = done.clients.groupby("round")["simulated_seconds"].max()
        assert (done.rounds["simulated_seconds"].to_numpy() <= 1.2 * slowest.to_numpy()).all()

    @pytest.mark.parametrize(
        ("name", "devices"),
        [
            ("fedavg", {"packet_error": 0.9999}),
            ("fedavg", {"available": 1e-9}),
            # 144 examples take 1.44 seconds, and are trained on twice.
            ("ditto", {"speed": 100, "deadline": 1.8, "upload": 100, "download": 100}),
        ],
    )
    def test_a_round_that_nobody_finishes_changes_nothing(
        self, name: str, devices: dict[str, float]
    ) -> None:
        made = small_experiment(method={"name": name}, **TEN, train={"rounds": 2}, devices=devices)
        first, *others = server_states(made)
        for state in others:
            np.testing.assert_array_equal(state.weights, first.weights)

    def test_a_round_that_everybody_misses_lasts_to_its_deadline(self, finish: Finish) -> None:
        devices = {"dropout": 0.9999, "deadline": 500.0}
        done = finish(**TEN, train={"rounds": 1}, devices=devices)
        assert done.rounds["simulated_seconds"][0] == 500


TIMES = {"active": [10, 50], "inactive": [20, 60], "finish_time": 100}


class TestTraces:
    def test_capacities(self, tmp_path: Path) -> None:
        """Of FedScale: ms for one example, and kbit/s."""
        content = {2: {"computation": 10, "communication": 8000}}
        content[10] = {"computation": 20.5, "communication": 16000}
        path = tmp_path / "capacity"
        path.write_bytes(pickle.dumps(content))
        np.testing.assert_array_equal(read_capacities(path), [[10, 8000], [20.5, 16000]])
        devices = fleet(3, capacity_trace=path)
        np.testing.assert_allclose(devices.speed, [1000 / 30, 1000 / 61.5, 1000 / 30])
        np.testing.assert_allclose(devices.upload, [1e6, 2e6, 1e6])

    def test_availability(self, tmp_path: Path) -> None:
        path = tmp_path / "behaviour.json"
        path.write_text(json.dumps({"7": TIMES, "8": {**TIMES, "active": [0, 50]}}))
        (device, _) = read_availability(path)
        online = [clock for clock in range(200) if device.online(clock)]
        once = [*range(10, 21), *range(50, 61)]
        assert online == [*once, *(100 + clock for clock in once)]
        devices = fleet(3, availability_trace=path)
        assert devices.online(1, 5.0).tolist() == [False, True, False]

    def test_time_passes_for_a_server_that_finds_nobody(
        self, finish: Finish, tmp_path: Path
    ) -> None:
        path = tmp_path / "behaviour.json"
        path.write_text(json.dumps({"1": {"active": [70], "inactive": [900], "finish_time": 999}}))
        done = finish(**TEN, train={"rounds": 3}, devices={"availability_trace": str(path)})
        assert done.rounds["simulated_seconds"][:2].tolist() == [60, 60]
        assert done.rounds["clients"].tolist() == [0, 0, 10]


def test_the_slowest_times_are_numbers() -> None:
    rates = dict.fromkeys(("speed", "download", "upload"), 1e-30)
    slowest = fleet(**rates, power={"training": 3e38, "radio": 3e38})
    asked = (np.arange(2), np.full(2, 1e12), 10**12, 10**12)
    assert np.isfinite(slowest.seconds(*asked)).all()
    assert np.isfinite(slowest.joules(*asked)).all()


class TestFedBuff:
    def test_is_the_algorithm_of_the_paper(self) -> None:
        """Events one by one; a server without a heap and without kept models."""
        made = small_experiment(
            method={"name": "fedbuff", "buffer": 3, "server_lr": 0.5},
            **TEN,
            train={"rounds": 5, "participation": 0.5},
            devices=SPREAD,
        )
        fed = federation(made)
        method, K = made.method, made.method.buffer
        weights, clock = [fed.initial_weights()], 0.0
        at_work: dict[int, tuple[float, int]] = {}
        M = round(made.train.participation * fed.num_clients)
        for t in range(1, made.train.rounds + 1):
            fed.runner.begin(t)
            rng = fed.rng("arrivals")
            buffer: dict[int, int] = {}
            while len(buffer) < K:
                idle = [k for k in range(fed.num_clients) if k not in at_work and k not in buffer]
                missing = min(M - len(at_work), len(idle))
                for k in rng.choice(idle, size=missing, replace=False) if missing else ():
                    at_work[int(k)] = (clock + float(fed.time.planned_seconds([k])[0]), t - 1)
                first = min(at_work, key=lambda k: (at_work[k][0], k))
                clock, version = at_work.pop(first)
                rng.random()
                buffer[first] = version
            step = np.zeros_like(weights[0], dtype=np.float64)
            for k, version in buffer.items():
                mean = fed.mean(method.local_update, [k], weights=weights[version], tau=0)
                step += (1 + t - 1 - version) ** -method.staleness * mean.change
            weights.append(weights[-1] + np.float32(method.server_lr * step / K))
        for state, expected in zip(server_states(made), weights, strict=True):
            np.testing.assert_allclose(state.weights, expected, rtol=2e-5, atol=2e-6)

    def test_a_step_takes_as_many_updates_as_it_should(self, finish: Finish) -> None:
        """With too few clients online updates wait for those of later rounds."""
        done = finish(
            method={"name": "fedbuff", "buffer": 4},
            **TEN,
            train={"rounds": 12},
            devices={**SPREAD, "available": 0.3, "dropout": 0.1},
        )
        trained = done.clients[done.clients["steps"].notna()].groupby("round").size()
        assert (trained == 4).all()
        assert 0 < len(trained) < 12
        stale = done.rounds["staleness"].dropna()
        assert len(stale) == len(trained)
        assert stale.iloc[0] == 0 < stale.max()
        assert (done.rounds["simulated_seconds"] > 0).all()


class TestBesideMethods:
    """What devices do to methods with several calls a round, or without a global model."""

    def test_a_lost_upload_loses_no_round_of_others(self, finish: Finish) -> None:
        """FedDisco's first call of a later round asks nobody."""
        train = {"rounds": 4}
        done = finish(
            method={"name": "feddisco"}, **TEN, train=train, devices={"packet_error": 0.3}
        )
        assert done.rounds["accuracy"].nunique() == 4

    @pytest.mark.parametrize(
        "sections",
        [
            {"method": {"name": "local"}},
            {"method": {"name": "fedper"}},
            {
                "partition": {**IID, "test_fraction": 0.2},
                "evaluate": {"clients": True},
                "uplink": {"name": "float16"},
            },
        ],
        ids=["local", "fedper", "an uplink"],
    )
    def test_hardly_anybody_is_there(self, finish: Finish, sections: dict[str, Any]) -> None:
        """And nobody may have a model yet, or anything to send."""
        train = {"rounds": 3, "participation": 0.1}
        done = finish(**{**TEN, **sections}, train=train, devices={"available": 0.05})
        assert len(done.rounds) == 3

    def test_dropped_clients_are_evaluated(self, finish: Finish) -> None:
        done = finish(
            partition={**IID, "test_fraction": 0.2},
            train={"rounds": 2},
            evaluate={"clients": True},
            devices={"dropout": 0.4},
        )
        dropped = done.clients[done.clients["dropped"].notna()]
        assert len(dropped)
        assert dropped["test_accuracy"].notna().all()


def test_simulated_time_needs_devices() -> None:
    fed = federation(small_experiment(**TEN))
    with pytest.raises(RunError, match="no section of the experiment simulates time; set devices"):
        fed.time.planned_seconds([0])


def test_tables_and_figures_have_simulated_time(tmp_path: Path, say: Any) -> None:
    content = small_experiment(
        **TEN, train={"rounds": 3}, devices={**SPREAD, "deadline": 9.0}
    ).model_dump(mode="json")
    content["grid"] = {"axes": {"method.name": ["fedavg", "fedavgm"]}, "target": 0.2}
    found = load(grid_in_process(content, tmp_path))
    assert isinstance(found, Grid)
    for row, done in zip(found.cells.to_dict("records"), found.runs, strict=True):
        clock = done.rounds["total_simulated_seconds"]
        assert row["simulated_seconds"] == clock.iloc[-1]
        first = done.rounds["accuracy"].ge(0.2).idxmax()
        assert row["seconds_to_target"] == clock[first]
    report = Report([found.path])
    (by_bytes, by_time) = costs(report.compared)
    assert by_time.heading == "Test accuracy by simulated time"
    assert by_bytes.heading == "Test accuracy by bytes sent"
    assert " s</text>" in by_time.panels[0][1].svg()
    titles = [column.title for column in results(report.compared).columns]
    assert {"simulated time", "time to 0.2"} <= set(titles)


def test_a_run_says_how_long_it_would_have_taken(tmp_path: Path, say: Any) -> None:
    made = small_experiment(**TEN, train={"rounds": 2}, devices={"speed": 0.5})
    (tmp_path / "file.yaml").write_text(made.to_yaml())
    _, text, _ = say("run", "file.yaml")
    told = re.findall(r"simulated +(\d+) min (\d+) s, ([\d.]+) Wh", text)
    ((minutes, seconds, energy),) = told
    assert 60 * int(minutes) + int(seconds) == pytest.approx(2 * 144 / 0.5, rel=0.01)
    assert float(energy) > 0
