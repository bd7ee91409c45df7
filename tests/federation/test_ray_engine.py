"""What the driver tells and knows of kept states: without any Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, ObjectLostError

from fedsim.federation import ray_engine
from fedsim.federation.ray_engine import is_lost, store_notice

GB = 10**9


@pytest.mark.parametrize(
    ("nodes", "found", "lost"),
    [
        (["other"], AssertionError("it would be brought here"), False),
        ([], AssertionError("it lies in this process"), False),
        (["here"], {}, False),
        (["here"], GetTimeoutError(), False),
        (["here"], ObjectLostError("", None, ""), True),
    ],
)
def test_a_state_is_lost_if_an_error_lies_in_its_place(
    monkeypatch: pytest.MonkeyPatch, nodes: list[str], found: Any, lost: bool
) -> None:
    def get(handle: str, timeout: float) -> Any:
        assert (handle, timeout) == ("state", 0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(ray_engine, "places", lambda objects: [{"node_ids": nodes}])
    monkeypatch.setattr(ray_engine, "ray", SimpleNamespace(get=get))
    assert is_lost("state", "here") is lost


@pytest.mark.parametrize(
    ("kept", "spilled", "clients", "told"),
    [
        ([], [], 100, None),
        ([GB], [], 8, None),
        ([GB] * 8, [], 8, None),
        ([3 * GB, GB], [], 4, None),
        # What all would keep, after the first did.
        (
            [3 * GB, GB],
            [],
            5,
            "2 clients keep 4 GB; all 5 would keep 10 GB, and Ray's object store has 10 GB. What "
            "does not fit goes to the nodes' disks, and rounds take longer",
        ),
        # Others may have filled the store.
        (
            [GB] * 3,
            [GB],
            3,
            "3 clients keep 3 GB, 1 GB of it on disk; all 3 would keep 3 GB, and Ray's object "
            "store has 10 GB. What does not fit goes to the nodes' disks, and rounds take longer",
        ),
    ],
)
def test_what_is_told_of_the_store(
    kept: list[int], spilled: list[int], clients: int, told: str | None
) -> None:
    assert store_notice(kept, spilled, clients, 10 * GB) == told
