"""English text that every Python brings along: what to train on when no file is given.

The topics behind `help("...")` are the language reference in plain English, about 0.4 MB. Many
of them quote each other whole ("compound" holds "if", "for", "while", ...): cut anywhere, about
half of a held-out tenth would also stand in the training text. So every paragraph is kept once.
"""

import platform

import numpy as np
from numpy.typing import NDArray


def python_topics() -> NDArray[np.uint8]:
    """The text of Python's help topics in alphabetical order, each paragraph once.

    Returns:
        uint8 `[num_bytes]`, UTF-8. The same for the same version of Python.

    Raises:
        ValueError: if this Python was installed without its help topics.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError(
            f"data=[] means the help topics of Python, but Python {platform.python_version()} was "
            "installed without pydoc_data: name a text file"
        ) from error
    paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    return np.frombuffer("\n\n".join(dict.fromkeys(paragraphs)).encode(), np.uint8)
