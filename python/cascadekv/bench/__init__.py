"""Measurements that need an inference engine; `cascade bench vllm` runs them."""
