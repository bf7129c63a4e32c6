"""Small ONNX files in the form of networks of speaker embeddings, with random weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def write_network(
    path: Path, *, size: int = 32, n_mels: int = 80, inputs: int = 3, scale: float = 1.0
) -> Path:
    """Features [batch, frames, n_mels] to vectors [batch, size]. scale: 0: it hears nothing."""
    weights = np.random.default_rng(0).standard_normal((n_mels, size)).astype(np.float32)
    nodes = [
        helper.make_node("Relu", ["feats"], ["above"]),
        helper.make_node("ReduceMean", ["above"], ["spread"], axes=[1], keepdims=0),
        helper.make_node("MatMul", ["spread", "weights"], ["embs"]),
    ]
    shape = ["batch", "frames", n_mels][-inputs:]
    graph = helper.make_graph(
        nodes,
        "speakers",
        [helper.make_tensor_value_info("feats", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("embs", TensorProto.FLOAT, ["batch", size])],
        [numpy_helper.from_array(scale * weights, "weights")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, str(path))
    return path
