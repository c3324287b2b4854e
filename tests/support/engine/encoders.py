"""Write encoders that the tests need: tiny ones with random weights, a tokenizer of words, and the files of
sentence-transformers.
"""

from collections.abc import Mapping
from math import erf
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.support.engine.embedders import write_json

HIDDEN, HEADS, INNER, LAYERS, VOCABULARY, CONTEXT = 32, 4, 48, 3, 60, 96
WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *(f"w{number}" for number in range(VOCABULARY - 4))]
_NAMES = {"bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta", "modernbert": "ModernBert"}


def make_encoder(
    folder: Path, kind: str, config: Mapping[str, Any] | None = None, *, classifier: bool = False, pooling: str = "cls"
) -> dict[str, np.ndarray]:
    """Write an encoder of the type `kind` into a new folder, and return its weights. `config` changes its config.

    With `classifier`, the encoder is a cross-encoder with one label; otherwise its files name a pooling.
    """
    folder.mkdir(parents=True)
    modern, roberta = kind == "modernbert", kind.endswith("roberta")
    end = "ForSequenceClassification" if classifier else "Model"
    settings: dict[str, Any] = {
        "architectures": [_NAMES[kind] + end],
        "model_type": kind,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT + 2 * roberta,
        "pad_token_id": 1 if roberta else 0,
    }
    settings |= {"id2label": {"0": "LABEL_0"}} if classifier else {}
    settings |= {"local_attention": 8, "hidden_activation": "gelu"} if modern else {"hidden_act": "gelu"}
    write_json(folder / "config.json", settings | dict(config or {}))
    prefix = "" if not classifier else "model." if modern else "roberta." if roberta else "bert."
    shapes = _list_modern(classifier) if modern else _list_classic(CONTEXT + 2 * roberta, roberta, classifier)
    draw = np.random.default_rng(3)
    weights: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        values = draw.normal(0, 0.3, shape) + (1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0)
        outside = name.startswith(("classifier", "head."))
        weights[("" if outside else prefix) + name] = values.astype(np.float32)
    save_file(weights, str(folder / "model.safetensors"))
    _write_tokenizer(folder)
    if not classifier:
        write_json(folder / "1_Pooling/config.json", {"pooling_mode": pooling})
        rows = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
        write_json(folder / "modules.json", [{"path": path, "type": f"x.{name}"} for name, path in rows])
    return {name.removeprefix(prefix): array for name, array in weights.items()}


