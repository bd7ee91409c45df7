"""The Gaussian mechanism: calibration of the noise, and its guarantees.

Adding N(0, σ²) to every entry of f(x) is (ε, δ)-differentially private if f(x) and f(x′) are at
most Δ, the sensitivity, apart in Euclidean distance for all neighbours x, x′. There are two
calibrations: the classical one, proven only for ε < 1, and the analytic one, exact for every ε.
dp_accounting, an extra, has the latter too; its σ differs in the last bits, and so would results.

Everything depends only on μ = Δ/σ: σ and Δ are in the units of the data, ε and δ are numbers. A
value out of range is an ExperimentError.

Sources: Dwork and Roth, The Algorithmic Foundations of Differential Privacy (2014), Theorem A.1;
Balle and Wang, Improving the Gaussian Mechanism for Differential Privacy (ICML 2018), Theorem 8.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.errors import ExperimentError


def classical_epsilon(sigma: float, delta: float, sensitivity: float = 1.0) -> float:
    """The ε of the classical calibration: Δ·√(2·ln(1.25/δ)) / σ. A guarantee only below 1.

    Papers quote values of 1 or more, which the theorem does not support: from some value on (8.42
    for δ = 1e-5) the true ε, which `analytic_epsilon` returns, is greater.
    """
    _positive(sigma=sigma, sensitivity=sensitivity)
    _probability(delta)
    return sensitivity * math.sqrt(2 * math.log(1.25 / delta)) / sigma


def delta(epsilon: float, sigma: float, sensitivity: float = 1.0) -> float:
    """The smallest δ for which noise of this σ is (ε, δ)-private.

    δ(ε) = Φ(Δ/(2σ) − εσ/Δ) − e^ε·Φ(−Δ/(2σ) − εσ/Δ), Theorem 8 of Balle and Wang (2018).
    """
    _positive(epsilon=epsilon)
    mu = _mu(sigma, sensitivity)
    return _delta(epsilon * sigma / sensitivity - mu / 2, mu)


def analytic_sigma(epsilon: float, delta: float, sensitivity: float = 1.0) -> float:
    """The smallest σ for which Gaussian noise is (ε, δ)-private: δ(ε) = δ, solved for σ.

    Its relative error is below 1e-9 for ε from 1e-4 on and δ from 1e-12 to 0.5.
    """
    _positive(epsilon=epsilon, sensitivity=sensitivity)
    _probability(delta)

    def excess(mu: float) -> float:
        return _delta(epsilon / mu - mu / 2, mu) / delta - 1

    # The solution of ε/μ − μ/2 = s, √(s² + 2ε) − s, is a lower bound: its δ is too small.
    s = _enough(delta)
    root = math.sqrt(s * s + 2 * epsilon)
    low = 2 * epsilon / (root + s) if s > 0 else root - s
    high = 2 * low
    while excess(high) < 0:
        high *= 2
    return sensitivity / _root(excess, low, high)


def analytic_epsilon(sigma: float, delta: float, sensitivity: float = 1.0) -> float:
    """The smallest ε for which noise of this σ is (ε, δ)-private: δ(ε) = δ, solved for ε.

    It is 0 if σ is so large that the noise is (0, δ)-private.
    """
    _probability(delta)
    mu = _mu(sigma, sensitivity)
    if _delta(-mu / 2, mu) <= delta:
        return 0.0
    s = _root(lambda s: _delta(s, mu) / delta - 1, -mu / 2, _enough(delta))
    return mu * (s + mu / 2)


def clip(x: Tensor, norm: float) -> Tensor:
    """Scale each sample down to a Euclidean norm of at most `norm`: x·min(1, norm/‖x‖).

    Afterwards two samples are no further apart than before, and at most 2·`norm`.

    Args:
        x: (B, ...) floating point; a sample within the norm keeps its bits.
        norm: the largest norm, to the rounding of x's type.

    Returns:
        (B, ...) of the same type, on the same device.
    """
    _positive(norm=norm)
    rows = x.reshape(len(x), math.prod(x.shape[1:]))
    # In double precision, because squares of large half-precision entries overflow.
    size = torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float64)
    # Not norm / size.clamp(min=norm): torch divides by reciprocals, with a result near 1.
    scale = torch.where(size > norm, norm / size, 1.0)
    return (rows * scale).to(x.dtype).reshape(x.shape)


@dataclass(frozen=True)
class AtDistance:
    """The privacy of two images at a given distance.

    Args:
        distance: Euclidean, of the two images.
        analytic: ε by the analytic calibration, which is exact.
        classical: ε by the classical formula, which is valid below 1.
    """

    distance: float
    analytic: float
    classical: float


@dataclass(frozen=True)
class Guarantee:
    """The metric privacy guarantee of noise on masked images, by the distance of two images.

    Args:
        sigma: σ of the noise.
        delta: δ.
        per_unit: at distance 1.
        farthest: at the largest distance possible after clipping; None without clipping.
    """

    sigma: float
    delta: float
    per_unit: AtDistance
    farthest: AtDistance | None

    def in_words(self) -> str:
        """The guarantee as text."""
        unit, far = self.per_unit, self.farthest
        lines = [
            f"Gaussian noise of σ = {self.sigma:g}, at δ = {self.delta:g}, for two images with "
            "THE SAME mask:",
            f"  at a Euclidean distance of 1, ε = {unit.analytic:.4g} (analytic calibration); "
            f"the classical formula says {_quoted(unit.classical)}",
        ]
        if far:
            lines.append(
                f"  at {far.distance:g}, the largest distance that clipping leaves, "
                f"ε = {far.analytic:.4g}; the classical formula says {_quoted(far.classical)}"
            )
        else:
            lines.append("  images are not clipped: ε has no bound over all pairs of images")
        lines.append(
            "  The mask depends on the image, so x ↦ x ⊙ m(x) is not 1-Lipschitz: two images\n"
            "  with masks that differ can end further apart than they were. The theorem covers a\n"
            "  fixed mask only, and says nothing about what the mask itself gives away.\n"
            "  Labels are shared as they are, and so are all models that clients send."
        )
        return "\n".join(lines)


def guarantee(sigma: float, delta: float, clip_norm: float | None = None) -> Guarantee:
    """The guarantee of noise of this σ for masked images x ⊙ m, with a fixed m in [0, 1].

    Neither masking with a fixed m nor clipping increases the distance of two images, so the
    sensitivity for images at distance d is d. The analytic ε grows faster than d. Noise may be
    left out where m = 0, because both images are 0 there.

    Args:
        sigma: σ of the noise, in the units of the images' entries.
        delta: δ.
        clip_norm: the norm to which images are clipped (see `clip`), so that they are at most
            twice as far apart; None for no clipping.

    Source:
        FedXDS (ICCV 2025), supplement, whose theorem takes the mask as fixed.
    """
    if clip_norm is not None:
        _positive(clip_norm=clip_norm)
    farthest = None if clip_norm is None else _at(2 * clip_norm, sigma, delta)
    return Guarantee(sigma, delta, _at(1.0, sigma, delta), farthest)


def _at(distance: float, sigma: float, delta: float) -> AtDistance:
    return AtDistance(
        distance,
        analytic=analytic_epsilon(sigma, delta, distance),
        classical=classical_epsilon(sigma, delta, distance),
    )


def _quoted(epsilon: float) -> str:
    """A classical ε, with a note if it is not proven."""
    return f"{epsilon:.4g}" + (", which is proven for ε < 1 only" if epsilon >= 1 else "")


def _delta(s: float, mu: float) -> float:
    """δ(ε) of Theorem 8 as Φ(−s) − e^ε·Φ(−t), where s = ε/μ − μ/2, t = s + μ and μ = Δ/σ.

    As ε = (t² − s²)/2, e^ε·Φ(−t) is e^(−s²/2)·erfcx(t/√2)/2, where erfcx(x) = e^(x²)·erfc(x): no
    e^ε overflows. Φ(−s) is the same of s, so that the difference keeps its digits far out, too.
    """
    from scipy.special import erfcx, ndtr  # SciPy is slow to import

    height = math.exp(-s * s / 2) / 2
    rest = float(erfcx((s + mu) / math.sqrt(2)))
    if s > 0:
        return height * (float(erfcx(s / math.sqrt(2))) - rest)
    return float(ndtr(-s)) - height * rest


def _enough(delta: float) -> float:
    """An s for which δ(ε) < δ: it is below Φ(−s), and this is 1 beyond where Φ(−s) = δ."""
    from scipy.special import ndtri

    return 1 - float(ndtri(delta))


def _root(f: Callable[[float], float], low: float, high: float) -> float:
    """A root of f between two points with different signs, to double precision."""
    from scipy.optimize import brentq

    return float(brentq(f, low, high, xtol=1e-20, rtol=1e-15, maxiter=1000))


def _mu(sigma: float, sensitivity: float) -> float:
    """μ = Δ/σ, all that δ(ε) depends on."""
    _positive(sigma=sigma, sensitivity=sensitivity)
    mu = sensitivity / sigma
    _positive(**{"sensitivity/sigma": mu})
    return mu


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ExperimentError(f"{name}={value:g}: must be a positive number, and finite")


def _probability(delta: float) -> None:
    if not 0 < delta < 1:
        raise ExperimentError(f"delta={delta:g}: must lie between 0 and 1, both excluded")
