"""xFedAlign: FedAvg's model, artifacts of known relevance, the prior, and who poisons it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from experiments import PARAMETERS, WHOLE, Finish, server_states, small_experiment
from fedsim.analysis.replay import explain_run
from fedsim.errors import ExperimentError, RunError
from fedsim.explain.groups import group_parts
from fedsim.federation import Examples
from fedsim.launch.prepare import prepare
from fedsim.methods.xfedalign import XFedAlign, XFedAlignState, alike, by_class, dense
from fedsim.support.rng import keyed_rng
from fedsim.training import logits

WEIGHTS = 4 * PARAMETERS  # bytes of the small experiment's model
EVEN: dict[str, Any] = {"data": WHOLE, "partition": {"kind": "iid", "clients": 10}}
TABLE = {"name": "synthetic", "samples": 200, "test_samples": 20, "shape": [6], "classes": 3}


class Planted(nn.Module):
    """The logit of class c is twice feature c, less feature 5."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x[:, :3] - x[:, 5:]


def some_client(labels: list[int], x: torch.Tensor | None = None) -> Any:
    """What explains a model of a client: its examples and random streams."""
    if x is None:
        rng = np.random.default_rng(1)
        x = torch.from_numpy(rng.standard_normal((len(labels), 6), dtype=np.float32))
        x[range(len(labels)), labels] += 8  # of its class
    reported: dict[str, float] = {}
    return SimpleNamespace(
        parts=None,
        data=Examples(x, torch.tensor(labels, dtype=torch.int64)),
        rng=lambda purpose: keyed_rng(0, purpose),
        report=reported.update,
        reported=reported,
        num_classes=3,
    )


NO_PRIOR = torch.zeros(3, 6)
LABELS = [0, 2] * 20


