"""Vision models of transformers and torchvision train as in eager torch.

No operation runs on the host, and nothing is compiled after the first step. The torchvision models
are built from its classes at a small depth and width, because each compiles for tens of seconds at
full size. The full-size models, for one step each, run only with

    SPMD_ALL_MODELS=1 pytest packages/spmd-core/tests/system/test_models_vision.py
"""

import functools
import os

import pytest
import torch
import torch.nn.functional as F
import torchvision
import transformers as hf
from tiers import exhaustive
from torch import nn
from torchvision.models import _utils, convnext, efficientnet, regnet, segmentation
from torchvision.ops import StochasticDepth
from training import check_training

import spmd_core as spmd

models = torchvision.models
ALL = bool(os.environ.get("SPMD_ALL_MODELS"))
BATCH, CLASSES = 8, 5


def images(size=32):
    return {
        "pixel_values": torch.randn(BATCH, 3, size, size),
        "labels": torch.randint(0, CLASSES, (BATCH,)),
    }


def pixels(size=32):
    return {
        "images": torch.randn(BATCH, 3, size, size),
        "classes": torch.randint(0, CLASSES, (BATCH, size, size)),
    }


# ---- transformers --------------------------------------------------------------------------------


def hf_resnet():
    config = hf.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16, 16, 32],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        num_labels=CLASSES,
    )
    return hf.ResNetForImageClassification(config), images()


def hf_vit():
    config = hf.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        image_size=16, patch_size=4, num_labels=CLASSES, hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )  # fmt: skip
    return hf.ViTForImageClassification(config), images(16)


def hf_convnext():
    config = hf.ConvNextConfig(
        hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], num_labels=CLASSES, drop_path_rate=0
    )
    return hf.ConvNextForImageClassification(config), images(64)


def hf_clip():
    shared = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    text = {
        **shared,
        "vocab_size": 64,
        "max_position_embeddings": 16,
        "bos_token_id": 0,
        "eos_token_id": 63,
        "pad_token_id": 1,
    }
    config = hf.CLIPConfig(
        text_config=text,
        vision_config={**shared, "image_size": 16, "patch_size": 4},
        projection_dim=16,
    )
    ids = torch.randint(2, 63, (BATCH, 10))
    ids[:, -1] = 63
    return hf.CLIPModel(config), {
        "input_ids": ids,
        "pixel_values": torch.randn(BATCH, 3, 16, 16),
        "return_loss": True,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [exhaustive(hf_resnet), hf_vit, exhaustive(hf_convnext), exhaustive(hf_clip)]
)
def test_three_steps_of_transformers(make, mesh_1d, monkeypatch):
    monkeypatch.setattr(spmd.config, "strict", True)
    model, batch = make()
    check_training(model, batch, mesh_1d)


# ---- torchvision ---------------------------------------------------------------------------------


def small_resnet():
    return models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=CLASSES)


def resnext():
    return models.ResNet(
        models.resnet.Bottleneck, [1, 1, 1, 1], num_classes=CLASSES, groups=4, width_per_group=4
    )


def small_mobilenet_v3():
    block = functools.partial(models.mobilenetv3.InvertedResidualConfig, width_mult=1.0)
    layers = [
        block(8, 3, 8, 8, True, "RE", 2, 1),
        block(8, 5, 16, 16, True, "HS", 2, 1),
        block(16, 5, 32, 16, False, "HS", 1, 1),
    ]
    return models.MobileNetV3(layers, 32, num_classes=CLASSES, dropout=0)


def mobilenet_v2():
    return models.MobileNetV2(
        num_classes=CLASSES,
        width_mult=0.25,
        inverted_residual_setting=[[1, 8, 1, 1], [6, 16, 2, 2]],
    )


def small_efficientnet():
    layers = [
        efficientnet.MBConvConfig(1, 3, 1, 8, 8, 1),
        efficientnet.MBConvConfig(4, 5, 2, 8, 16, 2),
        efficientnet.FusedMBConvConfig(4, 3, 2, 16, 16, 1),
    ]
    return models.EfficientNet(layers, dropout=0, num_classes=CLASSES)


def densenet():
    return models.DenseNet(
        growth_rate=8, block_config=(2, 2), num_init_features=16, num_classes=CLASSES
    )


def shufflenet():
    return models.ShuffleNetV2([2, 1, 1], [8, 16, 32, 64, 64], num_classes=CLASSES)


def small_regnet():
    layers = regnet.BlockParams([1, 2], [16, 32], [8, 16], [1.0, 1.0], [2, 2], 0.25)
    return models.RegNet(layers, num_classes=CLASSES, stem_width=8)


