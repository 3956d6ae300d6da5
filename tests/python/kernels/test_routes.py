"""Which kernel runs a layer: every route, the choice among classes, and what is said when none fits."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import route_table
import torch
from blockscale import kernels
from blockscale.kernels import (
    POSSIBLE_FP8_BLOCK_KERNELS,
    POSSIBLE_FP8_KERNELS,
    POSSIBLE_W8A16_KERNELS,
    BlockWiseTorchFP8ScaledMMLinearKernel,
    CPUFp8BlockScaledMMKernel,
    CPUFp8W8A8BlockScaledMMKernel,
    MMLinearKernel,
    NoKernelError,
    XPUFp8BlockScaledMMKernel,
    XPUW8A16FP8LinearKernel,
    choose_scaled_mm_linear_kernel,
    route,
)
from contracts import xpu_ops
from fp8_layers import config
from oracle import BF16, E8M0, F16, F32

README = Path(__file__).parents[3] / "README.md"
BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128]}
CHANNEL = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"type": "float", "strategy": "channel"}}}}
LAYER = "model.layers.0.mlp.down_proj"
NAMES = {
    "CPUFp8BlockScaledMMKernel",
    "CPUFp8W8A8BlockScaledMMKernel",
    "XPUFp8BlockScaledMMKernel",
    "XPUW8A16FP8LinearKernel",
    "BlockWiseTorchFP8ScaledMMLinearKernel",
}


@pytest.fixture
def log(caplog):
    kernels._logged.clear()
    caplog.set_level(logging.INFO, logger="blockscale")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "blockscale"]


# ----------------------------------------------------------------------------------------------------------- the table
def expected_route(machine, weight, activation, backend):
    """DESIGN's rule, row by row."""
    block = weight == "block"
    suffix = "_block" if block else ""
    if machine == "CPU":
        return "w8a16" + suffix, "CPUFp8BlockScaledMMKernel" if backend in ("auto", "cpu") else "none"
    if machine == "XPU":
        if block:
            return "w8a8_block", "XPUFp8BlockScaledMMKernel" if backend in ("auto", "xpu") else "none"
        if backend in ("xpu", "torch") and activation == "FP8":
            return "w8a8", "none"
        return "w8a16", "XPUW8A16FP8LinearKernel" if backend in ("auto", "xpu_woq") else "none"
    eight = activation == "FP8" and machine != "CUDA, SM80"
    runs = block and eight and machine == "CUDA, SM90" and backend in ("auto", "torch")
    return ("w8a8" if eight else "w8a16") + suffix, "BlockWiseTorchFP8ScaledMMLinearKernel" if runs else "none"


ROUTES = route_table.all_routes()


@pytest.mark.parametrize("row", ROUTES, ids="-".join)
def test_route(row):
    assert ROUTES[row] == expected_route(*row)


def test_the_table_covers_every_combination():
    assert len(ROUTES) == 6 * 3 * 2 * 5
    assert {kernel for _, kernel in ROUTES.values()} == NAMES - {"CPUFp8W8A8BlockScaledMMKernel"} | {"none"}


def test_the_table_in_the_readme_is_current():
    text = README.read_text()
    inside = text.partition(route_table.BEGIN)[2].partition(route_table.END)[0].strip()
    assert inside == route_table.markdown(), "run tests/python/kernels/route_table.py and paste its output"


def test_lists_hold_the_classes_by_platform():
    registered = {kernel.__name__ for kernel in kernels._registered()}
    assert registered == NAMES
    assert CPUFp8BlockScaledMMKernel in POSSIBLE_FP8_BLOCK_KERNELS["cpu"]
    assert CPUFp8BlockScaledMMKernel in POSSIBLE_W8A16_KERNELS["cpu"]
    for table in (POSSIBLE_FP8_BLOCK_KERNELS, POSSIBLE_FP8_KERNELS, POSSIBLE_W8A16_KERNELS):
        assert list(table) == ["cpu", "xpu", "cuda", "rocm"]