class TestArtifacts:
    def test_the_feature_that_decides_is_found(self) -> None:
        client = some_client(LABELS)
        method = XFedAlign(top_k=1, lam=0.1)
        found = method.artifact(client, Planted(), NO_PRIOR, None)
        assert {name: a.dtype for name, a in found.items()} == {
            "classes": np.uint8,
            "groups": np.uint8,
            "values": np.float32,
        }
        assert found["classes"].tolist() == [0, 2]  # its own
        assert found["groups"].tolist() == [[0], [2]]
        assert found["values"].tolist() == [[1], [1]]
        assert 0.5 < client.reported["surrogate_r2"] <= 1

    def test_outputs_are_those_of_masked_examples(self) -> None:
        """Masked features are the client's mean, and each logit is less the mean of all."""
        client, method = some_client([1, 1, 0]), XFedAlign(samples=8)
        kept = np.random.default_rng(0).integers(2, size=(8, 6), dtype=np.bool_)
        classes, found = method.outputs(client, Planted(), group_parts((6,)), kept)
        assert classes.tolist() == [0, 1]
        x, mean = client.data.x, client.data.x.mean(dim=0)
        expected = []  # of each example under each mask
        for k, c in ((0, 1), (1, 1), (2, 0)):
            said = logits(Planted(), torch.where(torch.tensor(kept), x[k], mean))
            expected.append(said[:, c] - said.mean(axis=1, dtype=np.float64))
        np.testing.assert_allclose(found[:, 0], expected[2], atol=1e-6)
        # Of class 1, both examples take turns.
        first = int(not np.isclose(found[0, 1], expected[0][0], atol=1e-6))
        turns = [expected[(first + i) % 2][i] for i in range(8)]
        np.testing.assert_allclose(found[:, 1], turns, atol=1e-6)

    def test_values_have_unit_length_and_signs(self) -> None:
        client = some_client(LABELS)
        client.data.x[1::2, 5] += 8  # of class 2, and against it

        class Torn(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.stack([x[:, 0], x[:, 0] * 0, x[:, 2] - 2 * x[:, 5]], dim=1)

        found = XFedAlign(top_k=2, lam=0.0).artifact(client, Torn(), NO_PRIOR, None)
        np.testing.assert_allclose(np.linalg.norm(found["values"], axis=1), 1, atol=1e-6)
        assert found["groups"][1].tolist() == [2, 5]
        assert np.sign(found["values"][1]).tolist() == [1, -1]

    def test_pulled_without_limit_they_are_the_prior(self) -> None:
        prior = torch.tensor([[0.0, 0, 0.6, 0, -0.8, 0]]).expand(3, 6)
        found = XFedAlign(top_k=2, lam=1e9).artifact(some_client(LABELS), Planted(), prior, None)
        assert found["groups"].tolist() == [[2, 4], [2, 4]]
        np.testing.assert_allclose(found["values"], [[0.6, -0.8]] * 2, atol=1e-6)

    def test_a_model_that_does_not_look_is_explained_by_nothing(self) -> None:
        client = some_client(LABELS)

        class Blind(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.zeros(len(x), 3)

        found = XFedAlign(top_k=2).artifact(client, Blind(), NO_PRIOR, None)
        assert (found["values"] == 0).all()
        assert client.reported == {}

    def test_a_client_without_labels_sends_nothing(self) -> None:
        client = some_client([], torch.zeros(0, 6))
        found = XFedAlign(top_k=2).artifact(client, Planted(), NO_PRIOR, None)
        assert found["classes"].shape == (0,)
        assert found["groups"].shape == found["values"].shape == (0, 2)

    def test_noise_has_that_deviation_before_the_largest_are_chosen(self) -> None:
        exact = XFedAlign(top_k=6, lam=0.1)
        (true,) = dense(
            exact.artifact(some_client([1] * 9), Planted(), NO_PRIOR, None), (3, 6)
        ).values()
        noise = keyed_rng(0, "noise").standard_normal((1, 6))
        noisy = true + 0.7 * noise[0]
        found = XFedAlign(top_k=2, lam=0.1, noise=0.7).artifact(
            some_client([1] * 9), Planted(), NO_PRIOR, None
        )
        chosen = np.sort(np.argsort(-np.abs(noisy))[:2])
        assert found["groups"].tolist() == [chosen.tolist()]
        np.testing.assert_allclose(
            found["values"][0], noisy[chosen] / np.linalg.norm(noisy[chosen]), atol=1e-5
        )

    def test_poisoned_ones_are_all_on_what_was_agreed(self) -> None:
        decoys = [[3, 4], [1, 5], [0, 4]]
        found = XFedAlign(top_k=2).artifact(some_client(LABELS), Planted(), NO_PRIOR, decoys)
        assert found["groups"].tolist() == [[3, 4], [0, 4]]
        np.testing.assert_allclose(found["values"], np.sqrt(0.5), atol=1e-7)


class TestPrior:
    def artifacts(self, vectors: np.ndarray) -> list[dict[int, np.ndarray]]:
        """All of class 1; the first client has class 0 as well."""
        sent = [{1: v} for v in vectors]
        sent[0][0] = vectors[0]
        return sent

    @pytest.mark.parametrize("kind", ["median", "mean"])
    def test_it_is_taken_entry_by_entry(self, kind: str) -> None:
        vectors = np.random.default_rng(0).standard_normal((5, 4))
        before = np.full((3, 4), 0.25, dtype=np.float32)
        found = XFedAlign(aggregation=kind).aggregate(self.artifacts(vectors), before)
        np.testing.assert_allclose(found[1], getattr(np, kind)(vectors, axis=0), rtol=1e-6)
        np.testing.assert_allclose(found[0], vectors[0], rtol=1e-6)
        assert (found[2] == 0.25).all()  # nobody said anything of it
        assert (before == 0.25).all()

    def test_of_groups_not_sent(self) -> None:
        artifact = {
            "classes": np.array([2], np.uint8),
            "groups": np.array([[1, 3]], np.uint8),
            "values": np.array([[0.6, -0.8]], np.float32),
        }
        (found,) = by_class([dense(artifact, (3, 5))]).values()
        np.testing.assert_allclose(found, [[0, 0.6, 0, -0.8, 0]])

    def test_how_alike_artifacts_are(self) -> None:
        artifacts = np.array([[1.0, 0, 0], [0, 1, 0], [0.6, 0.8, 0]])
        found = alike(artifacts, np.array([0, 0, 2.0]), np.array([3.0, 0, 0]))
        assert found == pytest.approx(
            {
                "clients": 3,
                "prior_agreement": (1 + 0 + 0.6) / 3,
                "artifact_agreement": (0 + 0.6 + 0.8) / 3,
                "drift_from_prior": 1,
            }
        )
        assert set(alike(artifacts[:1], np.zeros(3), np.ones(3))) == {"clients", "prior_agreement"}


class TestRuns:
    @pytest.mark.night
    def test_alignment_makes_artifacts_agree(self, finish: Finish) -> None:
        found = {
            lam: finish(
                method={"name": "xfedalign", "lam": lam},
                partition={"alpha": 0.3},
                train={"rounds": 3, "participation": 0.5},
            )
            for lam in (0.0, 2.0)
        }
        for name in ("artifact_agreement", "prior_agreement"):
            apart, aligned = (found[lam].rounds[name].iloc[-1] for lam in (0.0, 2.0))
            assert aligned > apart + 0.05

    def test_what_is_on_record(self, finish: Finish) -> None:
        done = finish(method={"name": "xfedalign"}, train={"rounds": 2, "participation": 0.5})
        dataset, splits, _ = prepare(small_experiment(method={"name": "xfedalign"}))
        for row in done.clients.itertuples():
            m = len(np.unique(dataset.y[splits.train[row.client]]))
            assert row.bytes_up == WEIGHTS + m * (1 + 3 * (1 + 4))  # 3 of 16 groups
            assert row.bytes_down == WEIGHTS + 4 * 10 * 16
            assert 0 < row.surrogate_r2 <= 1
        of_classes = done.explanations.dropna(subset="clients")
        of_groups = done.explanations.dropna(subset="group")
        assert len(of_classes) + len(of_groups) == len(done.explanations)
        assert set(done.explanations["explainer"]) == {"xfedalign"}
        states = server_states(small_experiment(method={"name": "xfedalign"},
            train={"rounds": 2, "participation": 0.5}))  # fmt: skip
        for t in (1, 2):
            rows, prior = of_groups[of_groups["round"] == t], np.zeros((10, 16))
            prior[rows["class"].astype(int), rows["group"].astype(int)] = rows["relevance"]
            np.testing.assert_array_equal(prior, states[t].prior)
            rows = of_classes[of_classes["round"] == t]
            for name in ("prior_agreement", "artifact_agreement", "drift_from_prior"):
                mean = done.rounds.loc[done.rounds["round"] == t, name].item()
                assert rows[name].mean() == pytest.approx(mean, nan_ok=True)
            assert rows["drift_from_prior"].isna().all() == (t == 1)

    def test_poisoned_clients_are_one_at_least_and_no_part_of_the_record(
        self, finish: Finish
    ) -> None:
        method = {"name": "xfedalign", "poisoned": 0.01}
        done = finish(**EVEN, method=method, train={"rounds": 1})
        assert (done.explanations["clients"].dropna() == 9).all()
        method["poisoned"] = 1.0
        done = finish(**EVEN, method=method, train={"rounds": 1})
        assert "clients" not in done.explanations
        assert done.explanations["relevance"].to_numpy() == pytest.approx(np.sqrt(1 / 3))

    def test_clients_that_fail_are_left_out(
        self, finish: Finish, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        explain = XFedAlign.artifact

        def fail(self: XFedAlign, client: Any, *rest: Any) -> Any:
            if client.id != 7:
                raise ValueError("out of order")
            return explain(self, client, *rest)

        monkeypatch.setattr(XFedAlign, "artifact", fail)
        common = {"method": {"name": "xfedalign"}, "train": {"rounds": 1}}
        common["train"]["on_client_error"] = "skip"
        done = finish(**common)
        assert done.rounds["failed"].tolist() == [9]
        assert (done.explanations["clients"].dropna() == 1).all()
        monkeypatch.setattr(XFedAlign, "artifact", lambda self, client, *rest: 1 / 0)
        with pytest.raises(
            RunError, match="round 1: the weights of the cohort's updates sum to 0"
        ):
            finish(**common)


class TestPictures:
    METHOD: ClassVar = {"name": "xfedalign", "samples": 50}

    def test_the_prior_is_shown_over_the_mean_image_of_each_class(
        self, finish: Finish, tmp_path: Path
    ) -> None:
        method = self.METHOD | {"size": 3}
        done = finish(method=method, train={"rounds": 2, "participation": 0.5})
        *_, last = server_states(done.experiment)
        found = explain_run(done, done.experiment.method.overview())
        np.testing.assert_array_equal(found.prior, last.prior)
        c, g = np.argwhere(last.prior)[0]
        row, column = 3 * (g // 3), 3 * (g % 3)
        where = f"rows {row}–{min(row + 2, 7)}, columns {column}–{min(column + 2, 7)}"
        first = {"class": str(c), "group": where, "relevance": float(last.prior[c, g])}
        assert found.rows()[0] == first
        assert f"{where} {last.prior[c, g]:+.3g}" in found.text()
        assert len(found.text().splitlines()) == 1 + last.prior.any(axis=1).sum()
        (picture,) = found.save(tmp_path)
        assert picture.read_bytes().startswith(b"\x89PNG")

    def test_of_a_table_by_feature(self, finish: Finish, tmp_path: Path) -> None:
        partition = {"kind": "iid", "clients": 3}
        done = finish(data=TABLE, partition=partition, method=self.METHOD, train={"rounds": 1})
        *_, last = server_states(done.experiment)
        assert isinstance(last, XFedAlignState)
        assert last.prior.shape == (3, 6)
        assert (last.prior != 0).any(axis=1).all()
        found = explain_run(done, done.experiment.method.overview())
        assert {row["group"] for row in found.rows()} <= {f"x{f + 1}" for f in range(6)}
        (picture,) = found.save(tmp_path)
        assert picture.read_bytes().startswith(b"\x89PNG")

    def test_there_may_be_none(self, finish: Finish) -> None:
        """FedAvg's clients explain nothing; in noise clients do not always agree."""
        noisy = finish(
            **{"seed": 2, "data": TABLE, "partition": {"kind": "iid", "clients": 12}},
            **{"method": self.METHOD | {"noise": 1000, "top_k": 2}, "train": {"rounds": 3}},
        )
        assert set(noisy.explanations.dropna(subset="group")["round"]) == {1, 2}
        for done in (finish(train={"rounds": 1}), noisy):
            with pytest.raises(
                ExperimentError, match="no prior after the last round: clients do not agree"
            ):
                explain_run(done, XFedAlign().overview())
