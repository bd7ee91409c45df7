"""The base class of models, and how experiments name them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from pydantic import ConfigDict, model_validator
from safetensors.torch import save_file
from torch import Tensor, nn

from fedsim.config.registry import (
    Component,
    Registry,
    called,
    check_keywords,
    import_object,
    importable_name,
    unfit,
)
from fedsim.data import Dataset, DataSpec
from fedsim.errors import ExperimentError, warn
from fedsim.objectives import Objective, default_objective


class Classifier(nn.Module):
    """A network in two parts, so that methods can reach the representation and the head.

    Args:
        features: inputs (B, ...) to representations (B, D).
        head: representations to logits (B, classes).
    """

    def __init__(self, features: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.features = features
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def classifier(features: nn.Module, size: int, outputs: int, projection: int | None) -> Classifier:
    """A classifier on representations of a given size, or on projections of them.

    A projection head Linear(D → D), ReLU, Linear(D → d) becomes part of the features (MOON).
    """
    if projection is not None:
        hidden = nn.Linear(size, size), nn.ReLU(), nn.Linear(size, projection)
        features, size = nn.Sequential(features, *hidden), projection
    return Classifier(features, nn.Linear(size, outputs))


class Model(Component):
    """A model, a network or arrays by name (`ArrayModel`): a component of the `model` section.

    Attributes:
        kind: the kind of model that a method must support; see `fedsim.methods.Learns`.
        builds_network: whether there are weights to train.
        inputs: the inputs that it takes: `numbers`, `documents`, or `either`, as its fields say.
        explainer: name of its default explainer, used unless the user or the method chooses one.
    """

    name: str
    kind: ClassVar[str] = "network"
    builds_network: ClassVar[bool] = True
    inputs: ClassVar[str] = "numbers"
    explainer: ClassVar[str] = "integrated_gradients"

    def objective(self, data: Dataset) -> Objective:
        """The default objective for a data set, unless the experiment sets one."""
        return default_objective(data)

    def files(self) -> tuple[Path, ...]:
        """The files that its initial weights depend on, for the run's hash of data."""
        return ()

    def takes(self, data: Dataset) -> Dataset:
        """The data as its initial weights expect them: normalised as they were trained.

        Raises:
            ExperimentError: they cannot be right for these weights.
        """
        return data

    def build_for(self, data: DataSpec, outputs: int) -> nn.Module:
        """Build a network for a data set's inputs, from torch's current random state.

        Raises:
            ExperimentError: the model does not take these inputs; the message names the models
                that do.
        """
        found = "numbers" if data.embeddings is None else "documents"
        if self.inputs != found:
            fitting = [n for n, m in models.items() if m.inputs == found]
            fitting = [n for n in fitting if models.find(n).kind == self.kind] or fitting
            raise ExperimentError(
                f"model.name={self.name} takes {self.inputs}, and the data are "
                f"{'not documents' if found == 'numbers' else found}; models for them: "
                + ", ".join(fitting)
            )
        if data.embeddings is None:
            return self.build(data.shape, outputs)
        vectors, known = map(torch.tensor, data.embeddings)
        return self.build_text(vectors, known, outputs)

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Build a network with PyTorch's default initialisation from torch's current random state.

        Args:
            shape: shape of an input, without the batch axis; images are (channels, height, width).
            outputs: number of outputs: a logit for each class, or 1 for a regression.

        Raises:
            ExperimentError: the architecture does not take inputs of this shape.
        """
        raise NotImplementedError

    def outside(self, network: nn.Module, layer: str) -> str:
        """The name that a layer of its network has where others build it."""
        return layer

    def save(self, network: nn.Module, folder: Path, data: Dataset) -> None:
        """Write a network's weights into a folder, as others read them.

        Args:
            data: what it was trained on, as it reads them (`takes`).
        """
        state = network.state_dict()  # copied, as layers may share tensors
        state = {name: t.clone(memory_format=torch.contiguous_format) for name, t in state.items()}
        save_file(state, folder / "model.safetensors")

    def build_text(self, vectors: Tensor, known: Tensor, outputs: int) -> nn.Module:
        """Build a network for documents, from torch's current random state.

        Args:
            vectors: (V, D) the vector of each word; row 0, padding, is zero. They are not trained.
            known: (V,) whether a word's vector is meaningful.
            outputs: number of outputs.
        """
        raise NotImplementedError


class TextModel(Model):
    """A network that reads documents: inputs are token ids, rows of a table of word vectors."""

    inputs: ClassVar[str] = "documents"
    explainer: ClassVar[str] = "occlusion"

    @property
    def reads_vectors(self) -> bool:
        """Whether it reads the data's vectors, instead of vectors that it learns itself."""
        return True

    def takes(self, data: Dataset) -> Dataset:
        if data.random_vectors and self.reads_vectors:
            words = "tokens" if data.tokenizer else "words"
            warn(
                f"model.name={self.name}: {words} get random vectors of {data.vectors.shape[1]} "
                "components, unrelated to their meaning, which are not trained; set data.vectors "
                "to a file of word vectors in GloVe's text format"
            )
        return data


