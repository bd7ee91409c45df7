"""One run from start to end: the file to read first.

    state = method.init(fed)
    for t in 1 … T:
        state = method.round(fed, state, t)

and around these three lines: records, checkpoints, and a hash of all that was computed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save

from fedsim import atomic
from fedsim.data import ClientSplits, Dataset
from fedsim.errors import ExperimentError, FedsimError, RunError, StateLost
from fedsim.experiment import Experiment
from fedsim.explain.rationales import encoder_scores
from fedsim.federation import Federation, RunSpec, cohort_size, draw_cohort, pick_device
from fedsim.federation.checkpoint import Checkpoints, pack
from fedsim.federation.engine import Engine
from fedsim.methods import Method, State, methods
from fedsim.models.rationale import Rationaliser
from fedsim.objectives.classification import Classification
from fedsim.objectives.regression import Regression
from fedsim.privacy.central import Privacy, Release
from fedsim.results.folder import RunFolder
from fedsim.results.loggers import check_loggers
from fedsim.results.tables import Table
from fedsim.rng import keyed_torch_rng

# What a run tells while it goes on: the record of a finished round, or a line for the user.
Progress = dict[str, Any] | str


def prepare(
    experiment: Experiment, dataset: Dataset | None = None
) -> tuple[Dataset, ClientSplits, RunSpec]:
    """Load the data, deal it out to clients, and check that the experiment can be carried out.

    Args:
        dataset: the data of the experiment, if it is loaded already.

    Raises:
        BadInput: it cannot.
    """
    check_loggers(experiment)
    dataset = dataset or experiment.data.load()
    splits = experiment.partition.deal(dataset, experiment.seed)
    if cohort_size(experiment.train.participation, len(splits)) == 0:
        raise ExperimentError(
            f"train.participation={experiment.train.participation} of {len(splits)} clients "
            f"samples nobody; {1 / len(splits):g} samples one"
        )
    spec = RunSpec(
        model=experiment.model,
        train=experiment.train,
        seed=experiment.seed,
        functions=experiment.method,
        shape=dataset.shape,
        classes=len(dataset.classes),
        privacy=experiment.privacy,
        words=(dataset.vectors, dataset.known) if dataset.words else None,
    )
    if spec.classes == 0 and not experiment.method.regresses:
        raise ExperimentError(
            f"method.name={experiment.method.name} learns classes, and the target of "
            f"data.name={experiment.data.name} is a number; methods for it: "
            + ", ".join(n for n, m in methods.items() if m.regresses and not m.of_rules)
        )
    if splits.stream is not None and not experiment.method.in_turn:
        raise ExperimentError(
            f"method.name={experiment.method.name} cannot learn tasks in turn; methods that can: "
            + ", ".join(n for n, m in methods.items() if m.in_turn and not m.of_rules)
        )
    if splits.stream is not None and experiment.train.rounds % splits.stream.tasks:
        T = splits.stream.tasks
        raise ExperimentError(
            f"train.rounds={experiment.train.rounds} is no multiple of the {T} tasks, each of "
            f"which takes as many rounds; {-(-experiment.train.rounds // T) * T} is"
        )
    network = spec.build_model() if experiment.method.of_rules else _try_model(spec)
    if spec.privacy is not None and isinstance(network, torch.nn.Module):
        _check_no_running_stats(network, experiment.model.name)
    experiment.method.check_data(dataset, splits, network)
    return dataset, splits, spec


def _try_model(spec: RunSpec) -> torch.nn.Module:
    """The network, after one input was sent through it.

    Raises:
        ExperimentError: it does not take the data's inputs, or is no classifier of its classes.
    """
    name = f"model.name={spec.model.name}"
    try:
        network = spec.build_model()
        if not isinstance(network, torch.nn.Module):
            raise ExperimentError(f"{name}: must return a torch.nn.Module, not {network!r}")
        with torch.no_grad():
            kind = torch.float32 if spec.words is None else torch.int32
            found = tuple(network.eval()(torch.zeros(1, *spec.shape, dtype=kind)).shape)
    except FedsimError:
        raise
    except Exception as error:  # of the user's own code
        raise ExperimentError(
            f"{name} does not take the data's inputs of shape {spec.shape}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if found != (1, spec.outputs):
        raise ExperimentError(
            f"{name} returns {'logits' if spec.classes else 'outputs'} of shape {found} for one "
            f"input; {f'the {spec.classes} classes' if spec.classes else 'the target'} of the "
            f"data want{'s' * (not spec.classes)} {(1, spec.outputs)}"
        )
    return network


def _check_no_running_stats(network: torch.nn.Module, name: str) -> None:
    """Refuse noise on running statistics: a variance would end up below 0."""
    for layer, buffer in network.named_buffers():
        if buffer.is_floating_point():
            raise ExperimentError(
                f"privacy: adds noise to all that clients send, and model.name={name} sends "
                f"what does not bear it ('{layer}'); take a model without batch norm, or other "
                "buffers"
            )


def simulate(
    folder: RunFolder, spec: RunSpec, dataset: Dataset, splits: ClientSplits, engine: Engine
) -> Iterator[Progress]:
    """Carry out a run, from its latest checkpoint if it has one, to its end.

    Args:
        folder: of the run; records, checkpoints and final weights go there.
        engine: carries out the clients' work; the result does not depend on which.

    Yields:
        The record of each round, and lines for the user.
    """
    experiment = folder.experiment
    method, last = experiment.method, experiment.train.rounds
    V = folder.manifest.get("clients_per_step")
    if V is None:
        V = experiment.engine.clients_per_step
        if V != 1 and not method.stackable:
            V = 1
            yield f"clients are trained one by one: method.name={method.name} does it otherwise"
        elif V != 1:
            share = experiment.train.participation
            cohort = draw_cohort(experiment.seed, share, len(splits), 1)
            V, why = engine.choose_clients_per_step(cohort.tolist())
            yield why
        folder.update(clients_per_step=V)
    device = pick_device(experiment.engine)
    objective = Classification() if dataset.classes else Regression()
    metrics = [dataclasses.asdict(metric) for metric in objective.metrics(dataset)]
    folder.update(server_device=str(device), metrics=metrics)
    fed = Federation(spec, dataset, splits, engine, V, device)
    checkpoints = Checkpoints(folder.path / "weights", experiment.checkpoint.keep)
    tables = {
        name: Table(folder.path, name) for name in ("rounds", "clients", "explanations", "tasks")
    }
    with keyed_torch_rng(spec.seed, "server", 0, device=device):
        initial = method.init(fed)
    done = False
    while not done:
        begin, state, ledger = checkpoints.latest(initial, fed) or (0, initial, new_ledger())
        for table in tables.values():
            table.rewind(begin)
        if begin:
            yield f"going on after round {begin}"
        try:
            for t in range(begin + 1, last + 1):
                started = time.perf_counter()
                state = one_round(fed, experiment, state, t)
                evaluate_round(fed, experiment, state, t)
                rows = on_record(fed, spec, t, ledger)
                (row,) = rows["rounds"]
                row["seconds"] = time.perf_counter() - started
                for name, added in rows.items():
                    tables[name].add(added)
                every = experiment.checkpoint.every
                if t == last or (every and t % every == 0):
                    with _writing(folder):
                        for table in tables.values():
                            table.flush(t)
                        checkpoints.save(t, state, fed, ledger)
                while engine.notices:
                    yield engine.notices.popleft()
                yield row
            done = True
        except StateLost as lost:
            yield f"{lost}; falling back to the last checkpoint"
    arrays = method.global_model(fed, state)
    with _writing(folder):
        for table in tables.values():
            table.finish()
        atomic.write(
            folder.path / "weights" / "final.safetensors",
            save({n: np.ascontiguousarray(array) for n, array in arrays.items()}),
        )
        folder.update(result_hash=result_hash(ledger["chain"], state))


def one_round(fed: Federation, experiment: Experiment, state: State, t: int) -> State:
    """Round t; the server's next state."""
    fed.begin_round(t)
    # What the server draws from torch's own generator (dropout) depends on t alone.
    with keyed_torch_rng(experiment.seed, "server", t, device=fed.device):
        state = experiment.method.round(fed, state, t)
    if not np.isfinite(state.weights).all():
        raise RunError(
            f"round {t}: the server's weights are no longer finite numbers; smaller learning "
            "rates may help"
        )
    return state


