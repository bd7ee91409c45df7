"""The masked autoencoder of XPFL's teachers.

It takes normalised images (C, H, W) and has `loss(x)`, (B,) one per example, and `reconstruct(x)`,
(B, C, H, W). N = HW/P² is the number of patches of an image, P the side of one in pixels, and D
the width of the encoder.

Source: He, Chen, Xie, Li, Dollár and Girshick, Masked Autoencoders Are Scalable Vision Learners
(CVPR 2022). Sizes were chosen here for images of about 30 pixels a side.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from fedsim.errors import ExperimentError

MASK_RATIO = 0.75


def patchify(x: Tensor, patch: int) -> Tensor:
    """(B, N, P²C) the patches of images (B, C, H, W), row by row; P must divide H and W.

    Within a patch, rows come first, then columns, then channels.
    """
    B, C, H, W = x.shape
    grid = x.reshape(B, C, H // patch, patch, W // patch, patch)
    return grid.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def unpatchify(patches: Tensor, patch: int, shape: tuple[int, ...]) -> Tensor:
    """(B, C, H, W) the images of a shape with patches (B, N, P²C): the inverse of `patchify`."""
    C, H, W = shape
    grid = patches.reshape(-1, H // patch, W // patch, patch, patch, C)
    return grid.permute(0, 5, 1, 3, 2, 4).reshape(-1, C, H, W)


class MaskedAutoencoder(nn.Module):
    """A transformer that learns to reconstruct the masked patches of an image.

    The encoder sees only the visible patches and a class token; the decoder gets the encoder's
    output and a learnt token in place of each masked patch. Positions are fixed. With default
    settings it has 2,027,344 parameters for images (1, 28, 28).

    Masks and initial weights are drawn from torch's own generator. Without masking
    (`mask_ratio=0`, `features`, `reconstruct`) nothing is drawn.

    The loss of masked patches ignores visible patches: trained with it alone, the network fills in
    what is hidden, and `reconstruct`, for which everything is visible, does not return the image.
    That requires a loss of all pixels (`mask_ratio=0`, or that of `decode` after a masked
    `encode`), as in XPFL's Eq. 12.

    Args:
        shape: (C, H, W) of an image.
        patch: P, which must divide H and W.
        width: D, a multiple of 4 and of `heads`.
        depth: transformer blocks of the encoder.
        heads: of each block's attention.
        decoder_width: the decoder's width, a multiple of 4 and of `decoder_heads`.
        decoder_depth: transformer blocks of the decoder.
        decoder_heads: of each block's attention.

    Raises:
        ExperimentError: the inputs are not images, P does not divide their sides, or a width is
            not a multiple of 4 and of the heads.
    """

    positions: Tensor  # (N, D) what is added to the patches' embeddings
    decoder_positions: Tensor  # (N, decoder_width) what is added to the decoder's tokens

    def __init__(
        self,
        shape: tuple[int, ...],
        patch: int = 4,
        *,
        width: int = 192,
        depth: int = 4,
        heads: int = 3,
        decoder_width: int = 96,
        decoder_depth: int = 2,
        decoder_heads: int = 3,
    ) -> None:
        super().__init__()
        C, rows, columns = patch_grid(shape, patch)
        _check_width("width", width, "heads", heads)
        _check_width("decoder_width", decoder_width, "decoder_heads", decoder_heads)
        self.shape, self.patch, self.patches = shape, patch, rows * columns
        pixels = patch**2 * C

        self.embedding = nn.Linear(pixels, width)
        self.class_token = nn.Parameter(torch.empty(width))
        self.encoder = nn.Sequential(*(_Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)

        self.to_decoder = nn.Linear(width, decoder_width)
        self.mask_token = nn.Parameter(torch.empty(decoder_width))
        blocks = (_Block(decoder_width, decoder_heads) for _ in range(decoder_depth))
        self.decoder = nn.Sequential(*blocks)
        self.decoder_norm = nn.LayerNorm(decoder_width, eps=1e-6)
        self.pixels = nn.Linear(decoder_width, pixels)

        # Not saved, so that they are no part of the weights.
        for name, size in (("positions", width), ("decoder_positions", decoder_width)):
            self.register_buffer(name, patch_positions(rows, columns, size), persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.class_token, std=0.02)
        nn.init.normal_(self.mask_token, std=0.02)

    def encode(self, x: Tensor, mask_ratio: float = MASK_RATIO) -> tuple[Tensor, Tensor, Tensor]:
        """Encode the patches of images (B, C, H, W) that a random mask leaves visible.

        int(N·(1 − mask_ratio)) patches of each image stay visible, chosen uniformly.

        Returns:
            tokens (B, 1 + visible, D), the class token first, the patches in random order; mask
            (B, N), true for masked patches; restore (B, N), the position of each patch in that
            order, in which masked patches follow the visible ones.
        """
        visible = self.visible(mask_ratio)
        if visible == self.patches:
            order = torch.arange(self.patches, device=x.device).expand(len(x), -1)
        else:
            order = torch.rand(len(x), self.patches, device=x.device).argsort(dim=1)
        restore = order.argsort(dim=1)
        kept = order[:, :visible]
        shown = patchify(x, self.patch).take_along_dim(kept[..., None], dim=1)
        tokens = self.embedding(shown) + self.positions[kept]
        class_token = self.class_token.expand(len(x), 1, -1)
        tokens = self.norm(self.encoder(torch.cat([class_token, tokens], dim=1)))
        return tokens, restore >= visible, restore

    def decode(self, tokens: Tensor, restore: Tensor) -> Tensor:
        """(B, N, P²C) the pixels of all patches, from what `encode` returns."""
        h = self.to_decoder(tokens)
        hidden = self.patches + 1 - h.shape[1]
        mask_tokens = self.mask_token.expand(len(h), hidden, -1)
        shuffled = torch.cat([h[:, 1:], mask_tokens], dim=1)
        patches = shuffled.take_along_dim(restore[..., None], dim=1) + self.decoder_positions
        h = self.decoder(torch.cat([h[:, :1], patches], dim=1))
        return self.pixels(self.decoder_norm(h[:, 1:]))

    def loss(self, x: Tensor, mask_ratio: float = MASK_RATIO) -> Tensor:
        """(B,) mean squared error of the masked patches, or of all if none is masked."""
        tokens, mask, restore = self.encode(x, mask_ratio)
        error = (self.decode(tokens, restore) - patchify(x, self.patch)).square().mean(dim=2)
        if tokens.shape[1] == self.patches + 1:
            return error.mean(dim=1)
        return (error * mask).sum(dim=1) / mask.sum(dim=1)

    def reconstruct(self, x: Tensor) -> Tensor:
        """(B, C, H, W) the reconstruction of images (B, C, H, W) without masking."""
        tokens, _, restore = self.encode(x, 0)
        return unpatchify(self.decode(tokens, restore), self.patch, self.shape)

    def features(self, x: Tensor) -> Tensor:
        """(B, D) the mean of the patches' tokens, without the class token and without masking."""
        tokens, _, _ = self.encode(x, 0)
        return tokens[:, 1:].mean(dim=1)

    forward = reconstruct

    def visible(self, mask_ratio: float) -> int:
        visible = int(self.patches * (1 - mask_ratio)) if 0 <= mask_ratio < 1 else 0
        if visible == 0:
            raise ExperimentError(
                f"mask_ratio={mask_ratio:g}: must lie in [0, 1) and leave at least one of the "
                f"{self.patches} patches visible"
            )
        return visible


