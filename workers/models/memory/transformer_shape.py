"""A transformer's dimensions, and the number of weights, activations and cached keys that follow from them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from cluster.errors import UserError

# Names of the same dimension in other libraries. The first one present is used.
CONFIG_NAMES = {
    "hidden": ("hidden", "hidden_size", "n_embd", "d_model", "dim"),
    "layers": ("layers", "num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "vocab": ("vocab", "vocab_size"),
    "heads": ("heads", "num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("kv_heads", "num_key_value_heads", "n_kv_heads"),
    "head_size": ("head_size", "head_dim"),
    "intermediate": ("intermediate", "intermediate_size", "n_inner", "ffn_dim"),
    "seq": ("seq", "max_position_embeddings", "n_positions", "n_ctx"),
    "tied_head": ("tied_head", "tie_word_embeddings"),
}
OWN_FIELDS = ("bytes_per_element", "positions", "gated", "bias")
# Families with a table of learned positions as long as the context. Others use rotary embeddings or biases, not stored.
LEARNED_POSITIONS = ("gpt2", "bert", "roberta", "opt", "gpt_bigcode")


@dataclass(frozen=True)
class TransformerShape:
    """Dimensions of a transformer whose context is `seq` tokens.

    Defaults: kv_heads 0 means heads, intermediate 0 means 4 * hidden, head_size 0 means hidden / heads. `positions` is
    the number of rows of learned positions (and segments); `gated`: the feed-forward has three matrices (SwiGLU);
    `bias`: linear layers and norms have biases (GPT-2, BERT; False for models like Llama).
    """

    hidden: int
    layers: int
    vocab: int
    heads: int
    seq: int
    intermediate: int = 0
    kv_heads: int = 0
    head_size: int = 0
    bytes_per_element: float = 4
    positions: int = 0
    gated: bool = False
    bias: bool = True
    tied_head: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            needed = field.name in ("hidden", "layers", "vocab", "heads", "seq", "bytes_per_element")
            if not isinstance(value, int | float) or not 0 <= value < math.inf or (needed and not value):
                raise UserError(f"{field.name} of a transformer is {value!r}", "write a positive number")
        if self.heads % self.kv:
            raise UserError(f"{self.heads} heads cannot share {self.kv} kv_heads", "write a divisor of heads")
        if not self.head_size and self.hidden % self.heads:
            raise UserError(f"hidden {self.hidden} is not a multiple of {self.heads} heads", "set head_size")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "TransformerShape":
        """Read a mapping with our names or those of common libraries. Raises UserError that names missing entries."""
        if not isinstance(config, Mapping):
            raise UserError(
                f"{type(config).__name__} is not a configuration", "pass a dict with a transformer's dimensions"
            )
        values = {ours: v for ours, names in CONFIG_NAMES.items() if (v := _first(config, names)) is not None}
        values |= {name: config[name] for name in OWN_FIELDS if name in config}
        missing = [name for name in ("hidden", "layers", "vocab", "heads", "seq") if name not in values]
        if missing:
            choices = "; ".join(f"{name}: {', '.join(CONFIG_NAMES[name])}" for name in missing)
            raise UserError(f"the configuration lacks {', '.join(missing)}", f"add one name for each: {choices}")
        if (family := config.get("model_type")) is not None:
            learned = family in LEARNED_POSITIONS
            values.setdefault("positions", (values["seq"] + config.get("type_vocab_size", 0)) if learned else 0)
            values.setdefault("bias", learned)
            values.setdefault("gated", not learned and config.get("hidden_act") in ("silu", "swish", None))
        return cls(**values)

    @property
    def kv(self) -> int:
        return self.kv_heads or self.heads

    @property
    def feed_forward_width(self) -> int:
        return self.intermediate or 4 * self.hidden

    @property
    def width(self) -> int:
        """Elements of all heads together."""
        return self.heads * (self.head_size or self.hidden // self.heads)

    @property
    def kv_width(self) -> int:
        return self.width // self.heads * self.kv

    @property
    def weights(self) -> int:
        """Number of weights.

        Per layer: query and output (hidden x width), key and value (hidden x kv_width), two or three feed-forward
        matrices, two norms. Once: embeddings, learned positions, the last norm, and a head unless it is tied.
        """
        attention = 2 * self.hidden * self.width + 2 * self.hidden * self.kv_width
        feed_forward = (3 if self.gated else 2) * self.hidden * self.feed_forward_width
        biases = self.width + 2 * self.kv_width + 2 * self.hidden + (2 if self.gated else 1) * self.feed_forward_width
        norm = (2 if self.bias else 1) * self.hidden
        per_layer = attention + feed_forward + (biases if self.bias else 0) + 2 * norm
        tables = self.vocab * (1 if self.tied_head else 2) + self.positions
        return self.layers * per_layer + tables * self.hidden + norm

    @property
    def largest_weight(self) -> int:
        return self.hidden * max(self.vocab, self.feed_forward_width, self.width)

    @property
    def saved_per_token(self) -> int:
        """Elements per token that forward saves for backward, with fused attention (which recomputes its scores).

        Per layer: input and output of both norms (4 hidden), query, key and value, the attention's output (which the
        output layer reads too), and in the feed-forward the activation's input and output: 2 feed, or with a gate 4
        (gate, its activation, up, their product). Once: input and output of the last norm, and the log-softmax of the
        logits (vocab). For GPT-2 that is 16 hidden per layer.
        """
        feed_forward = (4 if self.gated else 2) * self.feed_forward_width
        per_layer = 4 * self.hidden + 2 * self.width + 2 * self.kv_width + feed_forward
        return self.layers * per_layer + 2 * self.hidden + self.vocab

    @property
    def live_per_token(self) -> int:
        """Maximum elements per token that are live at once in inference.

        In a feed-forward: the residual, the norm's output, the activation's input and output (and the gate). At the
        head: its input and the logits.
        """
        return max(2 * self.hidden + (3 if self.gated else 2) * self.feed_forward_width, self.hidden + self.vocab)

    @property
    def cached_per_token(self) -> int:
        """Elements of the KV cache per token: a key and a value of every layer."""
        return 2 * self.layers * self.kv_width


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)
