"""Each codec against its formula, its bytes, and its expectation where it claims one."""

from __future__ import annotations

import math
import pickle
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from experiments import run_example
from fedsim.conditions.codecs import Codec, codecs
from fedsim.conditions.codecs.codec import size_of
from fedsim.federation.wire import nbytes

SHAPES = [(20, 30), (20,), (4, 5, 3, 3), (7,)]
N = size_of(SHAPES)
VECTOR = np.random.default_rng(0).standard_normal(N).astype(np.float32)
STARTS = np.cumsum([0, *(math.prod(shape) for shape in SHAPES)])


def made(name: str, **keys: Any) -> Codec:
    codec: Codec = codecs.parse({"name": name, **keys})
    return codec


def through(
    codec: Codec, vector: np.ndarray = VECTOR, shapes: Any = SHAPES, seed: int = 1
) -> tuple[np.ndarray, int]:
    """What arrives in another process, which knows the message alone; and its bytes."""
    message = codec.encode(vector, shapes, np.random.default_rng(seed))
    found = codec.decode(pickle.loads(pickle.dumps(message)), shapes)
    assert (found.dtype, found.shape) == (np.float32, vector.shape)
    return found, nbytes(message)


def test_the_example_of_the_docstring_runs() -> None:
    run_example(Codec, Codec=Codec, np=np, size_of=size_of)


@pytest.mark.parametrize("name", [name for name, _ in codecs.items()])
def test_zeros_and_the_vector_as_it_was(name: str) -> None:
    before = VECTOR.copy()
    through(made(name))
    np.testing.assert_array_equal(VECTOR, before)
    zeros, _ = through(made(name), np.zeros(N, dtype=np.float32))
    assert not zeros.any()


