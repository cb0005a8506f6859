"""Published quantised checkpoints: what their configuration states and which tensors make up each weight.

No module here imports torch or reads weights. `specdec.engine.model.dequantise` turns the tensors into numbers.
"""
