"""One training run: its folder, state, step, loop, checkpoints and metrics."""
