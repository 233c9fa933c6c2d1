"""Models: files become specs and weights, specs and weights become something that runs.

`locate` finds the files, `checkpoint` opens them (`gguf_file`, `safetensors_dir`), `spec` holds the numbers (from
`spec_hf` or `spec_gguf`), `loader` brings the weights in, `llama` computes. To add an architecture of another shape: a
class that follows base.Model, and its line in base.MODELS.
"""
