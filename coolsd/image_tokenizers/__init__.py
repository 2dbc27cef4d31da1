"""Image tokenizers: pixels to token ids and back."""

from coolsd.image_tokenizers.llamagen_vq import LlamaGenVQ, LlamaGenVQConfig, load_image_tokenizer

__all__ = ["LlamaGenVQ", "LlamaGenVQConfig", "load_image_tokenizer"]
