"""Images: from files and datasets, scikit-learn's digits, and glyphs of fonts; described in docs/vision.md."""

from headwater_lab.data.images.augment import Augmentation
from headwater_lab.data.images.base import ImageData, ImageSettings, image_processor
from headwater_lab.data.images.digits import DigitsSettings
from headwater_lab.data.images.files import ImageFilesSettings
from headwater_lab.data.images.glyphs import GlyphSettings

__all__ = [
    "Augmentation",
    "DigitsSettings",
    "GlyphSettings",
    "ImageData",
    "ImageFilesSettings",
    "ImageSettings",
    "image_processor",
]
