"""The autoencoders of XPFL: that they are what is written out here, and that they learn."""

from __future__ import annotations

import math
from runpy import run_path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from snippets import ROOT
from torch import Tensor, nn
from torch.nn import functional

from experiments import examples
from fedsim.errors import ExperimentError
from fedsim.models.masked_autoencoder import (
    MaskedAutoencoder,
    patchify,
    unpatchify,
)
from fedsim.training import FlatModel

pytestmark = pytest.mark.filterwarnings("error")

WRITTEN = run_path(str(ROOT / "experiments" / "xpfl" / "convolutional.py"))
ConvolutionalAutoencoder = WRITTEN["ConvolutionalAutoencoder"]

GREY_28 = (1, 28, 28)
SMALL = {
    **{"width": 64, "depth": 4, "heads": 4},
    **{"decoder_width": 32, "decoder_depth": 2, "decoder_heads": 4},
}
TOY = {
    **{"width": 8, "depth": 1, "heads": 2},
    **{"decoder_width": 4, "decoder_depth": 1, "decoder_heads": 2},
}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def build(shape: tuple[int, ...] = (1, 8, 8), seed: int = 0, **fields: Any) -> MaskedAutoencoder:
    torch.manual_seed(seed)
    return MaskedAutoencoder(shape, **{**TOY, **fields})


def toy() -> MaskedAutoencoder:
    """With 4 patches, in float64, and no parameter at a value such as 0 or 1 that hides it."""
    network = build().double()
    with torch.no_grad():
        for k, parameter in enumerate(network.parameters()):
            parameter += 0.3 * noise(*parameter.shape, seed=k)
    return network


def count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def ref_linear(w: dict[str, Tensor], name: str, v: Tensor) -> Tensor:
    return functional.linear(v, w[f"{name}.weight"], w[f"{name}.bias"])


def ref_norm(w: dict[str, Tensor], name: str, v: Tensor) -> Tensor:
    return functional.layer_norm(v, v.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-6)


def ref_block(w: dict[str, Tensor], name: str, heads: int, tokens: Tensor) -> Tensor:
    """Of (T, D) tokens of one image."""
    T, D = tokens.shape
    qkv = ref_linear(w, f"{name}.qkv", ref_norm(w, f"{name}.norm1", tokens))
    q, k, v = qkv.view(T, 3, heads, D // heads).permute(1, 2, 0, 3)
    attended = functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).reshape(T, D)
    tokens = tokens + ref_linear(w, f"{name}.projection", attended)
    hidden = ref_linear(w, f"{name}.mlp.0", ref_norm(w, f"{name}.norm2", tokens))
    return tokens + ref_linear(w, f"{name}.mlp.2", functional.gelu(hidden))


def ref_patches(image: Tensor) -> Tensor:
    """(4, 16) the patches of an 8×8 image, row by row."""
    corners = [(0, 0), (0, 4), (4, 0), (4, 4)]
    return torch.stack([image[0, i : i + 4, j : j + 4].reshape(16) for i, j in corners])


def ref_pass(
    w: dict[str, Tensor], network: MaskedAutoencoder, image: Tensor, visible: list[int]
) -> tuple[Tensor, Tensor]:
    """The encoder's tokens, the class token first, and the pixels (4, 16) of all patches."""
    embedded = ref_linear(w, "embedding", ref_patches(image)[visible])
    seen = torch.cat([w["class_token"][None], embedded + network.positions[visible].double()])
    tokens = ref_norm(w, "norm", ref_block(w, "encoder.0", 2, seen))
    first, *shown = ref_linear(w, "to_decoder", tokens)
    places = [shown[visible.index(n)] if n in visible else w["mask_token"] for n in range(4)]
    rest = torch.stack(places) + network.decoder_positions.double()
    out = ref_block(w, "decoder.0", 2, torch.cat([first[None], rest]))[1:]
    return tokens, ref_linear(w, "pixels", ref_norm(w, "decoder_norm", out))


def check_gradients(network: nn.Module, w: dict[str, Tensor], loss: Tensor, ref: Tensor) -> None:
    """Of the network's loss and the reference's, by each parameter that these use."""
    torch.testing.assert_close(loss, ref, rtol=0, atol=1e-9)
    torch.autograd.backward(loss.sum())
    torch.autograd.backward(ref.sum())
    for name, leaf in w.items():
        found = network.get_parameter(name).grad
        assert found is not None, name
        assert float(found.abs().max()) > 1e-6, name  # so that there is a gradient
        torch.testing.assert_close(found, leaf.grad, rtol=0, atol=1e-9, msg=name)


def leaves(network: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone().requires_grad_() for n, p in network.named_parameters()}


