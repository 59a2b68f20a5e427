"""Read the shape of a model in Hugging Face's config.json, for the families that are supported.

Defaults of missing fields are those of transformers 5.23.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from tpuswarm.config.nearest import did_you_mean
from tpuswarm.errors import InputError
from tpuswarm.recipes.decoder.config import Config, Layer, Rotary
from tpuswarm.recipes.language.hub import Published

Facts = Mapping[str, Any]
"""The content of a config.json."""

COMMON = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048, "vocab_size": 32000,
    "rms_norm_eps": 1e-6, "initializer_range": 0.02, "tie_word_embeddings": False, "attention_bias": False,
    "mlp_bias": False, "hidden_act": "silu", "sliding_window": None, "layer_types": None, "rope_theta": 10000.0,
    "rope_scaling": None, "rope_parameters": None,
}  # fmt: skip
GEMMA = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096,
    "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}  # fmt: skip
WINDOWED = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
QWEN = {**WINDOWED, "intermediate_size": 22016, "max_position_embeddings": 32768, "num_key_value_heads": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {
        "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096,
    },
    "qwen2": {**QWEN, "vocab_size": 151936},
    "qwen3": {**QWEN, "vocab_size": 151936, "head_dim": 128},
    "gemma2": {
        **GEMMA, "vocab_size": 256000, "max_position_embeddings": 8192, "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    "gemma3_text": {
        **GEMMA, "vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1e6,
        "rope_local_base_freq": 1e4, "sliding_window_pattern": 6,
    },
    "olmo2": {"vocab_size": 50304, "rms_norm_eps": 1e-5},
    "smollm3": {
        **WINDOWED, "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": True,
        "no_rope_layers": None, "no_rope_layer_interval": 4, "sliding_window": None, "rope_theta": 2e6,
    },
}  # fmt: skip
"""model_type → defaults that differ from COMMON."""
NOT_SHAPE = {
    "architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "use_cache", "bos_token_id",
    "eos_token_id", "pad_token_id", "pretraining_tp", "auto_map", "cache_implementation", "_name_or_path", "hidden_act",
    "is_llama_config", "_sliding_window_pattern", "transformers.js_config", "chunk_size_feed_forward",
    "output_attentions", "output_hidden_states", "return_dict", "problem_type", "id2label", "label2id",
    "_attn_implementation_autoset",
}  # fmt: skip
"""Fields that do not change the shape of a model that is trained in float32 or bfloat16."""
REFUSED: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "use_bidirectional_attention": (None, False),
    "partial_rotary_factor": (None, 1.0),
    "rope_interleaved": (None, False),
    "attention_dropout": (None, 0, 0.0),
    "is_encoder_decoder": (None, False),
}
"""Fields that change the computation → the values with which it is supported."""
MIXTURES = ("moe", "mixtral", "expert")
WITH_PICTURES = {"gemma3": ("gemma3_text", "Gemma3ForConditionalGeneration")}
"""model_type of models that also read pictures → that of their text part, and their class in transformers."""


def facts_of(place: Published) -> dict[str, Any]:
    """Return the content of a model's config.json, or of its text part if it also reads pictures.

    Raises InputError if it cannot be read.
    """
    path = place.get("config.json", "model that can be read")
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"the config.json of {place.name} cannot be read: {error}") from error
    if not isinstance(facts, dict):
        raise InputError(f"the config.json of {place.name} is no object")
    if facts.get("model_type") not in WITH_PICTURES:
        return facts
    text, (family, whole) = facts.get("text_config"), WITH_PICTURES[facts["model_type"]]
    if not isinstance(text, dict):
        raise InputError(f"the config.json of {place.name} has no text_config, which describes its text part")
    return {**text, "model_type": family, "architectures": [whole]}


def is_text_part(facts: Facts) -> bool:
    """Return whether `facts_of` took them from a model that also reads pictures."""
    return facts.get("architectures") in [[whole] for _, whole in WITH_PICTURES.values()]


def parse_config(facts: Facts, name: str) -> Config:
    """Return the shape of the model that a config.json describes. name: of the model, in errors.

    Raises InputError naming an unknown family, a field that is not supported, or an impossible shape.
    """
    family = facts.get("model_type")
    if family not in FAMILIES:
        if any(word in str(family) for word in MIXTURES):
            raise InputError(f"{name} is a mixture of experts ({family}), which is not supported yet")
        raise InputError(
            f"{name} has the architecture {family}, which is unknown; {did_you_mean(str(family), FAMILIES)}"
        )
    defaults = COMMON | FAMILIES[family]
    for field, allowed in REFUSED.items():
        if facts.get(field) not in allowed:
            raise InputError(f"{name} has {field} {facts[field]}, which is not supported; it must be {allowed[-1]}")
    unknown = sorted(facts.keys() - defaults.keys() - REFUSED.keys() - NOT_SHAPE)
    for field in unknown:
        if facts[field] is not None and facts[field] is not False:  # null or false: the feature is off
            raise InputError(f"{name} has {field} {facts[field]}, which is unknown in a model of {family}")
    try:
        return _config(str(family), {**defaults, **facts}, name)
    except (TypeError, ValueError, KeyError, ZeroDivisionError) as error:
        raise InputError(f"the config.json of {name} is damaged: {error!r}") from error


def _config(family: str, facts: Facts, name: str) -> Config:
    is_gemma = family.startswith("gemma")
    width, heads = int(facts["hidden_size"]), int(facts["num_attention_heads"])
    kv_heads = int(facts["num_key_value_heads"] or heads)
    head_width = int(facts["head_dim"] or width // heads)
    if heads % kv_heads:
        raise InputError(f"{name} has {heads} heads and keys for {kv_heads}, which must divide them")
    if head_width % 2 or (facts["head_dim"] is None and width % heads):
        raise InputError(f"{name} has an impossible shape: {heads} heads of {head_width}, a width of {width}")
    layer_count = int(facts["num_hidden_layers"])
    windowed = _uses_window(family, facts, layer_count, name)
    rotaries = _rotaries(family, facts, head_width, name)
    no_positions = _lacks_positions(family, facts, layer_count)
    if any(no_positions):
        rotaries = (*rotaries, Rotary((0.0,) * (head_width // 2)))
    window = facts["sliding_window"]
    layers = tuple(
        Layer(
            rotary=len(rotaries) - 1 if no_position else int(family == "gemma3_text" and is_local),
            window=int(window) if is_local else None,
        )
        for is_local, no_position in zip(windowed, no_positions, strict=True)
    )
    has_bias = bool(facts["attention_bias"])
    return Config(
        width=width,
        mlp_width=int(facts["intermediate_size"]),
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        vocab=int(facts["vocab_size"]),
        context=int(facts["max_position_embeddings"]),
        layers=layers,
        rotaries=rotaries,
        norm_epsilon=float(facts["rms_norm_eps"]),
        attention_scale=float(facts["query_pre_attn_scalar"] if is_gemma else head_width) ** -0.5,
        activation=_activation(str(facts["hidden_activation" if is_gemma else "hidden_act"]), name),
        norm_inputs=family != "olmo2",
        norm_outputs=is_gemma or family == "olmo2",
        norm_offset=is_gemma,
        norm_heads={"qwen3": "each", "gemma3_text": "each", "olmo2": "all"}.get(family, "none"),  # type: ignore[arg-type]
        qkv_bias=has_bias or family == "qwen2",
        out_bias=has_bias,
        mlp_bias=bool(facts["mlp_bias"]),
        tied=bool(facts["tie_word_embeddings"]),
        embedding_scale=width**0.5 if is_gemma else 1.0,
        score_cap=facts["attn_logit_softcapping"] if is_gemma else None,
        logit_cap=facts["final_logit_softcapping"] if is_gemma else None,
        deviation=float(facts["initializer_range"]),
    )


def _activation(name: str, model: str) -> Any:
    names = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"}
    if name not in names:
        raise InputError(f"{model} has the activation {name}, which is not supported; {did_you_mean(name, names)}")
    return names[name]


def _uses_window(family: str, facts: Facts, layers: int, name: str) -> list[bool]:
    """Return for each layer whether it attends within the window only."""
    if (kinds := facts["layer_types"]) is not None and family != "mistral":
        known = {"sliding_attention": True, "full_attention": False}
        if len(kinds) != layers or set(kinds) - known.keys():
            raise InputError(f"{name} has layer_types {kinds}, not {layers} of {', '.join(known)}")
        found = [known[kind] for kind in kinds]
    elif family == "mistral":
        found = [True] * layers
    elif family == "gemma2":
        found = [layer % 2 == 0 for layer in range(layers)]
    elif family == "gemma3_text":
        found = [(layer + 1) % int(facts["sliding_window_pattern"]) != 0 for layer in range(layers)]
    elif family in ("qwen2", "qwen3"):
        found = [layer >= int(facts["max_window_layers"]) for layer in range(layers)]
    elif family == "smollm3":
        found = _lacks_positions(family, facts, layers)
    else:
        found = [False] * layers
    uses_window = facts["sliding_window"] is not None and facts.get(
        "use_sliding_window", family not in ("llama", "olmo2")
    )
    return [is_local and uses_window for is_local in found]


def _lacks_positions(family: str, facts: Facts, layers: int) -> list[bool]:
    if family != "smollm3":
        return [False] * layers
    if facts["no_rope_layers"] is not None:  # 1 means a layer with positions
        return [not has for has in facts["no_rope_layers"]]
    return [(layer + 1) % int(facts["no_rope_layer_interval"]) == 0 for layer in range(layers)]


def _rotaries(family: str, facts: Facts, head_width: int, name: str) -> tuple[Rotary, ...]:
    """Return the rotary positions of layers with full attention and, for Gemma 3, of those with a window."""
    parameters = dict(facts["rope_parameters"] or {})
    default = {"rope_theta": facts["rope_theta"], **(facts["rope_scaling"] or {})}
    local = {"rope_theta": facts.get("rope_local_base_freq")}
    if "full_attention" in parameters or "sliding_attention" in parameters:
        local |= parameters.get("sliding_attention") or {}
        parameters = parameters.get("full_attention") or {}
    default |= {key: value for key, value in parameters.items() if value is not None}
    wanted = [default, local] if family == "gemma3_text" else [default]
    return tuple(_rotary(each, head_width, int(facts["max_position_embeddings"]), name) for each in wanted)


def _rotary(parameters: dict[str, Any], head_width: int, context: int, name: str) -> Rotary:
    """Return frequencies and scale. Formulas: transformers/modeling_rope_utils.py, and the papers named there."""
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    base, half = float(parameters["rope_theta"]), head_width // 2
    plain = [base ** (-2 * place / head_width) for place in range(half)]
    if kind == "default":
        return Rotary(tuple(plain))
    if kind not in ("linear", "llama3", "yarn"):
        raise InputError(f"{name} scales positions by {kind}, which is not supported; linear, llama3 and yarn are")
    factor = float(parameters["factor"])
    slow = [frequency / factor for frequency in plain]
    if kind == "linear":
        return Rotary(tuple(slow))
    original = float(parameters.get("original_max_position_embeddings") or context)
    if kind == "llama3":
        low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
        turns = [original * frequency / (2 * math.pi) for frequency in plain]
        shares = [min(max((turn - low) / (high - low), 0.0), 1.0) for turn in turns]
        return Rotary(tuple(_blend(plain, slow, shares)))
    fast, slowest = float(parameters.get("beta_fast") or 32), float(parameters.get("beta_slow") or 1)

    def place(turns: float) -> float:
        """Return the index of the frequency that turns so often within the original context."""
        return head_width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = place(fast), place(slowest)
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_width - 1)
    last += 0.001 * (first == last)
    shares = [1 - min(max((index - first) / (last - first), 0.0), 1.0) for index in range(half)]
    return Rotary(tuple(_blend(plain, slow, shares)), _yarn_scale(parameters, factor))


def _blend(fast: list[float], slow: list[float], shares: list[float]) -> list[float]:
    return [share * a + (1 - share) * b for a, b, share in zip(fast, slow, shares, strict=True)]


def _yarn_scale(parameters: dict[str, Any], factor: float) -> float:
    if (given := parameters.get("attention_factor")) is not None:
        return float(given)

    def scale(multiplier: float) -> float:
        return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0

    above, below = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return scale(above) / scale(below) if above and below else scale(1.0)
