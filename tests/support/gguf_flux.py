"""GGUF as the pack for it does it, in small: a file whose weights stay quantised in memory and are dequantised by the
layer that uses them, LoRA included. ComfyUI must be imported already."""

from __future__ import annotations

from pathlib import Path

import comfy.lora
import comfy.model_patcher
import comfy.ops
import comfy.sd
import comfy.utils
import gguf
import torch
from torch import Tensor, nn


class Quantised(Tensor):
    """Raw bytes that go by the shape of the weight they stand for."""

    kind: gguf.GGMLQuantizationType
    logical: torch.Size
    patches: list

    @staticmethod
    def of(raw: Tensor, kind: gguf.GGMLQuantizationType, shape: tuple[int, ...]) -> Quantised:
        made = raw.as_subclass(Quantised)
        made.kind, made.logical, made.patches = kind, torch.Size(shape), []
        return made

    @property
    def shape(self) -> torch.Size:
        return self.logical

    def _same(self, *args, **kwargs) -> Quantised:
        return self

    to = clone = detach = _same  # on one device, and never of another dtype

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        raw = self.as_subclass(Tensor).numpy()
        weight = torch.from_numpy(gguf.dequantize(raw, self.kind)).reshape(self.logical).to(dtype)
        for patches, key in self.patches:
            weight = comfy.lora.calculate_weight(patches, weight, key)
        return weight


class QuantisedOps(comfy.ops.manual_cast):
    class Linear(comfy.ops.manual_cast.Linear):
        def _load_from_state_dict(self, state_dict, prefix, *rest):
            weight, bias = state_dict.get(f"{prefix}weight"), state_dict.get(f"{prefix}bias")
            if not isinstance(weight, Quantised):
                return super()._load_from_state_dict(state_dict, prefix, *rest)
            self.weight = nn.Parameter(weight, requires_grad=False)
            self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

        def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
            if not isinstance(self.weight, Quantised):
                return super().forward(x, *args, **kwargs)
            return nn.functional.linear(x, self.weight.dequantised(x.dtype), self.bias)


class QuantisedPatcher(comfy.model_patcher.ModelPatcher):
    """Leaves the patches of quantised weights to the layers."""

    def patch_weight_to_device(self, key, *args, **kwargs):
        weight = comfy.utils.get_attr(self.model, key)
        if not isinstance(weight, Quantised):
            return super().patch_weight_to_device(key, *args, **kwargs)
        weight.patches = [(self.patches[key], key)] if key in self.patches else []

    def unpatch_model(self, device_to=None, unpatch_weights=True):
        for weight in quantised(self) if unpatch_weights else ():
            weight.patches = []
        return super().unpatch_model(device_to, unpatch_weights)


def quantised(model) -> list[Quantised]:
    return [weight for weight in model.model.parameters() if isinstance(weight, Quantised)]


def write(weights: dict[str, Tensor], path: Path, kind: gguf.GGMLQuantizationType) -> Path:
    """A .gguf file; as usual what is no matrix, and what is outside of the blocks, is left as it is."""
    writer = gguf.GGUFWriter(str(path), "flux")
    for name, weight in weights.items():
        data = weight.float().contiguous().numpy()
        if weight.ndim == 2 and "blocks" in name:
            writer.add_tensor(name, gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(path: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for tensor in gguf.GGUFReader(str(path)).tensors:
        raw, shape = torch.from_numpy(tensor.data.copy()), tuple(int(side) for side in reversed(tensor.shape))
        plain = tensor.tensor_type is gguf.GGMLQuantizationType.F32
        found[tensor.name] = raw.reshape(shape) if plain else Quantised.of(raw, tensor.tensor_type, shape)
    return found


def load(weights: dict[str, Tensor]):
    """Through ComfyUI's own detection and model classes."""
    options = {"custom_operations": QuantisedOps, "dtype": torch.float32}
    model = comfy.sd.load_diffusion_model_state_dict(dict(weights), model_options=options)
    return QuantisedPatcher(model.model, model.load_device, model.offload_device)
