"""Options of commands that run a model in a context, and the model and context parameters that they mean."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from engine.contexts import ContextParams, ModelContext
    from engine.session import Session

PANEL = "Model and context"


def _option(*names: str, help: str, **options: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=PANEL, **options)


CtxSize = Annotated[
    int | None,
    _option("-c", "--ctx-size", min=0, help="Tokens of the context; 0: as trained.", show_default="4096 at most"),
]
BatchSize = Annotated[int, _option("-b", "--batch-size", min=1, help="Tokens of one batch, at most.")]
UbatchSize = Annotated[int, _option("-ub", "--ubatch-size", min=1, help="Tokens that run at once.")]
ThreadsBatch = Annotated[
    int | None,
    _option("-tb", "--threads-batch", min=1, max=512, help="Threads for the prompt; as -t.", show_default=False),
]
CacheK = Annotated[str, _option("-ctk", "--cache-type-k", help="Type of the keys in the cache.")]
CacheV = Annotated[str, _option("-ctv", "--cache-type-v", help="Type of the values in the cache.")]
FullWindows = Annotated[bool, _option("--swa-full", help="Keep all positions of sliding windows.")]
RopeBase = Annotated[float, _option("--rope-freq-base", min=0, help="Base of the rotary frequencies; 0: the model's.")]
RopeScale = Annotated[
    float, _option("--rope-freq-scale", min=0, help="Factor of the rotary frequencies; 0: the model's.")
]
LoadMode = Annotated[
    str, _option("-lm", "--load-mode", help="How weights are loaded: auto, none, mmap, mlock, mmap+mlock, dio.")
]
CheckTensors = Annotated[bool, _option("--check-tensors", help="Refuse weights that are not finite.")]
OverrideKv = Annotated[
    list[str] | None,
    _option("--override-kv", metavar="KEY=TYPE:VALUE", help="Metadata instead of the file's.", show_default=False),
]
Adapters = Annotated[
    list[Path] | None, _option("--lora", metavar="FILE", help="A LoRA adapter; may repeat.", show_default=False)
]
ScaledAdapters = Annotated[
    list[str] | None, _option("--lora-scaled", metavar="FILE:SCALE", help="The same, scaled.", show_default=False)
]
Control = Annotated[
    list[Path] | None,
    _option("--control-vector", metavar="FILE", help="A control vector; may repeat.", show_default=False),
]
ControlScaled = Annotated[
    list[str] | None,
    _option("--control-vector-scaled", metavar="FILE:SCALE", help="The same, scaled.", show_default=False),
]
ControlLayers = Annotated[
    tuple[int, int] | None,
    _option("--control-vector-layer-range", help="First and last layer that it is added to.", show_default=False),
]


def adapt(context: ModelContext, given: dict[str, Any]) -> None:
    """Give a context the adapters that a command's arguments name."""
    from gguftools.adapter_files import Scaled, load_control, load_lora, read_scaled

    def named(plain: str, scaled: str) -> list[Scaled]:
        found: list[Scaled] = [(path, 1.0) for path in given[plain] or ()]
        return found + [read_scaled(text, "--" + scaled.replace("_", "-")) for text in given[scaled] or ()]

    loras = [(load_lora(path, context.session), scale) for path, scale in named("lora", "lora_scaled")]
    vectors = named("control_vector", "control_vector_scaled")
    layers = given["control_layers"] or (None, None)
    control = load_control(vectors, context.session, *layers) if vectors else None
    if loras or control is not None:
        context.set_adapters(loras, control)


def opened(given: dict[str, Any]) -> tuple[Session, ContextParams]:
    """The model and the parameters of its context, from a command's arguments by name."""
    from engine.contexts import ContextParams
    from gguftools.generating import N_CTX
    from gguftools.loading import load, read_overrides

    session = load(
        given["model"],
        threads=given["threads"],
        threads_batch=given["threads_batch"],
        mode=given["load_mode"],
        overrides=read_overrides(given["override_kv"] or ()),
        check_tensors=given["check_tensors"],
        activations=given["activations"],
    )
    n_ctx = given["ctx_size"]
    params = ContextParams(
        n_ctx=min(N_CTX, session.n_ctx_train) if n_ctx is None else n_ctx,
        n_batch=given["batch_size"],
        n_ubatch=given["ubatch_size"],
        type_k=given["cache_k"],
        type_v=given["cache_v"],
        full_windows=given["full_windows"],
        rope_freq_base=given["rope_freq_base"],
        rope_freq_scale=given["rope_freq_scale"],
    )
    return session, params
