"""FedRNL: federated rationalisation with soft parameter sharing of generator and predictor.

Federated Rationalisation with soft parameter sharing, ECML-PKDD 2025. No code was released; the
model follows the code of FR (Liu et al., NeurIPS 2022).
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from fedsim.data import ClientSplits, Dataset
from fedsim.errors import ExperimentError
from fedsim.federation import Client, Update, client_function
from fedsim.methods.fedavg import FedAvg
from fedsim.methods.learns import Learns
from fedsim.methods.method import methods
from fedsim.models.rationale import RationaleClassifier, encoder_distance
from fedsim.objectives import Classification, Objective
from fedsim.training import Context


@methods.register
class FedRNL(FedAvg):
    """FedAvg of a rationalisation model, with λ·L_enc(θ_e, φ_e) added to the model's loss.

    θ_e and φ_e are the encoders (GRU and layer norm) of generator and predictor. The paper speaks
    of a squared norm, has none in Eq. 4, and finds the Frobenius norm the best of four; L_enc is
    therefore Σ_j ‖θ_j − φ_j‖_F over the encoders' tensors. Without it (λ = 0) this is FedAvg of
    RNP. With the squared norm, a large λ and sufficiently small steps, it trains like FR: both
    encoders move as one, by the mean of their gradients (in FR, by the sum). Averaging generators
    and predictors "layer by layer" is the same as averaging the model.

    The losses here are means over a batch, whereas Eq. 3 sums over examples: the paper's λ = 2
    with batches of 512 then corresponds to λ = 0.004 here. (The gradient of a norm does not shrink
    with the norm; with Adam, whose steps have a fixed size, a large λ drowns out the other
    losses.)

    Args:
        lam: λ.
        encoder_loss: `frobenius`, `l2` (squared), `l1` or `cos`.
    """

    name: str = "fedrnl"
    learns: ClassVar[Learns] = Learns(objectives=(Classification,))
    lam: float = Field(2.0, ge=0)
    encoder_loss: Literal["frobenius", "l2", "l1", "cos"] = "frobenius"

    def check_data(self, dataset: Dataset, splits: ClientSplits, network: nn.Module) -> None:
        if not isinstance(network, RationaleClassifier):
            raise ExperimentError("method.name=fedrnl needs model.name=rationale")
        if network.shared:
            raise ExperimentError(
                "method.name=fedrnl keeps two encoders close, and model.shared=true has only "
                "one; use method.name=fedavg"
            )

    @client_function("local_update")
    def local_update(self, client: Client, weights: Tensor) -> Update:
        trained = client.train(weights, loss=partial(self.loss, client.objective))
        return Update(weights=trained, weight=client.num_samples)

    def loss(
        self,
        objective: Objective,
        network: RationaleClassifier,
        x: Tensor,
        y: Tensor,
        context: Context,
    ) -> Tensor:
        """The objective's loss + λ·L_enc, which is the same for each example."""
        losses = objective.loss(network, x, y, context)
        return losses + self.lam * encoder_distance(*network.encoders(), self.encoder_loss)
