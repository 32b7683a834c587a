"""Arrow columns as numpy arrays.

Without `to_numpy`, and without scalars given to Arrow's functions: both import pandas when it is
there, for 60 MB and 0.2 s.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


def warm() -> None:
    """Make a first array: where pandas is installed, pyarrow imports it for that, for 0.6 s."""
    pa.array([0])


def whole(column: Any) -> Any:
    """A chunked column in one piece; `combine_chunks` copies even a single one."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def numbers(array: Any) -> NDArray[Any]:
    """[N] integers or floats without nulls, not copied; read-only."""
    return np.from_dlpack(array)


def filled(array: Any, value: float) -> NDArray[Any]:
    """[N] integers or floats, with a value for null."""
    if not array.null_count:
        return numbers(array)
    data = [None, array.buffers()[1]]
    plain = pa.Array.from_buffers(array.type, len(array), data, offset=array.offset)
    return np.where(flags(array.is_null()), value, numbers(plain))


def flags(array: Any) -> NDArray[np.bool_]:
    """[N] booleans without nulls."""
    bits = np.frombuffer(array.buffers()[1] or b"", np.uint8)[array.offset // 8 :]
    first = array.offset % 8
    return np.unpackbits(bits, bitorder="little")[first : first + len(array)].view(np.bool_)


def fixed(array: Any, width: int) -> NDArray[np.uint8]:
    """[N, width] bytes of fixed-size binary, copied; zeros for null."""
    data = np.frombuffer(array.buffers()[1] or b"", np.uint8)
    found = data[array.offset * width :][: len(array) * width].reshape(-1, width).copy()
    if array.null_count:
        found[flags(array.is_null())] = 0
    return found
