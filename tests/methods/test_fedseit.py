"""FedWeIT and FedSeIT: tasks in turn, what is minimised, what is chosen and what it costs."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from sklearn.metrics.pairwise import cosine_similarity
from test_fedweit import a_task
from torch import Tensor, nn

from experiments import by_day, federation, interrupted, small_experiment
from fedsim import Client, Experiment, Federation, resume, run
from fedsim.errors import RunError
from fedsim.federation import Examples, Update
from fedsim.federation.cohort import draw_cohort
from fedsim.launch.prepare import prepare
from fedsim.methods.fedseit import FedSeIT, similarity
from fedsim.methods.fedweit import FedWeIT, FedWeITState
from fedsim.methods.fedweit.compat import first_of_classes
from fedsim.methods.fedweit.knowledge import dense
from fedsim.methods.fedweit.method import Plateau, text_features
from fedsim.methods.fedweit.tasks import Documents, evaluate
from fedsim.models.decomposed import DenseRest, Layout, ProjectedRest, Rest
from fedsim.models.text import Reader
from fedsim.objectives.continual import continual
from fedsim.simulate import initial_state, one_round
from fedsim.support.rng import keyed_rng
from fedsim.training import FlatModel

pytestmark = pytest.mark.filterwarnings("ignore:.*words get random vectors")

both = pytest.mark.parametrize("name", ["fedweit", "fedseit"])
# The words of a class; those of c and d are those of a and b, otherwise dealt out.
WORDS = {
    "a": "one two three four",
    "b": "five six seven eight",
    "c": "one two five six",
    "d": "three four seven eight",
}
D = 7
TRAIN = {
    "rounds": 4,
    "local_epochs": 2,
    "batch_size": 8,
    "optimizer": {"name": "adam", "lr": 0.01},
}
# Two clients, two tasks each; and three with three.
TWO = [[["a", "b"], ["c", "d"]], [["c", "d"], ["a", "b"]]]
THREE = [
    [["a", "b"], ["c", "d"], ["a", "c"]],
    [["b", "c"], ["a", "d"], ["b", "d"]],
    [["a", "b", "c"], ["b", "d"], ["c", "d"]],
]


def write(path: Path, each: int, length: int = 4, seed: int = 0) -> Path:
    """So many documents of each class."""
    rng = np.random.default_rng(seed)
    lines = [
        f"{label}\t{' '.join(rng.choice(words.split(), length))}"
        for label, words in WORDS.items()
        for _ in range(each)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "documents.txt", 24)


def experiment(path: Path, tasks: Any = TWO, **sections: dict[str, Any]) -> Experiment:
    """A small experiment on documents, with further keys of its sections."""
    network = {"name": "text_cnn", "kernels": [1, 2], "filters": 3, "hidden": 5, "dropout": 0.2}
    usual: dict[str, Any] = {
        "data": {"name": "text", "path": str(path), "dimension": D},
        "partition": {"kind": "own_tasks", "tasks": tasks},
        **{"model": network, "method": {"name": "fedseit"}, "train": TRAIN},
    }
    names = {**usual, **sections}
    return small_experiment(**{n: {**usual.get(n, {}), **sections.get(n, {})} for n in names})


def centres_of(made: Experiment) -> np.ndarray:
    """What client 0 sends of its first documents."""
    fed = federation(made)
    fed.runner.begin(1)
    method: Any = made.method
    found: np.ndarray = fed.gather(method.centres, [0])[0]
    return found


def played(made: Experiment) -> tuple[Federation, list[FedWeITState], list[dict[int, Any]]]:
    """The server's state before the first round and after each; clients' states likewise."""
    fed = federation(made)
    states: list[Any] = [initial_state(fed.runner, made)]
    kept: list[dict[int, Any]] = [{}]
    for t in range(1, made.train.rounds + 1):
        states.append(one_round(fed.runner, made, states[-1], t))
        kept.append({k: fed.runner.fetch(handle) for k, handle in fed.runner.states().items()})
    return fed, states, kept


# the loss


def setup_of_loss(
    rest: type[Rest], tasks: int, dense_layer: bool = False
) -> tuple[Rest, Reader, Documents, dict[str, Tensor]]:
    layout = Layout((1, 2), 3, 3, (4, 18) if dense_layer else None)
    network, reader, _, texts = a_task(rest, layout, 6)
    y, digested = torch.tensor([0, 1, 2, 2, 1, 0]), network.eval().digest(reader, texts.x)
    documents = Documents(texts.x, y, digested)
    leaves = {
        "B": torch.randn(layout.size).requires_grad_(),
        "A": torch.randn(tasks, layout.size).requires_grad_(),
        "m": torch.randn(tasks, layout.rows).requires_grad_(),
        "before": torch.randn(tasks - 1, layout.size),
    }
    return network, reader, documents, leaves


def gates(layout: Layout, m: Tensor) -> Tensor:
    """(P,) σ(m), an entry for each weight."""
    lengths = [columns for rows, columns in layout.blocks for _ in range(rows)]
    return m.sigmoid().repeat_interleave(torch.tensor(lengths))


def loss_by_hand(
    method: FedWeIT,
    rest: Rest,
    reader: Reader,
    documents: Documents,
    B: Tensor,
    A: Tensor,
    m: Tensor,
    before: Tensor,
) -> Tensor:
    gate = [gates(rest.layout, row) for row in m]
    if method.compat.frozen:
        gate[-1] = gate[-1].detach()
    theta = [B * gate[i] + A[i] for i in range(len(A))]
    logits = rest(reader(documents.x), theta[-1], documents.digested)
    loss = nn.functional.cross_entropy(logits, documents.y)
    weights = []
    if isinstance(rest, ProjectedRest) and not rest.layout.dense:
        weights = [layer.weight for layer in rest.projections]
        weights.append(rest.combination.weight)
    loss += method.lam1 * torch.cat([v.flatten() for v in (*A, *weights)]).abs().sum()
    loss += method.mask_l1 * m[-1].abs().sum()
    decayed = [m[-1], A[-1], *weights, *([B] if len(A) == 1 else [])]
    loss += method.weight_decay / 2 * torch.cat([v.flatten() for v in decayed]).square().sum()
    if len(A) > 1:
        loss += method.lam2 / 2 * (torch.stack(theta[:-1]) - before).square().sum()
    return loss


COEFFICIENTS = {"lam1": 0.03, "lam2": 0.7, "mask_l1": 0.05, "weight_decay": 0.11}


@pytest.mark.parametrize("tasks", [1, 3])
@pytest.mark.parametrize(
    ("network", "shared"),
    [(Rest, False), (DenseRest, False), (ProjectedRest, False), (ProjectedRest, True)],
)
def test_the_loss_is_that_of_the_docstring(network: type[Rest], shared: bool, tasks: int) -> None:
    method = FedWeIT(**COEFFICIENTS)  # type: ignore[arg-type]
    rest, reader, documents, leaves = setup_of_loss(network, tasks, shared)
    B, A, m, before = leaves.values()
    past = before if tasks > 1 else None
    found = method.loss(rest, reader, documents, B, A, m, past)
    expected = loss_by_hand(method, rest, reader, documents, B, A, m, before)
    torch.testing.assert_close(found, expected)
    trained = [B, A, m, *rest.parameters()]
    ours, theirs = (torch.autograd.grad(v, trained, retain_graph=True) for v in (found, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_validation_reads_as_predictions_do_and_adds_no_drift() -> None:
    """Where nothing has moved there is none, though entries of A are pruned."""
    rest, reader, documents, leaves = setup_of_loss(ProjectedRest, 3)
    B, A, m, _ = leaves.values()
    gate = torch.stack([gates(rest.layout, row) for row in m])
    theta = (B * gate + A).detach()

    def found(lam2: float, prune: bool) -> Tensor:
        method = FedSeIT(lam1=0.5, lam2=lam2)
        return method.loss(rest, reader, documents, B, A, m, theta[:-1], prune=prune)

    torch.testing.assert_close(found(0, prune=True), found(1, prune=True))
    read = torch.where(A[-1].abs() > 0.5, theta[-1], (B * gate[-1]).detach())
    assert (read != theta[-1]).any()
    pruned, whole = (
        nn.functional.cross_entropy(rest(reader(documents.x), w, documents.digested), documents.y)
        for w in (read, theta[-1])
    )
    torch.testing.assert_close(found(1, True) - found(1, False), pruned - whole)


# what is trained


SEEN: list[dict[str, Any]] = []


class Spied(FedSeIT):
    """Notes what clients have before and after they learn, and losses without gradients."""

    name: str = "test_fedseit:Spied"

    def learn(self, client: Client) -> None:
        before = {n: v.clone() if isinstance(v, Tensor) else v for n, v in client.state.items()}
        before["rests"] = [v.clone() for v in client.state["rests"]]
        noted = {"client": client, "before": before, "held out": []}
        SEEN.append(noted)
        super().learn(client)
        noted["after"] = dict(client.state)

    def loss(self, *arguments: Any, **further: Any) -> Tensor:
        found = super().loss(*arguments, **further)
        if not torch.is_grad_enabled():
            SEEN[-1]["held out"].append(float(found))
        return found


@pytest.mark.parametrize(("top_k", "frozen"), [(None, False), (2, False), (2, True)])
def test_a_round_of_training_step_by_step(path: Path, top_k: int | None, frozen: bool) -> None:
    """Also of what the released code does not train, and whose branch for others is inert."""
    SEEN.clear()
    method = {"name": "test_fedseit:Spied", "top_k": top_k, **COEFFICIENTS, "lam1": 1e-3}
    method["compat"] = {"frozen": frozen}
    made: Any = experiment(path, method=method, model={"dropout": 0.0})
    fed, states, _ = played(made)
    dataset, splits, _ = prepare(made)
    assert splits.sequence is not None
    assert len(SEEN) == 8
    for noted in SEEN:
        client, before, after = noted["client"], noted["before"], noted["after"]
        k, task, t = client.id, client.splits.task, client.round
        np.testing.assert_array_equal(before["base"], states[t - 1].weights)
        labels = splits.sequence.labels[k][task]
        rest = made.method.build(text_features(fed.server.model), made.method.slots(2), 2)
        network = FlatModel(rest, torch.device("cpu"))
        network.load(before["rests"][-1])
        rest.foreign.copy_(before["foreign"][-1])
        reader = fed.server.model.module.get_submodule("features.reader")
        rows = splits.sequence.train[2 * k + task]
        x = torch.tensor(dataset.x[rows])
        y = torch.tensor([labels.index(label) for label in dataset.y[rows]])
        digested = (0 if frozen else 1) * rest.digest(reader, x)  # type: ignore[arg-type]
        every = Documents(x, y, digested)
        learnt = [
            parameter
            for name, parameter in rest.named_parameters()
            if not (frozen and name.startswith(("head", "projections.1")))
        ]
        B, A, m = (before[n].clone().requires_grad_() for n in ("base", "adaptive", "masks"))
        drift = before.get("before", torch.zeros(0, len(B)))
        adam = torch.optim.Adam([B, A, m, *learnt], before["lr"])
        rng = keyed_rng(made.seed, "local_update/batches", t, k)
        for _ in range(2):
            order = rng.permutation(len(y))
            for start in range(0, len(y), 8):
                part = every.part(torch.tensor(order[start : start + 8]))
                loss = loss_by_hand(made.method, rest, reader, part, B, A, m, drift)  # type: ignore
                adam.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                adam.step()
        for name, found in (("base", B), ("adaptive", A), ("masks", m)):
            torch.testing.assert_close(after[name], found.detach(), rtol=1e-3, atol=2e-4)
        torch.testing.assert_close(after["rests"][-1], network.vector, rtol=1e-3, atol=2e-4)
    for t in range(1, 5):
        of_round = [n["after"]["base"].double() for n in SEEN if n["client"].round == t]
        mean = (of_round[0] + of_round[1]) / 2  # however many examples each has
        np.testing.assert_allclose(states[t].weights, mean, atol=1e-6)


@both
def test_how_a_task_begins(path: Path, name: str) -> None:
    """A as a share of B; what past tasks' weights were before the server's B came."""
    train = {"rounds": 6, "local_epochs": 1}
    made = experiment(path, THREE, method={"name": name, "lam2": 0.5}, train=train)
    method: Any = made.method
    fed, states, kept = played(made)
    layout = method.layout(text_features(fed.server.model), method.slots(3))
    for task, k in itertools.product((1, 2), range(3)):
        t = 2 * task + 1
        was, now = kept[t - 1][k], kept[t][k]
        B, A, m = (torch.tensor(was[n]) for n in ("base", "adaptive", "masks"))
        expected = [(B * gates(layout, m[i]) + A[i]).numpy() for i in range(task)]
        assert (was["base"] != states[t - 1].weights).any()
        np.testing.assert_allclose(now["before"], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(now["before"], kept[t + 1][k]["before"])
        for part in ("rests", "foreign"):  # past tasks keep theirs
            np.testing.assert_equal(now[part][:task], was[part])
        assert (now["task"], now["begun"]) == (task, [*range(task + 1)])
        assert not now["foreign"][0].any()
        for j in range(3):
            item = states[t - 1].knowledge[f"{j}/{task - 1}"]
            sent = dense({n: torch.tensor(v) for n, v in item.items()})
            np.testing.assert_array_equal(now["foreign"][task][j], sent.numpy())
    untrained = {"optimizer": {"name": "adam", "lr": 1e-11}}  # below the least rate
    _, states, kept = played(experiment(path, method={"name": name}, train=untrained))
    share = 3 if name == "fedweit" else 5
    np.testing.assert_allclose(kept[1][0]["adaptive"][0], states[0].weights / share, rtol=1e-6)
    # Of variance 1/3 after it was cut off at two standard deviations.
    assert np.abs(kept[1][0]["masks"]).max() <= 2 / 0.8796 / math.sqrt(3)


@both
def test_what_is_sent_and_tested_is_pruned(path: Path, tmp_path: Path, name: str) -> None:
    made = experiment(path, method={"name": name, "lam1": 0.03})
    method: Any = made.method
    fed, states, kept = played(made)
    features, test = text_features(fed.server.model), fed.server.test_data
    sequence = fed.server.splits.sequence
    assert sequence is not None
    scores = run(made, tmp_path).tasks.query("round == 4").set_index(["client", "task"])
    pruned = 0
    for k, state in kept[4].items():
        A = torch.tensor(kept[2][k]["adaptive"][0])
        expected = torch.where(A.abs() > 0.03, A, 0)
        sent = dense({n: torch.tensor(v) for n, v in states[2].knowledge[f"{k}/0"].items()})
        assert torch.equal(sent, expected[: len(sent)])
        pruned += int((sent == 0).sum())
        for task, labels in enumerate(sequence.labels[k]):
            rest = method.build(features, method.slots(2), len(labels))
            FlatModel(rest, torch.device("cpu")).load(torch.tensor(state["rests"][task]))
            rest.foreign.copy_(torch.tensor(state["foreign"][task]))
            A = torch.tensor(state["adaptive"][task])
            gate = gates(rest.layout, torch.tensor(state["masks"][task]))
            theta = torch.tensor(state["base"]) * gate + torch.where(A.abs() > 0.03, A, 0)
            own = torch.isin(test.y, torch.tensor(labels))
            examples = Examples(test.x[own], test.y[own])
            found = evaluate(rest, features.reader, theta, examples, labels, False)
            assert scores.loc[(k, task), [*found]].to_dict() == pytest.approx(found, rel=1e-3)
    assert pruned > 0


# selection


def similarity_by_hand(a: np.ndarray, b: np.ndarray, kind: str) -> float:
    cosines = cosine_similarity(a.astype(float), b.astype(float))  # 0 for vectors of zeros
    return float(np.where((cosines > 0.7) | (kind == "mean"), cosines, 0).mean())


@pytest.mark.parametrize("kind", ["mean", "rectified"])
def test_similarity_is_over_all_pairs(kind: Any) -> None:
    rng = np.random.default_rng(0)
    for n, q in ((1, 1), (4, 9), (20, 3)):
        a, b = (rng.normal(0.5, 1, (rows, D)).astype(np.float32) for rows in (n, q))
        a[0] = 0 if n > 1 else a[0]  # the vector of an empty document
        expected = similarity_by_hand(a, b, kind)
        assert similarity(a, b, kind) == pytest.approx(expected, abs=1e-9)
        assert similarity(100 * a, b, kind) == pytest.approx(expected, abs=1e-6)
    one = np.ones((2, D), np.float32)
    assert similarity(one, one, kind) == pytest.approx(1)
    assert similarity(one, np.zeros((3, D), np.float32), kind) == 0


@pytest.mark.parametrize(
    ("top_k", "similarity"), [(1, "mean"), (2, "rectified"), (4, "mean"), (20, "mean")]
)
def test_the_most_alike_of_all_finished_tasks_are_chosen(
    path: Path, top_k: int, similarity: str
) -> None:
    method = {"top_k": top_k, "similarity": similarity}
    train = {"rounds": 6, "local_epochs": 1}
    made = experiment(path, THREE, method=method, train=train, data={"dimension": 4})
    _, states, kept = played(made)
    for t in range(1, 7):
        task = (t - 1) // 2
        centres = states[t].centres
        finished = sorted((c, i) for c in range(3) for i in range(task))
        assert set(centres) == {f"{c}/{i}" for c in range(3) for i in range(task + 1)}
        assert len(states[t].knowledge) == 3 * (task + (t % 2 == 0))
        for k in range(3):
            own = centres[f"{k}/{task}"]
            scores = {
                (c, i): similarity_by_hand(own, centres[f"{c}/{i}"], similarity)
                for c, i in finished
            }
            best = sorted(finished, key=lambda place: (-round(scores[place], 12), *place))
            found = states[t].chosen[str(k)]
            assert [(c, i) for c, i, _ in found] == best[:top_k]
            assert len(found) == min(top_k, 3 * task)
            foreign = kept[t][k]["foreign"][task]
            assert foreign.shape[0] == top_k
            assert not foreign[len(found) :].any()
            for received, (c, i, score) in zip(foreign, found, strict=False):
                assert score == pytest.approx(scores[c, i], abs=1e-9)
                item = states[t].knowledge[f"{c}/{i}"]
                np.testing.assert_array_equal(received[received != 0], item["values"])


def test_attention_begins_with_the_scores() -> None:
    method = FedSeIT(top_k=3)
    rest = ProjectedRest(Layout((1, 2), 2, D), 3, 2, 0.0, 4)
    for scores, expected in (
        ([0.6, 0.3, 0.1], [0.6, 0.3, 0.1]),
        ([0.9, 0.3], [0.75, 0.25, 0.0]),
        ([0.0, 0.0], [0.5, 0.5, 0.0]),
        ([], [0.0, 0.0, 0.0]),
    ):
        method.start_attention(rest, scores)
        for width in (0, 1):
            assert rest.attention[:, width].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("each", [100, 130])
def test_centres(tmp_path: Path, each: int) -> None:
    """All documents if there are 200 or fewer, else as many clusters."""
    file = write(tmp_path / "documents.txt", each, length=40)
    test = write(tmp_path / "test.txt", 2)
    data = {"test_path": str(test)}
    aside = {"validation_fraction": 0.0}
    made = experiment(file, [[["a", "b"]]], data=data, partition=aside, method={"top_k": 1})
    found = centres_of(made)
    np.testing.assert_array_equal(found, centres_of(made))
    dataset, splits, _ = prepare(made)
    rows = [row[dataset.known[row]] for row in dataset.x[splits.train[0]]]
    vectors = np.stack([dataset.vectors[words].mean(axis=0) for words in rows])
    assert len(vectors) == 2 * each
    assert (found.shape, found.dtype) == ((200, D), np.float32)
    nearest = cdist(vectors, found).argmin(axis=1)
    for q, centre in enumerate(found):
        own = vectors[[q]] if each == 100 else vectors[nearest == q]
        np.testing.assert_allclose(centre, own.mean(axis=0), atol=1e-5)


# controls


class StartsAsFedSeIT(FedWeIT):
    name: str = "test_fedseit:StartsAsFedSeIT"
    start = 1 / 5


def test_controls_differ_in_others_alone(path: Path, tmp_path: Path) -> None:
    """In first tasks there are none: the same bits, but for how FedWeIT starts A."""
    others = {"name": "test_fedseit:StartsAsFedSeIT", "dense_layer": True}
    runs = [
        run(experiment(path, method=method, train={"local_epochs": 1}), tmp_path)
        for method in ({"top_k": 0}, {}, others)
    ]
    sent, _, sent_too = (done.clients for done in runs)
    none, whole, added = (
        done.tasks.set_index(["round", "client", "task"])[["loss", "accuracy"]] for done in runs
    )
    for other in (whole, added):
        assert none.loc[:2].equals(other.loc[:2])
        assert not none.loc[3:].equals(other.loc[3:])
    assert not whole.loc[3:].equals(added.loc[3:])
    # Without others, B is all that is sent.
    assert (sent[["bytes_up", "bytes_down"]] == 4 * 3 * D * 3).all(axis=None)
    begins = sent["round"].isin([1, 3])
    assert (sent.loc[begins, ["selected_bytes", "selected_dense_bytes"]] == 0).all(axis=None)
    assert not {"adaptive_bytes", "centres_bytes"} & set(sent)
    assert (sent_too.loc[sent_too["round"] == 3, "selected_bytes"] > 0).all()


# bytes


@pytest.mark.parametrize("fields", [{}, {"top_k": 2, "share_dense": True}])
def test_what_is_sent_is_counted(path: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    method = {**fields, "lam1": 0.02}
    made = experiment(path, THREE, method=method, train={"rounds": 9, "local_epochs": 1})
    _, states, _ = played(made)
    done = run(made, tmp_path)
    _, splits, _ = prepare(made)
    assert splits.sequence is not None
    Pc = 3 * D * 3
    slots = fields.get("top_k", 3)
    P = Pc + (5 * (slots + 1) * 6 if "share_dense" in fields else 0)
    assert states[0].weights.shape == (P,)
    sizes = {}
    for place, item in states[9].knowledge.items():
        assert item["kept"].shape == (P,)
        assert item["kept"].dtype == np.bool_
        sizes[place] = math.ceil(P / 8) + 4 * int(item["kept"].sum())
    assert any(size < math.ceil(P / 8) + 4 * P for size in sizes.values())
    for row in done.clients.to_dict("records"):
        k, t = row["client"], row["round"]
        task, place = (t - 1) // 3, (t - 1) % 3
        up = down = 4 * P
        if place == 0:
            selected = [sizes[f"{c}/{i}"] for c, i, _ in states[t].chosen[str(k)]]
            down += sum(selected)
            assert row["selected_bytes"] == sum(selected)
            assert row["selected_dense_bytes"] == 4 * P * len(selected)
            if "top_k" in fields:
                up += 4 * D * len(splits.sequence.train[3 * k + task])
                assert row["centres_bytes"] == up - 4 * P
        if place == 2:
            up += sizes[f"{k}/{task}"]
            assert row["adaptive_bytes"] == sizes[f"{k}/{task}"]
            assert row["adaptive_dense_bytes"] == 4 * P
            kept = states[t].knowledge[f"{k}/{task}"]["kept"]
            assert row["nonzero"] == pytest.approx(kept.mean())
        assert (row["bytes_up"], row["bytes_down"]) == (up, down)
    assert len(done.clients) == 27
    assert len(done.explanations) == 2 * 3 * slots  # who has learnt from whom
    for (k, task), rows in done.explanations.groupby(["client", "task"]):
        assert set(rows["round"]) == {3 * task + 3}
        chosen = states[3 * task + 1].chosen[str(k)]
        found = zip(rows["from_client"], rows["from_task"], strict=True)
        assert [*found] == [place[:2] for place in chosen]
        shared = [len({*THREE[k][task]} & {*THREE[c][i]}) for c, i, _ in chosen]
        assert rows["shared_classes"].tolist() == shared


# whole runs


@pytest.mark.parametrize("name", by_day(["fedweit", "fedseit"], ["fedseit"]))
def test_it_learns(path: Path, tmp_path: Path, name: str) -> None:
    train = {"local_epochs": 8, "optimizer": {"name": "adam", "lr": 0.02}}
    done = run(experiment(path, method={"name": name}, train=train), tmp_path)
    assert continual(done.tasks).tta > 0.9
    assert done.rounds["accuracy"].notna().all()
    assert done.tasks.query("round == 2")["task"].tolist() == [0, 0]
    assert done.tasks.query("round == 3")["task"].tolist() == [0, 1, 0, 1]
    by_round = done.tasks.groupby("round")["accuracy"].mean()
    np.testing.assert_allclose(done.rounds["accuracy"], by_round)
    assert set(done.weights()) == {"base"}


@pytest.mark.parametrize(
    "method",
    by_day([{"name": "fedweit"}, {"top_k": 2}, {"top_k": 2, "lam1": 10.0}], [{"top_k": 2}]),
)
def test_resumed_in_a_task_and_between_tasks(path: Path, tmp_path: Path, method: Any) -> None:
    train = {"rounds": 6, "local_epochs": 1, "participation": 0.7}
    made = experiment(path, THREE, method=method, train=train, checkpoint={"every": 1})
    undisturbed = run(made, tmp_path)
    for after in (3, 4):
        again = resume(interrupted(made, tmp_path / str(after), after), progress=False)
        assert again.result_hash == undisturbed.result_hash
        assert again.tasks.equals(undisturbed.tasks)


# learning rates


def test_the_learning_rate_falls_after_epochs_without_improvement(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SEEN.clear()
    rates: list[float] = []
    kind = torch.optim.Adam

    def noted(leaves: Any, lr: float, *betas: Any, **settings: Any) -> torch.optim.Adam:
        rates.append(lr)
        return kind(leaves, lr, *betas, **settings)

    monkeypatch.setattr(torch.optim, "Adam", noted)
    made = experiment(
        path,
        method={"name": "test_fedseit:Spied", "patience": 2},
        train={"rounds": 4, "local_epochs": 9, "optimizer": {"name": "adam", "lr": 0.3}},
    )
    played(made)
    fallen: dict[tuple[int, int], float] = {}
    expected = []
    for seen in SEEN:
        client, plateau = seen["client"], Plateau(2)
        lr = fallen.get((client.id, client.splits.task), 0.3)  # anew in each task
        expected.append(lr)
        assert len(seen["held out"]) == 9
        for loss in seen["held out"]:
            if plateau.reached(loss):
                lr /= 3
                expected.append(lr)
        fallen[client.id, client.splits.task] = lr
        assert client.row["lr"] == pytest.approx(lr)
    assert len(expected) > len(SEEN) + 4
    _tried, *rates = rates  # before the start, whether the network can be trained
    assert rates == pytest.approx(expected)


# edges


def test_odd_documents(tmp_path: Path) -> None:
    """Empty ones, ones of unknown words, one of 10,000 words; classes of one document."""
    lines = [f"a\t{text}" for text in ("one two", "", "!", "unheard", "one", "two two")]
    lines += [f"b\t{text}" for text in ("two one", "unheard unheard", "one " * 10_000, "", "two")]
    lines += ["c\tone", "d\t"]
    file = tmp_path / "documents.txt"
    file.write_text("\n".join(lines) + "\n")
    vectors = tmp_path / "vectors.txt"
    vectors.write_text("one 1 0.5\ntwo 0 1\n")
    tasks = [[["a", "b"], ["c", "d"]], [["a"], ["b"]]]
    for method in ({"name": "fedweit"}, {"top_k": 2, "similarity": "rectified"}):
        made = experiment(
            file,
            tasks,
            data={"vectors": str(vectors), "test_path": str(file), "length": 20_000},
            method=method,
            train={"rounds": 2},
            partition={"validation_fraction": 0.3},
        )
        dataset, _, _ = prepare(made)
        assert dataset.x.shape[1] == 10_000
        done = run(made, tmp_path)
        assert np.isfinite(done.rounds["loss"]).all()
        (last,) = done.tasks.query("round == 2 and client == 1 and task == 1").to_dict("records")
        assert (last["accuracy"], last["loss"]) == (1, 0)  # of one class


@pytest.mark.parametrize("fraction", [0.0, 0.125, 0.7])
@pytest.mark.parametrize("tasks", [[["a", "b"], ["a", "c"]], [["b"], ["d"]]], ids=str)
def test_few_documents_for_validation(tmp_path: Path, tasks: Any, fraction: float) -> None:
    """All of a class's few documents may be kept for it, or none, or none of a task."""
    file = tmp_path / "documents.txt"
    texts = ["a\tone"] * 6 + ["b\tnine", "c\teight", "c\teight two", "d\ttwo"]
    file.write_text("\n".join(texts) + "\n")
    few = {"partition": {"validation_fraction": fraction}, "data": {"test_path": str(file)}}
    done = run(experiment(file, [tasks], train={"rounds": 2}, **few), tmp_path)
    assert np.isfinite(done.rounds[["loss", "accuracy"]]).all(axis=None)
    assert (done.clients["lr"] == 0.01).all()


