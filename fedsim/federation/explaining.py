"""Explanations of the global model, and of clients' models right after training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.errors import RunError, in_own_code
from fedsim.explain import ExplainedModel
from fedsim.explain.scores.measure import Explained, ExplainedInputs, measure
from fedsim.federation.client import Client
from fedsim.federation.context import WorkerContext
from fedsim.federation.wire import to_arrays
from fedsim.support.rng import keyed_torch_rng


class ExplainerFailed(RunError):
    """An explainer or a network raised an exception: the run cannot continue."""


def explain_global(
    context: WorkerContext, number: int, model: Any, round: int, given: Tensor | None = None
) -> Explained:
    """One explainer's explanation of the global model.

    Args:
        number: the explainer's index in the section.
        model: weights (size,), or the arrays of rules.
        given: (m, P) the aggregate of clients' explanations, to be scored instead.

    Raises:
        RunError: the explainer fails.
    """
    context.model.restrict_classes(None)
    about = _model(context, model, round, None)
    relevance = None if given is None else given.cpu().numpy()
    return _explained(context, about, number, context.explained_inputs, None, relevance)


def explain_client(context: WorkerContext, client: Client) -> dict[str, Explained]:
    """All explainers' explanations of the model that a client function has left as `trained`.

    By explainer; empty if the client has no inputs.

    Raises:
        ExplainerFailed: an explainer fails.
    """
    section = context.spec.explain
    assert section is not None
    about = _model(context, client.trained, client.round, client.id)
    if section.inputs_from == "test":
        inputs = context.explained_inputs
    else:
        rows = section.own_rows(client.splits, client.id, context.spec.seed)
        if not len(rows):
            return {}
        central = client.splits.test_is_central and len(client.splits.test[client.id]) > 0
        examples = context.test_examples(rows) if central else context.examples(rows)
        inputs = ExplainedInputs(rows, examples.x, examples.y)
    held = np.concatenate([client.splits.train[client.id], client.splits.unlabelled[client.id]])
    raw = context.raw(held)
    return {
        explainer.name: _explained(context, about, number, inputs, raw)
        for number, explainer in enumerate(section.explainers)
    }


def _explained(
    context: WorkerContext,
    model: ExplainedModel,
    number: int,
    inputs: ExplainedInputs,
    own: NDArray[Any] | None,
    given: NDArray[Any] | None = None,
) -> Explained:
    section, seed = context.spec.explain, context.spec.seed
    assert section is not None
    explainer = section.explainers[number]
    client = -1 if model.client is None else model.client
    try:
        # For networks that draw in evaluation as well.
        with keyed_torch_rng(seed, "explain/torch", model.round, client, context.device):
            return measure(section, explainer, model, context.explained_data(own), inputs, given)
    except Exception as error:  # a user's explainer or network may raise anything
        whose = "the global model" if model.client is None else f"client {model.client}'s model"
        raise ExplainerFailed(
            f"round {model.round}: explainer {explainer.name}, {whose}: {in_own_code(error)}"
        ) from error


def _model(context: WorkerContext, own: Any, round: int, client: int | None) -> ExplainedModel:
    network: nn.Module | None = None
    rules = None
    if isinstance(own, Mapping):
        rules = to_arrays(dict(own))
    elif isinstance(own, Tensor):
        context.model.load(own)
        network = context.model.module.eval()
    else:
        network = own.eval()
    spec = context.spec
    return ExplainedModel(
        section=spec.model,
        title="",
        round=round,
        seed=spec.seed,
        client=client,
        network=network,
        rules=rules,
    )
