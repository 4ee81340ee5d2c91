"""numpy in and out of the geometry's torch functions, for servers that hold plain arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedlora.geometry.frames import Frames
from fedlora.geometry.tangent import Tangent

Array = npt.NDArray[Any]


def tensor(array: Array, *, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return a CPU tensor of the array's values in `dtype` (a copy; the array is never shared)."""
    return torch.tensor(np.asarray(array), dtype=dtype)


def array(value: torch.Tensor) -> npt.NDArray[np.float32]:
    """Return a contiguous float32 array of the tensor's values (a copy)."""
    return np.array(value.detach().to("cpu", torch.float32).numpy(), dtype=np.float32, order="C", copy=True)


def frames_from_arrays(
    q_out: Array, core: Array, q_in: Array, *, dtype: torch.dtype = torch.float64
) -> Frames:
    """Return frames from three arrays; check them with `check_frames` where they came from outside."""
    return Frames(tensor(q_out, dtype=dtype), tensor(core, dtype=dtype), tensor(q_in, dtype=dtype))


def frames_to_arrays(frames: Frames) -> tuple[Array, Array, Array]:
    """Return (q_out, core, q_in) as float32 arrays."""
    return array(frames.q_out), array(frames.core), array(frames.q_in)


def tangent_from_arrays(x_out: Array, x_in: Array, *, dtype: torch.dtype = torch.float64) -> Tangent:
    """Return a tangent vector from its two blocks."""
    return Tangent(tensor(x_out, dtype=dtype), tensor(x_in, dtype=dtype))
