"""Linen modules: parameters and shapes; the maths is a call into ops/."""
