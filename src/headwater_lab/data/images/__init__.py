"""Images: from files and datasets, scikit-learn's digits, and glyphs of fonts; described in docs/vision.md."""

from headwater_lab.data.images.augment import Augmentation
from headwater_lab.data.images.image_data import ImageData, ImageSettings, image_processor

__all__ = ["Augmentation", "ImageData", "ImageSettings", "image_processor"]