@pytest.mark.parametrize("ratio", [0.5, 0.75])
def test_the_masked_loss_and_its_gradient_are_those_written_out(ratio: float) -> None:
    network, x = toy(), noise(2, 1, 8, 8).double()
    torch.manual_seed(7)
    loss = network.loss(x, ratio)
    torch.manual_seed(7)
    _, mask, restore = network.encode(x, ratio)
    w, expected = leaves(network), []
    for image, hidden, places in zip(x, mask.tolist(), restore.tolist(), strict=True):
        visible = [places.index(k) for k in range(4 - sum(hidden))]
        _, pixels = ref_pass(w, network, image, visible)
        expected.append((pixels - ref_patches(image)).square()[hidden].mean())
    check_gradients(network, w, loss, torch.stack(expected))


def test_the_unmasked_pass_and_its_gradient_are_those_written_out() -> None:
    network, x = toy(), noise(2, 1, 8, 8).double()
    w = leaves(network)
    features, patches, losses = [], [], []
    for image in x:
        tokens, pixels = ref_pass(w, network, image, [0, 1, 2, 3])
        features.append(tokens[1:].mean(dim=0))
        patches.append(pixels)
        losses.append((pixels - ref_patches(image)).square().mean())
    found = network.reconstruct(x)
    for image, pixels in zip(found, patches, strict=True):
        torch.testing.assert_close(ref_patches(image), pixels, rtol=0, atol=1e-9)
    torch.testing.assert_close(network(x), found, rtol=0, atol=0)
    torch.testing.assert_close(network.features(x), torch.stack(features), rtol=0, atol=1e-9)
    del w["mask_token"]  # of which an unmasked pass makes no use
    check_gradients(network, w, network.loss(x, 0), torch.stack(losses))


