"""Models, objectives and sequences of tasks that a method supports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from fedsim.errors import ExperimentError
from fedsim.federation import Asked
from fedsim.models import Model
from fedsim.objectives import Objective

ASKING: Mapping[str, str] = {
    "messages": "asks for what each client sends",
    "data": "reads clients' data on the server",
    "sizes": "asks for the number of examples of each client",
    "weights": "weighs each client by its data",
}


@dataclass(frozen=True)
class Learns:
    """What a method can learn.

    Args:
        models: the `kind` of each model that it can learn.
        objectives: classes of objectives that it can minimise, including their subclasses.
        task_sequences: whether it supports continual learning, with tasks one after another: `no`;
            `yes`, if clients train only on their own classes and request nothing once that changes
            with the task; `only`, if it supports nothing else.
        asks: what of clients the server asks for beside means of their updates: their `messages`,
            the number of examples of each (`sizes`), the `data`, or `weights` of means that follow
            from a client's data. `privacy` of clients and `secure_aggregation` hide these.
        averages: whether the server makes means of clients' updates at all, which is what
            `aggregation` and `adversaries` are about.
    """

    models: str = "network"
    objectives: tuple[type[Objective], ...] = (Objective,)
    task_sequences: Literal["no", "yes", "only"] = "yes"
    asks: tuple[Asked, ...] = ()
    averages: bool = True

    @property
    def any_network(self) -> bool:
        """Whether it learns networks of any kind, by any objective."""
        return (self.models, self.objectives) == ("network", (Objective,))


@dataclass(frozen=True)
class Problem:
    """What a method has to learn.

    Args:
        model: the experiment's model.
        objective: None before the data are known.
        task_sequence: whether clients learn a sequence of tasks; None before the data are known.
        hidden: what of clients is hidden from the server, and by which section.
    """

    model: Model
    objective: Objective | None = None
    task_sequence: bool | None = None
    hidden: Mapping[str, str] = field(default_factory=dict)


def why_unfit(learns: Learns, problem: Problem) -> str | None:
    """Why a method cannot learn this, as a verb phrase; None if it can."""
    if learns.models != problem.model.kind:
        return (
            f"learns {learns.models}s, and model.name={problem.model.name} is a "
            f"{problem.model.kind}"
        )
    if problem.objective is not None and not isinstance(problem.objective, learns.objectives):
        known = " or ".join(str(kind.model_fields["name"].default) for kind in learns.objectives)
        return f"learns {known}, and the objective is {problem.objective.name}"
    if problem.task_sequence and learns.task_sequences == "no":
        return "cannot learn sequences of tasks"
    if problem.task_sequence is False and learns.task_sequences == "only":
        return "learns sequences of tasks, and the partition has none"
    for asked, section in problem.hidden.items():
        if asked == "messages" and not learns.averages and not learns.asks:
            return f"averages no updates, and {section} protects nothing else"
        if asked in learns.asks:
            return f"{ASKING[asked]}, which {section} hides from the server"
    return None


def check_fit(
    name: str, learns: Learns, problem: Problem, all: Iterable[tuple[str, Learns]]
) -> None:
    """Reject a method, by its name, that cannot learn this; `all` says what each one learns."""
    why = why_unfit(learns, problem)
    if why is None:
        return
    fitting = [other for other, can in all if why_unfit(can, problem) is None]
    instead = f"methods that can: {', '.join(fitting)}" if fitting else "no method can"
    raise ExperimentError(f"method.name={name} {why}; {instead}")
