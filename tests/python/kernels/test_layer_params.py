"""Weight and scales as loaders leave them: names, shapes, dtypes, fused shards, and what was never written."""

import itertools

import pytest
import torch
from blockscale.kernels import GroupShape, fuse_shard_scales, replace_parameter
from blockscale.kernels.layer_params import read_layer
from fp8_layers import block_layer, codes, frozen, generator, grid, make_layer
from oracle import BF16, E8M0, F32, FP8, U8, decode, decode_scales, expand_scales, grid_shape

BLOCK = GroupShape(128, 128)
NAMES = ("weight_scale_inv", "weight_scale", "scale")


def multipliers(loaded):
    return expand_scales(loaded.scales.double(), *loaded.weight.shape, loaded.block_size)


# --------------------------------------------------------------------------------------------------- names and shapes
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("group", [BLOCK, GroupShape.PER_CHANNEL, GroupShape.PER_TENSOR], ids=str)
def test_a_scale_is_found_under_each_of_its_names(name, group):
    """A layer whose tensor was called otherwise ran through a slow path, silently."""
    scales = {BLOCK: grid(200, 300, (128, 128)), GroupShape.PER_CHANNEL: grid(200, 1, (1, 1))}.get(group, torch.ones(1))
    loaded = read_layer(make_layer(codes(200, 300), scales, name), group, (200, 300))
    assert loaded.scale_name == name and loaded.scales.dtype == F32


def test_two_scales_that_differ_are_refused():
    layer = block_layer(200, 300)
    layer.weight_scale = frozen(layer.weight_scale_inv.clone())
    assert read_layer(layer, BLOCK, None).scale_name == "weight_scale_inv"
    layer.weight_scale = frozen(2 * layer.weight_scale_inv)
    layer.scale = torch.ones(7)  # of something else
    with pytest.raises(ValueError, match="expected one tensor of scales, got `weight_scale_inv` and `weight_scale`"):
        read_layer(layer, BLOCK, None)


@pytest.mark.parametrize("N, K", [(4096, 16), (5, 7), (1, 3), (3, 1)])
@pytest.mark.parametrize("shape", ["[N]", "[N, 1]", "[1, N]"])
@pytest.mark.parametrize("group", [GroupShape(-1, 1), GroupShape(1, -1)], ids=["kn", "nk"])
def test_channel_scales_of_any_orientation(N, K, shape, group):
    """[N, 1] was copied into [N], and a row [1, N] refused."""
    scales = torch.rand(N, generator=generator(N)) + 0.5
    stored = {"[N]": scales, "[N, 1]": scales[:, None], "[1, N]": scales[None]}[shape]
    loaded = read_layer(make_layer(codes(N, K), stored, "weight_scale"), group, (N, K))
    assert torch.equal(multipliers(loaded), scales.double()[:, None].expand(N, K))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("group", [GroupShape.PER_TENSOR, GroupShape.PER_CHANNEL], ids=str)
def test_one_scale_for_all(shape, group):
    loaded = read_layer(make_layer(codes(48, 70), torch.full(shape, 0.25)), group, (48, 70))
    assert (multipliers(loaded) == 0.25).all()


def test_the_four_dimensional_grid_of_modelopt():
    layer = block_layer(200, 300)
    expected = layer.weight_scale_inv.detach()
    layer.weight_scale_inv = frozen(expected[:, None, :, None])
    assert torch.equal(read_layer(layer, BLOCK, None).scales, expected)


@pytest.mark.parametrize("dtype", [F32, BF16, E8M0, U8], ids=str)
@pytest.mark.parametrize("group", [BLOCK, GroupShape.PER_CHANNEL], ids=str)
def test_scale_dtypes_are_widened_exactly(dtype, group):
    exponents = torch.randint(-20, 20, (2, 3) if group == BLOCK else (200, 1), generator=generator("widen"))
    stored = (exponents + 127).to(U8) if dtype in (E8M0, U8) else (2.0**exponents).to(dtype)
    stored = stored.view(E8M0) if dtype == E8M0 else stored
    loaded = read_layer(make_layer(codes(200, 300), stored), group, None)
    assert torch.equal(loaded.scales.double(), decode_scales(stored))


