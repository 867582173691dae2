"""Global memory and LDS, as numpy arrays that know their bounds."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from anymla.verification.amdgcn.checks import BadAccess

Array = NDArray[Any]
U8, U32, U64, I64 = np.uint8, np.uint32, np.uint64, np.int64

ELEMENTS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
"""What is moved at once, by bytes; numpy copies a complex number bit for bit."""

SLOT = 40
"""log2 of the address space of one buffer, so that an address tells which buffer was meant."""

GARBAGE = 0xFFC9FFC9
"""What nobody wrote: NaN in every float format, and no sensible integer."""


class Memory:
    """The caller's arrays, each in the middle of an address space of its own."""

    def __init__(self) -> None:
        self._buffers: list[Array] = []
        self._writable: list[bool] = []

    def map(self, array: Array, *, writable: bool = True) -> int:
        """Give a one-dimensional array of bytes an address, aligned as its own; return the address."""
        self._buffers.append(array)
        self._writable.append(writable)
        return self._base(len(self._buffers) - 1)

    def _base(self, number: int) -> int:
        start = self._buffers[number].__array_interface__["data"][0]
        return (number + 1 << SLOT) + (1 << SLOT - 1) + int(start) % 256

    def load(self, addresses: Array, mask: Array | None, size: int, align: int = 1) -> Array:
        """Read `size` bytes for each lane.

        Args:
            addresses: [waves, lanes] uint64.
            mask: Lanes that take part; None is all.
            size: 1, 2, or a multiple of 4.
            align: What addresses must be a multiple of.

        Returns:
            [waves, lanes, words] uint32; lanes that take no part are 0, one or two bytes are zero-extended.

        Raises:
            BadAccess: an address outside every buffer, or misaligned.
        """
        out = np.zeros((*addresses.shape, max(size // 4, 1)), U32)
        wanted = addresses.ravel() if mask is None else addresses[mask]
        if not wanted.size:
            return out
        flat = out.reshape(-1, out.shape[-1]) if mask is None else np.empty((wanted.size, out.shape[-1]), U32)
        for number, chosen, offsets in self._parts(addresses, mask, wanted, size, align):
            flat[chosen] = _gather(self._buffers[number], offsets, size)
        if mask is not None:
            out[mask] = flat
        return out

    def store(self, addresses: Array, mask: Array | None, words: Array, size: int, align: int = 1) -> None:
        """Write `size` bytes for each lane; arguments as for `load`, words [waves, lanes, words] uint32."""
        wanted = addresses.ravel() if mask is None else addresses[mask]
        if not wanted.size:
            return
        flat = words.reshape(-1, words.shape[-1]) if mask is None else words[mask]
        for number, chosen, offsets in self._parts(addresses, mask, wanted, size, align):
            if not self._writable[number]:
                raise self._bad("a write to memory that is only read", addresses, mask, chosen, offsets, 0)
            _scatter(self._buffers[number], offsets, flat[chosen], size)

    def _parts(self, addresses: Array, mask: Array | None, wanted: Array, size: int, align: int) -> Any:
        """Buffer by buffer: its number, which of the wanted addresses lie there, their offsets."""
        numbers = (wanted >> U64(SLOT)).astype(I64) - 1
        first = int(numbers[0])
        for number in [first] if (numbers == first).all() else np.unique(numbers):
            chosen = slice(None) if number == first and (numbers == first).all() else numbers == number
            if not 0 <= number < len(self._buffers):
                where = wanted[chosen].astype(I64)
                raise self._bad(
                    "an address in no buffer", addresses, mask, chosen, where, int(where.argmax())
                )
            offsets = wanted[chosen].astype(I64) - self._base(int(number))
            length = self._buffers[number].size
            low, high = int(offsets.argmin()), int(offsets.argmax())
            for extreme in (low, high):
                if offsets[extreme] < 0 or offsets[extreme] + size > length:
                    what = f"{size} bytes outside of a buffer of {length}"
                    raise self._bad(what, addresses, mask, chosen, offsets, extreme)
            if align > 1 and (odd := (wanted[chosen] & U64(align - 1)) != 0).any():
                what = f"{size} bytes not aligned to {align}"
                raise self._bad(what, addresses, mask, chosen, offsets, int(odd.argmax()))
            yield int(number), chosen, offsets

    @staticmethod
    def _bad(
        what: str, addresses: Array, mask: Array | None, chosen: Any, offsets: Array, index: int
    ) -> BadAccess:
        taking_part = np.ones(addresses.shape, bool) if mask is None else mask
        wave, lane = np.argwhere(taking_part)[chosen][index]
        return BadAccess(what, (int(wave), int(lane)), int(offsets[index]))


def _element(offsets: Array, size: int) -> int:
    """The widest element that divides size and every offset."""
    odd = int(np.bitwise_or.reduce(offsets)) | size
    return min(odd & -odd, 16)


def _gather(buffer: Array, offsets: Array, size: int) -> Array:
    if not offsets.size:
        return np.zeros((0, max(size // 4, 1)), U32)
    width = _element(offsets, size)
    view: Array = buffer[: buffer.size // width * width].view(ELEMENTS[width])
    places = offsets // width
    if width == size:
        single: Array = view[places]
        return single.view(U32).reshape(len(offsets), -1) if width >= 4 else single.astype(U32)[:, None]
    found: Array = view[places[:, None] + np.arange(size // width)]
    words: Array = found.view(U32) if size >= 4 else found.view(np.uint16).astype(U32)
    return words


def _scatter(buffer: Array, offsets: Array, words: Array, size: int) -> None:
    if not offsets.size:
        return
    width = _element(offsets, size)
    view: Array = buffer[: buffer.size // width * width].view(ELEMENTS[width])
    raw = np.ascontiguousarray(words).view(U8).reshape(len(offsets), -1)[:, :size]
    elements: Array = np.ascontiguousarray(raw).view(ELEMENTS[width])
    places = (offsets // width)[:, None] + np.arange(size // width)
    view[places] = elements


class SharedMemory:
    """The LDS of all workgroups of a batch, one after the other.

    Attributes:
        size: Bytes of a workgroup.
        stride: Bytes from one workgroup's to the next one's.
        aligned: Whether an access that is not aligned is refused, though the chip takes it.
    """

    def __init__(self, workgroups: int, size: int, aligned: bool = True) -> None:
        self.size, self.stride, self.aligned = size, max(-(-size // 16) * 16, 16), aligned
        self._bytes = np.full(workgroups * self.stride // 4, GARBAGE, U32).view(U8)
        self._written = np.zeros(self._bytes.size, U8)

    @property
    def num_bytes(self) -> int:
        """Of all workgroups."""
        return self._bytes.size

    def places(self, workgroups: Array, addresses: Array, mask: Array | None, size: int, align: int) -> Array:
        """Check addresses [waves, lanes] int64 and return where they are, [n] for the lanes of the mask.

        Raises:
            BadAccess: beyond the workgroup's LDS, or misaligned.
        """
        wanted = addresses.ravel() if mask is None else addresses[mask]
        if wanted.size and (int(wanted.max()) + size > self.size or int(wanted.min()) < 0):
            bad = (addresses + size > self.size) | (addresses < 0)
            self._refuse(f"{size} bytes outside of the {self.size} bytes of LDS", addresses, mask, bad)
        if self.aligned and align > 1 and wanted.size and int(np.bitwise_or.reduce(wanted)) & (align - 1):
            self._refuse(f"{size} bytes not aligned to {align}", addresses, mask, addresses % align != 0)
        whole: Array = addresses + workgroups[:, None] * self.stride
        chosen: Array = whole.ravel() if mask is None else whole[mask]
        return chosen

    @staticmethod
    def _refuse(what: str, addresses: Array, mask: Array | None, bad: Array) -> None:
        wave, lane = np.argwhere(bad if mask is None else bad & mask)[0]
        raise BadAccess(what, (int(wave), int(lane)), int(addresses[wave, lane]))

    def load(self, places: Array, size: int) -> tuple[Array, Array | None]:
        """Words [n, words] uint32, and which of the n were never written in part, None if none was."""
        found = _gather(self._bytes, places, size)
        # Halves, because a dword may have been written in two parts.
        suspects = found == 0xC9 if size == 1 else np.ascontiguousarray(found).view(np.uint16) == 0xFFC9
        if not suspects.any():
            return found, None
        written = _gather(self._written, places, size)
        unwritten = (written != (0x01010101 if size >= 4 else 0x0101 if size == 2 else 1)).any(1)
        return found, unwritten if unwritten.any() else None

    def store(self, places: Array, words: Array, size: int, undefined: Array | None = None) -> None:
        """Write words [n, words]; those of `undefined` count as never written."""
        _scatter(self._bytes, places, words, size)
        count = np.full(words.shape, 0x01010101, U32)
        if undefined is not None:
            count[undefined] = 0
            rubbish = np.full((int(undefined.sum()), words.shape[1]), GARBAGE, U32)
            _scatter(self._bytes, places[undefined], rubbish, size)
        _scatter(self._written, places, count, size)
