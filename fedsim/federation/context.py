"""What a client finds where its work is carried out: a network, the data, a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.data import ClientSplits, Dataset
from fedsim.errors import ExperimentError
from fedsim.models import Model, RuleModel, TextModel, models
from fedsim.privacy.central import Privacy
from fedsim.rng import keyed_torch_rng
from fedsim.training import FlatModel, Stack, Task, Train, Trained, in_words, lacks_memory, train


@dataclass(frozen=True)
class Examples:
    """Inputs (n, ...) float32, or int32 words; labels (n,) int64, or targets (n,) float32."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Table:
    """Inputs (n, F) and targets (n,), float64 as in the data set: what rules learn from."""

    x: NDArray[np.float64]
    y: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class RunSpec:
    """What a worker needs to know besides the data. It travels once, when the worker starts."""

    model: Model
    train: Train
    seed: int
    # The object whose methods are the client functions; the Method, which this package never
    # imports.
    functions: Any
    shape: tuple[int, ...]
    classes: int  # 0 for a regression
    privacy: Privacy | None = None
    # Of documents: the vector (V, D) of each word, and which words have one that means something.
    words: tuple[NDArray[np.float32], NDArray[np.bool_]] | None = None

    @property
    def outputs(self) -> int:
        """How many numbers a network returns for one input."""
        return self.classes or 1

    @property
    def rules(self) -> RuleModel:
        """The model as the rule model that it is (a method of rules is refused on others)."""
        assert isinstance(self.model, RuleModel)
        return self.model

    def build_model(self) -> nn.Module:
        """The network with the run's initial weights, the same wherever it is built.

        Raises:
            ExperimentError: documents and no model of text, or the reverse.
        """
        model, texts = self.model, self.words is not None
        if isinstance(model, TextModel) != texts:
            fitting = [
                name
                for name, kind in models.items()
                if issubclass(kind, TextModel) == texts and not issubclass(kind, RuleModel)
            ]
            raise ExperimentError(
                f"model.name={model.name} takes {'numbers' if texts else 'documents'}, and the "
                f"data are {'documents' if texts else 'no documents'}; models for them: "
                + ", ".join(fitting)
            )
        with keyed_torch_rng(self.seed, "init"):
            if isinstance(model, TextModel) and self.words is not None:
                vectors, known = map(torch.tensor, self.words)
                return model.build_text(vectors, known, self.outputs)
            return model.build(self.shape, self.outputs)


