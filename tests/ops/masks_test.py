import numpy as np
import pytest

from cubit_jax.ops import masks


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("segmented", [False, True])
def test_visible_is_the_definition(strict, window, segmented):
    rows, columns = np.arange(2, 9), np.arange(7)
    ids = np.array([[1, 1, 2, 0, 2, 2, 3, 3, 0], [0, 0, 1, 1, 1, 1, 1, 1, 1]])
    segments = (ids[:, rows], ids[:, columns]) if segmented else (None, None)
    mask = np.broadcast_to(masks.visible(rows, columns, *segments, window=window, strict=strict), (2, 7, 7))
    for b in range(2):
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                expected = (column < row if strict else column <= row) and (window is None or row - column < window)
                if segmented:
                    expected = expected and ids[b, row] == ids[b, column] != 0
                assert mask[b, i, j] == expected


def test_rows_of_a_batch_may_have_their_own_indices():
    mask = masks.visible(np.array([[0, 1], [2, 3]]), np.arange(4))
    assert mask.tolist() == [[[1, 0, 0, 0], [1, 1, 0, 0]], [[1, 1, 1, 0], [1, 1, 1, 1]]]
