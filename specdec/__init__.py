"""specdec: distributed speculative decoding. The shared library; it knows no service."""

__version__ = "0.1.0"