class WorkerContext:
    """A network and the data, in one process on one device; clients take turns on it."""

    def __init__(
        self, spec: RunSpec, dataset: Dataset, splits: ClientSplits, device: torch.device
    ) -> None:
        self.spec, self.splits, self.device = spec, splits, device
        self.model = FlatModel(spec.build_model(), device)
        tasks = 1 if splits.stream is None else splits.stream.tasks
        self._by_task = [splits.during(i) for i in range(tasks)]
        self._dataset = dataset
        self._networks: dict[str, FlatModel] = {}

    def task(self, t: int) -> int:
        """The task that is learnt in round t; 0 if there is no stream of tasks."""
        stream = self.splits.stream
        return 0 if stream is None else stream.task(t, self.spec.train.rounds)

    def held_in(self, t: int) -> ClientSplits:
        """What clients hold in round t: of streams, the examples of the task under way."""
        return self._by_task[self.task(t)]

    def labels(self, client: int, task: int) -> tuple[int, ...] | None:
        """The classes of a client's task; None, for all, if there is no stream."""
        stream = self.splits.stream
        return None if stream is None else stream.labels[client][task]

    def task_test(self, labels: Sequence[int]) -> Examples:
        """The central test set's examples of some classes, in its order."""
        among = np.isin(self._dataset.test_y, labels)
        return self.prepare(self._dataset.test_x[among], self._dataset.test_y[among])

    @cached_property
    def stack(self) -> Stack:
        """The network for several clients at once."""
        return Stack(self.model)

    @cached_property
    def obstacle(self) -> str | None:
        """Why this network cannot be trained in stacks, in words; None if it can."""
        if self.splits.stream is not None:
            return "each client learns a task of its own"
        if self.model.num_parameters == 0:
            return "the model has no weights to train"
        few = self.examples(self.splits.train.values[:5])
        if len(few) < 5:
            return "there are too few examples to try it"
        try:
            return self.stack.obstacle(few.x, few.y, self.spec.train)
        except Exception as error:  # whatever a network of the user's own may raise
            if lacks_memory(error):
                raise
            return in_words(error)

    def train(self, task: Task) -> Trained:
        """Local training of one client."""
        return train(self.model, task, self.spec.train)

    def network(self, name: str, build: Callable[[], nn.Module]) -> FlatModel:
        """A further network, built the first time it is asked for."""
        if name not in self._networks:
            with keyed_torch_rng(self.spec.seed, f"init/{name}"):
                self._networks[name] = FlatModel(build(), self.device)
        return self._networks[name]

    def examples(self, indices: NDArray[np.int64]) -> Examples:
        """Training examples by index."""
        return self.prepare(self._dataset.x[indices], self._dataset.y[indices])

    def test_examples(self, part: slice) -> Examples:
        """A part of the central test set."""
        return self.prepare(self._dataset.test_x[part], self._dataset.test_y[part])

    def test_marks(self, part: slice) -> Tensor | None:
        """Which words of a part of the central test set labels are about, if that is known."""
        marks = self._dataset.marks
        return None if marks is None else torch.tensor(marks[part], device=self.device)

    def test_aspects(self, part: slice) -> dict[str, Tensor]:
        """Which rows of a part of the central test set are about which aspect; one if unknown."""
        numbers = self._aspects[1][part]
        return {
            name: torch.tensor(np.flatnonzero(numbers == k), device=self.device)
            for k, name in enumerate(self._aspects[0])
        }

    @cached_property
    def _aspects(self) -> tuple[list[str], NDArray[np.intp]]:
        """The aspects of the central test set, and the number of each example's."""
        aspects = self._dataset.test_columns.get("aspect")
        if aspects is None:
            return [""], np.zeros(len(self._dataset.test_y), np.intp)
        names, numbers = np.unique(aspects, return_inverse=True)
        return [str(name) for name in names], numbers

    @cached_property
    def central_test(self) -> Examples:
        """The whole central test set; kept, because all clients of this process ask for it."""
        return self.test_examples(slice(None))

    def table(self, indices: NDArray[np.int64]) -> Table:
        """Training examples by index, as the rows of a table."""
        return Table(_float64(self._dataset.x[indices]), _float64(self._dataset.y[indices]))

    @property
    def test_table(self) -> Table:
        """The central test set."""
        return Table(_float64(self._dataset.test_x), _float64(self._dataset.test_y))

    def prepare(self, x: NDArray[np.generic], y: NDArray[Any]) -> Examples:
        """Examples as the network takes them: scaled and normalised as the data set's are."""
        inputs = torch.tensor(x, device=self.device)
        labels = torch.tensor(y, device=self.device)
        labels = labels.float() if labels.is_floating_point() else labels
        if inputs.dtype == torch.int32:  # words
            return Examples(inputs, labels)
        inputs = inputs.float() / 255 if inputs.dtype == torch.uint8 else inputs.float()
        if self._dataset.mean:
            per_channel = (-1, *[1] * (inputs.dim() - 2))
            mean = torch.tensor(self._dataset.mean, device=self.device).view(per_channel)
            std = torch.tensor(self._dataset.std, device=self.device).view(per_channel)
            inputs = (inputs - mean) / std
        return Examples(inputs, labels)


def _float64(values: NDArray[Any]) -> NDArray[np.float64]:
    return values.astype(np.float64, copy=False)