# ------------------------------------------------------------------------------------------------------------ the route
def test_a_route_says_all_that_was_decided():
    decision = route(BLOCK, LAYER, weight_shape=(576, 7168), input_dtype=F16, out_dtype=F32, scale_dtype=E8M0)
    assert (decision.scheme, decision.weight_strategy, decision.block_size) == ("w8a16_block", "block", (128, 128))
    assert decision.activation == "group128" and decision.kernel is CPUFp8BlockScaledMMKernel
    assert decision.config.weight_shape == (576, 7168) and decision.config.weight_quant_key.scale.dtype == E8M0
    decision.kernel(decision.config)
    with pytest.raises(AttributeError):
        decision.scheme = "w8a8"


def test_a_route_without_a_kernel_gives_every_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    decision = route(BLOCK, LAYER, platform="xpu")
    assert decision.kernel is None and decision.scheme == "w8a8_block"
    assert [reason.partition(":")[0] for reason in decision.reasons] == [
        "XPUFp8BlockScaledMMKernel",
        "BlockWiseTorchFP8ScaledMMLinearKernel",
    ]
    assert "torch.ops._xpu_C.fp8_gemm is not registered" in decision.reasons[0]
    assert route(CHANNEL, LAYER, platform="cuda", capability=90).reasons == (
        "no class is registered for w8a16 on cuda",
    )


@pytest.mark.parametrize("N, K, runs", [(576, 256, True), (2624, 256, True), (1368, 256, False), (520, 256, False),
                                        (256, 192, False), (256, 128, True)])  # fmt: skip
def test_xpu_shapes_are_decided_by_the_route(N, K, runs):
    with xpu_ops():
        decision = route(BLOCK, LAYER, platform="xpu", weight_shape=(N, K))
    assert (decision.kernel is XPUFp8BlockScaledMMKernel) == runs
    assert runs or str(N if N != 256 else K) in decision.reasons[0]


