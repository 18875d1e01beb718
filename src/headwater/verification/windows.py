"""Short sliding windows, so that the texts of a verification, which are short, reach beyond them."""

import copy

from transformers import PreTrainedModel

from headwater.verification.ways import LENGTH

# Tokens in a shortened window.
WINDOW = 6


def shorten_windows(model: PreTrainedModel) -> PreTrainedModel | None:
    """Copy a model with sliding windows of `WINDOW` tokens; None: no window of its config is longer than the texts."""
    config = copy.deepcopy(model.config)
    text_config = config.get_text_config(decoder=True)
    fields = [
        name for name in ("sliding_window", "attention_chunk_size") if (getattr(text_config, name, None) or 0) >= LENGTH
    ]
    if not fields:
        return None
    for name in fields:
        setattr(text_config, name, WINDOW)
    shortened = type(model)._from_config(
        config, dtype=model.dtype, attn_implementation=model.config._attn_implementation
    )
    shortened.load_state_dict(model.state_dict())
    return shortened.eval()
