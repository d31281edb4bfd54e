"""Resumable batches of token windows or images, and yardsticks for them."""

from jpipe.data.batches import TokenBatches
from jpipe.data.bigram import bigram_loss
from jpipe.data.images import ImageBatches, Images, Labelled, load_images
from jpipe.data.stream import TokenStream
from jpipe.data.tokens import Tokens, load_tokens
from jpipe.data.validation import Validation, validation_windows
from jpipe.data.windows import Batch

__all__ = [
    "Batch",
    "ImageBatches",
    "Images",
    "Labelled",
    "TokenBatches",
    "TokenStream",
    "Tokens",
    "Validation",
    "bigram_loss",
    "load_images",
    "load_tokens",
    "validation_windows",
]
