"""Triton's interpreter, made to round as a chip does; these tests run only where it is on.

It multiplies and adds bf16 as if their bits were integers, multiplies fp8 as if it were uint8, cuts fp32 to
bf16 off instead of rounding, and takes no loop bound from a tensor with NumPy 2.4. Products and casts are put
right here; other bf16 arithmetic, which no kernel needs, is refused.
"""

import os
from typing import Any

import pytest

ON = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if ON else ["*.py"]

if ON:
    import numpy as np
    import torch
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    from anymla.backends.triton_mla import choose

    Builder, Handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    ARITHMETIC = ("fadd", "fsub", "fmul", "fdiv", "frem", "maximumf", "maxnumf", "minimumf", "minnumf", "fma")
    EXACT = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e4b8: torch.float8_e4m3fnuz}
    patch_tensor = interpreter._patch_lang_tensor
    cast = Builder.cast_impl

    def to_fp32(bits: Any) -> Any:
        """The values of bf16 bits."""
        return (bits.astype(np.uint32) << 16).view(np.float32)

    def to_bf16(values: Any) -> Any:
        """The bits of the nearest bf16 values, ties to even."""
        bits = np.ascontiguousarray(values).view(np.uint32)
        rounded = (bits + (((bits >> 16) & 1) + 0x7FFF).astype(np.uint32)) >> 16
        return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        pair = (src.dtype.scalar, dst_type.scalar)
        if pair == (tl.bfloat16, tl.float32):
            return Handle(to_fp32(src.data), tl.float32)
        if pair == (tl.float32, tl.bfloat16):
            return Handle(to_bf16(src.data), tl.bfloat16)
        assert tl.bfloat16 not in pair or pair[0] == pair[1], f"{pair} is not a cast of the interpreter"
        return cast(self, src, dst_type)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        """From and to fp8; its codes are what torch says they are."""
        source, target = src.dtype.scalar, dst_type.scalar
        data = torch.from_numpy(np.ascontiguousarray(src.data))
        if target in EXACT:
            assert source in (tl.float32, tl.float16), f"{source} is no source of fp8 here"
            return Handle(data.to(EXACT[target]).view(torch.uint8).numpy(), target)
        return self.cast_impl(Handle(data.view(EXACT[source]).float().numpy(), tl.float32), target)

    def operand(data: Any, dtype: Any) -> Any:
        if dtype in EXACT:
            return torch.from_numpy(np.ascontiguousarray(data)).view(EXACT[dtype]).float().numpy()
        return to_fp32(data) if dtype == tl.bfloat16 else data

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        x, y = (operand(t.data, t.dtype.scalar) for t in (a, b))
        return Handle(np.matmul(x, y, dtype=np.float32) + d.data, d.dtype.scalar)

    def refusing_bf16(name: str, operation: Any) -> Any:
        def checked(self: Any, *args: Any) -> Any:
            assert all(arg.dtype.scalar != tl.bfloat16 for arg in args), f"{name} of bf16"
            return operation(self, *args)

        return checked

    def with_index(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        result = patch_tensor(tensor, *args, **kwargs)
        tensor.__index__ = lambda self: int(self.handle.data.item())
        return result

    Builder.cast_impl = cast_impl
    Builder.create_fp_to_fp = create_fp_to_fp
    Builder.create_dot = create_dot
    for name in ARITHMETIC:
        setattr(Builder, f"create_{name}", refusing_bf16(name, getattr(Builder, f"create_{name}")))
    interpreter._patch_lang_tensor = with_index
    # Kernels run one after the other: there is nothing to wait for.
    for name in ("gdc_wait", "gdc_launch_dependents"):
        setattr(choose, name, lambda: None)


@pytest.fixture(autouse=True)
def ieee_arithmetic() -> Any:
    """Infinities and NaNs are values, not warnings."""
    with np.errstate(all="ignore"):
        yield
