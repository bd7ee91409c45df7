"""Pictures are read as viewers show them, in training and for explanations alike."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from other_data import Items
from PIL import Image, ImageCms, TiffImagePlugin
from pydicom.dataset import FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.uid import (
    ExplicitVRLittleEndian,
    JPEGBaseline8Bit,
    JPEGLSLossless,
    RLELossless,
    SecondaryCaptureImageStorage,
)

from fedsim.data import Dataset
from fedsim.data.sources.adapters import Reading, read
from fedsim.data.sources.images import Folder
from fedsim.errors import DataError
from fedsim.explain.inputs import Inputs

RNG = np.random.default_rng(0)
GRAY = np.uint8([[0, 40, 90], [130, 200, 255], [7, 8, 9]])  # what a viewer shows, (3, 3)
COLOURS = RNG.integers(0, 256, (3, 3, 3), dtype=np.uint8)
INK = np.uint8([[0, 255, 255], [255, 0, 255], [255, 255, 128]])  # on white
ALPHA = 255 - INK
INKED = np.dstack([0 * INK, 0 * INK, 0 * INK, ALPHA])
UPRIGHT = np.repeat(GRAY[:, :, None], 3, axis=2)

Write = Callable[[Path], Any]


def of(array: Any, name: str, **options: Any) -> tuple[str, Write]:
    return name, lambda path: Image.fromarray(array).save(path, **options)


def of_mode(mode: str, name: str, array: Any, **options: Any) -> tuple[str, Write]:
    return name, lambda path: Image.fromarray(array).convert(mode).save(path, **options)


def on_its_side(name: str, **options: Any) -> tuple[str, Write]:
    """As a camera writes it that was held in another way, and says so."""
    tags = Image.Exif()
    tags[274] = 6
    return of(np.ascontiguousarray(np.rot90(COLOURS)), name, exif=tags, **options)


def pgm(highest: int) -> tuple[str, Write]:
    values = np.round(GRAY / 255 * highest).astype(">u2" if highest > 255 else "u1")
    return "it.pgm", lambda path: path.write_bytes(b"P5 3 3 %d\n" % highest + values.tobytes())


def clear_colour() -> tuple[str, Write]:
    """White as a colour that a PNG names as transparent, on a black ground otherwise."""
    image = Image.fromarray(np.where(INK == 255, 77, INK).astype(np.uint8))
    return "it.png", lambda path: image.save(path, transparency=77)


def palette(name: str) -> tuple[str, Write]:
    """Black ink, and a transparent colour that is black as well."""
    image = Image.fromarray((INK == 255).astype(np.uint8), "P")
    image.putpalette([0] * 6)
    return name, lambda path: image.save(path, transparency=1)


def in_other_colours(name: str) -> tuple[str, Write]:
    """With a profile, in which a gamma of 1 makes values linear in light."""
    shown = UPRIGHT / 255.0
    light = np.where(shown <= 0.04045, shown / 12.92, ((shown + 0.055) / 1.055) ** 2.4)
    return of(np.round(light * 255).astype(np.uint8), name, icc_profile=linear_profile())


SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def linear_profile() -> bytes:
    """The profile of sRGB, its curves replaced by straight lines and its name by another."""
    profile = bytearray(SRGB)
    (count,) = struct.unpack(">I", profile[128:132])
    for k in range(count):
        tag, start, size = struct.unpack(">4sII", profile[132 + 12 * k : 144 + 12 * k])
        if tag in (b"rTRC", b"gTRC", b"bTRC"):
            profile[start : start + 12] = b"curv" + bytes(8)
        if tag == b"desc":
            at = profile.find("sRGB".encode("utf-16-be"), start, start + size)
            profile[at : at + 8] = "mine".encode("utf-16-be")
    return bytes(profile)


def dicom(array: Any, compressed: bool = False, **tags: Any) -> tuple[str, Write]:
    """Of 8 bits if the array is, or else of 16; other elements of the file are `tags`."""
    array = np.asarray(array)
    file = pydicom.Dataset()
    file.file_meta = FileMetaDataset()
    file.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    file.SOPClassUID, file.SOPInstanceUID = SecondaryCaptureImageStorage, "1.2.3"
    file.Rows, file.Columns = array.shape[:2]
    file.SamplesPerPixel = array.shape[2] if array.ndim == 3 else 1
    file.PhotometricInterpretation = "RGB" if array.ndim == 3 else "MONOCHROME2"
    file.PixelRepresentation = int(array.dtype.kind == "i")
    file.BitsAllocated = file.BitsStored = 8 * array.itemsize
    file.HighBit = file.BitsStored - 1
    file.PlanarConfiguration = 0
    file.PixelData = array.tobytes() + b"\0" * (array.nbytes % 2)
    for name, value in tags.items():
        setattr(file, name, value)
    if compressed:
        file.compress(RLELossless)

    def write(path: Path) -> None:
        with warnings.catch_warnings(action="ignore"):  # of what is wrong on purpose
            file.save_as(path, enforce_file_format=True)

    return "it.dcm", write


def table(values: Any) -> Any:
    """A table of DICOM that has these values, of 16 bits, for 0, 1, …"""
    found = pydicom.Dataset()
    found.LUTDescriptor = [len(values), 0, 16]
    found.LUTData = np.array(values, "<u2").tobytes()
    return [found]


def palette_of_dicom() -> tuple[str, Write]:
    """Indices 0 to 8, and the colour of each."""
    tags: dict[str, Any] = {"PhotometricInterpretation": "PALETTE COLOR"}
    for k, name in enumerate(("Red", "Green", "Blue")):
        tags[f"{name}PaletteColorLookupTableDescriptor"] = [9, 0, 16]
        values = COLOURS.reshape(9, 3)[:, k].astype("<u2") * 257
        tags[f"{name}PaletteColorLookupTableData"] = values.tobytes()
    return dicom(np.arange(9, dtype=np.uint8).reshape(3, 3), **tags)


def jpeg_in_dicom(picture: Image.Image) -> tuple[str, Write]:
    """As cameras of skin and eyes write them: colours are of YCbCr."""
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=100)
    kind = "YBR_FULL_422" if picture.mode == "RGB" else "MONOCHROME2"
    made = dicom(np.asarray(picture), PhotometricInterpretation=kind)
    return encoded(made, JPEGBaseline8Bit, stream.getvalue())


def encoded(made: tuple[str, Write], syntax: Any, pixels: bytes) -> tuple[str, Write]:
    """A DICOM file whose pixels are replaced by compressed ones."""

    def write(path: Path) -> None:
        made[1](path)
        file = pydicom.dcmread(path)
        file.file_meta.TransferSyntaxUID = syntax
        file.PixelData = encapsulate([pixels])
        file["PixelData"].VR = "OB"
        file.save_as(path)

    return made[0], write


def in_capitals(made: tuple[str, Write]) -> tuple[str, Write]:
    return made[0].upper(), made[1]


DEEP_GRAY = GRAY.astype(np.int16) * 2  # of 0 to 510 units
WINDOW = {"WindowCenter": 255.5, "WindowWidth": 511}  # from the least of them to the greatest
SIGMOID = np.round(255 / (1 + np.exp(-4 * (GRAY / 255.0 - 0.5))))

AS_SHOWN: dict[str, tuple[tuple[str, Write], Any, int]] = {
    # how it is written, what a viewer shows, tolerance
    "16-bit png": (of(GRAY.astype(np.uint16) * 257, "it.png"), GRAY, 0),
    "16-bit tiff": (of(GRAY.astype(np.uint16) * 257, "it.tif"), GRAY, 0),
    "16-bit tiff of a mac": (of(GRAY.astype(">u2") * 256, "it.tiff"), GRAY, 0),
    "16-bit pgm": (pgm(65535), GRAY, 0),
    "12-bit pgm": (pgm(4095), GRAY, 1),
    "1-bit png": (of(GRAY > 100, "it.png"), 255 * (GRAY > 100), 0),
    "1-bit bmp": (of(GRAY > 100, "it.bmp"), 255 * (GRAY > 100), 0),
    "colours": (of(COLOURS, "it.PNG"), COLOURS, 0),
    "gray jpeg": (of(np.full((3, 3), 90, np.uint8), "it.jpg"), np.full((3, 3), 90), 1),
    "palette": (of_mode("P", "it.png", GRAY), GRAY, 0),
    "gif": (of(GRAY, "it.gif"), GRAY, 0),
    "cmyk jpeg": (of_mode("CMYK", "it.jpg", UPRIGHT[:1, :1]), np.zeros((3, 3)), 2),
    "cmyk tiff": (of_mode("CMYK", "it.tif", COLOURS), COLOURS, 0),
    "lab": (of_mode("LAB", "it.tif", COLOURS), COLOURS, 12),
    "ink on a clear ground": (of(INKED, "it.png"), INK, 0),
    "ink on a clear ground, webp": (of(INKED, "it.webp", lossless=True, exact=True), INK, 0),
    "ink on a clear ground, tiff": (of(INKED, "it.tif"), INK, 0),
    "gray ink on a clear ground": (of(np.dstack([0 * INK, ALPHA]), "it.png"), INK, 0),
    "a clear colour": (clear_colour(), INK, 0),
    "a clear colour of a palette": (palette("it.png"), np.where(INK == 255, 255, 0), 0),
    "a clear colour of a gif": (palette("it.gif"), np.where(INK == 255, 255, 0), 0),
    "colours that are clear nowhere": (of(np.dstack([COLOURS, 0 * INK + 255]), "it.png"),
                                       COLOURS, 0),
    "colours in linear light": (in_other_colours("it.png"), UPRIGHT, 8),  # of 8 bits
    "sRGB": (of(COLOURS, "it.png", icc_profile=SRGB), COLOURS, 0),
    "a profile that is none": (of(COLOURS, "it.png", icc_profile=b"nothing"), COLOURS, 0),
    "a profile of other colours": (of(GRAY, "it.png", icc_profile=linear_profile()), GRAY, 0),
    "tiff of one page": (of(COLOURS, "it.tif", save_all=True), COLOURS, 0),
    "dicom": (dicom(GRAY), GRAY, 0),
    "dicom, named in capitals": (in_capitals(dicom(GRAY)), GRAY, 0),
    "dicom, compressed": (dicom(GRAY, compressed=True), GRAY, 0),
    "dicom, a gray jpeg": (jpeg_in_dicom(Image.new("L", (3, 3), 90)), np.full((3, 3), 90), 1),
    "dicom, a jpeg in colours": (
        jpeg_in_dicom(Image.new("RGB", (3, 3), (200, 90, 40))), np.full((3, 3, 3), (200, 90, 40)),
        2,
    ),
    "dicom in colours": (dicom(COLOURS), COLOURS, 0),
    "dicom with a palette": (palette_of_dicom(), COLOURS, 0),
    "dicom of 16 bits": (dicom(DEEP_GRAY - 1000), GRAY, 0),
    "dicom of 6 bits": (dicom(GRAY // 4, BitsStored=6, HighBit=5), GRAY, 4),
    "dicom with padding": (
        dicom(np.where(GRAY == 90, -2000, DEEP_GRAY), PixelPaddingValue=-2000),
        np.where(GRAY == 90, 0, GRAY), 0,
    ),
    "dicom with a window": (dicom(DEEP_GRAY, **WINDOW), GRAY, 0),
    "dicom with an exact window": (
        dicom(DEEP_GRAY, WindowCenter=255, WindowWidth=510, VOILUTFunction="LINEAR_EXACT"),
        GRAY, 0,
    ),
    "dicom with a soft window": (
        dicom(DEEP_GRAY, WindowCenter=255, WindowWidth=510, VOILUTFunction="SIGMOID"),
        SIGMOID, 0,
    ),
    "dicom with a narrow window": (
        dicom(GRAY, WindowCenter=90.5, WindowWidth=1), 255 * (GRAY > 90), 0,
    ),
    "dicom with two windows": (
        dicom(DEEP_GRAY, WindowCenter=[255.5, 40], WindowWidth=[511, 80]), GRAY, 0,
    ),
    "dicom with a window in units": (
        dicom(DEEP_GRAY + 1024, RescaleSlope=1, RescaleIntercept=-1024, **WINDOW), GRAY, 0,
    ),
    "dicom with a table of units": (
        dicom(GRAY, ModalityLUTSequence=table(range(0, 512, 2)), **WINDOW), GRAY, 0,
    ),
    "dicom with a table of what is shown": (
        dicom(255 - GRAY, VOILUTSequence=table(range(65535, -1, -257))), GRAY, 0,
    ),
    "dicom in which the least is white": (
        dicom(255 - GRAY, PhotometricInterpretation="MONOCHROME1"), GRAY, 0,
    ),
    "dicom with a window, in which the least is white": (
        dicom(510 - DEEP_GRAY, PhotometricInterpretation="MONOCHROME1", **WINDOW), GRAY, 0,
    ),
    "dicom of one value": (dicom(np.full((3, 3), 700, np.uint16)), np.zeros((3, 3)), 0),
    "png on its side": (on_its_side("it.png"), COLOURS, 0),
    "tiff on its side": (on_its_side("it.tif"), COLOURS, 0),
    "webp on its side": (on_its_side("it.webp", lossless=True), COLOURS, 0),
}  # fmt: skip


def folder_of(path: Path, made: tuple[str, Write]) -> Path:
    """A data set in which each class has that picture twice."""
    name, write = made
    for place in ("train/a", "train/b", "test/a"):
        (path / place).mkdir(parents=True, exist_ok=True)
        write(path / place / name)
    return path / "train" / "a" / name


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", AS_SHOWN)
def test_pictures_are_read_as_they_are_shown(tmp_path: Path, kind: str, channels: Any) -> None:
    made, shown, tolerance = AS_SHOWN[kind]
    path = folder_of(tmp_path, made)
    data = folder(tmp_path, channels)
    expected = np.asarray(shown, np.uint8)
    if expected.ndim == 2 and channels == 3:
        expected = np.repeat(expected[..., None], 3, axis=2)
    elif channels == 1:
        expected = np.asarray(Image.fromarray(expected).convert("L"))[..., None]
    found = data.x[0].transpose(1, 2, 0)
    np.testing.assert_allclose(found.astype(int), expected.astype(int), atol=tolerance)
    in_place = folder(tmp_path, channels, in_place=True)
    np.testing.assert_array_equal(np.asarray(in_place.x), data.x)
    np.testing.assert_array_equal(Inputs.of_file(data, path).x, data.x[:1])


def folder(path: Path, channels: Any, **fields: Any) -> Dataset:
    return Folder(path=path, size=3, channels=channels, **fields).load()


def test_a_jpeg_on_its_side(tmp_path: Path) -> None:
    wide = np.zeros((40, 80, 3), np.uint8)
    wide[:, 40:] = 255  # white on the right
    tags = Image.Exif()
    tags[274] = 6  # to be turned by 90° clockwise: white below
    path = folder_of(tmp_path, of(wide, "it.jpg", exif=tags))
    data = Folder(path=tmp_path, size=8, channels=1).load()
    assert data.x[0, 0, 0].max() < 5
    assert data.x[0, 0, 7].min() > 250
    found = Inputs.of_file(data, path)
    np.testing.assert_array_equal(found.x, data.x[:1])
    assert found.notes == ("it.jpg: 40×80 RGB, resized to 8×8 gray",)


def test_pictures_of_a_phone(tmp_path: Path) -> None:
    """MPO holds the picture and others that were made of it; viewers show the first."""
    image, other = Image.new("RGB", (16, 16), "white"), Image.new("RGB", (16, 16))
    path = folder_of(
        tmp_path,
        ("it.jpg", lambda path: image.save(path, "MPO", save_all=True, append_images=[other])),
    )
    assert folder(tmp_path, 3).x.min() > 250
    assert Inputs.of_file(folder(tmp_path, 3), path).x.min() > 250


def frames(name: str, **options: Any) -> tuple[str, Write]:
    images = [Image.fromarray(COLOURS), Image.fromarray(255 - COLOURS)]
    options |= {"save_all": True, "append_images": images[1:]}
    return name, lambda path: images[0].save(path, **options)


def of_bits(bits: int, photometric: int = 1) -> tuple[str, Write]:
    """A 16-bit TIFF whose header says something else of it."""
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    tags[262] = photometric

    def write(path: Path) -> None:
        stream = io.BytesIO()
        Image.fromarray(GRAY.astype(np.uint16)).save(stream, "TIFF", tiffinfo=tags)
        content = stream.getvalue()
        old, new = (struct.pack("<HHIHH", 258, 3, 1, b, 0) for b in (16, bits))
        assert old in content
        old_sign, new_sign = (struct.pack("<HHIHH", 262, 3, 1, p, 0) for p in (1, photometric))
        path.write_bytes(content.replace(old, new).replace(old_sign, new_sign))

    return "it.tif", write


def sixteen_bits_with_a_clear_value() -> tuple[str, Write]:
    def chunk(name: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + check

    rows = b"".join(b"\0" + row.tobytes() for row in GRAY.astype(">u2"))
    content = b"\x89PNG\r\n\x1a\n" + b"".join(
        chunk(*pair)
        for pair in (
            (b"IHDR", struct.pack(">IIBBBBB", 3, 3, 16, 0, 0, 0, 0)),
            (b"tRNS", struct.pack(">H", 255)),
            (b"IDAT", zlib.compress(rows)),
            (b"IEND", b""),
        )
    )
    return "it.png", lambda path: path.write_bytes(content)


def without_pixels() -> tuple[str, Write]:
    name, write = dicom(GRAY)

    def strip(path: Path) -> None:
        write(path)
        file = pydicom.dcmread(path)
        del file.PixelData
        file.save_as(path)

    return name, strip


def cut(made: tuple[str, Write]) -> tuple[str, Write]:
    def write(path: Path) -> None:
        made[1](path)
        path.write_bytes(path.read_bytes()[:-4])

    return made[0], write


DEEP = "for which black and white are not defined; save it with 8 bits a channel"
REFUSED: dict[str, tuple[tuple[str, Write], str]] = {
    "gif": (frames("it.gif"), "has 2 frames or pages; save one as a picture of its own"),
    "apng": (frames("it.png"), "has 2 frames"),
    "webp": (frames("it.webp", lossless=True), "has 2 frames"),
    "pages": (frames("it.tif"), "has 2 frames"),
    "fractions": (of(GRAY / np.float32(255), "it.tif"), f"it has pixels of type F, {DEEP}"),
    "32 bits": (of(GRAY.astype(np.int32), "it.tif"), f"it has pixels of type I, {DEEP}"),
    "12 bits": (of_bits(12), f"it has pixels of type I;16, {DEEP}"),
    "negative": (of_bits(16, photometric=0), f"it has pixels of type I;16, {DEEP}"),
    "clear": (sixteen_bits_with_a_clear_value(), f"it has pixels of type I;16, {DEEP}"),
    "pages of a dicom": (dicom(GRAY, NumberOfFrames=2), "has 2 frames"),
    "a dicom without pixels": (without_pixels(), "it has no pixels; leave it out"),
    "a dicom that is cut": (cut(dicom(GRAY)), "bytes of pixel data"),
    "a dicom that is none": (
        ("it.dcm", lambda path: path.write_bytes(b"x" * 200)),
        "it is no DICOM file: 'DICM' is not after its first 128 bytes",
    ),
    "a dicom that nothing decodes": (
        encoded(dicom(GRAY), JPEGLSLossless, b"neither pydicom nor Pillow has a decoder"),
        "compressed (JPEG-LS Lossless Image Compression), and no decoder is inst",
    ),
    "a dicom with a damaged jpeg": (
        encoded(dicom(GRAY), JPEGBaseline8Bit, b"no jpeg"),
        "pillow: cannot identify image file",
    ),
    "an enhanced dicom": (
        dicom(GRAY, SharedFunctionalGroupsSequence=[pydicom.Dataset()]),
        "is an enhanced image",
    ),
    "a window of nothing": (
        dicom(GRAY, WindowCenter=9, WindowWidth=0),
        "its window is 0 wide, which shows nothing",
    ),
    "cut": (("it.png", lambda path: path.write_bytes(b"\x89PNG\r\n")), "cannot identify"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_pictures_that_are_refused(tmp_path: Path, kind: str) -> None:
    folder_of(tmp_path, of(COLOURS, "good.png"))
    data = folder(tmp_path, 3)
    made, message = REFUSED[kind]
    path = folder_of(tmp_path, made)
    start = f"{path}: cannot be read: "
    for look in (
        lambda: folder(tmp_path, 3),
        lambda: Inputs.of_file(data, path),
        lambda: Inputs.of_file(data, path.parent),
    ):
        with pytest.raises(DataError) as caught:
            look()
        assert str(caught.value).startswith(start)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_images_of_pillow_in_other_data_sets() -> None:
    ink = Image.fromarray(INKED)
    deep = Image.fromarray(GRAY.astype(np.uint16) * 257)
    for image, shown in ((ink, np.stack([INK] * 3)), (deep, GRAY[None])):
        data = read(Items([(image, k % 2) for k in range(6)]), "data", Reading())
        assert data is not None
        assert data.x.dtype == np.uint8
        np.testing.assert_array_equal(data.x[0], shown)
