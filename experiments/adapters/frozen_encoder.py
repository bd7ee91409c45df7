"""The small encoder, of which nothing but the head is trained."""

from torch import Tensor, nn

from fedsim.models.transformer import Transformer


class FrozenEncoder(Transformer):
    """A transformer whose weights stay as they are initially, except the head's."""

    name: str = "frozen_encoder:FrozenEncoder"

    def build_text(self, vectors: Tensor, known: Tensor, outputs: int) -> nn.Module:
        network = super().build_text(vectors, known, outputs)
        network.get_submodule("features").requires_grad_(False)
        return network
