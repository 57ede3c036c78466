"""The expected result of one update: float64, one process, one response at a time, in plain torch and transformers.

Nothing here imports rlflow, and nothing is shared with it: the equations are written out a second time, over lists of
responses instead of padded or packed tensors. "Float64" is of weights, gradients and all arithmetic, but for what the
model's own code in transformers casts to float32 (the norms' statistics and the rotary angles of Qwen2).
"""
