"""Attention and the triangular system where devices share the rows of a sequence, exactly (context parallelism).

Inside `jax.shard_map`; the arrays are dealt by a `Layout` [B, L / Pr, H, K]. Super-blocks of rows are visited in order:

    forward   the rows of super-block s are gathered; each device solves its W x W triangle, the same everywhere, so
              that none waits for an owner; then it adds the new columns to the online softmax of its own later rows.
    backward  from the last super-block to the first: its rows are gathered; each device substitutes back in the
              triangle, then makes the gradients of its own columns, and its share of the rows', which is summed.

Attention is the same without the triangle. Saved for the backward pass: the solution, the row sums P u, and the row
log-sum-exp, as on one device. No collective depends on which device runs it, and trip counts depend on s alone.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from cubit_jax.ops import masks
from cubit_jax.ops.blockwise import kernel_solve as kernel_solve_xla
from cubit_jax.ops.blockwise import tiles
from cubit_jax.ops.blockwise.tiles import dot
from cubit_jax.ops.context_parallel.layout import Layout


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which local tiles each super-block meets: the same on every device.

    Attributes:
      layout: who holds which rows.
      window: as in masks.visible.
      solve: whether this is the triangular system, whose triangles are worked on apart, or attention.
    """

    layout: Layout
    window: int | None
    solve: bool

    def row_tiles(self, s: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(first, one past the last) tile of the local rows that read columns of super-block s."""
        layout = self.layout
        last = layout.num_super_blocks - 1
        if self.window is not None:
            last = jnp.minimum(last, ((s + 1) * layout.super_block + self.window - 2) // layout.super_block)
        return (s + self.solve) * layout.piece // layout.tile, -(-(last + 1) * layout.piece // layout.tile)

    def column_tiles(self, s: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(first, one past the last) tile of the local columns that rows of super-block s read."""
        layout = self.layout
        first = 0
        if self.window is not None:
            first = jnp.maximum(0, s * layout.super_block - (self.window - 1)) // layout.super_block
        return first * layout.piece // layout.tile, -(-(s + 1) * layout.piece // layout.tile)


@dataclasses.dataclass(frozen=True)
class _Problem:
    """What the forward and backward passes know before any array: hashable, for custom_vjp."""

    schedule: Schedule
    scale: float
    strict: bool

    @property
    def layout(self):
        return self.schedule.layout

    def triangle(self):
        """The tiles of one super-block."""
        width = self.layout.super_block
        return tiles.Tiling(width, tiles.choose_block(width, self.layout.tile), self.schedule.window, self.strict)

    def visible(self, rows, columns, row_segments, column_segments):
        """[R, C] or [B, 1, R, C]; segments are [B, 1, R, 1] and [B, 1, C, 1], or None."""
        if row_segments is not None:
            row_segments, column_segments = row_segments[..., 0], column_segments[..., 0]
        return masks.visible(
            rows, columns, row_segments, column_segments, window=self.schedule.window, strict=self.strict
        )

    def super_block_index(self, s):
        return s * self.layout.super_block + jnp.arange(self.layout.super_block)


def implementations(fn: Callable, layout: Layout) -> dict[str, Callable]:
    """Of an op of dealt rows, for `dispatch.run`: xla alone; the kernels and the reference need whole sequences."""

    def refuse(*args, **kwargs):
        raise NotImplementedError(f"{layout.row_shares} devices share the rows of a sequence, which only xla can do")

    return {"reference": refuse, "xla": functools.partial(fn, layout=layout), "pallas": refuse}


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    segment_ids: jax.Array | None,
    window: int | None,
    scale: float,
    layout: Layout,
) -> jax.Array:
    """`ops.attention` of dealt rows; arguments as there, with L / Pr for L."""
    problem = _Problem(Schedule(layout, window, solve=False), scale, strict=False)
    return _run(problem, q, k, v, None, None, segment_ids).astype(q.dtype)


def kernel_solve(
    query: jax.Array,
    key: jax.Array,
    rhs: jax.Array,
    *,
    ridge: jax.Array | None,
    beta: jax.Array | None,
    segment_ids: jax.Array | None,
    window: int | None,
    scale: float,
    block_size: int | None,
    layout: Layout,
) -> jax.Array:
    """`ops.kernel_solve` of dealt rows; arguments as there, with L / Pr for L. The layout chooses the blocks."""
    del block_size
    problem = _Problem(Schedule(layout, window, solve=True), scale, strict=ridge is None)
    beta = None if beta is None else beta[..., None]
    # The solution may be a thousand times the right-hand side: neither is ever 16-bit.
    dtype = tiles.compute_dtype(query, key, rhs)
    rhs, ridge, beta = jax.tree.map(lambda x: x.astype(dtype), (rhs, ridge, beta))
    return _run(problem, query, key, rhs, ridge, beta, segment_ids)


