"""Low-rank adapters beside frozen layers, through the library peft.

A layer computes W·x + (α/r)·B·A·x: W is frozen, A (r, in) and B (out, r) are trained (Hu et al.,
LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022, Section 4.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, field_validator
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fedsim.config.registry import Config, check_named, nearest
from fedsim.errors import ExperimentError, warn
from fedsim.models.model import Classifier, Model
from fedsim.support.extras import require
from fedsim.support.words import in_short

A, B, ADDED = "lora_A.default.weight", "lora_B.default.weight", "base_layer.added"


class Adapters(Config):
    """Adapters of a network: they and the head are trained, sent and saved, and nothing else.

    What the model itself has frozen stays as it is: such layers get no adapters.

    A begins as torch's default of a linear layer, drawn from the run's seed, and B as zero.

    Args:
        kind: `lora`, low-rank adapters of linear layers.
        r: the rank.
        alpha: α; what adapters add is multiplied by α/r.
        targets: the linear layers that get adapters, by their names or the ends of these; `auto`
            for all except the head, which is the last one.
        dropout: of what goes into adapters, in training.
    """

    kind: Literal["lora"] = "lora"
    r: int = Field(8, ge=1)
    alpha: float = Field(16.0, gt=0)
    targets: Literal["auto"] | tuple[str, ...] = "auto"
    dropout: float = Field(0.0, ge=0, lt=1)

    @field_validator("targets")
    @classmethod
    def _name_layers(cls, targets: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if targets != "auto":
            check_named(targets, "must name a layer; auto is all of them")
        return targets

    def check(self, model: Model) -> None:
        """Refuse models that are no networks."""
        if not model.builds_network:
            raise ExperimentError(
                f"adapters: model.name={model.name} is a {model.kind}, and has no layers"
            )

    def adapting(self, how: str) -> Callable[[nn.Module], nn.Module]:
        """What makes a network one with adapters, for a method that `adapts` so."""
        return partial(self.applied, fixed=how == "b", added=how == "both, exactly")

    def applied(self, network: nn.Module, fixed: bool, added: bool) -> nn.Module:
        """Freeze a network and put adapters into it, from torch's current random state.

        Args:
            fixed: whether A stays as it is drawn.
            added: whether layers have a sum of their own to which the server can add, the buffer
                `added` (out, in).

        Raises:
            ExperimentError: there are no layers for them.
        """
        require("peft", "adapters")
        import peft

        modules = network.named_modules()
        layers = {
            name: module
            for name, module in modules  # but not those that attention reads the weights of
            if isinstance(module, nn.Linear)
            and not isinstance(module, NonDynamicallyQuantizableLinear)
        }
        head = "head" if isinstance(network, Classifier) else _last(network)
        names = self._targets(layers, head)
        trained = [p for p in network.get_submodule(head).parameters() if p.requires_grad]
        _check_shared(network, names)
        if added:
            for name in names:
                network.set_submodule(name, _WithAdded(layers[name]))
        config: Any = peft.LoraConfig(
            r=self.r,
            lora_alpha=self.alpha,
            target_modules="|".join(name.replace(".", r"\.") for name in names),
            lora_dropout=self.dropout,
        )
        peft.inject_adapter_in_model(config, network)
        adapters = (f".{A}", f".{B}")
        network.backbone = {  # type: ignore[assignment]
            name
            for name, _ in network.named_parameters(remove_duplicate=False)
            if not name.endswith(adapters) and not name.startswith(f"{head}.")
        }
        for parameter in trained:
            parameter.requires_grad_(True)
        for name in names if fixed else ():
            network.get_parameter(f"{name}.{A}").requires_grad_(False)
        return network

    def _targets(self, layers: dict[str, nn.Linear], head: str) -> list[str]:
        below = [name for name in layers if not f"{name}.".startswith(f"{head}.")]
        if not below:
            raise ExperimentError("adapters: the model has no linear layer before its last one")
        if not (free := [name for name in below if layers[name].weight.requires_grad]):
            raise ExperimentError(
                "adapters: the model has frozen its linear layers before the last one, as "
                f"'{below[0]}', and these get no adapters"
            )
        if self.targets == "auto":
            return free
        for target in self.targets:
            if not any(f".{name}".endswith(f".{target}") for name in below):
                last = dict.fromkeys(name.rpartition(".")[2] for name in below)
                near = nearest(target, [*last, *below])
                if "did you mean" not in near:
                    near = f"; there are {in_short([*last])}"
                raise ExperimentError(
                    "adapters.targets: no linear layer before the last one is called "
                    f"'{target}'{near}"
                )
            if not any(f".{name}".endswith(f".{target}") for name in free):
                raise ExperimentError(
                    f"adapters.targets: the model has frozen its layer '{target}', which gets no "
                    "adapter"
                )
        ends = tuple(f".{target}" for target in self.targets)
        return [name for name in free if f".{name}".endswith(ends)]


def check_adapted(network: nn.Module, x: Tensor) -> None:
    """Refuse a network that reads the weight of a layer with adapters without calling the layer.

    Ranks above that of a layer are warned of. `x` is a batch of its inputs.

    Raises:
        ExperimentError: there is one, or the head is not the layer that is called last.
    """
    head = "head" if isinstance(network, Classifier) else _last(network)
    layers = {n: m for n, m in network.named_modules() if hasattr(m, "lora_A") or n == head}
    called = list[str]()

    def forward(name: str, own: Callable[..., Any], *given: Any, **named: Any) -> Any:
        called.append(name)
        return own(*given, **named)

    # A hook would keep torch from taking the shortcuts in question.
    for name, module in layers.items():
        module.forward = partial(forward, name, module.forward)
    try:
        with torch.no_grad():
            network.eval()(x)
    finally:
        for module in layers.values():
            del module.forward
    if missing := [name for name in layers if name not in called]:
        raise ExperimentError(
            f"adapters.targets: the model does not call its layer '{missing[0]}', as torch's own "
            "attention and transformer layers do not, so that an adapter would have no effect; "
            "name others"
        )
    if called[-1] != head:
        raise ExperimentError(
            f"adapters: the head is the last linear layer of the model, '{head}', and its outputs "
            f"come from '{called[-1]}'; define that one last, or return a fedsim.models.Classifier"
        )
    adapted: dict[str, Any] = {name: m for name, m in layers.items() if name != head}
    for name, layer in adapted.items():
        rank = min(layer.in_features, layer.out_features)
        if (r := layer.r["default"]) > rank:
            warn(
                f"adapters.r={r}: '{name}' ({layer.out_features}×{layer.in_features}) has no rank "
                f"above {rank}, so that r={rank} adapts it as well"
            )
            break


def of_adapter(name: str) -> bool:
    """Whether a tensor of a state dict is one of an adapter."""
    return name.endswith((f".{A}", f".{B}", f".{ADDED}"))


def below_adapter(name: str) -> str:
    """The name that a layer's tensor gets if the layer gets an adapter."""
    layer, dot, own = name.rpartition(".")
    return f"{layer}.base_layer{dot}{own}"