class _Block(nn.Module):
    """A pre-norm transformer block: self-attention, then an MLP, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width)  # queries, keys, values, each by head
        self.projection = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, tokens, width) to (B, tokens, width)."""
        qkv = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, heads, tokens, width/heads) each
        attended = scaled_dot_product_attention(q, k, v)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def position_codes(count: int, width: int, device: torch.device | None = None) -> Tensor:
    """(count, width) codes of positions r < count, in double precision; the width is even.

    sin(ωₖr), then cos(ωₖr), with ωₖ = 10000^(−2k/width), k < width/2.

    Source: Vaswani et al., Attention Is All You Need (NeurIPS 2017), sines first.
    """
    rates = 10_000 ** (-torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)
    angles = torch.arange(count, dtype=torch.float64, device=device)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def patch_positions(rows: int, columns: int, width: int) -> Tensor:
    """(N, width) codes of patches, row by row: half of each encodes the row, half the column."""
    by_row = position_codes(rows, width // 2).repeat_interleave(columns, dim=0)
    by_column = position_codes(columns, width // 2).repeat(rows, 1)
    return torch.cat([by_row, by_column], dim=1).to(torch.get_default_dtype())


def patch_grid(shape: tuple[int, ...], patch: int) -> tuple[int, int, int]:
    """C, and the numbers of rows and columns of patches."""
    if len(shape) != 3 or min(shape) < 1:
        raise ExperimentError(f"shape={shape}: must be (C, H, W) of images")
    C, H, W = shape
    if patch < 1 or H % patch or W % patch:
        common = math.gcd(H, W)
        fitting = ", ".join(str(side) for side in range(1, common + 1) if common % side == 0)
        raise ExperimentError(
            f"patch={patch}: images of {H}×{W} pixels cannot be divided into patches of "
            f"{patch}×{patch}. Possible sizes: {fitting}"
        )
    return C, H // patch, W // patch


def _check_width(name: str, width: int, heads_name: str, heads: int) -> None:
    if heads < 1 or width < 1 or width % heads or width % 4:
        raise ExperimentError(
            f"{name}={width}: must be a multiple of {heads_name}={heads}, for attention, and of "
            "4, for sines and cosines of rows and columns"
        )
