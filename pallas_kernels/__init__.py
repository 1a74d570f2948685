"""Device code only: imports jax and nothing of ours."""
