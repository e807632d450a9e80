"""The two dictionaries ComfyUI reads. The keys are stored in people's workflows: they are never renamed."""

from __future__ import annotations

from anytorch.comfy.devices import AnytorchDevice, AnytorchDeviceStatus, AnytorchMemoryCleanup
from anytorch.comfy.jobs import AnytorchForecast, AnytorchTextEmbedding
from anytorch.comfy.layers import (
    CustomPyTorchActivation,
    CustomPyTorchConv2D,
    CustomPyTorchLinear,
    CustomPyTorchLoss,
    CustomPyTorchTensorOps,
)
from anytorch.comfy.tensors import (
    AnytorchImageToTensor,
    AnytorchLatentToTensor,
    AnytorchTensorInfo,
    AnytorchTensorToImage,
    AnytorchTensorToLatent,
    AnytorchTensorToMask,
)
from anytorch.comfy.weights import AnytorchCombineWeights, AnytorchLoadWeights, AnytorchSaveWeights

NODES: dict[type, str] = {
    CustomPyTorchLinear: "Custom Linear Layer",
    CustomPyTorchConv2D: "Custom Conv2D Layer",
    CustomPyTorchActivation: "Custom Activation",
    CustomPyTorchLoss: "Custom Loss Function",
    CustomPyTorchTensorOps: "Custom Tensor Operations",
    AnytorchDevice: "Device",
    AnytorchDeviceStatus: "Device Status",
    AnytorchMemoryCleanup: "Memory Clean-up",
    AnytorchLoadWeights: "Load Weights",
    AnytorchSaveWeights: "Save Weights",
    AnytorchCombineWeights: "Combine Weights",
    AnytorchTensorToImage: "Tensor to Image",
    AnytorchImageToTensor: "Image to Tensor",
    AnytorchTensorToMask: "Tensor to Mask",
    AnytorchTensorToLatent: "Tensor to Latent",
    AnytorchLatentToTensor: "Latent to Tensor",
    AnytorchTensorInfo: "Tensor Info",
    AnytorchTextEmbedding: "Text Embedding",
    AnytorchForecast: "Forecast",
}
NODE_CLASS_MAPPINGS = {node.__name__: node for node in NODES}
NODE_DISPLAY_NAME_MAPPINGS = {node.__name__: title for node, title in NODES.items()}
