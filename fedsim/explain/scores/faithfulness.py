"""Faithfulness of relevances, tested on inputs that lack some parts or are slightly changed.

An input consists of parts: an image (C, H, W) of its H·W pixels, all channels of one together; a
document, integer tokens (L,) with 0 after its end, of its words; any other input of its entries,
or of features that take several: `part_of` (W,) then has the part of each entry. Relevances are
(n, P), by part and signed; parts of equal relevance come in the order of their index. Scores are
of each input, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from fedsim.errors import ExperimentError
from fedsim.explain.scores.relevance import Scores, places

_TOGETHER = 500  # inputs per evaluation, approximately

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
        instead: an input (1, ...), whose parts take their place; by default zeros.
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

    Source: Petsiuk et al. (BMVC 2018, RISE).
    """
    return _values(predict, x, relevance, np.arange(steps + 1) / steps, False, part_of)


def insertion_curve(
    predict: Predict,
    x: Tensor,
    relevance: NDArray[Any],
    steps: int = 20,
    part_of: PartOf = None,
) -> Scores:
    """(n, steps + 1) the value with nothing but the s/steps most relevant parts, s = 0 … steps.

    As `deletion_curve`, from the empty input to the whole one. The earlier it rises, the better: a
    large `area`.

    Source: Petsiuk et al. (BMVC 2018, RISE), who begin with a blurred image; here it is an empty
    one.
    """
    return _values(predict, x, relevance, np.arange(steps + 1) / steps, True, part_of)


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
) -> Scores:
    """(n,) what is lost without the most relevant parts: the mean over shares q of f(x) − f(x∖q).

    In the unit of the value: of probabilities, in [−1, 1]. More is better.

    Args:
        predict: f.
        x: (n, ...) as the network takes them.
        relevance: (n, P).
        shares: how many of the parts, each above 0; their number is rounded up, so it is one at
            least.

    Source: DeYoung et al. (ACL 2020, ERASER). As in their released code, the mean is over the
    shares; the sum in the paper has a share of 0 as well.
    """
    rest = _values(predict, x, relevance, shares, False, part_of)
    return _value(predict, x) - rest.mean(axis=1)


def sufficiency(
    predict: Predict,
    x: Tensor,
    relevance: NDArray[Any],
    shares: Sequence[float] = (0.01, 0.05, 0.1, 0.2, 0.5),
    part_of: PartOf = None,
) -> Scores:
    """(n,) what is lost with nothing but the most relevant parts: the mean of f(x) − f(q alone).

    As `comprehensiveness`; here less is better, and 0 or less says that these parts suffice.

    Source: DeYoung et al. (ACL 2020, ERASER).
    """
    alone = _values(predict, x, relevance, shares, True, part_of)
    return _value(predict, x) - alone.mean(axis=1)


def infidelity(
    value: Predict,
    x: Tensor,
    attribution: Tensor,
    sigma: float | NDArray[Any],
    samples: int,
    rng: Streams,
) -> Scores:
    """(n,) how far an attribution is from foretelling what noise does to the value.

    The mean over I ~ N(0, σ²) of (⟨I, Φ⟩ − (f(x) − f(x − I)))². At least 0, in the square of the
    value's unit; less is better. Φ is taken as slopes: of a linear f, its gradient scores 0, and
    its gradient times input does not.

    >>> x = torch.tensor([[1., 4., 2.]])
    >>> def total(x): return x.sum(dim=1)
    >>> infidelity(total, x, torch.ones(1, 3), 0.5, 9, np.random.default_rng(0)).round(9).tolist()
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

    Source: Yeh et al. (NeurIPS 2019), Eq. 1.
    """
    _refuse_documents("infidelity", x)
    slopes = attribution.detach().cpu().double().flatten(1)
    whole, errors = _value(value, x), []
    for _ in range(samples):
        drawn = _drawn(lambda own, shape: own.standard_normal(shape), rng, x)
        noise = torch.from_numpy(sigma * drawn).to(x)
        foretold = (noise.cpu().double().flatten(1) * slopes).sum(dim=1).numpy()
        errors.append((foretold - (whole - _value(value, x - noise))) ** 2)
    return np.mean(errors, axis=0)


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
    shares: Iterable[float],
    kept: bool,
    part_of: PartOf,
) -> Scores:
    """(n, S) values of inputs with nothing but their most relevant parts, or without these."""
    there = present(x, part_of)
    place = places(np.where(there, relevance, -np.inf))
    parts = there.sum(axis=1, keepdims=True)
    changed = []
    for share in shares:
        most = place < np.ceil(np.round(share * parts, 6))  # 0.07 · 100 is slightly more than 7
        changed.append(without(x, ~most if kept else most, part_of))
    together = max(1, _TOGETHER // len(x))  # one call per share would take twice as long
    parted = (changed[k : k + together] for k in range(0, len(changed), together))
    found = [_value(predict, torch.cat(part)) for part in parted]
    return np.concatenate(found).reshape(len(changed), len(x)).T


@torch.no_grad()
def _value(predict: Predict, x: Tensor) -> Scores:
    return predict(x).cpu().double().numpy()


def _refuse_documents(score: str, x: Tensor) -> None:
    if not x.is_floating_point():
        raise ExperimentError(
            f"{score}: needs floating-point inputs, for example images, which can be perturbed; "
            f"these are {str(x.dtype).removeprefix('torch.')}; for documents: comprehensiveness"
        )
