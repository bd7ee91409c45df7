"""The parts of FedWeIT, each against its formula written out; the whole is in test_fedseit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedsim.federation import Examples
from fedsim.methods.fedseit import clusters, most_similar
from fedsim.methods.fedweit.compat import digest, trained
from fedsim.methods.fedweit.knowledge import of_task, selection, transfers
from fedsim.methods.fedweit.memory import pruned
from fedsim.methods.fedweit.method import Plateau
from fedsim.methods.fedweit.tasks import TaskNetwork, evaluate
from fedsim.models.decomposed import DenseRest, Layout, ProjectedRest, Rest
from fedsim.models.text import Reader

LAYOUT = Layout((1, 2), 2, 3)  # 4 rows of 3, 3, 6, 6 entries


@pytest.mark.parametrize(
    ("patience", "losses", "expected"),
    [
        (1, [3, 2, 2, 1], [False, False, True, False]),
        (2, [3, 4, 4, 4, 4], [False, False, True, False, True]),  # waiting begins anew
        (2, [3, 4, 2, 4, 3], [False, False, False, False, True]),
        (2, [3, math.nan, math.nan, 2], [False, False, True, False]),
    ],
)
def test_a_plateau(patience: int, losses: list[float], expected: list[bool]) -> None:
    plateau = Plateau(patience)
    assert [plateau.reached(loss) for loss in losses] == expected


# the client's memory


def test_entries_of_the_threshold_are_pruned() -> None:
    A = torch.tensor([-1.0, -0.5, -0.25, 0.0, 0.5, 0.75])
    assert pruned(A, 0.5).tolist() == [-1, 0, 0, 0, 0, 0.75]
    assert torch.equal(pruned(A, 0), A)


# the server's knowledge


def test_the_as_of_one_task_by_client() -> None:
    finished = ["10/1", "2/1", "0/0", "3/0", "0/1"]
    assert of_task(1, finished, 11) == [(0, 1, 0.0), (2, 1, 0.0), (10, 1, 0.0)]
    assert of_task(-1, finished, 11) == []


def test_what_is_selected_is_sent_in_the_order_of_choice() -> None:
    knowledge = {name: {"values": np.ones(1)} for name in ("0/0", "1/0", "2/0")}
    found = selection(knowledge, [(2, 0, 0.5), (0, 0, 0.25)])
    assert found["items"][0] is knowledge["2/0"]
    assert found["items"][1] is knowledge["0/0"]
    assert found["scores"] == [0.5, 0.25]
    assert selection(knowledge, []) == {"items": [], "scores": []}


def test_rows_of_transfer() -> None:
    labels = [[(0, 1, 2), (3, 4)], [(0, 3), (4,)], [(3, 4), (0,)]]
    finished = ["0/0", "1/0", "2/0"]
    # Client 0's task 1 has 0, 1 and 2 classes in common with them; the best two come to 3.
    chosen = [(1, 0, 0.7), (0, 0, 0.1)]
    rows = transfers(0, 1, chosen, [0.3, 0.2, 0.9], finished, labels)
    common = {"client": 0, "task": 1, "from_task": 0, "of_best_choice": 1 / 3}
    assert rows == [
        {**common, "from_client": 1, "score": 0.7, "attention": 0.3, "shared_classes": 1},
        {**common, "from_client": 0, "score": 0.1, "attention": 0.2, "shared_classes": 0},
    ]
    # Where no task before has a class in common, no choice is better than another.
    (row,) = transfers(0, 1, [(0, 0, 0.1)], [0.5], ["0/0"], labels)
    assert row["of_best_choice"] == 1
    assert transfers(0, 0, [], [0.5], [], labels) == []


def test_the_most_similar_come_first() -> None:
    """Of equals the first by client and task."""
    east, north = np.eye(2, dtype=np.float32)[:, None]
    centres = {"0/0": north, "10/0": east, "1/0": east, "0/1": east + north, "0/2": east}
    centres |= {"2/1": east, "0/11": east, "9/9": east}
    found = most_similar(east, [name for name in centres if name != "9/9"], centres, "mean")
    of_equals = [(0, 2), (0, 11), (1, 0), (2, 1), (10, 0)]
    assert [choice[:2] for choice in found] == [*of_equals, (0, 1), (0, 0)]
    assert [choice[2] for choice in found] == pytest.approx([1] * 5 + [math.sqrt(1 / 2), 0])


def test_few_different_documents_are_their_own_centres() -> None:
    vectors = np.repeat(np.arange(6, dtype=np.float32).reshape(3, 2), 100, axis=0)
    np.testing.assert_array_equal(clusters(vectors, 0), [[0, 1], [2, 3], [4, 5]])


# a task's network


def a_task(
    kind: type[Rest], layout: Layout = LAYOUT, documents: int = 230
) -> tuple[Rest, Reader, Tensor, Examples]:
    """A network of three classes with random weights, θ, and documents of up to six words."""
    torch.manual_seed(1)
    vectors = torch.randn(9, 3)
    vectors[0] = 0
    rest = kind(layout, 2, 3, 0.5, 4)
    with torch.no_grad():
        for parameter in rest.parameters():
            parameter.copy_(torch.randn_like(parameter))
    rest.foreign.copy_(torch.randn_like(rest.foreign))
    x = torch.randint(1, 9, (documents, 6), dtype=torch.int32)
    x[torch.arange(6) >= torch.randint(1, 7, (documents, 1))] = 0
    y = torch.tensor([2, 5, 7])[torch.randint(0, 3, (documents,))]
    return rest, Reader(vectors, torch.arange(9) > 1), torch.randn(layout.size), Examples(x, y)


kinds = pytest.mark.parametrize("kind", [Rest, ProjectedRest, DenseRest])


@pytest.mark.parametrize(
    ("kind", "frozen"),
    [(Rest, False), (DenseRest, False), (ProjectedRest, False), (ProjectedRest, True)],
)
def test_scores_of_a_task(kind: type[Rest], frozen: bool) -> None:
    rest, reader, theta, test = a_task(kind)
    labels = torch.tensor([2, 5, 7])
    found = evaluate(rest.train(), reader, theta, test, (2, 5, 7), frozen)
    with torch.no_grad():
        digested = rest.digest(reader, test.x) * (0 if frozen else 1)
        logits = rest(reader(test.x), theta, digested)
        of_network = TaskNetwork(rest, reader, theta, (2, 5, 7), 9, frozen)(test.x)
    torch.testing.assert_close(of_network[:, labels], logits)
    assert (of_network == -math.inf).sum(dim=0).tolist() == [230, 230, 0, 230, 230, 0, 230, 0, 230]
    y = torch.searchsorted(labels, test.y)
    right = (logits.argmax(dim=1) == y).double().mean()
    assert found["accuracy"] == pytest.approx(float(right))
    assert found["loss"] == pytest.approx(float(cross_entropy(logits, y)), rel=1e-4)


# the released code


@kinds
def test_what_the_released_code_trains(kind: type[Rest]) -> None:
    rest, reader, _, test = a_task(kind)
    names = {id(p): name for name, p in rest.named_parameters()}
    assert [id(p) for p in trained(rest, frozen=False)] == list(names)
    left = set(names.values()) - {names[id(p)] for p in trained(rest, frozen=True)}
    heads = {"head.weight", "head.bias"}
    further = set() if kind is Rest else {"projections.1.weight", "projections.1.bias"}
    assert left == heads | further
    whole, frozen = (digest(rest, reader, test.x, f) for f in (False, True))
    assert whole.shape == frozen.shape
    assert not frozen.any()
    assert whole.any() == (kind is ProjectedRest)
