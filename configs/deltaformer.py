"""DeltaFormer (arXiv 2505.19488): the delta rule in kernel space in the place of softmax attention."""

from configs import base


def get_config(size="125m"):
    """size: tiny | 125m | 350m | 1p3b."""
    config = base.get_config(size)
    config.model.mixers = ("deltaformer",)
    config.model.options.projection = "own"  # w has its own projection | shared: it is the key
    return config
