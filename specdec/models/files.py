"""Names of a checkpoint's files."""

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
GGUF = "model.gguf"
"""Link to a GGUF file, in the folder that describes it."""
GGUF_TYPES = "gguf_types"
"""Field of that folder's config.json: the types of the file's matrices, most common first."""

COUNTS = "token_counts.json"
"""In a model's folder: {"counts": [count of token 0, token 1, …]}; missing ones are 0."""

HEAD_FOLDERS = {"eagle3": "eagle", "eagle": "eagle", "dflash": "block"}
"""Subfolders of a model's folder that may contain its draft head, with the drafter of each."""

DESCRIBING = ("config.json", "generation_config.json", COUNTS)
"""Files that describe a model, apart from its weights."""

TEXT = (
    *("tokenizer.json", "tokenizer_config.json"),
    *("chat_template.jinja", "additional_chat_templates/tool_use.jinja"),
)
"""Files of tokenizer and chat template."""
