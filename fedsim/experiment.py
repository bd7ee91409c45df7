"""The experiment: the only configuration type.

YAML files, command-line overrides, grids, searches and Python all build an `Experiment`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field, SerializeAsAny, field_validator, model_validator
from pydantic_core import PydanticCustomError

from fedsim.conditions.adversaries import Adversaries
from fedsim.conditions.aggregators import Aggregator, aggregators
from fedsim.conditions.codecs import Codec, codecs
from fedsim.conditions.devices import Devices
from fedsim.conditions.privacy import Privacy
from fedsim.conditions.secure import SecureSettings
from fedsim.config.arguments import checked
from fedsim.config.file import RawConfig, to_yaml
from fedsim.config.registry import Config, Registry, importable_name, nearest, refuse_twice
from fedsim.data import Partition, Source, datasets, partitions
from fedsim.errors import ExperimentError
from fedsim.explain.section import Explain
from fedsim.federation import Condition, EngineSettings, Without
from fedsim.federation import conditions as own_conditions  # the field has this name
from fedsim.methods import Method, methods
from fedsim.methods.learns import Problem
from fedsim.models import Model, models
from fedsim.models.adapters import Adapters
from fedsim.objectives import Objective, objectives
from fedsim.objectives.conformal import Conformal
from fedsim.objectives.metrics import check_name
from fedsim.training import Train

COMPONENTS: dict[str, Registry[Any]] = {
    "data": datasets,
    "partition": partitions,
    "model": models,
    "method": methods,
    "objective": objectives,
    "uplink": codecs,
    "downlink": codecs,
    "aggregation": aggregators,
    "conditions": own_conditions,
}  # by section
LOGGERS = ("mlflow", "tensorboard", "wandb")


_COVERS_MEANS = "clients would send explanations without noise, and `{}` covers only averages"
_HONEST = "`privacy` covers sums of honest clients alone"
_NEEDS_UPDATES = "needs the clients' updates, which `secure_aggregation` hides"
EXCLUSIVE = (  # two keys that cannot be used together, and why
    ("explain.share", "privacy", _COVERS_MEANS.format("privacy")),
    ("explain.share", "secure_aggregation", _COVERS_MEANS.format("secure_aggregation")),
    (
        "devices.over_selection",
        "privacy",
        "samples more clients than `privacy` accounts for (a larger train.participation counts)",
    ),
    (
        "without.replace",
        "privacy",
        "`privacy` draws each client by itself, so that no place in a cohort is free",
    ),
    ("secure_aggregation", "privacy", "the clipping of `privacy` needs the clients' updates"),
    ("secure_aggregation", "uplink", "masked updates cannot be compressed"),
    ("aggregation", "privacy", _HONEST),
    ("adversaries", "privacy", _HONEST),
    ("aggregation", "secure_aggregation", _NEEDS_UPDATES),
    ("adversaries.attack", "secure_aggregation", _NEEDS_UPDATES),
)
_NO_MODELS = "sends no weights of models, so it would have no effect"
_SUMS = "averages counts and sums that must fit together, not weights of models"
_NO_MEANS = "does not average clients' updates, so it would have no effect"
_OWN_PRODUCTS = "multiplies clients' own adapters, which it does not reach"
UNSUPPORTED: tuple[tuple[str, Callable[[Method], bool], str], ...] = (  # type: ignore[type-arg]
    (
        "privacy.level=example",
        lambda method: (
            method.stackable and method.private_by_example and method.learns.models == "network"
        ),
        "has clients compute more, or train less of the model, than DP-SGD covers",
    ),
    (
        "devices.partial_work",
        lambda method: method.stackable,
        "has a training loop of its own, which cannot stop early",
    ),
    (
        "without.replace",
        lambda method: not method.asynchronous,
        "has no cohorts, whose places others could fill",
    ),
    ("uplink", lambda method: method.exchanges_models, _NO_MODELS),
    ("downlink", lambda method: method.exchanges_models, _NO_MODELS),
    (
        "downlink",
        lambda method: method.takes_downlink,
        "trains models that clients have been sent before, as the server has them, not as they "
        "arrive",
    ),
    ("aggregation", lambda method: method.learns.averages, _NO_MEANS),
    ("adversaries.attack", lambda method: method.learns.averages, _NO_MEANS),
    *(
        (key, lambda method: method.exchanges_models or not method.learns.averages, _SUMS)
        for key in ("aggregation", "adversaries.attack")
    ),
    *(
        (key, lambda method: method.adapts != "both, exactly", _OWN_PRODUCTS)
        for key in ("uplink", "downlink", "aggregation", "adversaries.attack")
    ),
)  # keys, which methods support them, and why others do not


class EarlyStopping(Config):
    """End a run when its score on the validation set no longer improves.

    Args:
        metric: column of the score, such as `loss`; by default the primary metric.
        patience: rounds without a better score after which the run ends.
        min_delta: by how much a score must be better to count.
    """

    metric: str = ""
    patience: int = Field(10, ge=1)
    min_delta: float = Field(0.0, ge=0)


class Evaluate(Config):
    """When and how models are evaluated; the last round is always evaluated.

    Args:
        every: number of rounds between evaluations on the central test set.
        clients: also evaluate on every client's own test examples (needs
            `partition.test_fraction`).
        metrics: further scores beside those of the objective, each a column. For classification:
            `macro_f1`, `balanced_accuracy`, `class_accuracy` (`class_accuracy/<class>`),
            `top5_accuracy` (any k below the number of classes), `auroc`, `ece` (expected
            calibration error), and `confusion`, a table of its own. For regression: `pearson` and
            `spearman`. Or `package.module:function`, your own function of (outputs, targets),
            NumPy arrays of all test examples, that returns a score or a dict of scores; in Python
            also the function.
        validation: share of the training examples that is held out as a validation set, stratified
            and drawn with the seed, before the rest is distributed to clients. Models are scored
            on it whenever they are scored on the test set, in columns `validation_<score>`, and
            selection (the best round, the best trial of a search) uses these scores.
        conformal: prediction sets, or intervals of a regression, calibrated on the validation set,
            and how often they contain the truth; by default none.
        early_stopping: end the run early by a score on the validation set; by default it takes
            `train.rounds` rounds.
    """

    every: int = Field(1, ge=1)
    clients: bool = False
    metrics: tuple[str, ...] = ()
    validation: float = Field(0.0, ge=0, lt=1)
    conformal: Conformal | None = None
    early_stopping: EarlyStopping | None = None

    @model_validator(mode="after")
    def _has_a_validation_set(self) -> Evaluate:
        if self.conformal is not None and not self.validation:
            raise PydanticCustomError(
                "validation", "conformal needs a validation set: set validation=0.1"
            )
        if self.early_stopping is not None and not self.validation:
            raise PydanticCustomError(
                "validation",
                "early_stopping needs a validation set: set validation=0.1; the test set must not "
                "decide when to stop",
            )
        return self

    @field_validator("metrics", mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        if not isinstance(given, list | tuple):
            return given
        return [importable_name(one, "metric") if callable(one) else one for one in given]

    @field_validator("metrics")
    @classmethod
    def _known_metrics(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            check_name(name)
            refuse_twice(name, names)
        return names


class Checkpoint(Config):
    """When checkpoints are written, from which a run can be resumed.

    Args:
        every: number of rounds between checkpoints; 0 writes only the one at the end.
        keep: the `last` two checkpoints, or `all`, so that the models of any round are available
            without repeating earlier rounds (`fedsim explain --round`).
    """

    every: int = Field(5, ge=0)
    keep: Literal["last", "all"] = "last"


class Experiment(Config):
    """Everything that determines a run's result, and where it is computed.

    Sections can be given as objects instead of nested dicts: an instance or a class of a
    component; as `model`, a network class, a function that returns a network, or a
    `functools.partial` of either; as `data`, a `Dataset` or a function that returns one. The
    experiment records them as `package.module:Name`, so that other processes can import them.

    Args:
        name: name of the experiment, and of the folder that its runs are written to.
        seed: seed of all random numbers; the same seed gives the same result, to the bit.
        data: the data set.
        partition: how the examples are distributed to clients.
        model: the network architecture, or the kind of rules or trees.
        adapters: low-rank adapters of the network, trained in its place; by default none.
        method: the federated algorithm.
        objective: the training loss and the scores; by default chosen by the model and the data.
        train: rounds, cohort and local training.
        without: clients that are left out, to see what becomes of the federation without them; by
            default nobody.
        engine: where the clients' work is computed.
        evaluate: when and how models are evaluated.
        explain: explanations computed during the run; by default none.
        privacy: differential privacy; by default none.
        aggregation: the rule by which clients' updates are aggregated; by default their weighted
            mean.
        adversaries: clients that attack; by default none.
        devices: simulated devices, with time, energy and dropout; by default none.
        secure_aggregation: simulated secure aggregation; by default none.
        uplink: compression of the updates that clients send; by default none.
        downlink: compression of what the server sends to clients; by default none.
        conditions: your own conditions between server and clients, each with its name
            `package.module:Class`; see `fedsim.federation.Condition`.
        checkpoint: when checkpoints are written.
        loggers: where to log each round in addition to the run's own tables: `tensorboard` (in the
            run's folder), `mlflow`, or `wandb` (Weights & Biases).
    """

    name: str = Field("experiment", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    seed: int = Field(0, ge=0)
    data: Annotated[SerializeAsAny[Source], BeforeValidator(datasets.parse)]
    partition: Annotated[SerializeAsAny[Partition], BeforeValidator(partitions.parse)]
    model: Annotated[SerializeAsAny[Model], BeforeValidator(models.parse)]
    adapters: Adapters | None = None
    method: Annotated[SerializeAsAny[Method], BeforeValidator(methods.parse)]  # type: ignore[type-arg]
    objective: Annotated[SerializeAsAny[Objective], BeforeValidator(objectives.parse)] | None = (
        None
    )
    train: Train = Train()
    without: Without | None = None
    engine: EngineSettings = EngineSettings()
    evaluate: Evaluate = Evaluate()
    explain: Explain | None = None
    privacy: Privacy | None = None
    aggregation: (
        Annotated[SerializeAsAny[Aggregator], BeforeValidator(aggregators.parse)] | None
    ) = None
    adversaries: Adversaries | None = None
    devices: Devices | None = None
    secure_aggregation: SecureSettings | None = None
    uplink: Annotated[SerializeAsAny[Codec], BeforeValidator(codecs.parse)] | None = None
    downlink: Annotated[SerializeAsAny[Codec], BeforeValidator(codecs.parse)] | None = None
    conditions: tuple[
        Annotated[SerializeAsAny[Condition], BeforeValidator(own_conditions.parse)], ...
    ] = ()
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
            refuse_twice(name, names)
        return names

    @field_validator("conditions")
    @classmethod
    def _each_condition_once(cls, found: tuple[Condition, ...]) -> tuple[Condition, ...]:
        for condition in found:
            refuse_twice(condition.name, [one.name for one in found])
        return found

    @model_validator(mode="after")
    def _fits_together(self) -> Experiment:
        if self.explain is not None:
            explain = self.explain.with_explainers(self.model.explainer)
            object.__setattr__(self, "explain", explain)
        problem = Problem(self.model, self.objective, hidden=self.hidden)
        self.method.check_fit(problem)
        self.method.check(self.train)
        self.method.check_hidden(problem.hidden)
        if self.adapters is not None:
            self.adapters.check(self.model)
        elif self.method.adapts:
            raise ExperimentError(
                f"method.name={self.method.name} averages adapters; set adapters={{r: 8}}"
            )
        self._check_pairs()
        self._check_asynchronous()
        if self.privacy is not None:
            self.privacy.check_train(self.train)
        if self.downlink is not None:
            self.downlink.check_downlink()
        if self.evaluate.clients and not self.partition.tests_clients:
            raise ExperimentError(
                "evaluate.clients=true needs partition.test_fraction above 0: "
                "clients have no test examples of their own"
            )
        return self

    @property
    def hidden(self) -> dict[str, str]:
        """What of clients is hidden from the server, and by which section."""
        found = {condition.name: condition.hides for condition in self.conditions}
        if self.privacy is not None:
            found["privacy"] = self.privacy.hides
        if self.secure_aggregation is not None:
            found["secure_aggregation"] = self.secure_aggregation.hides
        return {asked: name for name, hides in found.items() for asked in sorted(hides)}

    @property
    def _in_use(self) -> dict[str, str]:
        """The keys that `EXCLUSIVE` and `UNSUPPORTED` speak of, and how messages write them."""
        explain, devices, privacy = self.explain, self.devices, self.privacy
        rule, adversaries = self.aggregation, self.adversaries
        attack = None if adversaries is None else adversaries.attack
        given = {
            "explain.share": explain is not None
            and bool(explain.share and not explain.share.noise),
            "privacy": privacy is not None and privacy.level == "client",
            "privacy.level=example": privacy is not None and privacy.level == "example",
            "secure_aggregation": self.secure_aggregation is not None,
            "uplink": self.uplink is not None,
            "downlink": self.downlink is not None,
            "aggregation": rule is not None,
            "adversaries": adversaries is not None,
            "adversaries.attack": attack is not None and attack.forges,
            "devices.over_selection": devices is not None and devices.over_selection > 1,
            "devices.partial_work": devices is not None and devices.partial_work,
            "without.replace": self.without is not None and self.without.replace,
        }
        named = {
            "aggregation": f"aggregation.name={rule.name}" if rule else "",
            "adversaries.attack": f"adversaries.attack.name={attack.name}" if attack else "",
        }
        return {key: named.get(key, key) for key, used in given.items() if used}

    def _check_pairs(self) -> None:
        """Refuse sections that exclude each other, and those that the method does not support."""
        used, method = self._in_use, self.method
        for first, second, reason in EXCLUSIVE:
            if first in used and second in used:
                raise ExperimentError(
                    f"{used[first]}: {reason}; leave out `{first}`, or `{second}`"
                )
        for key, supported, reason in UNSUPPORTED:
            if key in used and not supported(method):
                raise ExperimentError(
                    f"{used[key]}: method.name={method.name} {reason}; leave it out, or take "
                    "another method"
                )

    def _check_asynchronous(self) -> None:
        devices, method = self.devices, self.method
        if method.asynchronous and (
            devices is None or devices.deadline is not None or devices.over_selection > 1
        ):
            raise ExperimentError(
                f"method.name={method.name} is asynchronous: it needs a section `devices`, "
                "without deadline and over_selection"
            )

    @classmethod
    @checked
    def load(
        cls, path: str | Path, overrides: Sequence[str] | Mapping[str, Any] = ()
    ) -> Experiment:
        """Read an experiment file.

        Args:
            path: a YAML file.
            overrides: `section.key=value`, or a dict of values by `section.key`, which win over
                the file.

        Raises:
            ExperimentError: the experiment is invalid; the message has a line for each mistake and
                its place.
        """
        return cls._of(RawConfig.read(path, overrides), "this file", "fedsim ", f" {path}")

    @classmethod
    @checked
    def from_dict(cls, content: Mapping[str, Any]) -> Experiment:
        """Create an experiment from nested dicts with the structure of an experiment file.

        Raises:
            ExperimentError: the experiment is invalid; the message has a line for each mistake.
        """
        return cls._of(RawConfig(content), "this dict", "fedsim.", "(...)")

    @classmethod
    def _of(cls, sheet: RawConfig, given: str, before: str, after: str) -> Experiment:
        for section, what, command in (
            ("grid", "a grid of experiments", "grid"),
            ("search", "a search", "tune"),
        ):
            if section in sheet.content:
                raise ExperimentError(
                    f"{sheet.where((section,))}: {given} has {what}; run it with: "
                    f"{before}{command}{after}"
                )
        return sheet.build(cls)

    @classmethod
    @checked
    def of(cls, given: Experiment | str | Path | Mapping[str, Any]) -> Experiment:
        """An experiment as it is, from a file, or from nested dicts.

        Raises:
            ExperimentError: the experiment is invalid.
        """
        if isinstance(given, Experiment):
            return given
        return cls.from_dict(given) if isinstance(given, Mapping) else cls.load(given)

    def __str__(self) -> str:
        return self.to_yaml()

    def to_yaml(self) -> str:
        """The complete experiment as YAML, with every default written out."""
        return to_yaml(self.model_dump(mode="json"))


def plain(content: Any, key: str = "") -> Any:
    """Nested dicts as a file would hold them.

    Components become the sections that name them, functions their names, and NumPy values, tuples,
    ranges and paths what YAML has for them.

    Args:
        key: below which the content stands.

    Raises:
        ExperimentError: other processes could not find an object's class.
    """
    if isinstance(content, Mapping):
        return {k: plain(v, str(k).rpartition(".")[2]) for k, v in content.items()}
    if isinstance(content, np.ndarray | np.generic):
        content = content.tolist()
    if isinstance(content, list | tuple | range):
        return [plain(value, key) for value in content]
    if isinstance(content, Path):
        return str(content)
    try:
        if key in COMPONENTS:
            return COMPONENTS[key].section(content)
        if isinstance(content, Config):
            return content.model_dump(mode="json")
        return importable_name(content, key) if callable(content) else content
    except PydanticCustomError as error:
        raise ExperimentError(f"{key}: {error.message()}") from None