def evaluate_round(fed: Federation, experiment: Experiment, state: State, t: int) -> None:
    """Put on record how far a model's encoders are apart, and in due rounds all other scores."""
    if isinstance(fed.model.module, Rationaliser):
        fed.log(**encoder_scores(experiment.method.global_model(fed, state)))
    if t % experiment.evaluate.every == 0 or t == experiment.train.rounds:
        experiment.method.evaluate(fed, state)
        if experiment.evaluate.clients:
            experiment.method.evaluate_clients(fed, state)


def on_record(
    fed: Federation, spec: RunSpec, t: int, ledger: dict[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    """What round t adds to each table: `rounds`, `clients`, `explanations`, `tasks`.

    The ledger goes on with it.
    """
    record, rows = fed.records()
    if spec.privacy is not None:
        record["epsilon"] = spent(spec.privacy, fed.releases, ledger)
    row = summarise(t, record, rows["clients"], ledger)
    every = [row, *itertools.chain.from_iterable(rows.values())]
    ledger["chain"] = chained(ledger["chain"], every)
    return {"rounds": [row], **rows}


@contextmanager
def _writing(folder: RunFolder) -> Iterator[None]:
    """Say which run it was that the disk had no room for."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{folder.path}: cannot be written: {error}") from error


def new_ledger() -> dict[str, Any]:
    """What is carried from round to round beside the state, and saved with it.

    Totals of bytes, what was released with noise (sampling rate, sums a round, rounds), and a
    chain of hashes: each round's is that of its records and of the chain before it.
    """
    return {"total_bytes_up": 0, "total_bytes_down": 0, "releases": [], "chain": ""}


def spent(privacy: Privacy, releases: Iterable[Release], ledger: dict[str, Any]) -> float:
    """ε by now, after a round with these releases more."""
    rounds = Counter({(q, r): n for q, r, n in ledger["releases"]})
    rounds.update(releases)
    ledger["releases"] = [[q, r, n] for (q, r), n in sorted(rounds.items())]
    return privacy.epsilon(rounds)


def summarise(
    t: int, record: Mapping[str, Any], client_rows: list[dict[str, Any]], ledger: dict[str, Any]
) -> dict[str, Any]:
    """The row of a round, from what was recorded of it and of its clients.

    Sums are exactly rounded (`math.fsum`), so that no order of clients can change a bit.
    """
    trained = [r for r in client_rows if "loss" in r and "samples" in r]
    row: dict[str, Any] = {"round": t, **record}
    if trained:
        samples = sum(r["samples"] for r in trained)
        row["train_loss"] = math.fsum(r["loss"] * r["samples"] for r in trained) / samples
    for score in ("accuracy", "r2"):
        tested = [r[f"test_{score}"] for r in client_rows if f"test_{score}" in r]
        if tested:
            row[f"client_{score}"] = math.fsum(tested) / len(tested)
            row[f"worst_client_{score}"] = min(tested)
    row["clients"] = sum("steps" in r or "rules" in r for r in client_rows)  # that have learnt
    row["failed"] = sum("error" in r for r in client_rows)
    for way in ("up", "down"):
        if any(f"one_off_{way}" in r for r in client_rows):
            row[f"one_off_{way}"] = sum(r.get(f"one_off_{way}", 0) for r in client_rows)
    for way in ("bytes_up", "bytes_down"):
        row[way] = sum(r[way] for r in client_rows)
        ledger[f"total_{way}"] += row[way]
        row[f"total_{way}"] = ledger[f"total_{way}"]
    return row


def chained(chain: str, records: Iterable[Mapping[str, Any]]) -> str:
    """The hash of all records up to this round; times and tracebacks are left out."""
    varying = {"seconds", "error"}
    content = [{k: v for k, v in r.items() if k not in varying} for r in records]
    return hashlib.sha256((chain + json.dumps(content, sort_keys=True)).encode()).hexdigest()


def result_hash(chain: str, state: State) -> str:
    """A hash of everything that a run computed: all records and the server's last state."""
    arrays: dict[str, NDArray[Any]] = {}
    fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    digest = hashlib.sha256(chain.encode())
    digest.update(json.dumps(pack(fields, arrays)).encode())
    for array in arrays.values():
        digest.update(array.tobytes())
    return digest.hexdigest()[:16]


def hashes(dataset: Dataset, splits: ClientSplits, method: Method[Any]) -> dict[str, str]:
    """Hashes of the data (data_hash) and of who holds what (partition_hash)."""
    parts = (splits.train, splits.unlabelled, splits.test)
    contents: dict[str, list[NDArray[Any]]] = {
        "data_hash": [
            *(dataset.x, dataset.y, dataset.test_x, dataset.test_y),
            *method.extra_hash_inputs(),
        ],
        "partition_hash": [
            *(array for part in parts for array in (part.values, part.offsets)),
            splits.server,
        ],
    }
    if dataset.words:
        contents["data_hash"] += [dataset.vectors, dataset.known]
    if splits.stream is not None:
        stream = splits.stream
        for part in (stream.train, stream.validation):
            contents["partition_hash"] += [part.values, part.offsets]
        order = json.dumps(stream.order).encode()
        contents["partition_hash"].append(np.frombuffer(order, dtype=np.uint8))
    found = {}
    for name, arrays in contents.items():
        digest = hashlib.sha256()
        for array in arrays:
            digest.update(np.ascontiguousarray(array).data)
        found[name] = digest.hexdigest()[:16]
    return found
