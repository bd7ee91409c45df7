"""Runs whose clients are trained in stacks: what is chosen, recorded, and told."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from misbehaving_methods import IN_STACKS

from experiments import QUARTER, Finish, by_day, interrupted, small_experiment
from fedsim import Run, resume, run
from fedsim.analysis.replay import replay
from fedsim.errors import ClientError
from fedsim.federation import LocalEngine
from fedsim.launch.prepare import prepare
from fedsim.results.manifest import clients_per_step, halved
from fedsim.simulate import Progress
from fedsim.training import Stack, TrainingJob


def stacked(V: int | str, **sections: Any) -> dict[str, Any]:
    return {"engine": {"kind": "local", "clients_per_step": V}, **sections}


# FailsNowAndThen keeps a nested state as well.
@pytest.mark.parametrize("habit", by_day(IN_STACKS, {*IN_STACKS} - {"NestedState"}))
def test_what_clients_do_is_the_same_in_a_stack(
    finish: Finish, tmp_path: Path, habit: str
) -> None:
    """State, failures, torch's generator, several trainings: as in the loop, but for rounding."""
    common: dict[str, Any] = {
        "data": QUARTER,
        "method": {"name": f"misbehaving_methods:{habit}"},
        "train": {"rounds": 4, "on_client_error": "skip"},
        "checkpoint": {"every": 2},
    }
    loop, stack = finish(**common), finish(**stacked(4, **common))
    for name, weights in loop.weights().items():
        np.testing.assert_allclose(stack.weights()[name], weights, atol=1e-4)
    exact = ["round", "client", "samples", "bytes_up", "bytes_down", "steps", "remembered"]
    columns = [c for c in exact if c in loop.clients]
    assert stack.clients[columns].equals(loop.clients[columns])
    assert list(stack.rounds["failed"]) == list(loop.rounds["failed"])

    folder = interrupted(small_experiment(**stacked(4, **common)), tmp_path / "interrupted", 3)
    assert resume(folder).result_hash == stack.result_hash


def log_of(done: Run) -> str:
    return (done.path / "log.txt").read_text()


@pytest.mark.parametrize("wanted", [3, "auto"])
def test_the_number_is_put_on_record(finish: Finish, wanted: int | str) -> None:
    done = finish(**stacked(wanted, train={"rounds": 1}))
    chosen = done.manifest["clients_per_step"]
    if wanted == 3:
        assert chosen == 3
        assert "3 clients are trained at once, as requested" in log_of(done)
    else:
        assert chosen in (1, 2, 4, 8)
        assert f"clients trained at once: {chosen}, as measured (a client in 1: " in log_of(done)
        again = finish(**stacked(chosen, train={"rounds": 1}))
        assert again.result_hash == done.result_hash


@pytest.mark.parametrize(("alone", "together", "chosen"), [(1.0, 20.0, 1), (2.0, 0.5, 8)])
def test_auto_takes_what_is_fastest(
    monkeypatch: pytest.MonkeyPatch, alone: float, together: float, chosen: int
) -> None:
    """With a clock that stands still but for training."""
    now = [0.0]
    monkeypatch.setattr("fedsim.training.stack.time.perf_counter", lambda: now[0])

    def spend(seconds: float) -> Callable[..., None]:
        def work(*arguments: Any) -> None:
            now[0] += seconds

        return work

    experiment = small_experiment(**stacked("auto"))
    dataset, splits, spec = prepare(experiment)
    engine = LocalEngine(experiment.engine, spec, dataset, splits)
    assert engine._worker.context.why_not_stacked is None
    monkeypatch.setattr("fedsim.training.stack.train", spend(alone))
    monkeypatch.setattr(Stack, "train", spend(together))
    V, why = engine.choose_clients_per_step(list(range(10)))
    engine.close()
    assert chosen == V
    assert f"a client in 1: {1000 * alone:.2f} ms" in why


