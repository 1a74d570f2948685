"""Linen modules. MIXERS and MLPS are the names that a config may use; a new one is a line here."""

from cubit_jax.layers.attention import Attention
from cubit_jax.layers.cem import CEMMLP, CEMAttention
from cubit_jax.layers.cubit import CubitMixer
from cubit_jax.layers.deltaformer import DeltaFormerMixer
from cubit_jax.layers.mlp import GatedMLP

MIXERS = {
    "attention": Attention,
    "cem": CEMAttention,
    "cubit": CubitMixer,
    "deltaformer": DeltaFormerMixer,
}
MLPS = {
    "cem": CEMMLP,
    "gated": GatedMLP,
}
