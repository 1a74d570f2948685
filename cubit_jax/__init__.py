"""Kernel ridge regression token mixers (Cubit) and Causal Energy Minimization in JAX."""