def small_convnext():
    return models.ConvNeXt(
        [convnext.CNBlockConfig(16, 32, 1), convnext.CNBlockConfig(32, None, 1)],
        num_classes=CLASSES,
    )


def vit():
    return models.VisionTransformer(
        32, 8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=CLASSES
    )


def swin():
    return models.SwinTransformer([4, 4], 8, [2, 1], [2, 4], [4, 4], num_classes=CLASSES)


def swin_v2():
    block, merging = (
        models.swin_transformer.SwinTransformerBlockV2,
        models.swin_transformer.PatchMergingV2,
    )
    return models.SwinTransformer(
        [4, 4], 8, [2], [2], [4, 4], num_classes=CLASSES, block=block, downsample_layer=merging
    )


def backbone():
    return _utils.IntermediateLayerGetter(small_resnet(), {"layer4": "out", "layer3": "aux"})


def fcn():
    return segmentation.FCN(
        backbone(), segmentation.fcn.FCNHead(512, CLASSES), segmentation.fcn.FCNHead(256, CLASSES)
    )


def deeplab():
    return segmentation.DeepLabV3(backbone(), segmentation.deeplabv3.DeepLabHead(512, CLASSES))


def lraspp():
    layers = _utils.IntermediateLayerGetter(
        small_mobilenet_v3().features, {"1": "low", "4": "high"}
    )
    return segmentation.LRASPP(layers, 8, 96, CLASSES, inter_channels=16)


def in_float64(model: nn.Module) -> nn.Module:
    """The model in float64, without dropout.

    Many layers of batch norm over few elements enlarge a float32 rounding error a thousandfold.
    """
    for module in model.modules():
        if isinstance(module, (nn.Dropout, StochasticDepth)):
            module.p = 0.0
    return model.double()


def classification_loss(model, batch):
    return F.cross_entropy(model(batch["pixel_values"].double()), batch["labels"])


def segmentation_loss(model, batch):
    outs = model(batch["images"].double())
    return sum(F.cross_entropy(out, batch["classes"]) for out in outs.values())


CLASSIFIERS = [
    exhaustive(small_mobilenet_v3),
    exhaustive(small_efficientnet),
    exhaustive(densenet),
    exhaustive(shufflenet),
    exhaustive(small_convnext),
    pytest.param(vit, marks=pytest.mark.one_device),
    exhaustive(swin),
]
SEGMENTERS = [deeplab, lraspp]
if ALL:
    CLASSIFIERS += [small_resnet, small_regnet, resnext, mobilenet_v2, swin_v2]
    SEGMENTERS += [fcn]


@pytest.mark.slow
@pytest.mark.parametrize("make", CLASSIFIERS)
def test_three_steps_of_torchvision(make, mesh_1d, monkeypatch):
    monkeypatch.setattr(spmd.config, "strict", True)
    model = in_float64(make())
    check_training(
        model,
        images(64 if make is not vit else 32),
        mesh_1d,
        loss_of=classification_loss,
        rtol=1e-7,
        grad_rtol=1e-6,
    )


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("make", SEGMENTERS)
def test_three_steps_of_torchvision_segmentation(make, mesh_1d, monkeypatch):
    monkeypatch.setattr(spmd.config, "strict", True)
    check_training(
        in_float64(make()), pixels(), mesh_1d, loss_of=segmentation_loss, rtol=1e-7, grad_rtol=1e-6
    )


FULL_SIZE = [
    "alexnet",
    "resnet18",
    "resnet50",
    "mobilenet_v3_small",
    "efficientnet_b0",
    "densenet121",
    "squeezenet1_1",
    "shufflenet_v2_x1_0",
    "regnet_y_400mf",
]
FULL_SIZE += ["convnext_tiny", "swin_t", "mnasnet0_5"]
FULL_SIZE_SEGMENTERS = ["fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"]


@pytest.mark.skipif(not ALL, reason="minutes for each model: set SPMD_ALL_MODELS=1")
@pytest.mark.parametrize("name", FULL_SIZE + FULL_SIZE_SEGMENTERS)
def test_a_step_at_full_size(name, mesh_1d, monkeypatch):
    monkeypatch.setattr(spmd.config, "strict", True)
    segments = name in FULL_SIZE_SEGMENTERS
    model = in_float64(
        models.get_model(
            name,
            weights=None,
            num_classes=CLASSES,
            **({"weights_backbone": None} if segments else {}),
        )
    )
    batch, loss = (pixels(64), segmentation_loss) if segments else (images(64), classification_loss)
    check_training(model, batch, mesh_1d, loss_of=loss, steps=1, rtol=1e-7, grad_rtol=1e-6)
