"""Making quantized files: sources as rows (`source.py`), a plan for each output (`prepare.py`), one pass over the
weights (`pipeline.py`), outputs that survive the process (`partial.py`), proofs of where tensors came from
(`record.py`). `gguftools/quantize_file.py` joins them."""
