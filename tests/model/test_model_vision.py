"""Vision against golden values of the released code, and its own contracts."""

import io
import json
import re
from dataclasses import astuple
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torch.autograd import gradcheck
from torch.func import functional_call

from k3rl.errors import UserInputError
from k3rl.model.config import VisionConfig
from k3rl.model.images import ImageLimits, fit_size, image_prompt, pixels, preprocess
from k3rl.model.vision import Projector, VisionTower, feature_counts, rope_angles, splice, time_rows
from tests.model.golden import CASES, GOLDEN, below, golden
from tests.model.model_builders import filled, randn

SIZE_KEYS = ("new_width", "new_height", "pad_width", "pad_height", "num_tokens")
MEDIA = 310
GRIDS = torch.tensor([[1, 4, 2], [3, 2, 6], [1, 2, 2]])
WIDTH = 6


def golden_config():
    whole = json.loads((GOLDEN / "tiny_k3" / "config.json").read_text())
    vision = whole["vision_config"]
    return VisionConfig(
        media_token_id=whole["media_placeholder_token_id"],
        hidden_size=vision["vt_hidden_size"],
        mlp_size=vision["vt_intermediate_size"],
        num_layers=vision["vt_num_hidden_layers"],
        num_heads=vision["vt_num_attention_heads"],
        qkv_size=vision["qkv_hidden_size"],
        pos_height=vision["init_pos_emb_height"],
        pos_width=vision["init_pos_emb_width"],
        pos_time=vision["init_pos_emb_time"],
        projector_eps=vision["projector_ln_eps"],
    )


def golden_parts(dtype):
    weights = load_file(GOLDEN / "tiny_k3" / "model.safetensors")
    tower = VisionTower(golden_config()).to(dtype)
    tower.load_state_dict(below(weights, "vision_tower."))
    projector = Projector(golden_config(), 64).to(dtype)
    projector.load_state_dict(below(weights, "mm_projector."))
    return tower, projector, weights["language_model.model.embed_tokens.weight"].to(dtype)


def tiny_config(**changes):
    fields = {
        "media_token_id": 9, "hidden_size": 8, "mlp_size": 10, "num_layers": 1, "num_heads": 2,
        "qkv_size": 16, "patch_size": 2, "pos_height": 2, "pos_width": 3,
    }  # fmt: skip
    return VisionConfig(**(fields | changes))


def tiny_parts():
    return filled(VisionTower(tiny_config())), filled(Projector(tiny_config(), WIDTH), seed=1)


def tiny_pixels(grids):
    return randn(int(grids.prod(1).sum()), 3, 2, 2, seed=3)


def test_names_and_shapes_are_those_of_the_release():
    told = json.loads((GOLDEN / "index_shapes.json").read_text())["templates"]
    told = [x for x in told if x["name"].startswith(("vision_tower.", "mm_projector."))]
    config = VisionConfig(media_token_id=0)
    with torch.device("meta"):
        parts = {"vision_tower": VisionTower(config), "mm_projector": Projector(config, 7168)}
    found = nn.ModuleDict(parts).state_dict()
    shapes = {re.sub(r"blocks\.\d+", "blocks.{N}", n): list(x.shape) for n, x in found.items()}
    assert shapes == {x["name"]: x["shape"] for x in told}
    assert len(found) == sum(x["count"] for x in told)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["vision_tower", "vision_tower_multiframe"])
def test_every_step_of_the_tower_is_the_released_one(name, dtype):
    case = golden(name)
    images = case if "pixel_values" in case else golden("vision_preprocess")
    tower, projector, _ = golden_parts(dtype)
    seen = {}
    modules = {"patch_embed": tower.patch_embed, "encoder_out": tower.encoder}
    modules |= {f"block.{i}": block for i, block in enumerate(tower.encoder.blocks)}
    for key, module in modules.items():
        module.register_forward_hook(lambda _, __, out, key=key: seen.update({key: out}))
    with torch.no_grad():
        seen["tower_out"] = tower(images["pixel_values"], case["grid_thws"])
        seen["projector_out"] = projector(seen["tower_out"])
    assert seen.keys() == case.keys() - {"pixel_values", "grid_thws"}
    for key, found in seen.items():
        assert found.dtype == dtype
        assert found.shape == case[key].shape
        assert (found - case[key]).abs().max() <= 2e-4, key


