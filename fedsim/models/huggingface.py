"""Networks of Hugging Face's library `transformers`, from a checkpoint or random."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import model_validator
from torch import Tensor, nn

from fedsim.config.pretrained import Pretrained, reading
from fedsim.config.registry import located, unfit
from fedsim.data import Dataset, DataSpec, tokens
from fedsim.errors import DataError, ExperimentError
from fedsim.models.libraries import LibraryModel, normalised
from fedsim.models.model import Classifier, image_shape, models
from fedsim.models.transformer import longest

CLASSES = {
    "sequence_classification": "AutoModelForSequenceClassification",
    "image_classification": "AutoModelForImageClassification",
}
# Files of a checkpoint beside its weights and config.json, which say how inputs are read.
COPIED = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "preprocessor_config.json")


class Body(nn.Module):
    """What a network of transformers computes for its last linear layer, called `head`.

    An identity is in place of that layer. Weights have their names in the checkpoint, after
    `model.`. Rows of documents have 0 for `padding`, the tokenizer's id of it.
    """

    def __init__(self, model: nn.Module, padding: int | None, head: str) -> None:
        super().__init__()
        self.model, self.padding, self.head = model, padding, head

    def forward(self, x: Tensor) -> Tensor:
        """(B, D) of images (B, C, H, W), or of documents (B, L)."""
        if self.padding is None:
            return self.model(pixel_values=x).logits
        x = x[:, : longest(x)]
        ids = x.long()
        if self.padding:
            ids = torch.where(x == 0, self.padding, torch.where(x == self.padding, 0, ids))
        # An empty document is a token of padding.
        seen = torch.cat([torch.ones_like(ids[:, :1]), (x[:, 1:] != 0).long()], dim=1)
        return self.model(input_ids=ids, attention_mask=seen).logits


@models.register
class HuggingFaceModel(LibraryModel):
    """A network of Hugging Face's library `transformers`, to be trained as a whole.

    Documents need the checkpoint's own tokenizer (`data.tokenizer`). Images must have the size
    that the checkpoint takes; they are normalised as its preprocessor_config.json says, instead of
    by the data set's own mean, or by the latter if there is no such file.

    Args:
        checkpoint: a folder that `save_pretrained` has written; `package:module/folder`, a folder
            within an installed package; or a name on the Hub. Weights are read from safetensors
            alone, and no code that comes with them is executed.
        task: of documents `sequence_classification`, of images `image_classification`.
        init: initial weights: those of the `checkpoint`; or `random`, for which a folder with a
            config.json is enough.
        head: the last linear layer: `new`, drawn from the run's seed, whatever the checkpoint has
            there; or that of the `checkpoint`, whose classes must be the data's in their order.
    """

    inputs: ClassVar[str] = "either"
    explainer: ClassVar[str] = "occlusion"

    name: str = "hf"
    checkpoint: Pretrained
    task: Literal["sequence_classification", "image_classification"]
    init: Literal["checkpoint", "random"] = "checkpoint"
    head: Literal["new", "checkpoint"] = "new"

    @model_validator(mode="after")
    def _has_a_head(self) -> HuggingFaceModel:
        if self.head == "checkpoint" and self.init == "random":
            problem = unfit("with init=random the head is new as well")
            raise located(type(self).__name__, "head", problem, self.head)
        return self

    def files(self) -> tuple[Path, ...]:
        with reading("model.checkpoint", self.checkpoint) as folder:
            weights = folder.glob("*.safetensors") if self.init == "checkpoint" else ()
            return (folder / "config.json", *sorted(weights))

    def takes(self, data: Dataset) -> Dataset:
        with reading("model.checkpoint", self.checkpoint) as folder:
            if self.task == "sequence_classification":
                if data.tokenizer and self.init == "checkpoint":
                    self._check_tokenizer(folder, data)
                return data
            path = folder / "preprocessor_config.json"
            how = json.loads(path.read_text("utf-8")) if path.exists() else None
        if how is None:
            return data
        key = f"model.checkpoint={self.checkpoint}"
        if how.get("do_flip_channel_order"):
            raise ExperimentError(f"{key}: reads blue, green, red, and the data are not turned")
        mean, std = how.get("image_mean"), how.get("image_std")
        if not how.get("do_normalize", True):
            mean, std = [0.0], [1.0]
        if not (mean and std):
            raise DataError(f"{key}: its preprocessor_config.json lacks image_mean or image_std")
        # It reads (255·r·p − o − m)/s of pixels p in [0, 1].
        scale = 255 * how.get("rescale_factor", 1 / 255) if how.get("do_rescale", True) else 255.0
        offset = float(how.get("rescale_offset", False))
        own = [(m + offset) / scale for m in mean], [s / scale for s in std]
        return normalised(data, key, *own)

    def build_for(self, data: DataSpec, outputs: int) -> nn.Module:
        of_texts = self.task == "sequence_classification"
        if of_texts != (data.embeddings is not None):
            found = "documents" if data.embeddings is not None else "numbers"
            raise ExperimentError(f"model.task={self.task}: the data are {found}")
        if not of_texts:
            image_shape(self.name, data.shape, smallest=1)
        elif data.padding is None:
            raise ExperimentError(
                f"model.name={self.name} reads the tokens of its checkpoint's tokenizer, and the "
                "data are words; set data.tokenizer"
            )
        with reading("model.checkpoint", self.checkpoint) as folder:
            model = self._load(folder, outputs, data.classes)
        model.config.use_cache = False  # of past tokens, as generation needs
        if data.embeddings is not None:
            self._check_vocabulary(len(data.embeddings[0]), model)
            model.config.pad_token_id = data.padding  # by which some find the last token
        if not (heads := self._heads(model, outputs)):
            raise ExperimentError(
                f"model.checkpoint={self.checkpoint}: {type(model).__name__} does not end in a "
                "linear layer"
            )
        name, head = heads[-1]
        if self.head == "new":
            head.reset_parameters()
        model.set_submodule(name, nn.Identity())
        classifier = Classifier(Body(model, data.padding if of_texts else None, name), head)
        if of_texts:
            self._check_length(classifier, data.shape[0])
        return classifier.train()

    def save(self, network: nn.Module, folder: Path, data: Dataset) -> None:
        body: Any = network.get_submodule("features")
        model = body.model
        model.set_submodule(body.head, network.get_submodule("head"))
        if data.classes:
            model.config.id2label = dict(enumerate(data.classes))
            model.config.label2id = {name: c for c, name in enumerate(data.classes)}
        with reading("model.checkpoint", self.checkpoint) as source:
            model.save_pretrained(folder)
            for file in COPIED:
                if (source / file).exists():
                    shutil.copy(source / file, folder)

    def _load(self, folder: Path, outputs: int, classes: Sequence[str]) -> Any:
        import transformers

        family: Any = getattr(transformers, CLASSES[self.task])
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        named = [str(name).lower() for _, name in sorted(config.id2label.items())]
        given, config.num_labels = config.num_labels, outputs
        usual: dict[str, Any] = {"attn_implementation": "eager"}  # the same bits, and hooks
        if self.init == "random":
            return family.from_config(config, **usual).float()
        if self.head == "checkpoint" and given != outputs:
            raise DataError(
                f"model.head=checkpoint: the checkpoint has {given} classes, the data {outputs}"
            )
        ours = [name.lower() for name in classes]
        if self.head == "checkpoint" and named != ours and sorted(named) == sorted(ours):
            raise DataError(
                f"model.head=checkpoint: the checkpoint's classes are {', '.join(named)}, and the "
                f"data's {', '.join(ours)}, in another order"
            )
        model, found = family.from_pretrained(
            folder,
            config=config,
            **usual,
            dtype=torch.float32,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
        heads = tuple(f"{name}." for name, _ in self._heads(model, outputs))
        below = model.base_model_prefix + "."
        mismatched = {name for name, *_ in found["mismatched_keys"]}
        for name in sorted(mismatched | {*found["missing_keys"]}):
            if name.startswith(below) and ".pooler." not in name:
                raise DataError(
                    f"model.checkpoint={self.checkpoint}: has no weights '{name}' of the shape "
                    "that its config.json says; without weights of a checkpoint, set init=random"
                )
            if name.startswith(heads) and self.head == "checkpoint":
                raise DataError(f"model.head=checkpoint: the checkpoint has no weights '{name}'")
        return model

    @staticmethod
    def _heads(model: Any, outputs: int) -> list[tuple[str, nn.Linear]]:
        """The linear layers that may be the last, outside of what transformers calls the base."""
        return [
            (name, module)
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
            and module.out_features == outputs
            and not name.startswith(model.base_model_prefix + ".")
        ]

    def _check_vocabulary(self, count: int, model: Any) -> None:
        own = model.get_input_embeddings().num_embeddings
        if count > own or (self.init == "checkpoint" and count < 0.9 * own):  # some are spare
            raise ExperimentError(
                f"data.tokenizer: has {count:,} tokens, and model.checkpoint={self.checkpoint} "
                f"{own:,}: a tokenizer of another vocabulary, or a shortcut's own words"
            )

    def _check_tokenizer(self, folder: Path, data: Dataset) -> None:
        """Refuse a tokenizer with other tokens than that of the checkpoint's folder, if any."""
        if not any(path for pattern in tokens.FILES for path in folder.glob(pattern)):
            return
        from transformers import AutoTokenizer

        own = AutoTokenizer.from_pretrained(folder, trust_remote_code=False).get_vocab()
        given = tokens.vocabulary(data.tokenizer)
        for token, i in sorted(own.items(), key=lambda item: item[1]):
            if given.get(token) != i:
                raise ExperimentError(
                    f"data.tokenizer: is not that of model.checkpoint={self.checkpoint}, in which "
                    f"{token!r} is token {i}; set data.tokenizer={self.checkpoint}"
                )

    def _check_length(self, network: nn.Module, length: int) -> None:
        try:
            with torch.no_grad():
                network.eval()(torch.ones(1, length, dtype=torch.int32))
        except (IndexError, RuntimeError) as error:
            raise ExperimentError(
                f"model.checkpoint={self.checkpoint}: does not take documents of {length} tokens; "
                "lower data.length"
            ) from error
