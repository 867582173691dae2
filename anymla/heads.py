"""HeadPadding: makes a head count that a kernel does not have into one that it has, and back."""

from dataclasses import dataclass

import torch
from torch import Tensor

from anymla.arguments import check_count, shown
from anymla.contract import check_tensor
from anymla.errors import Reasons
from anymla.problem import count_of

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
        rule = self.rule if isinstance(self.rule, str) else None
        reasons.need(rule in RULES, "rule", shown(self.rule), " or ".join(RULES))
        heads, padded = check_count(reasons, "num_heads", self.num_heads), count_of(self.padded)
        if heads == count_of(self.num_heads):
            enough = padded is not None and padded >= heads
            if reasons.need(enough, "padded", shown(self.padded), f"at least {heads}, num_heads"):
                same, whole = self.padded == self.num_heads, self.padded % self.num_heads == 0
                reasons.need(
                    rule != "identity" or same, "padded", self.padded, f"{self.num_heads} for identity"
                )
                need = f"a multiple of {self.num_heads} for interleave"
                reasons.need(rule != "interleave" or whole, "padded", self.padded, need)
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
        # What is no count is refused by the padding itself.
        heads, lanes = count_of(num_heads) or 0, count_of(padded) or 0
        whole = heads > 0 and lanes % heads == 0
        rule = "identity" if heads == lanes else "interleave" if whole else "tile"
        return cls(num_heads, padded, rule)

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
        if self._has_heads(reasons, "q", q, 3, self.num_heads) and padded_q is not None:
            shape = (q.shape[0], self.padded, q.shape[2])
            check_tensor(reasons, "padded_q", padded_q, shape, (q.dtype,), q.device, "from q")
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
        check_tensor(reasons, "sinks", sinks, (self.num_heads,), None)
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
        self._has_heads(reasons, "out", out, 3, self.padded)
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
        self._has_heads(reasons, "lse", lse, 2, self.padded)
        reasons.raise_if_any()
        return self._real(lse)

    def _has_heads(self, reasons: Reasons, name: str, tensor: Tensor, ndim: int, heads: int) -> bool:
        shape, origin = (None, heads, None)[:ndim], f"from {self.num_heads} heads padded to {self.padded}"
        return check_tensor(reasons, name, tensor, shape, None, origin=origin)

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
