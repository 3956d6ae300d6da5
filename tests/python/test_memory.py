"""Memory: a packed weight is its codes and nothing more, a thread's scratch does not grow with K, and what loads or
converts a model holds one layer's codes at most beside the model.

Each case runs in a process of its own, which reads its anonymous memory from the kernel after every function of torch.
Pages of a checkpoint's file that are mapped and clean do not count: the kernel takes them back when it needs them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from blockscale import BlockScaledLinear, convert_weight_packed

if not any(line.startswith("RssAnon") for line in Path("/proc/self/status").read_text().splitlines()):
    pytest.skip("needs RssAnon in /proc/self/status", allow_module_level=True)

MiB = 1 << 20
LAYERS, SIDE = 10, 2048
CODES = SIDE * SIDE  # bytes of a layer
SLACK = 5 * MiB // 2  # scales, 1 MiB of scratch, Python's own; well under a layer

PRELUDE = f"""
import gc, json, sys, torch
import blockscale
from blockscale import BlockScaledLinear
from blockscale.kernels import route
from torch import nn
from torch.overrides import TorchFunctionMode

LAYERS, SIDE, FOLDER = {LAYERS}, {SIDE}, sys.argv[1]
torch.set_num_threads(1)

def field(name):
    for line in open("/proc/self/status"):
        if line.startswith(name):
            return int(line.split()[1]) << 10

class Peak(TorchFunctionMode):
    peak = 0
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {{}})
        self.peak = max(self.peak, field("RssAnon"))
        return result

def measure(action):
    gc.collect()
    before = field("RssAnon")
    with Peak() as peak:
        result = action()
    gc.collect()
    print(json.dumps([peak.peak - before, field("RssAnon") - before]))
    return result

def model(dtype=torch.float32, device="cpu"):
    with torch.device(device):
        return nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False, dtype=dtype) for _ in range(LAYERS)))

def fp8_model():
    return nn.Sequential(*(BlockScaledLinear(SIDE, SIDE, bias=False) for _ in range(LAYERS)))

# Once, for what torch imports on the way and what the library allocates for good.
import safetensors.torch
with Peak():
    small = BlockScaledLinear.from_float(nn.Linear(64, 64))
    small.load_state_dict(small.state_dict())
    small(torch.ones(1, 64))
"""


def run(body: str, folder: Path) -> list[list[int]]:
    """What `body` printed: a line of numbers for each `measure`."""
    # Freed tensors go back to the kernel at once, so that resident memory is live memory.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + body, str(folder)],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def write_checkpoint(folder: Path, dtype: torch.dtype) -> Path:
    safetensors_torch = pytest.importorskip("safetensors.torch")
    tensors = {}
    for i in range(LAYERS):
        tensors[f"{i}.weight"] = torch.randn(SIDE, SIDE).to(dtype)
        if dtype == torch.float8_e4m3fn:
            tensors[f"{i}.weight_scale_inv"] = torch.rand(SIDE // 128, SIDE // 128) + 1
    safetensors_torch.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("shape", [(1, 1), (17, 193), (576, 1), (3, 5, 7), (0, 4)], ids=str)
def test_a_packed_weight_is_its_codes(shape):
    packed = convert_weight_packed(torch.zeros(shape).to(torch.float8_e4m3fn))
    assert packed.untyped_storage().nbytes() == packed.numel()
    if len(shape) == 2:
        layer = BlockScaledLinear(shape[1], shape[0], bias=False)
        assert layer.weight.untyped_storage().nbytes() == shape[0] * shape[1]


@pytest.mark.isa
def test_scratch_does_not_grow_with_k(tmp_path):
    """Peak memory of calls, from the kernel's own high-water mark, over K from 256 to 10^6."""
    lines = run(
        """
x = {m: torch.ones(m, 10**6, dtype=torch.bfloat16) for m in (1, 16, 40)}
layer = {k: BlockScaledLinear(k, 33, bias=False) for k in (256, 4096, 65536, 10**6)}
for k, fp8 in layer.items():
    for m, rows in x.items():
        open("/proc/self/clear_refs", "w").write("5")
        before = field("VmRSS")
        fp8(rows[:, :k])
        print(json.dumps([field("VmHWM") - before, k]))
""",
        tmp_path,
    )
    assert len(lines) == 12
    assert all(growth <= MiB for growth, _ in lines), lines


def test_loading_into_a_model_on_meta(tmp_path):
    ((peak, _),) = run(
        "measure(lambda: blockscale.load_checkpoint(model(device='meta'), FOLDER))",
        write_checkpoint(tmp_path, torch.float8_e4m3fn),
    )
    assert LAYERS * CODES <= peak <= (LAYERS + 1) * CODES + SLACK


def test_loading_gives_the_replaced_layers_back_one_by_one(tmp_path):
    """Into a float32 model: four bytes go for each that comes."""
    ((peak, kept),) = run(
        "loaded = model(); loaded = measure(lambda: blockscale.load_checkpoint(loaded, FOLDER))",
        write_checkpoint(tmp_path, torch.float8_e4m3fn),
    )
    assert peak <= CODES + SLACK
    assert kept <= -3 * LAYERS * CODES + SLACK


def test_quantising_a_checkpoint_holds_one_layer(tmp_path):
    ((peak, _),) = run(
        "measure(lambda: blockscale.quantize_checkpoint(FOLDER, FOLDER + '/fp8', progress=False))",
        write_checkpoint(tmp_path, torch.bfloat16),
    )
    assert CODES <= peak <= CODES + SLACK


def test_converting_a_layer_holds_its_codes_once_more(tmp_path):
    lines = run(
        """
for linear in model():
    layer = measure(lambda: BlockScaledLinear.from_float(linear))
    del layer
""",
        tmp_path,
    )
    assert all(peak <= 2 * CODES + SLACK for peak, _ in lines), lines


@pytest.mark.parametrize("zeros", (False, True), ids=("scaled", "zero_blocks"))
def test_preparing_a_layer_holds_its_codes_once_more(tmp_path, zeros):
    """Where scales are zero, the codes under them are looked at, too."""
    lines = run(
        f"""
chosen = route({{"quant_method": "fp8", "weight_block_size": [128, 128]}}, "l", weight_shape=(SIDE, SIDE))
kernel = chosen.kernel(chosen.config)
for _ in range(3):
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.zeros(SIDE, SIDE, dtype=torch.float8_e4m3fn), requires_grad=False)
    layer.weight_scale_inv = nn.Parameter(torch.full((16, 16), {0.0 if zeros else 1.0}), requires_grad=False)
    measure(lambda: kernel.process_weights_after_loading(layer))
""",
        tmp_path,
    )
    assert all(peak <= CODES + SLACK and kept <= SLACK for peak, kept in lines), lines


def test_a_state_dict_costs_the_codes_once_more_and_loading_it_one_layer(tmp_path):
    (saved, loaded) = run(
        """
fp8 = fp8_model()
state = measure(fp8.state_dict)
measure(lambda: fp8.load_state_dict(state))
""",
        tmp_path,
    )
    assert LAYERS * CODES <= saved[0] <= LAYERS * CODES + SLACK
    assert loaded[0] <= CODES + SLACK and loaded[1] <= SLACK