def test_low_precision_keeps_the_eps_of_float32():
    """The squares of small embeddings lie below the eps that torch would take for bfloat16."""
    images, found = golden("vision_preprocess"), []
    for dtype in (torch.float64, torch.bfloat16):
        tower, _, _ = golden_parts(dtype)
        with torch.no_grad():
            for parameter in tower.patch_embed.parameters():
                parameter.mul_(2.0**-7)
            for block in tower.encoder.blocks:
                block.wo.weight.zero_()
                block.mlp.fc1.weight.zero_()
            found.append(tower(images["pixel_values"], images["grid_thws"]).double())
    assert (found[0] - found[1]).abs().max() < 0.02 * found[0].abs().max()


def test_images_become_the_released_patches():
    case, meta = golden("vision_preprocess"), CASES["vision_preprocess"]
    rows, grids = [], []
    for number, entry in enumerate(meta["images"]):
        settings = entry["media_proc_cfg"]
        limits = ImageLimits(in_patch_limit=settings["in_patch_limit"])
        image = Image.open(GOLDEN / entry["png"])
        assert torch.equal(torch.from_numpy(pixels(image, limits)), case[f"pixels_u8.{number}"])
        size, told = fit_size(*image.size, limits), entry["resize"]
        assert astuple(size) == tuple(told[key] for key in SIZE_KEYS)
        assert image_prompt(*image.size) == entry["image_prompt"]
        patches = preprocess([image], limits)
        assert feature_counts(patches.grid_thws, 2) == [size.num_features]
        rows.append(patches.pixel_values)
        grids.append(patches.grid_thws)
    assert torch.equal(torch.cat(grids), case["grid_thws"].long())
    assert (torch.cat(rows) - case["pixel_values"]).abs().max() <= 1e-6
    assert rows[0].dtype == torch.float32


def test_several_images_are_packed_in_order():
    images = [Image.open(GOLDEN / entry["png"]) for entry in CASES["vision_preprocess"]["images"]]
    together = preprocess(images)
    alone = [preprocess([image]) for image in images]
    assert torch.equal(together.pixel_values, torch.cat([each.pixel_values for each in alone]))
    assert torch.equal(together.grid_thws, torch.cat([each.grid_thws for each in alone]))
    assert together.grid_thws.dtype == torch.int64


def test_sizes_are_the_released_ones():
    table = json.loads((GOLDEN / "vision_resize_table.json").read_text())
    told = table["config"]
    limits = ImageLimits()
    keys = ("patch_size", "merge_kernel_size", "in_patch_limit", "patch_limit_on_one_side")
    assert astuple(limits)[:4] == tuple(told[key] for key in keys)
    for width, height, *expected in table["rows"]:
        found = fit_size(width, height, limits)
        assert list(astuple(found)) == expected, (width, height)


def test_every_mode_of_an_image_is_read():
    gray = Image.new("L", (5, 4), 200)
    for mode in ("1", "L", "P", "RGB", "CMYK", "YCbCr"):
        assert pixels(gray.convert(mode), ImageLimits()).shape == (28, 28, 3)
    clear = pixels(Image.new("LA", (20, 4), (0, 0)), ImageLimits())
    assert clear[0, :20, 0].tolist() == [255] * 8 + [180] * 8 + [255] * 4
    assert not clear[4:].any()
    assert not clear[:, 20:].any()
    palette = Image.new("P", (20, 4), 0)
    palette.info["transparency"] = 0
    assert np.array_equal(pixels(palette, ImageLimits()), clear)


def broken_png():
    data = io.BytesIO()
    Image.effect_noise((60, 60), 50).save(data, "PNG")
    return Image.open(io.BytesIO(data.getvalue()[:-800]))


@pytest.mark.parametrize(
    ("image", "cause"),
    [
        (lambda: Image.new("RGB", (0, 5)), "size 0 x 5"),
        (lambda: Image.new("I;16", (5, 5)), "mode I;16"),
        (lambda: Image.new("F", (5, 5)), "mode F"),
        (broken_png, "cannot be decoded"),
        (lambda: Image.new("RGB", (900, 3)), "patch_limit_on_one_side"),
    ],
)
def test_an_image_that_cannot_be_read_is_named(image, cause):
    limits = ImageLimits(patch_limit_on_one_side=63)
    with pytest.raises(UserInputError, match=f"image 1: .*{cause}"):
        preprocess([Image.new("RGB", (30, 30)), image()], limits)


