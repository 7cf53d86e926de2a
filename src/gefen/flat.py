"""Row-major ranges of tensors with any strides, without copying a whole tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor


def rectangles(start: int, stop: int, columns: int) -> Iterator[tuple[int, int, int, int]]:
    """(first row, last row, first column, last column) parts that tile a range of a matrix.

    The matrix has ``columns`` columns; rows and columns are half-open. At most three parts.
    """
    while start < stop:
        row, column = divmod(start, columns)
        if column or stop - start < columns:
            end = min(stop, (row + 1) * columns)
            yield row, row + 1, column, column + end - start
        else:
            end = stop - stop % columns
            yield row, end // columns, 0, columns
        start = end


def pieces(tensor: Tensor, start: int, stop: int) -> Iterator[Tensor]:
    """Views of ``tensor`` that hold its elements ``start`` to ``stop``, in order."""
    if tensor.dim() < 2:
        yield (tensor if tensor.dim() else tensor.unsqueeze(0))[start:stop]
        return
    columns = tensor[0].numel()
    for first, last, left, right in rectangles(start, stop, columns):
        if right - left == columns:
            yield tensor[first:last]
        else:
            yield from pieces(tensor[first], left, right)


def load(tensor: Tensor, start: int, stop: int, buffer: Tensor) -> Tensor:
    """The elements as a contiguous 1-D tensor of ``buffer``'s dtype.

    A view of ``tensor`` where layout and dtype allow it, otherwise ``buffer``, filled.
    """
    if tensor.is_contiguous():
        flat = tensor.view(-1)[start:stop]
        return flat if flat.dtype == buffer.dtype else buffer.copy_(flat)
    filled = 0
    for piece in pieces(tensor, start, stop):
        buffer[filled : filled + piece.numel()].view(piece.shape).copy_(piece)
        filled += piece.numel()
    return buffer


def flat_slice(tensor: Tensor, start: int, stop: int) -> Tensor:
    """The elements as a 1-D tensor: a view where the layout allows it, else a copy of them."""
    if tensor.is_contiguous():
        return tensor.view(-1)[start:stop]
    return load(tensor, start, stop, tensor.new_empty(stop - start))


@contextmanager
def edited(tensor: Tensor, start: int, stop: int, buffer: Tensor) -> Iterator[Tensor]:
    """What :func:`load` gives, to be changed in place; written back, rounded, at the end."""
    values = load(tensor, start, stop, buffer)
    yield values
    if values is not buffer:
        return
    read = 0
    for piece in pieces(tensor, start, stop):
        piece.copy_(values[read : read + piece.numel()].view(piece.shape))
        read += piece.numel()
