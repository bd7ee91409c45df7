"""Memory layouts: torch chooses kernels by strides, and pickling for an actor resets them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from strided import LAYOUTS, Strided

from experiments import small_experiment
from fedsim import run

REAL = Path(os.environ.get("FEDSIM_DATA", "nowhere"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 12, 12), (3, 12, 12), (9,), (1,)])
def test_rows_have_the_strides_of_a_new_array(shape: tuple[int, ...], layout: str) -> None:
    if layout.startswith("odd") and shape[0] != 1:
        pytest.skip("only an axis of length 1 can have any stride")
    data = Strided(shape=shape, layout=layout).load()
    plain = np.zeros((7, *shape), dtype=np.float32)
    for x in (data.x, data.test_x):
        assert x[np.arange(7)].strides == x[:7].strides == plain.strides


@pytest.mark.usefixtures("own_ray", "driver_here")
class TestSameBits:
    @pytest.mark.parametrize(
        ("shape", "layout", "model"),
        [
            ((1, 12, 12), "odd_stride_of_one_channel", {"name": "cnn"}),
            ((3, 12, 12), "channels_last", {"name": "cnn"}),
            ((9,), "fortran", {"name": "mlp", "hidden": [16]}),
        ],
    )
    def test_own_source(
        self, tmp_path: Path, shape: tuple[int, ...], layout: str, model: dict[str, Any]
    ) -> None:
        data = {"name": "strided:Strided", "shape": shape, "layout": layout}
        self.compare(tmp_path, data=data, model=model)

    @pytest.mark.parametrize(
        ("data", "model"),
        [
            ({"name": "synthetic", "shape": [3, 12, 12]}, {"name": "cnn"}),
            ({"name": "friedman", "samples": 200}, {"name": "mlp", "hidden": [16]}),
            (
                {"name": "planted_reviews", "reviews": 20, "test_reviews": 5, "dimension": 4},
                {"name": "text_cnn", "kernels": [1, 2], "filters": 3, "hidden": 5},
            ),
        ],
        ids=lambda section: section["name"],
    )
    def test_source_without_files(
        self, tmp_path: Path, data: dict[str, Any], model: dict[str, Any]
    ) -> None:
        self.compare(tmp_path, data=data, model=model)

    @pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10"])
    def test_real_images(self, tmp_path: Path, name: str) -> None:
        if not (REAL / name).is_dir():
            pytest.skip(f"FEDSIM_DATA has no {name}")
        partition = {"kind": "iid", "clients": 4, "train_fraction": 0.01}
        self.compare(tmp_path, data={"name": name}, model={"name": "cnn"}, partition=partition)

    def compare(self, tmp_path: Path, **sections: Any) -> None:
        """One run in this process and one on an actor end with the same hash."""
        sections = {"partition": {"kind": "iid", "clients": 4}, **sections}
        train = {"rounds": 2, "optimizer": {"lr": 0.02}}
        local, actor = (
            run(small_experiment(**sections, train=train, engine=engine), tmp_path).result_hash
            for engine in ({"kind": "local"}, {"kind": "ray", "actors": 1})
        )
        assert local == actor