def test_what_the_released_code_tests_on(path: Path, tmp_path: Path) -> None:
    test = write(tmp_path / "test.txt", 100, seed=3)
    made = experiment(
        path,
        [[["b", "a"], ["d", "c"]]],
        data={"test_path": str(test)},
        method={"compat": {"eval": True}},
        train={"rounds": 2},
    )
    dataset, splits, _ = prepare(made)
    assert splits.sequence is not None
    assert 0 < len(splits.sequence.validation[0]) <= 64
    b, a = dataset.classes.index("b"), dataset.classes.index("a")
    assert splits.sequence.order[0][0] == (b, a)
    x, y = torch.tensor(dataset.test_x), torch.tensor(dataset.test_y)
    for validation, first in ((0, 64), (10, 64), (64, 64), (65, 128), (500, 200)):
        found = first_of_classes(Examples(x, y), (b, a), validation)
        assert len(found) == first
        assert found.y.tolist() == ([b] * 100 + [a] * 100)[:first]
    done = run(made, tmp_path)
    assert set((done.tasks["accuracy"] * 64) % 1) == {0}


@both
def test_who_comes_late_or_misses_a_task(path: Path, tmp_path: Path, name: str) -> None:
    tasks = [[*own, ["a", "c"]] for own in (*TWO, *TWO)]
    made = experiment(
        path,
        tasks,
        method={"name": name, **({"top_k": 2} if name == "fedseit" else {})},
        train={"rounds": 6, "local_epochs": 1, "participation": 0.5},
    )
    cohorts = {t: draw_cohort(made.seed, 0.5, 4, t).tolist() for t in range(1, 7)}
    took = {
        k: [i for i in range(3) if k in cohorts[2 * i + 1] + cohorts[2 * i + 2]] for k in range(4)
    }
    assert any(len(own) < 3 for own in took.values())  # some miss a task
    late = [(k, t) for t in (2, 4, 6) for k in cohorts[t] if k not in cohorts[t - 1]]
    assert any(t > 2 for _, t in late)
    _, states, kept = played(made)
    assert {k: state["begun"] for k, state in kept[6].items()} == took
    assert set(states[6].knowledge) == {f"{k}/{i}" for k, own in took.items() for i in own}
    done = run(made, tmp_path)
    assert all(kept[t][k]["foreign"][-1].any() for k, t in late if t > 2)
    last = done.tasks[done.tasks["round"] == 6]
    assert {k: own["task"].tolist() for k, own in last.groupby("client")} == took
    assert np.isfinite(continual(done.tasks).tta)