def test_a_network_that_cannot_be_stacked_is_trained_alone_and_the_log_says_why(
    finish: Finish,
) -> None:
    common = {"data": QUARTER, "model": {"name": "networks:normalised"}, "train": {"rounds": 1}}
    done = finish(**stacked("auto", **common))
    assert done.manifest["clients_per_step"] == 1
    why = "layer 'features.2' (BatchNorm1d) mixes examples or keeps running statistics"
    assert f"clients are trained one by one: {why}" in log_of(done)
    assert done.result_hash == finish(**common).result_hash


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("OwnLoss", "clients have different functions"),
        ("BranchingLoss", ".*vmap"),
        ("NoisyGradient", ".*perturb or prepare draws random numbers"),
    ],
)
def test_methods_that_cannot_be_stacked_are_trained_alone(
    finish: Finish, name: str, why: str
) -> None:
    """The log says once why they are not stacked."""
    common = {"method": {"name": f"misbehaving_methods:{name}"}, "train": {"rounds": 3}}
    done, alone = finish(**stacked(4, **common)), finish(**common)
    told = re.findall("clients are not stacked, but trained one by one: .*", log_of(done))
    assert len(told) == 1
    assert re.search(why, told[0])
    for layer, weights in alone.weights().items():
        np.testing.assert_allclose(done.weights()[layer], weights, atol=1e-5)


def test_what_fails_alone_too_is_that_client_s_error(finish: Finish) -> None:
    with pytest.raises(ClientError, match=r"local_update: KeyError: 'missing' \(misbehaving"):
        finish(**stacked(4, method={"name": "misbehaving_methods:BrokenLoss"}))


def test_more_clients_than_a_sum_in_floating_point_may_have(finish: Finish) -> None:
    many_clients = {"kind": "iid", "clients": 140}
    common = {"data": QUARTER, "partition": many_clients, "train": {"rounds": 1}}
    many, alone = (finish(**stacked(V, **common)) for V in (140, 1))
    for name, weights in alone.weights().items():
        np.testing.assert_allclose(many.weights()[name], weights, atol=1e-5)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For how many clients at once there is memory, in a list that a test may change."""
    room, train = [100], Stack.train

    def scarce(self: Stack, jobs: Sequence[TrainingJob], *rest: Any) -> Any:
        if len(jobs) > room[0]:
            raise torch.OutOfMemoryError("tried to allocate 20 GiB")
        return train(self, jobs, *rest)

    monkeypatch.setattr(Stack, "train", scarce)
    return room


def test_stacks_halved_in_mid_run_are_of_the_size_on_record(
    tmp_path: Path, room: list[int]
) -> None:
    """By a resumption and by a replay, too."""
    sections = {"data": QUARTER, "method": {"name": "scaffold"}}
    sections |= {"train": {"rounds": 8}, "checkpoint": {"every": 3}}
    experiment = small_experiment(**stacked(8, **sections))

    def disturb(event: Progress) -> None:
        if isinstance(event, dict) and event["round"] == 4:
            room[0] = 2

    done = run(experiment, tmp_path / "done", disturb)
    assert (done.manifest["clients_per_step"], done.manifest["halved"]) == (2, [[3, 8], [3, 4]])
    told = (
        "not enough memory to train 4 clients at once "
        "(OutOfMemoryError: tried to allocate 20 GiB); from round 4 on 2 are, as the manifest says"
    )
    assert f"{told}\n" in log_of(done)
    room[0] = 100
    again = replay(done, after=1)  # raises if a round is not what it was
    while again.after < 8:
        again.next_round()
    again._engine.close()

    def interrupt(event: Progress) -> None:
        disturb(event)
        if isinstance(event, dict) and event["round"] == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path / "interrupted", interrupt)
    (folder,) = (tmp_path / "interrupted" / "small").iterdir()
    assert resume(folder).result_hash == done.result_hash


@pytest.mark.parametrize(
    ("before", "done", "after"),
    [
        ((8, []), 0, (4, [[0, 8]])),
        ((4, [[10, 8]]), 10, (2, [[10, 8], [10, 4]])),
        ((4, [[10, 8]]), 20, (2, [[10, 8], [20, 4]])),
        # Round 10's checkpoint is damaged, and there is no memory for what was before it.
        ((4, [[10, 8]]), 5, (4, [[5, 8]])),
    ],
)
def test_what_is_on_record_of_halved_stacks(
    before: tuple[int, Any], done: int, after: tuple[int, Any]
) -> None:
    keys = ("clients_per_step", "halved")
    manifest = dict(zip(keys, before, strict=True))
    changed = halved(manifest, done)
    assert changed == dict(zip(keys, after, strict=True))
    for t in range(1, done + 1):  # of what has been done nothing changes
        assert clients_per_step(changed, t) == clients_per_step(manifest, t)
    assert clients_per_step(changed, done + 1) == clients_per_step(manifest, done + 1) // 2
