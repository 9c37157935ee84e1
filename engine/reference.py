"""transformers' model of the same weights, for checks. A development extra: imported only when a check runs."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError


def import_transformers() -> Any:
    """The library, made quiet. Raises ConfigError with the remedy where it is not installed."""
    try:
        library: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(f"this check needs transformers: pip install 'twostroke[dev]' ({error})") from error
    library.utils.logging.disable_progress_bar()
    library.utils.logging.set_verbosity_error()
    return library


class Reference:
    """Computes in float32 on the weights that the engine has: norms as stored, all others rounded to its dtype."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        """Loads the model. Raises ConfigError where transformers cannot."""
        library = import_transformers()
        try:
            model = library.AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, attn_implementation="eager", local_files_only=True
            )
        except Exception as error:  # the library raises whatever its parts raise
            raise ConfigError(f"transformers cannot load {path}: {error}", field="model") from error
        self._model = model.eval()
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                if "norm" not in name:
                    parameter.copy_(parameter.to(dtype))

    @torch.inference_mode()
    def trace(self, ids: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """The residual stream, [tokens, width], before the first layer and after each; the logits, [tokens, vocab]."""
        streams: list[Tensor] = []
        layers = self._model.get_decoder().layers
        hooks = [layers[0].register_forward_pre_hook(lambda _, given: streams.append(given[0][0]))]
        hooks += [layer.register_forward_hook(lambda _, given, made: streams.append(_first(made))) for layer in layers]
        try:
            return streams, self.logits(ids)
        finally:
            for hook in hooks:
                hook.remove()

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """Of every token: [tokens, vocab]."""
        logits: Tensor = self._model(torch.tensor([list(ids)])).logits[0]
        return logits

    def tensor(self, name: str) -> Tensor | None:
        """A weight by the checkpoint's name, the decoder possibly being a part of something larger; None: none such."""
        tensors: dict[str, Tensor] = self._model.state_dict()
        end = name.removeprefix("model.")
        return next((tensor for key, tensor in tensors.items() if key == end or key.endswith("." + end)), None)


def _first(made: Any) -> Tensor:
    """A layer's stream, [tokens, width], of what it returned."""
    stream: Tensor = made[0] if isinstance(made, tuple) else made
    return stream[0]
