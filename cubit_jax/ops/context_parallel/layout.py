"""Who holds which rows and heads inside an op when the devices of a mesh axis share a sequence (context parallelism).

Outside an op each of the P devices holds a contiguous part of the rows, with all its heads. Inside, Ph = gcd(H, P) of
them share the heads (for H = P that is "Ulysses", arXiv 2309.14509: the op sees whole sequences), and the other Pr =
P / Ph the rows. Causal rows cost more the later they stand, so rows are dealt like cards: every super-block of W
consecutive rows is split over all Pr devices, W / Pr rows each, which makes their work exactly equal.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# More super-blocks waste fewer products on what each device does alone, fewer save collectives.
_SUPER_BLOCKS = 8
_MAX_SUPER_BLOCK = 2048
_MAX_TILE = 128


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the devices of one mesh axis share sequences of one length; everything here is static.

    Device i of the axis is row rank i // head_shares and head rank i % head_shares. Methods that communicate run inside
    `jax.shard_map`, on every device of the axis alike.

    Attributes:
      axis: name of the mesh axis.
      devices: P, its size.
      head_shares: Ph, how many of them share the heads; it divides P.
      length: L, rows of the whole sequence.

    Raises:
      ValueError: the length is no multiple of P * Pr.
    """

    axis: str
    devices: int
    head_shares: int
    length: int

    def __post_init__(self):
        if self.length % length_multiple(self.devices, self.head_shares):
            raise ValueError(
                f"a sequence of length={self.length} must be a multiple of "
                f"{length_multiple(self.devices, self.head_shares)} = {self.devices} devices of the {self.axis} axis "
                f"x {self.row_shares} of them that share its rows"
            )

    @property
    def row_shares(self) -> int:
        """Pr, how many devices share the rows of a head."""
        return self.devices // self.head_shares

    @property
    def super_block(self) -> int:
        """W: divides the contiguous part of each device, and is dealt in equal pieces."""
        part, shares = self.length // self.devices, self.row_shares
        limit = min(_MAX_SUPER_BLOCK, self.length // (_SUPER_BLOCKS * shares)) if shares > 1 else part
        return shares * _largest_divisor(part // shares, max(limit // shares, 1))

    @property
    def num_super_blocks(self) -> int:
        """How many the sequence has."""
        return self.length // self.super_block

    @property
    def piece(self) -> int:
        """Rows of a super-block that each device holds."""
        return self.super_block // self.row_shares

    @property
    def local_length(self) -> int:
        """Rows that each device holds: a piece of every super-block, in order."""
        return self.length // self.row_shares

    @property
    def tile(self) -> int:
        """Local rows (or columns) that are worked on at a time."""
        return _largest_divisor(self.local_length, _MAX_TILE)

    def index(self, start: jax.Array | int, size: int) -> jax.Array:
        """Sequence index [size] of the local rows from `start` on."""
        local = start + jnp.arange(size)
        rank = lax.axis_index(self.axis) // self.head_shares
        return local // self.piece * self.super_block + rank * self.piece + local % self.piece

    def deal(self, x: jax.Array, heads: bool) -> jax.Array:
        """From contiguous rows and all heads to dealt rows and a share of the heads: one exchange of the whole array.

        Args:
          x: [B, L / P, H, ...], or [B, L / P, ...] that all heads read, of which every head rank gets a copy.
          heads: whether x has heads.

        Returns:
          [B, L / Pr, H / Ph, ...] or [B, L / Pr, ...].
        """
        batch, part = x.shape[:2]
        rest = x.shape[3:] if heads else x.shape[2:]
        own = (x.shape[2] // self.head_shares,) if heads else ()
        x = x.reshape(
            batch,
            part // self.super_block,
            self.row_shares,
            self.piece,
            *((self.head_shares, *own) if heads else (1,)),
            *rest,
        )
        x = jnp.moveaxis(x, (2, 4), (0, 1))
        x = jnp.broadcast_to(x, (self.row_shares, self.head_shares, *x.shape[2:]))
        x = self._exchange(x.reshape(self.devices, *x.shape[2:]))
        return jnp.moveaxis(x, 0, 1).reshape(batch, self.local_length, *own, *rest)

    def undeal(self, x: jax.Array, heads: bool) -> jax.Array:
        """The inverse of `deal`; without heads, where head_shares is 1."""
        batch, part = x.shape[0], self.length // self.devices
        own, rest = (x.shape[2:3], x.shape[3:]) if heads else ((1,), x.shape[2:])
        x = x.reshape(batch, self.devices, part // self.super_block, self.piece, *own, *rest)
        x = self._exchange(jnp.moveaxis(x, 1, 0))
        x = x.reshape(self.row_shares, self.head_shares, *x.shape[1:])
        x = jnp.moveaxis(x, (0, 1), (2, 4))
        return x.reshape(batch, part, *((own[0] * self.head_shares,) if heads else ()), *rest)

    def own_heads(self, x: jax.Array, axis: int) -> jax.Array:
        """This device's share of an array without rows, of which every device holds all heads."""
        size = x.shape[axis] // self.head_shares
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.axis) % self.head_shares * size, size, axis)

    # Of trees of arrays whose local rows are dimension `axis`: [B, H, L / Pr, ...] unless it says otherwise.

    def take(self, tree: Any, s: jax.Array, axis: int = 2) -> Any:
        """The pieces of super-block s."""
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, s * self.piece, self.piece, axis), tree)

    def put(self, tree: Any, pieces: Any, s: jax.Array, axis: int = 2) -> Any:
        """The inverse of `take`."""
        return jax.tree.map(
            lambda x, piece: lax.dynamic_update_slice_in_dim(x, piece, s * self.piece, axis), tree, pieces
        )

    def take_tile(self, tree: Any, t: jax.Array, axis: int = 2) -> Any:
        """Tile t of the local rows."""
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, t * self.tile, self.tile, axis), tree)

    def put_tile(self, tree: Any, new: Any, t: jax.Array, axis: int = 2) -> Any:
        """The inverse of `take_tile`."""
        return jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, t * self.tile, axis), tree, new)

    def gather(self, tree: Any, axis: int = 2) -> Any:
        """All W rows of a super-block, from the pieces of the devices that share its rows."""
        return jax.tree.map(
            lambda x: lax.all_gather(x, self.axis, axis=axis, tiled=True, axis_index_groups=self._groups()), tree
        )

    def scatter_sum(self, tree: Any, axis: int = 2) -> Any:
        """Transpose of `gather`: the sum over the devices that share rows, of which each keeps its own piece."""
        return jax.tree.map(
            lambda x: lax.psum_scatter(
                x, self.axis, scatter_dimension=axis, tiled=True, axis_index_groups=self._groups()
            ),
            tree,
        )

    def own_piece(self, tree: Any) -> Any:
        """This device's piece of super-blocks [B, H, W, ...]."""
        start = lax.axis_index(self.axis) // self.head_shares * self.piece
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, self.piece, 2), tree)

    def _groups(self):
        return [list(range(rank, self.devices, self.head_shares)) for rank in range(self.head_shares)]

    def _exchange(self, x):
        return lax.all_to_all(x, self.axis, 0, 0, tiled=True)


def choose_head_shares(devices: int, num_heads: int) -> int:
    """As many as possible, because sharing heads costs fewer products and exchanges than sharing rows."""
    return math.gcd(num_heads, devices)


def length_multiple(devices: int, head_shares: int) -> int:
    """What a length must be a multiple of: each device has a part of it, of which every row rank gets a piece."""
    return devices * (devices // head_shares)


def _largest_divisor(number, limit):
    return max(d for d in range(1, min(number, limit) + 1) if number % d == 0)
