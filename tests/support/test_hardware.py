"""What decides how nodes round, and what is refused for it."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedsim.errors import RunError
from fedsim.federation.ray_engine import compare
from fedsim.support.hardware import INSTRUCTION_SETS, Arithmetic, hardware

HEAD = Arithmetic("head", "cpu", "Xeon", "AVX512")


def test_what_this_process_rounds_by_is_what_manifests_say() -> None:
    here, known = Arithmetic.of(torch.device("cpu")), hardware()
    assert (here.device, here.card) == ("cpu", None)
    assert (here.processor, here.capability) == (known["processor"], known["capability"])
    assert pickle.loads(pickle.dumps(here)) == here


def test_variables_that_choose_instructions_are_part_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in INSTRUCTION_SETS:
        monkeypatch.delenv(name, raising=False)
    assert hardware()["variables"] == {}
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert hardware()["variables"] == {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2"}
    assert Arithmetic.of(torch.device("cpu")).variables == "ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2"


def test_nodes_of_one_kind_are_taken_whatever_their_names() -> None:
    assert compare(HEAD, replace(HEAD, host="other"), mixed=False) == []


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"processor": "EPYC"}, "EPYC, AVX512"),
        ({"capability": "AVX2"}, "Xeon, AVX2"),
        ({"variables": "MKL_CBWR=AVX2"}, "Xeon, AVX512, MKL_CBWR=AVX2"),
        ({"card": "H100"}, "Xeon, AVX512, H100"),
    ],
)
def test_what_rounds_differently_is_refused_unless_asked_for(
    other: dict[str, Any], words: str
) -> None:
    there = replace(HEAD, host="worker", **other)
    with pytest.raises(RunError) as refused:
        compare(HEAD, there, mixed=False)
    assert str(refused.value) == (
        f"head (Xeon, AVX512) and worker ({words}) round differently; results would depend on "
        "who computes what. Use nodes of one kind, or set engine.mixed_processors=true if results "
        "need not be reproducible to the bit"
    )
    (told,) = compare(HEAD, there, mixed=True)
    assert told.endswith(f"because nodes round differently (Xeon, AVX512; {words})")


@pytest.mark.parametrize("mixed", [False, True])
def test_processors_and_cards_never_take_turns(mixed: bool) -> None:
    with pytest.raises(RunError, match=r"compute on different devices \(cpu, cuda\)"):
        compare(HEAD, replace(HEAD, device="cuda", card="H100"), mixed)
