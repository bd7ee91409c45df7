"""What is told of kept states that do not fit Ray's object store."""

from __future__ import annotations

import pytest

from fedsim.federation.ray_engine import store_notice

GB = 10**9


@pytest.mark.parametrize(
    ("kept", "spilled", "clients"),
    [([], [], 100), ([GB], [], 8), ([GB] * 8, [], 8), ([3 * GB, GB], [], 4)],
)
def test_nothing_if_all_will_fit(kept: list[int], spilled: list[int], clients: int) -> None:
    assert store_notice(kept, spilled, clients, 10 * GB) is None


def test_what_all_would_keep_after_the_first_did() -> None:
    assert store_notice([3 * GB, GB], [], 5, 10 * GB) == (
        "2 clients keep 4 GB; all 5 would keep 10 GB, and Ray's object store has 10 GB. What does "
        "not fit goes to the nodes' disks, and rounds take longer"
    )


def test_what_is_on_the_disk_though_it_would_fit() -> None:
    """Others may have filled the store."""
    told = store_notice([GB] * 3, [GB], 3, 10 * GB)
    assert told is not None
    assert told.startswith("3 clients keep 3 GB, 1 GB of it on disk; all 3 would keep 3 GB")
