"""Shared code of methods that only learn classifiers."""

from __future__ import annotations

from torch import nn

from fedsim.errors import ExperimentError
from fedsim.federation import Client
from fedsim.models import Classifier
from fedsim.objectives import Classification


def classification(client: Client) -> Classification:
    """(client) Its objective, for methods that only learn classification."""
    assert isinstance(client.objective, Classification)
    return client.objective


def needs_classifier(name: str, network: nn.Module) -> Classifier:
    """The network as a `Classifier`, with features and a head; refuses any other."""
    if not isinstance(network, Classifier):
        raise ExperimentError(
            f"method.name={name} needs a model with features and a head, "
            f"fedsim.models.Classifier(features, head), not {type(network).__name__}"
        )
    return network


def needs_trained_features(name: str, network: nn.Module) -> None:
    """Refuse a network without features that are trained."""
    features = needs_classifier(name, network).features
    if not any(p.requires_grad for p in features.parameters()):
        raise ExperimentError(
            f"method.name={name} shares the features, and the model's have no parameters"
        )
