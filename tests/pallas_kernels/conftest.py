"""The reference that the TPU and the GPU kernels are held to."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg


def _reference(args, cotangent, *, strict, segment_ids=None, window=None, scale=1.0, rounding=False):
    """(u, gradients) of the system written out in float64, by numpy, with the derivatives of a solve and a softmax.

    In padding, segment 0, whatever the arrays hold counts as zero.

    With rounding also the size, for each gradient, of what float32 arithmetic may add to it. The gradient of a score is
    a difference, P (dP - delta), of sums of K products; where it is zero or nearly so, what is left of such sums is up
    to K times the precision of float32 times the sum of the sizes of their terms.
    """
    segment_ids = None if segment_ids is None else np.asarray(segment_ids)
    query, key, rhs, cotangent = (np.swapaxes(np.asarray(x, np.float64), 1, 2) for x in (*args[:3], cotangent))
    real = np.ones((len(query), 1)) if segment_ids is None else segment_ids != 0
    query, key, rhs, cotangent = (np.where(real[:, None, :, None], x, 0) for x in (query, key, rhs, cotangent))
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
    factor = np.where(real[:, None, :], np.swapaxes(coefficient, 1, 2), 0)[..., None] if strict else 1.0
    diagonal = 1.0 if strict else np.where(real[:, None, :, None], coefficient[None, :, None, None], 1.0)
    system = factor * weights + np.eye(length) * diagonal
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


@pytest.fixture(scope="session")
def check_overflow():
    """check_overflow(run, length, dim, num_heads, *, strict, dtype, limit, start): head 0 overflows after a few rows.

    From row start on each row of head 0 sees next to nothing but the row before it, and is 1e10 times as large. All
    rows before the first that float32 can't hold are as in float64, and so is every row of the other heads.
    """

    def check(run, length, dim, num_heads, *, strict, dtype, limit, start):
        rng = np.random.default_rng(0)
        key = rng.standard_normal((1, length, num_heads, dim))
        key /= np.linalg.norm(key, axis=-1, keepdims=True)
        query, rhs = 20 * key, rng.standard_normal(key.shape)
        query[:, start:, 0] = 200 * key[:, start - 1 : -1, 0]
        if strict:
            coefficient = rng.uniform(0, 1, (1, length, num_heads))
            coefficient[:, start:, 0] = 1e10
        else:
            coefficient = np.full(num_heads, 0.5)
            coefficient[0] = 1e-10
        arrays = [jnp.asarray(x, dtype) for x in (query, key, rhs)] + [jnp.asarray(coefficient, jnp.float32)]
        u = np.asarray(run(arrays), np.float64)
        with np.errstate(all="ignore"):  # the gradients overflow in float64 too
            expected, _ = _reference(arrays, rhs, strict=strict)
        size = np.abs(expected).max(axis=3)
        (bad,) = np.nonzero(size[0, :, 0] > np.finfo(np.float32).max)
        assert start < bad[0] < start + 5
        assert not np.isfinite(u[:, bad[0] :, 0]).all(axis=(0, 2)).any()
        good = np.ones((1, length, num_heads), bool)
        good[:, bad[0] :, 0] = False
        assert np.isfinite(u[good]).all()
        assert np.max(np.abs(u - expected).max(axis=3)[good] / size[good]) <= limit

    return check


@pytest.fixture(scope="session")
def check_padding():
    """check_padding(run, arrays, cotangent, segment_ids, *, strict): what lies in padding has no effect, nor gradient.

    run(arrays, cotangent, segment_ids) -> (u, gradients).
    """

    def check(run, arrays, cotangent, segment_ids, *, strict):
        def filled(x, value):
            return jnp.where((segment_ids == 0).reshape(segment_ids.shape + (1,) * (x.ndim - 2)), value, x)

        def results(value):
            by_row = [filled(x, value) for x in (*arrays[: 4 if strict else 3], cotangent)]
            return run((*by_row[:3], by_row[3] if strict else arrays[3]), by_row[-1], segment_ids)

        u, gradients = results(0.0)
        assert not np.asarray(u)[segment_ids == 0].any()
        assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in (u, *gradients))
        for value in (np.nan, np.inf, 1e38):
            other, other_gradients = results(value)
            for actual, wanted in zip((other, *other_gradients), (u, *gradients)):
                np.testing.assert_array_equal(np.asarray(actual, np.float32), np.asarray(wanted, np.float32))

    return check
