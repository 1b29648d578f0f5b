"""A decoder-only transformer over bytes: RMSNorm before each block, rotary positions,
SwiGLU, and one matrix for the embedding and the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, Any]
VOCABULARY = 256


@dataclass(frozen=True)
class ModelConfig:
    layers: int = 4
    width: int = 128
    heads: int = 4
    hidden: int = 384
    context: int = 128


def init(config: ModelConfig, seed: int) -> Params:
    """Float32 weights, the same on every process of a seed.

    The two matrices that write to the residual stream start at zero, so that each block
    starts as the identity and the first steps can be large.
    """
    rng = np.random.Generator(np.random.Philox(key=seed))

    def normal(*shape: int, scale: float) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)

    def block() -> Params:
        width, hidden = config.width, config.hidden
        return {
            "attention_norm": np.ones(width, np.float32),
            "qkv": normal(width, 3 * width, scale=width**-0.5),
            "attention_out": np.zeros((width, width), np.float32),
            "mlp_norm": np.ones(width, np.float32),
            "gate_up": normal(width, 2 * hidden, scale=width**-0.5),
            "down": np.zeros((hidden, width), np.float32),
        }

    return {
        "embedding": normal(VOCABULARY, config.width, scale=0.02),
        "blocks": [block() for _ in range(config.layers)],
        "final_norm": np.ones(config.width, np.float32),
    }


def logits(params: Params, inputs: jax.Array, config: ModelConfig) -> jax.Array:
    """(batch, context) bytes to (batch, context, 256) logits of the byte that follows."""
    cos, sin = _rotary(inputs.shape[1], config.width // config.heads)
    x = params["embedding"][inputs] * config.width**0.5
    for block in params["blocks"]:
        x = x + _attention(block, _norm(x, block["attention_norm"]), cos, sin, config.heads)
        gate, up = jnp.split(_norm(x, block["mlp_norm"]) @ block["gate_up"], 2, axis=-1)
        x = x + (jax.nn.silu(gate) * up) @ block["down"]
    return _norm(x, params["final_norm"]) @ params["embedding"].T


def loss(params: Params, windows: jax.Array, config: ModelConfig) -> jax.Array:
    """Mean cross entropy in nats a byte over (batch, context + 1) windows."""
    inputs, targets = windows[:, :-1], windows[:, 1:]
    log_probabilities = jax.nn.log_softmax(logits(params, inputs, config))
    return -jnp.mean(jnp.take_along_axis(log_probabilities, targets[..., None], axis=-1))


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def _rotary(length: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines, (length, size / 2), of positions times frequencies. The base is
    a tenth of the usual one, as the context is short."""
    frequencies = 1000.0 ** -(np.arange(0, size, 2) / size)
    angles = np.arange(length)[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _rotate(x: jax.Array, cos: np.ndarray, sin: np.ndarray) -> jax.Array:
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def _attention(
    block: Params, x: jax.Array, cos: np.ndarray, sin: np.ndarray, heads: int
) -> jax.Array:
    batch, length, width = x.shape
    qkv = (x @ block["qkv"]).reshape(batch, length, 3, heads, width // heads)
    q, k, v = jnp.moveaxis(qkv, (2, 3), (0, 2))
    scores = _rotate(q, cos, sin) @ jnp.swapaxes(_rotate(k, cos, sin), -1, -2)
    causal = np.tril(np.ones((length, length), bool))
    scores = jnp.where(causal, scores * (width // heads) ** -0.5, -1e30)
    mixed = jax.nn.softmax(scores) @ v
    return jnp.swapaxes(mixed, 1, 2).reshape(batch, length, width) @ block["attention_out"]
