# mypy: ignore-errors
"""ChaCha20 keystream on the device (Triton): cryptographic noise without a trip over the bus.

The block function of RFC 8439, section 2.3, one lane for each block. Key and nonce are fresh operating-system
entropy in every call. At first use in a process the kernel's output is compared with the `cryptography` package's.
"""

import os
import struct

import numpy as np
import torch
import triton
import triton.language as tl

from fedlora.errors import PrivacyError

_LANES = 256
_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
_checked: set = set()


@triton.jit
def _quarter(a, b, c, d):
    a = a + b
    d = d ^ a
    d = (d << 16) | (d >> 16)
    c = c + d
    b = b ^ c
    b = (b << 12) | (b >> 20)
    a = a + b
    d = d ^ a
    d = (d << 8) | (d >> 24)
    c = c + d
    b = b ^ c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def _word(state, index, zero):
    return tl.load(state + index).to(tl.uint32, bitcast=True) + zero


@triton.jit
def _blocks(out, state, count, LANES: tl.constexpr):
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    zero = tl.zeros((LANES,), tl.uint32)
    s0 = _word(state, 0, zero)
    s1 = _word(state, 1, zero)
    s2 = _word(state, 2, zero)
    s3 = _word(state, 3, zero)
    s4 = _word(state, 4, zero)
    s5 = _word(state, 5, zero)
    s6 = _word(state, 6, zero)
    s7 = _word(state, 7, zero)
    s8 = _word(state, 8, zero)
    s9 = _word(state, 9, zero)
    s10 = _word(state, 10, zero)
    s11 = _word(state, 11, zero)
    s12 = _word(state, 12, zero) + lane.to(tl.uint32)
    s13 = _word(state, 13, zero)
    s14 = _word(state, 14, zero)
    s15 = _word(state, 15, zero)
    x0, x1, x2, x3, x4, x5, x6, x7 = s0, s1, s2, s3, s4, s5, s6, s7
    x8, x9, x10, x11, x12, x13, x14, x15 = s8, s9, s10, s11, s12, s13, s14, s15
    for _ in tl.static_range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    mask = lane < count
    place = out + lane
    tl.store(place, (x0 + s0).to(tl.int32, bitcast=True), mask=mask)
    tl.store(place + count, (x1 + s1).to(tl.int32, bitcast=True), mask=mask)
    tl.store(place + 2 * count, (x2 + s2).to(tl.int32, bitcast=True), mask=mask)
    tl.store(place + 3 * count, (x3 + s3).to(tl.int32, bitcast=True), mask=mask)
    tl.store(place + 4 * count, (x4 + s4).to(tl.int32, bitcast=True), mask=mask)
    tl.store(place + 5 * count, (x5 + s5).to(tl.int32, bitcast=True), mask=mask)
    tl.store(place + 6 * count, (x6 + s6).to(tl.int32, bitcast=True), mask=mask)
    tl.store(place + 7 * count, (x7 + s7).to(tl.int32, bitcast=True), mask=mask)
    tl.store(place + 8 * count, (x8 + s8).to(tl.int32, bitcast=True), mask=mask)
    tl.store(place + 9 * count, (x9 + s9).to(tl.int32, bitcast=True), mask=mask)
    tl.store(place + 10 * count, (x10 + s10).to(tl.int32, bitcast=True), mask=mask)
    tl.store(place + 11 * count, (x11 + s11).to(tl.int32, bitcast=True), mask=mask)
    tl.store(place + 12 * count, (x12 + s12).to(tl.int32, bitcast=True), mask=mask)
    tl.store(place + 13 * count, (x13 + s13).to(tl.int32, bitcast=True), mask=mask)
    tl.store(place + 14 * count, (x14 + s14).to(tl.int32, bitcast=True), mask=mask)
    tl.store(place + 15 * count, (x15 + s15).to(tl.int32, bitcast=True), mask=mask)


def keystream(blocks, key, nonce, device):
    """Return (16, blocks) int32: word i of block b at [i, b]; counters start at 0.

    Args:
        blocks: number of 64-byte blocks, below 2^32.
        key: 32 bytes.
        nonce: 12 bytes.
        device: a CUDA device.
    """
    if not 0 < blocks < 2**32:
        raise PrivacyError(f"noise: {blocks} blocks in one draw; allowed 1 to 2^32 - 1; draw in parts")
    words = (*_CONSTANTS, *struct.unpack("<8I", key), 0, *struct.unpack("<3I", nonce))
    host = torch.from_numpy(np.array(words, dtype=np.uint32).view(np.int32))
    state = (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
    out = torch.empty(16, blocks, dtype=torch.int32, device=device)
    _blocks[(triton.cdiv(blocks, _LANES),)](out, state, blocks, LANES=_LANES)
    return out


def check(device):
    """Compare the kernel with the `cryptography` package on this device.

    Raises:
        PrivacyError: if they differ.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    key, nonce, blocks = os.urandom(32), os.urandom(12), 513
    cipher = Cipher(algorithms.ChaCha20(key, bytes(4) + nonce), mode=None)
    expected = np.frombuffer(cipher.encryptor().update(bytes(64 * blocks)), dtype="<i4").reshape(blocks, 16)
    got = keystream(blocks, key, nonce, device).cpu().numpy().T
    if not np.array_equal(got, expected):
        raise PrivacyError(
            "noise: the device's ChaCha20 gives wrong words; noise is refused; use the CPU source"
        )


def random_words(count: int, device: torch.device) -> torch.Tensor:
    """Return (count,) int64 uniform words from a fresh operating-system key. SENSITIVE."""
    if device not in _checked:
        check(device)
        _checked.add(device)
    words = keystream(-(-count // 8), os.urandom(32), os.urandom(12), device)
    return words.view(-1).view(torch.int64)[:count]
