"""Faithfulness of relevances, tested on inputs that lack some parts or are slightly changed.

An input consists of parts: an image (C, H, W) of its H·W pixels, all channels of one together; a
document, integer tokens (L,) with 0 after its end, of its words; any other input of its entries,
or of features that take several: `part_of` (W,) then has the part of each entry. Relevances are
(n, P), by part and signed. Parts of equal relevance have no order: scores are the mean over four,
two random ones and their reverses, so that the area of an additive value is exact. Scores are of
each input, in float64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from fedsim.errors import ExperimentError
from fedsim.explain.scores.relevance import Scores, places, rank_correlation

_TOGETHER = 500  # inputs per evaluation, approximately
_PAIRS = 2  # random orders of equal parts, each with its reverse

# n inputs (n, ...) to the value (n,) of each decision, for example the probability of its class.
# It is always called with all n inputs in order, or with k copies of them: (k·n, ...) to (k·n,).
# Decisions are those for the unchanged inputs.
Predict = Callable[[Tensor], Tensor]
PartOf = NDArray[np.int64] | None
Streams = Generator | Sequence[Generator]  # for all inputs, or of each one


def by_part(attribution: Tensor) -> Scores:
    """(n, P) an attribution in the shape of the inputs, or of heatmaps (n, H, W), by part.

    >>> by_part(torch.tensor([[[[1., 2.]], [[10., 20.]]]])).tolist()  # two channels of two pixels
    [[11.0, 22.0]]
    """
    found = attribution.detach().cpu().double()
    if found.dim() == 4:
        found = found.sum(dim=1)
    return found.flatten(1).numpy()


def arranged(x: Tensor, part_of: PartOf = None) -> tuple[int, ...]:
    """The shape of the inputs' parts: (n, H, W) for images, (n, F) for features, or that of x."""
    if part_of is not None:
        return len(x), int(part_of.max()) + 1
    return tuple(x[:, 0].shape if x.dim() == 4 else x.shape)


def present(x: Tensor, part_of: PartOf = None) -> NDArray[np.bool_]:
    """(n, P) which parts inputs have: all except padding after a document's end."""
    if x.is_floating_point():
        return np.ones(arranged(x, part_of), dtype=bool).reshape(len(x), -1)
    return (x != 0).cpu().numpy()


def by_group(of_parts: NDArray[Any], group_of: NDArray[np.int64]) -> Scores:
    """(n, G) the sums over groups of numbers (n, P), of which group_of (P,) has the group."""
    found = np.zeros((int(group_of.max()) + 1, len(of_parts)))
    np.add.at(found, group_of, of_parts.T)
    return found.T


def _filled(x: Tensor, part_of: PartOf) -> NDArray[np.bool_]:
    """(n, P) which parts are not zero, so that an input without them is another one."""
    rows = (x != 0).cpu().numpy()
    rows = (rows.any(axis=1) if x.dim() == 4 else rows).reshape(len(x), -1)
    if part_of is None:
        return rows
    return by_group(rows, part_of) > 0


def without(
    x: Tensor,
    removed: NDArray[np.bool_],
    part_of: PartOf = None,
    instead: Tensor | None = None,
) -> Tensor:
    """Inputs that lack some of their parts.

    Pixels and entries are set to zero: the mean if the data are normalised, else black, or the
    least value of a scaled feature; or to those of another input. Words are left out: those after
    them move up.

    >>> without(torch.tensor([[7, 8, 9, 0]]), np.array([[False, True, False, False]])).tolist()
    [[7, 9, 0, 0]]

    Args:
        x: (n, ...) as the network takes them.
        removed: (n, P) which parts they are to lack.
        part_of: (W,) the part of each entry, if parts take several.
        instead: an input (1, ...), or one of each (n, ...), whose parts take their place; by
            default zeros.
    """
    removed = removed if part_of is None else removed[:, part_of]
    gone = torch.from_numpy(removed).to(x.device)
    if x.is_floating_point():
        one_channel = (len(x), 1, *x.shape[2:])
        gone = gone.view(one_channel if x.dim() == 4 else x.shape)
        return x.masked_fill(gone, 0) if instead is None else torch.where(gone, instead, x)
    left = x.masked_fill(gone, 0)
    words_first = (left == 0).byte().argsort(dim=1, stable=True)
    return left.gather(1, words_first)


