"""Ray's private sides are still what we take them for: a new version may have moved them."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from ray.job_submission import JobSubmissionClient

from fedsim.cluster import ray_compat as compat
from fedsim.cluster.connection import connected
from fedsim.cluster.settings import EngineSettings

MOVED = "Ray {version} no longer has what {name} uses ({error}); mend fedsim/cluster/ray_compat.py"


def still_there(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of compat; fail in plain words if Ray has changed beneath it."""
    try:
        return function(*arguments)
    except (ImportError, AttributeError, TypeError) as error:
        pytest.fail(MOVED.format(version=ray.__version__, name=function.__name__, error=error))


@pytest.mark.usefixtures("own_ray")
class TestOfTheCluster:
    def test_the_table_of_actors(self) -> None:
        class Someone:
            def up(self) -> None:
                pass

        actor = ray.remote(Someone).options(num_cpus=1).remote()
        ray.get(actor.up.remote())
        table = still_there(compat.actor_table)
        entry = table[still_there(compat.actor_id, actor)]
        here = ray.get_runtime_context().get_node_id()
        assert entry["State"] == "ALIVE"
        assert entry["ActorClassName"].endswith("Someone")
        assert entry["Pid"] > 0
        assert entry["Address"]["NodeID"] == here
        assert set(entry["OwnerAddress"]) == set(entry["Address"])
        ray.kill(actor)

    def test_a_lean_start(self) -> None:
        """Four Pythons of Ray's are not started, and workers are forked (by fork_server.py)."""
        scripts = set()
        for each in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # one that has just ended
                scripts |= {Path(word).name for word in each.cmdline()}
        assert scripts.isdisjoint({"dashboard.py", "log_monitor.py", "monitor.py", "agent.py"})
        assert "ray::DashboardAgent" not in scripts  # as it calls itself once it is up
        assert {"fork_server.py", "idle_agent.py"} <= scripts
        parent = ray.get(ray.remote(lambda: os.getppid()).remote())
        assert "fork_server.py" in " ".join(psutil.Process(parent).cmdline())

    def test_what_is_free_on_each_node(self) -> None:
        free = still_there(compat.free_resources)
        assert set(free) == {ray.get_runtime_context().get_node_id()}

    def test_where_objects_are(self) -> None:
        here = ray.get_runtime_context().get_node_id()
        large = ray.put(np.zeros(10**6))
        small = ray.remote(lambda: 1).remote()
        ray.get(small)
        place, with_us = still_there(compat.places, [large, small])
        assert (place["node_ids"], place["did_spill"]) == ([here], False)
        assert 8e6 < place["object_size"] < 8.1e6
        assert with_us["node_ids"] == []


def test_what_ray_says_is_logged(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from ray._private import worker

    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)
    lines = list[str]()
    monkeypatch.setattr(logging.getLogger("fedsim.ray"), "info", lines.append)
    still_there(compat.log_what_ray_says)
    said = {"lines": ["a", "b"], "pid": 1, "is_err": False}
    worker.print_to_stdstream(said, ignore_prefix=False)
    assert lines == ["a\nb"]
    assert capsys.readouterr() == ("", "")


class TestOfTheDashboard:
    def test_a_token_is_used_if_there_is_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # said by the user: nothing is changed
        still_there(compat.use_token_if_there)

    def test_how_requests_are_sent(self) -> None:
        (parent,) = JobSubmissionClient.__bases__  # whose constructor does not connect
        client = parent("http://127.0.0.1:1", headers={"name": "value"}, verify=False)
        options = still_there(compat.request_options, client)
        assert options["headers"].items() >= {("name", "value")}
        assert options["verify"] is False

    @pytest.mark.parametrize(
        ("name", "leading"),
        [("_do_request", ["self", "method", "endpoint"]), ("_raise_error", ["self", "r"])],
    )
    def test_what_our_client_overrides(self, name: str, leading: list[str]) -> None:
        method = getattr(JobSubmissionClient, name, None)
        assert method is not None, f"fedsim/sweep/submit.py overrides {name}, which Ray has not"
        parameters = inspect.signature(method).parameters
        assert list(parameters)[: len(leading)] == leading
        kinds = {parameter.kind for parameter in parameters.values()}
        assert name != "_do_request" or inspect.Parameter.VAR_KEYWORD in kinds, "takes no timeout"

    @pytest.mark.parametrize("name", compat.SUBMISSION_LOGGERS)
    def test_loggers_are_named_after_modules(self, name: str) -> None:
        assert find_spec(f"ray.{name}"), f"ray.{name} is gone; who logs in its place?"


def test_private_workers_are_as_nice_as_the_command() -> None:
    with connected(EngineSettings(kind="ray", actors=1)):
        niceness = ray.remote(lambda: os.nice(0))
        assert ray.get(niceness.remote()) == os.nice(0)
