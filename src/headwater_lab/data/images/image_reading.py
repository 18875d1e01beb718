"""Read images from files: accepted formats, conversion, and errors."""

from __future__ import annotations

import functools
import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headwater.util.errors import first_line
from headwater.util.files import open_regular
from headwater_lab.data.images.image_data import UnreadableImage

if TYPE_CHECKING:
    from PIL.Image import Image

# Pillow detects the format from the content, not the file name. It decodes these formats itself. For EPS it would
# start Ghostscript, and it hands formats such as WMF, HDF5, GRIB and BUFR to installed handlers.
FORMATS = (
    "AVIF", "BLP", "BMP", "CUR", "DDS", "DIB", "GIF", "ICNS", "ICO", "JPEG", "JPEG2000", "PCX", "PNG", "PPM", "PSD",
    "QOI", "SGI", "TGA", "TIFF", "WEBP", "XBM", "XPM",
)  # fmt: skip
# Pillow's modes that `convert_channels` supports.
GREY = ("1", "L", "LA", "La")
DEEP = ("I;16", "I;16L", "I;16B", "I;16N")
COLOR = ("P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
# Maximum pixels: beyond this, a small file that unpacks to a huge image would fill the memory.
MOST = 2**28
# Maximum aspect ratio: a thin line, resized until its shorter side has the required length, would fill it too.
LONGEST = 100


def read_image(source: Path | bytes, name: str, channels: int) -> Image:
    """Read an image as `convert_channels` does, rotated by its metadata. Raises `UnreadableImage` with its `name`."""
    from PIL import Image as Pillow
    from PIL import ImageOps

    try:
        file = io.BytesIO(source) if isinstance(source, bytes) else open_regular(source)
        with file as content, Pillow.open(content, formats=_list_suffixes()) as opened:
            if opened.width * opened.height > MOST:
                raise UnreadableImage(f"{name} has {opened.width} x {opened.height} pixels; the limit is {MOST:,}.")
            if max(opened.size) > LONGEST * min(opened.size):
                raise UnreadableImage(
                    f"{name} has {opened.width} x {opened.height} pixels: one side is more than {LONGEST} times the "
                    "other; crop it."
                )
            opened.load()
            return convert_channels(ImageOps.exif_transpose(opened), name, channels)
    except (UnreadableImage, MemoryError):
        raise
    except Pillow.UnidentifiedImageError as error:
        raise UnreadableImage(f"{name} is not an image in a supported format, such as PNG or JPEG.") from error
    except Exception as error:  # readers can raise anything for damaged images
        reason = getattr(error, "strerror", None) or first_line(error)
        raise UnreadableImage(f"{name} cannot be read: {reason.rstrip('.')}.") from error


@functools.cache
def _list_suffixes() -> list[str]:
    """List the suffixes of those `FORMATS` that this Pillow supports."""
    from PIL import Image as Pillow

    Pillow.init()
    return [name for name in FORMATS if name in Pillow.OPEN]


def image_suffixes() -> set[str]:
    """Return the file name suffixes of images in these formats, in lower case."""
    from PIL import Image as Pillow

    by_suffix = _list_suffixes()
    return {
        suffix
        for suffix, kind in Pillow.registered_extensions().items()
        if kind in by_suffix and Pillow.MIME.get(kind, "").startswith("image/")
    }


def convert_channels(image: Image, name: str, channels: int) -> Image:
    """Convert an image to 3 channels (RGB) or 1 (gray).

    Gray images repeat their channel; colors become gray by luma (ITU-R 601-2). Transparency is dropped, not
    blended, as transformers' and torchvision's loaders do. Of 16 bits, the upper 8 are kept. Of several frames, the
    first is taken. Raises `UnreadableImage` for 32-bit and other modes.
    """
    if image.mode in DEEP:
        from PIL.Image import fromarray

        image = fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
    elif image.mode not in (*GREY, *COLOR):
        raise UnreadableImage(f"{name} has pixels of Pillow's mode {image.mode!r}; save it with 8 bits per channel.")
    return image.convert("RGB" if channels == 3 else "L")