def deletion_curve(
    predict: Predict,
    x: Tensor,
    relevance: NDArray[Any],
    steps: int = 20,
    part_of: PartOf = None,
    rng: Streams | None = None,
) -> Scores:
    """(n, steps + 1) the value without the s/steps most relevant parts, s = 0 … steps.

    The number of parts is rounded up; of a document, it is a share of its own words. The curve
    begins with the value of the whole input and ends with that of the empty one, in the unit of
    the value. The earlier it falls, the better: a small `area`.

    >>> def total(x): return x.sum(dim=1)
    >>> x = torch.tensor([[1., 4., 2.]])
    >>> curve = deletion_curve(total, x, by_part(x), steps=3)
    >>> curve.tolist()
    [[7.0, 3.0, 1.0, 0.0]]
    >>> area(curve).tolist()
    [2.5]

    Args:
        predict: the value.
        x: (n, ...) as the network takes them.
        relevance: (n, P).
        steps: number of shares above 0.
        part_of: (W,) the part of each entry, if parts take several.
        rng: draws the orders of equal parts, for all inputs or of each; by default seed 0.

    Source: Petsiuk et al. (BMVC 2018, RISE).
    """
    return _values(predict, x, relevance, _steps(steps), False, part_of, rng)


def insertion_curve(
    predict: Predict,
    x: Tensor,
    relevance: NDArray[Any],
    steps: int = 20,
    part_of: PartOf = None,
    rng: Streams | None = None,
) -> Scores:
    """(n, steps + 1) the value with nothing but the s/steps most relevant parts, s = 0 … steps.

    As `deletion_curve`, from the empty input to the whole one. The earlier it rises, the better: a
    large `area`.

    Source: Petsiuk et al. (BMVC 2018, RISE), who begin with a blurred image; here it is an empty
    one.
    """
    return _values(predict, x, relevance, _steps(steps), True, part_of, rng)


def area(curve: Scores) -> Scores:
    """(n,) the area under curves (n, steps + 1) over [0, 1], by the trapezoidal rule.

    In the unit of the curve: of probabilities, it is in [0, 1].
    """
    return ((curve[:, :-1] + curve[:, 1:]) / 2).mean(axis=1)


def comprehensiveness(
    predict: Predict,
    x: Tensor,
    relevance: NDArray[Any],
    shares: Sequence[float] = (0.01, 0.05, 0.1, 0.2, 0.5),
    part_of: PartOf = None,
    rng: Streams | None = None,
) -> Scores:
    """(n,) what is lost without the most relevant parts: the mean over shares q of f(x) − f(x∖q).

    In the unit of the value: of probabilities, in [−1, 1]. More is better.

    Args:
        predict: f.
        x: (n, ...) as the network takes them.
        relevance: (n, P).
        shares: how many of the parts, each above 0; their number is rounded up, so it is one at
            least.
        part_of, rng: as of `deletion_curve`.

    Source: DeYoung et al. (ACL 2020, ERASER). As in their released code, the mean is over the
    shares; the sum in the paper has a share of 0 as well.
    """
    rest = _values(predict, x, relevance, shares, False, part_of, rng)
    return _value(predict, x) - rest.mean(axis=1)


def sufficiency(
    predict: Predict,
    x: Tensor,
    relevance: NDArray[Any],
    shares: Sequence[float] = (0.01, 0.05, 0.1, 0.2, 0.5),
    part_of: PartOf = None,
    rng: Streams | None = None,
) -> Scores:
    """(n,) what is lost with nothing but the most relevant parts: the mean of f(x) − f(q alone).

    As `comprehensiveness`; here less is better, and 0 or less says that these parts suffice.

    Source: DeYoung et al. (ACL 2020, ERASER).
    """
    alone = _values(predict, x, relevance, shares, True, part_of, rng)
    return _value(predict, x) - alone.mean(axis=1)


