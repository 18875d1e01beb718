"""Classifiers of texts and of tokens, as transformers puts them on any model: for reward models and labels."""

from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from headwater.config.text import HeadwaterConfig
from headwater.models.pretrained import HeadwaterPreTrainedModel


class HeadwaterForSequenceClassification(GenericForSequenceClassification, HeadwaterPreTrainedModel):
    """A linear classifier of the last token's output, `num_labels` classes; one label is a regression."""


class HeadwaterForTokenClassification(GenericForTokenClassification, HeadwaterPreTrainedModel):
    """A linear classifier of each token's output, `num_labels` classes."""


AutoModelForSequenceClassification.register(HeadwaterConfig, HeadwaterForSequenceClassification)
AutoModelForTokenClassification.register(HeadwaterConfig, HeadwaterForTokenClassification)
