"""Kernels of a card run on it where there is one, and through Triton's interpreter elsewhere."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined
