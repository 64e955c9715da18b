"""What models of transformers rename and convert when they load: experts that become one tensor, names that changed.

transformers' own table says what, and its own operations do it (`get_model_conversion_mapping`, `WeightConverter`), on
tensors without values first, so that names and shapes are known before anything is read.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from wholestep.checkpoint.state_names import bare_name
from wholestep.errors import CheckpointError


@dataclass
class Conversion:
    """What some tensors of the files become.

    Attributes:
        first: the name that transformers knows it by.
        converter: of transformers, with no tensors yet.
        sources: name of each tensor in the files -> the pattern of the converter that it fits.
    """

    model: Any
    first: str
    converter: Any
    sources: dict[str, str] = field(default_factory=dict)

    def run(self, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors that the model has, by name.

        Raises:
            CheckpointError: the operations fail.
        """
        converter = copy.deepcopy(self.converter)
        for name, pattern in self.sources.items():
            converter.add_tensor(self.first, name, pattern, read(name))
        try:
            made = converter.convert(self.first, model=self.model, config=self.model.config)
        except Exception as error:
            raise CheckpointError(
                f"transformers cannot make {self.first} of {', '.join(self.sources)}: {error}"
            ) from error
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}


def converted(tensors: Mapping[str, Any], model: nn.Module, names: Collection[str]) -> dict[str, Any]:
    """The tensors of files of transformers under the names that its models have for them; others as they are.

    Args:
        tensors: name in the files -> its entry in the index.
        names: of the model's tensors.

    Returns:
        Name -> entry, with the name in the files as "tensor", or a "conversion".
    """
    ours = _pretrained(model)
    if ours is None:
        return dict(tensors)
    loading = sys.modules["transformers.core_model_loading"]
    transforms = sys.modules["transformers.conversion_mapping"].get_model_conversion_mapping(ours)
    renamings = [one for one in transforms if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, loading.WeightConverter)]
    of_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    known = dict.fromkeys(names, True)
    found: dict[str, Any] = {}
    conversions: dict[str, Conversion] = {}
    for key in sorted(tensors, key=loading.dot_natural_key):
        name, pattern = loading.rename_source_key(key, renamings, converters, ours.base_model_prefix, known)
        if name not in known and key in known:
            name, pattern = key, None
        if pattern is None:
            found[name] = {**tensors[key], "tensor": key}
        else:
            made = conversions.setdefault(name, Conversion(ours, name, of_pattern[pattern]))
            made.sources[key] = pattern
    for one in conversions.values():
        for name, tensor in one.run(lambda key: _without_values(tensors[key])).items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            found[name] = {"dtype": dtype, "shape": list(tensor.shape), "conversion": one}
    return found


def _without_values(entry: Mapping[str, Any]) -> torch.Tensor:
    return torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]), device="meta")


def _pretrained(model: nn.Module) -> Any:
    """The model of transformers that a model is, whatever is around it; None for another, or of a version without."""
    table = getattr(sys.modules.get("transformers.conversion_mapping"), "get_model_conversion_mapping", None)
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if table is None or kind is None:
        return None
    modules = dict(model.named_modules(remove_duplicate=False))
    bare = (one for raw, one in modules.items() if not bare_name(model, modules, raw))
    return next((one for one in bare if isinstance(one, kind)), None)
