"""MOON: model-contrastive learning keeps clients close to the global representation.

Li, He and Song, Model-Contrastive Federated Learning, CVPR 2021, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, softplus

from fedsim.data import ClientSplits, Dataset
from fedsim.federation import Client, Update, client_function
from fedsim.methods.fedavg import FedAvg
from fedsim.methods.learns import Learns
from fedsim.methods.method import methods
from fedsim.methods.shared.classifiers import classification, needs_classifier
from fedsim.models import Classifier
from fedsim.objectives import Classification
from fedsim.training import representation


@methods.register
class Moon(FedAvg):
    """FedAvg whose clients minimise the loss + μ·ℓ_con (Li et al. 2021, Eq. 3 and 4).

    ℓ_con = −log(e^{sim(z, z_glob)/τ} / (e^{sim(z, z_glob)/τ} + e^{sim(z, z_prev)/τ})): the
    representation z is pulled towards the global model's, and pushed away from that of the
    client's model of its last round (one previous model, as in the paper; without one ℓ_con is 0).
    The other two representations are computed in evaluation mode. z is the input of the head; the
    paper puts a projection head before it (`model.projection: 256`).

    Args:
        mu: μ. The paper tunes it in {0.1, 1, 5, 10}, and finds 5 best on CIFAR-10.
        tau: τ, temperature.
    """

    name: str = "moon"
    learns: ClassVar[Learns] = Learns(objectives=(Classification,))
    mu: float = Field(1.0, ge=0)
    tau: float = Field(0.5, gt=0)

    def check_data(self, dataset: Dataset, splits: ClientSplits, network: nn.Module) -> None:
        needs_classifier(self.name, network)

    @client_function("local_update")
    def local_update(self, client: Client, weights: Tensor) -> Update:
        previous = client.state.get("previous")
        context = {
            "global": weights,
            "previous": weights if previous is None else previous,
            "mu": torch.full_like(weights[:1], 0.0 if previous is None else self.mu),
        }
        loss = partial(self.loss, classification(client))
        trained = client.train(weights, loss=loss, prepare=self.prepare, context=context)
        client.state["previous"] = trained
        return Update(weights=trained, weight=client.num_samples)

    def prepare(
        self, network: nn.Module, x: Tensor, context: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """z_glob and z_prev of each example, which stay the same while the client trains."""
        z = representation(network, context["global"], x)
        if context["previous"] is context["global"]:  # its first round
            return {"z_global": z, "z_previous": z}
        return {"z_global": z, "z_previous": representation(network, context["previous"], x)}

    def loss(
        self,
        objective: Classification,
        network: Classifier,
        x: Tensor,
        y: Tensor,
        context: Mapping[str, Tensor],
    ) -> Tensor:
        """The objective's loss + μ·ℓ_con of each example."""
        losses, z, _ = objective.forward(network, x, y)
        alike = cosine_similarity(z, context["z_global"])
        unlike = cosine_similarity(z, context["z_previous"])
        contrast = softplus((unlike - alike) / self.tau)  # −log(e^a / (e^a + e^b)) of Eq. 3
        return losses + context["mu"] * contrast
