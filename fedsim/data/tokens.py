"""Tokenizers of the library `tokenizers`, pretrained or trained on the data.

Networks get token ids in which 0 is padding, as of words: the tokenizer's own padding id and 0
change places (`Dataset.padding`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedsim.config.pretrained import Pretrained, reading
from fedsim.config.registry import Config
from fedsim.errors import DataError
from fedsim.support.extras import require

FILES = ("tokenizer.json", "vocab.*", "*.model")  # one of them; else it would have no vocabulary
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")  # of those that are trained here


class TrainedTokenizer(Config):
    """A tokenizer that is trained on the training texts, before these are dealt out to clients.

    A document begins with the token [CLS] and ends with [SEP].

    Args:
        kind: `wordpiece`, as of BERT, in lower case; or `bpe`, of bytes, as of GPT-2.
        size: most tokens of the vocabulary.
    """

    kind: Literal["wordpiece", "bpe"]
    size: int = Field(8000, ge=300)

    def on(self, texts: Sequence[str]) -> Any:
        """A `tokenizers.Tokenizer`."""
        require("tokenizers", f"data.tokenizer.kind={self.kind}")
        import tokenizers
        from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

        settings: dict[str, Any] = {"vocab_size": self.size, "show_progress": False}
        if self.kind == "wordpiece":
            normalizer, parts = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
            plain = map(normalizer.normalize_str, texts)
            words = {word for text in plain for word, _ in parts.pre_tokenize_str(text)}
            # The trainer numbers letters within words in a random order, which decides ties
            # between pairs; unless they are listed.
            letters = [f"##{letter}" for letter in sorted({c for word in words for c in word[1:]})]
            learner = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
            learner.normalizer, learner.pre_tokenizer = normalizer, parts
            trainer = trainers.WordPieceTrainer(special_tokens=[*SPECIAL, *letters], **settings)
            learner.train_from_iterator(texts, trainer)
            vocabulary = learner.get_vocab()
            found = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
            found.normalizer, found.pre_tokenizer = normalizer, parts
            found.add_special_tokens([*SPECIAL])
        else:
            found = tokenizers.Tokenizer(models.BPE())
            found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
            alphabet = pre_tokenizers.ByteLevel.alphabet()
            found.train_from_iterator(
                texts,
                trainers.BpeTrainer(
                    initial_alphabet=alphabet, special_tokens=[*SPECIAL], **settings
                ),
            )
        found.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        return found


TokenizerChoice = Pretrained | TrainedTokenizer


def tokenizer(choice: TokenizerChoice, texts: Sequence[str], length: int) -> tuple[str, int]:
    """The JSON of a tokenizer that truncates documents to `length` tokens, and its padding's id.

    Args:
        texts: what one that is trained is trained on.

    Raises:
        DataError: there is none, or it cannot be used here.
    """
    if isinstance(choice, TrainedTokenizer):
        found, padding = choice.on(texts), 0
    else:
        with reading("data.tokenizer", choice) as folder:
            from transformers import AutoTokenizer

            if not any(path for pattern in FILES for path in folder.glob(pattern)):
                raise DataError(f"data.tokenizer={choice}: has no tokenizer.json")
            loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if not loaded.is_fast:
            raise DataError(
                f"data.tokenizer={choice}: {type(loaded).__name__} is not a fast tokenizer, "
                "of the library tokenizers"
            )
        if loaded.pad_token_id is None:
            raise DataError(
                f"data.tokenizer={choice}: has no token for padding; set its pad_token, and save "
                "it again"
            )
        found, padding = loaded.backend_tokenizer, loaded.pad_token_id
    own = found.num_special_tokens_to_add(False)
    if length <= own:
        raise DataError(
            f"data.length={length}: leaves no token of a text beside the {own} that the tokenizer "
            "adds to each"
        )
    found.no_padding()
    found.enable_truncation(length)
    return found.to_str(), padding


@lru_cache(maxsize=2)
def _read(json: str) -> Any:
    require("tokenizers", "data.tokenizer")
    import tokenizers

    return tokenizers.Tokenizer.from_str(json)


def vocabulary(json: str) -> dict[str, int]:
    """The tokenizer's own id of each token."""
    found: dict[str, int] = _read(json).get_vocab(with_added_tokens=True)
    return found


def words(json: str, padding: int) -> tuple[str, ...]:
    """The token of each id, "" for padding."""
    ids = {i: token for token, i in vocabulary(json).items()}
    found = [ids.get(i, f"<{i}>") for i in range(max(ids) + 1)]
    found[padding], found[0] = found[0], ""
    return tuple(found)


def encode(json: str, padding: int, texts: Sequence[str]) -> NDArray[np.int32]:
    """(N, L) the token ids of texts, as long as the longest; 0 follows the end of a text."""
    found = _read(json).encode_batch(texts)
    documents = [[i or padding for i in one.ids if i != padding] for one in found]
    rows = np.zeros((len(texts), max(map(len, documents), default=0)), np.int32)
    for row, ids in zip(rows, documents, strict=True):
        row[: len(ids)] = ids
    return rows


def spread(json: str, words: Sequence[str], marks: Sequence[bool]) -> list[bool]:
    """Which tokens are of marked words of a text of words with single spaces between them."""
    text, word = " ".join(words), np.cumsum([c == " " for c in " ".join(words)])
    offsets = _read(json).encode(text).offsets
    return [end > start and bool(marks[word[end - 1]]) for start, end in offsets]
