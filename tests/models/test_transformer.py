"""Transformers of images and documents, against attention that is written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from networks import token_rows
from torch import nn

from experiments import examples
from fedsim import Run
from fedsim.models import Classifier, TextModel, models
from fedsim.models.transformer import SelfAttention

SMALL: dict[str, Any] = {"dim": 8, "depth": 2, "heads": 2}
V = 9


def reader(**fields: Any) -> Classifier:
    torch.manual_seed(0)
    model = models.parse({"name": "transformer", **SMALL, **fields})
    assert isinstance(model, TextModel)
    network = model.build_text(torch.randn(V, 3), torch.ones(V, dtype=torch.bool), 4)
    assert isinstance(network, Classifier)
    return network.eval()


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_attention_is_that_of_pytorch(heads: int) -> None:
    torch.manual_seed(0)
    ours, theirs = SelfAttention(8, heads), nn.MultiheadAttention(8, heads, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.qkv.weight)
        theirs.in_proj_bias.zero_()
        theirs.out_proj.load_state_dict(ours.projection.state_dict())
    x, absent = torch.randn(3, 5, 8), torch.arange(5) >= torch.tensor([5, 2, 1])[:, None]
    expected, _ = theirs(x, x, x, key_padding_mask=absent)
    torch.testing.assert_close(ours(x, absent), expected)


NETWORKS = {embeddings: reader(embeddings=embeddings) for embeddings in ("learned", "vectors")}


@pytest.mark.parametrize("embeddings", NETWORKS)
@given(
    documents=st.lists(st.lists(st.integers(1, V - 1), max_size=6), min_size=1, max_size=4),
    padding=st.integers(0, 5),
)
@examples(40)
def test_padding_is_not_read(embeddings: str, documents: list[list[int]], padding: int) -> None:
    """Nor are other documents, and an empty document is one, too."""
    network = NETWORKS[embeddings]
    with torch.no_grad():
        together = network(token_rows(documents, max(map(len, documents)) + padding))
        for one, words in zip(together, documents, strict=True):
            torch.testing.assert_close(one, network(token_rows([words]))[0], rtol=1e-4, atol=1e-5)


def test_the_order_of_words_matters() -> None:
    one, other = NETWORKS["learned"](token_rows([[2, 3, 4], [4, 3, 2]]))
    assert not torch.allclose(one, other)


@pytest.mark.night
def test_documents_are_learnt(finish: Callable[..., Run]) -> None:
    done = finish(
        data={
            **{"name": "planted_reviews", "reviews": 200, "test_reviews": 50, "others": 0},
            "tokenizer": {"kind": "wordpiece"},
        },
        partition={"kind": "iid", "clients": 4},
        model={"name": "transformer", **SMALL, "dim": 16},
        train={
            **{"rounds": 6, "local_epochs": 2, "batch_size": 16},
            "optimizer": {"name": "adam", "lr": 0.01},
        },
        engine={"kind": "local", "clients_per_step": 4},
    )
    assert done.rounds["accuracy"].iloc[-1] > 0.75
