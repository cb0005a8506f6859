"""What PyTorch is told about CUDA devices, once a process and whether or not there is one. Called by the loaders."""

from __future__ import annotations

import torch


def settle_cuda() -> None:
    """Idempotent, and for the whole process."""
    # cuDNN's attention makes a plan for every new length and keeps it for good: chunks of prompts and eager steps
    # have new lengths all the time.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Sums of parts of a product that are rounded to 16 bits depend on how the product was cut, so on the batch.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    # An environment may ask for it; some releases of transformers multiply positions that way, of which 11 bits stay.
    torch.backends.cuda.matmul.allow_tf32 = False


def release_freed(device: torch.device) -> None:
    """Gives memory that PyTorch keeps of freed tensors back to a CUDA device."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
