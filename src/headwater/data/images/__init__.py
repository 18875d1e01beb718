"""Images: from files and datasets, scikit-learn's digits, and glyphs of fonts; described in docs/vision.md."""

from headwater.data.images.augment import Augmentation
from headwater.data.images.base import ImageData, ImageSettings, image_processor
from headwater.data.images.digits import DigitsSettings
from headwater.data.images.files import ImageFilesSettings
from headwater.data.images.glyphs import GlyphSettings

__all__ = [
    "Augmentation",
    "DigitsSettings",
    "GlyphSettings",
    "ImageData",
    "ImageFilesSettings",
    "ImageSettings",
    "image_processor",
]
