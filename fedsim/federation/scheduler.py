"""Which worker gets which blocks of a call, and which are run again when one is lost."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fedsim.errors import RunError
from fedsim.federation.engine import Block

IN_FLIGHT = 2  # items a worker holds: one it works on, and one so that it need not wait
MAX_DEATHS = 3  # workers that a block may take down, one after the other

W = TypeVar("W", bound=Hashable)


@dataclass(eq=False)
class WorkItem:
    """Blocks that one worker is given at once.

    Attributes:
        deaths: how many workers they took down.
        with_sum: the worker holds nothing else, and hands over what it sums up with its answer.
        answer: what came back of them.
    """

    blocks: list[Block]
    deaths: int = 0
    with_sum: bool = False
    answer: Any = None

    @property
    def clients(self) -> list[int]:
        return [id for block in self.blocks for id in block]


class Scheduler(Generic[W]):
    """The blocks of one call, from the first that is handed out to the last that is accepted.

    A block waits, is under way, is done, and is accepted once what its worker held of it has been
    handed over. Once no block waits, each worker is asked to hand over what it will hold after
    those that it was given. A worker that is lost takes with it whatever of its blocks was not
    accepted yet; these wait again, before all others.

    Args:
        blocks: of the call, in the order in which they are handed out.
        at_once: deal all blocks out at once, in equal parts, rather than in smaller and smaller
            ones.
        sums: workers hold what their blocks were folded into.
    """

    def __init__(self, blocks: Sequence[Block], at_once: bool = False, sums: bool = True) -> None:
        self._at_once, self._sums = at_once, sums
        self._waiting = deque(WorkItem([block]) for block in blocks)
        self._under_way: dict[WorkItem, W] = {}  # in the order handed out
        self._in_flight: Counter[W] = Counter()  # how many items of these each worker has
        self._done: dict[W, list[WorkItem]] = {}
        self._to_ask: dict[W, list[WorkItem]] = {}  # for the results of these

    @property
    def waiting(self) -> int:
        """Blocks that wait for a worker."""
        return sum(len(item.blocks) for item in self._waiting)

    @property
    def all_accepted(self) -> bool:
        return not (self._waiting or self._under_way or self._done)

    def hand_out(self, ready: Sequence[W], count: int) -> Iterator[tuple[W, WorkItem]]:
        """Give blocks to workers that have room, one round of them at a time.

        A message costs as much as a small client. So many blocks go out at once while many are
        left, and few towards the end, when they even out who is done when.

        Args:
            ready: the workers that have started.
            count: of all workers, the others included.
        """
        for room in range(1, IN_FLIGHT + 1):
            free = [worker for worker in ready if self._in_flight[worker] < room]
            # All get the same, and as much as that is left for those who are quicker.
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
        """A worker has done what it was given; what it summed up, it still holds."""
        worker = self._under_way.pop(item)
        self._in_flight[worker] -= 1
        item.answer = answer
        self._done.setdefault(worker, []).append(item)

    def to_ask(self) -> dict[W, list[WorkItem]]:
        """Workers to ask for what they hold, and the items that it will be of; each item once."""
        if self._waiting:
            return {}
        asked, self._to_ask = self._to_ask, {}
        return asked

    def are_done(self, items: Sequence[WorkItem]) -> bool:
        """Whether answers have come of all these items."""
        return not any(item in self._under_way for item in items)

    def held(self, worker: W) -> list[WorkItem]:
        """What a worker was given and what of it was not accepted yet."""
        under_way = [item for item, holder in self._under_way.items() if holder == worker]
        return [*under_way, *self._done.get(worker, ())]

    def accept(self, worker: W, items: Sequence[WorkItem]) -> None:
        """What a worker held of items that are done has arrived: they are not run again."""
        left = [item for item in self._done.pop(worker) if item not in items]
        if left:
            self._done[worker] = left

    def lose(self, worker: W, why: str) -> int:
        """Put back all blocks whose results a lost worker still held or worked on.

        Args:
            why: it was lost, in words.

        Returns:
            How many blocks.

        Raises:
            RunError: there is a block that took down worker after worker.
        """
        done = self._done.pop(worker, [])
        under_way = self.held(worker)
        for item in under_way:
            del self._under_way[item]
        del self._in_flight[worker]
        self._to_ask.pop(worker, None)
        for item in under_way[:1] or done:  # the one that it was at, or all that it held
            item.deaths += 1
            if item.deaths == MAX_DEATHS:
                raise RunError(
                    f"clients {item.clients} took down {MAX_DEATHS} actors, one after the "
                    f"other (out of memory?): {why}"
                )
        # One by one, so that a block that takes down its worker does not take others with it.
        back = [
            WorkItem([block], item.deaths) for item in (*done, *under_way) for block in item.blocks
        ]
        self._waiting.extendleft(reversed(back))
        return len(back)

    def _next_items(self, share: int, count: int) -> list[WorkItem]:
        """Up to `count` items of the next blocks, `share` of them each.

        Blocks come the costliest first: dealt out back and forth, all items cost about the same.
        Those that were lost before go alone.
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
