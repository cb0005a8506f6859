"""Minutes 18 to 22: the kernels of a recorded step, their number per layer, and the device's utilisation."""

import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from bench.gpu_first_half_hour.results import device_name, results_folder, write
from bench.random_pair import write_tokenizer
from specdec.engine.base import SequenceSlice, StepPlan
from specdec.engine.loader import load_worker
from specdec.engine.options import CompileOptions, LoadRequest
from specdec.engine.sessions.block_manager import blocks_for

NUM_LAYERS, NUM_STEPS, CONTEXT = 4, 5, 512


def write_model(folder: Path, device: str) -> None:
    """Write a model with a few layers of an 8B model, or small layers on a CPU."""
    part = 1 if device == "cuda" else 16
    config = LlamaConfig(
        hidden_size=4096 // part, intermediate_size=14336 // part, num_hidden_layers=NUM_LAYERS,
        num_attention_heads=32 // part, num_key_value_heads=8 // min(part, 8), vocab_size=4096,
        max_position_embeddings=2048, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size)


def main() -> None:
    results, device = results_folder(), device_name()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), device)
        worker = load_worker(
            LoadRequest(
                folder,
                device=device,
                dtype="bfloat16",
                num_kv_blocks=128,
                compiling=CompileOptions(row_counts=(1, 5)),
                self_check=False,
            )
        )
    blocks = tuple(range(blocks_for(CONTEXT + 1)))
    worker.execute(StepPlan((SequenceSlice((5,) * CONTEXT, 0, blocks, 0),)))
    plan = StepPlan((SequenceSlice((5,), CONTEXT, blocks, 1),))
    worker.execute(plan).cpu()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities) as seen:
        for _ in range(NUM_STEPS):
            worker.execute(plan).cpu()
    seen.export_chrome_trace(str(results / "step5_trace.json"))
    on_device = [event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    names: dict[str, int] = {}
    for event in on_device:
        names[event.name] = names.get(event.name, 0) + 1
    busy_us = sum(event.time_range.elapsed_us() for event in on_device)
    found = {
        "layers": NUM_LAYERS,
        "kernels_a_step": len(on_device) / NUM_STEPS,
        "device_us_a_step": busy_us / NUM_STEPS,
        "kernels": names,
    }
    write(results, "step5_kernels", found)


if __name__ == "__main__":
    main()
