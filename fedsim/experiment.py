"""The experiment: the only configuration type.

YAML files, command-line overrides, grids, searches and Python all build an `Experiment`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, SerializeAsAny, field_validator, model_validator
from pydantic_core import PydanticCustomError

from fedsim.config_file import RawConfig
from fedsim.data import Partition, Source, datasets, partitions
from fedsim.errors import ExperimentError
from fedsim.explain.section import Explain
from fedsim.federation import EngineSettings
from fedsim.methods import Method, methods
from fedsim.methods.learns import Problem
from fedsim.models import Model, models
from fedsim.objectives import Objective, objectives
from fedsim.objectives.metrics import check_name
from fedsim.privacy.central import Privacy
from fedsim.registry import Config, Registry, nearest
from fedsim.training import Train

COMPONENTS: dict[str, Registry[Any]] = {
    "data": datasets,
    "partition": partitions,
    "model": models,
    "method": methods,
    "objective": objectives,
}  # by section
LOGGERS = ("mlflow", "tensorboard", "wandb")


def _refuse_twice(name: str, names: Sequence[str]) -> None:
    if names.count(name) > 1:
        raise PydanticCustomError("twice", "'{name}' is named twice", {"name": name})


class Evaluate(Config):
    """When models are evaluated; the last round always is.

    Args:
        every: rounds from one evaluation on the central test set to the next.
        clients: evaluate on every client's own test examples as well (needs
            `partition.test_fraction`).
        metrics: scores beside those of the objective, each a column: of classes `macro_f1`,
            `balanced_accuracy`, `class_accuracy` (`class_accuracy/<class>`), `top5_accuracy` (any
            k), `auroc`, `ece` (expected calibration error), and `confusion`, a table of its own;
            of numbers `pearson` and `spearman`; or `package.module:function`, a function of your
            own of (outputs, targets), NumPy arrays of all test examples, that returns a score or
            a dict of scores.
        validation: share of the training examples that is held out, by class and drawn by the
            seed, before the rest is dealt out to clients. Models are scored on it whenever they
            are on the test set, in columns `validation_<score>`, and what is chosen (the best
            round, the best trial of a search) is chosen by these.
    """

    every: int = Field(1, ge=1)
    clients: bool = False
    metrics: tuple[str, ...] = ()
    validation: float = Field(0.0, ge=0, lt=1)

    @field_validator("metrics")
    @classmethod
    def _known_metrics(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            check_name(name)
            _refuse_twice(name, names)
        return names


class Checkpoint(Config):
    """When the run is saved so that it can go on from there.

    Args:
        every: rounds from one checkpoint to the next; 0 makes none before the end.
        keep: the `last` two, or `all`, so that models of any round can be had without running the
            rounds before it again (`fedsim explain --round`).
    """

    every: int = Field(5, ge=0)
    keep: Literal["last", "all"] = "last"


class Experiment(Config):
    """Everything that decides a run's result, and where it is computed.

    Sections can be objects as well as nested dicts: an instance of a component or its class; a
    function that returns a network, a class of networks, or a `functools.partial` of either, with
    keywords, as `model`; a `Dataset`, or a function that returns one, as `data`. The experiment
    names what it was given, `package.module:Name`, so that other processes find it.

    Args:
        name: of the run's folder, below that of all runs.
        seed: of everything random; the same seed gives the same result, to the bit.
        data: the data set.
        partition: who holds which examples.
        model: the architecture that is trained, or the kind of rules.
        method: the federated algorithm.
        objective: what is minimised and what is scored, if not what the model and its data say.
        train: rounds, cohort and local training.
        engine: where clients' work is computed.
        evaluate: when models are evaluated.
        explain: explanations as results of the run; by default there are none.
        privacy: differential privacy; by default there is none.
        checkpoint: when the run is saved.
        loggers: where the records of rounds go beside the run's own tables: `tensorboard`, below
            the run's folder, `mlflow`, or `wandb` (Weights & Biases).
    """

    name: str = Field("experiment", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    seed: int = Field(0, ge=0)
    data: Annotated[SerializeAsAny[Source], BeforeValidator(datasets.parse)]
    partition: Annotated[SerializeAsAny[Partition], BeforeValidator(partitions.parse)]
    model: Annotated[SerializeAsAny[Model], BeforeValidator(models.parse)]
    method: Annotated[SerializeAsAny[Method], BeforeValidator(methods.parse)]  # type: ignore[type-arg]
    objective: Annotated[SerializeAsAny[Objective], BeforeValidator(objectives.parse)] | None = (
        None
    )
    train: Train = Train()
    engine: EngineSettings = EngineSettings()
    evaluate: Evaluate = Evaluate()
    explain: Explain | None = None
    privacy: Privacy | None = None
    checkpoint: Checkpoint = Checkpoint()
    loggers: tuple[Annotated[str, Field(json_schema_extra={"enum": [*LOGGERS]})], ...] = ()

    @field_validator("loggers")
    @classmethod
    def _known_loggers(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in LOGGERS:
                problem = "unknown logger '{name}'{hint}"
                about = {"name": name, "hint": nearest(name, LOGGERS)}
                raise PydanticCustomError("unknown_name", problem, about)
            _refuse_twice(name, names)
        return names

    @model_validator(mode="after")
    def _fits_together(self) -> Experiment:
        private = self.privacy is not None
        self.method.check_fit(Problem(self.model, self.objective, private=private))
        self.method.check(self.train)
        if private:
            self.method.check_privacy()
            if self.explain is not None and self.explain.share is not None:
                raise ExperimentError(
                    "explain.share: clients would send more than sums, which is all that privacy "
                    "covers; leave out `share`, or `privacy`"
                )
        if self.evaluate.clients and not self.partition.tests_clients:
            raise ExperimentError(
                "evaluate.clients=true needs partition.test_fraction above 0: "
                "clients have no test examples of their own"
            )
        return self

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Experiment:
        """Read an experiment file.

        Args:
            path: a YAML file.
            overrides: `section.key=value`, which win over the file.

        Raises:
            ExperimentError: a line for each thing that is wrong, with where it stands.
        """
        sheet = RawConfig.read(path, overrides)
        for section, command in (("grid", "grid"), ("search", "tune")):
            if section in sheet.content:
                raise ExperimentError(
                    f"{sheet.where((section,))}: {section}: many experiments in one file; carry "
                    f"them out with: fedsim {command} {path}"
                )
        return sheet.build(cls)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Experiment:
        """An experiment from nested dicts, as a file would hold them.

        Raises:
            ExperimentError: a line for each thing that is wrong.
        """
        return RawConfig(content).build(cls)

    def to_yaml(self) -> str:
        """The complete experiment, every default written out, as a file to run again."""
        return to_yaml(self.model_dump(mode="json"))


def plain(content: Any, key: str = "") -> Any:
    """Nested dicts as a file would hold them: objects become the sections that name them.

    Args:
        key: below which the content stands.

    Raises:
        ExperimentError: other processes could not find an object's class.
    """
    if isinstance(content, Mapping):
        return {k: plain(v, str(k).rpartition(".")[2]) for k, v in content.items()}
    if isinstance(content, list):
        return [plain(value, key) for value in content]
    if key not in COMPONENTS:
        return content
    try:
        return COMPONENTS[key].section(content)
    except PydanticCustomError as error:
        raise ExperimentError(f"{key}: {error.message()}") from None


def to_yaml(content: Mapping[str, Any]) -> str:
    """Nested dicts as a file that reads as the same."""
    return yaml.dump(dict(content), Dumper=_Dumper, sort_keys=False)


class _Dumper(yaml.SafeDumper):
    """Quotes words that OmegaConf would read as numbers, and PyYAML would not («1e5»)."""


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)
