"""Own components that open files by relative paths, or that refuse some values."""

from __future__ import annotations

from pathlib import Path

import torch

from fedsim.data import Dataset
from fedsim.data.sources.generated import Synthetic
from fedsim.errors import DataError, ExperimentError
from fedsim.methods.fedavg import FedAvg
from fedsim.training import Train


class Noted(Synthetic):
    """Data that needs another file."""

    notes: Path

    def load(self) -> Dataset:
        if not self.notes.exists():
            raise DataError(f"{self.notes}: is gone")
        return super().load()


class Odd(FedAvg):
    """A method for odd numbers of rounds."""

    def check(self, train: Train) -> None:
        if train.rounds % 2 == 0:
            raise ExperimentError(f"rounds must be odd, not {train.rounds}")


def widened(shape: tuple[int, ...], outputs: int, notes: str) -> torch.nn.Module:
    """A network whose width is in a file."""
    width = int(Path(notes).read_text())
    return torch.nn.Sequential(torch.nn.Linear(*shape, width), torch.nn.Linear(width, outputs))