@pytest.mark.parametrize("N, K, group", [(48, 70, (-1, 1)), (48, 48, (-1, 1)), (48, 48, (-1, -1)), (7, 300, (-1, -1))])
def test_transposed_weights_are_told_from_plain_ones(N, K, group):
    """Engines keep per-channel and per-tensor weights as [K, N]; a square one is told by its strides."""
    weight = codes(N, K)
    for stored in (weight, weight.t()):
        scales = torch.rand(N, 1) + 1 if group == (-1, 1) else torch.ones(1)
        loaded = read_layer(make_layer(stored, scales), GroupShape(*group), (N, K))
        assert torch.equal(decode(loaded.weight), decode(weight))


# -------------------------------------------------------------------------------------------------------- fused shards
WIDTHS = [(576,), (2112,), (1536, 512, 64), (1536, 576), (2048, 576), (64, 64), (192, 96, 96), (100, 28), (5, 300, 7)]


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("block_size", [(128, 128), (64, 32), (48, 128)], ids=str)
def test_every_row_keeps_the_scale_of_its_own_shard(widths, block_size):
    K = 300
    shards = [grid(width, K, block_size, seed) for seed, width in enumerate(widths)]
    expected = torch.cat([expand_scales(s.double(), w, K, block_size) for s, w in zip(shards, widths, strict=True)])
    fused, fine = fuse_shard_scales(shards, widths, K, block_size)
    assert torch.equal(expand_scales(fused.double(), sum(widths), K, fine), expected)
    layer = make_layer(codes(sum(widths), K), torch.cat(shards), logical_widths=list(widths), scale_grid_per_shard=True)
    loaded = read_layer(layer, GroupShape(*block_size), None)
    assert torch.equal(multipliers(loaded), expected)


def test_shards_may_have_one_number_each():
    fused, fine = fuse_shard_scales([torch.tensor(2.0), torch.tensor([3.0])], [128, 64], 200, (128, 128))
    assert fused.tolist() == [[2.0, 2.0], [3.0, 3.0]] and fine == (128, 128)


@pytest.mark.parametrize("widths", [(16, 8, 8), (5, 3, 1), (100, 28)], ids=str)
@pytest.mark.parametrize("group", [GroupShape.PER_TENSOR, GroupShape.PER_CHANNEL], ids=str)
def test_scalars_of_shards_are_expanded_not_merged(widths, group):
    """Collapsing q, k, v to one maximum without requantising multiplies the small ones by up to 4096."""
    scalars = torch.tensor([1.0, 1 / 64, 1 / 4096])[: len(widths)]
    expected = scalars.double().repeat_interleave(torch.tensor(widths))[:, None].expand(-1, 40)
    for stored in (scalars, scalars[:, None], scalars[None]):
        layer = make_layer(codes(sum(widths), 40), stored, logical_widths=list(widths))
        assert torch.equal(multipliers(read_layer(layer, group, None)), expected)


@pytest.mark.parametrize("groups, width", [(8, 1856), (4, 192), (3, 320)])
def test_one_grid_over_shards_that_no_block_divides(groups, width):
    """q [14848, 4096] has s [116, 32]: row i takes scale row i // 128 of the whole, not of its group of 1856."""
    N, K = groups * width, 256
    scales = grid(N, K, (128, 128))
    layer = make_layer(codes(N, K), scales, logical_widths=[width] * groups, scale_grid_per_shard=False)
    assert torch.equal(multipliers(read_layer(layer, BLOCK, None)), expand_scales(scales.double(), N, K, (128, 128)))


def test_the_number_of_rows_tells_the_two_grids_apart_where_it_can():
    N, K, widths = 8 * 1856, 128, [1856] * 8
    assert grid_shape(N, K, (128, 128)) == (116, 1)
    whole, apart = grid(N, K, (128, 128)), torch.cat([grid(1856, K, (128, 128), seed) for seed in range(8)])
    assert len(apart) == 120
    weight = codes(N, K)
    read = [read_layer(make_layer(weight, s, logical_widths=widths), BLOCK, None) for s in (whole, apart)]
    assert read[0].block_size == (128, 128) and read[1].block_size == (64, 128)


