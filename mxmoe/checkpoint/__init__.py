"""Hugging Face checkpoints: BF16, DeepSeek FP8, Kimi INT4, gpt-oss MXFP4, MXFP8 and NVFP4 in; BF16, MXFP8, NVFP4, MXFP4, INT4
out."""

from mxmoe.checkpoint.convert import Conversion, convert
from mxmoe.checkpoint.reader import Checkpoint, Weight

__all__ = ["Checkpoint", "Conversion", "Weight", "convert"]
