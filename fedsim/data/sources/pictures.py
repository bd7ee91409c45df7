"""Pictures in files, as viewers show them: in training and for explanations alike."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedsim.data.sources.files import Bytes, reading
from fedsim.support.extras import require

if TYPE_CHECKING:
    from PIL.Image import Image
    from pydicom import Dataset

PICTURES = (
    *(".bmp", ".dcm", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"),
)
DICOM = ".dcm"


def is_picture(path: Path) -> bool:
    """Whether a file's name ends like that of a picture, in capitals or not."""
    return path.suffix.lower() in PICTURES


def read_picture(path: Path, shape: tuple[int, ...]) -> Bytes:
    """A picture as viewers show it, converted and resized to a shape; see `pixels`."""
    return pixels(open_picture(path)[0], shape)


def pixels(picture: Image, shape: tuple[int, ...]) -> Bytes:
    """A picture converted to 3 channels or grey and resized to (channels, height, width)."""
    C, H, W = shape
    found = picture.convert("RGB" if C == 3 else "L").resize((W, H), 2)  # bilinear
    return np.asarray(found).reshape(H, W, C).transpose(2, 0, 1)


def open_picture(path: Path) -> tuple[Image, str]:
    """A picture as viewers show it, in mode L or RGB, and the mode that its file has.

    The mode is Pillow's, or "DICOM". See `as_shown` and `of_dicom`.

    Raises:
        DataError: it cannot be read, or it is not clear how it is shown; the message names it.
        NotInstalled: it is a DICOM file, and pydicom is missing.
    """
    if path.suffix.lower() == DICOM:
        require("pydicom", f"{path}: reading DICOM files")
        with reading(path):
            return of_dicom(path), "DICOM"
    from PIL import Image

    with reading(path), Image.open(path) as image:
        return as_shown(image), image.mode


def as_shown(image: Image) -> Image:
    """A picture as viewers show it: upright, on a white ground, in sRGB with 8 bits a channel.

    It is in mode L or RGB.

    Raises:
        ValueError: it has several frames, or pixels whose black and white are unknown.
    """
    from PIL import Image, ImageOps

    frames = getattr(image, "n_frames", 1)
    if image.format != "MPO":  # a phone's picture, and others made of it
        _check_frames(frames)
    shown, profile = ImageOps.exif_transpose(image), image.info.get("icc_profile")
    if image.mode[0] in "IF":
        # Of TIFF's tags, 258 are the bits, and 262 is 1 if 0 is black.
        tags = getattr(image, "tag_v2", {258: (16,), 262: 1})
        deep = image.mode.startswith("I;16") or image.format == "PPM"
        deep &= (tags.get(258), tags.get(262)) == ((16,), 1)
        if not deep or "transparency" in image.info:
            raise ValueError(
                f"it has pixels of type {image.mode}, for which black and white are not defined; "
                "save it with 8 bits a channel"
            )
        shown = Image.fromarray((np.asarray(shown) >> 8).astype(np.uint8))
    if shown.has_transparency_data:
        ground = Image.new("RGBA", shown.size, "white")
        shown = Image.alpha_composite(ground, shown.convert("RGBA")).convert("RGB")
    elif shown.mode not in ("L", "CMYK"):
        shown = shown.convert("L" if shown.mode == "1" else "RGB")
    shown = _in_srgb(shown, profile) if profile else shown
    return shown if shown.mode == "L" else shown.convert("RGB")


def _check_frames(count: int) -> None:
    if count > 1:
        raise ValueError(f"it has {count} frames or pages; save one as a picture of its own")


def _in_srgb(picture: Image, profile: bytes) -> Image:
    """A picture in another colour space, as its profile says, in sRGB."""
    from PIL import ImageCms

    try:
        own = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        same = "sRGB" in ImageCms.getProfileDescription(own)
        known = {"L": "GRAY", "RGB": "RGB ", "CMYK": "CMYK"}[picture.mode]
        if same or own.profile.xcolor_space != known:
            return picture
        srgb = ImageCms.createProfile("sRGB")
        found = ImageCms.profileToProfile(picture, own, srgb, outputMode="RGB")
    except (OSError, ImageCms.PyCMSError):  # damaged: viewers ignore it
        return picture
    return found or picture


