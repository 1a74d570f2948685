"""Cubit (arXiv 2605.06501): kernel ridge regression in the place of softmax attention."""

from configs import base


def get_config(size="125m"):
    """size: tiny | 125m | 350m | 1p3b."""
    config = base.get_config(size)
    config.model.mixers = ("cubit",)
    options = config.model.options
    options.reference = "independent"  # the reference has its own projection | shared: it is the key
    options.ridge_init = 1e-10
    options.lrr = True  # Limited-Range Rescale of the values
    options.lrr_low_init = 0.5  # the rescale lies between low and low + range
    options.lrr_range_init = 1.5
    options.reference_scale_init = 1.0  # norm of the reference embedding
    return config
