"""FedDF, and the auxiliary inputs that it shares with FedAUX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_fedfed import Bytes
from test_fedftg import Cohort
from torch import nn

from experiments import WHOLE, Finish, federation, interrupted, server_states, small_experiment
from fedsim import resume
from fedsim.errors import ExperimentError, RunError, RunFolderError
from fedsim.launch.prepare import prepare
from fedsim.methods.shared.auxiliary import draw_batches, ensemble
from fedsim.support.rng import keyed_rng

SHARE = {"server_fraction": 0.2}  # of the whole digits 287


class TestMathematics:
    def test_the_student_follows_the_ensemble(self) -> None:
        """Every step written out: teachers, targets, clipping, cosine, Adam."""
        server = {"steps": 7, "batch_size": 64, "lr": 0.01, "final_lr": 0.002, "clip_norm": 0.05}
        experiment = small_experiment(
            method={"name": "feddf", **server},
            data=WHOLE,
            partition=SHARE,
            train={"rounds": 2, "participation": 0.5},
        )
        dataset, splits, _ = prepare(experiment)
        x = torch.tensor(dataset.x[splits.server])
        states, fed = server_states(experiment), federation(experiment)
        for t in (1, 2):
            cohort = Cohort(experiment, fed, states[t - 1].weights, t)
            assert len(cohort.models) == 5
            with torch.no_grad():
                logits = [cohort.network(w)(x) for w in cohort.models]
            targets = torch.stack(logits).mean(dim=0).softmax(dim=1)

            student = cohort.network(cohort.average)
            adam = torch.optim.Adam(student.parameters(), lr=0.01)
            cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, T_max=7, eta_min=0.002)
            rng = keyed_rng(experiment.seed, "server/distillation", t)
            batches = [
                batch for _ in range(2) for batch in torch.tensor(rng.permutation(287)).split(64)
            ]
            norms = []
            for batch in batches[:7]:
                p, q = targets[batch], student(x[batch]).softmax(dim=1)
                loss = (p * (p.log() - q.log())).sum() / len(batch)
                adam.zero_grad()
                loss.backward()
                norms.append(float(nn.utils.clip_grad_norm_(student.parameters(), 0.05)))
                adam.step()
                cosine.step()
            assert min(norms) < 0.05 < max(norms)
            found = nn.utils.parameters_to_vector(student.parameters()).detach().numpy()
            np.testing.assert_allclose(states[t].weights, found, atol=2e-5)
            assert np.abs(found - cohort.average).max() > 1e-2

    def test_an_epoch_is_the_default_and_its_loss_is_on_record(self, finish: Finish) -> None:
        """Steps counted out come to the same as the epochs that they make up."""
        common = {"data": WHOLE, "partition": SHARE, "train": {"rounds": 2}}
        by_default = finish(method={"name": "feddf"}, **common)
        by_count = finish(method={"name": "feddf", "steps": 3}, **common)  # 287 = 128 + 128 + 31
        assert by_default.result_hash == by_count.result_hash
        assert (by_default.rounds["distillation_loss"] > 0).all()

    def test_teachers_are_in_eval_mode(self) -> None:
        experiment = small_experiment(
            method={"name": "feddf"},
            data=WHOLE,
            partition=SHARE,
            model={"name": "resnet8", "width": 2},
            train={"rounds": 1, "participation": 0.2, "optimizer": {"lr": 0.01}},
        )
        fed = federation(experiment)
        cohort = Cohort(experiment, fed, fed.initial_weights(), 1)
        x, rows = experiment.method.inputs(fed), torch.tensor([0, 3, 4, 100])
        s = torch.linspace(0.1, 0.9, len(x))
        targets = ensemble(fed, cohort.models, [s, 1 - s], x, rows)
        logits = [cohort.network(w).eval()(x[rows]).detach() for w in cohort.models]
        weighted = s[rows, None] * logits[0] + (1 - s)[rows, None] * logits[1]
        torch.testing.assert_close(targets[rows], weighted.softmax(dim=1))
        assert targets.sum() == pytest.approx(len(rows))  # nothing for other rows

    def test_batch_norm_sees_no_batch_of_one(self) -> None:
        """An epoch visits each row once, but for one that would be alone."""
        for model, sizes in (
            ({"name": "mlp", "hidden": [8]}, [4, 4, 1]),
            ({"name": "resnet8", "width": 2}, [4, 4]),
        ):
            fed = federation(small_experiment(model=model))
            batches = draw_batches(fed, torch.arange(20, 29), 4, epochs=2)
            assert [len(batch) for batch in batches] == 2 * sizes
            epoch = torch.cat(batches[: len(sizes)]).tolist()
            assert len(set(epoch)) == len(epoch)
            assert set(epoch) <= set(range(20, 29))
            assert torch.cat(batches[len(sizes) :]).tolist() != epoch
            assert draw_batches(fed, torch.arange(9), 4, epochs=0) == []
            assert len(draw_batches(fed, torch.arange(9), 4, epochs=5, steps=8)) == 8


def what_is_refused(**sections: Any) -> str:
    try:
        prepare(small_experiment(**sections))
    except ExperimentError as error:
        return str(error).partition(" are the")[0]
    return ""


class TestAuxiliaryInputs:
    @pytest.mark.parametrize("own", [0, 1, 2])
    def test_of_clients_are_one_in_a_hundred_at_most(self, tmp_path: Path, own: int) -> None:
        partition = {"train_fraction": 0.5, "server_fraction": 0.1}
        data, splits, _ = prepare(small_experiment(data=WHOLE, partition=partition))
        held = splits.train.values
        rows = [*held[:own], *np.setdiff1d(np.arange(len(data.x)), held)[own - 100 :]]
        x, y = data.x[rows], data.y[rows]
        np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y)
        method = {"name": "feddf", "auxiliary": {"name": "npz", "path": f"{tmp_path}/a.npz"}}
        told = what_is_refused(data=WHOLE, partition=partition, method=method)
        assert told == ("method.auxiliary: 2 of its 100 inputs" if own == 2 else "")

    @pytest.mark.parametrize("values", [2, 10**4])  # of which rows recur by chance, or do not
    def test_rows_of_tables(self, tmp_path: Path, values: int) -> None:
        numbers = np.random.default_rng(0).integers(values, size=(200, 3))
        text = "\n".join(",".join(map(str, [*row, k % 2])) for k, row in enumerate(numbers))
        (tmp_path / "t.csv").write_text(f"a,b,c,y\n{text}\n")
        whole = {"name": "table", "path": str(tmp_path / "t.csv"), "label": "y", "scale": "minmax"}
        method, data = {"name": "feddf", "auxiliary": whole}, {**whole, "subset": 0.3}
        told = what_is_refused(data=data, partition={"min_samples": 1}, method=method)
        assert told == ("method.auxiliary: 48 of its 160 inputs" if values > 2 else "")

    def test_a_run_is_not_resumed_on_others(self, tmp_path: Path) -> None:
        auxiliary = tmp_path / "auxiliary.npz"

        def write(seed: int) -> None:
            x = np.random.default_rng(seed).random((80, 1, 8, 8), dtype=np.float32)
            np.savez(auxiliary, x=x, y=np.arange(80) % 10)

        write(0)
        source = {"name": "npz", "path": str(auxiliary)}
        experiment = small_experiment(method={"name": "feddf", "auxiliary": source})
        folder = interrupted(experiment, tmp_path, after=6)
        write(1)
        with pytest.raises(RunFolderError, match="the data changed since the run started"):
            resume(folder)

    def test_another_data_set_is_prepared_as_the_run_s(self) -> None:
        experiment = small_experiment(
            data={"name": "test_fedfed:Bytes"},
            partition={"kind": "iid", "clients": 4},
            method={"name": "feddf", "auxiliary": {"name": "test_fedfed:Bytes", "seed": 1}},
        )
        fed = federation(experiment)
        raw = Bytes(seed=1, mean=0.9).load().x
        # With the mean of the run's data, not with its own.
        expected = (raw.astype(np.float32) / 255 - 0.3) / 0.5
        np.testing.assert_allclose(experiment.method.inputs(fed).numpy(), expected, atol=1e-6)


def test_a_round_without_any_model_is_an_error(finish: Finish) -> None:
    train = {"on_client_error": "skip", "optimizer": {"lr": 1e30}}
    with pytest.raises(RunError, match="round 1: no client of the cohort sent a model"):
        finish(method={"name": "feddf"}, partition=SHARE, train=train)
