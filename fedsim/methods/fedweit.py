"""FedWeIT: clients that learn tasks in turn, and use what others have learnt.

Yoon, Jeong, Lee, Yang and Hwang, Federated Continual Learning with Weighted Inter-client Transfer,
ICML 2021; as a convolutional network of documents in Chaudhary, Rai, Schubert, Schütze and Gupta,
Federated Continual Learning for Text Classification via Selective Inter-client Transfer (EMNLP
Findings 2022), whose FedSeIT is in `fedsim.methods.fedseit`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

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
from fedsim.methods.learns import Learns
from fedsim.methods.method import Method, State, methods
from fedsim.models.decomposed import Layout, Rest
from fedsim.models.text import Reader, TextFeatures
from fedsim.objectives import Classification
from fedsim.objectives.slices import mean_over_tasks
from fedsim.registry import Config
from fedsim.training import FlatModel, Train

LEAST_LR = 1e-10  # below, a client does not train on
LR_FACTOR = 3.0  # by which the learning rate falls
LAST = 64  # documents a batch of the released code's evaluation


class Compat(Config):
    """What the released code of FedSeIT does, instead of what its paper says.

    Args:
        frozen: masks learn nothing of the task, but from their decay and the drift alone; heads
            are not trained. Of FedSeIT neither are the projections of all widths but the first,
            and nothing that others' convolutions find reaches its network.
        eval: a task is tested on no more documents than the one under way has for validation,
            rounded up to batches of 64, of a test set that lies class by class: often on one
            class alone.
    """

    frozen: bool = False
    eval: bool = False


@dataclass(frozen=True)
class FedWeITState(State):
    """What the server knows beside B (`weights`).

    Attributes:
        begun: (K,) the task that each client has begun last; -1 for none.
        knowledge: A of finished tasks, by «client/task»: which entries are kept, and they.
        centres: what stands for a task's documents, by «client/task».
        chosen: what each client was sent in its task under way: client, task, score of each.
    """

    begun: NDArray[np.int64]
    knowledge: dict[str, dict[str, NDArray[Any]]] = field(default_factory=dict)
    centres: dict[str, Vector] = field(default_factory=dict)
    chosen: dict[str, list[tuple[int, int, float]]] = field(default_factory=dict)


class TaskNetwork(nn.Module):
    """A client's network for one task: documents (B, L) to logits (B, C), −∞ for other classes.

    Args:
        rest: what is the task's own.
        reader: of words.
        theta: (P,) B ⊙ σ(m) + A.
        labels: the task's classes.
        classes: C.
        digest: examples and labels to `Documents`.
    """

    theta: Tensor

    def __init__(
        self,
        rest: Rest,
        reader: Reader,
        theta: Tensor,
        labels: tuple[int, ...],
        classes: int,
        digest: Callable[[Examples, tuple[int, ...]], Documents],
    ) -> None:
        super().__init__()
        self.rest, self.reader = rest, reader
        self.register_buffer("theta", theta)
        self.labels, self.classes, self._digest = labels, classes, digest

    def forward(self, x: Tensor) -> Tensor:
        nobody = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        documents = self._digest(Examples(x, nobody), self.labels)
        found = torch.full((len(x), self.classes), -math.inf, device=x.device)
        found[:, list(self.labels)] = self.rest(self.reader(x), self.theta, documents.digested)
        return found


@dataclass(frozen=True)
class Documents:
    """Documents (n, L), their classes (n,) within the task, and what was digested of them."""

    x: Tensor
    y: Tensor
    digested: Tensor

    def part(self, rows: Tensor) -> Documents:
        return Documents(self.x[rows], self.y[rows], self.digested[rows])


def place(key: str) -> tuple[int, int]:
    """Client and task of «client/task»."""
    client, task = key.split("/")
    return int(client), int(task)


def transfers(
    state: FedWeITState, stream: TaskSequence, client: int, task: int, attention: Sequence[float]
) -> list[dict[str, float | int]]:
    """A row for each A of others that a task has taken: whose, and how much use was made of it.

    `of_best_choice` is over all rows of the task: the classes that it has in common with the
    tasks that were chosen, as a share of what the most alike of all tasks before would have had.
    """
    own = set(stream.labels[client][task])
    alike = {(c, i): len(own & set(stream.labels[c][i])) for c, i in map(place, state.knowledge)}
    chosen = state.chosen[str(client)]
    best = sum(sorted(alike.values(), reverse=True)[: len(chosen)])
    reached = sum(alike[c, i] for c, i, _ in chosen)
    return [
        {
            "client": client,
            "task": task,
            "from_client": c,
            "from_task": i,
            "score": score,
            "attention": alpha,
            "shared_classes": alike[c, i],
            "of_best_choice": reached / best if best else 1.0,
        }
        for (c, i, score), alpha in zip(chosen, attention, strict=False)
    ]


def sparse(vector: Tensor) -> dict[str, Tensor]:
    """A vector as it travels: a bit for each entry, and those that are not zero."""
    kept = vector != 0
    return {"kept": kept, "values": vector[kept]}


def dense(message: Mapping[str, Tensor]) -> Tensor:
    """The vector of a `sparse` one."""
    kept = message["kept"]
    vector = torch.zeros(len(kept), device=kept.device)
    vector[kept] = message["values"]
    return vector


@methods.register
class FedWeIT(Method[FedWeITState]):
    """Weights as B ⊙ m + A: B of all clients, m and A of a task; and others' A's, weighed.

    Client c learns its task t with θ = B ⊙ σ(m_t) + A_t + Σ_j α_j·A_j: the A_j are those of all
    clients' last tasks (its own among them), α_j numbers of its own for each width of windows,
    m_t has an entry for each filter. Biases, α and the head belong to the task. In a round

    1. it takes B from the server; when a task begins also the A_j. B, A_i and m_i of tasks i ≤ t,
       and what belongs to task t, are trained to minimise

           CE + λ₁·Σ_{i≤t} ‖A_i‖₁ + mask_l1·‖m_t‖₁ + w/2·(‖m_t‖² + ‖A_t‖² [+ ‖B‖² for t = 1])
              + λ₂/2·Σ_{i<t} ‖B ⊙ σ(m_i) + A_i − θ_i‖²,

       θ_i what it was when task t began (the paper's Eq. 5 has ΔB ⊙ m − ΔA, which is not the drift
       of θ; A and m of past tasks are trained, so that they make up for changes of B);
    2. the server takes the mean of all B;
    3. in a task's last round clients send A_t, entries up to λ₁ put to zero, as they are for
       predictions.

    `train.local_epochs` passes a round with Adam; after `patience` of them without a smaller loss
    on the validation examples the learning rate falls to a third, and Adam begins anew. The next
    round goes on with it, the next task with the first. Each task is scored on the test examples
    of its classes, with the client's own B.

    Who has learnt from whom is in explanations.parquet (`transfer`): a row for each A that a task
    has taken, with the mean of |α| at the task's end. In clients.parquet, `nonzero` is the share
    of A's entries that is sent; each costs four bytes, and every entry a bit. Of the traffic there
    (`bytes_up`, `bytes_down`), `adaptive_bytes` are those of A at a task's end, `selected_bytes`
    those of the A_j at its beginning, both as they are sent and as they would be if they were
    dense (`…_dense_bytes`); the rest is B, of which the paper's filter-wise sparse form is not
    here.

    Args:
        lam1: λ₁.
        lam2: λ₂.
        mask_l1: weight of ‖m_t‖₁; λ₁ in the paper, 0 in the released code.
        weight_decay: w.
        patience: epochs without improvement before the learning rate falls.
        compat: do as the released code does.
    """

    name: str = "fedweit"
    # Each client's A is sent to others.
    learns: ClassVar[Learns] = Learns(
        objectives=(Classification,), task_sequences="only", dp_compatible=False
    )
    start: ClassVar[float] = 1 / 3  # A_t begins as this share of B
    rest: ClassVar[type[Rest]] = Rest
    lam1: float = Field(1e-3, ge=0)
    lam2: float = Field(1.0, ge=0)
    mask_l1: float = Field(0.0, ge=0)
    weight_decay: float = Field(1e-4, ge=0)
    patience: int = Field(3, ge=1)
    compat: Compat = Compat()

    def check(self, train: Train) -> None:
        if train.optimizer.name != "adam" or train.optimizer.weight_decay:
            raise ExperimentError(
                f"method.name={self.name} trains with Adam and a weight decay of its own; set "
                "train.optimizer.name=adam, and method.weight_decay"
            )
        if train.lr_decay != 1 or train.clip_norm is not None:
            raise ExperimentError(
                f"method.name={self.name} has a rule of its own for the learning rate, and clips "
                "no gradients: leave out train.lr_decay and train.clip_norm"
            )

    def check_data(self, dataset: Dataset, splits: ClientSplits, network: nn.Module) -> None:
        if splits.sequence is None:
            raise ExperimentError(
                f"method.name={self.name} learns tasks in turn: partition.kind=tasks, or own_tasks"
            )
        if not isinstance(getattr(network, "features", None), TextFeatures):
            raise ExperimentError(f"method.name={self.name} needs model.name=text_cnn")

    # -- the server ----------------------------------------------------------------------------

    def init(self, fed: Federation) -> FedWeITState:
        begun = np.full(fed.num_clients, -1, dtype=np.int64)
        layout = self.layout(fed.model, self.slots(fed.num_clients))
        return FedWeITState(weights=layout.draw().numpy(), begun=begun)

    def round(self, fed: Federation, state: FedWeITState, t: int) -> FedWeITState:
        cohort, task = fed.sample(t), fed.splits.task
        new = [int(k) for k in cohort if state.begun[k] < task]
        if new:
            state = self.choose(fed, state, new)
        failed = [k for k in new if str(k) not in state.chosen]
        new = [k for k in new if k not in failed]
        cohort = np.setdiff1d(cohort, failed)
        if not len(cohort):
            raise RunError(f"round {t}: every client of the cohort failed as it began its task")
        parts = {k: self.selection(state, k) for k in new}
        mean = fed.mean(self.local_update, cohort, base=state.weights, foreign=PerClient(parts))
        begun = state.begun.copy()
        begun[[k for k in new if k in mean.clients]] = task
        state = replace(state, weights=mean.weights, begun=begun)
        return self.collect(fed, state) if self.ends_task(fed, t) else state

    def ends_task(self, fed: Federation, t: int) -> bool:
        assert fed.splits.sequence is not None
        return t * fed.splits.sequence.num_tasks % fed.settings.rounds == 0

    def choose(self, fed: Federation, state: FedWeITState, new: list[int]) -> FedWeITState:
        """Whose A's clients get that begin their task: those of all clients' last one."""
        last = fed.splits.task - 1
        before = [
            (c, last, 0.0) for c in range(fed.num_clients) if f"{c}/{last}" in state.knowledge
        ]
        return replace(state, chosen={**state.chosen, **{str(k): before for k in new}})

    def slots(self, num_clients: int) -> int:
        """K, how many A's of other tasks a task can take."""
        return num_clients

    def selection(self, state: FedWeITState, client: int) -> dict[str, Any]:
        """What a client is sent when its task begins."""
        chosen = state.chosen[str(client)]
        return {
            "items": [state.knowledge[f"{c}/{i}"] for c, i, _ in chosen],
            "scores": [score for _, _, score in chosen],
        }

    def collect(self, fed: Federation, state: FedWeITState) -> FedWeITState:
        """The A's of the task that ends; and on record, who has learnt from whom."""
        assert fed.splits.sequence is not None
        task = fed.splits.task
        who = np.flatnonzero(state.begun == task)
        knowledge, rows = dict(state.knowledge), []
        for k, item in fed.gather(self.adaptive, who).items():
            attention = item.pop("attention")
            knowledge[f"{k}/{task}"] = item
            rows += transfers(state, fed.splits.sequence, k, task, attention)
        fed.explain("transfer", rows)
        return replace(state, knowledge=knowledge)

    def evaluate(self, fed: Federation, state: FedWeITState) -> None:
        who = np.flatnonzero(state.begun >= 0)
        fed.each(self.test_tasks, who)
        fed.log(**mean_over_tasks(fed.recorded("tasks")))

    def evaluate_clients(self, fed: Federation, state: FedWeITState) -> None:
        """Nothing more: all that is evaluated are clients' own models."""

    def global_model(self, fed: Federation, state: FedWeITState) -> Mapping[str, NDArray[Any]]:
        return {"base": state.weights}

    # -- the clients ---------------------------------------------------------------------------

    @client_function("local_update")
    def local_update(
        self, client: Client, base: Tensor, foreign: Mapping[str, Any] | None
    ) -> Update:
        """(client) B after training; all else stays."""
        if client.state.get("task") != client.splits.task:
            self.begin_task(client, base, foreign)
        client.state["base"] = base
        self.learn(client)
        return Update(weights=client.state["base"])

    def begin_task(self, client: Client, base: Tensor, foreign: Mapping[str, Any] | None) -> None:
        """(client) A, m and all that a task has to itself, anew; what others' drift is held to."""
        kept = client.state
        network, rest = self.network(client, client.splits.task)
        others = torch.zeros_like(rest.foreign)
        items = foreign["items"] if foreign else []
        for j, item in enumerate(items):
            others[j] = dense(item)
        client.report(
            selected_bytes=nbytes(items), selected_dense_bytes=nbytes(others[: len(items)])
        )
        rest.reset()
        self.start_attention(rest, foreign["scores"] if foreign else [])
        A = self.start * base
        m = rest.layout.draw_mask().to(client.device)
        first = "task" not in kept
        if not first:
            kept["before"] = self.weights_of(client, prune=False)
        kept["adaptive"] = A[None] if first else torch.cat([kept["adaptive"], A[None]])
        kept["masks"] = m[None] if first else torch.cat([kept["masks"], m[None]])
        kept["rests"] = [*kept.get("rests", []), network.vector.clone()]
        kept["foreign"] = [*kept.get("foreign", []), others]
        kept["begun"] = [*kept.get("begun", []), client.splits.task]
        kept["task"], kept["lr"] = client.splits.task, client.settings.optimizer.lr

    def start_attention(self, rest: Rest, scores: Sequence[float]) -> None:
        """Initial α; those that were drawn, here."""

    def learn(self, client: Client) -> None:
        """(client) Train B, all A_i and m_i, and what belongs to the task under way."""
        kept, train, reader = client.state, client.settings, self.reader(client)
        network, rest = self.loaded(client, -1)
        B, A, m = (kept[n].clone().requires_grad_() for n in ("base", "adaptive", "masks"))
        own = [p for n, p in rest.named_parameters() if not self.is_frozen(rest, n)]
        leaves = [B, A, m, *own]
        data, held_out = (
            self.documents(rest, reader, part, labels_of(client, client.splits.task))
            for part in (client.data, client.validation)
        )
        rng, lr = client.rng("batches"), kept["lr"]
        adam = torch.optim.Adam(leaves, lr, train.optimizer.betas)
        best, waited, steps, visited, total = math.inf, 0, 0, 0, 0.0
        for _ in range(train.local_epochs):
            if lr < LEAST_LR:
                break
            rest.train()
            order = torch.from_numpy(rng.permutation(len(data.y))).to(client.device)
            for rows in torch.split(order, train.batch_size):
                loss = self.loss(client, rest, B, A, m, reader, data.part(rows))
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
                found = float(self.loss(client, rest, B, A, m, reader, held_out, prune=True))
            if found < best:
                best, waited = found, 0
                continue
            waited += 1
            if waited == self.patience:
                lr, waited = lr / LR_FACTOR, 0
                adam = torch.optim.Adam(leaves, lr, train.optimizer.betas)
        client.report(steps=steps, lr=lr)
        if visited:
            client.report(loss=total / visited)
        kept["base"], kept["adaptive"], kept["masks"] = (v.detach() for v in (B, A, m))
        kept["rests"] = [*kept["rests"][:-1], network.vector.clone()]
        kept["lr"] = lr

    def loss(
        self,
        client: Client,
        rest: Rest,
        B: Tensor,
        A: Tensor,
        m: Tensor,
        reader: Reader,
        documents: Documents,
        prune: bool = False,
    ) -> Tensor:
        """The loss of documents, with all terms; with `prune` they are read as by predictions."""
        layout = rest.layout
        gate = m.sigmoid()
        own = gate[-1].detach() if self.compat.frozen else gate[-1]
        theta = layout.masked(B, own) + (self.pruned(A[-1]) if prune else A[-1])
        logits = rest(reader(documents.x), theta, documents.digested)
        sparsity = A.abs().sum() + sum(w.abs().sum() for w in rest.dense)
        decayed = [m[-1], A[-1], *rest.dense] + ([B] if len(A) == 1 else [])
        loss = (
            cross_entropy(logits, documents.y)
            + self.lam1 * sparsity
            + self.mask_l1 * m[-1].abs().sum()
            + self.weight_decay / 2 * sum(v.square().sum() for v in decayed)
        )
        if len(A) > 1 and self.lam2:
            drift = layout.masked(B, gate[:-1]) + A[:-1] - client.state["before"]
            loss = loss + self.lam2 / 2 * drift.square().sum()
        return loss

    @client_function("adaptive")
    def adaptive(self, client: Client) -> dict[str, Any]:
        """(client) A of the task under way without small entries; and α's, which are not sent."""
        _, rest = self.loaded(client, -1)
        A = self.pruned(client.state["adaptive"][-1])
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
        """(client) Score all tasks that it has begun, on the test examples of their classes."""
        reader, theta = self.reader(client), self.weights_of(client, prune=True)
        for i, task in enumerate(client.state["begun"]):
            _, rest = self.loaded(client, i)
            rest.eval()
            test = self.tested(client, task)
            # Documents of about the same length together, so that little is padding.
            order = (test.x != 0).sum(dim=1).argsort(stable=True)
            loss, right = 0.0, 0
            for rows in torch.split(order, 100):
                some = Examples(test.x[rows], test.y[rows])
                part = self.documents(rest, reader, some, labels_of(client, task))
                with torch.no_grad():
                    found = rest(reader(part.x), theta[i], part.digested)
                loss += float(cross_entropy(found, part.y, reduction="sum"))
                right += int((found.argmax(dim=1) == part.y).sum())
            n = len(test)
            client.record(
                "tasks",
                **task_row(
                    sequence_of(client),
                    client.id,
                    task,
                    client.splits.task,
                    {"loss": loss / n, "accuracy": right / n},
                ),
            )

    @property
    def stackable(self) -> bool:
        return False

    def own_model(self, client: Client) -> TaskNetwork | None:
        """(client) Its network for the task that it has begun last."""
        if not client.state.get("begun"):
            return None
        _, rest = self.loaded(client, -1)
        theta = self.weights_of(client, prune=True)[-1]
        labels = labels_of(client, client.state["begun"][-1])
        digest = partial(self.documents, rest, self.reader(client))
        return TaskNetwork(rest, self.reader(client), theta, labels, client.num_classes, digest)

    # -- within --------------------------------------------------------------------------------

    def layout(self, model: FlatModel, slots: int) -> Layout:
        """Where B, A and θ have what."""
        features = text_features(model)
        convolutions = list(features.convolutions)
        first = convolutions[0]
        assert isinstance(first, nn.Conv1d)
        kernels = tuple(c.kernel_size[0] for c in convolutions if isinstance(c, nn.Conv1d))
        return Layout(kernels, first.out_channels, first.in_channels)

    def build(self, model: FlatModel, slots: int, labels: int) -> Rest:
        """The network of what a task has to itself."""
        features = text_features(model)
        dropout = features.dropout.p
        hidden = features.dense.out_features
        return self.rest(self.layout(model, slots), slots, labels, dropout, hidden)

    def network(self, client: Client, task: int) -> tuple[FlatModel, Rest]:
        """(client) That of one of its tasks, with whatever weights were left in it."""
        labels, slots = len(labels_of(client, task)), self.slots(len(sequence_of(client).labels))
        build = partial(self.build, client.model, slots, labels)
        network = client.network(f"rest of {labels}", build)
        assert isinstance(network.module, Rest)
        return network, network.module

    def loaded(self, client: Client, i: int) -> tuple[FlatModel, Rest]:
        """(client) That of the i-th task that it has begun, with its weights and others' A's."""
        network, rest = self.network(client, client.state["begun"][i])
        network.load(client.state["rests"][i])
        rest.foreign.copy_(client.state["foreign"][i])
        return network, rest

    def reader(self, client: Client) -> Reader:
        return text_features(client.model).reader

    def pruned(self, A: Tensor) -> Tensor:
        """A without entries of λ₁ and less."""
        return A.masked_fill(A.abs() <= self.lam1, 0)

    def weights_of(self, client: Client, prune: bool) -> Tensor:
        """(client) (tasks, P) θ_i = B ⊙ σ(m_i) + A_i of all tasks that it has begun."""
        kept = client.state
        layout = self.layout(client.model, self.slots(len(sequence_of(client).labels)))
        A = self.pruned(kept["adaptive"]) if prune else kept["adaptive"]
        return layout.masked(kept["base"], kept["masks"].sigmoid()) + A

    def is_frozen(self, rest: Rest, name: str) -> bool:
        """Whether the released code leaves a parameter as it was drawn."""
        return self.compat.frozen and name.startswith(rest.untrained)

    @torch.no_grad()
    def documents(
        self, rest: Rest, reader: Reader, examples: Examples, labels: tuple[int, ...]
    ) -> Documents:
        """Documents with their classes numbered within the task."""
        known = torch.tensor(labels, device=examples.y.device)
        digested = rest.digest(reader, examples.x)
        if self.compat.frozen and not rest.uses_others:
            digested = torch.zeros_like(digested)
        return Documents(examples.x, torch.searchsorted(known, examples.y), digested)

    def tested(self, client: Client, task: int) -> Examples:
        """(client) What a task is tested on."""
        test = task_test(client, task)
        if not self.compat.eval:
            return test
        order = sequence_of(client).order[client.id][task]
        by_class = torch.cat([(test.y == label).nonzero().flatten() for label in order])
        count = LAST * max(1, math.ceil(len(client.validation) / LAST))
        rows = by_class[:count]
        return Examples(test.x[rows], test.y[rows])


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


def text_features(model: FlatModel) -> TextFeatures:
    """The features of a network that was found to be a `TextCnn`."""
    features = model.module.get_submodule("features")
    assert isinstance(features, TextFeatures)
    return features