def test_no_images_and_bad_limits_are_refused():
    with pytest.raises(UserInputError, match="at least one image"):
        preprocess([])
    for field, value in (("patch_size", 0), ("in_patch_limit", -1), ("std", (1.0, 0.0, 1.0))):
        with pytest.raises(UserInputError, match=field):
            ImageLimits(**{field: value})


def test_items_do_not_see_each_other():
    (tower, projector), values = tiny_parts(), tiny_pixels(GRIDS)
    together, counts = projector(tower(values, GRIDS)), feature_counts(GRIDS, 2)
    assert counts == [2, 3, 1]
    alone = [
        projector(tower(part, grid.unsqueeze(0)))
        for part, grid in zip(values.split(GRIDS.prod(1).tolist()), GRIDS, strict=True)
    ]
    assert [len(each) for each in alone] == counts
    assert torch.allclose(together, torch.cat(alone), atol=1e-12)
    changed = values.clone()
    changed[:8] += 1
    moved = (projector(tower(changed, GRIDS)) - together).abs().amax(1)
    assert (moved[:2] > 1e-6).all()
    assert moved[2:].max() < 1e-12


def test_frames_of_an_item_see_each_other_and_their_time():
    tower, _ = tiny_parts()
    two = torch.tensor([[2, 2, 2]])
    frames, seen = tiny_pixels(two), {}
    tower.encoder.register_forward_hook(lambda _, __, out: seen.update(out=out))
    tower(frames, two)
    before = seen["out"]
    late = frames.clone()
    late[4:] += 1
    tower(late, two)
    assert ((seen["out"] - before)[:4].abs().amax(1) > 1e-6).all()
    tower(frames.roll(4, 0), two)
    assert (seen["out"].roll(4, 0) - before).abs().max() > 1e-3


def test_positions_are_their_formulas():
    angles = rope_angles([(2, 3, 5)], 8).view(2, 3, 5, 4)
    assert angles.dtype == torch.float64
    assert angles[1, 2, 4].tolist() == pytest.approx([4.0, 2.0, 0.04, 0.02], abs=1e-15)
    rows = time_rows(3, 4)
    expected = [np.sin(2), np.sin(0.02), np.cos(2), np.cos(0.02)]
    assert rows[2].tolist() == pytest.approx(expected, abs=1e-15)
    assert rows[0].tolist() == [0, 0, 1, 1]


def test_gradients_of_tower_and_projector():
    tower, projector = tiny_parts()
    grids = torch.tensor([[2, 2, 2], [1, 2, 4]])
    values = tiny_pixels(grids)
    for module, inputs in ((tower, (values, grids)), (projector, (randn(3, 4, 8),))):
        names, parameters = zip(*module.named_parameters(), strict=True)

        def run(first, *parameters, module=module, names=names, rest=inputs[1:]):
            named = dict(zip(names, parameters, strict=True))
            return functional_call(module, named, (first, *rest))

        assert gradcheck(run, (inputs[0].requires_grad_(), *parameters), fast_mode=True)


@pytest.mark.parametrize(
    ("grids", "cause"),
    [
        ([[1, 4, 3]], "item 0: 4 x 3 patches"),
        ([[1, 2, 2], [1, 0, 2]], "item 1: 0 x 2 patches"),
        ([[5, 2, 2]], "item 0: 5 frames"),
        ([[0, 2, 2]], "item 0: 0 frames"),
        ([[1, 2, 4]], "8 patches, pixel_values has 12"),
        ([1, 2, 6], "grid_thws must be"),
    ],
)
def test_grids_that_do_not_fit_are_refused(grids, cause):
    tower, _ = tiny_parts()
    with pytest.raises(UserInputError, match=cause):
        tower(randn(12, 3, 2, 2), torch.tensor(grids))
    with pytest.raises(UserInputError, match="pixel_values must be"):
        tower(randn(4, 3, 2, 3), torch.tensor([[1, 2, 2]]))


def test_splice_is_the_released_merge():
    case, images = golden("vision_splice"), golden("vision_preprocess")
    tower, projector, table = golden_parts(torch.float32)
    ids = case["input_ids"].long()
    with torch.no_grad():
        features = projector(tower(images["pixel_values"], images["grid_thws"]))
        counts = feature_counts(images["grid_thws"], 2)
        found = splice(ids, table[ids], features, counts, MEDIA, torch.tensor([0, len(ids)]))
    assert found.embeds.shape == case["merged_embeds"].shape
    assert (found.embeds - case["merged_embeds"]).abs().max() <= 2e-4
    assert found.cu_seqlens.tolist() == [0, len(case["position_ids"])]


