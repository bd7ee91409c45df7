"""Tokenizers of the library `tokenizers`, pretrained or trained on the data.

Networks get token ids in which 0 is padding, as of words: the tokenizer's own padding id and 0
change places (`Dataset.padding`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
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
        from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

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
            found.decoder = decoders.WordPiece(cleanup=False)
            found.add_special_tokens([*SPECIAL])
        else:
            found = tokenizers.Tokenizer(models.BPE())
            found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
            found.decoder = decoders.ByteLevel()
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

    One that is trained is trained on `texts`.

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


def save(json: str, padding: int, folder: Path) -> None:
    """Write a tokenizer as transformers reads it, unless the folder has one of the same tokens."""
    from transformers import PreTrainedTokenizerFast

    found, path = _read(json), folder / "tokenizer.json"
    if path.exists() and vocabulary(path.read_text("utf-8")) == vocabulary(json):
        return
    known = {
        f"{word[1:-1].lower()}_token": word for word in SPECIAL[1:] if found.token_to_id(word)
    }
    known["pad_token"] = found.id_to_token(padding)
    PreTrainedTokenizerFast(tokenizer_object=found, **known).save_pretrained(folder)


def around(json: str) -> tuple[int, int]:
    """How many tokens the tokenizer adds before and after a text."""
    own = [not marked for marked in _read(json).encode("a").special_tokens_mask]
    return (own.index(True), own[::-1].index(True)) if any(own) else (0, 0)


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


def words_of(json: str, padding: int, rows: NDArray[Any]) -> NDArray[np.int64]:
    """(N, L) which word of its document each token (N, L) is of, counted from 0; −1 for padding.

    A token goes on with the word before it if it begins with "##" (WordPiece); or, of a vocabulary
    whose words begin with "Ġ" (bytes) or "▁" (SentencePiece), with a letter or digit, or a byte
    of one. None goes on with a special token, such as [CLS], nor with a shortcut.
    """
    known, special = _going_on(json, padding)
    own, there = np.minimum(rows, len(known) - 1), rows < len(known)  # but for shortcuts
    goes_on = known[own] & there
    goes_on[:, 1:] &= (there & ~special[own])[:, :-1]
    goes_on[:, :1] = False
    found: NDArray[np.int64] = np.where(rows == 0, -1, np.cumsum(~goes_on, axis=1) - 1)
    return found


@lru_cache(maxsize=2)
def _going_on(json: str, padding: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Of each token, whether it goes on with a word, and whether it is a special one."""
    vocabulary, found = words(json, padding), _read(json)
    added = found.get_added_tokens_decoder().values()
    names = {token.content for token in added if token.special}
    special = np.array([word in names for word in vocabulary])
    if prefix := getattr(found.model, "continuing_subword_prefix", None):
        return np.array([word.startswith(prefix) for word in vocabulary]), special
    marks = [mark for mark in "Ġ▁" if any(word.startswith(mark) for word in vocabulary)]
    goes_on = [
        bool(marks)
        and not word.startswith(tuple(marks))
        and (word[:1].isalnum() or ("Ġ" in marks and not word[:1].isascii()))
        for word in vocabulary
    ]
    return np.array(goes_on) & ~special, special


def read(json: str, padding: int, ids: Sequence[int]) -> str:
    """The text of some tokens: "tokenizer" of `token` and `##izer`."""
    own = [padding if i == 0 else 0 if i == padding else i for i in ids]
    return str(_read(json).decode(own, skip_special_tokens=False)).strip()