def _check_shared(network: nn.Module, names: Sequence[str]) -> None:
    """Refuse adapters of layers that share their weights with others, which have none."""
    owners: dict[int, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for name in names:
        own = f"{name}.weight"
        if others := [o for o in owners[id(network.get_parameter(own))] if o != own]:
            raise ExperimentError(
                f"adapters.targets: '{name}' shares its weight with '{others[0]}', which an "
                "adapter would not; name others"
            )


def _last(network: nn.Module) -> str:
    """The name of the last linear layer; empty for none."""
    names = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    return names[-1] if names else ""


class _WithAdded(nn.Linear):
    """A linear layer with a sum beside its frozen weight."""

    added: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.register_buffer("added", torch.zeros_like(layer.weight))

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight + self.added, self.bias)


def merged(network: nn.Module) -> nn.Module:
    """The network without adapters: what they add is added to the layers below, in place."""
    for name, module in list(network.named_modules()):
        if hasattr(module, "lora_A"):
            part: Any = module
            part.merge()
            below = part.base_layer
            layer = nn.Linear(below.in_features, below.out_features, below.bias is not None)
            layer.weight.data = below.weight.data + getattr(below, "added", 0.0)
            if below.bias is not None:
                layer.bias.data = below.bias.data
            network.set_submodule(name, layer)
    return network


def save_for_peft(
    network: nn.Module, folder: Path, adapters: Adapters, outside: Callable[[str], str]
) -> None:
    """Write the adapters and the head of a network as peft reads them.

    Args:
        outside: the name that a layer has in the network that peft puts them into.
    """
    import peft

    state = {name: tensor.contiguous() for name, tensor in network.state_dict().items()}
    names = [name.removesuffix(f".{A}") for name in state if name.endswith(f".{A}")]
    head = "head" if isinstance(network, Classifier) else _last(network)
    found = {}
    for name in names:
        for part in (A, B):
            key = f"base_model.model.{outside(name)}.{part.replace('.default', '')}"
            found[key] = state[f"{name}.{part}"]
    for key, tensor in state.items():
        if key.startswith(f"{head}."):
            found[f"base_model.model.{outside(head)}{key.removeprefix(head)}"] = tensor
    config: Any = peft.LoraConfig(
        r=adapters.r,
        lora_alpha=adapters.alpha,
        target_modules=[outside(name) for name in names],
        lora_dropout=adapters.dropout,
        modules_to_save=[outside(head)],
    )
    config.save_pretrained(folder)
    save_file(found, folder / "adapter_model.safetensors")
