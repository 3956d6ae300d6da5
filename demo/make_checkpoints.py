"""Write models to try an engine with: python demo/make_checkpoints.py FOLDER [MODEL ...]

Each model comes as FOLDER/MODEL-bf16, as FOLDER/MODEL-FORMAT for every FP8 format, and as
FOLDER/MODEL-FORMAT-dequantised, the same weights in float32. What exists is kept. Models: smollm2 (real,
SmolLM2-135M-Instruct, sides that are no multiples of 128), aligned, ragged and mixture (trained here to recite a text;
the mixture of experts in block formats only).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import reciter
from fp8_formats import FORMATS, write_dequantised_checkpoint, write_fp8_checkpoint
from model import write_bf16_checkpoint

RECITERS = {"aligned": reciter.ALIGNED, "ragged": reciter.RAGGED, "mixture": reciter.MIXTURE}
MODELS = ("smollm2", *RECITERS)


def make(folder: Path, model: str, formats: tuple[str, ...] = tuple(FORMATS)) -> None:
    """Writes what is missing of ``model``."""
    folder.mkdir(parents=True, exist_ok=True)
    bf16 = folder / f"{model}-bf16"
    if not bf16.exists():
        print(f"  {bf16.name} ...", flush=True)
        if model == "smollm2":
            write_bf16_checkpoint(bf16)
        else:
            reciter.train(bf16, RECITERS[model])
    for name in formats:
        if model == "mixture" and FORMATS[name].strategy != "block":
            continue  # engines' experts on a CPU know block scales alone
        fp8 = folder / f"{model}-{name}"
        plain = folder / f"{model}-{name}-dequantised"
        if not fp8.exists():
            write_fp8_checkpoint(bf16, fp8, FORMATS[name])
        if not plain.exists():
            write_dequantised_checkpoint(fp8, plain, FORMATS[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="*", default=[], metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    options = parser.parse_args()
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"expected MODEL to be one of {', '.join(MODELS)}, got {', '.join(sorted(unknown))}")
    for model in options.models or MODELS:
        make(options.folder, model, tuple(options.formats))


if __name__ == "__main__":
    main()