def of_dicom(path: Path) -> Image:
    """The picture of a DICOM file, in mode L or RGB with 8 bits a channel.

    Grey values are first in the units of the modality (slope and intercept, or its table), then
    the file's first window of them is shown, or its VOI table, from black to white (DICOM PS3.3,
    C.11.1 and C.11.2). Without a window, the whole range is: from the least to the greatest value
    in the picture except padding; or 0 to 255 if values have 8 bits. MONOCHROME1 is inverted.

    Raises:
        ValueError: it has no pixels, several frames, or pixels that cannot be decoded here.
    """
    import pydicom
    from PIL import Image
    from pydicom.errors import InvalidDicomError
    from pydicom.pixels import apply_color_lut, pixel_array

    try:
        file = pydicom.dcmread(path)
    except InvalidDicomError:
        raise ValueError("it is no DICOM file: 'DICM' is not after its first 128 bytes") from None
    _check_pixels(file)
    stored = pixel_array(file)
    kind = file.PhotometricInterpretation
    if kind.startswith("MONOCHROME"):
        shown = _window(stored, file)
        return Image.fromarray(_bytes(1 - shown if kind == "MONOCHROME1" else shown))
    bits = file.BitsStored
    if kind == "PALETTE COLOR":
        stored = apply_color_lut(stored, file)
        bits = 8 * stored.itemsize
    return Image.fromarray(_bytes(stored / (2.0**bits - 1)))


def _bytes(shown: NDArray[np.float64]) -> Bytes:
    """Bytes from 0 for 0 (black) to 255 for 1 (white)."""
    return np.rint(255 * shown.clip(0, 1)).astype(np.uint8)


def _check_pixels(file: Dataset) -> None:
    from pydicom.pixels import get_decoder

    if not any(f"{kind}PixelData" in file for kind in ("", "Float", "DoubleFloat")):
        raise ValueError("it has no pixels; leave it out of the pictures")
    _check_frames(int(file.get("NumberOfFrames") or 1))
    if "SharedFunctionalGroupsSequence" in file:  # of a frame in several groups, window and all
        raise ValueError("it is an enhanced image; convert it to a classic one, of one frame")
    syntax = file.file_meta.TransferSyntaxUID
    decoder = get_decoder(syntax) if syntax.is_encapsulated else None
    if decoder is not None and not decoder.is_available:
        raise ValueError(
            f"its pixels are compressed ({syntax.name}), and no decoder is installed; pydicom "
            f"takes any of: {'; '.join(decoder.missing_dependencies)}"
        )


def _window(stored: NDArray[Any], file: Dataset) -> NDArray[np.float64]:
    """Grey values (H, W) as shown by default: 0 is the window's lower end, 1 its upper end."""
    from pydicom.pixels import apply_modality_lut, apply_voi

    values = apply_modality_lut(stored, file).astype(np.float64)
    if file.get("VOILUTSequence"):
        bits = file.VOILUTSequence[0].LUTDescriptor[2]
        return apply_voi(np.rint(values).astype(np.int64), file) / (2.0**bits - 1)
    centre, width = (_first(file.get(name)) for name in ("WindowCenter", "WindowWidth"))
    if centre is not None and width is not None:
        return _in_window(values, centre, width, file.get("VOILUTFunction") or "LINEAR")
    bits = file.get("BitsStored", 32)
    if bits <= 8 and not file.PixelRepresentation and "ModalityLUTSequence" not in file:
        return stored / (2.0**bits - 1)
    padding = file.get("PixelPaddingValue")
    inside = values[stored != padding] if padding is not None else values
    low, high = (inside.min(), inside.max()) if inside.size else (0.0, 0.0)
    return (values - low) / (high - low or 1)


def _first(given: Any) -> float | None:
    """A number, the first of several, or None if there is none."""
    numbers = [given] if isinstance(given, int | float) else list(given or ())
    return float(numbers[0]) if numbers else None


def _in_window(
    values: NDArray[np.float64], centre: float, width: float, function: str
) -> NDArray[np.float64]:
    """DICOM PS3.3, C.11.2.1.2 and C.11.2.1.3, with 0 as the least output and 1 as the greatest."""
    if width < 1 and (function == "LINEAR" or width <= 0):
        raise ValueError(f"its window is {width:g} wide, which shows nothing")
    if function == "SIGMOID":
        return 1 / (1 + np.exp(-4 * (values - centre) / width))
    if function == "LINEAR_EXACT":
        return (values - centre) / width + 0.5
    if width == 1:
        return (values > centre - 0.5).astype(np.float64)
    return (values - (centre - 0.5)) / (width - 1) + 0.5