def log_sum_exp(
    q: jax.Array, k: jax.Array, *, segment_ids: jax.Array | None, window: int | None, scale: float, layout: Layout
) -> jax.Array:
    """Of each row of scores, [B, L / Pr, H], finite where a row sees nothing; not differentiable."""
    problem = _Problem(Schedule(layout, window, solve=False), scale, strict=False)
    q, k = q.swapaxes(1, 2), k.swapaxes(1, 2)
    empty = jnp.zeros_like(k, tiles.compute_dtype(q, k), shape=(*k.shape[:-1], 1))
    segments = None if segment_ids is None else segment_ids[:, None, :, None]
    _, (*_, lse) = _forward(problem, q, k, empty, None, None, segments)
    return lse[..., 0].swapaxes(1, 2)


def _run(problem, q, k, v, ridge, beta, segment_ids):
    """u of the system with the right-hand side v, or sum_j P_ij v_j: [B, L / Pr, H, V], at least float32."""
    q, k, v, beta = jax.tree.map(lambda x: x.swapaxes(1, 2), (q, k, v, beta))
    segments = None if segment_ids is None else segment_ids[:, None, :, None]
    return _sweep(problem, q, k, v, ridge, beta, segments).swapaxes(1, 2)


# Below, arrays are [B, H, rows, ...], so that one function takes pieces of them all: beta, the row maximum, log-sum-exp
# and delta [B, H, rows, 1], segments [B, 1, rows, 1].


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sweep(problem, q, k, v, ridge, beta, segments):
    return _forward(problem, q, k, v, ridge, beta, segments)[0]


def _forward(problem, q, k, v, ridge, beta, segments):
    layout, schedule = problem.layout, problem.schedule
    dtype = tiles.compute_dtype(q, k, v)

    def super_block(s, carry):
        state, u = carry
        k_s, u_s, segments_s = layout.gather(layout.take((k, u, segments), s))
        if schedule.solve:
            q_s, beta_s, state_s = layout.gather(layout.take((q, beta, state), s))
            u_s, *state_s = _solve_triangle(problem, q_s, k_s, u_s, ridge, beta_s, segments_s, state_s)
            state, u = layout.put((state, u), layout.own_piece((tuple(state_s), u_s)), s)
        columns = problem.super_block_index(s)
        if not schedule.solve:  # there every row that reads these columns stands after them
            u_s, bad = tiles.finite_part(u_s, columns)

        def row_tile(t, state):
            q_t, segments_t, state_t = layout.take_tile((q, segments, state), t)
            rows = layout.index(t * layout.tile, layout.tile)
            mask = problem.visible(rows, columns, segments_t, segments_s)
            if schedule.solve:
                mask &= (rows >= (s + 1) * layout.super_block)[:, None]
            top, total, summed = state_t
            scores = tiles.score(q_t, k_s, problem.scale, dtype)
            weights, decay, top = tiles.exponentials(top, scores, mask)
            total = decay * total + jnp.sum(weights, axis=-1, keepdims=True)
            read = dot("bhij,bhjk->bhik", weights, u_s.astype(dtype), tiles.precision(v))
            summed = decay * summed + (read if schedule.solve else tiles.from_row_on(read, rows, bad))
            return layout.put_tile(state, (top, total, summed), t)

        return lax.fori_loop(*schedule.row_tiles(s), row_tile, state), u

    state = tiles.start(q, v.shape[-1], dtype)
    (top, total, summed), u = lax.fori_loop(0, layout.num_super_blocks, super_block, (state, v))
    total = jnp.where(total == 0, 1, total)
    summed, lse = summed / total, top + jnp.log(total)
    return u if schedule.solve else summed, (q, k, ridge, beta, segments, u, summed, lse)


def _solve_triangle(problem, q, k, rhs, ridge, beta, segments, state):
    """u of a super-block [B, H, W, V] whose rows have read all columns before it; and their finished softmax."""
    tiling = problem.triangle()
    split = functools.partial(_split, tiling)
    u, summed, lse = kernel_solve_xla.solve_rows(
        tiling,
        problem.scale,
        split(q),
        split(k),
        split(rhs),
        ridge,
        None if beta is None else split(beta)[..., 0],
        _split_segments(tiling, segments),
        jax.tree.map(split, state),
    )
    u, summed, lse = (_merge(tiling, x) for x in (u, summed, lse[..., None]))
    return u, lse, jnp.ones_like(lse), summed


