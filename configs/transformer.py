"""Softmax attention (Nadaraya-Watson regression): a Llama-style Transformer."""

from configs import base


def get_config(size="125m"):
    """size: tiny | 125m | 350m | 1p3b."""
    config = base.get_config(size)
    config.model.mixers = ("attention",)
    return config
