"""The base class of explainers, which explain models and inputs in text, rows and pictures.

`fedsim new explainer` writes one of your own, to be used with `fedsim explain RUN --explainer
my_module:Name`, and whose pictures `fedsim report` shows.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.config.registry import Config, Registry
from fedsim.data import ClientSplits, Dataset
from fedsim.data.dataset import frozen
from fedsim.errors import BadInput, ExperimentError, in_own_code
from fedsim.explain.inputs import Inputs
from fedsim.explain.pictures.canvas import as_html
from fedsim.models import ArrayModel, Arrays, Model
from fedsim.support.rng import input_rngs, keyed_rng
from fedsim.training import logits

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class ExplainedModel:
    """A model to explain, possibly in the middle of a run.

    Args:
        section: `model` of the experiment.
        title: "client 3's model after round 7".
        round: the round after which the model has this state.
        seed: the experiment's seed.
        client: whose model it is; None for the global model, and for a run as a whole.
        suffix: suffix of file names, so that pictures of several models can be in one folder:
            `-client-3-round-7`; the suffix of the inputs is `inputs.suffix`.
        network: prepared inputs (B, ...) to logits (B, classes) or numbers (B, 1), in evaluation
            mode. None for a model of arrays.
        arrays: those of a model of arrays, such as rules; None for a network.
        sources: (R,) from how many clients' rule bases each rule comes.
        beside: other networks by name to compare with; the global one, if it is a client's model.
        scores: function that returns the scores on the central test set, as they are recorded.
            Computed only when called, because it takes time.
        record: the explanations.parquet that holds all of this model's rules, if there is one.
    """

    section: Model
    title: str
    round: int
    seed: int
    client: int | None = None
    suffix: str = ""
    network: nn.Module | None = None
    arrays: Arrays | None = None
    sources: NDArray[np.int64] | None = None
    beside: Mapping[str, nn.Module] = field(default_factory=dict)
    scores: Callable[[], Mapping[str, float]] = dict
    record: Path | None = None

    def as_network(self) -> nn.Module:
        """The network, or one that returns what the arrays predict, without gradients."""
        if self.network is not None:
            return self.network
        assert isinstance(self.section, ArrayModel)
        assert self.arrays is not None
        return self.section.as_network(self.arrays)


@dataclass(frozen=True)
class SharedItems:
    """What clients shared, beside what they held.

    Args:
        images: by client, then by name: `labels` (n,), `held` (n, C, H, W) in pixels,
            `heatmaps` (n, H, W) signed relevances, `masks` (n, H, W) that pixels were multiplied
            with, and `shared` (n, C, H, W), what left the client, in pixels.
        clients: K, how many there are in all.
        words: how they came about, and what noise guarantees.
    """

    images: Mapping[int, Mapping[str, NDArray[Any]]]
    clients: int
    words: str


@dataclass(frozen=True)
class ExplainedData:
    """The data with which a model was trained and is tested.

    Args:
        dataset: the run's data set, as it was loaded, of read-only arrays.
        prepare: converts raw inputs (n, ...) to network inputs: scaled, normalised, on its device.
        own: (n, ...) the client's own raw inputs, labelled and unlabelled; None if the model is
            not a client's.
        tables: for a run as a whole: `tasks` and `explanations`, as recorded.
        shared: for a run as a whole whose clients share images: function that returns what they
            shared. Computed only when called.
        clients: the clients' names, if the data name them.
        splits: the examples that each client holds; None where they do not matter.
        backgrounds: raw inputs (m, ...) and weights (m,) of baselines that were made already, by
            their labels; more are added. See `fedsim.explain.baselines`.
    """

    dataset: Dataset
    prepare: Callable[[NDArray[Any]], Tensor]
    own: NDArray[Any] | None = None
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    shared: Callable[[], SharedItems] | None = None
    clients: Sequence[str] = ()
    splits: ClientSplits | None = None
    backgrounds: dict[str, tuple[NDArray[Any], NDArray[np.float64]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dataset", self.dataset.frozen())
        object.__setattr__(self, "own", frozen(self.own))


class Explanation(ABC):
    """The result of an explainer. Notebooks display it."""

    @abstractmethod
    def text(self) -> str:
        """The explanation as text, for the terminal."""

    @abstractmethod
    def rows(self) -> list[dict[str, float | int | str | None]]:
        """The explanation as records: one per input, rule or other unit."""

    @abstractmethod
    def save(self, folder: Path) -> list[Path]:
        """Draw pictures into an existing folder, and return their paths, if any.

        Raises:
            OSError: they cannot be written.
        """

    def beside(self, others: Sequence[Explanation]) -> Explanation:
        """The same, shown so that it can be compared with those of other models.

        Args:
            others: explanations of the same inputs by the same explainer, this one among them.
        """
        return self

    @property
    def attributed(self) -> Explanation | None:
        """The relevance of the parts of its inputs, an `Attributed`, if it gives that."""
        return None

    def _repr_html_(self) -> str:
        with TemporaryDirectory() as folder:
            return as_html(self.text(), self.save(Path(folder)))


@runtime_checkable
class Exportable(Protocol):
    """An explanation that can be exported to other programs."""

    def export(self, folder: Path) -> None:
        """Write the explanation as .npy files.

        Raises:
            BadInput: the other program does not support this kind.
            OSError: it cannot be written.
        """


class Explainer(Config, ABC):
    """A way to explain models. Its fields are its settings, each with a default.

    Attributes:
        takes_inputs: whether it explains single predictions; otherwise it gets no inputs.
        usual_inputs: number of test set rows that it explains by default.
        whole_run: whether it explains a run as a whole rather than a model.
        takes_clients: for explainers of a whole run, whether clients can be selected.
        niche: whether it explains certain methods or models of one paper only; lists have it last.
    """

    name: str
    niche: ClassVar[bool] = False
    takes_inputs: ClassVar[bool] = True
    usual_inputs: ClassVar[int] = 8
    whole_run: ClassVar[bool] = False
    takes_clients: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """What results call it. Explainers of one name with other labels can be used together."""
        return self.name

    def check(self, model: ExplainedModel, data: ExplainedData) -> None:
        """Reject what the explainer cannot explain. Called before `explain`.

        Raises:
            BadInput: it cannot explain this; the message gives the reason.
        """

    @abstractmethod
    def explain(
        self, model: ExplainedModel, data: ExplainedData, inputs: Inputs, rng: Generator
    ) -> Explanation:
        """Explain a model.

        Args:
            model: the model. Its network must be left unchanged.
            data: the data of the model.
            inputs: raw inputs whose predictions are explained; none if the explainer takes none.
            rng: source of randomness; see `rng`.

        Raises:
            BadInput: the model cannot be explained in this way.
        """

    def rng(self, seed: int, client: int | None = None) -> Generator:
        """The random stream for a model of a run with this seed, the same for all clients."""
        return keyed_rng(seed, f"explained/{self.label}")


class FeatureExplainer(Explainer, ABC):
    """An explainer that assigns a number to each part of an input: pixel, feature or word.

    Attributes:
        draws: whether it is known to draw random numbers for each input. Then it gets one input
            at a time, with a random stream of the input's own, so that its relevances do not
            depend on the inputs beside it. Otherwise it gets all of them together, which is
            faster; and then one at a time if that has drawn anything.
        complete: whether it claims that the relevances of an input sum to f(x) − f(x'), see
            `endpoints`. How far they are from it is recorded.
    """

    draws: ClassVar[bool] = False
    complete: ClassVar[bool] = False

    def endpoints(
        self, model: ExplainedModel, data: ExplainedData, x: Tensor, y: Tensor
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(n,) f(x) and (n,) f(x'), to whose difference relevances of a `complete` one sum.

        By default, what is explained of the network's output, and 0.

        Args:
            model, data, x, y: as of `relevances`.
        """
        found = self.explained(torch.from_numpy(logits(model.as_network(), x)), y.cpu())
        return found, np.zeros(len(x))

    def squares(self, shape: tuple[int, ...]) -> int | None:
        """How many squares of an image (C, H, W) get a relevance; None if each pixel gets one."""
        return None

    def explained(self, outputs: Tensor, y: Tensor) -> NDArray[np.float64]:
        """(n,) the number that is explained, of outputs (n, C): by default the class's logit."""
        return outputs.gather(1, y.long()[:, None])[:, 0].double().numpy()

    def each(
        self,
        model: ExplainedModel,
        data: ExplainedData,
        x: Tensor,
        y: Tensor,
        rng: Generator,
        like: Tensor | None = None,
    ) -> NDArray[np.float32]:
        """The relevances of inputs, each as if it were alone (up to rounding).

        Args:
            model, data, x, y: as of `relevances`.
            rng: source of the inputs' own streams.
            like: (n, ...) inputs of which x are slight changes, and whose streams they have; by
                default x.
        """
        streams = input_rngs(rng, x if like is None else like)
        if not self.draws or not streams:
            before = str(rng.bit_generator.state)
            together = self.relevances(model, data, x, y, rng)
            if not streams or str(rng.bit_generator.state) == before:
                return together
        found = [
            self.relevances(model, data, x[k : k + 1], y[k : k + 1], own)
            for k, own in enumerate(streams)
        ]
        return np.concatenate(found)

    @abstractmethod
    def relevances(
        self, model: ExplainedModel, data: ExplainedData, x: Tensor, y: Tensor, rng: Generator
    ) -> NDArray[np.float32]:
        """The relevance of each part of some inputs for a decision; positive speaks for it.

        Args:
            model: the model, whose network is left unchanged.
            data: the data of the model.
            x: (n, ...) prepared inputs.
            y: (n,) the class decided upon; 0 for regression.
            rng: source of randomness; the input's own, of one input, if the explainer `draws`.

        Returns:
            Relevances in the shape of x; for images (n, H, W), summed over channels.

        Raises:
            BadInput: the model cannot be explained in this way.
        """


explainers: Registry[Explainer] = Registry("explainer", Explainer)  # type: ignore[type-abstract]


def refuse_unfit(
    explainer: Explainer, model: ExplainedModel, data: ExplainedData, key: str = "explainer "
) -> None:
    """Refuse what an explainer cannot explain, in a line that names it.

    Raises:
        ExperimentError: with the explainer's reason, or what an own explainer's code has raised.
    """
    try:
        explainer.check(model, data)
    except Exception as error:  # a user's explainer may raise anything
        why = str(error) if isinstance(error, BadInput) else in_own_code(error)
        why = re.sub(rf"^explainer {re.escape(explainer.name)}:? ", "", why)
        raise ExperimentError(f"{key}{explainer.label}: {why}") from error
