"""Data sets of Hugging Face, by their name on the Hub or from files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, field_validator

from fedsim.config.registry import absolute, nearest
from fedsim.data.dataset import Dataset, TestFraction
from fedsim.data.source import datasets
from fedsim.data.sources import adapters
from fedsim.data.sources.files import Documents, check_labels
from fedsim.data.sources.text import TextSource
from fedsim.errors import DataError, in_one_line
from fedsim.support.extras import require

TEXTS = ("text", "sentence")  # the usual names of a column of texts
VALIDATION = ("validation", "valid", "val", "dev")  # how names of validation parts begin
NO_LABEL = -1  # in test parts whose labels are not published


@datasets.register
class HuggingFace(TextSource):
    """A data set of Hugging Face, by its name on the Hub or from files: images, features or texts.

    All columns of numbers or text that are neither inputs nor labels can be partitioned by,
    except for texts. Nothing that comes with the data is executed.

    Args:
        dataset: a folder that `save_to_disk` of the library `datasets` has written, a folder with
            Parquet files, or one such file, all of which are read without the network; otherwise
            a name on the Hub, such as `ylecun/mnist`.
        config: the configuration, of a data set that has several.
        split: the part to train on.
        test_split: the part to test on. By default `test`; if there is none, or all its labels
            are −1 as they are not published, the validation part; if there is none either,
            `test_fraction` of the examples.
        input: the column of inputs: images, texts, or lists of numbers, all of one shape; or
            several columns of numbers, the features of a table. By default `image`, `img`, `text`
            or `sentence`.
        label: the column of classes; or of numbers to predict, but not from texts.
        test_fraction: share of the examples in the test set if no part is one.
    """

    name: str = "huggingface"
    dataset: Annotated[str, Field(min_length=1)]
    config: str | None = None
    split: str = "train"
    test_split: str | None = None
    input: Annotated[str | tuple[str, ...], Field(min_length=1)] | None = None
    label: str = adapters.LABEL
    test_fraction: TestFraction = 0.2

    @field_validator("dataset")
    @classmethod
    def _make_a_path_absolute(cls, dataset: str) -> str:
        """So that a run can be resumed from another folder."""
        path = absolute(Path(dataset))
        return str(path) if path.exists() else dataset

    def load(self) -> Dataset:
        """x is uint8 or float32 (N, ...); of texts int32 (N, L) token ids."""
        parts = self._parts()
        train = self._part(parts, self.split)
        test_name, note = self._test_part(parts)
        test = self._part(parts, test_name) if test_name else None
        inputs = self._inputs(train)
        given = [part for part in (train, test) if part is not None]
        if isinstance(inputs, str) and isinstance(train.with_format(None)[0][inputs], str):
            data = self._of_texts(given, inputs)
        else:
            reading = adapters.Reading(x=inputs, y=self.label, test_fraction=self.test_fraction)
            found = adapters.read(tuple(given) if test else train, self.dataset, reading)
            assert found is not None
            data = found
            if self.tokenizer is not None:
                raise DataError("data.tokenizer: is for texts, which these inputs are not")
        return replace(data, note=note)

    def _parts(self) -> Mapping[str, Any]:
        require("datasets", f"data.name={self.name}")
        import datasets as library

        path = Path(self.dataset)
        is_path = self.dataset.startswith((".", "/", "~")) or path.suffix.lower() == ".parquet"
        if is_path and not path.exists():
            raise DataError(f"data.dataset={self.dataset}: there is no such file or folder")
        try:
            saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
            if self.config is not None and (saved or path.suffix.lower() == ".parquet"):
                raise DataError(f"data.config: {self.dataset} has no configurations; leave it out")
            if saved:
                found: Any = library.load_from_disk(self.dataset)
            elif path.suffix.lower() == ".parquet":
                found = library.load_dataset("parquet", data_files=self.dataset)
            else:
                found = library.load_dataset(self.dataset, self.config)
        except DataError:
            raise
        except Exception as error:  # of many types, also of other libraries
            advice = "; without the network, name a folder that save_to_disk has written"
            raise DataError(
                f"data.dataset={self.dataset}: cannot be loaded: {in_one_line(error)}"
                f"{'' if path.exists() else advice}"
            ) from error
        return found if isinstance(found, Mapping) else {self.split: found}

    def _part(self, parts: Mapping[str, Any], name: str) -> Any:
        if name not in parts:
            raise DataError(f"{self.dataset}: has no part '{name}'{nearest(name, parts)}")
        part = parts[name]
        if self.label not in part.features:
            known = nearest(self.label, part.features)
            raise DataError(f"{self.dataset}: has no column '{self.label}' for data.label{known}")
        if len(part) == 0:
            raise DataError(f"{self.dataset}: the part '{name}' is empty")
        return part

    def _test_part(self, parts: Mapping[str, Any]) -> tuple[str, str]:
        """The name of the part to test on, empty for none, and why it is not `test`."""
        if self.test_split is not None:
            return self.test_split, ""
        why = "there is no part 'test'"
        if self.split == "test":
            why = "the part 'test' is trained on"
        elif "test" in parts:
            labels = self._part(parts, "test").with_format(None)[self.label]
            if any(label != NO_LABEL for label in labels):
                return "test", ""
            why = "all labels of the part 'test' are −1"
        others = [name for name in parts if name.startswith(VALIDATION) and name != self.split]
        if others:
            return others[0], f"test set: the part '{others[0]}', as {why}"
        share = f"{self.test_fraction:.3g} of the part '{self.split}'"
        return "", f"test set: {share}, as {why}, and there is no validation part"

    def _inputs(self, part: Any) -> str | tuple[str, ...]:
        known = list(part.features)
        usual = [name for name in (*adapters.IMAGES, *TEXTS) if name in known]
        if self.input is None and not usual:
            raise DataError(
                f"{self.dataset}: set data.input to the column of inputs, or to the columns of "
                f"features; there are {', '.join(known)}"
            )
        inputs = self.input or usual[0]
        kind = str(getattr(part.features.get(str(inputs)), "dtype", ""))
        if isinstance(inputs, str) and kind.startswith(("float", "int", "uint")):
            inputs = (inputs,)  # a table of one feature
        for name in (inputs,) if isinstance(inputs, str) else inputs:
            if name == self.label:
                raise DataError(f"data.input: '{name}' is the column of labels, data.label")
            if name not in known:
                raise DataError(
                    f"{self.dataset}: has no column '{name}' for data.input{nearest(name, known)}"
                )
        return inputs

    def _of_texts(self, parts: list[Any], column: str) -> Dataset:
        paths = [Path(self.dataset), Path(f"{self.dataset} (test)")]
        read = [self._documents(*each, column) for each in zip(parts, paths, strict=False)]
        if len(read) == 1:
            return self._split(read[0], self.test_fraction, paths[0])
        return self._with_test_set(read[0], read[1], *paths)

    def _documents(self, part: Any, where: Path, column: str) -> Documents:
        names = getattr(part.features[self.label], "names", None)
        part = part.with_format(None)
        documents = Documents([], [])
        for i, (given, label) in enumerate(zip(part[column], part[self.label], strict=True)):
            if not isinstance(given, str):
                raise DataError(
                    f"{where}: item {i} has {given!r:.60} in column '{column}', not a text"
                )
            if not isinstance(label, str | int | np.integer) or label == NO_LABEL:
                raise DataError(
                    f"{where}: item {i} has the label {label!r:.60}; texts have classes, words or "
                    "numbers from 0 on"
                )
            documents.labels.append(str(names[label] if names else label))
            documents.texts.append(given)
        check_labels(documents.labels, f"{where}: column '{self.label}'")
        return documents
