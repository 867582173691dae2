"""HeadPadding: makes a head count that a kernel does not have into one that it has, and back."""

from dataclasses import dataclass

import torch
from torch import Tensor

from anymla.errors import Reasons

RULES = ("identity", "interleave", "tile", "zero")
"""Head h goes to lane h; h · (padded / H), copies beside it; h, copies of all after; h, zeros after."""


@dataclass(frozen=True)
class HeadPadding:
    """A padding of heads together with its inverse, so that the two cannot disagree.

    In absorbed attention every head attends on its own, so lanes that are not real cannot change those that
    are.

    Attributes:
        num_heads: H, real heads.
        padded: Lanes of the kernel, at least H.
        rule: One of RULES.
    """

    num_heads: int
    padded: int
    rule: str

    def __post_init__(self) -> None:
        reasons = Reasons("HeadPadding")
        reasons.need(self.rule in RULES, "rule", repr(self.rule), " or ".join(RULES))
        if reasons.need(self.num_heads > 0, "num_heads", self.num_heads, "at least 1"):
            need = f"at least {self.num_heads}, num_heads"
            if reasons.need(self.padded >= self.num_heads, "padded", self.padded, need):
                same, whole = self.padded == self.num_heads, self.padded % self.num_heads == 0
                reasons.need(
                    self.rule != "identity" or same, "padded", self.padded, f"{self.num_heads} for identity"
                )
                need = f"a multiple of {self.num_heads} for interleave"
                reasons.need(self.rule != "interleave" or whole, "padded", self.padded, need)
        reasons.raise_if_any()

    @classmethod
    def between(cls, num_heads: int, padded: int) -> "HeadPadding":
        """The usual padding: identity where none is needed, interleave to a multiple, else tile.

        Args:
            num_heads: H, real heads.
            padded: Lanes of the kernel.

        Returns:
            The padding.

        Raises:
            InvalidInput: num_heads is not positive, or padded is less.

        Source: vLLM 0.33 pads AITER's queries by these rules.
        """
        if num_heads == padded:
            return cls(num_heads, padded, "identity")
        return cls(num_heads, padded, "interleave" if num_heads > 0 and padded % num_heads == 0 else "tile")

    @property
    def lanes(self) -> tuple[int | None, ...]:
        """For each lane the real head in it, or None for a lane of zeros."""
        if self.rule == "interleave":
            return tuple(lane * self.num_heads // self.padded for lane in range(self.padded))
        if self.rule == "zero":
            return tuple(lane if lane < self.num_heads else None for lane in range(self.padded))
        return tuple(lane % self.num_heads for lane in range(self.padded))

    def pad_q(self, q: Tensor, padded_q: Tensor | None = None) -> Tensor:
        """Spread the queries over the lanes.

        Args:
            q: [T, H, D], any dtype.
            padded_q: [T, padded, D], same dtype, to be filled. None: it is allocated, or q itself where
                nothing changes.

        Returns:
            [T, padded, D], every lane written.

        Raises:
            InvalidInput: q does not have H heads, or padded_q does not fit.
        """
        reasons = Reasons("HeadPadding.pad_q")
        self._need_heads(reasons, "q", q, 3, self.num_heads)
        if padded_q is not None and not reasons.found:
            shape = (q.shape[0], self.padded, q.shape[2])
            fits = padded_q.shape == shape and padded_q.dtype == q.dtype and padded_q.device == q.device
            got = f"shape {tuple(padded_q.shape)}, {padded_q.dtype} on {padded_q.device}"
            reasons.need(fits, "padded_q", got, f"{shape}, {q.dtype} on {q.device}, from q")
        reasons.raise_if_any()
        return self._spread(q, 0.0, padded_q)

    def pad_sinks(self, sinks: Tensor) -> Tensor:
        """Spread the sinks as `pad_q` spreads the queries; lanes of zeros get -inf, which is no sink.

        Args:
            sinks: [H].

        Returns:
            [padded]; sinks itself where nothing changes.

        Raises:
            InvalidInput: sinks is not [H].
        """
        reasons = Reasons("HeadPadding.pad_sinks")
        reasons.need(
            sinks.shape == (self.num_heads,), "sinks", f"shape {tuple(sinks.shape)}", f"({self.num_heads},)"
        )
        reasons.raise_if_any()
        return self._spread(sinks[None, :, None], -torch.inf, None)[0, :, 0]

    def unpad_out(self, out: Tensor) -> Tensor:
        """Take the real heads out of a padded output.

        Args:
            out: [T, padded, X].

        Returns:
            [T, H, X], a view.

        Raises:
            InvalidInput: out does not have the padded heads.
        """
        reasons = Reasons("HeadPadding.unpad_out")
        self._need_heads(reasons, "out", out, 3, self.padded)
        reasons.raise_if_any()
        return self._real(out)

    def unpad_lse(self, lse: Tensor) -> Tensor:
        """Take the real heads out of a padded lse.

        Args:
            lse: [T, padded].

        Returns:
            [T, H], a view.

        Raises:
            InvalidInput: lse does not have the padded heads.
        """
        reasons = Reasons("HeadPadding.unpad_lse")
        self._need_heads(reasons, "lse", lse, 2, self.padded)
        reasons.raise_if_any()
        return self._real(lse)

    def _need_heads(self, reasons: Reasons, name: str, tensor: Tensor, ndim: int, heads: int) -> None:
        fits = tensor.dim() == ndim and tensor.shape[1] == heads
        needs = f"{ndim} axes, the second {heads}, from {self.num_heads} heads padded to {self.padded}"
        reasons.need(fits, name, f"shape {tuple(tensor.shape)}", needs)

    def _spread(self, x: Tensor, fill: float, into: Tensor | None) -> Tensor:
        """[T, H, D] over the lanes."""
        if self.rule == "identity" and into is None:
            return x
        if into is None:
            into = torch.empty(x.shape[0], self.padded, x.shape[2], dtype=x.dtype, device=x.device)
        if self.rule == "interleave":
            copies = self.padded // self.num_heads
            into.view(x.shape[0], self.num_heads, copies, x.shape[2]).copy_(x[:, :, None])
        elif self.rule == "zero":
            into[:, : self.num_heads] = x
            into[:, self.num_heads :] = fill
        else:
            for first in range(0, self.padded, self.num_heads):
                lanes = into[:, first : first + self.num_heads]
                lanes.copy_(x[:, : lanes.shape[1]])
        return into

    def _real(self, padded: Tensor) -> Tensor:
        """The lanes of the real heads, along axis 1."""
        step = self.padded // self.num_heads if self.rule == "interleave" else 1
        return padded[:, : self.num_heads * step : step]