IDS = torch.tensor([9, 1, 2, 9, 9, 3, 4, 9])
CU = torch.tensor([0, 2, 5, 7, 8])
COUNTS = [3, 1, 2, 4]


def spliced_by_hand(embeds, features, counts):
    """Rows, bounds, the row of each token, and which rows are features."""
    items, out, rows = iter(features.split(counts)), [], []
    for token, embed in zip(IDS.tolist(), embeds, strict=True):
        out += list(next(items)) if token == 9 else [embed]
        rows.append(len(out) - 1)
    bounds = [0, *(rows[end - 1] + 1 for end in CU.tolist()[1:])]
    return torch.stack(out), bounds, rows


def test_one_media_token_becomes_all_features_of_its_item():
    embeds, features = randn(8, WIDTH), randn(10, WIDTH, seed=1)
    found = splice(IDS, embeds, features, COUNTS, 9, CU)
    expected, bounds, rows = spliced_by_hand(embeds, features, COUNTS)
    assert torch.equal(found.embeds, expected)
    assert found.cu_seqlens.tolist() == bounds == [0, 4, 8, 10, 14]
    assert found.rows.tolist() == rows
    assert torch.equal(found.embeds[found.is_media], features)
    assert torch.equal(found.embeds[found.rows][IDS != 9], embeds[IDS != 9])
    assert [b - a for a, b in pairwise(bounds)] == [4, 4, 2, 4]


def test_a_scatter_of_the_same_length_is_something_else():
    """Written over the media tokens, features fit only when every item has just one."""
    embeds, features = randn(8, WIDTH), randn(10, WIDTH, seed=1)
    mask = (IDS == 9).unsqueeze(-1).expand(-1, WIDTH)
    scattered = embeds.masked_scatter(mask, features)
    assert scattered.shape != spliced_by_hand(embeds, features, COUNTS)[0].shape
    with pytest.raises(UserInputError, match="features must be"):
        splice(IDS, embeds, features, [1, 1, 1, 1], 9, CU)
    found = splice(IDS, embeds, features[:4], [1, 1, 1, 1], 9, CU)
    assert torch.equal(found.embeds, scattered)
    assert torch.equal(found.rows, torch.arange(8))


def test_text_alone_stays_as_it_is():
    ids, embeds = torch.tensor([1, 2, 3]), randn(3, WIDTH)
    found = splice(ids, embeds, randn(0, WIDTH), [], 9, torch.tensor([0, 1, 3]))
    assert torch.equal(found.embeds, embeds)
    assert found.cu_seqlens.tolist() == [0, 1, 3]
    assert not found.is_media.any()


def test_gradients_pass_the_splice():
    tower, projector = tiny_parts()
    ids, cu = torch.tensor([9, 1, 9, 2]), torch.tensor([0, 1, 4])
    grids = torch.tensor([[1, 2, 4], [2, 2, 2]])
    counts = feature_counts(grids, 2)
    embeds, features = randn(4, WIDTH).requires_grad_(), randn(3, WIDTH, seed=1).requires_grad_()
    assert gradcheck(lambda e, f: splice(ids, e, f, counts, 9, cu).embeds, (embeds, features))
    values = tiny_pixels(grids).requires_grad_()

    def run(values, embeds):
        return splice(ids, embeds, projector(tower(values, grids)), counts, 9, cu).embeds

    assert gradcheck(run, (values, embeds))
    run(values, embeds).square().sum().backward()
    assert embeds.grad[[0, 2]].abs().max() == 0
    assert all(p.grad.abs().max() > 0 for m in (tower, projector) for p in m.parameters())


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"counts": [3, 1, 6]}, "4 media tokens for 3 items"),
        ({"counts": [3, 1, 2, 5]}, "features must be"),
        ({"counts": [3, 0, 3, 4]}, "item 1: no features"),
        ({"media_token_id": 8}, "0 media tokens for 4 items"),
        ({"embeds": randn(7, WIDTH)}, "embeds must be"),
        ({"cu_seqlens": torch.tensor([0, 9])}, "cu_seqlens"),
    ],
)
def test_splices_that_do_not_fit_are_refused(changes, cause):
    fields = {
        "token_ids": IDS, "embeds": randn(8, WIDTH), "features": randn(10, WIDTH),
        "counts": COUNTS, "media_token_id": 9, "cu_seqlens": CU,
    }  # fmt: skip
    with pytest.raises(UserInputError, match=cause):
        splice(**(fields | changes))
