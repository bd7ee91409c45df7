"""What the driver knows of kept states on nodes that are gone, with a stand-in for Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, ObjectLostError

from fedsim.federation import ray_engine
from fedsim.federation.ray_engine import is_lost


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
