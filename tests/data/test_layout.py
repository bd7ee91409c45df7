"""Memory layouts: torch chooses kernels by strides, and pickling for an actor resets them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from strided import LAYOUTS, Strided

from experiments import FOUR, NUMBERS, READER, REVIEWS, by_day, small_experiment
from fedsim import run

REAL = Path(os.environ.get("FEDSIM_DATA", "nowhere"))


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        (shape, layout)
        for shape in ((1, 12, 12), (3, 12, 12), (9,), (1,))
        for layout in LAYOUTS
        if shape[0] == 1 or not layout.startswith("odd")  # what has any stride is of length 1
    ],
)
def test_rows_have_the_strides_of_a_new_array(shape: tuple[int, ...], layout: str) -> None:
    data = Strided(shape=shape, layout=layout).load()
    plain = np.zeros((7, *shape), dtype=np.float32)
    for x in (data.x, data.test_x):
        assert x[np.arange(7)].strides == x[:7].strides == plain.strides


CNN, MLP = {"name": "cnn"}, {"name": "mlp", "hidden": [16]}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    layout: ({"name": "strided:Strided", "shape": shape, "layout": layout}, model)
    for shape, layout, model in (
        ((1, 12, 12), "odd_stride_of_one_channel", CNN),
        ((3, 12, 12), "channels_last", CNN),
        ((9,), "fortran", MLP),
    )
} | {"documents": (REVIEWS["data"], READER)}
BY_NIGHT = {
    "images": ({"name": "synthetic", "shape": [3, 12, 12]}, CNN),
    "a regression": (NUMBERS["data"], MLP),
    **{name: ({"name": name}, CNN) for name in ("mnist", "fashion_mnist", "cifar10")},
}


@pytest.mark.usefixtures("own_ray", "driver_here")
class TestOnRay:
    @pytest.mark.parametrize("name", by_day([*CASES, *BY_NIGHT], ("channels_last", "documents")))
    def test_one_run_here_and_one_on_an_actor_end_with_the_same_hash(
        self, tmp_path: Path, name: str
    ) -> None:
        data, model = {**CASES, **BY_NIGHT}[name]
        partition: dict[str, Any] = {**FOUR}
        if name in ("mnist", "fashion_mnist", "cifar10"):
            partition["train_fraction"] = 0.01
            if not (REAL / name).is_dir():
                pytest.skip(f"FEDSIM_DATA has no {name}")
        train = {"rounds": 2, "optimizer": {"lr": 0.02}}
        sections = {"data": data, "model": model, "partition": partition, "train": train}
        local, actor = (
            run(small_experiment(**sections, engine=engine), tmp_path).result_hash
            for engine in ({"kind": "local"}, {"kind": "ray", "actors": 1})
        )
        assert local == actor
