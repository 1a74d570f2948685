"""The attention of a CEM step with a diagonal term where devices share the rows of a sequence, exactly.

Inside `jax.shard_map`; the arrays are dealt by a `Layout` that keeps all heads on each device, as they may share the
diagonal. Columns (keys and context) are gathered a super-block at a time, and each device updates its own rows. The sum
over heads needs normalised weights, so a pass over the scores alone comes first: forward for the row log-sum-exp,
backward for its gradient. The rest of a tile's gradient is left to automatic differentiation of the tile.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from cubit_jax.ops import masks
from cubit_jax.ops.blockwise import tiles
from cubit_jax.ops.context_parallel.layout import Layout
from cubit_jax.ops.context_parallel.solve import Schedule
from cubit_jax.ops.interaction import interaction_scores, read_columns

_ROWS = 1  # the dimension of the rows in the arrays here


def diagonal_attention(
    queries: jax.Array,
    state: jax.Array,
    keys: jax.Array,
    context: jax.Array,
    diag: jax.Array,
    *,
    segment_ids: jax.Array | None,
    window: int | None,
    scale: float,
    layout: Layout,
) -> tuple[jax.Array, jax.Array]:
    """`diagonal_attention.diagonal_attention` of dealt rows; arguments as there, with L / Pr for L."""
    if layout.head_shares != 1:
        raise NotImplementedError("a diagonal that the heads share needs all of them on each device")
    return _attend(_Problem(layout, window, scale), queries, state, keys, context, diag, segment_ids)


@dataclasses.dataclass(frozen=True)
class _Problem:
    layout: Layout
    window: int | None
    scale: float

    def sweep(self, columns, row_tile, carry, column_sums=()):
        """Visits the tiles of this device's rows, by super-blocks of columns.

        Args:
          columns: tree of local arrays, to be gathered.
          row_tile: (s, t, all rows of super-block s of `columns`, carry) -> carry, what is added to those rows.
          carry: its start.
          column_sums: zeros like the part of `columns` that is added to.

        Returns:
          The last carry, and the sums over all devices' rows.
        """
        layout = self.layout
        schedule = Schedule(layout, self.window, solve=False)

        def super_block(s, carry):
            carry, sums = carry
            gathered = layout.gather(layout.take(columns, s, _ROWS), _ROWS)
            zeros = jax.tree.map(lambda x: jnp.zeros_like(x, shape=(len(x), layout.super_block, *x.shape[2:])), sums)

            def tile(t, carry):
                carry, added = carry
                carry, new = row_tile(s, t, gathered, carry)
                return carry, jax.tree.map(jnp.add, added, new)

            carry, added = lax.fori_loop(*schedule.row_tiles(s), tile, (carry, zeros))
            return carry, layout.put(sums, layout.scatter_sum(added, _ROWS), s, _ROWS)

        return lax.fori_loop(0, layout.num_super_blocks, super_block, (carry, column_sums))

    def scores(self, s, t, queries, state, keys, context, diag, row_segments, column_segments):
        """Of row tile t by super-block s [B, H, T, W], and where they are visible [1 or B, 1, T, W]."""
        columns = s * self.layout.super_block + jnp.arange(self.layout.super_block)
        rows = self.layout.index(t * self.layout.tile, self.layout.tile)
        mask = masks.visible(rows, columns, row_segments, column_segments, window=self.window)
        return self.scale * interaction_scores(queries, state, keys, context, diag), jnp.expand_dims(mask, -3)

    def weights(self, s, t, lse, *arrays):
        """exp(scores - lse), 0 where invisible; arrays as for `scores`."""
        scores, mask = self.scores(s, t, *arrays)
        return jnp.where(mask, jnp.exp(jnp.where(mask, scores - _column(lse), 0)), 0)


# Arrays: queries, keys, o [B, rows, H, K]; state, context, y [B, rows, D]; the log-sum-exp and its parts [B, rows, H].


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(problem, queries, state, keys, context, diag, segments):
    return _forward(problem, queries, state, keys, context, diag, segments)[0]


def _forward(problem, queries, state, keys, context, diag, segments):
    layout = problem.layout
    dtype = tiles.compute_dtype(queries, keys, state)
    columns = keys, context, segments

    def normalise(s, t, columns, softmax):
        q, x, row_segments, softmax_t = layout.take_tile((queries, state, segments, softmax), t, _ROWS)
        k, h, column_segments = columns
        scores, mask = problem.scores(s, t, q, x, k, h, diag, row_segments, column_segments)
        top, total = map(_column, softmax_t)
        weights, decay, top = tiles.exponentials(top, scores, mask)
        total = decay * total + jnp.sum(weights, axis=-1, keepdims=True)
        return layout.put_tile(softmax, (_row(top), _row(total)), t, _ROWS), ()

    top, total, _ = tiles.start(queries, 0, dtype)
    (top, total), _ = problem.sweep(columns, normalise, (top[..., 0], total[..., 0]))
    lse = top + jnp.log(jnp.where(total == 0, 1, total))

    def read(s, t, columns, outputs):
        q, x, row_segments, lse_t, outputs_t = layout.take_tile((queries, state, segments, lse, outputs), t, _ROWS)
        k, h, column_segments = columns
        weights = problem.weights(s, t, lse_t, q, x, k, h, diag, row_segments, column_segments)
        new = jax.tree.map(jnp.add, outputs_t, read_columns(weights, k, h, diag))
        return layout.put_tile(outputs, new, t, _ROWS), ()

    outputs, _ = problem.sweep(columns, read, (jnp.zeros_like(queries, dtype), jnp.zeros_like(state, dtype)))
    return outputs, (queries, state, keys, context, diag, segments, lse)


def _backward(problem, saved, cotangents):
    layout = problem.layout
    queries, state, keys, context, diag, segments, lse = saved
    columns = keys, context, segments

    def tile_function(s, t, row_segments, column_segments):
        """What a tile adds to o and y; and to the sum of the weights, whose cotangent is that of the log-sum-exp."""

        def fn(lse, queries, state, keys, context, diag):
            weights = problem.weights(s, t, lse, queries, state, keys, context, diag, row_segments, column_segments)
            return *read_columns(weights, keys, context, diag), jnp.sum(weights, axis=-1).swapaxes(1, 2)

        return fn

    def of_lse(s, t, columns, total):
        q, x, row_segments, lse_t, total_t, outputs = layout.take_tile(
            (queries, state, segments, lse, total, cotangents), t, _ROWS
        )
        k, h, column_segments = columns
        fn = tile_function(s, t, row_segments, column_segments)
        _, pull = jax.vjp(lambda lse: fn(lse, q, x, k, h, diag)[:2], lse_t)
        return layout.put_tile(total, total_t + pull(outputs)[0], t, _ROWS), ()

    d_lse, _ = problem.sweep(columns, of_lse, jnp.zeros_like(lse))

    def of_arrays(s, t, columns, carry):
        rows, d_diag = carry
        q, x, row_segments, lse_t, rows_t, outputs = layout.take_tile(
            (queries, state, segments, lse, rows, (*cotangents, d_lse)), t, _ROWS
        )
        k, h, column_segments = columns
        fn = tile_function(s, t, row_segments, column_segments)
        _, pull = jax.vjp(functools.partial(fn, lse_t), q, x, k, h, diag)
        dq, dx, dk, dh, dd = pull(outputs)
        rows = layout.put_tile(rows, jax.tree.map(jnp.add, rows_t, (dq, dx)), t, _ROWS)
        return (rows, d_diag + dd), (dk, dh)

    wide = [jnp.zeros_like(x, tiles.compute_dtype(x)) for x in (queries, state, diag, keys, context)]
    (rows, d_diag), sums = problem.sweep(columns, of_arrays, ((wide[0], wide[1]), wide[2]), (wide[3], wide[4]))
    arrays = queries, state, keys, context, diag
    return *(x.astype(a.dtype) for x, a in zip((*rows, *sums, d_diag), arrays)), None


_attend.defvjp(_forward, _backward)


def _column(x):
    """[B, rows, H] -> [B, H, rows, 1], to stand beside scores."""
    return x.swapaxes(1, 2)[..., None]


def _row(x):
    return x[..., 0].swapaxes(1, 2)
