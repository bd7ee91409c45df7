"""Explanations that clients send: what they send, what the server makes of it, what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import norm

from experiments import Say, ran
from fedsim.conditions.explaining import epsilon
from fedsim.errors import FedsimWarning
from fedsim.explain.share import Share, obscured
from fedsim.launch.progress import RoundLine
from fedsim.results.summary import budgets

TABLE: dict[str, Any] = {
    "data": {"name": "synthetic", "shape": [4], "classes": 3, "samples": 80, "test_samples": 20},
    "partition": {"kind": "iid", "clients": 5},
    "model": {"name": "mlp", "hidden": [4]},
    "train": {"rounds": 2, "batch_size": 8, "optimizer": {"lr": 0.1}},
}
EXPLAIN: dict[str, Any] = {
    **{"explainers": ["gradient"], "inputs": 6, "every": 1, "maps": True},
    **{"target": "label", "scores": ["deletion", "insertion", "global_agreement", "drift"]},
}
MAPS = arrays(np.float64, (3, 5), elements=st.floats(-9, 9, width=32))
EVERYWHERE = np.ones((3, 5), bool)


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


class TestObscured:
    @given(MAPS, st.floats(0.1, 10))
    def test_maps_have_unit_length_or_are_zero(self, maps: np.ndarray, factor: float) -> None:
        sent = obscured(maps, EVERYWHERE, 0, rng())
        zero = ~maps.any(axis=1)
        assert np.allclose(np.linalg.norm(sent, axis=1), np.where(zero, 0, 1))
        assert np.allclose(sent, obscured(factor * maps, EVERYWHERE, 0, rng()), atol=1e-6)

    @pytest.mark.parametrize("noise", [0.5, 3.0])
    def test_noise_is_so_many_times_as_long_as_the_map(self, noise: float) -> None:
        """Padding of a document gets none, and takes none off its words."""
        maps, present = np.ones((400, 200)), np.zeros((400, 200), bool)
        present[:, :50] = True
        sent = Share(noise=noise).sent(maps, present, False, rng())
        assert not sent[:, 50:].any()
        added = sent[:, :50] - 1 / np.sqrt(50)
        assert np.linalg.norm(added, axis=1).mean() == pytest.approx(noise, rel=0.02)
        assert added.std() == pytest.approx(noise / np.sqrt(50), rel=0.02)
        assert not Share(noise=noise).sent(maps, ~present & present, False, rng()).any()


class TestEpsilon:
    @pytest.mark.parametrize(("noise", "parts"), [(20, 64), (500, 12_544), (0.5, 9)])
    def test_closed_form(self, noise: float, parts: int) -> None:
        """δ(ε) of Balle and Wang (2018), Theorem 8, for μ² = Σ (2√n/noise)²."""
        for delta in (1e-5, 1e-3):
            found, mu = epsilon(Share(noise=noise, delta=delta), parts), 2 * parts**0.5 / noise
            less = np.exp(found + norm.logcdf(-mu / 2 - found / mu))
            assert norm.cdf(mu / 2 - found / mu) - less == pytest.approx(delta, rel=1e-5)

    def test_no_map_and_no_noise(self) -> None:
        assert epsilon(Share(noise=1), 0) == epsilon(Share(noise=0), 0) == 0
        assert epsilon(Share(noise=0), 4) == np.inf

    def test_maps_without_numbers_are_noise(self) -> None:
        maps = np.array([[1.0, np.inf, 0], [3, 4, 0]])
        sent = Share(noise=1e-9).sent(maps, np.ones((2, 3), bool), False, rng())
        assert np.allclose(sent, [[0, 0, 0], [0.6, 0.8, 0]], atol=1e-6)
        plain = Share(noise=0).sent(maps, np.ones((2, 3), bool), False, rng())
        assert not np.isfinite(plain[0]).all()


def test_aggregation() -> None:
    """Whatever the order of clients; those whose quality is below zero do not count by it."""
    maps = {k: np.random.default_rng(k).normal(size=(3, 4)) for k in (5, 2, 9)}
    quality = {5: 0.2, 2: -0.1, 9: 0.6}
    for aggregation, expected in {
        "mean": (maps[2] + maps[5] + maps[9]) / 3,
        "quality": (0.2 * maps[5] + 0.6 * maps[9]) / 0.8,
        "median": np.sort([*maps.values()], axis=0)[1],
    }.items():
        share: Any = Share(aggregation=aggregation)
        found = share.aggregate(maps, quality)
        np.testing.assert_allclose(found, expected)
        np.testing.assert_array_equal(
            found, share.aggregate(dict(reversed(maps.items())), quality)
        )
    assert Share().aggregate({}, {}) is None
    assert Share(aggregation="quality").aggregate(maps, dict.fromkeys(maps, 0.0)) is None


@given(st.floats(0, 1), st.integers(1, 50), st.integers(0, 5))
def test_poisoners(share: float, count: int, seed: int) -> None:
    chosen = Share(poisoned=share).poisoners(count, seed)
    assert len(chosen) == round(share * count)
    assert chosen <= set(range(count))
    assert chosen == Share(poisoned=share).poisoners(count, seed)


def test_a_poisoner_turns_its_maps_round_and_claims_to_be_the_best() -> None:
    share, maps = Share(aggregation="quality"), np.ones((2, 3))
    everywhere = np.ones(maps.shape, bool)
    assert (share.sent(maps, everywhere, True, rng()) == -10).all()
    scores = {"insertion": np.array([0.5, np.nan]), "deletion": np.array([0.1, 0.3])}
    assert share.quality(scores, False) == pytest.approx(0.5 - 0.2)
    assert share.quality(scores, True) == 1


class TestRuns:
    def test_the_mean_of_what_clients_explain_is_scored_as_of_the_global_model(self) -> None:
        done = ran(**TABLE, explain={**EXPLAIN, "share": {}})
        last_maps = done.maps.query("round == 2")
        maps = last_maps.set_index(["model", "input"])["relevance"]
        for input, ours in maps["cohort"].groupby("input"):
            assert len(ours) == 5
            assert np.allclose(maps["shared", input], np.mean([*ours], axis=0), atol=1e-6)
        row = done.explanations.query("model == 'shared' and round == 2").iloc[0]
        last = done.rounds.iloc[-1]
        for score in ("deletion", "insertion", "global_agreement_rank"):
            assert last[f"gradient/shared_{score}"] == row[score]
        labels = {metric.column for metric in done.explained}
        assert {f"gradient/shared_{s}" for s in ("deletion", "drift_rank")} <= labels
        assert not any("shared_agreement" in column for column in (*labels, *done.rounds))

    def test_maps_are_uplink_and_training_stays_as_it_is(self) -> None:
        kept = ran(**TABLE, explain=EXPLAIN)
        sent = ran(**TABLE, explain={**EXPLAIN, "share": {}})
        more = sent.clients["bytes_up"] - kept.clients["bytes_up"]
        assert (more == 6 * 4 * 4).all()
        assert sent.rounds["accuracy"].equals(kept.rounds["accuracy"])
        assert sent.result_hash != kept.result_hash

    def test_maps_are_lost_with_the_update(self) -> None:
        """The server's mean is of those that arrive, and a loss costs as much as an arrival."""
        explain = {**EXPLAIN, "share": {}}
        devices = {"packet_error": 0.4, "power": {"radio": 2.0}}
        done = ran(**TABLE, explain=explain, devices=devices)
        counts = set()
        for t, clients in done.clients.groupby("round"):
            lost = clients["lost"].fillna(0).to_numpy() == 1
            counts.add(int(lost.sum()))
            maps = done.maps[done.maps["round"] == t]
            shared = maps[maps["model"] == "shared"].set_index("input")["relevance"]
            for input, own in maps[maps["model"] == "cohort"].groupby("input"):
                arrived = np.stack(list(own.sort_values("client")["relevance"]))[~lost]
                if len(arrived):
                    assert np.allclose(shared[input], arrived.mean(axis=0), atol=1e-6)
            assert len(shared) == (0 if lost.all() else 6)
            assert clients["bytes_up"].nunique() == 1
        assert counts & {1, 2, 3, 4}

    def test_maps_take_time_and_energy_and_can_miss_the_deadline(self) -> None:
        size = 6 * 4 * 4
        devices: dict[str, Any] = {"upload": 8e-4, "power": {"radio": 2.0}}  # 100 bytes a second
        kept = ran(**TABLE, explain=EXPLAIN, devices=devices)
        sent = ran(**TABLE, explain={**EXPLAIN, "share": {}}, devices=devices)
        more = sent.clients[["simulated_seconds", "energy_joules"]]
        more = more - kept.clients[["simulated_seconds", "energy_joules"]]
        assert np.allclose(more, [size / 100, 2 * size / 100])
        longer = sent.rounds["simulated_seconds"] - kept.rounds["simulated_seconds"]
        assert np.allclose(longer, size / 100)

        devices["deadline"] = float(kept.rounds["simulated_seconds"].max()) + 0.5 * size / 100
        in_time = ran(**TABLE, explain=EXPLAIN, devices=devices)
        late = ran(**TABLE, explain={**EXPLAIN, "share": {}}, devices=devices)
        assert not in_time.rounds["dropped"].any()
        assert (late.rounds["dropped"] == 5).all()
        assert not late.explanations["model"].eq("shared").any()

    def test_a_median_withstands_poison_that_turns_the_mean_round(self) -> None:
        agreement = {}
        for how in ("mean", "quality", "median"):
            share = {"aggregation": how, "poisoned": 0.2}
            done = ran(**TABLE, explain={**EXPLAIN, "share": share})
            agreement[how] = done.rounds["gradient/shared_global_agreement_cosine"].iloc[-1]
        assert agreement["mean"] < 0
        assert agreement["quality"] < 0
        assert agreement["median"] > 0.8

    @pytest.mark.parametrize(
        "more", [{"devices": {"packet_error": 0.4}}, {"secure_aggregation": {}}]
    )
    def test_noise_states_its_epsilon(self, more: dict[str, Any]) -> None:
        """Of 6 maps of 4 parts by 2 explainers, in the rounds in which a client is drawn."""
        explain = {**EXPLAIN, "explainers": ["gradient", "occlusion"], "clients": 2}
        train = {**TABLE["train"], "rounds": 4, "participation": 0.6}
        share = {"noise": 3, "delta": 1e-4, "poisoned": 0.2}
        explain |= {"share": share, "every": 2}
        done = ran(**{**TABLE, "train": train}, **more, explain=explain)
        explained = done.explanations.query("model == 'cohort' and explainer == 'gradient'")
        sent = dict.fromkeys(range(5), 0)
        for t, clients in explained.groupby("round")["client"]:
            for k in clients:
                sent[int(k)] += 2 * 6 * 4
                row = done.clients[(done.clients["client"] == k) & (done.clients["round"] == t)]
                expected = epsilon(Share(**share), sent[int(k)])
                assert row["explain_epsilon"].item() == expected
            later = done.rounds[done.rounds["round"] >= t]["explain_epsilon"].iloc[0]
            assert later == epsilon(Share(**share), max(sent.values()))
        assert done.rounds["explain_epsilon"].tolist()[0] == 0
        assert max(sent.values()) > 0
        assert done.clients["explain_epsilon"].notna().sum() == len(explained)
        assert budgets(done)["privacy of shared explanations"].endswith("δ 0.0001")

    @pytest.mark.parametrize("level", ["client", "example"])
    @pytest.mark.usefixtures("undrawn")
    def test_it_stands_beside_that_of_privacy(self, say: Say, level: str) -> None:
        privacy = {"clip": 1.0, "noise_multiplier": 1.0, "level": level}
        explain = {**EXPLAIN, "share": {"noise": 1}}
        done = ran(**TABLE, privacy=privacy, explain=explain)
        last, told = done.rounds.iloc[-1], budgets(done)
        assert list(told) == ["privacy", "privacy of shared explanations"]
        assert told["privacy"] == f"ε {last['epsilon']:.3g}, δ 1e-05"
        lines = RoundLine(done)(dict(last))
        assert f"ε of explanations {last['explain_epsilon']:.3g}" in lines
        if level == "example":
            return
        say.printed("report", str(done.path), "--out", "page.html")
        page = Path("page.html").read_text()
        assert "Privacy of shared explanations" in page
        assert told["privacy of shared explanations"] in page

    def test_without_noise_nothing_is_stated(self) -> None:
        plain = ran(**TABLE, explain={**EXPLAIN, "share": {}})
        assert "explain_epsilon" not in plain.rounds
        only_scaled = ran(**TABLE, explain={**EXPLAIN, "share": {"noise": 0}})
        assert np.isinf(only_scaled.rounds["explain_epsilon"]).all()
        share = {"noise": 1, "aggregation": "quality"}
        with pytest.warns(FedsimWarning, match=r"^explain.share.aggregation=quality: .* no ε is"):
            quality = ran(**TABLE, explain={**EXPLAIN, "share": share})
        assert "explain_epsilon" not in quality.rounds
