"""The reference that the TPU and the GPU kernels are held to."""

import numpy as np
import pytest
import scipy.linalg


def _reference(args, cotangent, *, strict, segment_ids=None, window=None, scale=1.0, rounding=False):
    """(u, gradients) of the system written out in float64, by numpy, with the derivatives of a solve and a softmax.

    With rounding also the size, for each gradient, of what float32 arithmetic may add to it. The gradient of a score is
    a difference, P (dP - delta), of sums of K products; where it is zero or nearly so, what is left of such sums is up
    to K times the precision of float32 times the sum of the sizes of their terms.
    """
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
    result = np.swapaxes(u, 1, 2), [*grads, dcoefficient]
    if not rounding:
        return result
    terms = np.abs(factor) * (np.abs(y) @ np.swapaxes(np.abs(u), 2, 3))
    terms = np.abs(scale) * weights * (terms + np.sum(weights * terms, axis=-1, keepdims=True))
    terms = terms @ np.abs(key), np.swapaxes(terms, 2, 3) @ np.abs(query)
    unit = query.shape[-1] * np.finfo(np.float32).eps
    return *result, [*(unit * np.max(x) for x in terms), 0.0, 0.0]


@pytest.fixture(scope="session")
def reference():
    """reference(arrays, cotangent, *, strict, segment_ids=None, window=None, scale=1.0) -> (u, gradients)."""
    return _reference


@pytest.fixture(scope="session")
def check_prefixes():
    """check_prefixes(lengths, run, arrays, cotangent, *, strict, forward, gradient): several lengths in one program.

    Batch row b of the arrays is made zero after lengths[b] rows, which is how the kernels pad. What run(arrays,
    cotangent) -> (u, gradients) gives for these rows is compared with the dense system of them alone.
    """

    def check(lengths, run, arrays, cotangent, *, strict, forward, gradient):
        arrays, cotangent = [np.array(x) for x in arrays], np.array(cotangent)
        for x in (*arrays[: 4 if strict else 3], cotangent):
            for b, length in enumerate(lengths):
                x[b, length:] = 0
        u, gradients = run(arrays, cotangent)
        gradients = [np.asarray(x, np.float64) for x in gradients]
        total, allowed = np.zeros(np.shape(gradients[3])), 0.0
        for b, length in enumerate(lengths):
            short = [x[b : b + 1, :length] if x.ndim > 1 else x for x in arrays]
            exact, wanted, rounding = _reference(short, cotangent[b : b + 1, :length], strict=strict, rounding=True)
            pairs = list(zip([u, *gradients], [exact, *wanted], [forward] + [gradient] * 4, [0.0, *rounding]))
            if not strict:
                total += pairs.pop()[1]
                allowed += gradient * np.max(np.abs(wanted[3]))
            for n, (actual, expected, limit, noise) in enumerate(pairs):
                error = np.max(np.abs(np.asarray(actual, np.float64)[b : b + 1, :length] - expected))
                assert error <= limit * np.max(np.abs(expected)) + noise, (length, n)
            assert all(not np.any(x[b, length:]) for x in gradients[:3]), length
        if not strict:
            assert np.max(np.abs(gradients[3] - total)) <= allowed

    return check