def _backward(problem, residuals, g):
    layout, schedule = problem.layout, problem.schedule
    q, k, ridge, beta, segments, u, summed, lse = residuals
    dtype = summed.dtype
    by_key, by_value = tiles.precision(q, k), tiles.precision(u)
    g = g.astype(dtype)

    def super_block(step, carry):
        dq, dk, dv = carry
        s = layout.num_super_blocks - 1 - step
        q_s, lse_s, segments_s = layout.gather(layout.take((q, lse, segments), s))
        if schedule.solve:
            k_s, beta_s, g_s = layout.gather(layout.take((k, beta, dv), s))
            y_s = _substitute_back(problem, q_s, k_s, g_s, ridge, beta_s, segments_s, lse_s)
            z_s = -y_s if beta is None else -beta_s * y_s
            dv = layout.put(dv, layout.own_piece(y_s), s)
            z = layout.own_piece(z_s)
        else:
            z = layout.take(g, s)
            z_s = layout.gather(z)
        delta_s = layout.gather(jnp.sum(z * layout.take(summed, s), axis=-1, keepdims=True))
        rows = problem.super_block_index(s)

        def column_tile(t, carry):
            dq_s, sums, dk, dv = carry
            k_t, u_t, segments_t, dk_t, dv_t = layout.take_tile((k, u, segments, dk, dv), t)
            columns = layout.index(t * layout.tile, layout.tile)
            weights = jnp.exp(tiles.score(q_s, k_t, problem.scale, dtype) - lse_s)
            weights = jnp.where(problem.visible(rows, columns, segments_s, segments_t), weights, 0)
            # Inside the triangle the substitution has done this already.
            read = jnp.where(columns < s * layout.super_block, weights, 0) if schedule.solve else weights
            dv_t += dot("bhij,bhik->bhjk", read, z_s, by_value)
            ds = weights * (dot("bhik,bhjk->bhij", z_s, u_t.astype(dtype), by_value) - delta_s)
            if not problem.strict:
                ds = jnp.where(rows[:, None] == columns, 0, ds)
            dk_t += dot("bhij,bhik->bhjk", ds, q_s.astype(dtype), by_key)
            dq_s += dot("bhij,bhjk->bhik", ds, k_t.astype(dtype), by_key)
            return dq_s, sums + jnp.sum(ds, axis=-1, keepdims=True), *layout.put_tile((dk, dv), (dk_t, dv_t), t)

        zeros = jnp.zeros_like(q_s, dtype)
        dq_s, sums, dk, dv = lax.fori_loop(*schedule.column_tiles(s), column_tile, (zeros, zeros[..., :1], dk, dv))
        own = layout.scatter_sum(jnp.concatenate([dq_s, sums], axis=-1))
        own, sums = own[..., :-1], own[..., -1:]
        if not problem.strict:
            # The diagonal of the scores' gradient, as minus the sum of its row: see tiles.backward_row.
            own -= sums * layout.take(k, s).astype(dtype)
            dk = layout.put(dk, layout.take(dk, s) - sums * layout.take(q, s).astype(dtype), s)
        return layout.put(dq, own, s), dk, dv

    zeros = jnp.zeros_like(q, dtype)
    carry = zeros, zeros, g if schedule.solve else jnp.zeros_like(g)
    dq, dk, dv = lax.fori_loop(0, layout.num_super_blocks, super_block, carry)
    dridge = None if ridge is None else -jnp.sum(dv * u, axis=(0, 2, 3))  # this device's rows
    dbeta = None if beta is None else -jnp.sum(dv * summed, axis=-1, keepdims=True)
    scale = problem.scale
    return (scale * dq).astype(q.dtype), (scale * dk).astype(k.dtype), dv.astype(u.dtype), dridge, dbeta, None


def _substitute_back(problem, q, k, g, ridge, beta, segments, lse):
    """y = M^-T g of a super-block [B, H, W, V] from which all later rows have been subtracted."""
    tiling = problem.triangle()
    q, k, g, beta, lse = jax.tree.map(functools.partial(_split, tiling), (q, k, g, beta, lse))
    segments = _split_segments(tiling, segments)

    def row_block(g, x):
        i, q_i, beta_i, lse_i = x

        def weights(j, mask):
            p = jnp.exp(tiles.score(q_i, tiles.take(k, j), problem.scale, g.dtype) - lse_i)
            return p if mask is None else jnp.where(mask, p, 0)

        system = kernel_solve_xla.system_block(
            weights(i, tiling.mask(i, i, segments, diagonal=True)), ridge, None if beta_i is None else beta_i[..., 0]
        )
        y_i = tiles.solve_triangular(system, tiles.take(g, i), transpose=True)
        z_i = -y_i if beta_i is None else -beta_i * y_i

        def column_block(j, g):
            p = weights(j, tiling.mask(i, j, segments))
            return tiles.put(g, tiles.take(g, j) + dot("bhij,bhik->bhjk", p, z_i), j)

        return lax.fori_loop(tiling.first(i), i, column_block, tiles.put(g, y_i, i)), None

    y, _ = lax.scan(row_block, g, (jnp.arange(tiling.num_blocks), q, beta, lse), reverse=True)
    return _merge(tiling, y)


_sweep.defvjp(_forward, _backward)


def _split(tiling, x):
    """[B, H, W, ...] -> [N, B, H, C, ...] as in tiles."""
    return tiling.split(x.swapaxes(1, 2))


def _merge(tiling, x):
    return tiling.merge(x).swapaxes(1, 2)


def _split_segments(tiling, segments):
    return None if segments is None else tiling.split(segments[:, 0, :, 0])
