"""Hardware fingerprint: what this machine computes with, and how it rounds."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

# Variables by which libraries choose among instruction sets, and so round otherwise.
INSTRUCTION_SETS = (
    "ATEN_CPU_CAPABILITY",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NPY_DISABLE_CPU_FEATURES",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
)


def hardware() -> dict[str, Any]:
    """What this machine computes with."""
    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "variables": chosen_instructions(),
        "cpus": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())],
    }


@dataclass(frozen=True)
class Arithmetic:
    """What decides how a process rounds; two that are equal come to the same bits.

    Attributes:
        host: where the process is, which decides nothing.
        device: what networks are trained on, `cpu` or `cuda`.
        processor: its model.
        capability: the instruction set that torch uses of it.
        variables: that choose the instruction sets of libraries, as words.
        card: the model of the card, if one is used.
    """

    host: str = field(compare=False)
    device: str
    processor: str
    capability: str
    variables: str = ""
    card: str | None = None

    @classmethod
    def of(cls, device: torch.device) -> Arithmetic:
        """Of this process, with networks on this device."""
        return cls(
            platform.node(),
            device.type,
            _processor(),
            torch.backends.cpu.get_cpu_capability(),
            " ".join(f"{name}={value}" for name, value in chosen_instructions().items()),
            torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        )

    def __str__(self) -> str:
        words = [self.processor, self.capability, self.variables, self.card]
        return ", ".join(filter(None, words))


def chosen_instructions() -> dict[str, str]:
    """The variables that choose the instruction sets of libraries, as far as they are set."""
    return {name: os.environ[name] for name in INSTRUCTION_SETS if name in os.environ}


def _processor() -> str:
    """The model of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not on Linux
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
