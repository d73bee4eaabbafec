"""The way back: a GGUF file as a Hugging Face folder. `run.py` is the entry."""
