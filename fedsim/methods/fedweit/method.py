"""FedWeIT: continual learning with weighted transfer between clients.

Yoon, Jeong, Lee, Yang and Hwang, Federated Continual Learning with Weighted Inter-client Transfer,
ICML 2021; as a convolutional network of documents in Chaudhary, Rai, Schubert, Schütze and Gupta,
Federated Continual Learning for Text Classification via Selective Inter-client Transfer (EMNLP
Findings 2022), whose FedSeIT is in `fedsim.methods.fedseit`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim.data import ClientSplits, Dataset, TaskSequence
from fedsim.data.task_sequence import task_row
from fedsim.errors import ExperimentError, RunError
from fedsim.federation import (
    Client,
    Examples,
    Federation,
    PerClient,
    Update,
    Vector,
    client_function,
)
from fedsim.federation.wire import nbytes
from fedsim.methods.fedweit.compat import Compat, first_of_classes, trained
from fedsim.methods.fedweit.knowledge import (
    Choice,
    dense,
    key,
    of_task,
    selection,
    sparse,
    transfers,
)
from fedsim.methods.fedweit.memory import TaskMemory, begin, pruned, thetas
from fedsim.methods.fedweit.tasks import Documents, TaskNetwork, evaluate, read_documents
from fedsim.methods.learns import Learns, Problem
from fedsim.methods.method import Method, State, methods
from fedsim.models.decomposed import DenseRest, Layout, Rest
from fedsim.models.text import Reader, TextFeatures
from fedsim.objectives import Classification
from fedsim.objectives.slices import mean_over_tasks
from fedsim.training import FlatModel, Schedule, Train

LEAST_LR = 1e-10  # a client stops training below this
LR_FACTOR = 3.0  # factor by which the learning rate falls


@dataclass(frozen=True)
class FedWeITState(State):
    """The server's state besides B (`weights`).

    Attributes:
        begun: (K,) the latest task that each client has begun; -1 for none.
        knowledge: A of finished tasks, by "client/task", in sparse form.
        centres: centres of a task's documents, by "client/task".
        chosen: what each client received for its current task: client, task, score of each A.
    """

    begun: NDArray[np.int64]
    knowledge: dict[str, dict[str, NDArray[Any]]] = field(default_factory=dict)
    centres: dict[str, Vector] = field(default_factory=dict)
    chosen: dict[str, list[Choice]] = field(default_factory=dict)


@methods.register
class FedWeIT(Method[FedWeITState]):
    """Weights B ⊙ m + A, with B shared by all clients, m and A per task, and others' A's weighted.

    Client c learns its task t with θ = B ⊙ σ(m_t) + A_t + Σ_j α_j·A_j: the A_j are those of all
    clients' last tasks (including its own), the α_j are its own numbers for each window width, and
    m_t has one entry per filter. Biases, α and the head belong to the task. In a round

    1. it takes B from the server; when a task begins also the A_j. B, A_i and m_i of tasks i ≤ t,
       and what belongs to task t, are trained to minimise

           CE + λ₁·Σ_{i≤t} ‖A_i‖₁ + mask_l1·‖m_t‖₁ + w/2·(‖m_t‖² + ‖A_t‖² [+ ‖B‖² for t = 1])
              + λ₂/2·Σ_{i<t} ‖B ⊙ σ(m_i) + A_i − θ_i‖²,

       θ_i what it was when task t began (the paper's Eq. 5 has ΔB ⊙ m − ΔA, which is not the drift
       of θ; A and m of past tasks are trained, so that they make up for changes of B);
    2. the server takes the mean of all B;
    3. in a task's last round clients send A_t, entries up to λ₁ put to zero, as used for
       predictions.

    A round consists of `train.local_epochs` passes with Adam; after `patience` epochs without a
    smaller loss on the validation examples, the learning rate falls to a third, and Adam is
    restarted. The next round continues with this learning rate, the next task with the initial
    one. Each task is scored on the test examples of its classes, with the client's own B.

    Transfer between clients is recorded in explanations.parquet (`transfer`): one row for each A
    that a task has received, with the mean of |α| at the task's end. In clients.parquet, `nonzero`
    is the share of A's entries that is sent; each of these costs four bytes, and every entry one
    bit. Of the traffic there (`bytes_up`, `bytes_down`), `adaptive_bytes` is the part of A at a
    task's end and `selected_bytes` the part of the A_j at its beginning, both as sent and as they
    would be if dense (`…_dense_bytes`). The rest is B; the paper's filter-wise sparse form of B is
    not implemented.

    `dense_layer` is a control. FedSeIT has trained dense layers between features and head, FedWeIT
    has none, so that a difference between them need not be due to transfer. With it, FedWeIT has
    the same layers, of the same size, initialised and regularised in the same way:

        h = ReLU(W_c·[f(x; θ), 0] + b),

    f the features (θ with others' weights, as above), 0 in place of FedSeIT's projected features.
    FedSeIT without selection then differs only in where it uses the A_j, and starts A_t as B/5
    instead of B/3.

    Args:
        lam1: λ₁.
        lam2: λ₂.
        mask_l1: weight of ‖m_t‖₁; λ₁ in the paper, 0 in the released code.
        weight_decay: w.
        patience: epochs without improvement before the learning rate falls.
        dense_layer: add FedSeIT's dense layers. FedWeIT only: FedSeIT always has them.
        compat: follow the released code.
    """

    name: str = "fedweit"
    stackable: ClassVar[bool] = False
    has_global_model: ClassVar[bool] = False  # every task has its own network
    # Each client's A is sent to others.
    learns: ClassVar[Learns] = Learns(
        objectives=(Classification,), task_sequences="only", asks=("messages", "data")
    )
    start: ClassVar[float] = 1 / 3  # A_t is initialised to this share of B
    rest: ClassVar[type[Rest]] = Rest
    lam1: float = Field(1e-3, ge=0)
    lam2: float = Field(1.0, ge=0)
    mask_l1: float = Field(0.0, ge=0)
    weight_decay: float = Field(1e-4, ge=0)
    patience: int = Field(3, ge=1)
    dense_layer: bool = False
    compat: Compat = Compat()

    def check(self, train: Train) -> None:
        if train.optimizer.name != "adam" or train.optimizer.weight_decay:
            raise ExperimentError(
                f"method.name={self.name} trains with Adam and has its own weight decay; set "
                "train.optimizer.name=adam, and use method.weight_decay"
            )
        if train.lr_decay != 1 or train.schedule != Schedule() or train.clip_norm is not None:
            raise ExperimentError(
                f"method.name={self.name} has its own learning rate schedule, and does not clip "
                "gradients: leave out train.lr_decay, train.schedule and train.clip_norm"
            )
        if (train.sampler, train.accumulate, train.precision) != ("shuffle", 1, "float32"):
            raise ExperimentError(
                f"method.name={self.name} shuffles the examples of an epoch and computes in "
                "float32: leave out train.sampler, train.accumulate and train.precision"
            )
        if train.local_steps is not None:
            raise ExperimentError(
                f"method.name={self.name} may end a round's training after any epoch; set "
                "train.local_epochs instead of train.local_steps"
            )

    def check_fit(self, problem: Problem) -> None:
        super().check_fit(problem)
        if problem.objective is not None and problem.objective.further:
            raise ExperimentError(
                f"evaluate.metrics: method.name={self.name} scores tasks only by loss and "
                "accuracy; leave it out"
            )

    def check_data(self, dataset: Dataset, splits: ClientSplits, network: nn.Module) -> None:
        if not isinstance(getattr(network, "features", None), TextFeatures):
            raise ExperimentError(f"method.name={self.name} needs model.name=text_cnn")

    # -- the server ----------------------------------------------------------------------------

    def init(self, fed: Federation) -> FedWeITState:
        begun = np.full(fed.num_clients, -1, dtype=np.int64)
        layout = self.layout(text_features(fed.server.model), self.slots(fed.num_clients))
        return FedWeITState(weights=layout.draw().numpy(), begun=begun)

    def round(self, fed: Federation, state: FedWeITState, t: int) -> FedWeITState:
        cohort, task = fed.sample(t), fed.server.splits.task
        new = [int(k) for k in cohort if state.begun[k] < task]
        if new:
            state = self.choose(fed, state, new)
        failed = [k for k in new if str(k) not in state.chosen]
        new = [k for k in new if k not in failed]
        cohort = np.setdiff1d(cohort, failed)
        if not len(cohort):
            raise RunError(
                f"round {t}: every client of the cohort failed at the start of its task"
            )
        parts = {k: selection(state.knowledge, state.chosen[str(k)]) for k in new}
        mean = fed.mean(self.local_update, cohort, base=state.weights, foreign=PerClient(parts))
        begun = state.begun.copy()
        begun[[k for k in new if k in mean.clients]] = task
        state = replace(state, weights=mean.base, begun=begun)
        return self.collect(fed, state) if ends_task(fed, t) else state

    def choose(self, fed: Federation, state: FedWeITState, new: list[int]) -> FedWeITState:
        """The A's for clients that begin a task: those of all clients' last task."""
        last = of_task(fed.server.splits.task - 1, state.knowledge, fed.num_clients)
        return replace(state, chosen={**state.chosen, **{str(k): last for k in new}})

    def slots(self, num_clients: int) -> int:
        """K, the maximum number of A's of other tasks that a task receives."""
        return num_clients

    def collect(self, fed: Federation, state: FedWeITState) -> FedWeITState:
        """Collect the A's of the task that ends, and record transfers."""
        assert fed.server.splits.sequence is not None
        task, labels = fed.server.splits.task, fed.server.splits.sequence.labels
        who = np.flatnonzero(state.begun == task)
        knowledge, rows = dict(state.knowledge), []
        for k, item in fed.gather(self.adaptive, who).items():
            attention = item.pop("attention")
            knowledge[key(k, task)] = item
            chosen = state.chosen[str(k)]
            rows += transfers(k, task, chosen, attention, state.knowledge, labels)
        fed.explain("transfer", rows)
        return replace(state, knowledge=knowledge)

    def evaluate(self, fed: Federation, state: FedWeITState) -> None:
        who = np.flatnonzero(state.begun >= 0)
        fed.each(self.test_tasks, who)
        fed.log(**mean_over_tasks(fed.server.recorded("tasks")))

    def evaluate_clients(self, fed: Federation, state: FedWeITState) -> None:
        """Does nothing: only clients' own models are evaluated."""

    def global_model(self, fed: Federation, state: FedWeITState) -> Mapping[str, NDArray[Any]]:
        return {"base": state.weights}

    # -- the clients ---------------------------------------------------------------------------

    @client_function("local_update")
    def local_update(
        self, client: Client, base: Tensor, foreign: Mapping[str, Any] | None
    ) -> Update:
        """(client) B after training; gets its `selection` of foreign A's if its task begins."""
        memory = memory_of(client)
        if memory.get("task") != client.splits.task:
            assert foreign is not None
            self.begin_task(client, base, foreign)
        memory["base"] = base
        self.learn(client)
        client.trained = self.own_model(client)
        return Update(base=memory["base"])

    def begin_task(self, client: Client, base: Tensor, foreign: Mapping[str, Any]) -> None:
        """(client) Initialise A, m and the task's own parameters, and fix targets of past θ_i."""
        network, rest = self.network(client, client.splits.task)
        items = foreign["items"]
        others = torch.zeros_like(rest.foreign)
        for j, item in enumerate(items):
            others[j] = dense(item)
        client.report(
            selected_bytes=nbytes(items), selected_dense_bytes=nbytes(others[: len(items)])
        )
        rest.reset()
        self.start_attention(rest, foreign["scores"])
        begin(
            memory_of(client),
            rest.layout,
            client.splits.task,
            A=self.start * base,
            m=rest.layout.draw_mask().to(client.device),
            rest=network.vector,
            foreign=others,
            lr=client.settings.optimizer.lr,
        )

    def start_attention(self, rest: Rest, scores: Sequence[float]) -> None:
        """Initial α; here the random ones."""

    def learn(self, client: Client) -> None:
        """(client) Train B, all A_i and m_i, and the current task's own parameters."""
        memory, train = memory_of(client), client.settings
        network, rest = self.loaded(client, -1)
        reader, past = text_features(client.model).reader, memory.get("before")
        B, A, m = (
            v.clone().requires_grad_()
            for v in (memory["base"], memory["adaptive"], memory["masks"])
        )
        leaves = [B, A, m, *trained(rest, self.compat.frozen)]
        labels = labels_of(client, client.splits.task)
        data, held_out = (
            read_documents(rest, reader, part, labels, self.compat.frozen)
            for part in (client.data, client.validation)
        )
        rng, lr, plateau = client.rng("batches"), memory["lr"], Plateau(self.patience)
        adam = torch.optim.Adam(leaves, lr, train.optimizer.betas)
        steps, visited, total = 0, 0, 0.0
        for _ in range(train.local_epochs):
            if lr < LEAST_LR:
                break
            rest.train()
            order = torch.from_numpy(rng.permutation(len(data.y))).to(client.device)
            for rows in torch.split(order, train.batch_size):
                loss = self.loss(rest, reader, data.part(rows), B, A, m, past)
                adam.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                adam.step()
                steps += 1
                visited += len(rows)
                total += float(loss.detach()) * len(rows)
            if len(held_out.y) == 0:
                continue
            rest.eval()
            with torch.no_grad():
                validation = float(self.loss(rest, reader, held_out, B, A, m, past, prune=True))
            if plateau.reached(validation):
                lr /= LR_FACTOR
                adam = torch.optim.Adam(leaves, lr, train.optimizer.betas)
        client.visit(visited)
        client.report(steps=steps, lr=lr)
        if visited:
            client.report(loss=total / visited)
        memory["base"], memory["adaptive"], memory["masks"] = (v.detach() for v in (B, A, m))
        memory["rests"] = [*memory["rests"][:-1], network.vector.clone()]
        memory["lr"] = lr

    def loss(
        self,
        rest: Rest,
        reader: Reader,
        documents: Documents,
        B: Tensor,
        A: Tensor,
        m: Tensor,
        past: Tensor | None,
        prune: bool = False,
    ) -> Tensor:
        """Eq. 5, as in the class's docstring, on documents of t, the last of n tasks.

        Args:
            B: (P,).
            A: (n, P).
            m: (n, rows), before the sigmoid.
            past: (n-1, P) θ_i of tasks i < t when t began; None if t is the first.
            prune: as in predictions, without small entries of A_t.
        """
        layout, A_t, gates = rest.layout, A[-1], m.sigmoid()
        W = rest.dense  # the task's own dense layers, if any: `dense_layer`, FedSeIT's W_f and W_c
        gate = gates[-1].detach() if self.compat.frozen else gates[-1]
        theta = layout.masked(B, gate) + (pruned(A_t, self.lam1) if prune else A_t)
        logits = rest(reader(documents.x), theta, documents.digested)
        # The order of terms is that in which gradients are added up.
        loss = cross_entropy(logits, documents.y)
        loss = loss + self.lam1 * (A.abs().sum() + sum(w.abs().sum() for w in W))
        loss = loss + self.mask_l1 * m[-1].abs().sum()
        decayed = [A_t, *W] + ([B] if len(A) == 1 else [])
        decay = sum((v.square().sum() for v in decayed), start=m[-1].square().sum())
        loss = loss + self.weight_decay / 2 * decay
        if past is not None and self.lam2:
            drift = (layout.masked(B, gates[:-1]) + A[:-1] - past).square().sum()
            loss = loss + self.lam2 / 2 * drift
        return loss

    @client_function("adaptive")
    def adaptive(self, client: Client) -> dict[str, Any]:
        """(client) A of the current task without small entries, and α's (not sent)."""
        _, rest = self.loaded(client, -1)
        A = pruned(memory_of(client)["adaptive"][-1], self.lam1)
        alpha = rest.attention.detach().abs().mean(dim=1).tolist()
        message = sparse(A)
        client.report(
            nonzero=float((A != 0).float().mean()),
            adaptive_bytes=nbytes(message),
            adaptive_dense_bytes=nbytes(A),
        )
        return {**message, "attention": alpha}

    @client_function("test_tasks")
    def test_tasks(self, client: Client) -> None:
        """(client) Score all begun tasks on the test examples of their classes."""
        reader, theta = text_features(client.model).reader, self.thetas(client)
        for i, task in enumerate(memory_of(client)["begun"]):
            _, rest = self.loaded(client, i)
            test, labels = task_test(client, task), labels_of(client, task)
            if self.compat.eval:
                order = sequence_of(client).order[client.id][task]
                test = first_of_classes(test, order, len(client.validation))
            scores = evaluate(rest, reader, theta[i], test, labels, self.compat.frozen)
            row = task_row(sequence_of(client), client.id, task, client.splits.task, scores)
            client.record("tasks", **row)

    def for_own_models(self, fed: Federation, state: FedWeITState) -> dict[str, Any]:
        return {}

    def own_model(self, client: Client) -> TaskNetwork | None:
        """(client) Its network for its latest task."""
        begun = memory_of(client).get("begun")
        if not begun:
            return None
        _, rest = self.loaded(client, -1)
        theta, labels = self.thetas(client)[-1], labels_of(client, begun[-1])
        reader, frozen = text_features(client.model).reader, self.compat.frozen
        return TaskNetwork(rest, reader, theta, labels, client.num_classes, frozen)

    # -- networks ------------------------------------------------------------------------------

    def layout(self, features: TextFeatures, slots: int) -> Layout:
        """The layout of B, A and θ."""
        return Layout.of(features)

    def build(self, features: TextFeatures, slots: int, labels: int) -> Rest:
        """The network of a task's own parameters, for a number of classes."""
        layout, hidden = self.layout(features, slots), features.dense.out_features
        kind = DenseRest if self.dense_layer else self.rest
        return kind(layout, slots, labels, features.dropout.p, hidden)

    def network(self, client: Client, task: int) -> tuple[FlatModel, Rest]:
        """(client) The network of one of its tasks, with arbitrary weights."""
        labels, slots = len(labels_of(client, task)), self.slots(len(sequence_of(client).labels))
        build = partial(self.build, text_features(client.model), slots, labels)
        network = client.network(f"rest of {labels}", build)
        assert isinstance(network.module, Rest)
        return network, network.module

    def loaded(self, client: Client, i: int) -> tuple[FlatModel, Rest]:
        """(client) The network of its i-th task, with its weights and others' A's."""
        memory = memory_of(client)
        network, rest = self.network(client, memory["begun"][i])
        network.load(memory["rests"][i])
        rest.foreign.copy_(memory["foreign"][i])
        return network, rest

    def thetas(self, client: Client) -> Tensor:
        """(client) (n, P) θ_i of its tasks as used in predictions, with pruned A_i."""
        slots = self.slots(len(sequence_of(client).labels))
        layout = self.layout(text_features(client.model), slots)
        return thetas(memory_of(client), layout, prune=self.lam1)


@dataclass
class Plateau:
    """Detects that a loss has not improved for `patience` epochs in a row.

    Unlike PyTorch's `ReduceLROnPlateau`, any smaller loss counts as improvement, and counting
    restarts after `patience` epochs, not after one more.
    """

    patience: int
    least: float = math.inf
    waited: int = 0

    def reached(self, loss: float) -> bool:
        """Add the loss of an epoch."""
        self.waited = 0 if loss < self.least else self.waited + 1
        self.least = min(self.least, loss)
        if self.waited < self.patience:
            return False
        self.waited = 0
        return True


def ends_task(fed: Federation, t: int) -> bool:
    """Whether round t is the last one of a task."""
    assert fed.server.splits.sequence is not None
    return t * fed.server.splits.sequence.num_tasks % fed.settings.rounds == 0


def memory_of(client: Client) -> TaskMemory:
    """The client's state as a `TaskMemory`."""
    return cast(TaskMemory, client.state)


def text_features(model: FlatModel) -> TextFeatures:
    """The features of a network that is a `TextCnn` (checked before the run)."""
    features = model.module.get_submodule("features")
    assert isinstance(features, TextFeatures)
    return features


def sequence_of(client: Client) -> TaskSequence:
    """(client) The tasks of all clients."""
    assert client.splits.sequence is not None
    return client.splits.sequence


def labels_of(client: Client, task: int) -> tuple[int, ...]:
    """(client) The classes of one of its tasks, in ascending order."""
    return sequence_of(client).labels[client.id][task]


def task_test(client: Client, task: int) -> Examples:
    """(client) The central test set's examples of the classes of one of its tasks."""
    rows = sequence_of(client).test[labels_of(client, task)]
    test = client.central_test
    own = torch.from_numpy(rows).to(client.device)
    return Examples(test.x[own], test.y[own])
