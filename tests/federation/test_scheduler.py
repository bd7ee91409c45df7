"""Which worker gets which blocks, and which are run again: without any cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from fedsim.errors import RunError
from fedsim.federation.scheduler import IN_FLIGHT, MAX_DEATHS, Scheduler, WorkItem


def blocks(count: int) -> list[list[int]]:
    """Blocks of two clients each, [0, 1], [2, 3], …"""
    return [[2 * i, 2 * i + 1] for i in range(count)]


def send(
    scheduler: Scheduler[str], ready: Sequence[str], count: int = 0
) -> list[tuple[str, WorkItem]]:
    return list(scheduler.hand_out(ready, count or len(ready)))


def content(sent: Sequence[tuple[str, WorkItem]]) -> list[tuple[str, list[int]]]:
    """What was sent to whom: blocks by the half of their first client."""
    return [(worker, [block[0] // 2 for block in item.blocks]) for worker, item in sent]


@pytest.mark.parametrize(
    ("count", "at_once", "workers", "expected", "workers_in_all"),
    [
        (0, False, "a", [], 1),
        (2, False, "", [], 2),
        # In order, one round of workers at a time; what is left goes one by one.
        (4, False, "ab", [("a", [0]), ("b", [1]), ("a", [2]), ("b", [3])], 2),
        (3, False, "a", [("a", [0]), ("a", [1])], 1),
        # Many at once while many wait, dealt back and forth, for the first cost the most.
        (
            16,
            False,
            "ab",
            [("a", [0, 3, 4, 7, 8]), ("b", [1, 2, 5, 6, 9]), ("a", [10, 13]), ("b", [11, 12])],
            2,
        ),
        # Workers that have not started are left their share.
        (16, False, "a", [("a", [0, 1, 2]), ("a", [3, 4])], 4),
        (8, True, "a", [("a", [0, 1, 2, 3]), ("a", [4, 5])], 2),
        (7, True, "ab", [("a", [0, 3, 4]), ("b", [1, 2, 5, 6])], 2),
    ],
)
def test_which_blocks_are_handed_out(
    count: int, at_once: bool, workers: str, expected: list[Any], workers_in_all: int
) -> None:
    scheduler: Scheduler[str] = Scheduler(blocks(count), at_once)
    sent = send(scheduler, list(workers), workers_in_all)
    assert content(sent) == expected
    assert scheduler.waiting == count - sum(len(some) for _, some in expected)
    assert scheduler.all_accepted == (count == 0)
    held = set()
    for worker, item in sent:  # the sum comes with the only item that a worker holds
        assert item.with_sum == (at_once and worker not in held)
        held.add(worker)
    if at_once and workers_in_all == len(workers):
        assert not scheduler.to_ask()
    without: Scheduler[str] = Scheduler(blocks(count), at_once, sums=False)
    assert not any(item.with_sum for _, item in send(without, list(workers), workers_in_all))


def test_what_is_left_goes_as_room_comes() -> None:
    scheduler: Scheduler[str] = Scheduler(blocks(7))
    sent = send(scheduler, ["a", "b"])  # two blocks, and one, each
    scheduler.done(sent[1][1], None)
    assert content(send(scheduler, ["a", "b"])) == [("b", [6])]


def test_at_once_what_was_lost_still_goes_alone() -> None:
    scheduler: Scheduler[str] = Scheduler(blocks(4), at_once=True)
    send(scheduler, ["a", "b"])
    assert scheduler.lose("b", "gone") == 2
    assert content(send(scheduler, ["a", "c"])) == [("c", [1]), ("a", [2])]


def test_nobody_holds_more_than_may_be_in_flight() -> None:
    scheduler: Scheduler[str] = Scheduler(blocks(50))
    held = Counter(worker for worker, _ in send(scheduler, ["a", "b"]))
    assert held == {"a": IN_FLIGHT, "b": IN_FLIGHT}
    assert send(scheduler, ["a", "b"]) == []


class TestTheEnd:
    def test_done_is_not_accepted(self) -> None:
        scheduler: Scheduler[str] = Scheduler(blocks(1))
        ((worker, item),) = send(scheduler, ["a"])
        assert not scheduler.are_done([item])
        scheduler.done(item, None)
        assert scheduler.are_done([item])
        assert not scheduler.all_accepted
        scheduler.accept(worker, [item])
        assert scheduler.all_accepted

    def test_workers_are_asked_once_nothing_waits(self) -> None:
        scheduler: Scheduler[str] = Scheduler(blocks(5))
        sent = send(scheduler, ["a", "b"])
        assert scheduler.waiting == 1
        assert scheduler.to_ask() == {}
        scheduler.done(sent[1][1], None)
        sent += send(scheduler, ["a", "b"])
        of_a, of_b = ([item for worker, item in sent if worker == w] for w in "ab")
        assert scheduler.to_ask() == {"a": of_a, "b": of_b}
        assert scheduler.to_ask() == {}
        scheduler.lose("a", "gone")
        assert scheduler.to_ask() == {}
        scheduler.done(of_b[1], None)
        ((_, again),) = send(scheduler, ["b"])
        assert scheduler.to_ask() == {}  # one block waits still
        scheduler.done(again, None)
        ((_, last),) = send(scheduler, ["b"])
        assert scheduler.to_ask() == {"b": [again, last]}  # without what it was asked for before


class TestALoss:
    def test_blocks_wait_again_before_all_others(self) -> None:
        scheduler: Scheduler[str] = Scheduler(blocks(16))
        sent = send(scheduler, ["a", "b"])  # as above
        scheduler.done(sent[0][1], None)
        assert scheduler.lose("a", "gone") == 7  # five done, two under way
        assert scheduler.waiting == 9
        (again,) = send(scheduler, ["b", "c"])[:1]
        assert content([again]) == [("c", [0, 3, 4])]

    def test_the_first_under_way_is_blamed_and_goes_alone(self) -> None:
        scheduler: Scheduler[str] = Scheduler(blocks(16))
        send(scheduler, ["a"])  # eight blocks, and four
        assert scheduler.lose("a", "gone") == 12
        sent = send(scheduler, ["b"])
        assert content(sent) == [("b", [0]), ("b", [1])]
        assert [item.deaths for _, item in sent] == [1, 1]

    @pytest.mark.parametrize(("done", "deaths"), [(False, [1, 0]), (True, [1, 1])])
    def test_who_is_blamed(self, done: bool, deaths: list[int]) -> None:
        """Not what waited behind it; all that it held if it was at none."""
        scheduler: Scheduler[str] = Scheduler(blocks(2))
        for _, item in send(scheduler, ["a"]):
            if done:
                scheduler.done(item, None)
        assert scheduler.lose("b", "gone") == 0  # which holds nothing
        assert scheduler.waiting == 0
        assert scheduler.lose("a", "gone") == 2
        assert [item.deaths for _, item in send(scheduler, ["b"])] == deaths

    def test_a_block_that_takes_down_one_after_the_other_stops_the_run(self) -> None:
        scheduler: Scheduler[str] = Scheduler(blocks(1))
        for n in range(MAX_DEATHS - 1):
            send(scheduler, [f"worker {n}"])
            scheduler.lose(f"worker {n}", "gone")
        send(scheduler, ["last"])
        with pytest.raises(RunError) as told:
            scheduler.lose("last", "it was killed")
        assert str(told.value) == (
            "3 actors in a row died while working on clients [0, 1] (out of memory?): "
            "it was killed"
        )
