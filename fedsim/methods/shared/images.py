"""What methods of images have in common."""

from __future__ import annotations

from fedsim.data import Dataset
from fedsim.errors import ExperimentError


def check_images(name: str, does: str, dataset: Dataset, otherwise: str = "") -> None:
    """Reject data that are no images, by what the method does with images."""
    if len(dataset.shape) != 3:
        raise ExperimentError(
            f"method.name={name} {does} images (channels, height, width); the data's inputs have "
            f"shape {dataset.shape}{otherwise}"
        )
