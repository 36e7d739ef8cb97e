"""Every error that a user can cause, one tree.

KVLoomError
├── ModelError            the model cannot be loaded
│   └── UnsupportedModel  the model loads, but its KV cache cannot be spliced
├── DocumentError         a document or a folder of documents cannot be used
├── PromptError           the question or the chat template cannot be used
│   └── ContextTooLong    the prompt does not fit the model's context
├── MethodError           unknown method or option, or a value out of range  (also a ValueError)
├── EvalError             an evaluation set or the folder of a run cannot be used  (also a ValueError)
├── ProfileError          a model's saved profile cannot be read or written
├── ClusterError          a Ray cluster cannot be used, or its workers do not start
└── StoreError            the store cannot be opened, read or written

Each message is one sentence that names the thing, the value got and what to do next; the command line prints
it as it is.
"""


class KVLoomError(Exception):
    """Base of every error that kvloom raises on purpose."""


class ModelError(KVLoomError):
    """The model cannot be loaded."""


class UnsupportedModel(ModelError):
    """The model loads, but its KV cache cannot be moved or repaired."""


class DocumentError(KVLoomError, ValueError):
    """A document or a folder of documents cannot be used."""


class PromptError(KVLoomError, ValueError):
    """The question or the chat template cannot be used."""


class ContextTooLong(PromptError):
    """The prompt, or the prompt with the answer asked for, does not fit the model's context."""


class MethodError(KVLoomError, ValueError):
    """A method or option is unknown, or a value is out of range."""


class EvalError(KVLoomError, ValueError):
    """An evaluation set, its data or the folder of a run cannot be used."""


class ProfileError(KVLoomError):
    """A model's saved profile cannot be read or written."""


class ClusterError(KVLoomError):
    """A Ray cluster cannot be used, or its workers do not start."""


class StoreError(KVLoomError):
    """The store cannot be opened, read or written."""