def test_positions_are_sines_and_cosines_of_rows_and_columns() -> None:
    network = build((1, 12, 20), width=24, decoder_width=8)
    for codes, width in ((network.positions, 24), (network.decoder_positions, 8)):
        assert codes.shape == (15, width)
        assert not codes.requires_grad
        for n, code in enumerate(codes.tolist()):
            expected = [
                turn(place / 10_000 ** (k / (width // 4)))
                for place in divmod(n, 5)
                for turn in (math.sin, math.cos)
                for k in range(width // 4)
            ]
            assert code == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("shape", "fields", "parameters"),
    [
        (GREY_28, {}, 2_027_344),
        ((3, 32, 32), {}, 2_036_592),
        (GREY_28, SMALL, 229_328),
        ((3, 32, 32), SMALL, 232_432),
    ],
)
def test_parameters_of_the_masked_autoencoder(
    shape: tuple[int, ...], fields: dict[str, int], parameters: int
) -> None:
    network = MaskedAutoencoder(shape, **fields)
    assert count(network) == parameters
    assert f"{2_027_344:,}" in str(MaskedAutoencoder.__doc__)
    # What is sent or kept is the parameters, and nothing that belongs to one client's batches.
    assert FlatModel(network, torch.device("cpu")).size == parameters
    x = noise(2, *shape)
    before = {n: b.clone() for n, b in network.named_buffers()}
    torch.autograd.backward(network.loss(x).sum())
    assert set(before) == {"positions", "decoder_positions"}
    assert all(torch.equal(b, before[n]) for n, b in network.named_buffers())
    assert network.reconstruct(x).shape == x.shape
    assert network.features(x).shape == (2, fields.get("width", 192))


@pytest.mark.parametrize(("channels", "side", "parameters"), [(1, 28, 52_897), (3, 32, 56_099)])
def test_parameters_of_the_convolutional_autoencoder(
    channels: int, side: int, parameters: int
) -> None:
    network = ConvolutionalAutoencoder((channels, side, side), 0, 1)
    assert count(network) == FlatModel(network, torch.device("cpu")).size == parameters
    assert f"{parameters:,}" in str(ConvolutionalAutoencoder.__doc__)
    for shape, low in (((1, 15, 28), 0), ((784,), 0), (GREY_28, 1), (GREY_28, math.nan)):
        with pytest.raises(
            ExperimentError, match=r"16 pixels a side|must be .C, H, W|less than high"
        ):
            ConvolutionalAutoencoder(shape, low, 1)


SIDES = st.integers(1, 4)


@given(SIDES, SIDES, SIDES, SIDES, st.integers(1, 3))
@examples(50)
def test_unpatchify_undoes_patchify(B: int, C: int, rows: int, columns: int, patch: int) -> None:
    shape = (C, rows * patch, columns * patch)
    x = torch.arange(B * math.prod(shape)).view(B, *shape)
    patches = patchify(x, patch)
    assert patches.shape == (B, rows * columns, patch**2 * C)
    assert torch.equal(unpatchify(patches, patch, shape), x)
    # The last patch is the lower right corner, its last entry the last channel of its last pixel.
    corner = x[:, :, -patch:, -patch:]
    assert torch.equal(patches[:, -1].sort().values, corner.flatten(1).sort().values)
    assert torch.equal(patches[:, -1, -1], x[:, -1, -1, -1])
    assert torch.equal(patchify(unpatchify(patches, patch, shape), patch), patches)


@pytest.mark.parametrize(
    ("shape", "ratio", "visible"),
    [(GREY_28, 0.75, 12), ((1, 32, 32), 0.75, 16), (GREY_28, 0.5, 24), (GREY_28, 0.0, 49)],
)
def test_as_many_patches_are_masked_as_asked(
    shape: tuple[int, ...], ratio: float, visible: int
) -> None:
    network = build(shape)
    tokens, mask, restore = network.encode(noise(5, *shape), ratio)
    N = network.patches
    assert tokens.shape == (5, 1 + visible, 8)
    assert mask.sum(dim=1).tolist() == [N - visible] * 5
    assert torch.equal(restore.sort(dim=1).values, torch.arange(N).expand(5, N))
    assert network.decode(tokens, restore).shape == (5, N, 16)


def test_three_quarters_are_masked_unless_told_otherwise() -> None:
    network, x = build(GREY_28), noise(5, *GREY_28)
    assert int(network.encode(x)[1].sum()) == 5 * 37
    torch.manual_seed(0)
    by_default = network.loss(x)
    torch.manual_seed(0)
    assert torch.equal(by_default, network.loss(x, 0.75))


def test_each_patch_is_masked_as_often_and_independently() -> None:
    network = build((1, 16, 16))
    torch.manual_seed(0)
    B = 4000
    _, mask, _ = network.encode(torch.zeros(B, 1, 16, 16), 0.75)
    m = mask.double()
    share = m.mean(dim=0)  # of each patch: 3/4, with a standard error of 0.0068
    assert float((share - 0.75).abs().max()) < 5 * 0.0068
    # Of any two patches both: 12/16 · 11/15 = 0.55, with a standard error of 0.0079.
    both = (m.T @ m / B)[~torch.eye(16, dtype=torch.bool)]
    assert float((both - 0.55).abs().max()) < 5 * 0.0079


def test_masks_are_new_each_time() -> None:
    network, x = build(patch=2), noise(4, 1, 8, 8)
    assert not torch.equal(network.encode(x)[1], network.encode(x)[1])


def test_nothing_is_drawn_where_nothing_is_masked() -> None:
    network, x = build(), noise(3, 1, 8, 8)
    before = torch.get_rng_state()
    first = network.reconstruct(x), network.features(x), network.loss(x, 0)
    second = network.reconstruct(x), network.features(x), network.loss(x, 0)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_initial_weights() -> None:
    network = build(GREY_28, **SMALL)
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear):
            bound = math.sqrt(6 / sum(module.weight.shape))
            largest = float(module.weight.detach().abs().max())
            assert 0.95 * bound < largest <= bound, name
            assert not module.bias.any(), name
    tokens = torch.cat([network.class_token, network.mask_token]).detach()
    assert 0.01 < float(tokens.std()) < 0.03


@pytest.mark.parametrize("side", [16, 17, 28, 31])
def test_the_convolutional_pass_is_that_of_torchs_layers(side: int) -> None:
    low, high = torch.tensor([-1.0, -2.0])[:, None, None], torch.tensor([1.0, 3.0])[:, None, None]
    torch.manual_seed(0)
    network = ConvolutionalAutoencoder((2, side, side + 1), low, high)
    x = noise(3, 2, side, side + 1)
    pool = nn.MaxPool2d(2, return_indices=True)
    first = network.conv1(x).relu()
    h, places1 = pool(first)
    second = network.conv2(h).relu()
    h, places2 = pool(second)
    unpool = functional.max_unpool2d
    h = network.back2(unpool(h, places2, 2, output_size=second.shape[2:])).relu()
    h = network.back1(unpool(h, places1, 2, output_size=first.shape[2:])).tanh()
    # tanh's −1 and 1 become low and high: of the first channel they are the same.
    expected = torch.stack([h[:, 0], 0.5 + 2.5 * h[:, 1]], dim=1)
    found = network.reconstruct(x)
    torch.testing.assert_close(found, expected)
    assert torch.equal(network(x), found)
    torch.testing.assert_close(network.loss(x), (found - x).abs().flatten(1).mean(dim=1))


def test_both_train_where_algorithms_must_be_deterministic() -> None:
    """As in a worker with a GPU."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        for network in (build(GREY_28), ConvolutionalAutoencoder(GREY_28, 0, 1)):
            torch.autograd.backward(network.loss(noise(2, *GREY_28)).sum())
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("ratio", [1.0, -0.1, 1.5, math.nan, 0.8])
def test_mask_ratios_out_of_range(ratio: float) -> None:
    network, x = build(), noise(2, 1, 8, 8)
    message = rf"mask_ratio={ratio:g}: must lie in \[0, 1\) and .* the 4 patches visible"
    for call in (network.encode, network.loss):
        with pytest.raises(ExperimentError, match=message):
            call(x, ratio)