class UserModel(Model):
    """Your own function or class: `f(shape, outputs, **keywords) -> nn.Module`.

    Named `package.module:Name`; the other keys of the section are its keyword arguments.
    """

    model_config = ConfigDict(extra="allow")

    name: str

    @model_validator(mode="after")
    def _keywords_fit(self) -> UserModel:
        check_keywords(self._function(), self.name, ("shape", "outputs"), self.model_extra)
        return self

    def _function(self) -> Callable[..., nn.Module]:
        return import_object(self.name, "model")

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        keywords: dict[str, Any] = self.model_extra or {}
        return self._function()(shape, outputs, **keywords)


M = TypeVar("M", bound=Model)


class _Models(Registry[Model]):
    def __init__(self, what: str, base: type[Model]) -> None:
        super().__init__(what, base)
        self._libraries: dict[str, type[Model]] = {}

    def library(self, component: type[M]) -> type[M]:
        """Class decorator: register the class for all names `library:name` of its library."""
        self._libraries[component.library] = component  # type: ignore[attr-defined]
        return component

    def _import(self, name: str) -> type[Model]:
        if (library := name.partition(":")[0]) in self._libraries:
            return self._libraries[library]
        found = import_object(name, self.what)
        if isinstance(found, type) and issubclass(found, Model):
            return super()._import(name)
        is_network = isinstance(found, type) and issubclass(found, nn.Module)
        if not is_network and not inspect.isfunction(found):
            raise unfit(f"model '{name}' is neither a function nor a class of networks")
        return UserModel

    def _name_of(self, component: type[Model], name: str | None = None) -> str:
        named = component is UserModel or component in self._libraries.values()
        return name if named and name else super()._name_of(component, name)

    def section(self, given: Any) -> Any:
        """Like that of any registry; also for a class of networks or a function that makes one."""
        if isinstance(given, nn.Module):
            raise unfit(
                f"each run builds its network from its seed; pass the class "
                f"{type(given).__name__}, or a function of (shape, outputs) that builds it"
            )
        if isinstance(given, type) and issubclass(given, nn.Module):
            return {self.key: importable_name(given, self.what)}
        return called(given, self.what, self.key) or super().section(given)


models = _Models("model", Model)


def image_shape(name: str, shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    """`shape` as (channels, height, width), of an image of `smallest` pixels a side or more."""
    if len(shape) != 3:
        raise ExperimentError(
            f"model.name={name} takes images (channels, height, width); "
            f"the data's inputs have shape {shape}. Models for any shape: mlp"
        )
    channels, height, width = shape
    if min(height, width) < smallest:
        raise ExperimentError(
            f"model.name={name} takes images of {smallest} pixels a side or more; "
            f"the data's are {height}×{width}"
        )
    return channels, height, width


def representation_size(features: nn.Module, shape: tuple[int, ...]) -> int:
    """D, the length of the representation of an input of a given shape."""
    was_training = features.training
    features.eval()  # batch norm accepts a batch of one and keeps its statistics
    with torch.no_grad():
        size = features(torch.zeros(1, *shape)).shape[1]
    features.train(was_training)
    return int(size)
