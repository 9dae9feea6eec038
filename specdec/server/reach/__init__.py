"""Disaggregated prefill as clients and routers request it: vLLM's and SGLang's protocols."""
