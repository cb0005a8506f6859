"""Rewrite a GGUF file with its matrices stored in another type.

The `gguf` package, which is llama.cpp's, does the rounding. Called by `bench.suites.real.suite`.
"""

from pathlib import Path

import numpy as np


def rewrite(source: Path, path: Path, kind: str) -> Path:
    """Copies everything but the matrices' type; returns `path`.

    Args:
        source: a GGUF file.
        path: the new one.
        kind: `F16`, `BF16` or `Q8_0`. Vectors, and matrices whose rows fill no whole blocks, stay float32, rounded to
            `kind` where that is a float: the model has no more digits elsewhere than in its other matrices.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import dequantize, quantize

    stored = GGMLQuantizationType[kind]
    block_size, _ = GGML_QUANT_SIZES[stored]
    reader = GGUFReader(source)
    writer = GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name != "general.architecture" and not name.startswith("GGUF."):
            kinds = field.types
            sub_type = kinds[-1] if kinds[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kinds[0], sub_type=sub_type)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim > 1 and values.shape[-1] % block_size == 0:
            writer.add_tensor(tensor.name, quantize(values, stored), raw_dtype=stored)
        else:
            rounded = values if kind == "Q8_0" else dequantize(quantize(values, stored), stored)
            writer.add_tensor(tensor.name, rounded.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
