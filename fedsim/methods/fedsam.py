"""FedSAM and FedASAM: clients search for flat minima.

Caldarola et al., Improving Generalization in Federated Learning by Seeking Flat Minima, ECCV
2022; Qu et al., Generalized Federated Learning via Sharpness Aware Minimization, ICML 2022. The
perturbations are those of SAM (Foret et al., ICLR 2021, Eq. 2) and ASAM (Kwon et al., ICML 2021,
Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from fedsim.federation import Client, Update, client_function
from fedsim.methods.fedavg import FedAvg
from fedsim.methods.method import methods

TINY = 1e-12  # avoids division by a zero norm


@methods.register
class FedSAM(FedAvg):
    """FedAvg with sharpness-aware clients: the gradient is taken at w + ε, the step made from w.

    SAM: ε = ρ·g/‖g‖. ASAM: ε = ρ·T²g/‖T·g‖ with T = |w| + η, so that ε does not depend on the
    scale of the weights. The norm is over all parameters. Local training takes twice as long.

    Args:
        rho: ρ, length of ε (Caldarola et al. on CIFAR-10: SAM 0.1, ASAM 0.7).
        variant: how ε is computed.
        eta: η of ASAM.
    """

    name: str = "fedsam"
    private_by_example: ClassVar[bool] = False
    rho: float = Field(0.1, ge=0)
    variant: Literal["sam", "asam"] = "sam"
    eta: float = Field(0.2, ge=0)

    @client_function("local_update")
    def local_update(self, client: Client, weights: Tensor) -> Update:
        trained = client.train(weights, perturb=self.ascend)
        return Update(weights=trained, weight=client.num_samples)

    def ascend(self, g: Tensor, w: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        """ε."""
        if self.variant == "sam":
            T2g, norm = g, g.norm(dim=-1, keepdim=True)
        else:
            T = w.abs() + self.eta
            T2g, norm = T * T * g, (T * g).norm(dim=-1, keepdim=True)
        epsilon: Tensor = self.rho * T2g / norm.clamp(min=TINY)
        return epsilon
