"""Prefill apart from decode, as clients and routers ask for it: vLLM's protocol and SGLang's."""
