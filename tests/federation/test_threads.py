"""Threads of numerical libraries, whose number can change the last bits."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits

from fedsim.federation import engine, limit_threads


def threads() -> set[int]:
    return {one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"}


def test_limits_hold_until_they_are_undone() -> None:
    with threadpool_limits(3, user_api="blas"):
        before = torch.get_num_threads(), threads()
        for count in (1, 2):  # the libraries are known the second time
            undo = limit_threads(count)
            assert torch.get_num_threads() == count
            assert threads() == {count}
            inner = limit_threads(1)
            assert threads() == {1}
            inner()
            assert threads() == {count}
            undo()
            assert (torch.get_num_threads(), threads()) == before


def test_libraries_are_looked_for_again_after_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_threads(1)()
    known = engine._libraries(len(sys.modules))
    assert engine._libraries(len(sys.modules)) is known
    monkeypatch.setitem(sys.modules, "with_threads_of_its_own", ModuleType("module"))
    limit_threads(1)()
    assert engine._libraries(len(sys.modules)) is not known
