"""The files of a checkpoint that specdec reads, by name."""

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
GGUF = "model.gguf"
"""A link to a GGUF file, in the folder that describes it."""
GGUF_TYPES = "gguf_types"
"""The field of its config.json that names the types of the file's matrices, the commonest first."""

COUNTS = "token_counts.json"
"""In a model's folder: {"counts": [how often token 0 occurs, token 1, …]}; those left out never do."""

HEAD_FOLDERS = ("eagle3", "eagle")
"""Where a model's own folder may hold its head."""

DESCRIBING = ("config.json", "generation_config.json", COUNTS)
"""What a model is made of, beside its weights."""

TEXT = (
    *("tokenizer.json", "tokenizer_config.json"),
    *("chat_template.jinja", "additional_chat_templates/tool_use.jinja"),
)
"""What turns texts and chats into tokens."""
