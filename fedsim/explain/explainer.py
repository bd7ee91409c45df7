"""What an explainer is: it is asked about a model and some inputs, and says text, rows, pictures.

An explainer of one's own, which `fedsim explain RUN --explainer my_module:Ablation` finds, and
whose pictures `fedsim report` shows:

    from dataclasses import dataclass

    from fedsim.explain import Explainer, Explanation


    class Ablation(Explainer):
        '''What the outputs lose with each feature of a table.'''

        name: str = "ablation"

        def explain(self, model, data, inputs, rng):
            x = data.prepare(inputs.x)
            whole, lost = model.network(x).amax(dim=1), []
            for f in range(x.shape[1]):
                without = x.clone()
                without[:, f] = 0
                lost.append(float((whole - model.network(without).amax(dim=1)).detach().mean()))
            return Lost(model.title, lost)


    @dataclass(frozen=True)
    class Lost(Explanation):
        title: str
        lost: list[float]

        def text(self):
            return f"{self.title}: {self.lost}"

        def rows(self):
            return [{"feature": f, "lost": lost} for f, lost in enumerate(self.lost)]

        def save(self, folder):
            return []
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.data import Dataset
from fedsim.explain.inputs import Inputs
from fedsim.explain.notebook import as_html
from fedsim.models import Model, Rules
from fedsim.models.rules import RuleModel
from fedsim.registry import Config, Registry
from fedsim.rng import keyed_rng

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class ExplainedModel:
    """A model that is to be explained, and whose; it may be in the middle of a run.

    Args:
        section: `model` of the experiment.
        title: «client 3's model after round 7».
        round: after which it is as it is.
        seed: the experiment's.
        client: whose; None for the global model, and for a run as a whole.
        suffix: for names of files, so that pictures of several models lie side by side:
            `-client-3-round-7`; that of inputs is `inputs.suffix`.
        network: prepared inputs (B, ...) to logits (B, classes), or numbers (B, 1); in
            evaluation. None for rules.
        rules: the arrays of a rule base; None for a network.
        sources: (R,) from how many clients' bases each rule comes.
        beside: other networks by name that it may be compared with; the global one, if it is a
            client's.
        scores: its scores on the central test set, as they go on record. Worked out when it is
            called, because it takes time.
        record: the explanations.parquet in which all of this model's rules are, if they are.
    """

    section: Model
    title: str
    round: int
    seed: int
    client: int | None = None
    suffix: str = ""
    network: nn.Module | None = None
    rules: Rules | None = None
    sources: NDArray[np.int64] | None = None
    beside: Mapping[str, nn.Module] = field(default_factory=dict)
    scores: Callable[[], Mapping[str, float]] = dict
    record: Path | None = None

    def as_network(self) -> nn.Module:
        """Its network, or one that returns what its rules predict, (B, 1), without gradients."""
        if self.network is not None:
            return self.network
        assert isinstance(self.section, RuleModel)
        assert self.rules is not None
        return _RuleNetwork(self.section, self.rules)


class _RuleNetwork(nn.Module):
    """Rules as something that is called like a network."""

    def __init__(self, section: RuleModel, rules: Rules) -> None:
        super().__init__()
        self._section, self._rules = section, rules

    def forward(self, x: Tensor) -> Tensor:
        values = self._section.predict(self._rules, x.detach().cpu().double().numpy()).values
        return torch.from_numpy(values).to(x)[:, None]


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
    """What a model was made of and is tested on.

    Args:
        dataset: of the run, as it was loaded.
        prepare: raw inputs (n, ...) as the network takes them: scaled, normalised, on its device.
        own: (n, ...) raw inputs of the client's own, labelled and unlabelled ones; None where the
            model is no client's.
        tables: of a run as a whole: `tasks` and `explanations`, as the run has them on record.
        shared: of a run as a whole whose clients share images: what they did. Worked out when it
            is called.
    """

    dataset: Dataset
    prepare: Callable[[NDArray[Any]], Tensor]
    own: NDArray[Any] | None = None
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    shared: Callable[[], SharedItems] | None = None


class Explanation(ABC):
    """What an explainer has found. In a notebook it shows itself."""

    @abstractmethod
    def text(self) -> str:
        """In words, for the terminal."""

    @abstractmethod
    def rows(self) -> list[dict[str, float | int | str | None]]:
        """As records: one of each input, rule, or whatever it is about."""

    @abstractmethod
    def save(self, folder: Path) -> list[Path]:
        """Draw pictures into a folder that there is; their paths, none if there are none.

        Raises:
            OSError: they cannot be written.
        """

    def _repr_html_(self) -> str:
        with TemporaryDirectory() as folder:
            return as_html(self.text(), self.save(Path(folder)))


@runtime_checkable
class Exportable(Protocol):
    """An explanation that other programs read, too."""

    def export(self, folder: Path) -> None:
        """Write it as .npy files.

        Raises:
            BadInput: the other program knows nothing of that kind.
            OSError: it cannot be written.
        """


class Explainer(Config, ABC):
    """One way to explain models. Its fields are its settings, each with a default.

    Attributes:
        takes_inputs: whether it explains single predictions; else it gets no inputs.
        usual_inputs: how many rows of the test set it explains, if nobody says which.
        whole_run: whether it explains a run as a whole rather than a model.
        takes_clients: of a whole run, whether it is about some of the clients.
    """

    name: str
    takes_inputs: ClassVar[bool] = True
    usual_inputs: ClassVar[int] = 8
    whole_run: ClassVar[bool] = False
    takes_clients: ClassVar[bool] = False

    def check(self, model: ExplainedModel, data: ExplainedData) -> None:
        """Refuse what it cannot explain. Called before `explain`.

        Raises:
            BadInput: with the reason.
        """

    @abstractmethod
    def explain(
        self,
        model: ExplainedModel,
        data: ExplainedData,
        inputs: Inputs,
        rng: np.random.Generator,
    ) -> Explanation:
        """Explain a model.

        Args:
            model: it. Its network is to be left as it was.
            data: what it was made of.
            inputs: whose predictions are to be explained, raw; none if it takes none.
            rng: for what is random; see `rng`.

        Raises:
            BadInput: it cannot be explained in this way.
        """

    def rng(self, seed: int, client: int | None = None) -> np.random.Generator:
        """The random stream for a model of a run with that seed."""
        return keyed_rng(seed, f"explained/{self.name}")


class FeatureExplainer(Explainer, ABC):
    """Explains a decision by a number for each part of its input: pixel, feature or word."""

    @abstractmethod
    def relevances(
        self,
        model: ExplainedModel,
        data: ExplainedData,
        x: Tensor,
        y: Tensor,
        rng: np.random.Generator,
    ) -> NDArray[np.float32]:
        """What each part of some inputs is worth to a decision; positive speaks for it.

        Args:
            model: its network is left as it was.
            data: what it was made of.
            x: (n, ...) inputs, prepared.
            y: (n,) the class decided upon; 0 for a regression.
            rng: for what is random.

        Returns:
            Like x; of images (n, H, W), their channels added up.

        Raises:
            BadInput: it cannot be explained in this way.
        """


explainers: Registry[Explainer] = Registry("explainer", Explainer)  # type: ignore[type-abstract]