def selectivity(
    predict: Predict,
    x: Tensor,
    relevance: NDArray[Any],
    side: int = 1,
    part_of: PartOf = None,
    rng: Streams | None = None,
) -> Scores:
    """(n,) the area under the curve of the value as squares of pixels go, the most relevant first.

    As the area of `deletion_curve`, one region after another down to the empty input: regions are
    squares of an image, by the sum of their relevances, or else the parts themselves. In the unit
    of the value; less is better.

    Args:
        predict, x, relevance: as of `deletion_curve`.
        side: of a square, in pixels; those at the lower and right edge may be smaller.
        part_of, rng: likewise.

    Source: Montavon et al. (Digital Signal Processing 2018).
    """
    shape = arranged(x, part_of)[1:]
    region_of = np.arange(math.prod(shape))
    if x.dim() == 4:
        across = -(-shape[1] // side)
        rows, columns = np.divmod(region_of, shape[1])
        region_of = rows // side * across + columns // side

    def changed(most: NDArray[np.bool_]) -> Tensor:
        return without(x, most[:, region_of], part_of)

    there = present(x, part_of)
    summed = by_group(np.where(there, relevance, 0), region_of)
    known = by_group(there, region_of) > 0
    felt = by_group(there & _filled(x, part_of), region_of) > 0
    shares = _steps(summed.shape[1])
    return area(of_most(predict, x, summed, known, felt, shares, changed, rng))


def monotonicity(
    predict: Predict, x: Tensor, relevance: NDArray[Any], part_of: PartOf = None
) -> Scores:
    """(n,) whether parts without which the value changes more are more relevant.

    Spearman's ρ of |R| and (f(x) − f(x∖p))² over the parts p, which are removed one at a time: as
    many evaluations as there are parts. In [−1, 1]; 0 is chance, which a map of one value scores;
    more is better. NaN where all parts change the value alike. `occlusion` of single parts is such
    changes itself, so it does well whatever they are worth.

    Args:
        predict, x, relevance, part_of: as of `deletion_curve`.

    Source: Nguyen and Martínez (2020), monotonicity, with removed parts in place of random ones.
    """
    there, size = present(x, part_of), np.abs(relevance)
    alone = np.eye(there.shape[1], dtype=np.bool_)
    inputs = (without(x, np.repeat(row[None], len(x), 0), part_of) for row in alone)
    change = (_value(predict, x) - _of_each(predict, inputs, len(x))).T ** 2
    found = np.full(len(x), np.nan)
    for k, row in enumerate(there):
        a, b = size[k : k + 1, row], change[k : k + 1, row]
        if a.size > 1 and np.ptp(b):
            found[k] = rank_correlation(a, b)[0] if np.ptp(a) else 0
    return found


def infidelity(
    value: Predict,
    x: Tensor,
    attribution: Tensor,
    sigma: float | NDArray[Any],
    samples: int,
    rng: Streams,
) -> Scores:
    """(n,) how far an attribution is from foretelling what noise does to the value.

    The mean over I ~ N(0, σ²) of (β·⟨I, Φ⟩ − (f(x) − f(x − I)))², with the β that makes it least,
    so that the scale of Φ does not matter. At least 0, in the square of the value's unit; less is
    better. A map of zeros scores the mean of (f(x) − f(x − I))². Φ is taken as slopes: of a linear
    f, its gradient scores 0, and its gradient times input does not. So compare explainers of
    slopes (`gradient`, `smoothgrad`), and not those with others that tell contributions.

    >>> x = torch.tensor([[1., 4., 2.]])
    >>> def total(x): return x.sum(dim=1)
    >>> slopes, rng = torch.full((1, 3), 7.0), np.random.default_rng(0)
    >>> infidelity(total, x, slopes, 0.5, 9, rng).round(9).tolist()
    [0.0]

    Args:
        value: f.
        x: (n, ...) as the network takes them, no documents.
        attribution: Φ, in the shape of x.
        sigma: σ, in the unit of x; or of each input its own, (n, 1, ...).
        samples: how many I there are of each input.
        rng: draws each I for all inputs at once; or a stream of each input.

    Raises:
        ExperimentError: documents cannot be changed a little.

    Source: Yeh et al. (NeurIPS 2019), Eq. 1, and β of Eq. 3 from the same samples, as Captum's
    `normalize=True`.
    """
    _refuse_documents("infidelity", x)
    slopes = attribution.detach().cpu().double().flatten(1)
    whole, told, changes = _value(value, x), [], []
    for _ in range(samples):
        drawn = _drawn(lambda own, shape: own.standard_normal(shape), rng, x)
        noise = torch.from_numpy(sigma * drawn).to(x)
        told.append((noise.cpu().double().flatten(1) * slopes).sum(dim=1).numpy())
        changes.append(whole - _value(value, x - noise))
    foretold, change = np.array(told), np.array(changes)
    size = (foretold**2).sum(axis=0)
    beta = (foretold * change).sum(axis=0) / np.where(size > 0, size, 1)
    return ((beta * foretold - change) ** 2).mean(axis=0)


def sensitivity(
    attribute: Callable[[Tensor], Tensor],
    x: Tensor,
    radius: float | NDArray[Any],
    samples: int,
    rng: Streams,
) -> Scores:
    """(n,) how much an attribution changes with a small change of the input, at worst.

    The maximum over δ, uniform in [−radius, radius] for each entry, of ‖Φ(x + δ) − Φ(x)‖ / ‖Φ(x)‖.
    At least 0, as a share of ‖Φ(x)‖; less is better. Where Φ(x) is zero, it is ‖Φ(x + δ)‖.

    >>> x = torch.tensor([[1., 4., 2.]])
    >>> sensitivity(torch.ones_like, x, 0.1, 9, np.random.default_rng(0)).tolist()
    [0.0]

    Args:
        attribute: Φ, n inputs to attributions (n, ...), for what was decided upon them unchanged.
        x: (n, ...) as the network takes them, no documents.
        radius: in the unit of x; or of each input its own, (n, 1, ...).
        samples: how many δ there are of each input.
        rng: draws each δ for all inputs at once; or a stream of each input.

    Raises:
        ExperimentError: documents cannot be changed a little.

    Source: Yeh et al. (NeurIPS 2019), max-sensitivity, divided by ‖Φ(x)‖ as Captum does.
    """
    _refuse_documents("sensitivity", x)
    unchanged = attribute(x).detach().cpu().double().flatten(1)
    norm = torch.linalg.vector_norm(unchanged, dim=1)
    changes = []
    for _ in range(samples):
        drawn = _drawn(lambda own, shape: own.uniform(-1, 1, shape), rng, x)
        delta = torch.from_numpy(radius * drawn).to(x)
        changed = attribute(x + delta).detach().cpu().double().flatten(1)
        changes.append(torch.linalg.vector_norm(changed - unchanged, dim=1).numpy())
    return np.max(changes, axis=0) / torch.where(norm > 0, norm, 1).numpy()


def _drawn(draw: Callable[[Generator, Sequence[int]], Scores], rng: Streams, x: Tensor) -> Scores:
    """Random numbers in the shape of x."""
    if isinstance(rng, Generator):
        return draw(rng, x.shape)
    return np.stack([draw(own, x.shape[1:]) for own in rng])


def _values(
    predict: Predict,
    x: Tensor,
    relevance: NDArray[Any],
    shares: Sequence[float],
    kept: bool,
    part_of: PartOf,
    rng: Streams | None,
) -> Scores:
    """(n, S) values of inputs with nothing but their most relevant parts, or without these."""

    def changed(most: NDArray[np.bool_]) -> Tensor:
        return without(x, ~most if kept else most, part_of)

    there = present(x, part_of)
    return of_most(predict, x, relevance, there, there & _filled(x, part_of), shares, changed, rng)


def of_most(
    predict: Predict,
    x: Tensor,
    relevance: NDArray[Any],
    there: NDArray[np.bool_],
    felt: NDArray[np.bool_],
    shares: Sequence[float],
    changed: Callable[[NDArray[np.bool_]], Tensor],
    rng: Streams | None,
) -> Scores:
    """(n, S) values of inputs that are changed in shares of their most relevant parts.

    Args:
        there: (n, P) which parts the inputs have.
        felt: (n, P) which of them make a difference when they are changed.
        changed: the parts (n, P) to be changed to such inputs.
    """
    orders, tied = _orders(np.where(there, relevance, -np.inf), felt, rng)
    parts = there.sum(axis=1, keepdims=True)
    numbers = [np.ceil(np.round(share * parts, 6)) for share in shares]  # 0.07·100 is above 7
    inputs = (changed(place < number) for place in orders for number in numbers)
    values = _of_each(predict, inputs, len(x)).reshape(len(orders), len(numbers), len(x))
    found = values.transpose(0, 2, 1)
    return np.where(tied[:, None], found.mean(axis=0), found[0])


def _steps(count: int) -> list[float]:
    return [s / count for s in range(count + 1)]


def _orders(
    relevance: Scores, felt: NDArray[np.bool_], rng: Streams | None
) -> tuple[list[NDArray[np.int64]], NDArray[np.bool_]]:
    """Ranks (n, P) of parts in several orders of equal ones, and for which inputs they matter."""
    from scipy.stats import rankdata  # SciPy is slow to import

    lowest, highest = (rankdata(relevance, axis=1, method=end) for end in ("min", "max"))
    tied = ((lowest < highest) & felt).any(axis=1)
    if not tied.any():
        return [places(relevance)], tied
    rng, orders = np.random.default_rng(0) if rng is None else rng, []
    for _ in range(_PAIRS):
        if isinstance(rng, Generator):
            drawn = rng.random(relevance.shape)
        else:
            drawn = np.stack([own.random(relevance.shape[1]) for own in rng])
        for key in (drawn, -drawn):
            by = np.lexsort((key, -relevance))
            place = np.empty(by.shape, np.int64)
            np.put_along_axis(place, by, np.arange(by.shape[1])[None], axis=1)
            orders.append(place)
    return orders, tied


def _of_each(predict: Predict, inputs: Iterator[Tensor], n: int) -> Scores:
    """(S, n) the values of S changes of all inputs, several in one call, which is faster."""
    together, found = max(1, _TOGETHER // n), []
    while some := list(itertools.islice(inputs, together)):
        found.append(_value(predict, torch.cat(some)))
    return np.concatenate(found).reshape(-1, n)


@torch.no_grad()
def _value(predict: Predict, x: Tensor) -> Scores:
    return predict(x).cpu().double().numpy()


def _refuse_documents(score: str, x: Tensor) -> None:
    if not x.is_floating_point():
        raise ExperimentError(
            f"{score}: needs floating-point inputs, for example images, which can be perturbed; "
            f"these are {str(x.dtype).removeprefix('torch.')}; for documents: comprehensiveness"
        )