@pytest.mark.parametrize("scale", [F32, BF16, E8M0, torch.uint8, torch.int32, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("platform, capability", [("cpu", None), ("xpu", None), ("cuda", 90)])
def test_the_scale_dtype_is_part_of_the_choice(platform, capability, scale):
    """A kernel was picked that could not read e8m0 scales."""
    with xpu_ops():
        decision = route(BLOCK, LAYER, platform=platform, capability=capability, scale_dtype=scale)
    readable = scale in (F32, BF16, E8M0, torch.uint8)
    assert (decision.kernel is not None) == readable
    assert readable or str(scale).removeprefix("torch.") in decision.reasons[0]


def test_weight_only_blocks_on_xpu_run_with_dynamic_groups():
    weights = {"type": "float", "block_structure": [128, 128]}
    weight_only = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    with xpu_ops():
        decision = route(weight_only, LAYER, platform="xpu")
    assert (decision.scheme, decision.activation) == ("w8a8_block", "none")
    assert decision.kernel is XPUFp8BlockScaledMMKernel
    assert decision.config.activation_quant_key.scale.group_shape == (1, 128)


@pytest.mark.parametrize("capability, scheme", [((9, 0), "w8a8_block"), (90, "w8a8_block"), ((8, 0), "w8a16_block")])
def test_the_capability_may_be_a_pair(capability, scheme):
    assert route(BLOCK, LAYER, platform="cuda", capability=capability).scheme == scheme


# ----------------------------------------------------------------------------------------------------------- the choice
def test_w8a8_on_the_cpu_is_forced():
    for force in (CPUFp8W8A8BlockScaledMMKernel, "CPUFp8W8A8BlockScaledMMKernel"):
        decision = route(BLOCK, LAYER, force_kernel=force)
        assert decision.kernel is CPUFp8W8A8BlockScaledMMKernel and decision.scheme == "w8a8_block"
        kernel = choose_scaled_mm_linear_kernel(
            config((128, 128), None, (1, 128)), POSSIBLE_FP8_BLOCK_KERNELS["cpu"], None, force
        )
        assert kernel is CPUFp8W8A8BlockScaledMMKernel


def test_a_forced_class_is_refused_with_its_reason_not_replaced():
    with pytest.raises(NoKernelError, match="CPUFp8W8A8BlockScaledMMKernel: BLOCK weights only, not per row"):
        choose_scaled_mm_linear_kernel(
            config((-1, 1), None, (1, -1)), POSSIBLE_W8A16_KERNELS, force_kernel="CPUFp8W8A8BlockScaledMMKernel"
        )
    with pytest.raises(ValueError, match="`force_kernel` .*, got Marlin"):
        choose_scaled_mm_linear_kernel(config(), POSSIBLE_W8A16_KERNELS["cpu"], force_kernel="Marlin")


@pytest.mark.parametrize("how", ["class", "name", "environment"])
def test_a_disabled_class_is_passed_over(how, monkeypatch):
    layer_config = config((128, 128), None, (1, 128))
    possible = POSSIBLE_FP8_BLOCK_KERNELS["cpu"]
    disabled = {"class": [CPUFp8BlockScaledMMKernel], "name": ["CPUFp8BlockScaledMMKernel"], "environment": []}[how]
    if how == "environment":
        monkeypatch.setenv("BLOCKSCALE_DISABLED_KERNELS", " CPUFp8BlockScaledMMKernel ,")
    chosen = choose_scaled_mm_linear_kernel(layer_config, possible, disabled=disabled)
    assert chosen is CPUFp8W8A8BlockScaledMMKernel
    with pytest.raises(NoKernelError, match="CPUFp8BlockScaledMMKernel: disabled"):
        choose_scaled_mm_linear_kernel(layer_config, possible, None, CPUFp8BlockScaledMMKernel, disabled=disabled)


def test_a_misspelt_class_disables_nothing_silently(monkeypatch):
    with pytest.raises(ValueError, match="`disabled` to name classes of .*, got CPUFp8"):
        choose_scaled_mm_linear_kernel(config(), POSSIBLE_W8A16_KERNELS["cpu"], disabled=["CPUFp8"])
    monkeypatch.setenv("BLOCKSCALE_DISABLED_KERNELS", "CPUFp8BlockScaledMMKernel,CPUFp9")
    with pytest.raises(ValueError, match="BLOCKSCALE_DISABLED_KERNELS to name classes of .*, got CPUFp9"):
        choose_scaled_mm_linear_kernel(config(), POSSIBLE_W8A16_KERNELS["cpu"])


def test_the_message_when_all_w8a16_kernels_are_disabled(monkeypatch):
    monkeypatch.setenv("BLOCKSCALE_DISABLED_KERNELS", "CPUFp8BlockScaledMMKernel,XPUW8A16FP8LinearKernel")
    possible = [kernel for listed in POSSIBLE_W8A16_KERNELS.values() for kernel in listed]
    with pytest.raises(NoKernelError) as error:
        choose_scaled_mm_linear_kernel(config((128, 128), (576, 7168)), possible)
    assert isinstance(error.value, ValueError) and isinstance(error.value, NotImplementedError)
    assert str(error.value) == (
        "no kernel for weight N=576 K=7168 float8_e4m3fn static 128 x 128, float32 scales; activation bfloat16: "
        "CPUFp8BlockScaledMMKernel: disabled; XPUW8A16FP8LinearKernel: disabled"
    )
    assert error.value.reasons == ("CPUFp8BlockScaledMMKernel: disabled", "XPUW8A16FP8LinearKernel: disabled")


def test_the_message_lists_every_class_with_its_own_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    possible = [BlockWiseTorchFP8ScaledMMLinearKernel, XPUW8A16FP8LinearKernel, CPUFp8BlockScaledMMKernel]
    bad = config(dtype=torch.float8_e4m3fnuz)
    with pytest.raises(NoKernelError) as error:
        choose_scaled_mm_linear_kernel(bad, possible)
    message = str(error.value)
    for part in (
        "BlockWiseTorchFP8ScaledMMLinearKernel: no CUDA device",
        "XPUW8A16FP8LinearKernel: torch.ops._xpu_C.fp8_gemm_w8a16 is not registered",
        "CPUFp8BlockScaledMMKernel: weights of dtype float8_e4m3fn only, not float8_e4m3fnuz",
    ):
        assert part in message
    with pytest.raises(NoKernelError, match="none is registered"):
        choose_scaled_mm_linear_kernel(config(), [])


@pytest.mark.parametrize("backend", ["cpu", "xpu", "xpu_woq", "torch"])
def test_a_backend_chooses_among_its_own(backend):
    every = [kernel for listed in POSSIBLE_FP8_BLOCK_KERNELS.values() for kernel in listed] + [XPUW8A16FP8LinearKernel]
    with xpu_ops():
        for group, activation in (((128, 128), (1, 128)), ((-1, 1), None)):
            try:
                chosen = choose_scaled_mm_linear_kernel(
                    config(group, None, activation), every, 90, linear_backend=backend
                )
                assert chosen.linear_backend == backend
            except NoKernelError as error:
                assert any(f"excluded by linear_backend={backend}" in reason for reason in error.reasons)
    with pytest.raises(ValueError, match="`linear_backend` auto, cpu, xpu, xpu_woq, torch, got marlin"):
        choose_scaled_mm_linear_kernel(config(), every, linear_backend="marlin")


def test_lists_by_platform_and_classes_of_others():
    assert choose_scaled_mm_linear_kernel(config(platform="cpu"), POSSIBLE_W8A16_KERNELS) is CPUFp8BlockScaledMMKernel

    class Theirs(CPUFp8BlockScaledMMKernel):
        @classmethod
        def is_supported(cls, compute_capability=None):
            return compute_capability == 90, "wants 90"

    assert choose_scaled_mm_linear_kernel(config(), [Theirs, CPUFp8BlockScaledMMKernel], (9, 0)) is Theirs
    possible = [Theirs, CPUFp8BlockScaledMMKernel]
    assert choose_scaled_mm_linear_kernel(config(), possible) is CPUFp8BlockScaledMMKernel
    assert choose_scaled_mm_linear_kernel(config(), possible, 90, disabled=["Theirs"]) is CPUFp8BlockScaledMMKernel
    assert issubclass(Theirs, MMLinearKernel)


@pytest.mark.parametrize("missing", ["fp8_scaled_mm_cpu", "fp8_w8a8_block_scaled_mm_cpu", "per_token_group_quant_fp8"])
def test_an_op_that_is_not_built_is_not_chosen(missing, monkeypatch):
    monkeypatch.setattr("blockscale.kernels.cpu.has_op", lambda name: name != missing)
    possible, layer_config = POSSIBLE_FP8_BLOCK_KERNELS["cpu"], config((128, 128), None, (1, 128))
    force = None if missing == "fp8_scaled_mm_cpu" else CPUFp8W8A8BlockScaledMMKernel
    if force is None:
        assert choose_scaled_mm_linear_kernel(layer_config, possible) is CPUFp8W8A8BlockScaledMMKernel
    else:
        with pytest.raises(NoKernelError, match=f"without the op {missing}"):
            choose_scaled_mm_linear_kernel(layer_config, possible, None, force)


def test_a_misspelt_cap_is_a_reason():
    code = f"from blockscale.kernels import route;print(route({BLOCK!r}, {LAYER!r}).reasons)"
    environment = {**os.environ, "BLOCKSCALE_MAX_ISA": "avx3"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and "expected `BLOCKSCALE_MAX_ISA` to be one of" in run.stdout and "avx3" in run.stdout


# ------------------------------------------------------------------------------------------------------------------ log
def test_each_decision_is_logged_once(log):
    for _ in range(3):
        for shape in ((576, 128), (576, 256)):
            route(BLOCK, LAYER, weight_shape=shape)
    messages = log()
    assert len(messages) == 3
    decisions = [message for message in messages if "for weight" in message]
    assert len(decisions) == 2 and all("CPUFp8BlockScaledMMKernel" in message for message in decisions)
    assert sum("does not quantise x as group128" in message for message in messages) == 1


def test_falling_back_is_logged_with_the_reason(log):
    layer_config = config((128, 128), None, (1, 128))
    for _ in range(2):
        choose_scaled_mm_linear_kernel(
            layer_config, POSSIBLE_FP8_BLOCK_KERNELS["cpu"], disabled=[CPUFp8BlockScaledMMKernel]
        )
    (message,) = log()
    assert "CPUFp8W8A8BlockScaledMMKernel for" in message
    assert "passed over: CPUFp8BlockScaledMMKernel: disabled" in message
    route(BLOCK, LAYER, platform="xpu")
    assert "no kernel for" in log()[-1] and "is not registered" in log()[-1]


def test_weight_only_checkpoints_have_nothing_to_ignore(log):
    route(CHANNEL, LAYER)
    assert not [message for message in log() if "quantise x" in message]
