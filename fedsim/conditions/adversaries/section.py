"""The `adversaries` section: who the adversaries are, and the examples that they poison."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import numpy as np
from pydantic import BeforeValidator, Field, SerializeAsAny

from fedsim.conditions.adversaries.attack import Attack, attacks
from fedsim.config.registry import Config
from fedsim.data import ClientSplits, Dataset, Ragged
from fedsim.data.stored import StoredArray
from fedsim.errors import DataError, ExperimentError
from fedsim.support.rng import draw_clients, keyed_rng

POISONED = "adversaries/poisoned"  # the column that marks poisoned copies


class Adversaries(Config):
    """Adversaries among the clients, drawn with the seed.

    The manifest names them (`adversaries`), and `adversary` is a column of the clients. Of the
    rounds, the column `adversaries` says how many trained. Attacks on data poison the labelled
    training examples of the adversaries, and no test examples. Attacks on updates forge what they
    send to be averaged, once all clients of a cohort have trained; scores and training losses of
    these clients are those of what they have trained.

    Args:
        share: share of all clients that are adversaries.
        attack: what they do.
    """

    share: float = Field(gt=0, lt=1)
    attack: Annotated[SerializeAsAny[Attack], BeforeValidator(attacks.parse)]

    def join(self, data: Dataset, splits: ClientSplits, seed: int) -> tuple[Dataset, ClientSplits]:
        """Draw the adversaries, and append poisoned copies of what these train on.

        Data as returned by an earlier call are not changed again.
        """
        splits = replace(splits, adversaries=self.draw(len(splits), seed))
        self.attack.check(data)
        return self._poisoned(data, splits, seed) if self.attack.poisons else (data, splits)

    def draw(self, clients: int, seed: int) -> tuple[int, ...]:
        """Which of so many clients are adversaries, in ascending order."""
        count = round(self.share * clients)
        least = self.attack.least
        where = f"adversaries.share={self.share:g} of {clients} clients"
        if count < least:
            made = "nobody an adversary" if count == 0 else f"{count} an adversary"
            if least > 1:
                made += f", and {self.attack.name} takes {least}"
            raise ExperimentError(f"{where} makes {made}; {least / clients:g} makes {least}")
        if count == clients:
            raise ExperimentError(f"{where} makes everybody an adversary; lower it")
        drawn = draw_clients(keyed_rng(seed, "adversaries"), clients, self.share)
        return tuple(drawn.tolist())

    def _poisoned(
        self, data: Dataset, splits: ClientSplits, seed: int
    ) -> tuple[Dataset, ClientSplits]:
        where = f"adversaries.attack.name={self.attack.name}"
        if splits.sequence is not None:
            raise DataError(
                f"{where}: clients that learn tasks one after another cannot be poisoned; take "
                "another partition"
            )
        if isinstance(data.x, StoredArray):
            raise DataError(
                f"{where}: inputs that stay in their files cannot be poisoned; leave out in_place"
            )
        change = splits.change
        phases = [splits] if change is None else [splits, change.splits]
        held = [
            np.unique(np.concatenate([phase.train[k] for phase in phases]))
            for k in splits.adversaries
        ]
        begin = len(data.y)
        if POISONED in data.columns:
            begin = int(np.argmax(data.columns[POISONED]))
        else:
            data = self._with_copies(data, splits, held, seed)
        trains = [list(phase.train) for phase in phases]
        for k, rows in zip(splits.adversaries, held, strict=True):
            for train in trains:
                train[k] = begin + np.searchsorted(rows, train[k])
            begin += len(rows)
        splits = replace(splits, train=Ragged.of(trains[0]))
        if change is not None:
            later = replace(change.splits, train=Ragged.of(trains[1]))
            splits = replace(splits, change=replace(change, splits=later))
        return data, splits

    def _with_copies(
        self, data: Dataset, splits: ClientSplits, held: list[np.ndarray], seed: int
    ) -> Dataset:
        x, y = zip(
            *(
                self.attack.poison(data, rows, keyed_rng(seed, "adversaries/poison", client=k))
                for k, rows in zip(splits.adversaries, held, strict=True)
            ),
            strict=True,
        )
        rows = np.concatenate(held)
        N = len(data.y)
        columns = {name: np.concatenate([own, own[rows]]) for name, own in data.columns.items()}
        return replace(
            data,
            x=np.concatenate([data.x, *x]),
            y=np.concatenate([data.y, *y]),
            columns={**columns, POISONED: np.arange(N + len(rows)) >= N},
            copies=data.copies + len(rows),
        )
