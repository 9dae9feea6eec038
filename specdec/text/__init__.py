"""Strings to tokens and back: the tokenizer, detokenization, chat templates, structured output."""
