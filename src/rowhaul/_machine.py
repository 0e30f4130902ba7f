"""What the bits of results depend on, or may: versions, and the instructions that a CPU has."""

from __future__ import annotations

import platform

import llvmlite
import llvmlite.binding
import numba
import torch


def compiler_versions() -> dict[str, str]:
    """Return the versions that compile kernels."""
    return {"version of numba": numba.__version__, "version of llvmlite": llvmlite.__version__}


def cpu_capability() -> str:
    """Return the instructions that PyTorch uses: DEFAULT, AVX2, AVX512 and so on."""
    return torch.backends.cpu.get_cpu_capability()


def describe_machine() -> str:
    """Describe what a rank computes with, in a few words."""
    cpu = llvmlite.binding.get_host_cpu_name()
    return f"{platform.node()}, {cpu}, {cpu_capability()}, {torch.get_num_threads()} threads"
