"""Ahead-of-time compilation of a launch for Hopper, on a machine that has no GPU."""

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

HOPPER = GPUTarget("cuda", 90, 32)
_POINTER = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Recorder:
    """Stands in for a kernel: takes its launch and compiles it instead of running it."""

    def __init__(self, kernel: triton.JITFunction) -> None:
        self.kernel = kernel
        self.compiled: list[triton.compiler.CompiledKernel] = []

    def __getitem__(self, grid: object) -> "Recorder":
        return self

    def __call__(
        self, *args: object, num_warps: int = 4, num_stages: int = 3, enable_fp_fusion: bool = True,
        **named: object,
    ):  # fmt: skip
        values = dict(zip(self.kernel.arg_names, args, strict=False)) | named
        signature, constants, attributes = {}, {}, {}
        for index, name in enumerate(self.kernel.arg_names):
            value = values[name]
            if name in named:
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[name] = _POINTER[value.dtype]
                attributes[(index,)] = [["tt.divisibility", 16]]
            elif isinstance(value, TensorDescriptor):
                element = _POINTER[value.base.dtype][1:]
                signature[name] = f"tensordesc<{element}{list(value.block_shape)}>"
            elif isinstance(value, float):
                signature[name] = "fp32"
            elif value == 1:  # a launch specialises on it
                signature[name], constants[name] = "constexpr", 1
            else:
                signature[name] = "i32"
                if value % 16 == 0:
                    attributes[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, attributes)
        options = {
            "num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": enable_fp_fusion,
        }  # fmt: skip
        self.compiled.append(triton.compile(source, target=HOPPER, options=options))