class TestTopK:
    @pytest.mark.parametrize(
        ("fraction", "positions"),
        [(0.01, 4 * 8), (0.5, -(-N // 8))],  # as integers, as one bit an entry
    )
    def test_the_largest_entries(self, fraction: float, positions: int) -> None:
        k = round(fraction * N)
        found, size = through(made("topk", fraction=fraction))
        largest = sorted(range(N), key=lambda i: -abs(VECTOR[i]))[:k]
        expected = np.zeros(N)
        expected[largest] = VECTOR[largest]
        np.testing.assert_array_equal(found, expected)
        assert size == 4 * k + positions

    def test_of_equal_ones_the_first(self) -> None:
        found, _ = through(made("topk", fraction=0.5), np.float32([1, -2, 2, 2, -2, 0]), [(6,)])
        assert found.tolist() == [0, -2, 2, 2, 0, 0]

    def test_one_at_least(self) -> None:
        found, _ = through(made("topk", fraction=1e-9))
        assert np.count_nonzero(found) == 1


class TestRandomK:
    def test_with_error_feedback_entries_arrive_as_they_are(self) -> None:
        found, size = through(made("randomk", fraction=0.1))
        (where,) = found.nonzero()
        assert len(where) == round(0.1 * N)
        np.testing.assert_array_equal(found[where], VECTOR[where])
        assert size == 4 * len(where) + 8

    def test_without_it_is_unbiased(self) -> None:
        codec = made("randomk", fraction=0.25, error_feedback=False)
        vector, shapes = VECTOR[:40], [(40,)]
        draws = np.array([through(codec, vector, shapes, seed)[0] for seed in range(2000)])
        spread = np.abs(vector) * math.sqrt(4 - 1) / math.sqrt(2000)  # of the mean
        assert (np.abs(draws.mean(0) - vector) < 4.5 * spread).all()
        assert set(np.count_nonzero(draws, axis=1)) == {10}


class TestQsgd:
    @pytest.mark.parametrize(("levels", "bits"), [(1, 2), (7, 4), (8, 5), (127, 8)])
    @pytest.mark.parametrize("bucket", [64, 10_000])
    def test_the_formula(self, levels: int, bits: int, bucket: int) -> None:
        found, size = through(made("qsgd", levels=levels, bucket=bucket))
        for start in range(0, N, bucket):
            v, got = VECTOR[start : start + bucket], found[start : start + bucket]
            norm = np.sqrt((v.astype(np.float64) ** 2).sum())
            xi = np.abs(got) / norm * levels
            np.testing.assert_allclose(xi, np.rint(xi), atol=1e-5 * levels)
            assert (np.abs(np.rint(xi) - np.abs(v) / norm * levels) < 1).all()
            assert ((got == 0) | (np.sign(got) == np.sign(v))).all()
        assert size == 4 * -(-N // bucket) + -(-N * bits // 8)

    def test_it_is_unbiased(self) -> None:
        codec, vector = made("qsgd", levels=2, bucket=20), VECTOR[:40]
        draws = np.array([through(codec, vector, [(40,)], seed)[0] for seed in range(2000)])
        norms = np.repeat([np.linalg.norm(vector[:20]), np.linalg.norm(vector[20:])], 20)
        largest = norms / 2 / 2 / math.sqrt(2000)  # standard deviation of the mean: p = 1/2
        assert (np.abs(draws.mean(0) - vector) < 4.5 * largest).all()

    def test_an_entry_that_is_the_norm(self) -> None:
        vector = np.float32([0, -3, 0, 0])
        assert through(made("qsgd"), vector, [(4,)])[0].tolist() == [0, -3, 0, 0]


def test_sign() -> None:
    found, size = through(made("sign"))
    for start, end in pairwise(STARTS):
        v = VECTOR[start:end]
        np.testing.assert_allclose(found[start:end], np.abs(v).mean() * np.sign(v), rtol=1e-6)
    assert size == 4 * len(SHAPES) + -(-N // 8)


def test_float16() -> None:
    vector = np.float32([1 / 3, 1e6, -1e6, 65504])
    found, size = through(made("float16"), vector, [(4,)])
    assert found.tolist() == [np.float32(np.float16(1 / 3)), 65504, -65504, 65504]
    assert size == 8


def test_int8() -> None:
    vector = VECTOR.copy()
    vector[STARTS[1] : STARTS[2]] = 0  # a layer without any scale
    found, size = through(made("int8"), vector)
    for start, end in pairwise(STARTS):
        scale = np.abs(vector[start:end]).max() / 127
        expected = scale * np.rint(vector[start:end] / (scale or 1))
        np.testing.assert_allclose(found[start:end], expected, rtol=1e-6)
    assert size == 4 * len(SHAPES) + N


class TestLowRank:
    def test_matrices_of_that_rank_are_exact(self) -> None:
        rng = np.random.default_rng(3)
        dense = rng.standard_normal((20, 2)) @ rng.standard_normal((2, 30))
        kernel = rng.standard_normal((4, 2)) @ rng.standard_normal((2, 45))
        parts = [dense, VECTOR[:20], kernel, VECTOR[:7]]
        vector = np.concatenate([part.ravel() for part in parts]).astype(np.float32)
        found, size = through(made("lowrank", rank=2), vector)
        np.testing.assert_allclose(found, vector, atol=1e-5)
        np.testing.assert_array_equal(found[600:620], vector[600:620])  # a bias
        assert size == 4 * (2 * (20 + 30) + 20 + 2 * (4 + 45) + 7)

    def test_others_are_projected(self) -> None:
        vector, shapes = VECTOR[:600], [(20, 30)]
        found, _ = through(made("lowrank", rank=3), vector, shapes, seed=5)
        M = vector.reshape(20, 30).astype(np.float64)
        S = np.random.default_rng(5).standard_normal((30, 3))
        P = np.linalg.svd(M @ S, full_matrices=False)[0]
        np.testing.assert_allclose(found.reshape(20, 30), P @ P.T @ M, atol=1e-5)

    def test_layers_that_would_not_get_shorter_are_sent_as_they_are(self) -> None:
        found, size = through(made("lowrank", rank=4))  # the kernel is 4 × 45
        np.testing.assert_array_equal(found[STARTS[2] : STARTS[3]], VECTOR[STARTS[2] : STARTS[3]])
        assert size == 4 * (4 * (20 + 30) + 20 + 180 + 7)
