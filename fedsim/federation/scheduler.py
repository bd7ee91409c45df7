"""Assigns blocks of a call to workers, and again when a worker is lost."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fedsim.errors import RunError
from fedsim.federation.engine import Block

IN_FLIGHT = 2  # items per worker: one in work and one waiting
MAX_DEATHS = 3  # workers that may die of one block

W = TypeVar("W", bound=Hashable)


@dataclass(eq=False)
class WorkItem:
    """Blocks sent to a worker in one message.

    Attributes:
        deaths: number of workers that died of them.
        with_sum: the worker holds nothing else and returns its sum with the answer.
        answer: the worker's answer.
    """

    blocks: list[Block]
    deaths: int = 0
    with_sum: bool = False
    answer: Any = None

    @property
    def clients(self) -> list[int]:
        return [id for block in self.blocks for id in block]


class Scheduler(Generic[W]):
    """The states of the blocks of one call.

    A block waits, is under way, is done, and is accepted once its worker's sum has arrived. When
    no block waits any more, each worker is asked for its sum, after the blocks that it still has.
    If a worker is lost, its blocks that were not accepted wait again, before all others.

    Args:
        blocks: blocks of the call, in the order in which they are handed out.
        at_once: deal all blocks out at once in equal parts, rather than in ever smaller ones.
        sums: workers hold partial sums of their blocks.
    """

    def __init__(self, blocks: Sequence[Block], at_once: bool = False, sums: bool = True) -> None:
        self._at_once, self._sums = at_once, sums
        self._waiting = deque(WorkItem([block]) for block in blocks)
        self._under_way: dict[WorkItem, W] = {}  # in the order handed out
        self._in_flight: Counter[W] = Counter()  # number of these per worker
        self._done: dict[W, list[WorkItem]] = {}
        self._to_ask: dict[W, list[WorkItem]] = {}  # for the results of these

    @property
    def waiting(self) -> int:
        """Number of blocks that wait for a worker."""
        return sum(len(item.blocks) for item in self._waiting)

    @property
    def all_accepted(self) -> bool:
        return not (self._waiting or self._under_way or self._done)

    def hand_out(self, ready: Sequence[W], count: int) -> Iterator[tuple[W, WorkItem]]:
        """Give blocks to workers with capacity, one item each.

        A message costs as much as a small client, so an item has many blocks while many are left,
        and few towards the end, which evens out finishing times.

        Args:
            ready: workers that have started.
            count: number of all workers, including others.
        """
        for room in range(1, IN_FLIGHT + 1):
            free = [worker for worker in ready if self._in_flight[worker] < room]
            # Equal shares, with one more left for faster workers.
            waiting = len(self._waiting)
            share = -(-waiting // count) if self._at_once else max(1, waiting // (count + 1))
            for worker, item in zip(free, self._next_items(share, len(free)), strict=False):
                holds_nothing = not self._in_flight[worker] and worker not in self._done
                self._under_way[item] = worker
                self._in_flight[worker] += 1
                if self._at_once and self._sums and holds_nothing:
                    item.with_sum = True
                else:
                    self._to_ask.setdefault(worker, []).append(item)
                yield worker, item

    def done(self, item: WorkItem, answer: Any) -> None:
        """A worker has finished an item and still holds its sum."""
        worker = self._under_way.pop(item)
        self._in_flight[worker] -= 1
        item.answer = answer
        self._done.setdefault(worker, []).append(item)

    def to_ask(self) -> dict[W, list[WorkItem]]:
        """Workers to ask for their sums, and the items that these contain; each item once."""
        if self._waiting:
            return {}
        asked, self._to_ask = self._to_ask, {}
        return asked

    def are_done(self, items: Sequence[WorkItem]) -> bool:
        """Whether all these items are done."""
        return not any(item in self._under_way for item in items)

    def busy(self, apart_from: set[WorkItem]) -> set[W]:
        """Workers that hold further items."""
        under_way = {worker for item, worker in self._under_way.items() if item not in apart_from}
        return under_way | {
            worker for worker, items in self._done.items() if not apart_from.issuperset(items)
        }

    def accept(self, worker: W, items: Sequence[WorkItem]) -> None:
        """Accept items whose sum has arrived."""
        left = [item for item in self._done.pop(worker) if item not in items]
        if left:
            self._done[worker] = left

    def lose(self, worker: W, why: str) -> int:
        """Requeue all blocks that a lost worker held or worked on.

        Args:
            why: the reason of the loss.

        Returns:
            The number of blocks.

        Raises:
            RunError: too many workers died of one block.
        """
        done = self._done.pop(worker, [])
        under_way = [item for item, holder in self._under_way.items() if holder == worker]
        for item in under_way:
            del self._under_way[item]
        del self._in_flight[worker]
        self._to_ask.pop(worker, None)
        for item in under_way[:1] or done:  # the item in work, or all that it held
            item.deaths += 1
            if item.deaths == MAX_DEATHS:
                raise RunError(
                    f"{MAX_DEATHS} actors in a row died while working on clients {item.clients} "
                    f"(out of memory?): {why}"
                )
        # One by one, to isolate a block that kills its worker.
        back = [
            WorkItem([block], item.deaths) for item in (*done, *under_way) for block in item.blocks
        ]
        self._waiting.extendleft(reversed(back))
        return len(back)

    def _next_items(self, share: int, count: int) -> list[WorkItem]:
        """Up to `count` items of the next blocks, `share` of them each.

        Blocks are sorted by cost: dealt out back and forth, all items cost about the same. Blocks
        that were lost before go alone.
        """
        count = min(count, len(self._waiting))
        next_ones = [
            self._waiting.popleft() for _ in range(min(share * count, len(self._waiting)))
        ]
        if any(item.deaths for item in next_ones):
            self._waiting.extendleft(reversed(next_ones[count:]))
            return next_ones[:count]
        items = [WorkItem([]) for _ in range(count)]
        for k, single in enumerate(next_ones):
            turn, place = divmod(k, count)
            items[place if turn % 2 == 0 else count - 1 - place].blocks += single.blocks
        return items