def _list_layer(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _list_norm(name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (HIDDEN,), f"{name}.bias": (HIDDEN,)}


def _list_classic(positions: int, roberta: bool, classifier: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (VOCABULARY, HIDDEN),
        "embeddings.position_embeddings.weight": (positions, HIDDEN),
        "embeddings.token_type_embeddings.weight": (1 if roberta else 2, HIDDEN),
        **_list_norm("embeddings.LayerNorm"),
    }
    for layer in range(LAYERS):
        name = f"encoder.layer.{layer}"
        for part in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
            shapes |= _list_layer(f"{name}.{part}", HIDDEN, HIDDEN)
        shapes |= _list_norm(f"{name}.attention.output.LayerNorm") | _list_norm(f"{name}.output.LayerNorm")
        shapes |= _list_layer(f"{name}.intermediate.dense", HIDDEN, INNER)
        shapes |= _list_layer(f"{name}.output.dense", INNER, HIDDEN)
    if classifier and roberta:
        shapes |= _list_layer("classifier.dense", HIDDEN, HIDDEN) | _list_layer("classifier.out_proj", HIDDEN, 1)
    elif classifier:
        shapes |= _list_layer("pooler.dense", HIDDEN, HIDDEN) | _list_layer("classifier", HIDDEN, 1)
    return shapes


def _list_modern(classifier: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.tok_embeddings.weight": (VOCABULARY, HIDDEN),
        "embeddings.norm.weight": (HIDDEN,),
        "final_norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        name = f"layers.{layer}"
        shapes |= {f"{name}.attn_norm.weight": (HIDDEN,)} if layer else {}
        shapes |= {
            f"{name}.attn.Wqkv.weight": (3 * HIDDEN, HIDDEN),
            f"{name}.attn.Wo.weight": (HIDDEN, HIDDEN),
            f"{name}.mlp_norm.weight": (HIDDEN,),
            f"{name}.mlp.Wi.weight": (2 * INNER, HIDDEN),
            f"{name}.mlp.Wo.weight": (HIDDEN, INNER),
        }
    if classifier:
        shapes |= {"head.dense.weight": (HIDDEN, HIDDEN), "head.norm.weight": (HIDDEN,)}
        shapes |= _list_layer("classifier", HIDDEN, 1)
    return shapes


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of words, which joins two texts with segments 0 and 1."""
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    made.save(str(folder / "tokenizer.json"))
    tokens = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **tokens})


class EncoderReference:
    """Encoder in numpy and double precision, one text at a time, from the weights of `make_encoder`."""

    def __init__(self, kind: str, weights: dict[str, np.ndarray], *, window: int = 4, interval: int = 3) -> None:
        self.kind = kind
        self.weights = {name: array.astype(np.float64) for name, array in weights.items()}
        self.window = window
        self.interval = interval

    def states(self, ids: list[int], segment: int = 0) -> np.ndarray:
        """Return the hidden states of a text or of a pair, shape (tokens, features)."""
        if self.kind == "modernbert":
            return self._run_modern(ids)
        first = 2 if self.kind.endswith("roberta") else 0
        segments = [int(bool(segment) and not first and place >= segment) for place in range(len(ids))]
        found = self.weights["embeddings.word_embeddings.weight"][ids]
        found = found + self.weights["embeddings.position_embeddings.weight"][first : first + len(ids)]
        found = found + self.weights["embeddings.token_type_embeddings.weight"][segments]
        found = self._norm("embeddings.LayerNorm", found, 1e-12)
        for layer in range(LAYERS):
            name = f"encoder.layer.{layer}"
            parts = [self._linear(f"{name}.attention.self.{one}", found) for one in ("query", "key", "value")]
            mixed = self._linear(f"{name}.attention.output.dense", _attend(*parts, None))
            found = self._norm(f"{name}.attention.output.LayerNorm", mixed + found, 1e-12)
            inner = _gelu(self._linear(f"{name}.intermediate.dense", found))
            found = self._norm(f"{name}.output.LayerNorm", self._linear(f"{name}.output.dense", inner) + found, 1e-12)
        return found

    def score(self, ids: list[int], segment: int = 0, *, mean: bool = False) -> float:
        """Return the score of a pair by the classifier."""
        states = self.states(ids, segment)
        if self.kind == "modernbert":
            inner = _gelu(self._linear("head.dense", states.mean(axis=0) if mean else states[0]))
            logit = self._linear("classifier", self._norm("head.norm", inner, 1e-5))
        elif self.kind.endswith("roberta"):
            logit = self._linear("classifier.out_proj", np.tanh(self._linear("classifier.dense", states[0])))
        else:
            logit = self._linear("classifier", np.tanh(self._linear("pooler.dense", states[0])))
        return float(1 / (1 + np.exp(-logit[0])))

    def _run_modern(self, ids: list[int]) -> np.ndarray:
        found = self._norm("embeddings.norm", self.weights["embeddings.tok_embeddings.weight"][ids], 1e-5)
        places = np.arange(len(ids))
        near = np.abs(places[:, None] - places[None]) <= self.window
        for layer in range(LAYERS):
            name, is_global = f"layers.{layer}", layer % self.interval == 0
            before = self._norm(f"{name}.attn_norm", found, 1e-5) if layer else found
            query, key, value = np.split(self._linear(f"{name}.attn.Wqkv", before), 3, axis=-1)
            base = 160_000.0 if is_global else 10_000.0
            mixed = _attend(_rotate(query, base), _rotate(key, base), value, None if is_global else near)
            found = found + self._linear(f"{name}.attn.Wo", mixed)
            inner = self._linear(f"{name}.mlp.Wi", self._norm(f"{name}.mlp_norm", found, 1e-5))
            passed, gate = np.split(inner, 2, axis=-1)
            found = found + self._linear(f"{name}.mlp.Wo", _gelu(passed) * gate)
        return self._norm("final_norm", found, 1e-5)

    def _linear(self, name: str, states: np.ndarray) -> np.ndarray:
        return states @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)

    def _norm(self, name: str, states: np.ndarray, epsilon: float) -> np.ndarray:
        centred = states - states.mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + epsilon)
        return scaled * self.weights[f"{name}.weight"] + self.weights.get(f"{name}.bias", 0.0)


def _gelu(states: np.ndarray) -> np.ndarray:
    return states * (1 + np.vectorize(erf)(states / np.sqrt(2))) / 2


def _attend(query: np.ndarray, key: np.ndarray, value: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    size, parts = HIDDEN // HEADS, []
    for head in range(HEADS):
        part = slice(head * size, (head + 1) * size)
        scores = query[:, part] @ key[:, part].T / np.sqrt(size)
        scores = scores if mask is None else np.where(mask, scores, -np.inf)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        parts.append(shares / shares.sum(axis=-1, keepdims=True) @ value[:, part])
    return np.concatenate(parts, axis=-1)


def _rotate(states: np.ndarray, base: float) -> np.ndarray:
    """Return states with rotary positions, as `apply_rotary_pos_emb` of transformers."""
    size = HIDDEN // HEADS
    angles = np.arange(len(states))[:, None] / base ** (np.arange(0, size, 2) / size)[None]
    cosines, sines = (np.concatenate([one, one], axis=-1) for one in (np.cos(angles), np.sin(angles)))
    parts = []
    for head in range(HEADS):
        part = states[:, head * size : (head + 1) * size]
        left, right = np.split(part, 2, axis=-1)
        parts.append(part * cosines + np.concatenate([-right, left], axis=-1) * sines)
    return np.concatenate(parts, axis=-1)