class Failing(FedSeIT):
    """Some clients fail in rounds, or to send the centres of one of their tasks."""

    name: str = "test_fedseit:Failing"
    clients: list[int] = [1]  # noqa: RUF012
    rounds: list[int] = []  # noqa: RUF012
    task: int = -1

    def local_update(self, client: Client, *arguments: Any, **named: Any) -> Update:
        if client.id in self.clients and client.round in self.rounds:
            raise ValueError("no")
        return super().local_update(client, *arguments, **named)

    def centres(self, client: Client) -> Any:
        if client.id in self.clients and client.splits.task == self.task:
            raise ValueError("no")
        return super().centres(client)


FAILING = {"name": "test_fedseit:Failing", "top_k": 2}


@pytest.mark.parametrize("fails", [[1], [3], [3, 4], [1, 2]])
def test_who_fails_when_a_task_begins_begins_it_later(
    path: Path, tmp_path: Path, fails: list[int]
) -> None:
    method, skip = FAILING | {"rounds": fails}, {"on_client_error": "skip"}
    made = experiment(path, method=method, train=skip)
    done = run(made, tmp_path)
    assert done.rounds["failed"].sum() == len(fails)
    _, states, kept = played(made)
    tasks = [i for i in (0, 1) if not {2 * i + 1, 2 * i + 2} <= set(fails)]
    assert kept[4][1]["begun"] == tasks
    assert set(states[4].knowledge) == {"0/0", "0/1"} | {f"1/{i}" for i in tasks}
    if 1 in tasks:
        assert kept[4][1]["foreign"][-1].any()


@pytest.mark.parametrize("task", [0, 1, 2])
def test_who_fails_to_send_centres_is_skipped(path: Path, task: int) -> None:
    train = {"on_client_error": "skip", "rounds": 3, "local_epochs": 1}
    _, states, _ = played(experiment(path, THREE, method=FAILING | {"task": task}, train=train))
    assert f"1/{task}" not in states[3].centres
    if task:
        assert states[task + 1].chosen.get("1") != states[task].chosen["1"]


def test_all_fail_as_they_begin_a_task(path: Path, tmp_path: Path) -> None:
    method = FAILING | {"task": 1, "clients": [0, 1]}
    made = experiment(path, method=method, train={"on_client_error": "skip"})
    with pytest.raises(RunError, match="round 3: every client of the cohort failed at the start"):
        run(made, tmp_path)


def test_all_entries_pruned(path: Path) -> None:
    """An A of zeros is a message of no values."""
    method = {"lam1": 10.0, "top_k": 2}
    _, states, _ = played(experiment(path, method=method, train={"local_epochs": 1}))
    assert all(len(item["values"]) == 0 for item in states[4].knowledge.values())
