"""The reference that the TPU and the GPU kernels are held to."""

import numpy as np
import pytest
import scipy.linalg


def _reference(args, cotangent, *, strict, segment_ids=None, window=None, scale=1.0):
    """(u, gradients) of the system written out in float64, by numpy, with the derivatives of a solve and a softmax."""
    segment_ids = None if segment_ids is None else np.asarray(segment_ids)
    query, key, rhs, cotangent = (np.swapaxes(np.asarray(x, np.float64), 1, 2) for x in (*args[:3], cotangent))
    length = query.shape[2]
    row, column = np.arange(length)[:, None], np.arange(length)[None, :]
    mask = (column < row if strict else column <= row)[None]
    if window is not None:
        mask = mask & (row - column < window)
    if segment_ids is not None:
        mask = mask & (segment_ids[:, :, None] == segment_ids[:, None, :]) & (segment_ids != 0)[:, None, :]
    scores = np.where(mask[:, None], scale * query @ np.swapaxes(key, 2, 3), -np.inf)
    top = np.max(scores, axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
    total = np.sum(weights, axis=-1, keepdims=True)
    weights = weights / np.where(total == 0, 1.0, total)  # a row that sees nothing has weights 0
    coefficient = np.asarray(args[3], np.float64)
    factor = np.swapaxes(coefficient, 1, 2)[..., None] if strict else 1.0
    system = factor * weights + np.eye(length) * (1.0 if strict else coefficient[None, :, None, None])
    # By substitution, which the ill-conditioned system forgives; pivoting it does not.
    u, y = np.zeros_like(rhs), np.zeros_like(rhs)
    for head in np.ndindex(rhs.shape[:2]):
        matrix = np.broadcast_to(system, (*rhs.shape[:2], length, length))[head]
        u[head] = scipy.linalg.solve_triangular(matrix, rhs[head], lower=True)
        y[head] = scipy.linalg.solve_triangular(matrix, cotangent[head], lower=True, trans=1)
    dsystem = -y @ np.swapaxes(u, 2, 3)
    dweights = factor * dsystem
    dscores = scale * weights * (dweights - np.sum(weights * dweights, axis=-1, keepdims=True))
    dcoefficient = np.swapaxes(np.sum(dsystem * weights, axis=-1), 1, 2) if strict else -np.sum(y * u, axis=(0, 2, 3))
    grads = [np.swapaxes(x, 1, 2) for x in (dscores @ key, np.swapaxes(dscores, 2, 3) @ query, y)]
    return np.swapaxes(u, 1, 2), [*grads, dcoefficient]


@pytest.fixture(scope="session")
def reference():
    """reference(arrays, cotangent, *, strict, segment_ids=None, window=None, scale=1.0) -> (u, gradients)."""
    return _reference