@pytest.mark.parametrize("widths", [(576, 1536), (100, 100), (64, 1536, 512)], ids=str)
def test_a_number_of_rows_that_fits_both_grids_is_not_guessed(widths):
    K = 128
    rows = sum(grid_shape(width, K, (128, 128))[0] for width in widths)
    assert rows == grid_shape(sum(widths), K, (128, 128))[0]
    layer = make_layer(codes(sum(widths), K), torch.ones(rows, 1), logical_widths=list(widths))
    with pytest.raises(ValueError, match=r"layer `model.layers.0.mlp.up_proj`: expected `scale_grid_per_shard`"):
        read_layer(layer, BLOCK, None)


# ---------------------------------------------------------------------------------------------------------- bad layers
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf, torch.finfo(F32).min, -1.0])
@pytest.mark.parametrize("at", [(0, 0), (20, 47), (20, 0)], ids=str)
def test_a_scale_that_was_never_written_is_an_error(poison, at):
    """2048 + 576 rows have 16 + 5 = 21 scale rows; plain division wrote 20 and left the last one as it was."""
    layer = block_layer(2624, 6144, logical_widths=[2048, 576])
    assert layer.weight_scale_inv.shape == (21, 48)
    layer.weight_scale_inv.data[at] = poison
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.up_proj`: expected `weight_scale_inv` written") as error:
        read_layer(layer, BLOCK, None)
    assert str(list(at)) in str(error.value)


@pytest.mark.parametrize("at_once", [1, 300 * 100, 1 << 20])
def test_a_zero_scale_is_right_only_over_zeros(at_once, monkeypatch):
    monkeypatch.setattr("blockscale.kernels.layer_params._CHECKED_AT_ONCE", at_once)
    layer = block_layer(300, 300)
    layer.weight.data.view(U8)[128:256, 256:] = torch.tensor(0x80).to(U8)  # minus zero
    layer.weight_scale_inv.data[1, 2] = 0
    read_layer(layer, BLOCK, None)
    layer.weight.data.view(U8)[255, 299] = 1
    with pytest.raises(ValueError, match=r"above zero where the weight is not zero, got 0 at \[1, 2\]"):
        read_layer(layer, BLOCK, None)


@pytest.mark.parametrize("group", [GroupShape(2**62, 2**62), GroupShape(2**62, 128), GroupShape(128, 2**62)], ids=str)
def test_a_zero_scale_of_a_block_far_larger_than_its_weight(group):
    """The zeros were spread over the whole block."""
    zero = torch.zeros(grid_shape(3, 5, group))
    assert read_layer(make_layer(torch.zeros(3, 5).to(FP8), zero), group, (3, 5)).block_size == group
    with pytest.raises(ValueError, match=r"above zero where the weight is not zero, got 0 at \[0, 0\]"):
        read_layer(make_layer(torch.ones(3, 5).to(FP8), zero), group, (3, 5))


@pytest.mark.parametrize("widths", [[208, -8], [100.0, 100], ["100", "100"], [True, 199], [None, 200]], ids=str)
def test_widths_of_shards_that_are_none(widths):
    layer = make_layer(codes(200, 300), torch.ones(2, 3), logical_widths=widths)
    with pytest.raises(ValueError, match=r"expected `logical_widths` that add up to N = 200, got \["):
        read_layer(layer, BLOCK, (200, 300))


@pytest.mark.parametrize(
    "shapes, widths, block_size, words",
    [
        ([(2, 1), (1, 1)], [192], (128, 128), "`widths` of 2 shards, got [192]"),
        ([(2, 1)], [-192], (128, 128), "`widths` of 1 shards, got [-192]"),
        (
            [(2, 1)],
            [192],
            (0, 128),
            "`block_size` of two positive integers [block_n, block_k] below 2^63, got (0, 128)",
        ),
        ([(2, 1)], [192], (128,), "`block_size` of two positive integers"),
        ([(3, 1)], [192], (128, 128), "scales of a shard of 192 rows to be one number or of shape [2, 1], got [3, 1]"),
    ],
)
def test_shards_that_do_not_fuse(shapes, widths, block_size, words):
    with pytest.raises(ValueError) as error:
        fuse_shard_scales([torch.ones(shape) for shape in shapes], widths, 128, block_size)
    assert str(error.value).startswith("fuse_shard_scales: expected ") and words in str(error.value)


@pytest.mark.parametrize("rows, columns", [(20, 48), (21, 47), (22, 48), (48, 21), (1, 1)])
def test_grids_that_fit_no_rule(rows, columns):
    layer = make_layer(codes(2624, 6144), torch.ones(rows, columns), logical_widths=[2048, 576])
    with pytest.raises(ValueError, match=r"`weight_scale_inv` of shape .* = \[21, 48\]") as error:
        read_layer(layer, BLOCK, None)
    assert str(error.value).endswith(f"got {[rows, columns]}")


def test_every_refusal_names_layer_field_expected_and_found():
    def refused(layer, group=BLOCK, shape=None):
        with pytest.raises(ValueError) as error:
            read_layer(layer, group, shape)
        return str(error.value)

    layer = block_layer(200, 300)
    del layer.weight_scale_inv
    assert refused(layer) == (
        "layer `model.layers.0.mlp.up_proj`: expected scales beside `weight` (weight_scale_inv, weight_scale, scale), "
        "got none"
    )
    layer = block_layer(200, 300, prefix="")
    layer.weight = frozen(torch.zeros(200, 300))
    assert refused(layer) == "layer Module: expected `weight` of dtype float8_e4m3fn, got float32"
    layer.weight = frozen(torch.zeros(200, 300).to(torch.float8_e4m3fnuz))
    assert refused(layer).endswith("got float8_e4m3fnuz")
    layer.weight = None
    assert refused(layer).endswith("expected `weight`, got none")
    assert refused(block_layer(200, 300), shape=(300, 200)).endswith(
        "expected `weight` of shape [N, K] = [300, 200], got [200, 300]"
    )
    assert refused(block_layer(200, 300, logical_widths=[100, 50])).endswith("add up to N = 200, got [100, 50]")
    assert refused(make_layer(codes(4, 4), torch.ones(1, 1).to(FP8))).endswith("(e8m0 codes), got float8_e4m3fn")
    assert refused(make_layer(codes(8, 4), torch.ones(3)), GroupShape.PER_CHANNEL).endswith("with N = 8, got [3]")


def test_replacing_keeps_what_a_loader_needs():
    layer = block_layer(4, 4)
    layer.weight.weight_loader, layer.weight.output_dim = len, 0
    replace_parameter(layer, "weight", torch.zeros(4, 4, dtype=U8))
    assert isinstance(layer.weight, torch.nn.Parameter) and not layer.weight.requires_grad
    assert layer.weight.weight_loader is len and layer.weight.output_dim == 0

    class EngineParameter(torch.nn.Parameter):
        weight_loader = property(lambda self: print)

    layer.weight = EngineParameter(codes(4, 4), requires_grad=False)
    replace_parameter(layer, "weight", torch.zeros(4, 4, dtype=U8))
    assert layer.weight.weight_loader is print
    layer.register_buffer("other", torch.ones(1))
    replace_parameter(layer, "other", torch.zeros(2))
    assert dict(layer.named_parameters())["other"].shape == (2,) and not dict(layer.named_buffers())
    layer.plain = torch.ones(1)
    replace_parameter(layer, "plain", torch.zeros(3))
    assert layer.plain.shape == (3,) and "plain" in layer.state_dict()


def test_slices_and_strides_of_scales():
    bank = torch.full((2, 4), torch.nan)
    bank[:, :3] = grid(200, 300, (128, 128))
    for stored in (bank[:, :3], bank[:, :3].t().contiguous().t()):
        assert torch.equal(read_layer(make_layer(codes(200, 300), stored), BLOCK, None).scales, bank[:, :3])
    assert list(itertools.chain.from_iterable(bank.isnan().nonzero().tolist())) == [0, 3, 1, 3]
