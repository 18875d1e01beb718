"""Glyphs: letters and digits drawn from font outlines, with whole font families held out.

The fonts come with packages, never from the system, and their outlines are drawn without hinting: images
are the same on every machine.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from pydantic import Field, model_validator

from headwater.util.errors import HeadwaterError
from headwater.util.seeding import generator
from headwater_lab.data.base import register_kind
from headwater_lab.data.images.image_data import ImageData, Images, ImageSettings

if TYPE_CHECKING:
    from PIL.Image import Image

# Font families in matplotlib, with their files. Fonts of one designer that share shapes form one family.
MATPLOTLIB = {
    "Computer Modern": "cmb10 cmr10 cmss10 cmti10 cmtt10",
    "DejaVu": "DejaVuSans DejaVuSans-Bold DejaVuSans-BoldOblique DejaVuSans-Oblique "
    "DejaVuSansMono DejaVuSansMono-Bold DejaVuSansMono-BoldOblique DejaVuSansMono-Oblique "
    "DejaVuSerif DejaVuSerif-Bold DejaVuSerif-BoldItalic DejaVuSerif-Italic",
    "STIX": "STIXGeneral STIXGeneralBol STIXGeneralBolIta STIXGeneralItalic",
}
# Families in the package rendercv-fonts that are under free licenses (SIL's, Apache's, Ubuntu's, Bitstream's).
PACKAGED = (
    "EB Garamond", "Gentium Book Plus", "Lato", "Mukta", "Noto Sans", "Open Sans", "Open Sauce Sans", "Poppins",
    "Raleway", "Roboto", "Source Sans 3", "Ubuntu", "XCharter",
)  # fmt: skip
STYLES = ("Regular", "Bold", "Italic", "BoldItalic")
FAMILIES = sorted((*MATPLOTLIB, *PACKAGED))
# Families to evaluate on, no glyph of which is trained on.
HELD_OUT = ("Gentium Book Plus", "Lato", "STIX", "Ubuntu")
# The ranges of random draws: the longer side as a share of the image, the rotation in degrees, how much darker than
# the paper the ink is at least, of 255 levels, and the standard deviation of the noise.
SIDE, ROTATION, CONTRAST, NOISE = (0.5, 0.9), 15.0, 128, 8.0


@register_kind
class GlyphSettings(ImageSettings):
    """`data:` of a recipe, with `kind: glyphs`. An epoch redraws each character of each training font once."""

    kind: Literal["glyphs"] = "glyphs"
    image_size: int = Field(default=32, ge=8, le=1024)
    """Pixels."""
    characters: str = Field(default="0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ", min_length=2, max_length=94)
    """The classes: ASCII characters, each once."""

    held_out_views: int = Field(default=2, ge=1, le=1000)
    """Images of each held-out glyph."""

    @model_validator(mode="after")
    def _can_be_drawn(self) -> GlyphSettings:
        if len(set(self.characters)) < len(self.characters) or not all(
            "!" <= character <= "~" for character in self.characters
        ):
            raise ValueError("data.characters must be visible ASCII characters, each once")
        return self

    @property
    def known_classes(self) -> int:
        return len(self.characters)

    def build(self) -> ImageData:
        """Read the fonts. Raises `HeadwaterError` if one is missing or lacks a character."""
        self.check_extras()
        train = [file for name in FAMILIES if name not in HELD_OUT for file in files_of(name)]
        held_out = [file for name in HELD_OUT for file in files_of(name)]
        sides = [
            GlyphImages(files, self.characters, self.image_size, self.channels, views)
            for files, views in ((train, 1), (held_out, self.held_out_views))
        ]
        digest = hashlib.sha256("".join(side.digest for side in sides).encode()).hexdigest()
        facts = {"sha256": digest, "train_fonts": len(sides[0].files), "held_out_fonts": len(sides[1].files)}
        return ImageData(self, sides[0], sides[1], list(self.characters), facts)


def files_of(family: str) -> list[Path]:
    """List the files of a family. Raises `HeadwaterError` if one is missing."""
    import matplotlib
    import rendercv_fonts

    if family in MATPLOTLIB:
        folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
        files = [folder / f"{name}.ttf" for name in MATPLOTLIB[family].split()]
    else:
        folder = Path(rendercv_fonts.__file__).parent / family
        stem = family.replace(" ", "")
        files = [path for style in STYLES for path in folder.glob(f"{stem}-{style}.[ot]tf")]
    missing = next((file for file in files if not file.is_file()), None if files else folder)
    if missing is not None:
        raise HeadwaterError(f"The font {str(missing)!r} is missing; install rendercv-fonts and matplotlib again.")
    return files


class GlyphImages(Images):
    """See `Images`. Each opening gives a new image: `draw` decides size, position, rotation, colors and noise."""

    def __init__(self, files: Sequence[Path], characters: str, size: int, channels: int, views: int) -> None:
        from matplotlib.ft2font import FT2Font

        self.files, self.characters, self.size, self.channels = list(files), characters, size, channels
        self.outlines: list[Any] = []
        content = hashlib.sha256()
        for file in self.files:
            font = FT2Font(str(file))
            self.outlines += [draw_outline(font, character) for character in characters]
            content.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
        self.labels = [number % len(characters) for number in range(len(self.outlines) * views)]
        # Also hash drawn images, to detect changes in how they are drawn.
        for index in range(0, len(self.outlines), len(characters)):
            content.update(self.open(index, generator("sample", index)).tobytes())
        self.digest = content.hexdigest()

    def open(self, index: int, draw: torch.Generator) -> Image:
        from PIL.Image import fromarray

        numbers = torch.rand(6, generator=draw, dtype=torch.float64).tolist()
        ink = self.draw_ink(index, *numbers[:4])
        contrast = CONTRAST + numbers[4] * (255 - CONTRAST)
        paper = contrast + numbers[5] * (255 - contrast)
        noise = torch.randn(self.size, self.size, generator=draw).double().numpy() * NOISE
        pixels = np.clip(np.rint(paper - contrast * ink + noise), 0, 255).astype(np.uint8)
        return fromarray(pixels).convert("RGB" if self.channels == 3 else "L")

    def draw_ink(self, index: int, side: float, turn: float, right: float, up: float) -> np.ndarray:
        """Compute a glyph's share of each pixel; the other numbers, from 0 to 1, set its size and position."""
        from matplotlib.backends.backend_agg import RendererAgg
        from matplotlib.path import Path as Outline
        from matplotlib.transforms import IdentityTransform

        points, codes = self.outlines[index % len(self.outlines)]
        angle = math.radians(ROTATION * (2 * turn - 1))
        turned = points @ np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
        drawn = turned[codes != Outline.CLOSEPOLY]  # its own coordinates have no meaning
        low, high = drawn.min(0), drawn.max(0)
        scale = self.size * (SIDE[0] + side * (SIDE[1] - SIDE[0])) / (high - low).max()
        room = self.size - (high - low) * scale
        placed = (turned - low) * scale + room * (right, up)
        canvas = RendererAgg(self.size, self.size, 72)
        pen = canvas.new_gc()
        pen.set_linewidth(0)
        canvas.draw_path(pen, Outline(placed, codes), IdentityTransform(), (0.0, 0.0, 0.0))
        return np.asarray(canvas.buffer_rgba())[..., 3] / 255.0


def draw_outline(font: Any, character: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the points [N, 2] of a glyph and their types, as in the font file. Raises `HeadwaterError`."""
    from matplotlib.ft2font import LoadFlags

    if not font.get_char_index(ord(character)):
        raise HeadwaterError(f"The font {font.family_name} has no {character!r}; leave it out of data.characters.")
    font.load_char(ord(character), flags=LoadFlags.NO_SCALE)
    points, codes = font.get_path()
    return points.astype(np.float64), codes
