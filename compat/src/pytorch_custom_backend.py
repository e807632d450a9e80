"""Document 4's names: re-exports of anytorch.lite's. `python pytorch_custom_backend.py` tries the installation out."""

from anytorch.lite import AutogradTensor as AutogradTensor
from anytorch.lite import CustomAdam as CustomAdam
from anytorch.lite import CustomConv2d as CustomConv2d
from anytorch.lite import CustomDevice as CustomDevice
from anytorch.lite import CustomLinear as CustomLinear
from anytorch.lite import CustomMSELoss as CustomMSELoss
from anytorch.lite import CustomTensor as CustomTensor

__all__ = [
    "AutogradTensor",
    "CustomAdam",
    "CustomConv2d",
    "CustomDevice",
    "CustomLinear",
    "CustomMSELoss",
    "CustomTensor",
]

if __name__ == "__main__":
    from anytorch.lite.demo import tour

    for line in tour():
        print(line)
