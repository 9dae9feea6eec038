"""From strings to tokens and back: the tokenizer, chat templates, and the grammars of outputs."""
